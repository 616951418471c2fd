"""Shards of a job on Spanner: as many as keep a step to one commit."""

import math
from collections.abc import Callable

import msgspec
import pytest

from dpstream.accounting.limits import COMMIT_MUTATIONS, MAX_SHARDS
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.scale.shards import describe, keys_of_a_commit, shards_for, text


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    made = make_job()
    state = msgspec.structs.replace(made.state, store="spanner://p/i/d", shards=16)
    return msgspec.structs.replace(made, state=state)


@pytest.mark.parametrize("changed", [1, 10_000, 1_000_000])
def test_shards_have_room_for_their_keys(changed: int, job: Job) -> None:
    most, shards = keys_of_a_commit(job), shards_for(job, changed)
    assert 6 * most < COMMIT_MUTATIONS
    mean = changed / shards
    assert mean + 6 * math.sqrt(mean) <= most
    # About the least number: a tenth fewer would not do.
    fewer = changed / (0.9 * shards)
    assert shards == 1 or fewer + 6 * math.sqrt(fewer) > most


def test_there_are_never_more_than_allowed(job: Job) -> None:
    assert shards_for(job, 10**15) == MAX_SHARDS


def test_words_say_whether_there_are_enough(job: Job, make_job: Callable[..., Job]) -> None:
    assert describe(make_job(), 10) == {} and text({}) == ""
    assert "enough here" in text(describe(job, 10))
    many = describe(job, 2_000_000)
    assert f"set shards = {many['shards_needed']}" in text(many)
    assert "--changed-keys" in text(describe(job, None))
