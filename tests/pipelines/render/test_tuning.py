"""What a private choice costs, and what it cuts, as text."""

from typing import Any

import msgspec

from dpstream.accounting.tuning.answer import PerKey
from dpstream.pipelines.render.tuning import choice_text, outcome_text
from dpstream.pipelines.tuning.choose import Outcome


def fields(outcome: Outcome) -> dict[str, Any]:
    """The outcome as values for JSON."""
    return dict(msgspec.to_builtins(outcome._asdict()))


def test_words_say_what_it_costs() -> None:
    public = {
        "how": "private", "rule": "R", "bias": "B", "epsilon": 0.5, "delta": 1e-9, "mu": 0.1,
        "reads": ["2024-01-01T00:00:00Z", "2024-01-03T00:00:00Z"],
        "histograms": [{"name": "pairs", "candidates": 7, "rank_error_95": 12.0,
                        "units_for_5_points": 1000, "no_answer_below": 30}], "warnings": [],
    }  # fmt: skip
    rendered = choice_text(public)
    assert rendered.startswith("Cost        (0.5") and "good from 1,000 units" in rendered
    assert "\nReads       records from 2024-01-01T00:00:00Z to 2024-01-03T00:00:00Z\n" in rendered
    assert "without noise" in choice_text({**public, "how": "proxy"})


def test_words_say_what_is_cut() -> None:
    outcome = Outcome(
        job="new", releases="releases-new", how="proxy", contributions=80, bounds={}, cut=0.31,
        sd=232.0,
        per_key=(PerKey(1, 448, 0.07, 128.0), PerKey(4, 200, 0.2, 250.0)), notes=(), run_id=None,
        charged=False, insecure=False,
    )  # fmt: skip
    rendered = outcome_text(fields(outcome), 1_000)
    assert (
        "Cut         about 31% of all pairs" in rendered and "is about 310 short, ±232" in rendered
    )
    assert "or per_key_bound = 1, contributions = 448: cuts about 7%" in rendered
    assert "beyond 4 records of a key" in rendered and "Job         new" in rendered
    assert rendered.endswith("Releases    releases-new\n")
    private = outcome_text(fields(outcome._replace(run_id="ab")), 1_000)
    assert "at least about 31%" in private and "not seen" in private
    old = outcome_text(fields(outcome._replace(cut=None, sd=None, per_key=())), 1_000)
    assert "Cut" not in old and "Noise" not in old
