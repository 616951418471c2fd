"""Figures of two-sided geometric noise, P[z = k] proportional to e^(-|k| / scale), rounded up."""

import functools
import math
from fractions import Fraction

from dpstream.accounting import geometric
from dpstream.accounting.strategies import GeometricStrategy
from dpstream.accounting.strategies.geometric import IDENTITY

#: Far above the float error of an exponential and a division.
_UP = 1 + 1e-12


def geometric_sd(scale: float) -> float:
    """sd of one draw, rounded up."""
    return geometric.geometric_sd(scale) * _UP


def scale_for(sensitivity: int, share: Fraction, epsilon: float) -> float:
    """The least float that is at least sensitivity / (share epsilon).

    Args:
        sensitivity: L1 sensitivity of the noised numbers.
        share: of epsilon; the shares of all streams add up to at most 1.
        epsilon: of all streams.  The scale is enough for the exact float and for its decimal form.
    """
    least_epsilon = min(Fraction(epsilon), Fraction(repr(float(epsilon))))
    exact = Fraction(sensitivity) / (share * least_epsilon)
    scale = float(exact)
    return scale if Fraction(scale) >= exact else math.nextafter(scale, math.inf)


@functools.lru_cache(maxsize=16)
def geometric_encoders(triggers: int) -> tuple[GeometricStrategy, ...]:
    """Encoders to choose from: noise for each step, and the p-identity where there is one."""
    identity = GeometricStrategy(triggers, IDENTITY)
    mixed = GeometricStrategy(triggers)
    return (identity, mixed) if len(mixed.parameters) > 1 else (identity,)
