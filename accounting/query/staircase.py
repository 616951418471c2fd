"""Staircase noise of sums that are clamped per group: its step, sd and interval.

Two-sided geometric noise protects against every shift, small ones more than large ones.  A sum that
is clamped per group to L moves by at most L there, and only that has to be hidden.  The discrete
staircase law (Geng and Viswanath, "The optimal noise-adding mechanism in differential privacy",
2016, section 5) is flat over steps instead, with q = e^-b:

    P[|Z| = i L + j] is proportional to q^i for 0 <= j < r, and to q^(i + 1) for r <= j < L.

**Sensitivity.**  Let level(z) be that exponent of |z|.  It does not fall with |z|, and
level(|z| + L) = level(|z|) + 1.  A shift by v, |v| <= L, moves |z| by at most L, also across 0, and
so the level by at most 1: no chance changes by more than e^b.  A unit is in at most kappa groups,
each of which has noise of its own, so that b = epsilon_j / kappa charges epsilon_j, as geometric
noise of scale L / b = kappa L / epsilon_j does.  The bound L must hold for each group's whole
number by itself: there is no staircase for trees, or for vectors that are scaled to a norm.

r is that of the least variance.  With L = 1 the law is the geometric one.  sd falls with b as
e^(-b / 3), not as 1 / b:

| b | .5 | 1 | 2 | 3 | 4 | 6 | 8 |
|---|---|---|---|---|---|---|---|
| sd below that of geometric noise, L large | 0.5% | 2.1% | 8% | 17% | 28% | 50% | 67% |

so it is taken from b = 1/2 on, where it has less sd.  b is held at 24, far below the least bound's
lattice, and what a larger one would allow is left unused.
"""

import functools
import math

#: b from which on a staircase is looked for, and the most that is used.
LEAST, MOST = 0.5, 24.0


def staircase(scale: float, sensitivity: int) -> tuple[float, int] | None:
    """(scale, r) of the staircase that replaces geometric noise of a scale, ``None`` where that
    has the smaller sd.

    Args:
        scale: L / b in lattice units; the staircase's is larger where b is held at ``MOST``.
        sensitivity: L, in lattice units.
    """
    if sensitivity < 2 or sensitivity < LEAST * scale:
        return None
    wide = max(scale, sensitivity / MOST)
    step = _best_step(wide, sensitivity)
    ratio, size = math.exp(-1 / scale), -math.expm1(-1 / scale)
    if moments(wide, sensitivity, step)[1] >= 2 * ratio / size**2:
        return None
    return wide, step


def moments(scale: float, sensitivity: int, step: int) -> tuple[float, float]:
    """(E |Z|, E Z^2) of the staircase law."""
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


def margin(scale: float, sensitivity: int, step: int, miss: float) -> int:
    """The least k with P[|Z| > k] <= ``miss``."""
    q, rest = math.exp(-sensitivity / scale), -math.expm1(-sensitivity / scale)
    total = (step + q * (sensitivity - step)) / rest
    tail = miss / 2 * (2 * total - 1)
    falls = max(0, math.floor(math.log(total / tail) * scale / sensitivity))
    left = total - tail / q**falls
    size = left if left < step else step + (left - step) / q
    return max(0, math.floor(falls * sensitivity + size))


@functools.lru_cache(maxsize=1024)
def _best_step(scale: float, sensitivity: int) -> int:
    """r of the least variance: by thirds, as the variance falls and then rises with r."""
    low, high = 1, sensitivity
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if moments(scale, sensitivity, left)[1] <= moments(scale, sensitivity, right)[1]:
            high = right - 1 if right - 1 > low else right
        else:
            low = left + 1
    return min(range(low, high + 1), key=lambda step: moments(scale, sensitivity, step)[1])


def _ones(count: int) -> float:
    """0 + 1 + ... of so many terms."""
    return count * (count - 1) / 2


def _squares(count: int) -> float:
    """0 + 1 + 4 + ... of so many terms."""
    return (count - 1) * count * (2 * count - 1) / 6
