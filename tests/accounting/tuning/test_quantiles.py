"""What is read from a histogram, each figure against its definition."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.tuning.quantiles import answers, clamp_of, cover_cell
from dpstream.accounting.tuning.question import Histogram


def of(candidates: tuple[int, ...], cells: int = 0, rank_error: float = 0.0) -> Histogram:
    cells = cells or len(candidates)
    return Histogram("v", candidates, cells, (), 1, 1.0, 1.0, 1.0, rank_error)


def test_a_total_that_is_large_enough_is_answered() -> None:
    for rank_error, total, enough in (
        (0.0, 1.0, True), (0.0, 1 - 1e-8, True), (0.0, 0.99, False),
        (1.0, 5.0, True), (1.0, 4.99, False),
    ):  # fmt: skip
        assert answers(of((1, 2), rank_error=rank_error), np.array([0.0, total])) is enough


EDGES = (1, 2, 3, 4, 8, 16)
UNITS = [50, 20, 10, 5, 40, 30, 5]


def kept(bound: int, rank_error: float) -> Fraction:
    """Pairs that a bound keeps: one survivor count after the other, linear inside a cell."""
    above = [Fraction(sum(UNITS[t:])) for t in range(len(UNITS))]
    above = [x if x >= Fraction(rank_error) else Fraction() for x in above]
    edges, pairs = (0, *EDGES), Fraction()
    for t, (low, high) in enumerate(itertools.pairwise(edges)):
        for c in range(low + 1, min(high, bound) + 1):
            pairs += above[t] + Fraction(c - low - 1, high - low) * (above[t + 1] - above[t])
    return pairs


@pytest.mark.parametrize("rank_error", [0.0, 5.0, 35.0])
def test_cover_in_wide_cells(rank_error: float) -> None:
    """With survivors just at the rank error, which count."""
    estimate = np.cumsum(np.array(UNITS, np.float64))
    pairs = of(EDGES, len(UNITS), rank_error)
    found = []
    for cover in np.linspace(0.01, 0.99, 99):
        goal = Fraction(cover) * kept(EDGES[-1], rank_error)
        first = next(i for i, edge in enumerate(EDGES) if kept(edge, rank_error) >= goal)
        assert cover_cell(pairs, estimate, float(cover)) == first
        found.append(first)
    assert set(found) == set(range(len(EDGES)))


ABOUT, ABOVE, BELOW = (-2, -1, 0, 1, 2), (1, 2, 4), (-4, -2, -1)


@pytest.mark.parametrize(
    ("candidates", "units", "clamp"),
    [
        (ABOUT, (0, 0, 9, 0, 0), (0, 1)),
        ((*BELOW[1:], 0), (0, 0, 9), (-1, 0)),
        ((0, 1, 2), (9, 0, 0), (0, 1)),
        (ABOUT, (0, 0, 2, 1, 1), (0, 2)),
        (ABOUT, (1, 1, 2, 0, 0), (-2, 0)),
        (ABOUT, (0, 0, 0, 9, 0), (0, 1)),
        (ABOUT, (0, 9, 0, 0, 0), (-1, 0)),
        (ABOUT, (0, 0, 0, 0, 9), (1, 2)),
        (ABOUT, (9, 0, 0, 0, 0), (-2, -1)),
        (ABOVE, (9, 0, 0), (1, 1)),
        (ABOVE, (0, 9, 0), (1, 2)),
        (ABOVE, (0, 0, 9), (2, 4)),
        (BELOW, (9, 0, 0), (-4, -2)),
        (BELOW, (0, 9, 0), (-2, -1)),
        (BELOW, (0, 0, 9), (-1, -1)),
    ],
)
@pytest.mark.parametrize("tail", [1e-9, 0.1])
def test_clamps_by_hand(
    candidates: tuple[int, ...], units: tuple[int, ...], clamp: tuple[int, int], tail: float
) -> None:
    estimate = np.cumsum(np.array(units, np.float64))
    assert clamp_of(of(candidates), estimate, tail) == clamp
