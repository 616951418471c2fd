"""Rows of the embedded store: sealed as they are written, checked as they are read.

The name under which a blob is sealed says its table and column, the row's own numbers, and where
rows are read in order how many keys or units stand before it, so that a row too few is noticed.

A step that selected keys, which later windows remember, has a row of them, written in its own
transaction.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.state import arrow
from dpstream.state.retention_store import Selection
from dpstream.state.seals import damaged, refuse_damage, sealed, unsealed, unsealed_text
from dpstream.state.sqlite.database import sqlite3

#: Stands for releases that were dropped.
NO_RELEASES = b""
_BLOBS = ("keys", "states", "pairs")
_UNIT_ROW = struct.Struct("<3q")


class StepRow(NamedTuple):
    """A row of ``steps``; its blobs are those of ``step_row``."""

    window: int
    shard: int
    trigger: int
    releases: bytes
    keys: bytes | None = None
    states: bytes | None = None
    pairs: bytes | None = None


class UnitRow(NamedTuple):
    """A row of ``unit_shards``: what is known of a unit shard beside its log.

    Attributes:
        forgotten, reach: see ``retention_store.UnitProgress``.
        generation: changes when the slots of the units do.
    """

    forgotten: int = 0
    reach: int = 0
    generation: int = 0


# --- writing ---


def step_row(
    window: int, shard: int, trigger: int, releases: bytes, blobs: Iterable[bytes] = ()
) -> StepRow:
    """Return the row of a step, sealed.

    Args:
        releases: Arrow bytes of the outbox.
        blobs: new keys, changed states and new pairs, or none of them where the window closes.
    """
    row = (window, shard, trigger)
    return StepRow(*row, sealed(_name("steps", row, "releases"), releases), *_three(row, blobs))


def _three(row: tuple[int, ...], blobs: Iterable[bytes], table: str = "steps") -> Iterator[bytes]:
    for column, blob in zip(_BLOBS, blobs, strict=False):
        yield sealed(_name(table, row, column), blob)


def snapshot_row(window: int, shard: int, before: int, blobs: Iterable[bytes]) -> tuple[Any, ...]:
    """Return the row of a piece of a snapshot that has ``before`` keys before it, sealed."""
    return (window, shard, *_three((window, shard, before), blobs, "snapshots"))


def released_ahead_row(window: int, shard: int, trigger: int, releases: bytes) -> tuple[Any, ...]:
    """Return the row of releases of a step that a shard was ahead with at a reshard, sealed."""
    row = (window, shard, trigger)
    return (*row, sealed(_name("carried", row, "releases"), releases))


def admission_row(
    shard: int, trigger_time: int, before: int, units: bytes, records: bytes
) -> tuple[Any, ...]:
    """Return the row of a commit of decisions, or of a piece of them, sealed.

    Args:
        before: units that the shard's log names before this row.
        units, records: blobs of new units and of admitted records (``state.arrow``).
    """
    row = (shard, trigger_time, before)
    blobs = {"units": units, "records": records}
    return (
        shard,
        trigger_time,
        *(sealed(_name("admissions", row, c), b) for c, b in blobs.items()),
    )


def unit_row(shard: int, row: UnitRow) -> tuple[int, bytes]:
    """Return the row of ``unit_shards`` of a shard, sealed."""
    return shard, sealed(_name("unit_shards", (shard,), "progress"), _UNIT_ROW.pack(*row))


def meta_name(name: str) -> str:
    """Return the name under which the value of a row of ``meta`` is sealed."""
    return f"meta/{name}/value"


def _name(table: str, row: tuple[int, ...], column: str) -> str:
    return f"{table}/{'/'.join(map(str, row))}/{column}"


# --- reading; all raise PolicyError where a blob is not what was written ---


def releases_of(
    window: int, shard: int, trigger: int, blob: object, table: str = "steps"
) -> pa.RecordBatch | None:
    """Return the releases of a step, ``None`` if they were dropped."""
    data = unsealed(_name(table, (window, shard, trigger), "releases"), blob)
    return arrow.from_bytes(data) if len(data) else None


def step_blobs(
    row: tuple[int, ...], blobs: Iterable[object], table: str = "steps"
) -> tuple[arrow.Checked, arrow.Checked, arrow.Checked] | None:
    """Return (new keys, changed states, new pairs) of a step or a piece; ``None``: it has none."""
    three = list(blobs)
    if three == [None, None, None]:
        return None
    contents = [unsealed(_name(table, row, c), b) for c, b in zip(_BLOBS, three, strict=True)]
    return contents[0], contents[1], contents[2]


def admissions_of(shard: int, rows: Iterable[tuple[int, Any, Any]]) -> list[arrow.AdmissionRow]:
    """Return the log of a unit shard, checked, from its first row on."""
    admissions, before = [], 0
    for trigger_time, units, records in rows:
        row = (shard, trigger_time, before)
        batch = arrow.from_bytes(unsealed(_name("admissions", row, "units"), units))
        data = unsealed(_name("admissions", row, "records"), records)
        admissions.append(arrow.AdmissionRow(trigger_time, batch, data))
        before += batch.num_rows
    return admissions


def unit_row_of(shard: int, blob: object) -> UnitRow:
    """Return the content of a row of ``unit_shards``."""
    data = unsealed(_name("unit_shards", (shard,), "progress"), blob)
    refuse_damage(len(data) != _UNIT_ROW.size)
    return UnitRow(*_UNIT_ROW.unpack(data))


def selection_of(shard: int, trigger_time: int, window: int, blob: object) -> Selection:
    """Return the content of a row of ``selections``."""
    name = _name("selections", (shard, trigger_time, window), "keys")
    return Selection(trigger_time, window, arrow.from_bytes(unsealed(name, blob)))


def check_small(db: Any) -> None:
    """Check the rows that are few, also for one that is read under another's name."""
    for name, value in db.execute("SELECT name, value FROM meta"):
        unsealed_text(meta_name(name), value)
    for shard, blob in db.execute("SELECT shard, progress FROM unit_shards"):
        unit_row_of(shard, blob)


