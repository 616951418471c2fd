"""The question of a tuning: grids, sensitivity of the encoders, budget, stated accuracy.

What a tuning says: figures from noisy counts, its cost with the stream, its warnings.
"""

import itertools
import math
from fractions import Fraction
from statistics import NormalDist

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.figures import up
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.tuning.answer import (
    Figures,
    NoiseOf,
    Tuned,
    answers,
    best,
    clamp_of,
    cover_cell,
    coverage_of,
    per_key,
    prefixes,
    quantile_cell,
    read_off,
)
from dpstream.accounting.tuning.question import (
    CONTRIBUTIONS,
    Histogram,
    Question,
    TunedColumn,
    TuningDesign,
    canonical,
    contributions_of,
    design,
    encoder_matrix,
    magnitudes,
    pair_candidates,
    value_candidates,
    worst_factor,
)
from tests.accounting.tuning.questions import QUESTION, but, exact, free
from tests.golden.refusals import Refused
from tests.structs import changed, leaves

# --- grids -------------------------------------------------------------------------------


def test_grids_are_public_geometric_and_reach_both_ends() -> None:
    assert magnitudes(1) == (1,) and magnitudes(9) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for most in (2, 3, 10, 17, 1000, 1 << 32):
        grid = magnitudes(most)
        assert grid[0] == 1 and grid[-1] == most
        assert all(b - a == 1 or b <= 1.25 * a + 1 for a, b in itertools.pairwise(grid))
    assert value_candidates(0, 3) == (0, 1, 2, 3)
    assert value_candidates(5, 9) == (5, 6, 7, 8, 9)
    assert value_candidates(-9, -5) == (-9, -8, -7, -6, -5)
    assert value_candidates(-2, 1) == (-2, -1, 0, 1)


def test_extrapolation_is_rounded_up_and_capped() -> None:
    assert [contributions_of(n, Fraction(5, 2), 9) for n in (1, 2, 3, 4)] == [3, 5, 8, 9]
    assert pair_candidates(Fraction(12), 100)[-1] == 9
    assert contributions_of(1, Fraction(1, 50), 9) == 1


# --- sensitivity and budget ----------------------------------------------------------------


@pytest.mark.parametrize("cells", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 77])
def test_l2_of_every_move_is_within_the_stated_sensitivity(cells: int) -> None:
    for of in design(but(columns=(TunedColumn("m", 0, cells),), values_per_unit=3)).histograms:
        per_unit = 1 if of.name == CONTRIBUTIONS else 3
        matrix = encoder_matrix(of.cells)
        worst = 0.0
        for places in itertools.islice(
            itertools.combinations_with_replacement(range(of.cells), per_unit), 3000
        ):
            moved = np.bincount(places, minlength=of.cells)
            worst = max(worst, float(np.sqrt(((matrix @ moved) ** 2).sum())))
        assert worst <= of.sensitivity
        assert worst > 0.999 * of.sensitivity  # and the bound is not idle


@pytest.mark.parametrize(
    "columns", [(), QUESTION.columns, (*QUESTION.columns, TunedColumn("k", 0, 9))]
)
def test_all_histograms_together_cost_mu(columns: tuple[TunedColumn, ...]) -> None:
    made = design(but(columns=columns))
    used = sum((of.sensitivity / of.sigma) ** 2 for of in made.histograms)
    assert 0.999 * made.mu**2 < used <= made.mu**2
    assert delta_of(1.0, math.sqrt(used)) <= 1e-9 < delta_of(1.0, 1.01 * math.sqrt(used))
    half = sum((of.sensitivity / (of.sigma / 2)) ** 2 for of in made.histograms)
    assert delta_of(1.0, math.sqrt(half)) > 1e-9


