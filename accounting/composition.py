"""The joint cost of several mechanisms on the same unit, each figure rounded up.

A spend is Gaussian-DP (``mu``), zero-concentrated (``rho``) or plain (epsilon, delta); the first
two may have an additional delta for thresholds.  ``Total`` has the sums.  `accounting.filters`
decides by them what an account accepts; this module computes the epsilon that is *reported* for
charges whose kinds and sizes were fixed beforehand.

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
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from dpstream.accounting.gaussian import bisected, cdp_delta, delta_of, epsilon_of

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
            rho += times * written(spend.rho)
        if spend.mu is None and spend.rho is None:
            plain, extra = (
                plain + times * written(spend.epsilon),
                extra + times * written(spend.delta),
            )
            responses += times * Fraction(divergence_of_response(spend.epsilon, self.order))
        if spend.threshold_delta:
            extra += times * written(spend.threshold_delta)
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
            return float(self.plain) if self.extra <= written(delta) else math.inf
        left = math.nextafter(float(written(delta) - self.extra), -math.inf)
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
        left = written(epsilon) - self.plain
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
def written(figure: float) -> Fraction:
    """Return a figure as a person writes it: ten times 0.1 is 1."""
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
