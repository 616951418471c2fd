"""Laws of noise in 60 digits, their exact inverses at any number of bits, and wrong laws."""

import itertools
from collections.abc import Callable
from typing import Any

import mpmath
import pytest

from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.laws import (
    DiscreteGaussianLaw,
    DiscreteLaplaceLaw,
    Law,
    RoundedGaussianLaw,
    settle,
)

SCALES = (0.3, 3.7, 11.0)
KINDS: list[Callable[[float], Law]] = [RoundedGaussianLaw, DiscreteLaplaceLaw, DiscreteGaussianLaw]
LAWS = [kind(scale) for kind in KINDS for scale in SCALES]


def lower(law: Law, k: int) -> mpmath.mpf:
    """P[Z <= -k], k >= 1, from the definition of the law."""
    if isinstance(law, RoundedGaussianLaw):
        return mpmath.ncdf((mpmath.mpf(0.5) - k) / mpmath.mpf(law.sigma))
    if isinstance(law, DiscreteLaplaceLaw):
        q = mpmath.exp(-1 / mpmath.mpf(law.scale))
        return q**k * (1 - q) / (1 + q) / (1 - q)
    assert isinstance(law, DiscreteGaussianLaw)
    sigma = mpmath.mpf(law.sigma)

    def mass(j: int) -> mpmath.mpf:
        return mpmath.exp(-(mpmath.mpf(j) ** 2) / (2 * sigma**2))

    far = int(25 * law.sigma) + 25
    total = 1 + 2 * mpmath.fsum(mass(j) for j in range(1, far))
    return mpmath.fsum(mass(j) for j in range(k, far)) / total


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_tails_in_60_digits(law: Law) -> None:
    with mpmath.workdps(80), precision(256):
        for k, ball in enumerate(itertools.islice(law.lower(), int(5 * scale(law)) + 3), 1):
            middle, radius = mpmath.mpf(ball.mid().str(70, radius=False)), float(ball.rad())
            exact = lower(law, k)
            assert abs(middle - exact) <= exact * mpmath.mpf(10) ** -60 + radius
            assert radius <= float(exact) * 1e-60


def scale(law: Any) -> float:
    return float(law.scale if isinstance(law, DiscreteLaplaceLaw) else law.sigma)


def of_bits(value: int, bits: int) -> Callable[[int], tuple[int, int]]:
    """A uniform whose further bits are given 128 at a time, from the top of ``value``."""

    def uniform(further: int) -> tuple[int, int]:
        bit_count = 64 + 128 * further
        assert bit_count <= bits, "more bits were asked for than decide"
        return value >> (bits - bit_count), bit_count

    return uniform


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_edges_are_settled_from_both_sides(law: Law) -> None:
    """2^-250 beside an edge takes 64 + 2 * 128 bits, and each side has its own value."""
    bits = 64 + 2 * 128
    with mpmath.workdps(140):
        for k in (1, 2, int(scale(law)) + 1, int(4 * scale(law)) + 2):
            edge = lower(law, k) * mpmath.mpf(2) ** bits
            step = int(max(1, 2 ** (bits - 250) * edge / mpmath.mpf(2) ** bits))
            below, above = int(edge) - step, int(edge) + 1 + step
            full = (1 << bits) - 1
            for uniform, value in ((below, -k), (above, 1 - k)):
                assert settle(law, of_bits(uniform, bits)) == value
                assert settle(law, of_bits(full - uniform, bits)) == -value


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_middle_needs_no_further_bits(law: Law) -> None:
    def uniform(further: int) -> tuple[int, int]:
        assert further == 0
        return (1 << 63) - 1, 64

    assert settle(law, uniform) == 0


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_tails_beyond_64_bits_follow_the_law(law: Law) -> None:
    """64 zero bits decide nothing; the next ones do, as the law has it."""
    for word in (1, 2**40, 2**63, 2**64 - 1):
        value = settle(law, of_bits(word << 64, 192))
        u = mpmath.mpf(word) / mpmath.mpf(2) ** 128
        with mpmath.workdps(60):
            assert lower(law, -value) >= u and lower(law, -value + 1) <= u
        full = (1 << 192) - 1
        assert settle(law, of_bits(full - (word << 64), 192)) == -value


def test_wrong_laws_are_told_apart() -> None:
    """The comparison in 60 digits is not idle: 2% of scale, or the neighbour's law, fail it."""
    for law, other in (
        (RoundedGaussianLaw(3.7), RoundedGaussianLaw(3.7 * 0.98)),
        (DiscreteLaplaceLaw(3.7), DiscreteLaplaceLaw(3.7 * 0.98)),
        (DiscreteGaussianLaw(3.7), RoundedGaussianLaw(3.7)),
        (DiscreteGaussianLaw(0.3), DiscreteGaussianLaw(0.3 * (1 + 2**-50))),
    ):
        with mpmath.workdps(80), precision(256):
            ball = next(iter(other.lower()))
            middle = mpmath.mpf(ball.mid().str(70, radius=False))
            assert abs(middle - lower(law, 1)) > 1e-18 * lower(law, 1)


def test_a_shift_changes_discrete_laplace_by_e_to_the_epsilon_only() -> None:
    """The sensitivity argument: largest log ratio of shifted probabilities, every integer."""
    with mpmath.workdps(60):
        for scale_, shift in ((1.0, 1), (3.7, 2), (0.3, 1)):
            law = DiscreteLaplaceLaw(scale_)
            tail = [lower(law, k) for k in range(1, 60)]
            mass = {-k: a - b for k, (a, b) in enumerate(itertools.pairwise(tail), 1)}
            mass |= {-k: p for k, p in mass.items()} | {0: 1 - 2 * tail[0]}
            ratios = [mpmath.log(p / mass[k + shift]) for k, p in mass.items() if k + shift in mass]
            assert abs(max(ratios) - mpmath.mpf(shift) / mpmath.mpf(scale_)) < 1e-40
            rounded = [lower(RoundedGaussianLaw(scale_), k) for k in range(1, 60)]
            steps = [a - b for a, b in itertools.pairwise(rounded)]
            worst = max(mpmath.log(a / b) for a, b in itertools.pairwise(steps))
            assert worst > mpmath.mpf(shift) / mpmath.mpf(scale_)  # no Gaussian is pure
