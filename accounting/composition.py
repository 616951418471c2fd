"""What several mechanisms on the same unit cost together, each figure rounded up.

A spend is either Gaussian-DP (``mu``, plus the delta that its thresholds use) or plain
(epsilon, delta).  The Gaussian parts are one Gaussian mechanism, mu^2 = sum of mu_i^2
(adaptive composition; Smith and Thakurta 2022).  A plain (e, d) mechanism adds at most e to the
privacy loss but with probability d, so that together

    delta(epsilon) <= delta_G(epsilon - sum e_i; mu) + sum d_i + sum of threshold deltas.

That is basic composition at the split which leaves the Gaussian part all of epsilon that the
plain parts do not need.  It is never below the exact composition (tests: dp-accounting's
privacy loss distributions), and exact for one plain mechanism without noise.  Many small plain
spends would compose better; their owners may charge a mu of their own instead.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from dpstream.accounting.gaussian import delta_of, epsilon_of, mu_of

#: Relative error allowed for sums of floats, squares and roots (a few ulps each).
_UP = 1 + 1e-12


class Spend(Protocol):
    """What one mechanism spends per unit.

    Attributes:
        epsilon, delta: its own guarantee.
        mu: Gaussian-DP parameter of its noise; ``None`` for a plain (epsilon, delta).
        threshold_delta: part of delta on top of the Gaussian's; 0 for a plain spend.
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
    def threshold_delta(self) -> float:
        """Delta of its thresholds."""


def delta_spent(spends: Sequence[Spend], epsilon: float) -> float:
    """Delta of the composition at epsilon, at most 1."""
    exact = _delta(spends, epsilon)
    near = float(min(exact, Fraction(1)))
    return near if near >= exact else math.nextafter(near, math.inf)


def _delta(spends: Sequence[Spend], epsilon: float) -> Fraction:
    mu, plain, extra = _parts(spends)
    left = _written(epsilon) - plain
    if mu == 0 and left >= 0:
        return extra
    return Fraction(delta_of(math.nextafter(float(left), -math.inf), mu)) + extra


def _parts(spends: Sequence[Spend]) -> tuple[float, Fraction, Fraction]:
    """mu of the Gaussian parts; epsilon and delta that come on top."""
    mu = math.sqrt(math.fsum(s.mu**2 for s in spends if s.mu is not None)) * _UP
    plain = [s for s in spends if s.mu is None]
    deltas = [*(s.delta for s in plain), *(s.threshold_delta for s in spends)]
    epsilon = sum((_written(s.epsilon) for s in plain), Fraction())
    return mu, epsilon, sum(map(_written, deltas), Fraction())


def _written(figure: float) -> Fraction:
    """A figure as a person writes it: ten times 0.1 is 1."""
    return Fraction(repr(float(figure)))


def epsilon_spent(spends: Sequence[Spend], delta: float) -> float:
    """Smallest epsilon at which the composition spends no more than delta, rounded up.

    Infinite where even the parts of delta that no epsilon pays for exceed it.
    """
    own = [s.epsilon for s in spends if len(spends) == 1 and s.delta <= delta]
    return min([*own, _epsilon(spends, delta)])


def _epsilon(spends: Sequence[Spend], delta: float) -> float:
    mu, plain, extra = _parts(spends)
    if mu == 0:
        return float(plain) if extra <= _written(delta) else math.inf
    left = math.nextafter(float(_written(delta) - extra), -math.inf)
    return (float(plain) + epsilon_of(mu, left)) * _UP if 0 < left < 1 else math.inf


def epsilon_left(spends: Sequence[Spend], epsilon: float, delta: float) -> float:
    """Largest plain epsilon (without delta) of one more spend within (epsilon, delta)."""
    return max(0.0, epsilon - _epsilon(spends, delta))


def mu_left(spends: Sequence[Spend], epsilon: float, delta: float) -> float:
    """Largest mu that one more Gaussian spend may have within (epsilon, delta), rounded down."""
    mu, plain, extra = _parts(spends)
    left_epsilon = math.nextafter(float(_written(epsilon) - plain), -math.inf)
    left_delta = math.nextafter(float(_written(delta) - extra), -math.inf)
    if not (left_epsilon > 0 and 0 < left_delta < 1):
        return 0.0
    most = mu_of(left_epsilon, left_delta)
    return math.sqrt(max(0.0, most**2 - mu**2)) / _UP


def within(spends: Sequence[Spend], epsilon: float, delta: float) -> bool:
    """Whether the spends together satisfy (epsilon, delta) per unit.

    One alone satisfies its own guarantee, which can be sharper than its parts.
    """
    if len(spends) == 1 and spends[0].epsilon <= epsilon and spends[0].delta <= delta:
        return True
    return _delta(spends, epsilon) <= _written(delta)
