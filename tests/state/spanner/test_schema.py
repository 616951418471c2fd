"""Tables and identity: made once, told from those of others, their numbers asked for once.

Notes of the Spanner store: changed by comparison, apart by generation.

Mutations of a commit as Spanner counts them, and rows in commits that fit.

Fencing epochs: numbers that never meet, opened while they may be, closed for good.

Rows of a new generation: no commit is too large, none of them is lost, all are read back.

Cells as packed bytes: each is read as it was written, lists and pieces lose nothing.
"""

from base64 import b64decode
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.limits import COMMIT_BYTES, COMMIT_MUTATIONS
from dpstream.state import arrow
from dpstream.state.retention_store import RetainedWindows
from dpstream.state.spanner import fill as module
from dpstream.state.spanner import rows as module_of_rows
from dpstream.state.spanner.client import commit, connect, read_rows
from dpstream.state.spanner.fill import PROGRESS as FILL_PROGRESS
from dpstream.state.spanner.fill import Filled
from dpstream.state.spanner.rows import (
    Layout,
    admitted_of,
    due_cells,
    ids_in,
    pack_columns,
    pack_records,
    release_cells,
    row_sizes,
    unpack_columns,
    unpack_records,
)
from dpstream.state.spanner.schema import (
    BOUND,
    DDL,
    EPOCH_LENGTH,
    FORGOTTEN,
    REACH,
    Mutations,
    close_decisions,
    close_windows,
    create_identity,
    create_tables,
    fits,
    note_name,
    of_decision,
    of_window,
    open_fencing_epoch,
    parts,
    read_metadata,
    swap_metadata,
)
from dpstream.state.store import Admitted, PerKey
from tests import emulator
from tests.golden.refusals import Refused
from tests.state.conformance import IDENTITY, StoreConformance, ids
from tests.state.life_conformance import RetentionConformance
from tests.state.spanner.bench import SpannerBench


def test_a_note_is_of_its_generation(bench: SpannerBench) -> None:
    database = connect(bench.url)
    assert swap_metadata(database, note_name(0, "x"), None, "b")
    assert bench.open().metadata("x") == "b" and read_metadata(database, note_name(1, "x")) is None


def test_the_schema_file_is_the_schema() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "spanner" / "schema.sql").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    assert "\n".join(lines).strip() == DDL.strip()


def test_tables_are_created_once(bench: SpannerBench) -> None:
    assert create_tables(connect(bench.url)) is False


def test_tables_of_others_are_left_alone(running: None, refused: Refused) -> None:
    url = emulator.fresh_url()
    database = connect(url)
    database.create().result(60)
    database.update_ddl(["CREATE TABLE Mine (A INT64) PRIMARY KEY (A)"]).result(60)
    refused(lambda: create_tables(database))
    emulator.drop(url)


def test_another_format_is_refused(bench: SpannerBench, refused: Refused) -> None:
    database = connect(bench.url)
    commit(database, lambda batch: batch.update("Meta", ("Name", "Value"), [("format", "1")]))
    for attempt in (bench.open, lambda: create_identity(database, IDENTITY)):
        caught = refused(attempt)
        assert "the program that wrote it" in caught.fix


def test_the_numbers_of_a_run_are_asked_for_once(running: None) -> None:
    url = emulator.fresh_url()
    create_tables(connect(url))
    begun = create_identity(connect(url), IDENTITY, lambda: "numbers")
    assert begun == msgspec.structs.replace(IDENTITY, calibration="numbers")
    assert create_identity(connect(url), IDENTITY, pytest.fail) == begun
    emulator.drop(url)


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
    for _ in range(2):  # an epoch's row is written once: two columns of its key, and Reached
        out.require(0, of_window(5))
    assert (out.count, out.bytes) == (13, 45)


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
    store.retained_windows = RetainedWindows(2 * EPOCH_LENGTH)
    close_windows(database, 0, 2 * EPOCH_LENGTH)
    assert not open_fencing_epoch(database, 0, 0, of_window(EPOCH_LENGTH)), "now it is"


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


