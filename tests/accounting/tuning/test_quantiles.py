"""What is read from a histogram, each figure against its definition."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tuning.quantiles import (
    answers,
    clamp_of,
    cover_cell,
    prefixes,
    quantile_cell,
)
from dpstream.accounting.tuning.question import (
    Histogram,
    design,
)
from tests.accounting.tuning.questions import but, exact


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


def share_within(bound: int, rank_error: float) -> Fraction:
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
    cells = []
    for cover in np.linspace(0.01, 0.99, 99):
        goal = Fraction(cover) * share_within(EDGES[-1], rank_error)
        first = next(i for i, edge in enumerate(EDGES) if share_within(edge, rank_error) >= goal)
        assert cover_cell(pairs, estimate, float(cover)) == first
        cells.append(first)
    assert set(cells) == set(range(len(EDGES)))


ABOUT, ABOVE, BELOW = (-2, -1, 0, 1, 2), (1, 2, 4), (-4, -2, -1)


@pytest.mark.parametrize(
    ("candidates", "units", "bounds"),
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
    candidates: tuple[int, ...], units: tuple[int, ...], bounds: tuple[int, int], tail: float
) -> None:
    estimate = np.cumsum(np.array(units, np.float64))
    assert clamp_of(of(candidates), estimate, tail) == bounds


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.95]),
)
def test_quantile_is_numpys(pairs: list[int], target: float) -> None:
    of = design(but(epsilon=0.0, quantile=target), private=False).histograms[0]
    cell = np.searchsorted(of.candidates, pairs)
    estimate = prefixes(of, exact(of, np.bincount(cell, minlength=of.cells)))
    exactly = int(np.quantile(pairs, target, method="inverted_cdf"))
    assert quantile_cell(estimate, target) == np.searchsorted(of.candidates, exactly)


def cells_of(of: Histogram, values: list[int]) -> Int64:
    """Cells labelled by the edge away from 0, one value at a time."""
    out = np.zeros(of.cells, np.int64)
    for value in values:
        edges = [e for e in of.candidates if (e >= value if value >= 0 else e <= value)]
        out[of.candidates.index(min(edges) if value >= 0 else max(edges))] += 1
    return out


@given(
    st.lists(st.integers(-90, 500), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.4]),
)
def test_clamps_leave_at_most_the_tail_beyond(values: list[int], tail: float) -> None:
    of = design(but(epsilon=0.0, tail=tail), private=False).histograms[1]
    low, high = clamp_of(of, prefixes(of, exact(of, cells_of(of, values))), tail)
    seen = np.array(values)
    allowed = tail * len(values) + 1e-9
    assert (seen < low).sum() <= allowed and (seen > high).sum() <= allowed
    assert low in of.candidates and high in of.candidates and (low, high) != (0, 0)
    # Tight: the next candidate inward would cut more (from 0 on only where it is the same cell).
    at = of.candidates.index(high)
    if high > 0 and low < of.candidates[at - 1]:
        assert (seen > of.candidates[at - 1]).sum() > allowed or of.candidates[at - 1] <= 0
    at = of.candidates.index(low)
    if low < 0 and of.candidates[at + 1] < high:
        assert (seen < of.candidates[at + 1]).sum() > allowed or of.candidates[at + 1] >= 0


def test_a_clamp_of_values_up_to_0_ends_at_0() -> None:
    """0 is an edge of its own: nothing is added above it."""
    of = design(but(epsilon=0.0, tail=0.1), private=False).histograms[1]
    low, high = clamp_of(of, prefixes(of, exact(of, cells_of(of, [-40, -3, 0, 0]))), 0.1)
    assert low < 0 and high == 0


@given(st.lists(st.integers(1, 7), min_size=1, max_size=60), st.sampled_from([0.5, 0.8, 0.95]))
def test_cover_keeps_that_share_of_pairs(pairs: list[int], cover: float) -> None:
    """Exact where cells are single numbers."""
    of = design(but(epsilon=0.0, quantile=None, cover=cover), private=False).histograms[0]
    cell = np.searchsorted(of.candidates, pairs)
    estimate = prefixes(of, exact(of, np.bincount(cell, minlength=of.cells)))
    bound = of.candidates[cover_cell(of, estimate, cover)]
    pair_counts = [int(np.minimum(pairs, c).sum()) for c in range(8)]
    assert (
        pair_counts[bound] >= cover * pair_counts[7] - 1e-6
        and pair_counts[bound - 1] < cover * pair_counts[7]
    )
