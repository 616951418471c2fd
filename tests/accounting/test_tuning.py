"""Tuning: grids, sensitivity of the encoders, exact figures without noise, stated accuracy."""

import itertools
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import up
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.tuning.answer import Figures, Tuned, read_off
from dpstream.accounting.tuning.quantiles import clamp_of, cover_cell, prefixes, quantile_cell
from dpstream.accounting.tuning.question import (
    CONTRIBUTIONS,
    Histogram,
    Question,
    TunedColumn,
    TuningDesign,
    contributions_of,
    design,
    encoder_matrix,
    magnitudes,
    pair_candidates,
    value_candidates,
    worst_factor,
)

HOUR = 3_600_000_000
ASKED = Question(2 * HOUR, 1.0, 1e-9, 0.9, None, 1000, "12", 0.05, 1, (TunedColumn("m", -90, 500),))


def but(**changes: object) -> Question:
    return msgspec.structs.replace(ASKED, **changes)


def exact(of: Histogram, counts: Int64) -> Int64:
    return np.asarray(encoder_matrix(of.cells) @ counts)


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


@pytest.mark.parametrize("columns", [(), ASKED.columns, (*ASKED.columns, TunedColumn("k", 0, 9))])
def test_all_histograms_together_cost_mu(columns: tuple[TunedColumn, ...]) -> None:
    made = design(but(columns=columns))
    used = sum((of.sensitivity / of.sigma) ** 2 for of in made.histograms)
    assert 0.999 * made.mu**2 < used <= made.mu**2
    assert delta_of(1.0, math.sqrt(used)) <= 1e-9 < delta_of(1.0, 1.01 * math.sqrt(used))
    half = sum((of.sensitivity / (of.sigma / 2)) ** 2 for of in made.histograms)
    assert delta_of(1.0, math.sqrt(half)) > 1e-9


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
def test_questions_that_are_refused_in_public(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        design(but(**changes))
    assert caught.value.field == field


# --- figures without noise are exact ---------------------------------------------------------


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
    kept = [int(np.minimum(pairs, c).sum()) for c in range(8)]
    assert kept[bound] >= cover * kept[7] - 1e-6 and kept[bound - 1] < cover * kept[7]


# --- with noise ------------------------------------------------------------------------------


def rank_errors(made: TuningDesign, scale: float, draws: int = 400) -> list[float]:
    """Share of draws in which a prefix minus its target errs beyond the stated rank error."""
    rng, shares = np.random.default_rng(3), []
    for of in made.histograms:
        matrix = encoder_matrix(of.cells)
        counts = rng.integers(0, 200, of.cells)
        noise = np.rint(rng.normal(0, of.sigma * scale, (draws, len(matrix)))).astype(np.int64)
        decode = np.cumsum(np.linalg.pinv(matrix.astype(float)), axis=0)
        found = (matrix @ counts + noise) @ decode.T
        truth = np.cumsum(counts)
        worst = np.zeros(draws)
        for q in of.targets:
            wrong = (found - q * found[:, -1:]) - (truth - q * truth[-1])
            worst = np.maximum(worst, np.abs(wrong).max(axis=1))
        shares.append(float((worst > of.rank_error).mean()))
    return shares


def test_stated_rank_error_holds_and_is_not_idle() -> None:
    made = design(ASKED)
    assert max(rank_errors(made, 1.0)) < 0.08
    assert min(rank_errors(made, 2.0)) > 0.3  # the check can fail


def test_too_few_units_give_no_answer() -> None:
    made = design(but(columns=()))
    of = made.histograms[0]
    counts = np.zeros(of.cells, np.int64)
    assert read_off(ASKED, made, [exact(of, counts)]) == Figures(0, (), CONTRIBUTIONS)
    counts[2] = of.answered_from - 1
    assert read_off(ASKED, made, [exact(of, counts)]).unanswered == CONTRIBUTIONS
    counts[2] = of.answered_from
    found = read_off(but(columns=()), made, [exact(of, counts)])
    assert found.unanswered is None and found.contributions == 36


@pytest.mark.parametrize("cover", [None, 0.5, 0.95])
def test_figures_are_read_from_the_histogram_of_their_name(cover: float | None) -> None:
    """C from the pairs, each clamp from its own column's cells, with the question's tail."""
    columns = (TunedColumn("m", -90, 500), TunedColumn("k", 0, 9))
    asked = but(quantile=0.5 if cover is None else None, cover=cover, tail=0.2, columns=columns)
    made = design(asked, private=False)
    pairs, m, k = made.histograms
    rng = np.random.default_rng(11)
    counts = [rng.integers(0, 200, of.cells) for of in made.histograms]
    figures = read_off(asked, made, [*map(exact, made.histograms, counts)])
    sums = [np.cumsum(c).astype(float) for c in counts]
    cell = quantile_cell(sums[0], 0.5) if cover is None else cover_cell(pairs, sums[0], cover)
    assert figures == Figures(
        min(1000, 12 * pairs.candidates[cell]),
        (("m", *clamp_of(m, sums[1], 0.2)), ("k", *clamp_of(k, sums[2], 0.2))),
    )


def test_all_units_beyond_the_largest_candidate() -> None:
    made = design(but(columns=()))
    of = made.histograms[0]
    counts = np.zeros(of.cells, np.int64)
    counts[-1] = 10 * of.good_from
    found = read_off(but(columns=()), made, [exact(of, counts)])
    assert found.contributions == 1000 and "beyond --max-contributions" in found.notes[0]


# --- words -----------------------------------------------------------------------------------


def test_total_of_tuning_and_stream_is_gaussian_composition() -> None:
    from dpstream.accounting.budget import allocate
    from dpstream.accounting.guarantee import describe, text
    from tests.streams import make_plan

    plan = make_plan(epsilon=2.0, delta=1e-6)
    budget = allocate(plan)
    mu = mu_of(0.5, 1e-7)
    tuned = Tuned("private", ("total",), "2h", "ab" * 16, 0.5, 1e-7, mu)
    told = describe(plan, budget, tuned)["choice"]
    total, both = told["total"], math.hypot(mu, budget.mu)
    assert total["delta"] == pytest.approx(1e-6 + 1e-7)
    thresholds = budget.b * plan.privacy.contributions
    assert delta_of(total["epsilon"], both) + thresholds <= total["delta"]
    assert delta_of(0.999 * total["epsilon"], both) + thresholds > total["delta"]
    assert 2.0 < total["epsilon"] < 2.5
    assert "tuning and stream together" in text(plan, budget, tuned)
    assert {k: v for k, v in told.items() if k not in ("words", "total")} == {
        "how": "private", "run_id": "ab" * 16, "epsilon": 0.5, "delta": 1e-7, "mu": mu,
    }  # fmt: skip
    assert total["mu"] >= both and total["mu"] == pytest.approx(both)
    assert f"({up(0.5)}, {up(1e-7)})-DP mechanism" in told["words"]
    assert f"together: ({up(total['epsilon'], 4)}, {up(total['delta'], 4)});" in told["words"]
    assert tuned.warnings() == []
    # Without a guarantee of the stream, or with none left, there is no total to tell.
    spent = msgspec.structs.replace(budget, b=1.0)
    for other in (msgspec.structs.replace(budget, sound=False), spent):
        told = tuned.describe(plan, other)
        assert told["total"]["epsilon"] is None and "together" not in told["words"]
    assert "clamps of total" in told["words"] and describe(plan, budget)["choice"] is None


def test_proxy_is_a_warning_in_the_plan() -> None:
    from dpstream.accounting.budget import allocate
    from dpstream.accounting.guarantee import describe, text
    from tests.streams import make_plan

    plan = make_plan()
    two = Tuned("proxy", ("total", "level"))
    (words,) = two.warnings()
    assert "and clamps of total, level chosen from other data" in words
    assert two.describe(plan, allocate(plan)) == {"how": "proxy", "words": words}
    tuned = Tuned("proxy")
    warnings = describe(plan, allocate(plan), tuned)["warnings"]
    assert any(w.startswith("contributions chosen from other data: no charge") for w in warnings)
    assert "does not cover the tuning" in text(plan, allocate(plan), tuned)
