"""The life of the embedded store: expiry, sizes, and copies in pieces.

Snapshots of key states stand in a table of their own, before the log of their (window, shard).
A unit shard's log begins with its snapshot: rows that say the counts of their units.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Bool, Int64
from dpstream.state import arrow
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import (
    KeyPiece,
    PartSize,
    PositionPiece,
    RetentionStore,
    Selection,
    UnitPiece,
    UnitProgress,
    piece_bounds,
)
from dpstream.state.sqlite.database import sqlite3, unjournaled
from dpstream.state.sqlite.file import (
    NO_RELEASES,
    UnitRow,
    add_selection,
    admission_row,
    admissions_of,
    changing,
    check_structure,
    coded_errors,
    connect,
    read_identity,
    read_metadata,
    read_selections,
    released_ahead_row,
    releases_of,
    snapshot_row,
    step_blobs,
    step_row,
    swap_metadata,
    unit_row,
    unit_row_of,
)
from dpstream.state.store import KeyShard, UnitShard

INSERT_ADMISSION = "INSERT INTO admissions (shard, cut, units, records) VALUES (?, ?, ?, ?)"


class SqliteRetention(RetentionStore):
    """The base of ``SqliteStore``: the open file, and the part of it that outlives runs.

    Args:
        path: the database file; it must exist (see ``create_store``).
        key_schema: Arrow schema of the key columns.
        streams: integer sums kept per key (``Design.sums``).
        db: a connection to the file that is open already.
    """

    _put_slots: dict[tuple[int, int], IdTable]

    def __init__(
        self,
        path: str | Path,
        key_schema: pa.Schema,
        streams: int,
        db: sqlite3.Connection | None = None,
    ) -> None:
        self._schema, self._streams = key_schema, streams
        self._lock = threading.RLock()
        self._db = connect(path) if db is None else db
        try:
            self.identity = read_identity(self._db)
            check_structure(self._db)
        except BaseException:
            self._db.close()  # one that is left open would keep others from the file
            raise
        self._unit_shards: dict[int, UnitShard] = {}
        self._has_released_ahead = bool(list(self._read("SELECT 1 FROM carried LIMIT 1")))

    @override
    def metadata(self, name: str) -> str | None:
        with self._lock:
            return read_metadata(self._db, name)

    @override
    def swap_metadata(self, name: str, old: str | None, new: str | None) -> bool:
        with self._lock:
            return swap_metadata(self._db, name, old, new)

    @override
    def progress(self, first: int = 0) -> list[tuple[int, int, int]]:
        condition = "WHERE window >= :first"
        with self._lock:
            last_triggers = {
                (window, shard): 0
                for table in ("snapshots", "carried")
                for window, shard in self._read(
                    f"SELECT DISTINCT window, shard FROM {table} {condition}", {"first": first}
                )
            }
            statement = (
                f"SELECT window, shard, max(trigger) FROM steps {condition} GROUP BY window, shard"
            )
            steps = self._read(statement, {"first": first})
            last_triggers |= {(window, shard): last for window, shard, last in steps}
            return [(*name, last) for name, last in last_triggers.items()]

    @override
    def unit_progress(self, shard: int) -> UnitProgress:
        with self._lock:
            row = self._unit_row(shard)
            last = "SELECT cut FROM admissions WHERE shard = ? ORDER BY rowid DESC LIMIT 1"
            (trigger_time,) = next(self._read(last, (shard,)), (0,))
        return UnitProgress(trigger_time, row.forgotten, max(row.reach, trigger_time))

    def _unit_row(self, shard: int) -> UnitRow:
        rows = self._read("SELECT progress FROM unit_shards WHERE shard = ?", (shard,))
        return next((unit_row_of(shard, blob) for (blob,) in rows), UnitRow())

    def _put_unit_row(self, shard: int, row: UnitRow) -> None:
        self._put("INSERT OR REPLACE INTO unit_shards VALUES (?, ?)", unit_row(shard, row))

    # --- expiry ---

    @override
    def forget_positions(self, shard: int, trigger_time: int) -> None:
        with self._lock:
            if trigger_time <= self._unit_row(shard).forgotten:
                return
            with changing(self._db):
                row = self._unit_row(shard)
                if trigger_time <= row.forgotten:
                    return
                moved = self._rewrite_units(shard, trigger_time)
                self._put_unit_row(shard, UnitRow(trigger_time, row.reach, row.generation + moved))
            if moved:
                self._unit_shards.pop(shard, None)
            elif shard in self._unit_shards:
                self._unit_shards[shard].forgotten = trigger_time

    def _rewrite_units(self, shard: int, trigger_time: int) -> bool:
        """Merge a unit shard's log into a snapshot without positions up to ``trigger_time``;
        whether units got other slots, because some went."""
        rows = self._admissions(shard)
        if not rows:
            return False
        units = UnitShard()
        arrow.replay_units(units, rows)
        # Nothing is decided beyond the shard's own last commit but by a commit of a part.
        everything = units.decided <= trigger_time and self._unit_row(shard).reach <= trigger_time
        admitted = arrow.no_records() if everything else arrow.records_of(rows)
        remaining = admitted.trigger_time > trigger_time
        stays = units.period_end[: units.table.size] > trigger_time
        stays[admitted.unit[remaining]] = True
        moved = not stays.all()
        place = np.cumsum(stays) - 1
        unit_shard = _units_at(units, stays) if moved else units
        records = arrow.moved(admitted.at(remaining), place)
        (last,) = next(self._read("SELECT max(rowid) FROM admissions"))
        for piece in arrow.unit_blobs(unit_shard, records, all_units=True):
            self._db.execute(INSERT_ADMISSION, admission_row(shard, units.decided, *piece))
        self._db.execute("DELETE FROM admissions WHERE shard = ? AND rowid <= ?", (shard, last))
        return moved

    @override
    def drop_releases(self, before: int) -> None:
        with self._lock, changing(self._db):
            # `retained_windows`, which are checked in each commit of steps, are the fence from now
            # on.
            for table in ("steps", "snapshots", "carried"):
                self._db.execute(f"DELETE FROM {table} WHERE window < ?", (before,))

    @override
    def forget_selections(self, trigger_time: int) -> None:
        with self._lock, changing(self._db):
            self._db.execute("DELETE FROM selections WHERE trigger_time <= ?", (trigger_time,))

    @override
    def compact(self) -> None:
        with self._lock:
            logged = "SELECT DISTINCT window, shard FROM steps WHERE states IS NOT NULL"
            for window, shard in list(self._read(logged)):
                with changing(self._db):
                    self._compact_keys(window, shard)
            shards = "SELECT shard FROM admissions GROUP BY shard HAVING count(*) > 1"
            for (shard,) in list(self._read(shards)):
                with changing(self._db):
                    row = self._unit_row(shard)
                    self._rewrite_units(shard, row.forgotten)
                    self._put_unit_row(shard, row._replace(generation=row.generation + 1))
                self._unit_shards.pop(shard, None)
            with coded_errors(self._db):
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _compact_keys(self, window: int, shard: int) -> None:
        """Replace the log of an open (window, shard) by a snapshot."""
        states = self._replayed(window, shard)
        self._db.execute("DELETE FROM snapshots WHERE window = ? AND shard = ?", (window, shard))
        at = 0
        for piece in arrow.key_pieces(states):
            slots = np.arange(at, at + len(piece.units))
            self._insert_keys(window, shard, at, piece, slots)
            at += len(piece.units)
        self._db.execute(
            "UPDATE steps SET keys = NULL, states = NULL, pairs = NULL"
            " WHERE window = ? AND shard = ?",
            (window, shard),
        )

    @override
    def parts(self) -> list[PartSize]:
        of_keys = "sum(length(keys) + length(states) + length(pairs))"
        windows = (
            "SELECT 'outbox', window, count(*), sum(length(releases)) FROM steps GROUP BY window"
            f" UNION ALL SELECT 'keys', window, count(*), {of_keys} FROM steps"
            " WHERE states IS NOT NULL GROUP BY window"
            f" UNION ALL SELECT 'keys', window, count(*), {of_keys} FROM snapshots GROUP BY window"
            " UNION ALL SELECT 'outbox', window, count(*), sum(length(releases)) FROM carried"
            " GROUP BY window"
            " UNION ALL SELECT 'units', NULL, count(*), sum(length(units)) FROM admissions"
            " UNION ALL SELECT 'positions', NULL, count(*), sum(length(records)) FROM admissions"
            " UNION ALL SELECT 'selections', NULL, count(*), sum(length(keys)) FROM selections"
            " GROUP BY 1, 2 HAVING count(*)"
        )
        sizes: dict[tuple[str, int | None], tuple[int, int]] = {}
        with self._lock:
            for name, window, rows, size in self._read(windows):
                before = sizes.get((name, window), (0, 0))
                sizes[name, window] = (before[0] + rows, before[1] + (size or 0))
        return [PartSize(*name, *size) for name, size in sizes.items()]

    # --- reading everything ---

    @override
    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        with self._lock, coded_errors(self._db), self._db:
            self._db.execute("BEGIN")
            yield

    def _replayed(self, window: int, shard: int) -> KeyShard:
        """Key states read anew."""
        states = KeyShard(self._schema, self._streams)
        arrow.replay_keys(states, self._key_log(window, shard, states))
        return states

    def _key_log(self, window: int, shard: int, states: KeyShard) -> Iterator[Any]:
        """(trigger, blobs) of a (window, shard): its snapshot (trigger 0), then its steps."""
        rows = self._read(
            "SELECT * FROM (SELECT 0, keys, states, pairs FROM snapshots"
            " WHERE window = :window AND shard = :shard ORDER BY rowid)"
            " UNION ALL SELECT * FROM (SELECT trigger, keys, states, pairs FROM steps"
            " WHERE window = :window AND shard = :shard ORDER BY trigger)",
            {"window": window, "shard": shard},
        )
        for trigger, *blobs in rows:
            # So many keys stand before a piece of the snapshot: those that are replayed by now.
            table, number = ("steps", trigger) if trigger else ("snapshots", states.size)
            yield trigger, step_blobs((window, shard, number), blobs, table)

    @override
    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        with self._lock:
            states = self._replayed(window, shard)
        return arrow.key_pieces(states)

    @override
    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        with self._lock, coded_errors(self._db):
            return list(read_selections(self._db, shard, after, upto))

    @override
    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        units = UnitShard()
        arrow.replay_units(units, self._admissions(shard))
        for piece in piece_bounds(units.table.size):
            counted = units.counts[piece], units.period_end[piece], units.indices[piece]
            yield UnitPiece(units.table.ids[piece], *counted)

    @override
    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        rows, units = self._admissions(shard), UnitShard()
        arrow.replay_units(units, rows)
        for row in rows:
            records = arrow.records_of([row])
            new = np.flatnonzero(records.trigger_time > self._unit_row(shard).forgotten)
            if len(new):
                yield PositionPiece(units.table.ids[records.unit[new]], records.at(new))

    @override
    def released_ahead(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        with self._lock:
            row = next(
                self._read(
                    "SELECT releases FROM carried WHERE window = ? AND shard = ? AND trigger = ?",
                    (window, shard, trigger),
                ),
                None,
            )
        return None if row is None else releases_of(window, shard, trigger, row[0], "carried")

    # --- filling a new store ---

    @override
    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        self._put_slots = {}
        with self._lock, coded_errors(self._db):
            # Nobody uses the file before it is complete: it needs no journal of its own.
            unjournaled(self._db)
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")

    def _put(self, statement: str, values: tuple[Any, ...]) -> None:
        with coded_errors(self._db):
            self._db.execute(statement, values)

    @override
    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        blob = NO_RELEASES if releases is None else arrow.to_bytes(releases)
        values = step_row(window, shard, trigger, blob)
        self._put("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    @override
    def put_released_ahead(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch
    ) -> None:
        values = released_ahead_row(window, shard, trigger, arrow.to_bytes(releases))
        self._put("INSERT INTO carried VALUES (?, ?, ?, ?)", values)
        self._has_released_ahead = True

    @override
    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        if any(earlier_window != window for earlier_window, _ in self._put_slots):
            self._put_slots = {}  # windows come one after the other
        table = self._put_slots.setdefault((window, shard), IdTable())
        before = table.size
        slots = table.intern(arrow.id_view(piece.keys.column("_id").combine_chunks()))
        self._insert_keys(window, shard, before, piece, slots)

    def _insert_keys(
        self, window: int, shard: int, before: int, piece: KeyPiece, slots: Int64
    ) -> None:
        values = snapshot_row(window, shard, before, arrow.piece_blobs(piece, slots))
        self._put("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", values)

    @override
    def put_selection(self, shard: int, selection: Selection) -> None:
        with coded_errors(self._db):
            add_selection(self._db, shard, selection)

    @override
    def put_units(self, shard: int, piece: UnitPiece) -> None:
        units = self._unit_shards.setdefault(shard, UnitShard())
        before = units.table.size
        units.intern(piece.ids)
        blob = arrow.ids_blob(piece.ids, piece.period_end, piece.counts, piece.indices)
        self._put_admission(shard, 0, before, blob, arrow.records_blob(arrow.no_records()))

    def _put_admission(self, shard: int, *row: Any) -> None:
        self._put(INSERT_ADMISSION, admission_row(shard, *row))

    @override
    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        table = self._unit_shards[shard].table
        blob = arrow.records_blob(piece.of_units(table.find(piece.ids)))
        self._put_admission(shard, 0, table.size, _no_units(), blob)

    @override
    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        units = self._unit_shards.pop(shard, None) or UnitShard()
        if progress.decided:  # the last row of a shard says how far it is
            blobs = _no_units(), arrow.records_blob(arrow.no_records())
            self._put_admission(shard, progress.decided, units.table.size, *blobs)
        self._put_unit_row(shard, UnitRow(progress.forgotten, progress.reach))

    # --- parts of SqliteStore ---

    def _admissions(self, shard: int) -> list[arrow.AdmissionRow]:
        """A unit shard's commits, in order."""
        rows = "SELECT cut, units, records FROM admissions WHERE shard = ? ORDER BY rowid"
        with self._lock:
            return admissions_of(shard, self._read(rows, (shard,)))

    def _read(
        self, statement: str, values: "tuple[int, ...] | dict[str, int]" = ()
    ) -> Iterator[Any]:
        """Rows of a query; SQLite's errors become coded ones."""
        with coded_errors(self._db):
            # Not `yield from`, which closes the cursor of one that is given up, maybe too late.
            for row in self._db.execute(statement, values):  # noqa: UP028
                yield row


def _units_at(units: UnitShard, stays: Bool) -> UnitShard:
    """The units that stay, with new slots."""
    shard = UnitShard()
    slots = shard.intern(units.table.ids[stays])
    shard.counts[slots] = units.counts[: units.table.size][stays]
    shard.indices[slots] = units.indices[: units.table.size][stays]
    shard.period_end[slots] = units.period_end[: units.table.size][stays]
    return shard


def _no_units() -> bytes:
    none = np.zeros(0, np.int32)
    return arrow.ids_blob(np.empty((0, 2), np.uint64), none, none)
