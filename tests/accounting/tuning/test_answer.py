"""What a tuning says: figures from noisy counts, its cost with the stream, its warnings."""

import math

import msgspec
import numpy as np
import pytest

from dpstream.accounting.figures import up
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.tuning.answer import Figures, Tuned, read_off
from dpstream.accounting.tuning.quantiles import clamp_of, cover_cell, quantile_cell
from dpstream.accounting.tuning.question import (
    CONTRIBUTIONS,
    TunedColumn,
    design,
)
from dpstream.accounting.tuning.weighing import coverage_of
from tests.accounting.tuning.questions import QUESTION, but, exact, free


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
    from dpstream.accounting.guarantee import describe, text
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
    assert "tuning and stream together" in text(plan, budget, tuned)
    assert {k: v for k, v in choice.items() if k not in ("text", "total")} == {
        "how": "private", "run_id": "ab" * 16, "epsilon": 0.5, "delta": 1e-7, "mu": mu,
    }  # fmt: skip
    assert total["mu"] >= both and total["mu"] == pytest.approx(both)
    assert f"({up(0.5)}, {up(1e-7)})-DP mechanism" in choice["text"]
    assert f"together: ({up(total['epsilon'], 4)}, {up(total['delta'], 4)});" in choice["text"]
    assert tuned.warnings() == []
    # Without a guarantee of the stream, or with none left, there is no total to tell.
    spent = msgspec.structs.replace(budget, b=1.0)
    for other in (msgspec.structs.replace(budget, sound=False), spent):
        choice = tuned.describe(plan, other)
        assert choice["total"]["epsilon"] is None and "together" not in choice["text"]
    assert "bounds of total" in choice["text"] and describe(plan, budget)["choice"] is None


def test_proxy_is_a_warning_in_the_plan() -> None:
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe, text
    from tests.streams import make_plan

    plan = make_plan()
    two = Tuned("proxy", ("total", "level"))
    (words,) = two.warnings()
    assert "and bounds of total, level chosen from other data" in words
    assert two.describe(plan, allocate(plan)) == {"how": "proxy", "text": words}
    tuned = Tuned("proxy")
    warnings = describe(plan, allocate(plan), tuned)["warnings"]
    assert any(w.startswith("contributions chosen from other data: no charge") for w in warnings)
    assert "does not cover the tuning" in text(plan, allocate(plan), tuned)
