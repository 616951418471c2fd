"""The joint cost of several mechanisms on the same unit, each figure rounded up.

A spend is Gaussian-DP (``mu``), zero-concentrated (``rho``) or plain (epsilon, delta); the first
two may have an additional delta for thresholds.  ``Total`` has the sums, and
the epsilon that is *reported* for charges whose kinds and sizes were fixed beforehand; ``Limit``
decides by them what an account accepts.

**Gaussian and plain** (mechanism.md section 4, "one Gaussian-DP mechanism").  The Gaussian parts
are one Gaussian mechanism, mu^2 = sum of mu_i^2 (Dong, Roth and Su 2022).  A plain (e, d) mechanism
adds at most e to the privacy loss, except with probability d, so that together

    delta(epsilon) <= delta_G(epsilon - sum e_i; mu) + sum d_i + sum of threshold deltas.

That is basic composition: the Gaussian part gets the epsilon that the plain parts do not need.  It
is never below the exact composition (tests compare it with dp-accounting's privacy loss
distributions), and exact for one plain mechanism without Gaussian noise.

**zCDP** (mechanism.md section 5, the discrete Gaussian "of zCDP claims").  The rho parts are one
mechanism with the sum of their rho (Bun and Steinke 2016, lemma 2.3).  A mu-GDP mechanism
is a function of N(0, 1) against N(mu, 1), so it is also mu^2/2-zCDP.  The converse is false: a
rho-zCDP mechanism need not be sqrt(2 rho)-GDP, and is never counted as if it were.  With R =
sum rho_i and delta_Z the best conversion of zCDP (Canonne, Kamath and Steinke 2020, proposition
7), both of these hold for the two kinds together, and the smaller is used:

    delta_Z(epsilon; R + mu^2 / 2),        all of it as zCDP;
    min over 0 < x < epsilon of  delta_G(epsilon - x; mu) + delta_Z(x; R),

the second because the rho part is itself (x, delta_Z(x; R))-DP, a plain part like those above.
Every x gives a valid bound, so the search for the least need not be exact.  Without a rho part the
rule for Gaussian and plain spends is used alone.

**Acceptance.** An account accepts a charge by filters, each of which has a part of the limit's
delta.  A limit (epsilon, delta) promises that all answers together are (epsilon,
delta)-differentially private per unit.  This holds also for an analyst who chooses each question,
its kind and its size **after reading all earlier answers**.  A charge is accepted if at least one
filter accepts the sum of this charge and all earlier ones:

* **plain**: the sum of the epsilons of plain charges is at most epsilon.  It uses no part of delta.
* **Gaussian**: delta_G(epsilon; mu) <= delta_g for mu^2 = the sum of mu_i^2.
* **Renyi**, of one order a: the sum of a mu_i^2 / 2, of a rho_i, and of the divergences of
  randomised responses at the plain epsilons is at most
  epsilon - ln(1 - 1/a) + ln(a delta_r) / (a - 1).

A charge that has no finite bound in a filter's measure makes that filter refuse this charge and
every later one; it never counts as 0.  Every filter also requires that the **delta sum**, the sum
of the deltas of thresholds and of plain charges, is at most delta_t.  The parts of delta (delta_t +
delta_g + delta_r = delta) and the order are fixed when the account is made, and do not depend on
any answer.

**Why that is enough** (mechanism.md section 4, "The limit of an account", has the proof).  Each
charge i splits, for each ordered pair of neighbours, into an event of probability at most delta_i
and a remainder that is bounded by mu_i, by its divergence or by epsilon_i.  All events together
have probability at most delta_t, because the delta sum is at most delta_t on every path.  Sums
only grow, so a complete transcript lies in the set A_j of the filter j that accepted its last
charge.  Stopping where filter j would refuse does not change the law of the transcripts in A_j; so
the theorem of the filter gives P(S and A_j) <= e^epsilon Q(S and A_j) + delta_j.  The sum over j
and the delta sum give (epsilon, delta).

Theorems of the filters, all for charges that are chosen adaptively: plain: Rogers, Roth, Ullman
and Vadhan (2016); Gaussian: Smith and Thakurta (2022), for any mu-GDP mechanisms; Renyi: Feldman
and Zrnic (2021), with the conversion of Canonne, Kamath and Steinke (2020, proposition 12);
interleaved streams and questions: Haney and others (2023).

**A raised limit** multiplies every part by the same factor and keeps the order.  The promise is
that of the highest limit that the answers could lead to.

**A first charge** is accepted if no charge was made before it and its own (epsilon, delta) is
within the limit, even if no filter accepts it.  Every later charge is then refused, also after the
limit is raised, because a later charge would add the delta of a filter to that of the first charge.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

import msgspec

from dpstream.accounting.gaussian import bisected, cdp_delta, delta_of, epsilon_of, mu_of

#: Relative error allowed for a sum, a logarithm or a root of floats (a few ulps each).
_UP = 1 + 1e-12
#: Steps of the search for the best split, and of a bisection.
_SPLITS, _STEPS = 20, 60
_GOLDEN = (math.sqrt(5) - 1) / 2


class Spend(Protocol):
    """The cost of one mechanism per unit.

    Attributes:
        epsilon, delta: guarantee of this spend alone.
        mu: Gaussian-DP parameter of its noise; ``None`` if it is not Gaussian.
        rho: zCDP parameter of its noise; ``None`` if it is not zero-concentrated.  A spend without
            mu and rho is plain.
        threshold_delta: delta of thresholds, in addition to that of mu or rho; 0 for a plain spend.
    """

    @property
    def epsilon(self) -> float:
        """Epsilon of its own guarantee."""

    @property
    def delta(self) -> float:
        """Delta of its own guarantee."""

    @property
    def mu(self) -> float | None:
        """Gaussian-DP parameter, if it is Gaussian."""

    @property
    def rho(self) -> float | None:
        """zCDP parameter, if it is zero-concentrated."""

    @property
    def threshold_delta(self) -> float:
        """Delta of its thresholds."""


class Cost(NamedTuple):
    """A spend that is no charge yet; see `Spend`."""

    epsilon: float
    delta: float
    mu: float | None = None
    threshold_delta: float = 0.0
    rho: float | None = None


class Total(NamedTuple):
    """Any number of spends, as the few exact sums that their composition needs.

    Attributes:
        spends: number of spends.
        alone: (epsilon, delta) of a single spend, which can be smaller than what its sums give.
        gauss: sum of mu^2; rho: sum of rho.
        plain: sum of the plain epsilons; extra: sum of the plain deltas and of those of thresholds.
        responses: sum of the Renyi divergences of randomised responses at the plain epsilons, of
            the order ``order``, in nats.
        order: Renyi order, above 1; fixed before the first spend.
    """

    spends: int = 0
    alone: tuple[float, float] | None = None
    gauss: Fraction = Fraction()
    rho: Fraction = Fraction()
    plain: Fraction = Fraction()
    extra: Fraction = Fraction()
    responses: Fraction = Fraction()
    order: float = 2.0

    def plus(self, spend: Spend, times: int = 1) -> "Total":
        """Return the total with one more spend, or several that are alike."""
        gauss, rho, plain, extra, responses = self[2:7]
        if spend.mu is not None:
            gauss += times * Fraction(spend.mu) ** 2
        if spend.rho is not None:
            rho += times * decimal_value(spend.rho)
        if spend.mu is None and spend.rho is None:
            plain, extra = (
                plain + times * decimal_value(spend.epsilon),
                extra + times * decimal_value(spend.delta),
            )
            responses += times * Fraction(divergence_of_response(spend.epsilon, self.order))
        if spend.threshold_delta:
            extra += times * decimal_value(spend.threshold_delta)
        alone = (spend.epsilon, spend.delta) if self.spends + times == 1 else None
        return Total(self.spends + times, alone, gauss, rho, plain, extra, responses, self.order)

    @property
    def divergence(self) -> Fraction:
        """Renyi divergence of order ``order`` of all spends, in nats, without ``extra``.

        mu-GDP is a function of N(0, 1) against N(mu, 1), whose divergence is order mu^2 / 2; that
        of rho-zCDP is at most order rho; and a plain epsilon is a function of the randomised
        response (Kairouz, Oh and Viswanath 2015).
        """
        return Fraction(self.order) * (self.gauss / 2 + self.rho) + self.responses

    @property
    def mu(self) -> float:
        """mu of the Gaussian parts, the least float that is not below it."""
        mu = math.nextafter(math.sqrt(float(self.gauss)), 0.0)
        while Fraction(mu) ** 2 < self.gauss:
            mu = math.nextafter(mu, math.inf)
        return mu

    def delta(self, epsilon: float) -> Fraction:
        """Return delta of the composition at epsilon; it may exceed 1."""
        return min(self._deltas(epsilon))

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at which all spends use at most delta, rounded up."""
        if not self.gauss and not self.rho:
            return float(self.plain) if self.extra <= decimal_value(delta) else math.inf
        left = math.nextafter(float(decimal_value(delta) - self.extra), -math.inf)
        if not 0 < left < 1:
            return math.inf
        if not self.rho:
            return (float(self.plain) + epsilon_of(self.mu, left)) * _UP
        noise = self._replace(plain=Fraction(), extra=Fraction())
        return (float(self.plain) + noise._least(left)) * _UP

    def _least(self, delta: float) -> float:
        """Return the least epsilon of the noise alone, rounded up by a bisection.

        It is infinite if no float is large enough.
        """

        def fits(epsilon: float) -> bool:
            return any(bound <= delta for bound in self._noise(epsilon))

        high = 1.0
        while not fits(high):
            high *= 2
            if not math.isfinite(high):
                return math.inf
        return bisected(fits, 0.0, high, _STEPS)[1]

    def _deltas(self, epsilon: float) -> Iterator[Fraction]:
        """Upper bounds of delta at epsilon, the cheapest first."""
        left = decimal_value(epsilon) - self.plain
        if not self.gauss and not self.rho and left >= 0:
            yield self.extra
        else:
            for bound in self._noise(math.nextafter(float(left), -math.inf)):
                yield Fraction(bound) + self.extra

    def _noise(self, epsilon: float) -> Iterator[float]:
        """Upper bounds of the noisy parts' delta."""
        if not self.rho:
            yield delta_of(epsilon, self.mu)
        elif epsilon <= 0:
            yield 1.0
        else:
            yield _delta_of_rho(float(self.rho + self.gauss / 2), epsilon)
            if self.gauss:
                mu, rho = self.mu, float(self.rho)
                yield _least_of(
                    lambda x: delta_of(epsilon - x, mu) + _delta_of_rho(rho, x), epsilon
                )


