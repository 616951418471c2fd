"""Trials that read values: which run each is in, what feeds them, and their statistics."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.pipelines.audit.values import chunks, feeds_of, statistics
from dpstream.pipelines.jobs.job import Job


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
    line = plan.timeline
    assert feeds_of(plan, design) == [(0, 1), (0, 3)]
    two = msgspec.structs.replace(line, end=line.start + 2 * line.slide)
    assert feeds_of(msgspec.structs.replace(plan, timeline=two), design) == [
        (0, 1),
        (0, 3),
        (1, 1),
        (1, 3),
    ]
    over = msgspec.structs.replace(two, slide=line.slide // 2)
    assert feeds_of(msgspec.structs.replace(plan, timeline=over), design) == [(0, 1), (0, 3)]


def test_statistics_are_split_by_side_and_one_more_is_fitted() -> None:
    rng, added = np.random.default_rng(3), np.arange(400) % 2 == 1
    features = rng.standard_normal((400, 2))
    features[added, 1] += 3
    samples = statistics(np.arange(800.0).reshape(400, 2), features, added)
    assert len(samples) == 3
    assert samples[0].without.tolist() == list(range(0, 800, 4))
    assert samples[2].added.mean() > samples[2].without.mean()
