"""Rows of the embedded store: a cell in another's place is damage, and so is a name.

The embedded store's log of selections: sealed, checked.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state import arrow, seals
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import (
    NO_RELEASES,
    UnitRow,
    admission_row,
    admissions_of,
    released_ahead_row,
    releases_of,
    snapshot_row,
    step_blobs,
    step_row,
    unit_row,
    unit_row_of,
)
from dpstream.state.sqlite.store import SqliteStore, backup_file, check_file
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, log_of, named, take_step
from tests.state.sqlite.bench import SqliteBench
from tests.state.sqlite.resharded import resharded


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A store with rows in every table."""
    store = resharded(tmp_path)
    store.close()
    yield tmp_path / "new.db"


def rows(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        table_rows = db.execute(statement, values).fetchall()
    db.close()
    return table_rows


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
    """Sabotaged: what a store was without digests."""
    blind = lambda _, blob: memoryview(blob)[seals.SIZE :]  # noqa: E731
    monkeypatch.setattr("dpstream.state.sqlite.rows.unsealed", blind)
    one, other = rows(file, "SELECT rowid, units FROM admissions ORDER BY rowid")[-2:]
    rows(file, "UPDATE admissions SET units = ? WHERE rowid = ?", other[1], one[0])
    use(file)


RELEASES = pa.RecordBatch.from_pydict({"n": [1.5, -2.0]})
UNITS = arrow.to_bytes(pa.RecordBatch.from_pydict({"unit": pa.array([b"u" * 16], pa.binary(16))}))


def test_rows_are_read_as_they_were_written() -> None:
    row = step_row(1, 2, 3, arrow.to_bytes(RELEASES), (b"k", b"s", b"p"))
    releases = releases_of(1, 2, 3, row.releases)
    assert row[:3] == (1, 2, 3) and releases is not None and releases.equals(RELEASES)
    assert step_blobs((1, 2, 3), row[4:]) == (b"k", b"s", b"p")
    bare = step_row(1, 2, 3, NO_RELEASES)
    assert releases_of(1, 2, 3, bare.releases) is None and step_blobs((1, 2, 3), bare[4:]) is None
    piece = snapshot_row(1, 2, 7, (b"k", b"s", b"p"))
    assert step_blobs((1, 2, 7), piece[2:], "snapshots") == (b"k", b"s", b"p")
    ahead = released_ahead_row(1, 2, 3, arrow.to_bytes(RELEASES))
    assert releases_of(1, 2, 3, ahead[3], "carried") is not None
    unit_state = UnitRow(3, 5, 8)
    assert unit_row_of(2, unit_row(2, unit_state)[1]) == unit_state


def test_a_row_is_damaged_anywhere_else() -> None:
    row, piece = step_row(1, 2, 3, b"r", (b"k", b"s", b"p")), snapshot_row(1, 2, 7, (b"k",))
    attempts = [
        lambda: releases_of(1, 2, 4, row.releases),
        lambda: releases_of(1, 2, 3, row.releases, "carried"),
        lambda: step_blobs((1, 2, 3), (row.states, row.keys, row.pairs)),
        lambda: step_blobs((1, 2, 3), (row.keys, row.states, None)),
        lambda: step_blobs((1, 2, 6), (piece[2],) * 3, "snapshots"),
        lambda: unit_row_of(3, unit_row(2, UnitRow())[1]),
        lambda: unit_row_of(2, seals.sealed("unit_shards/2/progress", b"short")),
    ]
    for attempt in attempts:
        with pytest.raises(PolicyError, match="is damaged"):
            attempt()


def test_a_log_that_lost_a_commit_is_damaged() -> None:
    """Each row's name says how many units stand before it."""
    log = [admission_row(4, 9, before, UNITS, b"r")[1:] for before in (0, 1, 2)]
    assert [(row.trigger_time, row.units.num_rows) for row in admissions_of(4, log)] == [(9, 1)] * 3
    for wrong in ([log[0], log[2]], [log[1], log[0]], log[1:]):
        with pytest.raises(PolicyError, match="is damaged"):
            admissions_of(4, wrong)


def test_only_what_was_selected_is_noted(bench: SqliteBench) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1)
    take_step(store, 2, [1, 2], 2, selected=[])
    assert log_of(store) == []
    take_step(bench.open(), 3, [1, 2], 3, selected=[1])
    assert log_of(bench.open()) == log_of(store) == [(30, 0, named(1))]


def test_backups_hold_it(bench: SqliteBench, tmp_path: Path) -> None:
    take_step(bench.open(), 1, [1, 2], 1, selected=[1, 2])
    backup_file(bench.path, tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as db:
        assert db.execute("SELECT count(*) FROM selections").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE selections SET trigger_time = trigger_time + 1",
        "UPDATE selections SET keys = substr(keys, 1, length(keys) - 1) || x'77'",
        "UPDATE selections SET shard = 1",
        "DROP INDEX selections_by_shard",
    ],
)
def test_damage_is_noticed(bench: SqliteBench, damage: str) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1, selected=[1])
    with sqlite3.connect(bench.path) as db:
        db.execute(damage)
    db.close()
    if "DROP" not in damage:
        with pytest.raises(PolicyError, match="damaged"):
            [log_of(store, shard) for shard in range(IDENTITY.shards)]
    bench.close()
    with pytest.raises(PolicyError, match="damaged"):
        check_file(bench.path)