@functools.lru_cache(maxsize=4096)
def divergence_of_response(epsilon: float, order: float) -> float:
    """Return the Renyi divergence of a randomised response at epsilon, rounded up, in nats.

    No epsilon-DP mechanism has a larger one, because each is a function of a randomised response.
    With p = e^epsilon / (1 + e^epsilon) and b = order - 1 the divergence is
    ln(p e^(b epsilon) + (1 - p) e^(-b epsilon)) / b.  The factor e^(b epsilon) is taken out of the
    logarithm, so that nothing overflows and a small epsilon keeps its digits:
    (b epsilon + ln(1 - (1 - p) (1 - e^(-2 b epsilon)))) / b.
    """
    order_less_one = order - 1
    lie = 1 / (1 + math.exp(min(epsilon, 700.0)))  # 1 - p
    inner = lie * -math.expm1(-2 * order_less_one * epsilon)
    # A bound of the float error of the difference: a few ulps of its larger term.
    error = 16 * 2.0**-52 * (1 + 1 / order_less_one) * epsilon
    return min(epsilon, (epsilon + math.log1p(-inner) / order_less_one) * _UP + error)


def _delta_of_rho(rho: float, epsilon: float) -> float:
    """delta_Z, rounded up beyond the float error of its exponent."""
    above = rho * _UP
    return math.nextafter(cdp_delta(above, epsilon) * (1 + 1e-12 * (1 + above + epsilon)), math.inf)


