"""Shards of the Spanner store in memory: the units of a shard, and the keys of a (window, shard).

A unit's row is its admitted records.  Of key states a shard knows what is loaded, and what waits
for the commit.

**Selections**, what tests selected where later windows remember it, are rows of ``Steps`` at a
``WindowIndex`` of their own, by the step's global trigger time, so that a window reads what is new
to it as one range.  They are written in the commit of their step, or of
the part of it that has the keys, and no two commits give a row the same number.
"""

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.limits import CELL_BYTES, INLINE_PAIRS
from dpstream.state import arrow
from dpstream.state.arrow import enter_keys, indexed
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import Selection
from dpstream.state.spanner.client import between, prefix, read_rows
from dpstream.state.spanner.rows import (
    DUE,
    PLAIN,
    STEP,
    Layout,
    UnitRows,
    admitted_of,
    cell,
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
from dpstream.state.spanner.schema import SELECTED, Mutations, parts
from dpstream.state.store import NEVER, Admitted, Ints, KeyShard, StepResult, UnitShard

_COLUMNS = ("Part", "UnitId", "Records")
#: Mutations of a unit's row.
ROW_MUTATIONS = len(_COLUMNS)
#: Mutations of a row of ``KeyUnits``, and of its key's row.
_CHUNK_MUTATIONS = 5 + 5
_KEY = ("Part", "WindowIndex", "KeyId")
#: Numbers of rows that a copy wrote begin here, within their window's.
COPIED = 1 << 31
_WINDOW, _PIECE = 32, 12


class SpannerUnitShard(UnitShard):
    """Counters of units, which may be a part of those in the database.

    Args:
        complete: no row of this shard is missing in memory.
        layout: what the rows of units hold.

    Attributes:
        pieces: rows that a decision cut short has left in ``Steps``.
        reach: last trigger time of any record in memory: a decision cut short may have gone further
            than the one that was made in its place.
    """

    def __init__(self, part: int, complete: bool, layout: Layout = PLAIN) -> None:
        super().__init__()
        self._layout = layout
        self.part, self.complete, self.pieces, self.reach = part, complete, 0, 0
        #: By slot: records, and admitted pairs (and first pairs) of records that have expired.
        self._records: list[bytes] = []
        self._gone = np.zeros(0, np.int64)
        self._gone_fresh = np.zeros(0, np.int64)

    def load(self, database: Database, ids: Ids) -> None:
        """Read the rows of the units that are not in memory, and enter their admitted records."""
        if self.complete:
            return
        missing = np.unique(ids[self.table.find(ids) < 0], axis=0)
        if len(missing) == 0:
            return
        keys = [(self.part, unit) for unit in id_cells(missing)]
        rows = list(read_rows(database, "Units", ("UnitId", "Records"), keys))
        if not rows:
            return
        slots = self.intern(ids_from([row[0] for row in rows]))
        self._extend()
        unit_rows = UnitRows.of([b64decode(row[1]) for row in rows], self._layout)
        for slot, blob in zip(slots.tolist(), unit_rows.blobs, strict=True):
            self._records[slot] = blob
        self.reach = max(self.reach, int(unit_rows.records["trigger_time"].max(initial=0)))
        self._gone[slots], self.period_end[slots] = unit_rows.expired_pairs, unit_rows.period_end
        self.counts[slots], self.indices[slots] = unit_rows.counts, unit_rows.indices
        if unit_rows.expired_first_pairs is not None:
            self._gone_fresh[slots] = unit_rows.expired_first_pairs
        enter_keys(self, admitted_of(unit_rows.records, slots[unit_rows.owner]))

    def _extend(self) -> None:
        more = self.table.size - len(self._records)
        if more > 0:
            self._records += [b""] * more
            self._gone = np.concatenate([self._gone, np.zeros(more, np.int64)])
            self._gone_fresh = np.concatenate([self._gone_fresh, np.zeros(more, np.int64)])

    def put(self, ids: Ids, counts: Ints, until: Ints, indices: Ints) -> Int64:
        """Enter units of another store with their counts; return their (n,) slots."""
        slots = self.intern(ids)
        self._extend()
        self.counts[slots], self.period_end[slots], self._gone[slots] = counts, until, counts
        self.indices[slots] = self._gone_fresh[slots] = indices
        return slots

    def put_records(self, admitted: Admitted) -> Int64:
        """Enter records whose pairs their units' counts hold already; return the units' slots."""
        slots = self.take(admitted)
        np.subtract.at(self._gone, admitted.unit, admitted.pairs)
        if admitted.per_key is not None:
            fresh = np.bitwise_count(admitted.per_key.fresh).astype(np.int64)
            np.subtract.at(self._gone_fresh, admitted.unit, fresh)
        return slots

    def take(self, admitted: Admitted) -> Int64:
        """Append newly admitted records to their units' rows; return the slots that changed."""
        self._extend()
        order = np.argsort(admitted.unit, kind="stable")
        raw = pack_records(admitted, order)
        size = self._layout.record.itemsize
        for slot, a, b in runs_of(admitted.unit[order]):
            self._records[slot] += raw[size * a : size * b]
        return np.unique(admitted.unit).astype(np.int64)

    def write(self, out: Mutations, slots: Int64) -> None:
        """Put the rows of some units into a commit."""
        ids = id_cells(self.table.ids[slots])
        fresh = self._gone_fresh[slots] if self._layout.per_key else None
        heads = pack_headers(self._gone[slots], self.period_end[slots], fresh)
        rows = [
            [self.part, unit, cell(head + self._records[slot])]
            for slot, unit, head in zip(slots.tolist(), ids, heads, strict=True)
        ]
        out.upsert("Units", _COLUMNS, rows)

    def row_bytes(self, slots: Int64) -> Int64:
        """Return (n,) about how many bytes each unit's row takes."""
        return np.array([len(self._records[slot]) + 40 for slot in slots.tolist()], np.int64)

    def admitted(self) -> tuple[IdTable, Admitted]:
        """Return all admitted records in memory, with an index by ``state.arrow.position_ids``."""
        self._extend()
        return indexed(admitted_of(*unpack_records(self._records, self._layout)))


class PendingStep:
    """A step that was computed and waits for its commit."""

    def __init__(self, trigger: int, result: StepResult) -> None:
        self.trigger, self.releases, self.published = trigger, result.releases, result.published
        self.closes, self.selected = result.closes, result.selected
        self.trigger_time = result.trigger_time


class SpannerKeyShard(KeyShard):
    """Key states, which may be a part of those in the database.

    Args:
        complete: no row of this (window, shard) is missing in memory.
        window_sets: a key's unit set lasts for the window, not for a round.

    Attributes:
        pending: steps since the last commit.
        durable: last trigger that is known to be committed; other threads may read it.
        left: step -> its rows in ``Steps`` beyond the committed ones: of a commit cut short, or
            put there by a copy.
    """

    def __init__(
        self,
        key_schema: pa.Schema,
        streams: int,
        name: tuple[int, int],
        complete: bool,
        window_sets: bool,
    ) -> None:
        super().__init__(key_schema, streams)
        self.part, self.window = name
        self.complete, self._window_sets = complete, window_sets
        self.pending: list[PendingStep] = []
        self.durable = 0
        self.left: dict[int, int] = {}
        #: By slot: raw ids in the key's own row, rows of ``KeyUnits`` in use, round of the set.
        self._inline: list[bytes] = []
        self._set_start = np.zeros(0, np.int64)
        self._set_end = np.zeros(0, np.int64)
        self._set_selected = np.zeros(0, np.int64)
        #: By slot: the row is there; it changed; its unit set did; it was looked at.
        self._stored: Bool = np.zeros(0, np.bool_)
        self._changed, self._sets, self._examined = (self._stored.copy() for _ in range(3))
        self._overflow: list[tuple[int, int, bytes]] = []

    @property
    def pieces(self) -> int:
        """The number of rows in ``Steps`` of the first step that waits."""
        return self.left.get(self.pending[0].trigger, 0)

    @pieces.setter
    def pieces(self, rows: int) -> None:
        """Set the number of rows that are written."""
        self.left[self.pending[0].trigger] = rows

    def load(self, database: Database, trigger: int, ids: Ids) -> None:
        """Read the rows of the keys, and of those due at the trigger, that are not in memory."""
        if self.complete:
            return
        due = self._due_ids(database, trigger)
        wanted = np.concatenate([ids, due])
        missing = np.unique(wanted[self.table.find(wanted) < 0], axis=0)
        before = self.size
        if len(missing):
            keys = [(self.part, self.window, k) for k in id_cells(missing)]
            columns = ("KeyId", "Columns", "State", "UnitIds")
            self._enter(database, list(read_rows(database, "Keys", columns, keys)))
        slots = self.table.find(due)
        # What was here before knows better when it is due.
        slots = slots[slots >= before]
        self.due[slots] = np.minimum(self.due[slots], trigger)

    def _due_ids(self, database: Database, trigger: int) -> Ids:
        """Ids on the lists of the trigger; earlier lists were worked off at their own step."""
        due = prefix(self.part, self.window, trigger)
        rows = read_rows(database, "KeysByDue", ("KeyIds",), ranges=[due])
        return ids_in(b"".join(b64decode(value) for (value,) in rows))

    def _enter(self, database: Database, rows: list[list[Any]]) -> None:
        """Take rows of ``Keys`` into memory."""
        if not rows:
            return
        keys = unpack_columns([r[1] for r in rows], self._schema)
        slots = self.intern(ids_from([r[0] for r in rows]), keys)
        self._extend()
        state = unpack_states([r[2] for r in rows], self.values.shape[1])
        self.units[slots], self.values[slots] = state["units"], state["values"]
        self.selected[slots] = state["round"]
        self.due[slots] = state["due"]
        self.done[slots] = state["taken"] > self.committed
        self._set_start[slots], self._set_end[slots] = state["chunk"], state["chunks"]
        self._set_selected[slots], self._stored[slots] = state["round"], True
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self._inline[slot] = b64decode(row[3]) if row[3] else b""
        self._load_sets(database, slots)
        self._fresh = []  # they are in the database

    def _load_sets(self, database: Database, slots: Int64) -> None:
        """Unit sets of loaded slots: what their own rows hold, and the rows beyond."""
        raw = [self._inline[slot] for slot in slots.tolist()]
        self.pairs.add(np.repeat(slots, [len(r) // 16 for r in raw]), ids_in(b"".join(raw)))
        large = slots[self._set_end[slots] > self._set_start[slots]]
        for slot, key in zip(large.tolist(), id_cells(self.table.ids[large]), strict=True):
            where = (self.part, self.window, key)
            ends = (int(self._set_start[slot]), int(self._set_end[slot]))
            chunks = between(*([*where, chunk] for chunk in ends))
            for (value,) in read_rows(database, "KeyUnits", ("UnitIds",), ranges=[chunks]):
                units = ids_in(b64decode(value))
                self.pairs.add(np.full(len(units), slot, np.int64), units)

    def _extend(self) -> None:
        """Give the columns by slot the length of the others."""
        more = len(self.units) - len(self._stored)
        if more <= 0:
            return
        self._inline += [b""] * more
        for name in ("_set_start", "_set_end", "_set_selected"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.int64)]))
        for name in ("_stored", "_changed", "_sets", "_examined"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.bool_)]))

    def take(self, trigger: int, result: StepResult) -> None:
        """Note what a step changed, for the next commit; after an error the object is dropped."""
        self._extend()
        self._changed[result.changed] = True
        self._examined[result.changed] = True
        self._examined[result.examined] = True
        self._note_pairs(result.pair_slots, result.pair_units)
        if not self._window_sets:
            changed = result.changed
            self._drop_sets(changed[self._set_selected[changed] != self.selected[changed]])
        self._set_selected[result.changed] = self.selected[result.changed]
        self.pending.append(PendingStep(trigger, result))

    def _note_pairs(self, slots: Int64, units: Ids) -> None:
        """Append new unit ids to their keys' rows; full rows' worth moves to ``KeyUnits``."""
        order = np.argsort(slots, kind="stable")
        raw = np.ascontiguousarray(units[order]).tobytes()
        for slot, a, b in runs_of(slots[order]):
            ids = self._inline[slot] + raw[16 * a : 16 * b]
            while len(ids) > 16 * INLINE_PAIRS:
                piece, ids = ids[:CELL_BYTES], ids[CELL_BYTES:]
                self._overflow.append((slot, int(self._set_end[slot]), piece))
                self._set_end[slot] += 1
            self._inline[slot] = ids
        self._sets[slots] = True

    def _drop_sets(self, slots: Int64) -> None:
        """The round of these keys has ended: nobody asks for its units again."""
        gone = set(slots.tolist())
        for slot in gone:
            self._inline[slot] = b""
        self._overflow = [row for row in self._overflow if row[0] not in gone]
        self._set_start[slots] = self._set_end[slots]
        self._sets[slots] = True

    def waiting(self) -> Int64:
        """Return the slots whose rows the next commit writes, because they changed."""
        return np.flatnonzero(self._changed)

    def looked_at(self) -> Int64:
        """Return the slots that a step since the last commit examined."""
        return np.flatnonzero(self._examined)

    def row_bytes(self, slots: Int64) -> Int64:
        """Return (n,) how many bytes the rows of the slots may take, their releases included."""
        sizes = np.full(self.size, 500, np.int64)
        sizes[slots] += [len(self._inline[slot]) for slot in slots.tolist()]
        new = slots[~self._stored[slots]]
        sizes[new] += row_sizes(self.key_columns(new))
        for step in self.pending:
            np.add.at(sizes, step.published, row_sizes(step.releases))
            if step.selected is not None:
                sizes[step.selected] += 16 + row_sizes(self.key_columns(step.selected))
        return np.asarray(sizes[slots])

    def write_keys(self, out: Mutations, slots: Int64, trigger: int) -> None:
        """Put the rows of some slots, as of a trigger, into a commit: ``Keys`` and ``KeyUnits``."""
        states = pack_states(self, slots, trigger, self._set_start[slots], self._set_end[slots])
        keys, at = id_cells(self.table.ids[slots]), (self.part, self.window)
        new, sets = ~self._stored[slots], self._sets[slots]
        columns = iter(pack_columns(self.key_columns(slots[new])))
        shapes: dict[tuple[bool, bool], list[Any]] = {}
        for slot, key, state, fresh, units in zip(
            slots.tolist(), keys, states, new.tolist(), sets.tolist(), strict=True
        ):
            row = [*at, key, state]
            if fresh:
                row.append(next(columns))
            if units:
                row.append(cell(self._inline[slot]))
            shapes.setdefault((fresh, units), []).append(row)
        for (fresh, units), rows in shapes.items():
            extra = (("Columns",) if fresh else ()) + (("UnitIds",) if units else ())
            out.upsert("Keys", (*_KEY, "State", *extra), rows)
        self._put_chunks(out, self._overflow)

    def _put_chunks(self, out: Mutations, chunks: list[tuple[int, int, bytes]]) -> None:
        rows = [
            [self.part, self.window, cell(self.table.ids[slot].tobytes()), chunk, cell(raw)]
            for slot, chunk, raw in chunks
        ]
        out.upsert("KeyUnits", (*_KEY, "Chunk", "UnitIds"), rows)

    def chunks_ahead(self) -> Iterator[Mutations]:
        """Yield commits of rows of ``KeyUnits`` before those of their keys, which could be too
        large.

        Nobody reads them until the key's own row says that they belong to it.
        """
        if not self._overflow:
            return
        sizes = np.array([len(raw) for _, _, raw in self._overflow], np.int64)
        for run in parts(np.arange(len(sizes)), _CHUNK_MUTATIONS, sizes):
            out, chunks = Mutations(), [self._overflow[at] for at in run.tolist()]
            slots = np.unique(np.array([slot for slot, _, _ in chunks], np.int64))
            new = slots[~self._stored[slots]]
            # The key's own row must be there first: that of a key without any data.
            ids = id_cells(self.table.ids[new])
            states = pack_empty(len(new), self.values.shape[1])
            columns = pack_columns(self.key_columns(new))
            rows = [
                [self.part, self.window, *row] for row in zip(ids, states, columns, strict=True)
            ]
            out.upsert("Keys", (*_KEY, "State", "Columns"), rows)
            self._put_chunks(out, chunks)
            yield out
        self._overflow = []

    def write_due(self, out: Mutations, slots: Int64, trigger: int, piece: int) -> None:
        """Put lists of when the slots must be looked at again into a commit.

        There is a row for each due trigger, or several of a size that one cell takes.
        """
        slots = slots[(self.due[slots] != NEVER) & (self.due[slots] > trigger)]
        # No two rows of one commit share a number, and no two commits a (step, piece).
        rows = [
            [self.part, self.window, due, trigger, (piece << 20) + number, ids]
            for number, (due, ids) in enumerate(due_cells(self.table.ids[slots], self.due[slots]))
        ]
        out.upsert("KeysByDue", DUE, rows)

    @staticmethod
    def outbox(step: PendingStep, slots: Bool | None) -> list[str]:
        """Return cells of a step's releases, at least one: those of the marked slots, or all."""
        rows = step.releases
        if slots is not None:
            rows = rows.filter(pa.array(slots[step.published]))
        return release_cells(rows)

    def settled(self) -> None:
        """Note that everything that waited was committed."""
        self._stored[self._changed] = True
        for flags in (self._changed, self._sets, self._examined):
            flags[:] = False
        last = self.durable = self.pending[-1].trigger
        self.left = {step: rows for step, rows in self.left.items() if step > last}
        self.pending, self._overflow = [], []


