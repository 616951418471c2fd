"""Figures of two-sided geometric noise: P[Z = k] is proportional to q^|k|, q = e^(-1 / scale)."""

import math
from fractions import Fraction

#: Truncation in scales below which truncated noise counts as uniform.
_UNIFORM = 1e-3
#: Scale below which q is too small for a float, and its root is not.
_TINY = 1 / 600
#: Far above the float error of exponentials and a division.
_UP = 1 + 1e-12


def geometric_sd(scale: float) -> float:
    """sd of one draw, sqrt(2 q) / (1 - q), to the accuracy of floats."""
    root = math.sqrt(2 * math.exp(-1 / scale))
    if scale < _TINY:
        root = math.sqrt(2) * math.exp(-0.5 / scale)
    return root / -math.expm1(-1 / scale)


def geometric_sd_above(scale: float) -> float:
    """The same, rounded up."""
    return geometric_sd(scale) * _UP


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


def truncated_sd(scale: float, most: int) -> float:
    """sd of one draw that is truncated to [-most, most]."""
    ratio, step = math.exp(-1 / scale), -math.expm1(-1 / scale)
    if most * step < _UNIFORM:  # all values have about the same chance
        return math.sqrt(most * (most + 1) / 3)
    last = math.exp(-most / scale)
    total = step - 2 * ratio * math.expm1(-most / scale)
    squares = 1 + ratio - last * ((most * step + 1) ** 2 + ratio)
    return math.sqrt(2 * ratio * squares / total) / step
