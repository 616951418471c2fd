"""A store in memory with the limits of a real database: the contract as a program.

Rows are kept per key and per unit, as Spanner will keep them.  Nothing is in a worker's memory
that it did not name; what it holds is dropped at random; a commit takes a few rows only, so a
step is split by key and a decision by unit, each row saying how far it is itself.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dp_transforms.batches import ids_of
from state.idtable import IdTable
from state.life_kept import KeepsEverything
from state.log import position_ids
from state.store import (
    Admitted,
    Ids,
    KeyShard,
    OvertakenError,
    StepResult,
    Store,
    UnitShard,
)
from tests.simulation.tables import KeyRow, Place, Record, StepRows, Tables
from tests.state.conformance import Bench


class Database(Tables, Bench):
    """The tables and the handles on them."""

    def open(self) -> "LimitedStore":
        return LimitedStore(self)

    def close(self) -> None:
        """Nothing is held."""


class _Group(threading.local):
    """The group that the thread has open."""

    steps: list[StepRows] | None = None


class LimitedStore(KeepsEverything, Store):
    """A worker's handle.

    Args:
        database: the tables.

    ``hook`` is called before and after every transaction, with what it is.
    """

    def __init__(self, database: Database) -> None:
        self.database, self.identity = database, database.identity
        self.hook: Callable[[str, str], None] = lambda when, what: None
        self._states: dict[Place, tuple[KeyShard, set[bytes]]] = {}
        self._units: dict[int, tuple[UnitShard, dict[bytes, int]]] = {}
        self._in_use: set[int] = set()
        self._group = _Group()

    def _forgets(self) -> bool:
        return self.database.random.random() < self.database.forgets

    def key_shard(self, window: int, shard: int) -> KeyShard:
        place = window, shard
        waiting = self._group.steps or []
        if self._forgets() and all(step.place != place for step in waiting):
            self.forget(*place)
        if place not in self._states:
            states = KeyShard(self.database.schema, self.database.streams)
            states.mark_committed(self.database.progress[place])
            self._states[place] = states, set()
        return self._states[place][0]

    def load_keys(self, window: int, shard: int, trigger: int, states: KeyShard, ids: Ids) -> None:
        mine, loaded = self._states[window, shard]
        assert mine is states, "states of another load"
        rows = self.database.keys[window, shard]
        wanted = {i.tobytes() for i in ids} | {k for k, row in rows.items() if row.due <= trigger}
        new = sorted(wanted - loaded)
        loaded |= wanted
        for key in new:
            if key in rows:
                _enter(states, key, rows[key])

    def commit_step(
        self, window: int, shard: int, trigger: int, states: KeyShard, result: StepResult
    ) -> pa.RecordBatch:
        mine, loaded = self._states[window, shard]
        assert mine is states, "states of another load"
        if trigger != states.committed + 1:
            self.forget(window, shard)
            raise OvertakenError
        step = StepRows(window, shard, trigger, {}, _by_key(result.releases), result.closes)
        touched = {k for k in step.releases if k is not None}
        for slot in result.examined.tolist():
            key = states.table.ids[slot].tobytes()
            assert key in loaded, "a step touched a key that it did not load"
            assert not states.done[slot], "a key takes a step twice"
            # A due trigger that was only moved on need not be kept.
            if slot in result.changed or key in touched or not self._forgets():
                step.rows[key] = self._row(step, key, slot, states, result)
        assert touched <= step.rows.keys(), "a key is released that was not looked at"
        if self._group.steps is not None:
            self._group.steps.append(step)
        else:
            try:
                self._write(step)
            except BaseException:
                self.forget(window, shard)
                raise
        states.mark_committed(trigger)
        if result.closes:
            self.forget(window, shard)
        before = self.database.releases.get(step[:3], {})
        return _joined({**before, **step.releases})

    def _row(
        self, step: StepRows, key: bytes, slot: int, states: KeyShard, result: StepResult
    ) -> KeyRow:
        before = next(
            (
                s.rows[key]
                for s in reversed(self._group.steps or [])
                if s.place == step.place and key in s.rows
            ),
            self.database.keys[step.place].get(key),
        )
        fresh = (result.pair_units[i].tobytes() for i in np.flatnonzero(result.pair_slots == slot))
        return KeyRow(
            step.trigger,
            states.key_columns(np.array([slot])).to_pylist()[0],
            int(states.units[slot]),
            tuple(states.values[slot].tolist()),
            int(states.round[slot]),
            int(states.base[slot]),
            int(states.due[slot]),
            (before.pairs if before else frozenset()) | frozenset(fresh),
        )

    def _write(self, step: StepRows) -> None:
        """A step in as many transactions as it needs; the last one makes it visible."""
        keys, limit = list(step.rows), self.database.limit
        self.database.random.shuffle(keys)
        pieces = [keys[i : i + limit] for i in range(0, len(keys), limit)] or [[]]
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            mine: list[bytes | None] = [*piece, *([None] if last else [])]
            part = step._replace(
                rows={k: step.rows[k] for k in piece},
                releases={k: step.releases[k] for k in mine if k in step.releases},
            )
            self._transact([(part, last)], f"part {number} of {len(pieces)}")

    def _transact(self, parts: list[tuple[StepRows, bool]], what: str) -> None:
        self.hook("before", what)
        self.database.write(parts)
        self.hook("after", what)

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        group: list[StepRows] = []
        self._group.steps = group
        try:
            yield
            if sum(len(step.rows) for step in group) <= self.database.limit:
                self._transact([(step, True) for step in group], "group")
            else:
                for step in group:
                    self._write(step)
        except BaseException:
            for step in group:
                self.forget(*step.place)
            raise
        finally:
            self._group.steps = None

    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        if self.database.progress[window, shard] < trigger:
            return None
        return _joined(self.database.releases[window, shard, trigger])

    def completed(self, shards: int) -> dict[int, int]:
        progress = self.database.progress
        windows = {window for (window, _), trigger in progress.items() if trigger}
        return {w: min(progress[w, shard] for shard in range(shards)) for w in windows}

    def forget(self, window: int, shard: int) -> None:
        self._states.pop((window, shard), None)

    def unit_shard(self, shard: int) -> UnitShard:
        if shard not in self._in_use and self._forgets():
            self.forget_units(shard)
        if shard not in self._units:
            units = UnitShard()
            units.decided = self.database.decided[shard]
            self._units[shard] = units, {}
        return self._units[shard][0]

    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        mine, loaded = self._units[shard]
        assert mine is units, "counters of another load"
        self._in_use.add(shard)  # until the decision is over
        for unit in sorted({i.tobytes() for i in ids} - loaded.keys()):
            loaded[unit] = self.database.counts[shard].get(unit, 0)
            slot = units.intern(_id(unit))  # it may put larger counters in place
            units.counts[slot] = loaded[unit]
        # Not before: a part of a decision may have been committed since the shard was read.
        units.ahead = self._ahead(shard, units)

    def _ahead(self, shard: int, units: UnitShard) -> bool:
        return any(r.cut > units.decided for r in self.database.admitted[shard])

    def commit_units(self, shard: int, cut: int, units: UnitShard, admitted: Admitted) -> None:
        mine, loaded = self._units[shard]
        assert mine is units
        by_unit: dict[bytes, list[Record]] = defaultdict(list)
        for row, slot in enumerate(admitted.unit.tolist()):
            unit = units.table.ids[slot].tobytes()
            by_unit[unit].append(_record(unit, admitted, row))
        names, limit = list(by_unit), self.database.limit
        assert by_unit.keys() <= loaded.keys(), "a unit was admitted that was not loaded"
        self.database.random.shuffle(names)
        pieces = [names[i : i + limit] for i in range(0, len(names), limit)] or [[]]
        try:
            for number, piece in enumerate(pieces, 1):
                what = f"part {number} of {len(pieces)}"
                part = [record for unit in piece for record in by_unit[unit]]
                whole = cut if number == len(pieces) else None
                self.hook("before", what)
                self.database.decide(shard, units.decided, loaded, part, whole)
                self.hook("after", what)
        except BaseException:
            self.forget_units(shard)
            raise
        self._in_use.discard(shard)
        units.decided = cut
        units.ahead = self._ahead(shard, units)
        for unit, records in by_unit.items():  # as this worker knows them: others may be further
            loaded[unit] += sum(record.pairs for record in records)

    def forget_units(self, shard: int) -> None:
        self._in_use.discard(shard)
        self._units.pop(shard, None)

    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        loaded = self._units[shard][1]
        found = [r for r in self.database.admitted[shard] if r.unit in loaded]
        slots = units.table.find(_id(b"".join(r.unit for r in found))).astype(np.int32)
        partition = np.array([r.partition for r in found], np.int32)
        offset = np.array([r.offset for r in found], np.int64)
        pairs, cut = (np.array([r[i] for r in found], np.int32) for i in (3, 4))
        ranks = [r.rank for r in found if r.rank is not None]
        index = IdTable()
        index.intern(position_ids(partition, offset, slots))
        rank = np.array(ranks, np.int32) if ranks else None
        return index, Admitted(partition, offset, slots, pairs, cut, rank)

    def note(self, name: str) -> str | None:
        return self.database.notes.get(name)

    def swap_note(self, name: str, old: str | None, new: str | None) -> bool:
        if self.note(name) != old:
            return False
        self.database.notes[name] = new
        return True

    def close(self) -> None:
        self._states, self._units = {}, {}


def _id(raw: bytes) -> Ids:
    return np.frombuffer(raw, np.uint64).reshape(-1, 2)


def _enter(states: KeyShard, key: bytes, row: KeyRow) -> None:
    """A row of the database into memory."""
    columns = pa.RecordBatch.from_pylist([row.key], schema=states._schema)
    slot = states.intern(_id(key), columns)
    states.units[slot], states.values[slot] = row.units, row.values
    states.round[slot], states.base[slot], states.due[slot] = row.round, row.base, row.due
    states.done[slot] = row.taken > states.committed
    units = _id(b"".join(sorted(row.pairs)))
    states.pairs.add(np.repeat(slot, len(units)), units)


def _record(unit: bytes, admitted: Admitted, row: int) -> Record:
    columns = (admitted.partition, admitted.offset, admitted.pairs, admitted.cut)
    rank = None if admitted.rank is None else int(admitted.rank[row])
    return Record(unit, *(int(c[row]) for c in columns), rank)


def _by_key(releases: pa.RecordBatch) -> dict[bytes | None, pa.RecordBatch]:
    """Release rows by key id; a batch without ids, and the empty one, belong to the whole."""
    if "_id" not in releases.schema.names:
        return {None: releases}
    ids = ids_of(releases.column("_id"))
    rows = {ids[i].tobytes(): releases.slice(i, 1) for i in range(len(ids))}
    return {None: releases.slice(0, 0), **rows}


def _joined(releases: dict[bytes | None, pa.RecordBatch]) -> pa.RecordBatch:
    """All rows of a step in the order of their ids, whoever committed which part."""
    table = pa.Table.from_batches(releases.values()).combine_chunks()
    if "_id" in table.schema.names:
        table = table.take(pc.array_sort_indices(table.column("_id").combine_chunks()))
    return pa.RecordBatch.from_arrays(
        [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in table.columns],
        schema=table.schema,
    )
