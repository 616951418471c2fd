"""The number of key shards that a job needs on Spanner, so that a step fits into one commit."""

import math

from dpstream.accounting.limits import COMMIT_MUTATIONS, MAX_SHARDS
from dpstream.pipelines.jobs.job import Job

#: Mutations of a changed key: its row's six columns.
_ROW = 6
#: Mutations of a list of due keys, one for each trigger that some key is due at.
_LIST = 6
#: Rows that a step writes besides: releases, progress.
_REST = 20


def keys_of_a_commit(job: Job) -> int:
    """Return how many changed keys one commit of a step holds at least (rare unit set rows left
    out).
    """
    lists = min(job.plan.timeline.triggers, COMMIT_MUTATIONS // (10 * _LIST))
    return (COMMIT_MUTATIONS - _REST - _LIST * lists) // _ROW


def shards_for(job: Job, changed_keys: int) -> int:
    """Return the number of shards with which a step of so many changed keys is one commit.

    Keys fall on shards by a keyed hash: six standard deviations of room.
    """
    most, shards = keys_of_a_commit(job), 1
    while shards < MAX_SHARDS:
        mean = changed_keys / shards
        if mean + 6 * math.sqrt(mean) <= most:
            break
        shards = max(shards + 1, min(MAX_SHARDS, math.ceil(shards * 1.02)))
    return shards


def shard_figures(job: Job, changed_keys: int | None) -> dict[str, int]:
    """Return the figures of ``dpstream plan`` for a job on Spanner; none for one on a file."""
    if job.state.path is not None:
        return {}
    figures = {"shards": job.state.shards, "keys_of_a_commit": keys_of_a_commit(job)}
    if changed_keys is not None:
        figures |= {"changed_keys": changed_keys, "shards_needed": shards_for(job, changed_keys)}
    return figures