def test_what_a_histogram_says_of_itself() -> None:
    """Shares that add up to no more than all of mu^2, targets, and a rank error by its formula."""
    made = design(but(quantile=0.9, cover=None, tail=0.05, columns=(TunedColumn("m", -90, 500),)))
    contributions, values = made.histograms
    assert sum(Fraction(of.share) for of in made.histograms) < 1
    assert contributions.targets == (0.9,) and values.targets == (0.05, 0.95)
    for of in made.histograms:
        matrix = encoder_matrix(of.cells)
        assert of.col2 == matrix.sum(axis=0).max() and of.share == pytest.approx(0.5, rel=1e-9)
        quantile = NormalDist().inv_cdf(1 - 0.05 / (2 * of.cells))
        sd = math.sqrt(of.sigma**2 + 1 / 12) * worst_factor(matrix, of.targets)
        assert of.rank_error == pytest.approx(sd * quantile, rel=1e-12)
    read = design(but(epsilon=0.0, delta=0.0), private=False)
    assert [of.rank_error for of in read.histograms] == [0.0] * len(read.histograms)


def test_figures_at_the_ends_of_their_ranges_are_taken(refused: Refused) -> None:
    for changes in (
        {"max_contributions": limits.MAX_CONTRIBUTIONS},
        {"values_per_unit": limits.MAX_VALUES_PER_UNIT},
        {"max_contributions": 24, "scale": "12"},
    ):
        design(but(**changes))
    for beyond in (
        {"max_contributions": limits.MAX_CONTRIBUTIONS + 1},
        {"max_contributions": 23, "scale": "12"},
        {"epsilon": limits.MAX_EPSILON * 1.01},
    ):
        refused(design, but(**beyond))


def test_the_tree_beats_plain_cells_at_equal_budget() -> None:
    for cells in (2, 3, 4, 5, 8, 16, 23, 64, 77, 200):
        tree = encoder_matrix(cells)
        col2 = int(tree.sum(axis=0).max())
        for targets in ((0.9,), (0.5,), (0.05, 0.95)):
            plain = worst_factor(np.eye(cells, dtype=np.int64), targets)
            assert math.sqrt(col2) * worst_factor(tree, targets) < plain


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epsilon": 0.0}, "--epsilon"),
        ({"epsilon": 1e-5}, "--epsilon"),
        ({"delta": 1.0}, "--delta"),
        ({"quantile": 1.0}, "--quantile"),
        ({"quantile": None, "cover": 1.0}, "--cover"),
        ({"tail": 0.5}, "--tail"),
        ({"max_contributions": 0}, "--max-contributions"),
        ({"values_per_unit": 65}, "--values-per-unit"),
        ({"scale": "4380"}, "--first"),
    ],
)
def test_questions_that_are_refused_in_public(
    changes: dict[str, object], field: str, refused: Refused
) -> None:
    caught = refused(lambda: design(but(**changes)))
    assert caught.field == field


# --- with noise ------------------------------------------------------------------------------


def rank_errors(made: TuningDesign, scale: float, draws: int = 400) -> list[float]:
    """Share of draws in which a prefix minus its target errs beyond the stated rank error."""
    rng, shares = np.random.default_rng(3), []
    for of in made.histograms:
        matrix = encoder_matrix(of.cells)
        counts = rng.integers(0, 200, of.cells)
        noise = np.rint(rng.normal(0, of.sigma * scale, (draws, len(matrix)))).astype(np.int64)
        decode = np.cumsum(np.linalg.pinv(matrix.astype(float)), axis=0)
        estimates = (matrix @ counts + noise) @ decode.T
        truth = np.cumsum(counts)
        worst = np.zeros(draws)
        for q in of.targets:
            wrong = (estimates - q * estimates[:, -1:]) - (truth - q * truth[-1])
            worst = np.maximum(worst, np.abs(wrong).max(axis=1))
        shares.append(float((worst > of.rank_error).mean()))
    return shares


def test_stated_rank_error_holds_and_is_not_idle() -> None:
    made = design(QUESTION)
    assert max(rank_errors(made, 1.0)) < 0.08
    assert min(rank_errors(made, 2.0)) > 0.3  # the check can fail


# --- canonical form ----------------------------------------------------------------------


