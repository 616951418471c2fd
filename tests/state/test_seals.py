"""Digests: every bit, every place; one error for what libraries make of damaged bytes."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state import arrow, seals
from dpstream.state.seals import damaged, sealed, sealed_text, unsealed, unsealed_text
from dpstream.state.sqlite.backup import check_file
from dpstream.state.sqlite.store import SqliteStore
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.sqlite.test_upgrade import resharded_today


@pytest.mark.parametrize("size", [0, 1, 100])
def test_every_bit_counts(size: int) -> None:
    data = bytes(range(size))
    blob = sealed("steps/1/2/3/keys", data)
    assert unsealed("steps/1/2/3/keys", blob) == data and len(blob) == size + seals.SIZE
    for bit in range(8 * len(blob)):
        other = bytearray(blob)
        other[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PolicyError, match="is damaged"):
            unsealed("steps/1/2/3/keys", bytes(other))


@pytest.mark.parametrize(
    "name", ["steps/1/2/3/states", "steps/12/3/keys", "carried/1/2/3/keys", ""]
)
def test_another_place_counts(name: str) -> None:
    with pytest.raises(PolicyError):
        unsealed(name, sealed("steps/1/2/3/keys", b"data"))


@pytest.mark.parametrize("blob", [None, "text", 7, 1.5, b"", b"short"])
def test_what_is_no_blob_any_more(blob: object) -> None:
    """A flip in a record's header makes a number, a text or NULL of a blob."""
    with pytest.raises(PolicyError):
        unsealed("x", blob)


def test_texts() -> None:
    text = sealed_text("meta/note.x/value", "a b")
    assert unsealed_text("meta/note.x/value", text) == "a b" and text.endswith(" a b")
    broken = (text[:-1], text.upper(), "\udcff" + text[1:], text + "\udc80", "a b", "", None, b"x")
    for other in broken:
        with pytest.raises(PolicyError):
            unsealed_text("meta/note.x/value", other)
    with pytest.raises(PolicyError):
        unsealed_text("meta/note.y/value", text)


def test_bytes_that_are_no_batch() -> None:
    whole = arrow.to_bytes(pa.RecordBatch.from_pydict({"a": [1, 2]}))
    for some in (b"", b"\0" * 40, whole[:50], whole[:-60]):
        with pytest.raises(PolicyError) as caught:
            arrow.from_bytes(some)
        assert str(caught.value) == str(damaged())


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A store with rows in every table."""
    store = resharded_today(tmp_path)
    store.close()
    yield tmp_path / "new.db"


def rows(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        found = db.execute(statement, values).fetchall()
    db.close()
    return found


def use(path: Path) -> None:
    """Read all that a run reads."""
    store = SqliteStore(path, KEY_SCHEMA, STREAMS)
    try:
        for window, shard, last in store.progress():
            store.key_shard(window, shard)
            for trigger in range(1, last + 2):
                store.committed_releases(window, shard, trigger)
                store.released_ahead(window, shard, trigger)
        for shard in range(store.identity.shards):
            store.admitted_before(shard, store.unit_shard(shard))
    finally:
        store.close()


BLOBS = [
    ("steps", "releases"), ("carried", "releases"), ("unit_shards", "progress"),
    ("admissions", "units"), ("admissions", "records"),
    *(("snapshots", column) for column in ("keys", "states", "pairs")),
]  # fmt: skip


@pytest.mark.parametrize(("table", "column"), BLOBS)
def test_a_blob_in_another_rows_place_is_noticed(file: Path, table: str, column: str) -> None:
    use(file)
    one, other = rows(file, f"SELECT rowid, {column} FROM {table} ORDER BY rowid")[-2:]
    assert one[1] != other[1]
    rows(file, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", other[1], one[0])
    for attempt in (lambda: use(file), lambda: check_file(file)):
        with pytest.raises(PolicyError, match="is damaged"):
            attempt()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE unit_shards SET shard = 7 WHERE shard = 2",
        "UPDATE meta SET name = 'note.y' WHERE name = 'note.x'",
        "UPDATE meta SET value = replace(value, '\"epoch\":0', '\"epoch\":1')",
        "UPDATE admissions SET cut = cut + 1",
        "UPDATE steps SET trigger = trigger + 4",
        "DELETE FROM steps WHERE trigger = 1",
        "INSERT INTO snapshots SELECT * FROM snapshots LIMIT 1",
        "UPDATE snapshots SET keys = CAST(keys AS TEXT)",
        "DROP INDEX admissions_by_shard",
        "ALTER TABLE steps RENAME COLUMN keys TO kess",
    ],
)
def test_numbers_names_and_tables_are_what_they_were(file: Path, statement: str) -> None:
    rows(file, statement)
    with pytest.raises(PolicyError, match="is damaged"):
        use(file)


def test_without_checks_they_are_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: what a store was without digests."""
    blind = lambda _, blob: memoryview(blob)[seals.SIZE :]  # noqa: E731
    monkeypatch.setattr("dpstream.state.sqlite.rows.unsealed", blind)
    one, other = rows(file, "SELECT rowid, units FROM admissions ORDER BY rowid")[-2:]
    rows(file, "UPDATE admissions SET units = ? WHERE rowid = ?", other[1], one[0])
    use(file)
