"""The joint cost of several mechanisms on the same unit, each figure rounded up.

A spend is Gaussian-DP (``mu``), zero-concentrated (``rho``) or plain (epsilon, delta); the first
two may have a delta that their thresholds use on top.

**Gaussian and plain** (mechanism.md section 4, "one Gaussian-DP mechanism").  The Gaussian parts
are one Gaussian mechanism, mu^2 = sum of mu_i^2 (adaptive composition; Smith and Thakurta 2022).  A
plain (e, d) mechanism adds at most e to the privacy loss but with probability d, so that together

    delta(epsilon) <= delta_G(epsilon - sum e_i; mu) + sum d_i + sum of threshold deltas.

That is basic composition at the split which leaves the Gaussian part all of epsilon that the
plain parts do not need.  It is never below the exact composition (tests: dp-accounting's
privacy loss distributions), and exact for one plain mechanism without noise.  Many small plain
spends would compose better; their owners may charge a mu of their own instead, or, without a
delta, rho = epsilon^2 / 2 (Bun and Steinke 2016, proposition 1.4): a record that pays a pure
budget and a zCDP budget has spent (rho + epsilon^2 / 2)-zCDP.

**zCDP** (mechanism.md section 5, the discrete Gaussian "of zCDP claims").  The rho parts are one
mechanism with the sum of their rho (Bun and Steinke 2016, lemma 2.3, adaptive).  A mu-GDP mechanism
is a function of N(0, 1) against N(mu, 1), so that it is mu^2/2-zCDP as well; nothing leads back: a
rho-zCDP mechanism need not be sqrt(2 rho)-GDP, and is never counted as if it were.  With R =
sum rho_i and delta_Z the best conversion of zCDP (Canonne, Kamath and Steinke 2020, proposition
7), both of these hold for the two kinds together, and the smaller is taken:

    delta_Z(epsilon; R + mu^2 / 2),        all of it as zCDP;
    min over 0 < x < epsilon of  delta_G(epsilon - x; mu) + delta_Z(x; R),

the second because the rho part is itself (x, delta_Z(x; R))-DP, a plain part like those above.
Every x gives a valid bound, so the search for the least need not be exact.  Without a rho part
nothing differs from the first paragraph.

**In any order.**  Spends may be interleaved, each question chosen by the answers before it: their
composition is then concurrent, and costs no more (Vadhan and Zhang 2023).  That what is spent may
be chosen on the way as well is proven for mu alone and for rho alone; where kinds are mixed, the
theorems that are cited here take each kind's share of the limit as fixed beforehand.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from dpstream.accounting.gaussian import bisected, cdp_delta, delta_of, epsilon_of, mu_of

#: Relative error allowed for sums of floats, squares and roots (a few ulps each).
_UP = 1 + 1e-12
#: Steps of the search for the best split, and of a bisection.
_SPLITS, _STEPS = 20, 60
_GOLDEN = (math.sqrt(5) - 1) / 2


class Spend(Protocol):
    """The cost of one mechanism per unit.

    Attributes:
        epsilon, delta: guarantee of this spend alone.
        mu: Gaussian-DP parameter of its noise, if that is how it is accounted for.
        rho: zCDP parameter of its noise, if that is.  With neither it is plain.
        threshold_delta: part of delta on top of that of mu or rho; 0 for a plain spend.
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


