"""Laws of noise in 60 digits, their exact inverses at any number of bits, and wrong laws."""

import bisect
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from dpstream.accounting.balls import precision
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import (
    FULL,
    LEAST_TABLE_SCALE,
    LEAST_TABLE_SIGMA,
    MAX_TABLE_SCALE,
    DiscreteGaussianLaw,
    DiscreteLaplaceLaw,
    Law,
    RoundedGaussianLaw,
    Table,
    discrete_gaussian,
    discrete_laplace,
    rounded_gaussian,
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


EXACT = [
    *(discrete_laplace(scale) for scale in (LEAST_TABLE_SCALE, 0.3, 1.0, 3.7, 25.0)),
    *(discrete_gaussian(sigma) for sigma in (LEAST_TABLE_SIGMA, 0.3, 1.0, 3.7, 25.0)),
]


def from_128_bits(table: Table, u: int) -> int | None:
    """The value of the law at u if its 128 bits decide."""

    def uniform(further: int) -> tuple[int, int]:
        if further:
            raise LookupError
        return u, 128

    try:
        return settle(table.law, uniform)
    except LookupError:
        return None


def wrong(table: Table, thresholds: list[int]) -> int:
    """How many uniforms beside thresholds mean another value than the law has."""
    mismatches = 0
    sample = thresholds if len(thresholds) < 60 else thresholds[:: len(thresholds) // 60]
    for threshold in sample:
        for u in (threshold - 2, threshold, threshold + 1):
            index = bisect.bisect_right(thresholds, u)
            tie = thresholds[index] - 1 if index < len(thresholds) else FULL - 1
            if 0 < u < FULL and u != tie:
                mismatches += from_128_bits(table, u) != table.lowest + index
    return mismatches


@pytest.mark.parametrize("table", EXACT, ids=lambda t: str(t.law))
def test_what_a_table_decides_is_exact(table: Table) -> None:
    """Decided from 128 bits alone, so no further bits are asked for."""
    thresholds = table.thresholds
    assert thresholds == sorted(thresholds) and len(thresholds) % 2 == 0
    assert wrong(table, thresholds) == 0
    # The lower half mirrors the upper: P[Z <= -k] = P[Z >= k].
    assert [FULL + 1 - t for t in reversed(thresholds)] == thresholds


@pytest.mark.parametrize("table", EXACT, ids=lambda t: str(t.law))
def test_ties_are_open(table: Table) -> None:
    """What the table leaves open holds an edge or a tail: its 128 bits do not decide."""
    thresholds = table.thresholds
    sample = thresholds if len(thresholds) < 40 else thresholds[:: len(thresholds) // 40]
    for u in (0, FULL - 1, *(t - 1 for t in sample)):
        calls: list[int] = []

        def uniform(further: int, u: int = u, calls: list[int] = calls) -> tuple[int, int]:
            calls.append(further)
            return (u << 128 * further) + (1 << 128 * further) // 3, 128 * (1 + further)

        settle(table.law, uniform)
        assert calls == [0, 1]


@pytest.mark.parametrize("table", EXACT[2:4] + EXACT[7:9], ids=lambda t: str(t.law))
def test_a_shifted_or_rounded_table_is_caught(table: Table) -> None:
    lower, upper = table.thresholds[: -table.lowest], table.thresholds[-table.lowest :]
    assert wrong(table, [t + 2 for t in lower] + upper) > 0
    assert wrong(table, lower + [t - 2 for t in upper]) > 0
    assert wrong(table, lower[1:] + upper[:-1]) > 0


#: sigma and scale of levels of .05 to 5 (rho or epsilon) that nine groups share.
SHARED = [
    *(discrete_gaussian(math.sqrt(9 / (2 * rho))) for rho in (0.05, 0.5, 5.0)),
    *(discrete_laplace(9 / epsilon) for epsilon in (0.2, 0.5, 5.0)),
]


def masses(table: Table) -> tuple[dict[int, mpmath.mpf], mpmath.mpf]:
    """Chances of all integers of a table, and what is beyond, from the definition in 60 digits."""
    far = -table.lowest
    if isinstance(table.law, DiscreteLaplaceLaw):
        q = mpmath.exp(-1 / mpmath.mpf(table.law.scale))
        return {k: (1 - q) / (1 + q) * q ** abs(k) for k in range(-far, far + 1)}, 2 * q ** (
            far + 1
        ) / (1 + q)
    assert isinstance(table.law, DiscreteGaussianLaw)
    sigma = mpmath.mpf(table.law.sigma)
    weight = {k: mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * sigma**2)) for k in range(2 * far)}
    total = 2 * mpmath.fsum(weight.values()) - 1
    beyond = 2 * mpmath.fsum(weight[k] for k in range(far + 1, 2 * far)) / total
    return {k: weight[abs(k)] / total for k in range(-far, far + 1)}, beyond


def misplaced(table: Table, thresholds: list[int]) -> int:
    """How many integers have another chance than the law's, beyond what open uniforms settle."""
    with mpmath.workdps(60):
        exact, beyond = masses(table)
        edges = [0, *thresholds, FULL]
        mismatches = 0
        for k, (begin, end) in enumerate(itertools.pairwise(edges), table.lowest):
            chance = exact[k] + (beyond / 2 if k in (table.lowest, -table.lowest) else 0)
            mismatches += abs(mpmath.mpf(end - begin) - chance * FULL) > 1
        assert beyond * FULL < 2
        return mismatches


@pytest.mark.parametrize("table", SHARED, ids=lambda t: str(t.law))
def test_every_chance_of_a_table(table: Table) -> None:
    """Each integer has its chance to one open uniform on either side; a moved edge is seen."""
    assert misplaced(table, table.thresholds) == 0
    middle = len(table.thresholds) // 2
    moved = [t + 3 * (i == middle) for i, t in enumerate(table.thresholds)]
    assert misplaced(table, moved) == 2


def test_the_rounded_gaussians_table_is_what_it_always_was() -> None:
    """Its digest is in the names of all noise that was ever released."""
    table = rounded_gaussian(3.7)
    words = [
        np.array(part, np.uint64)
        for part in zip(*(divmod(t, 1 << 64) for t in table.thresholds), strict=True)
    ]
    digest = hashlib.blake2b(words[0].tobytes() + words[1].tobytes(), digest_size=16).hexdigest()
    assert (
        digest == "90b047e7bf50c5ca8542b4a4d70abb79" and not table.exact and table.law.label == b""
    )


def test_scales_outside_the_range_are_refused() -> None:
    nan = float("nan")
    for scale in (0.0, -1.0, nan, LEAST_TABLE_SCALE * 0.99, MAX_TABLE_SCALE * 1.01):
        with pytest.raises(ValueError, match="range"):
            discrete_laplace(scale)
    for sigma in (0.0, -1.0, nan, LEAST_TABLE_SIGMA * 0.99, MAX_SIGMA * 1.01):
        with pytest.raises(ValueError, match="range"):
            discrete_gaussian(sigma)
