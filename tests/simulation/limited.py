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

from dpstream.accounting.arrays import Ids
from dpstream.state.arrow import enter_keys, position_ids, selected_keys
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import Selection
from dpstream.state.store import (
    Admitted,
    KeyShard,
    OvertakenError,
    StepResult,
    Store,
    UnitShard,
)
from tests.simulation.limited_life import (
    KeyRow,
    LimitedRetention,
    Place,
    Record,
    StepRows,
    Tables,
    admitted_of,
    by_key,
    ids_from,
    joined,
    record_of,
)
from tests.state.conformance import Bench


class Database(Tables, Bench):
    """The tables and the handles on them."""

    def open(self) -> "LimitedStore":
        assert self.complete, "the store is not filled"
        return LimitedStore(self)

    def close(self) -> None:
        """Nothing is held."""


class _Group(threading.local):
    """The group that the thread has open."""

    steps: list[StepRows] | None = None


class LimitedStore(LimitedRetention, Store):
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
        chosen = {} if result.selected is None else selected_by_key(states, window, result)
        step = StepRows(window, shard, trigger, {}, by_key(result.releases), result.closes, chosen)
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
        return joined({**before, **step.releases})

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
            int(states.selected[slot]),
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
                selected={k: row for k, row in step.selected.items() if k in piece},
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
            elif len(group) == 1:
                self._write(group[0])
            else:
                raise OvertakenError
        except BaseException:
            for step in group:
                self.forget(*step.place)
            raise
        finally:
            self._group.steps = None

    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        if self._tables.progress[window, shard] < trigger:
            return None
        rows = self._tables.releases.get((window, shard, trigger))
        return None if rows is None else joined(rows)  # dropped

    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        rows = dict(self._tables.selected[shard])
        for step in self._group.steps or []:
            if step.shard == shard:
                rows |= {(t, w, key): row for key, (t, w, row) in step.selected.items()}
        out = []
        for name in sorted({(t, w) for t, w, _ in rows if after < t <= (upto or 1 << 40)}):
            selected_rows = [rows[key] for key in sorted(rows) if key[:2] == name]
            table = pa.Table.from_batches(selected_rows).combine_chunks()
            out.append(Selection(*name, table.to_batches()[0]))
        return out

    def forget(self, window: int, shard: int) -> None:
        self._states.pop((window, shard), None)

    def unit_shard(self, shard: int) -> UnitShard:
        if shard not in self._in_use and self._forgets():
            self.forget_units(shard)
        if shard not in self._units:
            units = UnitShard()
            units.decided = self.database.decided[shard]
            units.forgotten = self.database.forgotten[shard]
            units.ahead = self._ahead(shard, units)
            self._units[shard] = units, {}
        return self._units[shard][0]

    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        mine, loaded = self._units[shard]
        assert mine is units, "counters of another load"
        self._in_use.add(shard)  # until the decision is over
        for unit in sorted({i.tobytes() for i in ids} - loaded.keys()):
            row = self.database.counts[shard].get(unit)
            loaded[unit] = 0 if row is None else row[0]
            if row is not None:
                slot = units.intern(ids_from([unit]))  # it may put larger counters in place
                units.counts[slot], units.period_end[slot], units.indices[slot] = row
                had = [r for r in self.database.admitted[shard] if r.unit == unit]
                enter_keys(units, admitted_of(had, np.repeat(slot, len(had))))
        # Not before: a part of a decision may have been committed since the shard was read.
        units.ahead = self._ahead(shard, units)

    def _ahead(self, shard: int, units: UnitShard) -> bool:
        return self.database.reach[shard] > units.decided

    def commit_units(
        self, shard: int, trigger_time: int, units: UnitShard, admitted: Admitted
    ) -> None:
        mine, loaded = self._units[shard]
        assert mine is units
        by_unit: dict[bytes, list[Record]] = defaultdict(list)
        until: dict[bytes, int] = {}
        for row, slot in enumerate(admitted.unit.tolist()):
            unit = units.table.ids[slot].tobytes()
            by_unit[unit].append(record_of(unit, admitted, row))
            until[unit] = int(units.period_end[slot])
        names, limit = list(by_unit), self.database.limit
        assert by_unit.keys() <= loaded.keys(), "a unit was admitted that was not loaded"
        self.database.random.shuffle(names)
        pieces = [names[i : i + limit] for i in range(0, len(names), limit)] or [[]]
        try:
            for number, piece in enumerate(pieces, 1):
                what = f"part {number} of {len(pieces)}"
                part = [record for unit in piece for record in by_unit[unit]]
                final_time = trigger_time if number == len(pieces) else None
                self.hook("before", what)
                self.database.decide(shard, (units.decided, final_time), loaded, part, until)
                self.hook("after", what)
        except BaseException:
            self.forget_units(shard)
            raise
        self._in_use.discard(shard)
        units.decided, units.forgotten = trigger_time, self.database.forgotten[shard]
        units.ahead = self._ahead(shard, units)
        for unit, records in by_unit.items():  # as this worker knows them: others may be further
            loaded[unit] += sum(record.pairs for record in records)

    def forget_units(self, shard: int) -> None:
        self._in_use.discard(shard)
        self._units.pop(shard, None)

    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        loaded = self._units[shard][1]
        admitted_records = [r for r in self.database.admitted[shard] if r.unit in loaded]
        slots = units.table.find(ids_from([r.unit for r in admitted_records])).astype(np.int32)
        records = admitted_of(admitted_records, slots)
        index = IdTable()
        index.intern(position_ids(records.partition, records.offset, slots))
        return index, records

    def close(self) -> None:
        self._states, self._units = {}, {}


def selected_by_key(
    states: KeyShard, window: int, result: StepResult
) -> dict[bytes, tuple[int, int, pa.RecordBatch]]:
    """Rows of what a step selected."""
    assert result.selected is not None
    keys = selected_keys(states, result.selected)
    ids = states.table.ids[result.selected]
    return {
        ids[n].tobytes(): (result.trigger_time, window, keys.slice(n, 1)) for n in range(len(ids))
    }


def _enter(states: KeyShard, key: bytes, row: KeyRow) -> None:
    """A row of the database into memory."""
    columns = pa.RecordBatch.from_pylist([row.key], schema=states._schema)
    slot = states.intern(ids_from([key]), columns)
    states.units[slot], states.values[slot] = row.units, row.values
    states.selected[slot], states.due[slot] = row.round, row.due
    states.done[slot] = row.taken > states.committed
    units = ids_from(sorted(row.pairs))
    states.pairs.add(np.repeat(slot, len(units)), units)