def check_all(db: Any) -> None:
    """Check every row of a store against its digest and its place.

    Raises:
        PolicyError: a row is not what was written.
    """
    check_small(db)
    for window, shard, trigger, releases, *blobs in db.execute("SELECT * FROM steps"):
        releases_of(window, shard, trigger, releases)
        step_blobs((window, shard, trigger), blobs)
    for window, shard, trigger, releases in db.execute("SELECT * FROM carried"):
        releases_of(window, shard, trigger, releases, "carried")
    at, before = (-1, -1), 0
    for window, shard, *blobs in db.execute(
        "SELECT * FROM snapshots ORDER BY window, shard, rowid"
    ):
        at, before = (window, shard), 0 if at != (window, shard) else before
        keys = step_blobs((window, shard, before), blobs, "snapshots")
        if keys is None:
            raise damaged()
        before += arrow.from_bytes(keys[0]).num_rows
    for (shard,) in list(db.execute("SELECT DISTINCT shard FROM admissions")):
        rows = "SELECT cut, units, records FROM admissions WHERE shard = ? ORDER BY rowid"
        admissions_of(shard, db.execute(rows, (shard,)))
    for row in db.execute("SELECT shard, trigger_time, window, keys FROM selections"):
        selection_of(*row)


def add_selection(db: sqlite3.Connection, shard: int, selection: Selection) -> None:
    """Write what a step of a shard selected, as a part of the caller's transaction."""
    row = (shard, selection.trigger_time, selection.window)
    blob = sealed(_name("selections", row, "keys"), arrow.to_bytes(selection.keys))
    db.execute("INSERT INTO selections VALUES (?, ?, ?, ?)", (*row, blob))


def read_selections(
    db: sqlite3.Connection, shard: int, after: int, upto: int | None
) -> Iterator[Selection]:
    """Yield the selections of a shard's steps after a trigger time and up to another, in order."""
    last = (1 << 62) if upto is None else upto
    rows = (
        "SELECT trigger_time, window, keys FROM selections"
        " WHERE shard = ? AND trigger_time > ? AND trigger_time <= ?"
        " ORDER BY trigger_time, window, rowid"
    )
    for trigger_time, window, blob in db.execute(rows, (shard, after, last)).fetchall():
        yield selection_of(shard, trigger_time, window, blob)
