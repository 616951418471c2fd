"""The rule by which an account accepts a charge: filters, each with a part of the limit's delta.

A limit (epsilon, delta) promises that all answers together are (epsilon, delta)-differentially
private per unit, **whoever chooses each question, its kind and its size by all answers before it**.
A charge is accepted if at least one filter accepts the sum of all charges with it:

* **plain**: the sum of the epsilons of plain charges is at most epsilon.  No delta.
* **Gaussian**: delta_G(epsilon; mu) <= delta_g for mu^2 = the sum of mu_i^2.
* **Renyi**, of one order a: the sum of a mu_i^2 / 2, of a rho_i, and of the divergences of
  randomised responses at the plain epsilons is at most
  epsilon - ln(1 - 1/a) + ln(a delta_r) / (a - 1).

A charge that has no finite bound in a filter's measure makes that filter refuse from there on; it
never counts as 0.  Every filter also needs that the **pot**, the sum of the deltas of thresholds
and of plain charges, is at most delta_t.  The parts and the order are fixed when the account is
made, delta_t + delta_g + delta_r = delta, and do not depend on any answer.

**Why that is enough** (mechanism.md section 4, "The limit of an account", has the proof).  Each
charge i splits, for each ordered pair of neighbours, into an event of probability at most its
delta_i and a rest that has its mu_i, its divergence or its epsilon_i.  The events together have at
most delta_t, since their sum stays within the pot on every path.  Sums only grow, so that a whole
transcript lies in the set A_j of the filter j that accepted its last charge.  Halting where filter
j would refuse leaves the law of the transcripts in A_j as it is; so the filter's own theorem gives
P(S and A_j) <= e^epsilon Q(S and A_j) + delta_j.  The sum over j, and the pot, give (epsilon,
delta).

Theorems of the filters, all for charges that are chosen adaptively: plain: Rogers, Roth, Ullman
and Vadhan (2016); Gaussian: Smith and Thakurta (2022), for any mu-GDP mechanisms; Renyi: Feldman
and Zrnic (2021), with the conversion of Canonne, Kamath and Steinke (2020, proposition 12);
interleaved streams and questions: Haney and others (2023).

**A raised limit** raises every part by the same factor, and the order stays: what is promised is
the highest limit that the answers could lead to.

**A first charge** whose own (epsilon, delta) is within the limit is accepted where no charge was
made before it, also if no filter would.  It takes the account for good: every later charge is
refused, also after a raise, because reopening would add its delta to those of the filters.
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
#: Filters, and the pot, as people read of them.
NAMES = {
    "plain": "sum of epsilons",
    "gaussian": "Gaussian noise",
    "renyi": "Renyi divergence",
    "pot": "delta of thresholds and plain charges",
}
#: Shares of delta of an account that no job's plan decided; the Gaussian filter has the rest.
_THRESHOLDS, _RENYI = 0.4, 0.3
#: Least and largest order of a Renyi filter, and steps of the search for the best one.
_ORDERS, _STEPS = (1.01, 1e6), 100
#: More charges of one kind than any account has.
_MOST_CHARGES = 1 << 40


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The division of an account's delta, fixed when the account is made.

    Attributes:
        delta: of the limit that the account was made with.
        thresholds: part of it for thresholds and plain charges; renyi: part of the Renyi filter.
            The Gaussian filter has the rest.
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
            raise ValueError("parts of delta are not negative, and an order is above 1")

    @property
    def gaussian(self) -> Fraction:
        """Part of the Gaussian filter."""
        return written(self.delta) - written(self.thresholds) - written(self.renyi)


def default_parts(epsilon: float, delta: float) -> Parts:
    """Return the parts of a limit where nothing is known of the charges to come."""
    renyi = _RENYI * delta
    return Parts(delta, _THRESHOLDS * delta, renyi, best_order(epsilon, renyi))


def fitted_parts(epsilon: float, delta: float, first: Spend) -> Parts:
    """Return the parts of a limit into which a first job fits, and another one like it if both can.

    They get what they need of the pot and of the Gaussian part, and the rest is divided as by
    default.  What they need is public: it follows from a plan.
    """
    for times in (2, 1):
        jobs = Total().plus(first, times)
        noise = Fraction(delta_of(epsilon, jobs.mu) if jobs.gauss else 0)
        rest = written(delta) - jobs.extra - noise
        if rest < 0 or jobs.rho:
            continue
        thresholds, renyi = float(jobs.extra + written(_THRESHOLDS) * rest), float(rest) * _RENYI
        # Of less the rounding of these floats could cost the jobs more than it gives others.
        if rest < written(delta) / 10**6:
            thresholds, renyi = float(jobs.extra), 0.0
        return Parts(delta, thresholds, renyi, best_order(epsilon, renyi or _RENYI * delta))
    return default_parts(epsilon, delta)


@functools.lru_cache(maxsize=256)
def best_order(epsilon: float, delta: float) -> float:
    """Return the Renyi order that allows Gaussian charges the most at (epsilon, delta).

    Any order is sound, so the search need not be exact.  For delta 0 the order is 2: no filter
    uses it.
    """
    if not 0 < delta < 1:
        return 2.0

    def logarithm_of_less(log_order: float) -> float:
        order = math.exp(log_order)
        return -_most_divergence(epsilon, delta, order) / order

    low, high = (math.log(order - 1) for order in _ORDERS)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if logarithm_of_less(math.log1p(math.exp(left))) <= logarithm_of_less(
            math.log1p(math.exp(right))
        ):
            high = right
        else:
            low = left
    return float(f"{1 + math.exp(low):.4g}")


def _most_divergence(epsilon: float, delta: float, order: float) -> float:
    """The divergence of an order that (epsilon, delta) allows, rounded down; it may be negative.

    Canonne, Kamath and Steinke 2020, proposition 12.
    """
    terms = (epsilon, -math.log1p(-1 / order), math.log(order * delta) / (order - 1))
    return math.fsum(terms) - 1e-12 * math.fsum(map(abs, terms))


class _Caps(NamedTuple):
    """What each filter, and the pot, may hold at most; ``delta`` is the Gaussian filter's part."""

    plain: Fraction
    gaussian: Fraction
    delta: Fraction
    renyi: Fraction
    pot: Fraction


