"""Mutations of a commit as Spanner counts them, and rows in commits that fit.

Fencing epochs: numbers that never meet, opened while they may be, closed for good.
"""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.limits import COMMIT_BYTES, COMMIT_MUTATIONS
from dpstream.state.retention_store import RetainedWindows
from dpstream.state.spanner.client import commit, connect, read_rows
from dpstream.state.spanner.commits import (
    EPOCH_LENGTH,
    Mutations,
    close_decisions,
    close_windows,
    fits,
    of_decision,
    of_window,
    open_fencing_epoch,
    parts,
)
from dpstream.state.spanner.schema import BOUND, FORGOTTEN, REACH
from tests.state.spanner.bench import SpannerBench


class Calls:
    """Takes the place of the client's batch: what it was asked for, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.made.append((name, *arguments))


def test_a_row_counts_once_for_each_column() -> None:
    out = Mutations()
    out.insert("Steps", ("A", "B", "C"), [[1, "xyz", None], [2, "", "ab"]])
    assert (out.count, out.bytes) == (6, 8 + 3 + 8 + 8 + 0 + 2)
    out.upsert("Units", ("A", "B"), [[1, 2]])
    assert (out.count, out.bytes) == (8, 29 + 16)
    out.upsert("Units", ("A", "B"), [])
    out.delete_all("Keys", 1, 2)
    out.delete_between("Keys", (1, 2), (1, 9))
    assert (out.count, out.bytes) == (10, 45)


def test_an_epoch_is_asked_for_once_however_often() -> None:
    out = Mutations()
    for epoch in (-5, -5, -6):
        out.require(1, epoch)
    assert out.count == 6 and out.epochs == {(1, -5), (1, -6)}


def test_everything_gets_into_the_batch() -> None:
    out, batch = Mutations(), Calls()
    out.delete_all("Keys", 1, 2)
    out.require(1, -5)
    out.upsert("Units", ("A",), [[3]])
    out.insert("Steps", ("A",), [[4]])
    out.fill(batch)
    assert batch.made[:3] == [
        ("insert", "Steps", ("A",), [[4]]),
        ("insert_or_update", "Units", ("A",), [[3]]),
        ("update", "Progress", ("Part", "WindowIndex", "Reached"), [[1, -5, 0]]),
    ]
    ((name, table, keys),) = batch.made[3:]
    assert (name, table) == ("delete", "Keys") and keys.ranges[0].start_closed == [1, 2]


def test_commits_have_marks_of_their_own() -> None:
    marks = {Mutations().writer for _ in range(9)}
    assert len(marks) == 9 and {len(mark) for mark in marks} == {32}


def test_a_commit_may_be_full_and_no_fuller() -> None:
    for name, most in (("count", COMMIT_MUTATIONS), ("bytes", COMMIT_BYTES)):
        out = Mutations()
        setattr(out, name, most)
        assert fits(out)
        setattr(out, name, most + 1)
        assert not fits(out)


@pytest.mark.parametrize("mutations", [3, 17, 5000])
@pytest.mark.parametrize("size", [40, 70_000, 3_000_000])
def test_runs_of_rows_fit_into_commits(mutations: int, size: int) -> None:
    """Bytes are sent as base64: a third more."""
    rng = np.random.default_rng(mutations)
    rows, sizes = np.arange(100, 1100), rng.integers(1, size, 1000)
    runs = parts(rows, mutations, sizes)
    assert np.concatenate(runs).tolist() == rows.tolist()
    for run in runs:
        assert len(run) and len(run) * mutations <= COMMIT_MUTATIONS
        assert sizes[run - 100].sum() * 4 / 3 <= COMMIT_BYTES


def test_no_rows_are_one_run() -> None:
    (run,) = parts(np.arange(0), 3, np.arange(0))
    assert len(run) == 0


PROGRESS = ("Part", "WindowIndex", "Reached")


def test_numbers_of_windows_decisions_and_progress_never_meet() -> None:
    windows = [of_window(n * EPOCH_LENGTH) for n in (0, 1, 2, 1 << 24)]
    decisions = [of_decision(n * EPOCH_LENGTH) for n in (0, 1, 2, 1 << 24)]
    assert len({*windows, *decisions, BOUND, FORGOTTEN, REACH}) == 11
    assert max(decisions) < min(windows) < max(windows) < min(BOUND, FORGOTTEN, REACH)
    assert of_window(0) == of_window(EPOCH_LENGTH - 1) != of_window(EPOCH_LENGTH)
    assert of_decision(0) == of_decision(EPOCH_LENGTH - 1) != of_decision(EPOCH_LENGTH)


def progress(bench: SpannerBench) -> set[int]:
    return {int(w) for (w,) in read_rows(connect(bench.url), "Progress", ("WindowIndex",))}


def test_an_epoch_of_dropped_windows_is_closed_for_good(bench: SpannerBench) -> None:
    database, store = connect(bench.url), bench.open()
    for window in (0, EPOCH_LENGTH, 2 * EPOCH_LENGTH):
        assert open_fencing_epoch(database, 0, 0, of_window(window))
    store.retained_windows = RetainedWindows(2 * EPOCH_LENGTH - 1)
    close_windows(database, 0, 2 * EPOCH_LENGTH - 1)
    assert progress(bench) == {of_window(EPOCH_LENGTH), of_window(2 * EPOCH_LENGTH)}
    assert not open_fencing_epoch(database, 0, 0, of_window(0))
    assert open_fencing_epoch(database, 0, 0, of_window(EPOCH_LENGTH)), "its last one is not"


def test_an_epoch_before_that_of_the_last_decision_is_closed(bench: SpannerBench) -> None:
    database, out = connect(bench.url), Mutations()
    assert open_fencing_epoch(database, 0, 0, of_decision(0))
    decided = 2 * EPOCH_LENGTH + 5
    out.upsert("Progress", PROGRESS, [[0, BOUND, decided]])
    columns = ("Part", "WindowIndex", "Step", "Piece", "Writer", "Releases")
    followed = (0, EPOCH_LENGTH, 2 * EPOCH_LENGTH)
    out.upsert("Steps", columns, [[0, BOUND, trigger, 0, "w", None] for trigger in followed])
    commit(database, out.fill)
    close_decisions(database, 0, decided)
    assert progress(bench) == {BOUND}
    assert [row[0] for row in read_rows(database, "Steps", ("Step",))] == [2 * EPOCH_LENGTH]
    assert not open_fencing_epoch(database, 0, 0, of_decision(EPOCH_LENGTH))
    assert open_fencing_epoch(database, 0, 0, of_decision(decided))
    assert open_fencing_epoch(database, 0, 1, of_decision(0)), "another shard has not decided"
