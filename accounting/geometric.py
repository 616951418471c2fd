"""Figures of two-sided geometric noise and of staircase noise.

**Two-sided geometric noise**: P[Z = k] is proportional to q^|k|, q = e^(-1 / scale).

**Staircase noise** of sums that are clamped per group.  Two-sided geometric noise hides small
shifts better than large ones.  A sum that is clamped per group to L moves by at most L in a group,
and noise need only hide a shift of L.  The discrete staircase law (Geng and Viswanath, "The optimal
noise-adding mechanism in differential privacy", 2016, section 5) is constant over steps instead,
with q = e^-b:

    P[|Z| = i L + j] is proportional to q^i for 0 <= j < r, and to q^(i + 1) for r <= j < L.

**Sensitivity.**  Let level(z) be this exponent for |z|.  It does not fall with |z|, and
level(|z| + L) = level(|z|) + 1.  A shift by v, |v| <= L, moves |z| by at most L, also across 0, and
so the level by at most 1: no chance changes by more than a factor e^b.  A unit is in at most kappa
groups with independent noise, so that b = epsilon_j / kappa costs epsilon_j, as geometric noise of
scale L / b = kappa L / epsilon_j does.  The bound L must hold for each group's number by itself, so
that trees, and vectors that are scaled to a norm, have no staircase noise.

r has the least variance.  With L = 1 the law is the geometric law.  The sd falls with b as
e^(-b / 3), not as 1 / b:

| b | .5 | 1 | 2 | 3 | 4 | 6 | 8 |
|---|---|---|---|---|---|---|---|
| sd below that of geometric noise, L large | 0.5% | 2.1% | 8% | 17% | 28% | 50% | 67% |

So it is taken from b = 1/2 on, where its sd is smaller.  b is at most 24; the noise is then far
below one unit of the lattice, and a larger b is not used.
"""

import functools
import math
from fractions import Fraction

#: Truncation in scales below which truncated noise counts as uniform.
_UNIFORM = 1e-3
#: Scale below which q is too small for a float, and its root is not.
_TINY = 1 / 600
#: Far above the float error of exponentials and a division.
_UP = 1 + 1e-12


def geometric_sd(scale: float) -> float:
    """Return sd of one draw, sqrt(2 q) / (1 - q), to the accuracy of floats."""
    root = math.sqrt(2 * math.exp(-1 / scale))
    if scale < _TINY:
        root = math.sqrt(2) * math.exp(-0.5 / scale)
    return root / -math.expm1(-1 / scale)


def geometric_sd_above(scale: float) -> float:
    """Return sd of one draw, sqrt(2 q) / (1 - q), rounded up."""
    return geometric_sd(scale) * _UP


def scale_for(sensitivity: int, share: Fraction, epsilon: float) -> float:
    """Return the least float that is at least sensitivity / (share epsilon).

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
    """Return sd of one draw that is truncated to [-most, most]."""
    ratio, step = math.exp(-1 / scale), -math.expm1(-1 / scale)
    if most * step < _UNIFORM:  # all values have about the same chance
        return math.sqrt(most * (most + 1) / 3)
    last = math.exp(-most / scale)
    total = step - 2 * ratio * math.expm1(-most / scale)
    squares = 1 + ratio - last * ((most * step + 1) ** 2 + ratio)
    return math.sqrt(2 * ratio * squares / total) / step


#: Least b for which a staircase is considered, and the largest b that is used.
LEAST, MOST = 0.5, 24.0


def staircase(scale: float, sensitivity: int) -> tuple[float, int] | None:
    """Return (scale, r) of the staircase that replaces geometric noise of ``scale``.

    It is ``None`` where the geometric noise has the smaller sd.

    Args:
        scale: L / b in lattice units; the returned scale is larger where b is above ``MOST``.
        sensitivity: L, in lattice units.
    """
    if sensitivity < 2 or sensitivity < LEAST * scale:
        return None
    wide = max(scale, sensitivity / MOST)
    step = _best_step(wide, sensitivity)
    if staircase_moments(wide, sensitivity, step)[1] >= geometric_sd(scale) ** 2:
        return None
    return wide, step


def staircase_moments(scale: float, sensitivity: int, step: int) -> tuple[float, float]:
    """Return (E |Z|, E Z^2) of the staircase law."""
    q, wide = math.exp(-sensitivity / scale), float(sensitivity)
    rest = -math.expm1(-sensitivity / scale)
    # Sums of q^i, i q^i and i^2 q^i.
    sums = 1 / rest, q / rest**2, q * (1 + q) / rest**3
    first, second = (
        step + q * (wide - step),
        _ones(step) + q * (_ones(sensitivity) - _ones(step)),
    )
    third = _squares(step) + q * (_squares(sensitivity) - _squares(step))
    total = 2 * sums[0] * first - 1
    absolute = 2 * (sums[1] * wide * first + sums[0] * second)
    square = 2 * (sums[2] * wide**2 * first + 2 * sums[1] * wide * second + sums[0] * third)
    return absolute / total, square / total


def staircase_margin(scale: float, sensitivity: int, step: int, miss: float) -> int:
    """Return the least k with P[|Z| > k] <= ``miss``."""
    q, rest = math.exp(-sensitivity / scale), -math.expm1(-sensitivity / scale)
    total = (step + q * (sensitivity - step)) / rest
    tail = miss / 2 * (2 * total - 1)
    falls = max(0, math.floor(math.log(total / tail) * scale / sensitivity))
    rest_weight = total - tail / q**falls
    size = rest_weight if rest_weight < step else step + (rest_weight - step) / q
    return max(0, math.floor(falls * sensitivity + size))


@functools.lru_cache(maxsize=1024)
def _best_step(scale: float, sensitivity: int) -> int:
    """r of the least variance, by ternary search: the variance falls and then rises with r."""

    def variance(step: int) -> float:
        return staircase_moments(scale, sensitivity, step)[1]

    low, high = 1, sensitivity
    while high - low > 2:
        third = (high - low) // 3
        lower, right = low + third, high - third
        if variance(lower) <= variance(right):
            high = right - 1 if right - 1 > low else right
        else:
            low = lower + 1
    return min(range(low, high + 1), key=variance)


def _ones(count: int) -> float:
    """0 + 1 + ... + (count - 1)."""
    return count * (count - 1) / 2


def _squares(count: int) -> float:
    """0 + 1 + 4 + ... + (count - 1)^2."""
    return (count - 1) * count * (2 * count - 1) / 6