def test_the_canonical_form_has_frozen_names() -> None:
    """Digests of questions are computed from this form: a renamed field keeps its name here."""
    drawn = Histogram("m", (1, 2), 3, (0.5,), 2, 1.5, 0.5, 3.25, 4.0)
    form = canonical(QUESTION, TuningDesign(0.25, (drawn,)))
    assert form == {
        "question": {
            "first": 7_200_000_000, "epsilon": 1.0, "delta": 1e-9, "quantile": 0.9, "cover": None,
            "max_contributions": 1000, "scale": "12", "tail": 0.05, "values_per_unit": 1,
            "columns": [["m", -90, 500]], "key_records": None,
        },
        "mu": "0.25",
        "histograms": [{
            "name": "m", "candidates": [1, 2], "cells": 3, "targets": [0.5], "col2": 2,
            "sensitivity": "1.5", "share": "0.5", "sigma": "3.25", "rank_error": "4",
        }],
    }  # fmt: skip


def test_the_last_bits_of_a_processor_do_not_make_another_question() -> None:
    def nudged(histogram: Histogram) -> Histogram:
        figures = ("sensitivity", "share", "sigma", "rank_error")
        return msgspec.structs.replace(
            histogram, **{n: getattr(histogram, n) * (1 + 4e-16) for n in figures}
        )

    here = design(QUESTION)
    there = TuningDesign(here.mu * (1 + 4e-16), tuple(map(nudged, here.histograms)))
    assert here != there and canonical(QUESTION, here) == canonical(QUESTION, there)


FULL = but(cover=0.5, key_records=4)


@pytest.mark.parametrize("path", leaves(FULL), ids=lambda path: ".".join(map(str, path)))
def test_every_field_of_a_question_is_in_its_canonical_form(path: tuple[object, ...]) -> None:
    of = TuningDesign(0.25, ())
    assert canonical(changed(FULL, path), of) != canonical(FULL, of)


DESIGN = design(QUESTION)


@pytest.mark.parametrize("path", leaves(DESIGN), ids=lambda path: ".".join(map(str, path)))
def test_every_field_of_a_design_is_in_the_canonical_form(path: tuple[object, ...]) -> None:
    assert canonical(QUESTION, changed(DESIGN, path)) != canonical(QUESTION, DESIGN)


#: A heavy tail: most units have a few pairs, some have thousands.
PAIRS = np.minimum((1 / np.random.default_rng(4).random(4_000)).astype(np.int64), 5_000)


def question_with(key_records: int = 1_000) -> Question:
    """C by weighing, of pairs that are all there."""
    return but(columns=(), quantile=None, scale="1", key_records=key_records)


def noise(contributions: int, per_key_bound: int | None) -> float:
    """sds as those of a plan: with C, with sqrt(C k) under a bound per key."""
    return 3.0 * math.sqrt(contributions * min(contributions, per_key_bound or contributions))


def read(noise: NoiseOf = noise, key_records: int = 1_000) -> tuple[Histogram, Figures]:
    """The histogram of ``PAIRS``, and what is read off without noise."""
    question = question_with(key_records)
    made = design(question, private=False)
    of = made.histograms[0]
    cell = np.searchsorted(of.candidates, PAIRS)
    return of, read_off(
        question, made, [exact(of, np.bincount(cell, minlength=of.cells))], lambda _: noise
    )


def cut(bound: int, most: int = 1_000) -> float:
    """Part of all pairs beyond a bound, units with more than ``most`` counting as that."""
    return 1 - np.minimum(PAIRS, bound).sum() / np.minimum(PAIRS, most).sum()


def test_the_least_error_of_both_together() -> None:
    """Not the quantile, which is blind to noise, and far below what the tail would ask for."""
    of, figures = read()
    errors = [math.hypot(1_000 * cut(c), noise(c, None)) for c in of.candidates]
    least = of.candidates[int(np.argmin(errors))]
    assert abs(of.candidates.index(figures.contributions) - of.candidates.index(least)) <= 1
    assert 20 < figures.contributions < 200
    assert figures.cut == pytest.approx(cut(figures.contributions), abs=0.05)
    assert figures.sd == noise(figures.contributions, None)