def piece_of(window: int, number: int) -> int:
    """Return the ``Piece`` of a window's row with this number, which is below 2^32."""
    return (window << _WINDOW) + number


def window_of(piece: int) -> int:
    """Return the window of a ``piece_of``."""
    return int(piece) >> _WINDOW


def selection_of(
    states: SpannerKeyShard, step: PendingStep, slots: Bool | None = None
) -> Selection | None:
    """Return the selection of a waiting step, of marked slots or of all; ``None``: nothing."""
    chosen = step.selected
    if chosen is not None and slots is not None:
        chosen = chosen[slots[chosen]]
    if chosen is None or not len(chosen):
        return None
    keys = arrow.selected_keys(states, chosen)
    return Selection(step.trigger_time, states.window, keys)


def add_selection(
    out: Mutations,
    states: SpannerKeyShard,
    step: PendingStep,
    first: int,
    slots: Bool | None,
) -> None:
    """Put what a step selected into the commit of its other rows of ``Steps``.

    Args:
        first: number of the first of these rows; it keeps numbers of several commits apart.
        slots: marks the keys that the commit is of; ``None``: all.
    """
    selection = selection_of(states, step, slots)
    if selection is None:
        return
    rows = [
        [
            states.part,
            SELECTED,
            selection.trigger_time,
            piece_of(selection.window, (first << _PIECE) + n),
            out.writer,
            value,
        ]
        for n, value in enumerate(release_cells(selection.keys))
    ]
    out.insert("Steps", STEP, rows)
