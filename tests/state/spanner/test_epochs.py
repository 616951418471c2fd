"""Fencing epochs: numbers that never meet, opened while they may be, closed for good."""

from dpstream.state.retention_store import RetainedWindows
from dpstream.state.spanner.batch import Mutations
from dpstream.state.spanner.client import commit, connect, read_rows
from dpstream.state.spanner.epochs import (
    EPOCH_LENGTH,
    close_decisions,
    close_windows,
    of_decision,
    of_window,
    open_fencing_epoch,
)
from dpstream.state.spanner.schema import BOUND, FORGOTTEN, REACH
from tests.state.spanner.bench import SpannerBench

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