class Total(NamedTuple):
    """Any number of spends, as the few exact sums that their composition needs.

    Attributes:
        spends: how many; alone: (epsilon, delta) of the only one, which can be sharper than
            its parts.
        gauss: sum of mu^2; rho: sum of rho.
        plain: sum of the plain epsilons; extra: of the plain deltas and those of thresholds.
    """

    spends: int = 0
    alone: tuple[float, float] | None = None
    gauss: Fraction = Fraction()
    rho: Fraction = Fraction()
    plain: Fraction = Fraction()
    extra: Fraction = Fraction()

    def plus(self, spend: Spend) -> "Total":
        """Return the total with one more spend."""
        gauss, rho, plain, extra = self.gauss, self.rho, self.plain, self.extra
        if spend.mu is not None:
            gauss += Fraction(spend.mu) ** 2
        if spend.rho is not None:
            rho += _written(spend.rho)
        if spend.mu is None and spend.rho is None:
            plain, extra = plain + _written(spend.epsilon), extra + _written(spend.delta)
        if spend.threshold_delta:
            extra += _written(spend.threshold_delta)
        alone = None if self.spends else (spend.epsilon, spend.delta)
        return Total(self.spends + 1, alone, gauss, rho, plain, extra)

    @property
    def mu(self) -> float:
        """mu of the Gaussian parts, rounded up."""
        return math.sqrt(float(self.gauss)) * _UP

    def within(self, epsilon: float, delta: float) -> bool:
        """Return whether the spends together satisfy (epsilon, delta) per unit."""
        if self.alone is not None and self.alone[0] <= epsilon and self.alone[1] <= delta:
            return True
        return any(bound <= _written(delta) for bound in self._deltas(epsilon))

    def delta(self, epsilon: float) -> Fraction:
        """Return delta of the composition at epsilon; it may exceed 1."""
        return min(self._deltas(epsilon))

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at which the parts spend no more than delta, rounded up."""
        if not self.gauss and not self.rho:
            return float(self.plain) if self.extra <= _written(delta) else math.inf
        left = math.nextafter(float(_written(delta) - self.extra), -math.inf)
        if not 0 < left < 1:
            return math.inf
        if not self.rho:
            return (float(self.plain) + epsilon_of(self.mu, left)) * _UP
        noise = self._replace(plain=Fraction(), extra=Fraction())
        return (float(self.plain) + noise._least(left)) * _UP

    def _least(self, delta: float) -> float:
        """Least epsilon of the noise alone, as far as a bisection finds it from above.

        Infinite where no float is enough.
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
        left = _written(epsilon) - self.plain
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
def _written(figure: float) -> Fraction:
    """A figure as a person writes it: ten times 0.1 is 1."""
    return Fraction(repr(float(figure)))


def total_of(spends: Sequence[Spend] | Total) -> Total:
    """Return the sums of these spends; a ``Total`` is returned as it is."""
    return spends if isinstance(spends, Total) else functools.reduce(Total.plus, spends, Total())


def epsilon_spent(spends: Sequence[Spend] | Total, delta: float) -> float:
    """Return the smallest epsilon at which the composition spends no more than delta, rounded up.

    Infinite where even the parts of delta that no epsilon pays for exceed it.
    """
    total = total_of(spends)
    own = [total.alone[0]] if total.alone is not None and total.alone[1] <= delta else []
    return min([*own, total.epsilon(delta)])


def epsilon_left(spends: Sequence[Spend] | Total, epsilon: float, delta: float) -> float:
    """Return the largest plain epsilon (delta 0) of one more spend within (epsilon, delta)."""
    return max(0.0, epsilon - total_of(spends).epsilon(delta))


def mu_left(spends: Sequence[Spend] | Total, epsilon: float, delta: float) -> float:
    """Return the largest mu of one more Gaussian spend within (epsilon, delta), rounded down."""
    total = total_of(spends)._replace(alone=None)
    left_epsilon = math.nextafter(float(_written(epsilon) - total.plain), -math.inf)
    left_delta = math.nextafter(float(_written(delta) - total.extra), -math.inf)
    if not (left_epsilon > 0 and 0 < left_delta < 1):
        return 0.0
    most = mu_of(left_epsilon, left_delta)
    if not total.rho:
        return math.sqrt(max(0.0, most**2 - total.mu**2)) / _UP
    return _most(
        lambda mu: total._replace(gauss=total.gauss + Fraction(mu) ** 2), most, epsilon, delta
    )


