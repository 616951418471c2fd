"""How many key shards a job needs on Spanner: a step is one commit as long as it fits into one."""

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
    """Changed keys that one commit of a step holds at least (rare unit set rows left out)."""
    lists = min(job.plan.timeline.triggers, COMMIT_MUTATIONS // (10 * _LIST))
    return (COMMIT_MUTATIONS - _REST - _LIST * lists) // _ROW


def shards_for(job: Job, changed_keys: int) -> int:
    """Shards that keep a trigger with so many changed keys to one commit a step.

    Keys fall on shards by a keyed hash: six standard deviations of room.
    """
    most, shards = keys_of_a_commit(job), 1
    while shards < MAX_SHARDS:
        mean = changed_keys / shards
        if mean + 6 * math.sqrt(mean) <= most:
            break
        shards = max(shards + 1, min(MAX_SHARDS, math.ceil(shards * 1.02)))
    return shards


def describe(job: Job, changed_keys: int | None) -> dict[str, int]:
    """Figures of ``dpstream plan`` for a job on Spanner; nothing for one on a file."""
    if job.state.path is not None:
        return {}
    figures = {"shards": job.state.shards, "keys_of_a_commit": keys_of_a_commit(job)}
    if changed_keys is not None:
        figures |= {"changed_keys": changed_keys, "shards_needed": shards_for(job, changed_keys)}
    return figures


def text(figures: dict[str, int]) -> str:
    """The figures in words."""
    if not figures:
        return ""
    shards, most = figures["shards"], figures["keys_of_a_commit"]
    lines = [
        f"State       Spanner, {shards} key shards: a step of up to {most:,} changed keys is one",
        "            commit, a larger one is committed in parts, by key. `--changed-keys N` says",
        "            how many shards a trigger with N changed keys needs to avoid that.",
    ]
    if "shards_needed" in figures:
        need = figures["shards_needed"]
        lines = [lines[0], "            commit; " + _needed(figures["changed_keys"], need, shards)]
    return "\n".join(lines) + "\n"


def _needed(changed: int, need: int, have: int) -> str:
    verdict = "enough here" if have >= need else f"set shards = {need}"
    return f"{changed:,} changed keys a trigger need {need:,} shards: {verdict}."
