"""The life of the model store: expiry in small commits, pieces of all it holds, a store to fill.

The tables of the model store, and what one transaction checks before it writes.
"""

import contextlib
import copy
import random
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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
from dpstream.state.store import Admitted, OvertakenError, PerKey, RunIdentity

Place = tuple[int, int]


class KeyRow(NamedTuple):
    """One key of one window; ``taken`` is the last step it has taken."""

    taken: int
    key: dict[str, object]
    units: int
    values: tuple[int, ...]
    round: int
    due: int
    pairs: frozenset[bytes]


class StepRows(NamedTuple):
    """What one step writes: rows and releases by key, and those without a key."""

    window: int
    shard: int
    trigger: int
    rows: dict[bytes, KeyRow]
    releases: dict[bytes | None, pa.RecordBatch]
    closes: bool
    #: What it selected, by key: (trigger time, window, the key's row).
    selected: Mapping[bytes, tuple[int, int, pa.RecordBatch]] = MappingProxyType({})

    @property
    def place(self) -> Place:
        return self.window, self.shard


class Record(NamedTuple):
    """One admitted record."""

    unit: bytes
    partition: int
    offset: int
    pairs: int
    trigger_time: int
    rank: int | None
    per_key: tuple[int, int, int, int] | None = None

    @property
    def firsts(self) -> int:
        """Its pairs that were the first of a key, where a bound per key is kept."""
        return 0 if self.per_key is None else self.per_key[3].bit_count()


class Tables:
    """All rows, and the transactions that change them, each whole or not at all.

    Args:
        rows: keys of a step, and units of a decision, that fit into one commit.
        seed: of what a handle forgets; ``None``: it forgets nothing.
    """

    def __init__(
        self,
        identity: RunIdentity,
        schema: pa.Schema,
        streams: int,
        rows: int = 1 << 30,
        seed: int | None = None,
    ) -> None:
        self.identity, self.schema, self.streams, self.limit = identity, schema, streams, rows
        self.random = random.Random(seed)
        self.forgets = 0.0 if seed is None else 0.3
        self.progress: dict[Place, int] = defaultdict(int)
        self.keys: dict[Place, dict[bytes, KeyRow]] = defaultdict(dict)
        self.releases: dict[tuple[int, int, int], dict[bytes | None, pa.RecordBatch]] = {}
        self.notes: dict[str, str | None] = {}
        self.decided: dict[int, int] = defaultdict(int)
        self.forgotten: dict[int, int] = defaultdict(int)
        self.reach: dict[int, int] = defaultdict(int)
        self.counts: dict[int, dict[bytes, tuple[int, int, int]]] = defaultdict(dict)
        self.admitted: dict[int, list[Record]] = defaultdict(list)
        #: By shard: (trigger time, window, key) -> the key's row.
        self.selected: dict[int, dict[tuple[int, int, bytes], pa.RecordBatch]] = defaultdict(dict)
        self.complete = True  # not in the midst of being filled

    def copy(self) -> "Tables":
        """The same rows, which later transactions do not change."""
        other = copy.copy(self)
        for name in ("progress", "releases", "notes", "decided", "forgotten", "reach"):
            setattr(other, name, copy.copy(getattr(self, name)))
        for name in ("keys", "counts", "admitted", "selected"):
            rows = getattr(self, name)
            setattr(
                other,
                name,
                defaultdict(
                    rows.default_factory,
                    {place: copy.copy(contents) for place, contents in rows.items()},
                ),
            )
        return other

    def write(self, parts: Iterable[tuple[StepRows, bool]]) -> None:
        """One transaction: rows of steps, each with its progress if it is the last part."""
        parts, progress = list(parts), dict(self.progress)
        for step, last in parts:
            if progress.get(step.place, 0) != step.trigger - 1:
                raise OvertakenError
            taken = self.keys[step.place]
            if any(k in taken and taken[k].taken >= step.trigger for k in step.rows):
                raise OvertakenError
            if last:
                progress[step.place] = step.trigger
        for step, last in parts:
            self.keys[step.place].update(step.rows)
            self.releases.setdefault(step[:3], {}).update(step.releases)
            for key, (time, window, row) in step.selected.items():
                assert (time, window, key) not in self.selected[step.shard], "selected twice"
                self.selected[step.shard][time, window, key] = row
            if last:
                self.progress[step.place] = step.trigger
                if step.closes:
                    self.keys[step.place] = {}

    def decide(
        self,
        shard: int,
        trigger_times: tuple[int, int | None],
        loaded: dict[bytes, int],
        part: list[Record],
        until: dict[bytes, int],
    ) -> None:
        """One transaction: admitted records of some units.

        Args:
            trigger_times: the one decided before, and the one decided with the last part.
            loaded: counts of the units as the worker knows them.
            until: last trigger time of each unit of the decision.
        """
        counts, (before, trigger_time) = self.counts[shard], trigger_times
        changed = {record.unit for record in part}
        counted = (counts.get(unit, (0, 0, 0))[0] == loaded[unit] for unit in changed)
        if self.decided[shard] != before or not all(counted):
            raise OvertakenError
        for record in part:
            count, _, firsts = counts.get(record.unit, (0, 0, 0))
            more = count + record.pairs, until[record.unit], firsts + record.firsts
            counts[record.unit] = more
        self.admitted[shard] += part
        self.reach[shard] = max([self.reach[shard], *(record.trigger_time for record in part)])
        if trigger_time is not None:
            self.decided[shard] = trigger_time

    def settled(self, shard: int, trigger_time: int) -> list[bytes]:
        """Units of which positions up to a trigger time, or the counter, may go."""
        units = {
            record.unit for record in self.admitted[shard] if record.trigger_time <= trigger_time
        }
        return sorted(
            units | {u for u, (_, until, _) in self.counts[shard].items() if until <= trigger_time}
        )

    def forget(self, shard: int, units: set[bytes], trigger_time: int) -> None:
        """One transaction: some units' positions up to a time, and counters left without."""
        self.admitted[shard] = [
            record
            for record in self.admitted[shard]
            if record.unit not in units or record.trigger_time > trigger_time
        ]
        held, counts = {record.unit for record in self.admitted[shard]}, self.counts[shard]
        for unit in units - held:
            if unit in counts and counts[unit][1] <= trigger_time:
                del counts[unit]


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
        due, round_ = (
            np.array([getattr(row, name) for row in rows], np.int32) for name in ("due", "round")
        )
        yield KeyPiece(
            keys.append_column("_id", ids),
            np.array([row.units for row in rows], np.int64),
            np.array([row.values for row in rows], np.int64).reshape(-1, tables.streams),
            due,
            round_,
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
                int(piece.selected[row]),
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
        columns = piece.counts.tolist(), piece.period_end.tolist(), piece.indices.tolist()
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
