"""Shards of a job on Spanner: as many as keep a step to one commit."""

import math
from collections.abc import Callable

import pytest

from dpstream.accounting.limits import COMMIT_MUTATIONS, MAX_SHARDS
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.shards import keys_of_a_commit, shard_figures, shards_for
from dpstream.pipelines.render.job_plan import shards_lines


@pytest.mark.parametrize("changed", [1, 10_000, 1_000_000])
def test_shards_have_room_for_their_keys(changed: int, spanner_job: Job) -> None:
    most, shards = keys_of_a_commit(spanner_job), shards_for(spanner_job, changed)
    assert 6 * most < COMMIT_MUTATIONS
    mean = changed / shards
    assert mean + 6 * math.sqrt(mean) <= most
    # About the least number: a tenth fewer would not do.
    fewer = changed / (0.9 * shards)
    assert shards == 1 or fewer + 6 * math.sqrt(fewer) > most


def test_there_are_never_more_than_allowed(spanner_job: Job) -> None:
    assert shards_for(spanner_job, 10**15) == MAX_SHARDS


def test_words_say_whether_there_are_enough(spanner_job: Job, make_job: Callable[..., Job]) -> None:
    assert shard_figures(make_job(), 10) == {} and shards_lines({}) == []
    assert "enough here" in "\n".join(shards_lines(shard_figures(spanner_job, 10)))
    many = shard_figures(spanner_job, 2_000_000)
    assert f"set shards = {many['shards_needed']}" in "\n".join(shards_lines(many))
    assert "--changed-keys" in "\n".join(shards_lines(shard_figures(spanner_job, None)))