def rho_left(spends: Sequence[Spend] | Total, epsilon: float, delta: float) -> float:
    """Return the largest rho of one more zCDP spend within (epsilon, delta), rounded down."""
    total = total_of(spends)._replace(alone=None)
    # Where more would fit, delta is so large that nobody gives it.
    return _most(
        lambda rho: total._replace(rho=total.rho + _written(rho)), epsilon + 1.0, epsilon, delta
    )


def left_within(spends: Sequence[Spend] | Total, limit: tuple[float, float]) -> dict[str, float]:
    """Return the largest cost of one more question within a limit.

    Args:
        spends: what is charged so far.
        limit: (epsilon, delta) of everything together.

    Returns:
        Each if nothing else is charged any more: ``epsilon`` of noise without delta, ``mu`` of
        Gaussian noise, ``rho`` of zCDP.
    """
    return {
        "epsilon": epsilon_left(spends, *limit),
        "mu": mu_left(spends, *limit),
        "rho": rho_left(spends, *limit),
    }


#: More charges of one kind than any account holds.
_MOST_CHARGES = 1 << 40


def times_left(spends: Sequence[Spend] | Total, spend: Spend, epsilon: float, delta: float) -> int:
    """Return how many more spends like ``spend`` fit into (epsilon, delta), at most 2^40."""
    total, one = total_of(spends), total_of([spend])

    def fits(times: int) -> bool:
        sums = [a + times * b for a, b in zip(total[2:], one[2:], strict=True)]
        alone = one.alone if times == 1 and not total.spends else None
        return Total(total.spends + times, alone, *sums).within(epsilon, delta)

    if not fits(1):
        return 0
    most = 1
    while most < _MOST_CHARGES and fits(2 * most):
        most *= 2
    step = most
    while step := step // 2:
        most += step if fits(most + step) else 0
    return min(most, _MOST_CHARGES)


class Limit(NamedTuple):
    """The public part of an account that a choice between mechanisms uses.

    Attributes:
        total: sum of all charges, on their common unit.
        epsilon, delta: the limit.
    """

    total: Total
    epsilon: float
    delta: float

    def holds(self, spend: Spend) -> int:
        """Return how many more spends like this one the limit allows."""
        return times_left(self.total, spend, self.epsilon, self.delta)

    def share(self, spend: Spend) -> float:
        """Return the share of the rest that a Gaussian or plain spend takes.

        It is the larger of its shares of mu^2 or epsilon, and of delta; infinite where nothing of
        one of them is left.
        """
        promise = self.epsilon, self.delta
        if spend.mu is None:
            most_epsilon = epsilon_left(self.total, *promise)
            share, extra = (spend.epsilon / most_epsilon if most_epsilon else math.inf), spend.delta
        else:
            most_mu = mu_left(self.total, *promise)
            share = (spend.mu / most_mu) ** 2 if most_mu else math.inf
            extra = spend.threshold_delta
        delta = self.delta - float(self.total.extra)
        return share if not extra else max(share, extra / delta if delta > 0 else math.inf)

    def equal_share(self, spend: Spend, plain: Spend) -> float:
        """Return the factor of a plain spend's epsilon at which its share is that of another spend.

        Returns:
            At most 1: a spend whose share is not larger stays as it is.  0 where nothing is left
            for plain spends, and something for the other one.
        """
        other, share = self.share(spend), self.share(plain)
        return 1.0 if other >= share else other / share


def _most(more: Callable[[float], Total], high: float, epsilon: float, delta: float) -> float:
    """The largest figure below ``high`` that a bisection finds to fit, 0 if none does."""
    return bisected(lambda x: not more(x).within(epsilon, delta), 0.0, high, _STEPS)[0]


def within(spends: Sequence[Spend], epsilon: float, delta: float) -> bool:
    """Return whether the spends together satisfy (epsilon, delta) per unit.

    One alone satisfies its own guarantee, which can be sharper than its parts.
    """
    return total_of(spends).within(epsilon, delta)
