"""Figures of two-sided geometric noise: P[Z = k] is proportional to q^|k|, q = e^(-1 / scale)."""

import math

#: Truncation in scales below which truncated noise counts as uniform.
_UNIFORM = 1e-3
#: Scale below which q is too small for a float, and its root is not.
_TINY = 1 / 600


def geometric_sd(scale: float) -> float:
    """sd of one draw, sqrt(2 q) / (1 - q), to the accuracy of floats."""
    root = math.sqrt(2 * math.exp(-1 / scale))
    if scale < _TINY:
        root = math.sqrt(2) * math.exp(-0.5 / scale)
    return root / -math.expm1(-1 / scale)


def truncated_sd(scale: float, most: int) -> float:
    """sd of one draw that is truncated to [-most, most]."""
    ratio, step = math.exp(-1 / scale), -math.expm1(-1 / scale)
    if most * step < _UNIFORM:  # all values have about the same chance
        return math.sqrt(most * (most + 1) / 3)
    last = math.exp(-most / scale)
    total = step - 2 * ratio * math.expm1(-most / scale)
    squares = 1 + ratio - last * ((most * step + 1) ** 2 + ratio)
    return math.sqrt(2 * ratio * squares / total) / step
