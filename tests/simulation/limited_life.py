"""The life of the model store: expiry in small commits, pieces of all it holds, a store to fill."""

import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Ids
from dpstream.dp_transforms.batches import ids_of
from dpstream.state.arrow import id_array
from dpstream.state.retention_store import (
    KeyPiece,
    PartSize,
    PositionPiece,
    RetentionStore,
    Selection,
    UnitPiece,
    UnitProgress,
)
from dpstream.state.store import Admitted, PerKey
from tests.simulation.tables import KeyRow, Record, Tables

Rows = dict[bytes | None, pa.RecordBatch]


class LimitedRetention(RetentionStore):
    """``RetentionStore`` on the tables; what a commit holds is as for a decision."""

    database: Tables
    hook: Callable[[str, str], None]
    _seen: Tables | None = None

    @property
    def _tables(self) -> Tables:
        """What reads see: the tables, or a snapshot of them."""
        return self.database if self._seen is None else self._seen

    def metadata(self, name: str) -> str | None:
        return self._tables.notes.get(name)

    def swap_metadata(self, name: str, old: str | None, new: str | None) -> bool:
        if self.metadata(name) != old:
            return False
        self.database.notes[name] = new
        return True

    def progress(self, first: int = 0) -> list[tuple[int, int, int]]:
        tables = self._tables
        last_triggers = {place: 0 for place, rows in tables.keys.items() if rows}
        last_triggers |= {(window, shard): 0 for window, shard, _ in tables.releases}
        last_triggers |= {place: last for place, last in tables.progress.items() if last}
        return [(*place, last) for place, last in last_triggers.items() if place[0] >= first]

    def unit_progress(self, shard: int) -> UnitProgress:
        tables = self._tables
        decided, reach = tables.decided[shard], tables.reach[shard]
        return UnitProgress(decided, tables.forgotten[shard], max(decided, reach))

    # --- expiry ---

    def forget_positions(self, shard: int, trigger_time: int) -> None:
        database = self.database
        if trigger_time <= database.forgotten[shard]:
            return
        self.forget_units(shard)
        self.hook("before", "forgotten")
        database.forgotten[shard] = max(trigger_time, database.forgotten[shard])
        self.hook("after", "forgotten")
        units = database.settled(shard, trigger_time)
        database.random.shuffle(units)
        for at in range(0, len(units), database.limit):
            self.hook("before", "forget")
            database.forget(shard, set(units[at : at + database.limit]), trigger_time)
            self.hook("after", "forget")

    @abstractmethod
    def forget_units(self, shard: int) -> None:
        """See ``Store``."""

    def drop_releases(self, before: int) -> None:
        for name in [name for name in self.database.releases if name[0] < before]:
            del self.database.releases[name]

    def forget_selections(self, trigger_time: int) -> None:
        for rows in self.database.selected.values():
            for name in [name for name in rows if name[0] <= trigger_time]:
                del rows[name]

    def compact(self) -> None:
        """Nothing is kept that is not used."""

    def parts(self) -> list[PartSize]:
        tables = self._tables
        rows, sizes = Counter[tuple[str, int | None]](), Counter[tuple[str, int | None]]()
        for (window, _, _), parts in tables.releases.items():
            rows["outbox", window] += 1
            sizes["outbox", window] += sum(batch.nbytes for batch in parts.values())
        for (window, _), keys in tables.keys.items():
            rows["keys", window] += len(keys)
            sizes["keys", window] += sum(48 + 16 * len(row.pairs) for row in keys.values())
        rows["units", None] = sum(len(counts) for counts in tables.counts.values())
        rows["positions", None] = sum(len(records) for records in tables.admitted.values())
        names = {(s, t, w) for s, selections in tables.selected.items() for t, w, _ in selections}
        if names:
            rows["selections", None] = len(names)
            own = (
                row.nbytes for selections in tables.selected.values() for row in selections.values()
            )
            sizes["selections", None] = sum(own)
        sizes["units", None] = 24 * rows["units", None]
        sizes["positions", None] = 40 * rows["positions", None]
        return [
            PartSize(*name, rows[name], sizes[name])
            for name in rows
            if rows[name] or name[1] is None
        ]

    # --- reading everything ---

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        self._seen = self.database.copy()
        try:
            yield
        finally:
            self._seen = None

    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        tables = self._tables
        named = sorted(tables.keys[window, shard].items())
        if not named:
            return
        rows, committed = [row for _, row in named], tables.progress[window, shard]
        keys = pa.Table.from_pylist([row.key for row in rows], schema=tables.schema)
        ids = id_array(ids_from([key for key, _ in named]))
        pairs = [(i, unit) for i, row in enumerate(rows) for unit in sorted(row.pairs)]
        due, round_, base = (
            np.array([getattr(row, name) for row in rows], np.int32)
            for name in ("due", "round", "base")
        )
        yield KeyPiece(
            keys.append_column("_id", ids),
            np.array([row.units for row in rows], np.int64),
            np.array([row.values for row in rows], np.int64).reshape(-1, tables.streams),
            due,
            round_,
            base,
            np.array([row.taken > committed for row in rows], np.bool_),
            np.array([i for i, _ in pairs], np.int64),
            ids_from([unit for _, unit in pairs]),
        )

    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        units = sorted(self._tables.counts[shard].items())
        columns = (np.array([row[i] for _, row in units], np.int32) for i in range(3))
        yield UnitPiece(ids_from([unit for unit, _ in units]), *columns)

    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        tables = self._tables
        records = [r for r in tables.admitted[shard] if r.trigger_time > tables.forgotten[shard]]
        nowhere = np.zeros(len(records), np.int32)
        yield PositionPiece(ids_from([r.unit for r in records]), admitted_of(records, nowhere))

    def released_ahead(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        tables = self._tables
        if tables.progress[window, shard] >= trigger:
            return None
        rows = tables.releases.get((window, shard, trigger))
        return None if rows is None else joined(rows)

    # --- filling a new store ---

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        self.database.complete = False
        yield
        self.database.complete = True

    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        assert self.database.progress[window, shard] == trigger - 1, "steps come in order"
        self.database.progress[window, shard] = trigger
        if releases is not None:
            self.database.releases[window, shard, trigger] = by_key(releases)

    def put_released_ahead(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch
    ) -> None:
        name = window, shard, trigger
        assert name not in self.database.releases, "what was released ahead was put before"
        self.database.releases[name] = by_key(releases)

    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        place = window, shard
        ids = ids_of(piece.keys.column("_id").combine_chunks())
        committed = self.database.progress[place]
        columns = piece.keys.drop_columns(["_id"]).to_pylist()
        pairs: dict[int, set[bytes]] = {}
        for row, unit in zip(piece.pair_rows.tolist(), piece.pair_units, strict=True):
            pairs.setdefault(row, set()).add(unit.tobytes())
        for row, key in enumerate(columns):
            name = ids[row].tobytes()
            assert name not in self.database.keys[place], "a key was put before"
            self.database.keys[place][name] = KeyRow(
                committed + bool(piece.done[row]),
                key,
                int(piece.units[row]),
                tuple(piece.values[row].tolist()),
                int(piece.round[row]),
                int(piece.base[row]),
                int(piece.due[row]),
                frozenset(pairs.get(row, ())),
            )

    def put_selection(self, shard: int, selection: Selection) -> None:
        time, window, keys = selection
        for n, key in enumerate(ids_of(keys.column("_id"))):
            name = time, window, key.tobytes()
            assert name not in self.database.selected[shard], "selected twice"
            self.database.selected[shard][name] = keys.slice(n, 1)

    def put_units(self, shard: int, piece: UnitPiece) -> None:
        counts = self.database.counts[shard]
        columns = piece.counts.tolist(), piece.until.tolist(), piece.indices.tolist()
        for unit, *row in zip(piece.ids, *columns, strict=True):
            assert unit.tobytes() not in counts, "a unit was put before"
            counts[unit.tobytes()] = row[0], row[1], row[2]

    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        for row, unit in enumerate(piece.ids):
            assert unit.tobytes() in self.database.counts[shard], "its unit was not put before"
            self.database.admitted[shard].append(record_of(unit.tobytes(), piece.records, row))

    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        self.database.decided[shard] = progress.decided
        self.database.forgotten[shard] = progress.forgotten
        self.database.reach[shard] = progress.reach


def ids_from(raw: list[bytes]) -> Ids:
    """(n, 2) ids of their bytes."""
    return np.frombuffer(b"".join(raw), np.uint64).reshape(-1, 2)


def record_of(unit: bytes, columns: Admitted, row: int) -> Record:
    """A row of admitted records."""
    rank = None if columns.rank is None else int(columns.rank[row])
    place = int(columns.partition[row]), int(columns.offset[row])
    per_key = None
    if columns.per_key is not None:
        key, first, taken, fresh = (int(column[row]) for column in columns.per_key)
        per_key = key, first, taken, fresh
    decided = int(columns.pairs[row]), int(columns.trigger_time[row])
    return Record(unit, *place, *decided, rank, per_key)


def admitted_of(records: list[Record], slots: Any) -> Admitted:
    """Records of units of these slots as columns."""
    ranks = [record.rank for record in records if record.rank is not None]
    per_key_parts = [record.per_key for record in records if record.per_key is not None]
    per_key = None
    if per_key_parts:
        keys, first, taken, fresh = zip(*per_key_parts, strict=True)
        words = np.array(taken, np.uint64), np.array(fresh, np.uint64)
        per_key = PerKey(np.array(keys, np.uint64), np.array(first, np.int32), *words)
    return Admitted(
        np.array([record.partition for record in records], np.int32),
        np.array([record.offset for record in records], np.int64),
        slots.astype(np.int32),
        np.array([record.pairs for record in records], np.int32),
        np.array([record.trigger_time for record in records], np.int32),
        np.array(ranks, np.int32) if ranks else None,
        per_key,
    )


def by_key(releases: pa.RecordBatch) -> Rows:
    """Release rows by key id; a batch without ids, and the empty one, belong to the whole."""
    if "_id" not in releases.schema.names:
        return {None: releases}
    ids = ids_of(releases.column("_id"))
    rows = {ids[i].tobytes(): releases.slice(i, 1) for i in range(len(ids))}
    return {None: releases.slice(0, 0), **rows}


def joined(releases: Rows) -> pa.RecordBatch:
    """All rows of a step in the order of their ids, whoever committed which part."""
    table = pa.Table.from_batches(releases.values()).combine_chunks()
    if "_id" in table.schema.names:
        table = table.take(pc.array_sort_indices(table.column("_id").combine_chunks()))
    return pa.RecordBatch.from_arrays(
        [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in table.columns],
        schema=table.schema,
    )