def _least_of(bound: Callable[[float], float], epsilon: float) -> float:
    """The least of some values of a bound on (0, epsilon), by golden section."""
    low, high = 0.0, epsilon
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = bound(left), bound(right)
    least = min(at_left, at_right)
    for _ in range(_SPLITS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = bound(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = bound(right)
        least = min(least, at_left, at_right)
    return least


@functools.lru_cache(maxsize=4096)
def decimal_value(figure: float) -> Fraction:
    """Return the number that a float's shortest decimal text stands for, exactly.

    A limit of 1 then takes ten charges of 0.1, as whoever wrote them expects.
    """
    return Fraction(repr(float(figure)))


def total_of(spends: Sequence[Spend] | Total) -> Total:
    """Return the sums of these spends; a ``Total`` is returned as it is."""
    return spends if isinstance(spends, Total) else functools.reduce(Total.plus, spends, Total())


def epsilon_spent(spends: Sequence[Spend] | Total, delta: float) -> float:
    """Return the smallest epsilon at which the composition spends at most delta, rounded up.

    It is valid for charges whose kinds and sizes were fixed beforehand.  It is infinite where the
    deltas of thresholds and plain charges alone exceed delta.
    """
    total = total_of(spends)
    if not total.spends:
        return 0.0
    own = [total.alone[0]] if total.alone is not None and total.alone[1] <= delta else []
    return min([*own, total.epsilon(delta)])


FilterName = Literal["plain", "gaussian", "renyi"]
#: Names of the filters, and of the delta sum, in texts for people.
NAMES = {
    "plain": "sum of epsilons",
    "gaussian": "Gaussian noise",
    "renyi": "Renyi divergence",
    "delta_sum": "delta of thresholds and plain charges",
}
#: Shares of delta where no job's plan decides them; the Gaussian filter has the rest.
_THRESHOLDS, _RENYI = 0.4, 0.3
#: Least and largest order of a Renyi filter, and steps of the search for the best one.
_ORDERS, _ORDER_STEPS = (1.01, 1e6), 100
#: Upper bound of the number of charges of one kind in an account.
_MOST_CHARGES = 1 << 40


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The division of an account's delta, fixed when the account is made.

    Attributes:
        delta: delta of the limit that the account was made with.
        thresholds: part of delta for thresholds and plain charges.
        renyi: part of delta of the Renyi filter.  The Gaussian filter has the rest.
        order: order of the Renyi filter, above 1.

    Raises:
        ValueError: the parts are more than delta, or the order is not above 1.
    """

    delta: float
    thresholds: float
    renyi: float
    order: float

    def __post_init__(self) -> None:
        negative = self.thresholds < 0 or self.renyi < 0 or self.gaussian < 0
        if negative or not 1 < self.order < math.inf:
            raise ValueError("parts of delta must not be negative, and the order must be above 1")

    @property
    def gaussian(self) -> Fraction:
        """Part of delta of the Gaussian filter."""
        return (
            decimal_value(self.delta) - decimal_value(self.thresholds) - decimal_value(self.renyi)
        )


def default_parts(epsilon: float, delta: float) -> Parts:
    """Return the parts of a limit where nothing is known about future charges."""
    renyi = _RENYI * delta
    return Parts(delta, _THRESHOLDS * delta, renyi, best_order(epsilon, renyi))


def fitted_parts(epsilon: float, delta: float, first: Spend) -> Parts:
    """Return the parts of a limit that accepts a first job, and a second equal job if both fit.

    The threshold part and the Gaussian part get what these jobs need; the rest of delta is divided
    by the default shares.  What the jobs need is public, because it follows from a plan.
    """
    for times in (2, 1):
        jobs = Total().plus(first, times)
        noise = Fraction(delta_of(epsilon, jobs.mu) if jobs.gauss else 0)
        rest = decimal_value(delta) - jobs.extra - noise
        if rest < 0 or jobs.rho:
            continue
        thresholds, renyi = (
            float(jobs.extra + decimal_value(_THRESHOLDS) * rest),
            float(rest) * _RENYI,
        )
        # A smaller rest is not divided: rounding these floats could take from the jobs more than
        # the rest gives to others.
        if rest < decimal_value(delta) / 10**6:
            thresholds, renyi = float(jobs.extra), 0.0
        return Parts(delta, thresholds, renyi, best_order(epsilon, renyi or _RENYI * delta))
    return default_parts(epsilon, delta)


@functools.lru_cache(maxsize=256)
def best_order(epsilon: float, delta: float) -> float:
    """Return the Renyi order that allows the largest Gaussian charges at (epsilon, delta).

    Every order is valid, so the search need not be exact.  For delta 0 the order is 2, and no
    filter uses it.
    """
    if not 0 < delta < 1:
        return 2.0

    def negative_rho(log_order: float) -> float:
        order = math.exp(log_order)
        return -_largest_divergence(epsilon, delta, order) / order

    low, high = (math.log(order - 1) for order in _ORDERS)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_ORDER_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if negative_rho(math.log1p(math.exp(left))) <= negative_rho(math.log1p(math.exp(right))):
            high = right
        else:
            low = left
    return float(f"{1 + math.exp(low):.4g}")


def _largest_divergence(epsilon: float, delta: float, order: float) -> float:
    """The largest divergence of an order that (epsilon, delta) allows, rounded down.

    It may be negative.  Canonne, Kamath and Steinke 2020, proposition 12.
    """
    terms = (epsilon, -math.log1p(-1 / order), math.log(order * delta) / (order - 1))
    return math.fsum(terms) - 1e-12 * math.fsum(map(abs, terms))


class _Caps(NamedTuple):
    """The largest sum of each filter and of deltas; ``delta`` is the Gaussian filter's part."""

    plain: Fraction
    gaussian: Fraction
    delta: Fraction
    renyi: Fraction
    delta_sum: Fraction


class Limit(NamedTuple):
    """A limit and its parts; see the module.

    Attributes:
        epsilon, delta: guarantee of all charges together, per unit.
        parts: the parts that were fixed when the account was made; a later limit keeps them.
    """

    epsilon: float
    delta: float
    parts: Parts

    def shares(self, total: Total) -> dict[FilterName, float]:
        """Return the share of each filter that some charges use; at most 1 if it accepts them.

        A filter's share is at least the share of the delta sum.  It is infinite where a charge has
        no finite bound in the filter's measure, and above 1 whenever the filter refuses.
        """
        caps, of_deltas = _caps_of(self), self.delta_sum_share(total)
        others = {
            "plain": total.gauss or total.rho,
            "gaussian": total.plain or total.rho,
            "renyi": Fraction(),
        }
        shares: dict[FilterName, tuple[float, bool]] = {
            "plain": (_share(total.plain, caps.plain), total.plain <= caps.plain),
            # Decided by delta_G and not by the rounded mu, so that the job of a plan fits exactly.
            "gaussian": (
                _share(total.gauss, caps.gaussian),
                not total.gauss or delta_of(self.epsilon, total.mu) <= caps.delta,
            ),
            "renyi": (_share(total.divergence, caps.renyi), total.divergence <= caps.renyi),
        }
        fits = total.extra <= caps.delta_sum
        return {
            name: math.inf if others[name] else _consistent(max(share, of_deltas), accepts and fits)
            for name, (share, accepts) in shares.items()
        }

    def delta_sum_share(self, total: Total) -> float:
        """Return the share of delta_t that the deltas of some charges use; it may be above 1."""
        return _share(total.extra, _caps_of(self).delta_sum)

    def accepting(self, total: Total) -> list[FilterName]:
        """Return the filters that accept the sum of some charges, the least used one first."""
        shares = self.shares(total)
        return sorted(
            (name for name, share in shares.items() if share <= 1), key=shares.__getitem__
        )

    def used(self, total: Total) -> float:
        """Return the share of the limit that some charges use: that of the least used filter."""
        return min(self.shares(total).values())

    def deciding_part(self, total: Total) -> FilterName | Literal["delta_sum"]:
        """Return the part that decides: the delta sum, if it uses at least as large a share as the
        least used filter, or else that filter.
        """
        shares = self.shares(total)
        best = min(shares, key=shares.__getitem__)
        return "delta_sum" if self.delta_sum_share(total) >= shares[best] else best

    def further_charges(self, total: Total, spend: Spend) -> int:
        """Return how many more charges like ``spend`` the filters accept, at most 2^40."""
        return largest_count(lambda times: bool(self.accepting(total.plus(spend, times))))

    def share_of_rest(self, total: Total, spend: Spend) -> float:
        """Return the share of the unused limit that one more charge takes, in the filter where it
        is smallest.

        Families of noise are compared by this share at an equal accuracy: the family that takes
        less leaves more for charges of every kind.
        """
        before, after = self.shares(total), self.shares(total.plus(spend))
        return min(
            (share - before[name]) / (1 - before[name]) if before[name] < 1 else math.inf
            for name, share in after.items()
        )

    def left(self, total: Total) -> dict[str, float]:
        """Return the largest cost of one more charge of each kind, rounded down.

        Returns:
            ``epsilon`` of noise without delta, ``mu`` of Gaussian noise, ``rho`` of zCDP, and
            ``delta`` of thresholds; each if the other three are not charged.
        """
        caps = _caps_of(self)
        delta = caps.delta_sum - total.extra if self.accepting(total) else Fraction()

        def largest(total_with: Callable[[Fraction], Total], high: float) -> float:
            def refused(cost: float) -> bool:
                return not self.accepting(total_with(Fraction(cost)))

            return 0.0 if refused(0.0) else bisected(refused, 0.0, high, 60)[0]

        def with_plain(epsilon: Fraction) -> Total:
            divergence = Fraction(divergence_of_response(float(epsilon), total.order))
            plain, responses = total.plain + epsilon, total.responses + divergence
            return total._replace(plain=plain, responses=responses)

        return {
            "epsilon": largest(with_plain, self.epsilon + 1),
            "mu": largest(
                lambda mu: total._replace(gauss=total.gauss + mu**2), 2 * self.epsilon + 40
            ),
            "rho": largest(lambda rho: total._replace(rho=total.rho + rho), self.epsilon + 1),
            "delta": math.nextafter(float(delta), 0.0) if delta else 0.0,
        }


def largest_count(fits: Callable[[int], bool]) -> int:
    """Return the largest count up to 2^40 that fits, if every smaller count fits too."""
    if not fits(1):
        return 0
    count = 1
    while count < _MOST_CHARGES and fits(2 * count):
        count *= 2
    step = count
    while step := step // 2:
        count += step if fits(count + step) else 0
    return min(count, _MOST_CHARGES)


@functools.lru_cache(maxsize=256)
def _caps_of(limit: Limit) -> _Caps:
    parts, factor = limit.parts, decimal_value(limit.delta) / decimal_value(limit.parts.delta)
    gaussian, renyi = parts.gaussian * factor, decimal_value(parts.renyi) * factor
    mu = mu_of(limit.epsilon, _rounded_down(gaussian)) if gaussian else 0.0
    divergence = 0.0
    if renyi:
        divergence = _largest_divergence(limit.epsilon, _rounded_down(renyi), parts.order)
    return _Caps(
        decimal_value(limit.epsilon),
        Fraction(mu) ** 2,
        gaussian,
        Fraction(max(0.0, divergence)),
        decimal_value(parts.thresholds) * factor,
    )


def _rounded_down(delta: Fraction) -> float:
    """A part of delta as a float that is not above it, and at most 1/2 for the conversions."""
    return min(math.nextafter(float(delta), 0.0), 0.5)


def _share(used: Fraction, cap: Fraction) -> float:
    if not used:
        return 0.0
    return float(used / cap) if cap else math.inf


def _consistent(share: float, accepts: bool) -> float:
    """A share that is at most 1 exactly if the filter accepts, whatever its rounding was."""
    return min(share, 1.0) if accepts else max(share, math.nextafter(1.0, 2.0))