def test_small_keys_want_a_small_bound_and_large_ones_a_large_one() -> None:
    bounds = [read(key_records=n)[1].contributions for n in (10, 1_000, 100_000)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] / 5 < bounds[2] / 20


def test_what_cannot_be_run_is_not_taken() -> None:
    """Where the noise of a bound cannot be drawn a smaller one is weighed best."""
    _, free = read()
    _, figures = read(noise=lambda c, k: noise(c, k) if c <= free.contributions // 3 else math.inf)
    assert figures.contributions <= free.contributions // 3
    with pytest.raises(ValueError, match="no bound"):
        best(np.array([0.5, 1.0]), np.array([math.inf, math.inf]), 1_000)
    _, none = read(noise=lambda c, k: math.inf)
    assert none.sd is None and none.per_key == ()


def test_a_bound_per_key_lets_more_of_a_unit_count() -> None:
    of, figures = read()
    assert figures.cut is not None and figures.sd is not None
    own = math.hypot(1_000 * figures.cut, figures.sd)
    assert [other.bound for other in figures.per_key] == [1, 2, 4, 8, 16]
    assert all(math.hypot(1_000 * other.cut, other.sd) <= 0.95 * own for other in figures.per_key)
    for other in figures.per_key:
        assert other.contributions > figures.contributions and other.cut < figures.cut
        assert other.sd == noise(other.contributions, other.bound)
    few = [other.contributions for other in figures.per_key]
    assert few == sorted(few, reverse=True)
    bounds, part = np.array(of.candidates, np.float64), np.linspace(0.5, 1, len(of.candidates))
    assert 4 not in [o.bound for o in per_key(bounds, part, noise, 1_000, own=4, most=math.inf)]
    assert per_key(bounds, part, noise, 1_000, own=4, most=1.0) == ()


def test_what_lies_beyond_is_said() -> None:
    """The largest bound that is looked at may be too small; nobody knows what it cuts."""
    _, figures = read(key_records=4_000_000)
    assert figures.contributions == 1_000 and "--max-contributions" in figures.notes[0]
    assert read()[1].notes == ()


def test_parts_between_candidates() -> None:
    of = design(question_with(), private=False).histograms[0]
    counts = np.zeros(of.cells)
    counts[of.candidates.index(4)] = 10
    part = coverage_of(of, np.cumsum(counts))
    parts = np.interp([0, 1, 2, 4, 900], part.edges, part.part)
    assert parts.tolist() == [0, 0.25, 0.5, 1, 1]


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


def cells_of(histogram: Histogram, values: list[int]) -> Int64:
    """Cells labelled by the edge away from 0, one value at a time."""
    out = np.zeros(histogram.cells, np.int64)
    for value in values:
        edges = [e for e in histogram.candidates if (e >= value if value >= 0 else e <= value)]
        out[histogram.candidates.index(min(edges) if value >= 0 else max(edges))] += 1
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


def test_too_few_units_give_no_answer() -> None:
    made = design(but(columns=()))
    of = made.histograms[0]
    counts = np.zeros(of.cells, np.int64)
    assert read_off(QUESTION, made, [exact(of, counts)], free) == Figures(0, (), CONTRIBUTIONS)
    counts[2] = of.answered_from - 1
    assert read_off(QUESTION, made, [exact(of, counts)], free).unanswered == CONTRIBUTIONS
    counts[2] = of.answered_from
    figures = read_off(but(columns=()), made, [exact(of, counts)], free)
    assert figures.unanswered is None and figures.contributions == 36


@pytest.mark.parametrize("cover", [None, 0.5, 0.95])
def test_figures_are_read_from_the_histogram_of_their_name(cover: float | None) -> None:
    """C from the pairs, each clamp from its own column's cells, with the question's tail."""
    columns = (TunedColumn("m", -90, 500), TunedColumn("k", 0, 9))
    question = but(quantile=0.5 if cover is None else None, cover=cover, tail=0.2, columns=columns)
    made = design(question, private=False)
    pairs, m, k = made.histograms
    rng = np.random.default_rng(11)
    counts = [rng.integers(0, 200, of.cells) for of in made.histograms]
    figures = read_off(question, made, [*map(exact, made.histograms, counts)], free)
    sums = [np.cumsum(c).astype(float) for c in counts]
    cell = quantile_cell(sums[0], 0.5) if cover is None else cover_cell(pairs, sums[0], cover)
    assert figures.contributions == min(1000, 12 * pairs.candidates[cell])
    assert figures.bounds == (
        ("m", *clamp_of(m, sums[1], 0.2)),
        ("k", *clamp_of(k, sums[2], 0.2)),
    )
    assert figures.cut == pytest.approx(1 - coverage_of(pairs, sums[0]).part[cell + 1])
    assert figures.sd == 1.0
    assert figures.per_key == () == figures.notes


def test_all_units_beyond_the_largest_candidate() -> None:
    made = design(but(columns=()))
    of = made.histograms[0]
    counts = np.zeros(of.cells, np.int64)
    counts[-1] = 10 * of.good_from
    figures = read_off(but(columns=()), made, [exact(of, counts)], free)
    assert figures.contributions == 1000 and "beyond --max-contributions" in figures.notes[0]


def test_total_of_tuning_and_stream_is_gaussian_composition() -> None:
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe
    from dpstream.pipelines.render.job_plan import details_text
    from tests.streams import make_plan

    plan = make_plan(epsilon=2.0, delta=1e-6)
    budget = allocate(plan)
    mu = mu_of(0.5, 1e-7)
    tuned = Tuned("private", ("total",), "2h", "ab" * 16, 0.5, 1e-7, mu)
    choice = describe(plan, budget, tuned)["choice"]
    total, both = choice["total"], math.hypot(mu, budget.mu)
    assert total["delta"] == pytest.approx(1e-6 + 1e-7)
    thresholds = budget.b * plan.privacy.contributions
    assert delta_of(total["epsilon"], both) + thresholds <= total["delta"]
    assert delta_of(0.999 * total["epsilon"], both) + thresholds > total["delta"]
    assert 2.0 < total["epsilon"] < 2.5
    assert "tuning and stream together" in details_text(plan, budget, tuned)
    assert {k: v for k, v in choice.items() if k not in ("text", "total")} == {
        "how": "private", "run_id": "ab" * 16, "epsilon": 0.5, "delta": 1e-7, "mu": mu,
    }  # fmt: skip
    assert total["mu"] >= both and total["mu"] == pytest.approx(both)
    assert f"({up(0.5)}, {up(1e-7)})-DP mechanism" in choice["text"]
    assert f"together: ({up(total['epsilon'], 4)}, {up(total['delta'], 4)});" in choice["text"]
    assert tuned.warnings() == []
    # Without a guarantee of the stream, or with none left, there is no total to tell.
    spent = msgspec.structs.replace(budget, b=1.0)
    for other in (msgspec.structs.replace(budget, has_guarantee=False), spent):
        choice = tuned.describe(plan, other)
        assert choice["total"]["epsilon"] is None and "together" not in choice["text"]
    assert "bounds of total" in choice["text"] and describe(plan, budget)["choice"] is None


def test_proxy_is_a_warning_in_the_plan() -> None:
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe
    from dpstream.pipelines.render.job_plan import details_text
    from tests.streams import make_plan

    plan = make_plan()
    two = Tuned("proxy", ("total", "level"))
    (words,) = two.warnings()
    assert "and bounds of total, level chosen from other data" in words
    assert two.describe(plan, allocate(plan)) == {"how": "proxy", "text": words}
    tuned = Tuned("proxy")
    warnings = describe(plan, allocate(plan), tuned)["warnings"]
    assert any(w.startswith("contributions chosen from other data: no charge") for w in warnings)
    assert "does not cover the tuning" in details_text(plan, allocate(plan), tuned)
