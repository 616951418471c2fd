"""The rule by which an account accepts a charge: filters, each with a part of the limit's delta.

A limit (epsilon, delta) promises that all answers together are (epsilon, delta)-differentially
private per unit.  This holds also for an analyst who chooses each question, its kind and its size
**after reading all earlier answers**.  A charge is accepted if at least one filter accepts the sum
of this charge and all earlier ones:

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
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

import msgspec

from dpstream.accounting.composition import Spend, Total, divergence_of_response, written
from dpstream.accounting.gaussian import bisected, delta_of, mu_of

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
_ORDERS, _STEPS = (1.01, 1e6), 100
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
        return written(self.delta) - written(self.thresholds) - written(self.renyi)


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
        rest = written(delta) - jobs.extra - noise
        if rest < 0 or jobs.rho:
            continue
        thresholds, renyi = float(jobs.extra + written(_THRESHOLDS) * rest), float(rest) * _RENYI
        # A smaller rest is not divided: rounding these floats could take from the jobs more than
        # the rest gives to others.
        if rest < written(delta) / 10**6:
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
    for _ in range(_STEPS):
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

        def with_mu(mu: Fraction) -> Total:
            return total._replace(gauss=total.gauss + mu**2)

        return {
            "epsilon": largest(with_plain, self.epsilon + 1),
            "mu": largest(with_mu, 2 * self.epsilon + 40),
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
    parts, factor = limit.parts, written(limit.delta) / written(limit.parts.delta)
    gaussian, renyi = parts.gaussian * factor, written(parts.renyi) * factor
    mu = mu_of(limit.epsilon, _rounded_down(gaussian)) if gaussian else 0.0
    divergence = 0.0
    if renyi:
        divergence = _largest_divergence(limit.epsilon, _rounded_down(renyi), parts.order)
    return _Caps(
        written(limit.epsilon),
        Fraction(mu) ** 2,
        gaussian,
        Fraction(max(0.0, divergence)),
        written(parts.thresholds) * factor,
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
