"""Thresholds of counts with two-sided geometric noise: exact on the grid, and Theorem 12.

A count of units with noise Z of the discrete Laplace law (``accounting.mechanisms.laws``) of scale
kappa / epsilon is released iff noisy > tau.  A group that one unit is alone in is released with
P[1 + Z > tau] = P[Z >= tau] for a whole tau; the groups are at most kappa and their noise is
independent, so that none is released with at least (1 - p)^kappa.  tau is therefore the least
whole number with

    P[Z >= tau] <= p = 1 - (1 - delta)^(1 / kappa),

decided in balls.  (p <= 1/2 has tau >= 1; for a larger p the tail of the other side counts.)

``theorem_12`` is the continuous limit of the thesis that named it, for reports.  Its 11.8198 at
(1, 1e-5, 1) taken as a threshold of whole counts would release at 1.22 delta.
"""

import math
from fractions import Fraction
from typing import Any

import flint

from dpstream.accounting.balls import precision

_PRECISION = 256


def per_group(delta: float, groups: int) -> float:
    """1 - (1 - delta)^(1 / kappa), to the float's accuracy, for tiny delta too."""
    return -math.expm1(math.log1p(-delta) / groups)


def _log_of_half(delta: float, groups: int) -> float:
    """ln(2 p), also where p is below the least float."""
    p = per_group(delta, groups)
    return math.log(2 * p) if p > 0 else math.log(2 * delta) - math.log(groups)


def theorem_12(epsilon: float, delta: float, groups: int) -> float:
    """tau of the continuous Laplace mechanism: released iff the noisy count is at least this.

    1 - kappa ln(2 p) / epsilon for p <= 1/2; beyond, 1 + kappa ln(2 (1 - p)) / epsilon.
    """
    p = per_group(delta, groups)
    scale = groups / epsilon
    if p <= 0.5:
        return 1 - scale * _log_of_half(delta, groups)
    return 1 + scale * (math.log(2) + math.log1p(-delta) / groups)


def tail(scale: float, at: int) -> Any:
    """P[Z >= at] of the discrete Laplace law, a ball of the current precision."""
    ratio = (-1 / flint.arb(scale)).exp()
    if at > 0:
        return ratio**at / (1 + ratio)
    return 1 - ratio ** (1 - at) / (1 + ratio)


def threshold(scale: float, delta: float, groups: int) -> int:
    """tau: the least whole number with P[Z >= tau] <= 1 - (1 - delta)^(1 / kappa).

    Args:
        scale: of the noise, as it is drawn; delta: in (0, 1), taken as the float it is.
    """
    # 1 - chance has as many leading ones as delta has zeros: they must not be all that is known.
    zeros = -math.frexp(delta)[1] + groups.bit_length()
    with precision(_PRECISION + max(0, zeros - _PRECISION // 2)):
        exact = Fraction(delta)
        left = 1 - flint.arb(flint.fmpq(exact.numerator, exact.denominator))
        chance = 1 - (left.log() / groups).exp()
        # Where the two are so near that balls do not tell, the next number is certain.
        near = -_log_of_half(delta, groups) if delta < 1 else 0.0
        tau = math.floor(scale * near) - 2
        while tail(scale, tau) <= chance:
            tau -= max(1, int(scale))
        while not tail(scale, tau) <= chance:
            tau += 1
    return tau
