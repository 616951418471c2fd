"""The life of the embedded store: expiry, sizes, and copies in pieces.

Snapshots of key states stand in a table of their own, before the log of their (window, shard).
A unit shard's log begins with its snapshot: rows that say the counts of their units.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from typing_extensions import override

from state import log
from state.idtable import IdTable
from state.life_store import (
    KeyPiece,
    LifeStore,
    Part,
    PositionPiece,
    UnitPiece,
    UnitProgress,
    piece_bounds,
)
from state.sqlite_file import failed
from state.sqlite_notes import read_note, swap_note
from state.store import Admitted, KeyShard, UnitShard

_INSERT_ADMISSIONS = "INSERT INTO admissions (shard, cut, units, records) VALUES (?, ?, ?, ?)"
#: Stands for releases that were dropped.
_NO_BLOB = b""


class UnitRow(NamedTuple):
    """A row of ``unit_shards``; ``generation`` changes when the slots of the units do."""

    forgotten: int = 0
    reach: int = 0
    generation: int = 0


class SqliteLife(LifeStore):
    """``LifeStore`` on the connection and the caches of ``SqliteStore``."""

    _db: sqlite3.Connection
    _lock: threading.RLock
    _schema: pa.Schema
    _streams: int
    _unit_shards: dict[int, UnitShard]
    _put_slots: dict[tuple[int, int], IdTable]
    _carrying: bool

    @override
    def note(self, name: str) -> str | None:
        with self._lock:
            return read_note(self._db, name)

    @override
    def swap_note(self, name: str, old: str | None, new: str | None) -> bool:
        with self._lock:
            return swap_note(self._db, name, old, new)

    @override
    def progress(self, first: int = 0) -> list[tuple[int, int, int]]:
        some = "WHERE window >= :first"
        with self._lock:
            found = {
                (window, shard): 0
                for table in ("snapshots", "carried")
                for window, shard in self._read(
                    f"SELECT DISTINCT window, shard FROM {table} {some}", {"first": first}
                )
            }
            statement = (
                f"SELECT window, shard, max(trigger) FROM steps {some} GROUP BY window, shard"
            )
            steps = self._read(statement, {"first": first})
            found |= {(window, shard): last for window, shard, last in steps}
            return [(*name, last) for name, last in found.items()]

    @override
    def unit_progress(self, shard: int) -> UnitProgress:
        with self._lock:
            row = self._unit_row(shard)
            (cut,) = next(self._read("SELECT max(cut) FROM admissions WHERE shard = ?", (shard,)))
        return UnitProgress(cut or 0, row.forgotten, max(row.reach, cut or 0))

    def _unit_row(self, shard: int) -> UnitRow:
        statement = "SELECT forgotten, reach, generation FROM unit_shards WHERE shard = ?"
        return UnitRow(*next(self._read(statement, (shard,)), ()))

    # --- expiry ---

    @override
    def forget_positions(self, shard: int, cut: int) -> None:
        with self._lock:
            if cut <= self._unit_row(shard).forgotten:
                return
            with self._changing():
                row = self._unit_row(shard)
                if cut <= row.forgotten:
                    return
                moved = self._rewrite_units(shard, cut)
                values = (shard, cut, row.reach, row.generation + moved)
                self._db.execute("INSERT OR REPLACE INTO unit_shards VALUES (?, ?, ?, ?)", values)
            if moved:
                self._unit_shards.pop(shard, None)
            elif shard in self._unit_shards:
                self._unit_shards[shard].forgotten = cut

    def _rewrite_units(self, shard: int, cut: int) -> bool:
        """Merge a unit shard's log into a snapshot without positions up to ``cut``; whether
        units got other slots, because some went."""
        rows = self._admissions(shard)
        if not rows:
            return False
        units = UnitShard()
        log.replay_units(units, rows)
        # Nothing is decided beyond the shard's own last commit but by a commit of a part.
        everything = units.decided <= cut and self._unit_row(shard).reach <= cut
        admitted = log.no_records() if everything else log.records_of(rows)
        kept = admitted.cut > cut
        stays = units.until[: units.table.size] > cut
        stays[admitted.unit[kept]] = True
        moved = not stays.all()
        place = np.cumsum(stays) - 1
        whole = UnitShard()
        slots = whole.intern(units.table.ids[stays])
        whole.counts[slots] = units.counts[: units.table.size][stays]
        whole.until[slots] = units.until[: units.table.size][stays]
        left = Admitted(
            admitted.partition[kept],
            admitted.offset[kept],
            place[admitted.unit[kept]].astype(np.int32),
            admitted.pairs[kept],
            admitted.cut[kept],
            None if admitted.rank is None else admitted.rank[kept],
        )
        (last,) = next(self._read("SELECT max(rowid) FROM admissions"))
        for blobs in log.unit_blobs(whole, left, whole=True):
            self._db.execute(_INSERT_ADMISSIONS, (shard, units.decided, *blobs))
        self._db.execute("DELETE FROM admissions WHERE shard = ? AND rowid <= ?", (shard, last))
        return moved

    @override
    def drop_releases(self, before: int) -> None:
        with self._lock, self._changing():
            # `marks`, which are checked in each commit of steps, are the fence from now on.
            for table in ("steps", "snapshots", "carried"):
                self._db.execute(f"DELETE FROM {table} WHERE window < ?", (before,))

    @override
    def compact(self) -> None:
        with self._lock:
            logged = "SELECT DISTINCT window, shard FROM steps WHERE states IS NOT NULL"
            for window, shard in list(self._read(logged)):
                with self._changing():
                    self._compact_keys(window, shard)
            shards = "SELECT shard FROM admissions GROUP BY shard HAVING count(*) > 1"
            for (shard,) in list(self._read(shards)):
                with self._changing():
                    self._rewrite_units(shard, self._unit_row(shard).forgotten)
                    self._db.execute(
                        "INSERT INTO unit_shards VALUES (?, 0, 0, 1) ON CONFLICT (shard)"
                        " DO UPDATE SET generation = generation + 1",
                        (shard,),
                    )
                self._unit_shards.pop(shard, None)
            try:
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise failed(error) from None

    def _compact_keys(self, window: int, shard: int) -> None:
        """Replace the log of an open (window, shard) by a snapshot."""
        states = self._replayed(window, shard)
        self._db.execute("DELETE FROM snapshots WHERE window = ? AND shard = ?", (window, shard))
        at = 0
        for piece in log.key_pieces(states):
            slots = np.arange(at, at + len(piece.units))
            at += len(piece.units)
            self._insert_keys(window, shard, piece, slots)
        self._db.execute(
            "UPDATE steps SET keys = NULL, states = NULL, pairs = NULL"
            " WHERE window = ? AND shard = ?",
            (window, shard),
        )

    @override
    def parts(self) -> list[Part]:
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
        )
        sizes: dict[tuple[str, int | None], tuple[int, int]] = {}
        with self._lock:
            for name, window, rows, size in self._read(windows):
                before = sizes.get((name, window), (0, 0))
                sizes[name, window] = (before[0] + rows, before[1] + (size or 0))
        return [Part(*name, *size) for name, size in sizes.items()]

    # --- reading everything ---

    @override
    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        with self._lock:
            try:
                with self._db:
                    self._db.execute("BEGIN")
                    yield
            except sqlite3.Error as error:
                raise failed(error) from None

    def _replayed(self, window: int, shard: int) -> KeyShard:
        """Key states read anew."""
        states = KeyShard(self._schema, self._streams)
        rows = self._read(
            "SELECT * FROM (SELECT 0, keys, states, pairs FROM snapshots"
            " WHERE window = :window AND shard = :shard ORDER BY rowid)"
            " UNION ALL SELECT * FROM (SELECT trigger, keys, states, pairs FROM steps"
            " WHERE window = :window AND shard = :shard ORDER BY trigger)",
            {"window": window, "shard": shard},
        )
        log.replay_keys(states, rows)
        return states

    @override
    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        with self._lock:
            states = self._replayed(window, shard)
        return log.key_pieces(states)

    @override
    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        units = UnitShard()
        log.replay_units(units, self._admissions(shard))
        for piece in piece_bounds(units.table.size):
            yield UnitPiece(units.table.ids[piece], units.counts[piece], units.until[piece])

    @override
    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        rows, units = self._admissions(shard), UnitShard()
        log.replay_units(units, rows)
        for row in rows:
            some = log.records_of([row])
            new = np.flatnonzero(some.cut > self._unit_row(shard).forgotten)
            if len(new):
                yield PositionPiece(
                    units.table.ids[some.unit[new]],
                    some.partition[new],
                    some.offset[new],
                    some.pairs[new],
                    some.cut[new],
                    None if some.rank is None else some.rank[new],
                )

    @override
    def carried(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        with self._lock:
            row = next(
                self._read(
                    "SELECT releases FROM carried WHERE window = ? AND shard = ? AND trigger = ?",
                    (window, shard, trigger),
                ),
                None,
            )
        return None if row is None else log.from_bytes(row[0])

    # --- filling a new store ---

    @override
    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        self._put_slots = {}
        with self._lock:
            try:
                # Nobody uses the file before it is complete: it needs no journal of its own.
                self._db.execute("PRAGMA journal_mode = OFF")
                self._db.execute("PRAGMA synchronous = OFF")
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise failed(error) from None

    def _put(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise failed(error) from None

    @override
    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        blob = _NO_BLOB if releases is None else log.to_bytes(releases)
        values = (window, shard, trigger, blob)
        self._put("INSERT INTO steps VALUES (?, ?, ?, ?, NULL, NULL, NULL)", values)

    @override
    def put_carried(self, window: int, shard: int, trigger: int, releases: pa.RecordBatch) -> None:
        values = (window, shard, trigger, log.to_bytes(releases))
        self._put("INSERT INTO carried VALUES (?, ?, ?, ?)", values)
        self._carrying = True

    @override
    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        if any(of != window for of, _ in self._put_slots):
            self._put_slots = {}  # windows come one after the other
        table = self._put_slots.setdefault((window, shard), IdTable())
        slots = table.intern(log.id_view(piece.keys.column("_id").combine_chunks()))
        self._insert_keys(window, shard, piece, slots)

    def _insert_keys(
        self, window: int, shard: int, piece: KeyPiece, slots: "np.typing.NDArray[np.int64]"
    ) -> None:
        values = (window, shard, *log.piece_blobs(piece, slots))
        self._put("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", values)

    @override
    def put_units(self, shard: int, piece: UnitPiece) -> None:
        units = self._unit_shards.setdefault(shard, UnitShard())
        units.intern(piece.ids)
        blob = log.ids_blob(piece.ids, piece.until, piece.counts)
        values = (shard, 0, blob, log.records_blob(log.no_records()))
        self._put(_INSERT_ADMISSIONS, values)

    @override
    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        slots = self._unit_shards[shard].table.find(piece.ids).astype(np.int32)
        admitted = Admitted(
            piece.partition, piece.offset, slots, piece.pairs, piece.cut, piece.rank
        )
        blobs = _no_units(), log.records_blob(admitted)
        self._put(_INSERT_ADMISSIONS, (shard, 0, *blobs))

    @override
    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        if progress.decided:
            blobs = _no_units(), log.records_blob(log.no_records())
            self._put(_INSERT_ADMISSIONS, (shard, 0, *blobs))
        statement = "UPDATE admissions SET cut = ? WHERE shard = ?"
        self._put(statement, (progress.decided, shard))
        values = (shard, progress.forgotten, progress.reach)
        self._put("INSERT INTO unit_shards VALUES (?, ?, ?, 0)", values)
        self._unit_shards.pop(shard, None)

    # --- parts of SqliteStore ---

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One transaction that waits for its turn; SQLite's errors become coded ones."""
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:
            raise failed(error) from None

    def _admissions(self, shard: int) -> list[tuple[int, bytes, bytes]]:
        """(cut, units, records) of a unit shard's commits, in order."""
        with self._lock:
            return list(
                self._read(
                    "SELECT cut, units, records FROM admissions WHERE shard = ? ORDER BY rowid",
                    (shard,),
                )
            )

    def _read(
        self, statement: str, values: "tuple[int, ...] | dict[str, int]" = ()
    ) -> Iterator[Any]:
        """Rows of a query; SQLite's errors become coded ones."""
        try:
            yield from self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise failed(error) from None


def _no_units() -> bytes:
    none = np.zeros(0, np.int32)
    return log.ids_blob(np.empty((0, 2), np.uint64), none, none)
