"""``dpstream choose``: its examples; nothing is asked without a place for the answer."""

from collections.abc import Callable

from dpstream.pipelines.cli.choose import _words
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert len(examples_of("choose")) == 4


def test_a_place_for_the_answer_is_needed(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    assert "--out" in refused("choose", path)
    assert "--first" in refused("choose", path, "--dry-run")


def test_words_say_what_it_costs() -> None:
    public = {
        "how": "private", "rule": "R", "bias": "B", "epsilon": 0.5, "delta": 1e-9, "mu": 0.1,
        "histograms": [{"name": "pairs", "candidates": 7, "rank_error_95": 12.0,
                        "units_for_5_points": 1000, "no_answer_below": 30}],
    }  # fmt: skip
    said = _words(public)
    assert said.startswith("Cost        (0.5") and "good from 1,000 units" in said
    assert "without noise" in _words({**public, "how": "proxy"})