class Limit(NamedTuple):
    """A limit and its parts; see the module.

    Attributes:
        epsilon, delta: of everything together, per unit.
        parts: fixed when the account was made, whatever the limit is now.
    """

    epsilon: float
    delta: float
    parts: Parts

    def shares(self, total: Total) -> dict[FilterName, float]:
        """Return the share of each filter that some charges use; at most 1 if it accepts them.

        A filter's share is the larger of its own and of that of the pot.  It is infinite where a
        charge has no finite bound in the filter's measure, and above 1 whenever the filter refuses.
        """
        caps, pot = _caps_of(self), self.pot_share(total)
        others = {
            "plain": total.gauss or total.rho,
            "gaussian": total.plain or total.rho,
            "renyi": Fraction(),
        }
        shares: dict[FilterName, tuple[float, bool]] = {
            "plain": (_share(total.plain, caps.plain), total.plain <= caps.plain),
            # By delta_G itself and not by the rounded mu, so that a job's own plan fits.
            "gaussian": (
                _share(total.gauss, caps.gaussian),
                not total.gauss or delta_of(self.epsilon, total.mu) <= caps.delta,
            ),
            "renyi": (_share(total.divergence, caps.renyi), total.divergence <= caps.renyi),
        }
        fits = total.extra <= caps.pot
        return {
            name: math.inf if others[name] else _consistent(max(share, pot), accepts and fits)
            for name, (share, accepts) in shares.items()
        }

    def pot_share(self, total: Total) -> float:
        """Return the share of the pot that some charges use; it may be above 1."""
        return _share(total.extra, _caps_of(self).pot)

    def accepting(self, total: Total) -> list[FilterName]:
        """Return the filters that accept the sum of some charges, the least used one first."""
        shares = self.shares(total)
        return sorted(
            (name for name, share in shares.items() if share <= 1), key=shares.__getitem__
        )

    def used(self, total: Total) -> float:
        """Return the share of the limit that some charges use: that of the filter of most room."""
        return min(self.shares(total).values())

    def scarcest(self, total: Total) -> FilterName | Literal["pot"]:
        """Return the part that decides: the pot, if it is used more than the filter of most room,
        or else that filter.
        """
        shares = self.shares(total)
        best = min(shares, key=shares.__getitem__)
        return "pot" if self.pot_share(total) >= shares[best] else best

    def holds(self, total: Total, spend: Spend) -> int:
        """Return how many more charges like ``spend`` the filters accept, at most 2^40."""
        return largest(lambda times: bool(self.accepting(total.plus(spend, times))))

    def share_left(self, total: Total, spend: Spend) -> float:
        """Return the share of what is left that one more charge takes, in the filter where it is
        least.

        Families of noise are compared by it at an equal accuracy: what is left after the one that
        takes less has room for more of everything.
        """
        before, after = self.shares(total), self.shares(total.plus(spend))
        return min(
            (share - before[name]) / (1 - before[name]) if before[name] < 1 else math.inf
            for name, share in after.items()
        )

    def left(self, total: Total) -> dict[str, float]:
        """Return the largest cost of one more charge of each kind, rounded down.

        Returns:
            Each if nothing else is charged any more: ``epsilon`` of noise without delta, ``mu`` of
            Gaussian noise, ``rho`` of zCDP, and ``delta`` of thresholds.
        """
        caps = _caps_of(self)
        pot = caps.pot - total.extra if self.accepting(total) else Fraction()

        def most(sums: Callable[[Fraction], Total], high: float) -> float:
            def refused(figure: float) -> bool:
                return not self.accepting(sums(Fraction(figure)))

            return 0.0 if refused(0.0) else bisected(refused, 0.0, high, 60)[0]

        def with_plain(epsilon: Fraction) -> Total:
            more = Fraction(divergence_of_response(float(epsilon), total.order))
            return total._replace(plain=total.plain + epsilon, responses=total.responses + more)

        return {
            "epsilon": most(with_plain, self.epsilon + 1),
            "mu": most(lambda mu: total._replace(gauss=total.gauss + mu**2), 2 * self.epsilon + 40),
            "rho": most(lambda rho: total._replace(rho=total.rho + rho), self.epsilon + 1),
            "delta": math.nextafter(float(pot), 0.0) if pot else 0.0,
        }


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest count up to 2^40 that fits, where every smaller one does."""
    if not fits(1):
        return 0
    most = 1
    while most < _MOST_CHARGES and fits(2 * most):
        most *= 2
    step = most
    while step := step // 2:
        most += step if fits(most + step) else 0
    return min(most, _MOST_CHARGES)


@functools.lru_cache(maxsize=256)
def _caps_of(limit: Limit) -> _Caps:
    parts, raised = limit.parts, written(limit.delta) / written(limit.parts.delta)
    gaussian, renyi = parts.gaussian * raised, written(parts.renyi) * raised
    most_mu = mu_of(limit.epsilon, _down(gaussian)) if gaussian else 0.0
    divergence = _most_divergence(limit.epsilon, _down(renyi), parts.order) if renyi else 0.0
    return _Caps(
        written(limit.epsilon),
        Fraction(most_mu) ** 2,
        gaussian,
        Fraction(max(0.0, divergence)),
        written(parts.thresholds) * raised,
    )


def _down(delta: Fraction) -> float:
    """A part of delta as a float that is not above it, and not above what conversions take."""
    return min(math.nextafter(float(delta), 0.0), 0.5)


def _share(used: Fraction, cap: Fraction) -> float:
    if not used:
        return 0.0
    return float(used / cap) if cap else math.inf


def _consistent(share: float, accepts: bool) -> float:
    """A share whose rounding agrees with an exact verdict."""
    return min(share, 1.0) if accepts else max(share, math.nextafter(1.0, 2.0))
