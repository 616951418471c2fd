"""Cells as packed bytes: each is read as it was written, lists and pieces lose nothing."""

from base64 import b64decode

import numpy as np
import pyarrow as pa
import pytest

from dpstream.state import arrow
from dpstream.state.spanner import rows as module
from dpstream.state.spanner.rows import (
    PLAIN,
    Layout,
    UnitRows,
    admitted_of,
    cells,
    due_cells,
    id_cells,
    ids_from,
    ids_in,
    pack_columns,
    pack_empty,
    pack_headers,
    pack_records,
    pack_states,
    release_cells,
    row_sizes,
    runs_of,
    unpack_columns,
    unpack_records,
    unpack_states,
)
from dpstream.state.store import NEVER, Admitted, KeyShard, PerKey
from tests.state.conformance import KEY_SCHEMA, STREAMS, change, ids


def sent(written: list[str]) -> list[bytes]:
    """Cells as the client gives them back."""
    return [cell.encode() for cell in written]


def test_a_state_is_read_as_it_was_written() -> None:
    states = KeyShard(KEY_SCHEMA, STREAMS)
    change(states, [1, 2, 3], 5)
    slots = np.array([2, 0])
    written = pack_states(states, slots, np.array([8, 9]), np.array([1, 2]), np.array([3, 4]))
    state_rows = unpack_states(sent(written), STREAMS)
    for name in ("units", "values", "round", "due"):
        assert np.array_equal(state_rows[name], getattr(states, name)[slots])
    assert state_rows[["taken", "chunk", "chunks"]].tolist() == [(8, 1, 3), (9, 2, 4)]


def test_a_key_without_data_waits_for_nothing() -> None:
    state_rows = unpack_states(sent(pack_empty(2, STREAMS)), STREAMS)
    assert state_rows["due"].tolist() == [NEVER] * 2 and not state_rows["values"].any()
    assert not state_rows["units"].any() and not state_rows["taken"].any()


def test_key_columns_keep_their_types() -> None:
    kinds = {"s": pa.string(), "i": pa.int64(), "b": pa.bool_(), "x": pa.binary()}
    columns = [["ä", ""], [-(2**63), 2**63 - 1], [True, False], [b"\xff", b""]]
    keys = pa.table(columns, schema=pa.schema(kinds))
    key_columns = unpack_columns(sent(pack_columns(keys)), keys.schema)
    assert key_columns.to_pylist() == keys.to_pylist() and key_columns.schema == keys.schema
    assert unpack_columns([], keys.schema).num_rows == 0


def test_ids_and_runs() -> None:
    named = ids([5, 0, 9])
    assert np.array_equal(ids_from(sent(id_cells(named))), named)
    assert ids_in(b"").shape == (0, 2) and id_cells(ids([])) == []
    assert list(runs_of(np.array([4, 4, 6]))) == [(4, 0, 2), (6, 2, 3)]
    assert [b64decode(c) for c in cells(b"abcde", 2)] == [b"ab", b"cd", b"e"]


@pytest.mark.parametrize("size", [16, 32, 1 << 20])
def test_every_key_is_on_the_list_of_its_due_trigger(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CELL_BYTES", size)
    named, due = ids([1, 2, 3, 4, 5]), np.array([7, 3, 7, 7, 3])
    due_keys: dict[int, list[int]] = {}
    for value, cell in due_cells(named, due):
        raw = b64decode(cell)
        assert 0 < len(raw) <= size
        due_keys.setdefault(value, []).extend(ids_in(raw)[:, 0].tolist())
    assert due_keys == {3: [2, 5], 7: [1, 3, 4]}


def test_releases_are_cut_by_what_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELL_BYTES", 100)
    rows = pa.RecordBatch.from_pydict({"page": ["x" * n for n in (10, 90, 10, 10, 200)]})
    assert row_sizes(rows).tolist() == [18, 98, 18, 18, 208]
    pieces = [arrow.from_bytes(b64decode(c)) for c in release_cells(rows)]
    assert [p.num_rows for p in pieces] == [1, 3, 1]
    assert pa.Table.from_batches(pieces).to_pylist() == rows.to_pylist()
    (none,) = release_cells(rows.slice(0, 0))
    assert arrow.from_bytes(b64decode(none)).num_rows == 0


def test_bytes_of_missing_values_are_those_of_the_column_alone() -> None:
    rows = pa.RecordBatch.from_pydict({"a": pa.array(["xy", None]), "n": [1, 2]})
    assert row_sizes(rows).tolist() == [18, 16]


@pytest.mark.parametrize("ranked", [False, True])
def test_a_units_row_is_its_records_and_what_has_gone(ranked: bool) -> None:
    one = np.arange(3, dtype=np.int32)
    rank = one + 5 if ranked else None
    admitted = Admitted(one, one.astype(np.int64) + 40, one, one + 1, one + 7, rank)
    raw = pack_records(admitted, np.array([2, 0, 1]))
    assert len(raw) == 3 * PLAIN.record.itemsize
    heads = pack_headers(np.array([10, 0]), np.array([NEVER, 9]))
    unit_rows = UnitRows.of([heads[0] + raw, heads[1]])
    assert unit_rows.records["offset"].tolist() == [42, 40, 41] and unit_rows.owner.tolist() == [
        0,
        0,
        0,
    ]
    assert unit_rows.records["rank"].tolist() == ([7, 5, 6] if ranked else [0, 0, 0])
    assert unit_rows.counts.tolist() == [10 + 3 + 1 + 2, 0]
    assert (unit_rows.gone.tolist(), unit_rows.until.tolist()) == ([10, 0], [NEVER, 9])
    assert unpack_records([b"", raw])[1].tolist() == [1, 1, 1]


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