@pytest.mark.parametrize(("cell", "rows"), [(8, 60_000), (400_000, 200)])
def test_no_commit_is_too_large_and_no_row_is_lost(
    cell: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[Mutations] = []
    monkeypatch.setattr(module, "commit", lambda _, fill: commits.append(fill.__self__))
    filled = Filled(None)  # type: ignore[arg-type]
    filled.upsert("Progress", FILL_PROGRESS, [[n, 0, "x" * cell] for n in range(rows)])
    filled.flush()
    assert len(commits) > 2 and max(out.count for out in commits) <= COMMIT_MUTATIONS
    assert max(out.bytes for out in commits) < 40 << 20
    numbers = [
        row[0] for out in commits for _, _, upsert_rows in out._upsert for row in upsert_rows
    ]
    assert numbers == list(range(rows))


def sent(written: list[str]) -> list[bytes]:
    """Cells as the client gives them back."""
    return [cell.encode() for cell in written]


def test_key_columns_keep_their_types() -> None:
    kinds = {"s": pa.string(), "i": pa.int64(), "b": pa.bool_(), "x": pa.binary()}
    columns = [["ä", ""], [-(2**63), 2**63 - 1], [True, False], [b"\xff", b""]]
    keys = pa.table(columns, schema=pa.schema(kinds))
    key_columns = unpack_columns(sent(pack_columns(keys)), keys.schema)
    assert key_columns.to_pylist() == keys.to_pylist() and key_columns.schema == keys.schema
    assert unpack_columns([], keys.schema).num_rows == 0


@pytest.mark.parametrize("size", [16, 32, 1 << 20])
def test_every_key_is_on_the_list_of_its_due_trigger(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_rows, "CELL_BYTES", size)
    named, due = ids([1, 2, 3, 4, 5]), np.array([7, 3, 7, 7, 3])
    due_keys: dict[int, list[int]] = {}
    for value, cell in due_cells(named, due):
        raw = b64decode(cell)
        assert 0 < len(raw) <= size
        due_keys.setdefault(value, []).extend(ids_in(raw)[:, 0].tolist())
    assert due_keys == {3: [2, 5], 7: [1, 3, 4]}


def test_releases_are_cut_by_what_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_rows, "CELL_BYTES", 100)
    rows = pa.RecordBatch.from_pydict({"page": ["x" * n for n in (10, 90, 10, 10, 200)]})
    assert row_sizes(rows).tolist() == [18, 98, 18, 18, 208]
    pieces = [arrow.from_bytes(b64decode(c)) for c in release_cells(rows)]
    assert [p.num_rows for p in pieces] == [1, 3, 1]
    assert pa.Table.from_batches(pieces).to_pylist() == rows.to_pylist()
    (none,) = release_cells(rows.slice(0, 0))
    assert arrow.from_bytes(b64decode(none)).num_rows == 0


@pytest.mark.parametrize("per_key", [False, True])
def test_digests_are_kept_where_ids_name_records(per_key: bool) -> None:
    one = np.arange(2, dtype=np.int32)
    digest = np.array([7, (1 << 64) - 1], np.uint64)
    words = np.ones(2, np.uint64)
    of_key = PerKey(np.array([1, 3], np.uint64), one, words, words)
    bound = of_key if per_key else None
    admitted = Admitted(one, one.astype(np.int64), one, one, one, one, bound, digest)
    raw = pack_records(admitted, np.array([1, 0]))
    admitted_records = admitted_of(*unpack_records([raw], Layout(per_key, named=True)))
    assert (
        admitted_records.digest is not None
        and admitted_records.digest.tolist() == digest[::-1].tolist()
    )
    assert (admitted_records.per_key is not None) == per_key


# The Spanner store on the official emulator: conformance, and what is its own.


class TestSpannerStore(StoreConformance):
    """The suite every store passes."""


class TestSpannerRetention(RetentionConformance):
    """The suite of every store's own life."""
