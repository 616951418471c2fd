"""Trials that read values: which run each is in, what feeds them, and their statistics.

Trials of key selection: when a key first appears, and what the score of a design shows.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.pipelines.jobs.job import Job
from tests.audit.blackbox.run import Released
from tests.audit.blackbox.values import (
    Crossing,
    chunks,
    feeds_of,
    first_tests,
    statistics,
    visible_mu,
)


@pytest.mark.parametrize(
    ("rows", "numbers", "most"),
    [(0, 0, 1_500_000), (500_000, 1, 3), (1, 2_000_000, 2), (1e9, 1e9, 1)],
)
def test_chunks_are_all_trials_in_order(rows: float, numbers: float, most: int) -> None:
    pieces = list(chunks(7, rows, numbers))
    assert np.concatenate(pieces).tolist() == list(range(7))
    assert max(map(len, pieces)) == min(7, most)


def test_a_second_window_is_watched_where_windows_do_not_overlap(
    make_job: Callable[..., Job],
) -> None:
    plan = make_job().plan
    design: Any = SimpleNamespace(feeds=(1, 3))
    timeline = plan.timeline
    assert feeds_of(plan, design) == [(0, 1), (0, 3)]
    two = msgspec.structs.replace(timeline, end=timeline.start + 2 * timeline.slide)
    assert feeds_of(msgspec.structs.replace(plan, timeline=two), design) == [
        (0, 1),
        (0, 3),
        (1, 1),
        (1, 3),
    ]
    over = msgspec.structs.replace(two, slide=timeline.slide // 2)
    assert feeds_of(msgspec.structs.replace(plan, timeline=over), design) == [(0, 1), (0, 3)]


def test_statistics_are_split_by_side_and_one_more_is_fitted() -> None:
    rng, added = np.random.default_rng(3), np.arange(400) % 2 == 1
    features = rng.standard_normal((400, 2))
    features[added, 1] += 3
    samples = statistics(np.arange(800.0).reshape(400, 2), features, added)
    assert len(samples) == 3
    assert samples[0].without.tolist() == list(range(0, 800, 4))
    assert samples[2].added.mean() > samples[2].without.mean()


def test_the_first_test_of_each_key_in_window_0_counts(make_job: Callable[..., Job]) -> None:
    plan = make_job().plan
    assert plan.design.select_every == 1
    key, window, trigger = (
        np.array([4, 4, 5, 7]), np.array([0, 0, 0, 1]), np.array([3, 2, 4, 1])
    )  # fmt: skip
    rows = Released(key, window, trigger, pa.table({}))
    tests = first_tests(plan, rows, np.array([2, 3]), 2, 3)
    # Key 5 passes after the last test that is told apart; key 7 in a window of no trial.
    assert tests.tolist() == [[1, 3], [3, 3]]


def test_ratios_are_logs_and_equal_sides_show_nothing() -> None:
    even = np.array([0.5, 0.3, 0.2])
    more = np.array([0.7, 0.2, 0.1])
    blind = Crossing(5, 1, even, even[None])
    seen = Crossing(5, 4, even, np.stack([more] * 4))
    assert not blind.ratios.any()
    assert np.allclose(np.exp(seen.ratios[0]), more / even)
    assert visible_mu(blind, 1) < 0.1 < 0.5 < visible_mu(seen, 1)
