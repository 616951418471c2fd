"""The Cloud Spanner store: key and unit states by row, one transaction a step.

A step is three calls: the list of due keys, the rows that are not in memory, and the commit of
all mutations.  States stay in memory between steps (nothing is read for a (window, shard) that
began here), bounded by ``limits.CACHED_STATES``.  Fencing needs no read: a step's row in ``Steps``
can be inserted once, and a worker commits step t only after it has seen t - 1 committed, so whoever
inserts row t worked on the states as of t - 1.  The same holds for BOUND's decisions, whose rows
are named by the trigger time that they follow.

A step beyond ``limits.COMMIT_MUTATIONS`` is committed in parts, see `state.store`.
"""

import contextlib
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.errors import instance
from dpstream.accounting.limits import CACHED_STATES, COMMIT_MUTATIONS
from dpstream.state import arrow
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import Selection
from dpstream.state.seals import damaged
from dpstream.state.spanner import schema
from dpstream.state.spanner.client import (
    ExistsError,
    MissingError,
    commit,
    from_on,
    prefix,
    read_rows,
)
from dpstream.state.spanner.fill import KEY_MUTATIONS, PROGRESS
from dpstream.state.spanner.retention import SpannerRetention
from dpstream.state.spanner.rows import PLAIN, STEP, Layout, cell
from dpstream.state.spanner.schema import BOUND, FORGOTTEN, REACH, Mutations, fits, parts
from dpstream.state.spanner.shards import (
    ROW_MUTATIONS,
    PendingStep,
    SpannerKeyShard,
    SpannerUnitShard,
    add_selection,
    selection_of,
)
from dpstream.state.store import (
    Admitted,
    KeyShard,
    OvertakenError,
    RunIdentity,
    StepResult,
    Store,
    UnitShard,
)

#: Releases, progress and the deletion of a closed window.
_STEP_MUTATIONS = 100


class _Group(threading.local):
    """The (window, shard)s that the thread's open group has steps of."""

    shards: list[SpannerKeyShard] | None = None


class SpannerStore(SpannerRetention, Store):
    """One run's state in one Spanner database.

    Args:
        url: ``spanner://PROJECT/INSTANCE/DATABASE``; it must be initialised.
        key_schema: Arrow schema of the key columns.
        streams: integer sums kept per key (``Design.sums``).
        window_sets: a key's unit set lasts for the window (``Design.window_sets``).
        successor: identity and number of a generation that is to be filled.
        layout: what the rows of units hold.
    """

    groups_whole = False  # what would exceed a commit's limits is committed before the block ends

    def __init__(
        self,
        url: str,
        key_schema: pa.Schema,
        streams: int,
        window_sets: bool = True,
        successor: tuple[RunIdentity, int] | None = None,
        layout: Layout = PLAIN,
    ) -> None:
        super().__init__(url, key_schema, streams, successor, layout)
        self._window_sets = window_sets
        self._lock = threading.RLock()
        self._group = _Group()
        self._key_shards: dict[tuple[int, int], SpannerKeyShard] = {}

    # --- keys ---------------------------------------------------------------------------

    @override
    def key_shard(self, window: int, shard: int) -> KeyShard:
        with self._lock:
            states = self._key_shards.pop((window, shard), None)
            if states is None:
                states = self._begin_keys(window, shard)
                self._make_room()
            self._key_shards[window, shard] = states  # the one used last stands last
            return states

    def _begin_keys(self, window: int, shard: int) -> SpannerKeyShard:
        part = self._part(shard)
        committed, left = self._key_progress(part, window)
        states = SpannerKeyShard(
            self._schema,
            self._streams,
            (part, window),
            complete=committed is None and not left,
            window_sets=self._window_sets,
        )
        states.mark_committed(committed or 0)
        states.durable = states.committed
        states.left = left
        return states

    def _make_room(self) -> None:
        """Drop the states used longest ago; they are in the database."""
        total = sum(s.size for s in self._key_shards.values())
        for name, states in list(self._key_shards.items()):
            if total <= CACHED_STATES:
                return
            if not states.pending:
                total -= states.size
                del self._key_shards[name]

    @override
    def load_keys(self, window: int, shard: int, trigger: int, states: KeyShard, ids: Ids) -> None:
        states = instance(states, SpannerKeyShard)
        group = self._group.shards
        if group:
            # What waits must fit into one commit together with this step.
            named = len(np.unique(ids, axis=0)) + int((states.due[: states.size] <= trigger).sum())
            more = KEY_MUTATIONS * named
            waits = sum(KEY_MUTATIONS * len(s.looked_at()) for s in group)
            if waits + more + _STEP_MUTATIONS * (len(group) + 1) > COMMIT_MUTATIONS:
                self._write(group)
                group.clear()
        states.load(self._db, trigger, ids)

    @override
    def commit_step(
        self, window: int, shard: int, trigger: int, states: KeyShard, result: StepResult
    ) -> pa.RecordBatch:
        states = instance(states, SpannerKeyShard)
        if trigger != states.committed + 1:  # the row's uniqueness tells the rest
            self._drop([states])
            raise OvertakenError
        before = states.left.get(trigger, 0)
        states.take(trigger, result)
        group = self._group.shards
        if group is None:
            self._write([states])
        elif states not in group:
            group.append(states)
        states.mark_committed(trigger)
        if result.closes and group is None:
            self.forget(window, shard)
        if before:
            if group is not None:
                self._write(group)
                group.clear()
            released = self._releases(states.part, window, trigger)
            if released is None:
                raise damaged()
            return released
        return result.releases

    @override
    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        group: list[SpannerKeyShard] = []
        self._group.shards = group
        try:
            yield
            self._write(group)
        except BaseException:
            self._drop(group)
            raise
        finally:
            self._group.shards = None

    def _write(self, shards: list[SpannerKeyShard]) -> None:
        """Commit all steps that wait in some (window, shard)s."""
        if not shards:
            return
        try:
            out = Mutations()
            for states in shards:
                self._write_shard(out, states)
            if fits(out):
                self._commit(out, shards[0])
            elif len(shards) == 1 and len(shards[0].pending) == 1:
                self._write_parts(shards[0])
            else:
                raise OvertakenError  # too much for one commit: each step by itself
        except BaseException:
            self._drop(shards)
            raise
        for states in shards:
            closed = any(step.closes for step in states.pending)
            states.settled()
            if closed:
                self._drop([states])

    def _write_shard(self, out: Mutations, states: SpannerKeyShard) -> None:
        last = states.pending[-1]
        for step in states.pending:
            self._put_step(out, states, step, states.left.get(step.trigger, 0))
        number = states.left.get(last.trigger, 0)
        self._put_states(out, states, last, states.waiting(), states.looked_at(), number)
        out.upsert("Progress", PROGRESS, [[states.part, states.window, last.trigger]])

    def _write_parts(self, states: SpannerKeyShard) -> None:
        """Commit one step in several commits, by key; the last one makes it visible."""
        step, slots = states.pending[0], states.looked_at()
        for out in states.chunks_ahead():
            nothing = np.zeros(states.size, np.bool_)
            rows = self._put_step(out, states, step, states.pieces, nothing)
            self._commit(out, states)
            states.pieces += rows
        runs = parts(slots, KEY_MUTATIONS, states.row_bytes(slots))
        for number, run in enumerate(runs, 1):
            out, last = Mutations(), number == len(runs)
            mine = np.zeros(states.size, np.bool_)
            mine[run] = True
            rows = self._put_step(out, states, step, states.pieces, mine)
            self._put_states(out, states, step, run, run, states.pieces, last)
            if last:
                out.upsert("Progress", PROGRESS, [[states.part, states.window, step.trigger]])
            self._commit(out, states)
            states.pieces += rows

    @staticmethod
    def _put_step(
        out: Mutations,
        states: SpannerKeyShard,
        step: PendingStep,
        first: int,
        slots: Bool | None = None,
    ) -> int:
        """Put the outbox of a step and its selected slots into a commit; return the outbox's rows.

        Args:
            first: number of the outbox's first row.
            slots: the slots whose releases are put; ``None``: all.
        """
        rows = [
            [states.part, states.window, step.trigger, first + n, out.writer, releases]
            for n, releases in enumerate(states.outbox(step, slots))
        ]
        out.insert("Steps", STEP, rows)
        add_selection(out, states, step, first, slots)
        out.require(states.part, schema.of_window(states.window))
        return len(rows)

    @staticmethod
    def _put_states(
        out: Mutations,
        states: SpannerKeyShard,
        step: PendingStep,
        changed: Int64,
        examined: Int64,
        number: int,
        last: bool = True,
    ) -> None:
        """Put the states of some slots after a step into a commit.

        The last commit of a step that closes its window deletes the window's states.
        """
        if last and step.closes:
            for table in ("Keys", "KeysByDue"):
                out.delete_all(table, states.part, states.window)
        else:
            states.write_keys(out, changed, step.trigger)
            states.write_due(out, examined, step.trigger, number)

    def _commit(self, out: Mutations, states: SpannerKeyShard) -> None:
        trigger = states.pending[0].trigger
        self._commit_once(out, (states.part, states.window, trigger, states.pieces))

    def _commit_once(self, out: Mutations, fence: tuple[int, ...]) -> None:
        """Commit; an insert that finds its row was overtaken, unless the row is this one's."""
        try:
            self._commit_in_epoch(out)
        except ExistsError:
            rows = list(read_rows(self._db, "Steps", ("Writer",), [fence]))
            if rows != [[out.writer]]:
                raise OvertakenError from None

    def _commit_in_epoch(self, out: Mutations) -> None:
        try:
            commit(self._db, out.fill, True)
        except MissingError:
            for part, epoch in sorted(out.epochs):
                if not schema.open_fencing_epoch(self._db, self.generation, part, epoch):
                    raise OvertakenError from None
            try:
                commit(self._db, out.fill, True)
            except MissingError:  # closed meanwhile
                raise OvertakenError from None

    def _drop(self, shards: list[SpannerKeyShard]) -> None:
        for states in shards:
            self.forget(states.window, states.part - self._first_part)

    @override
    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        part = self._part(shard)
        with self._lock:
            cached = self._key_shards.get((window, shard))
        # Another thread may be taking steps there: some are committed in parts, and only the
        # last part makes such a step visible.
        is_cached = cached is not None and cached.durable >= trigger
        if not is_cached and (self._reached(part, window) or 0) < trigger:
            return None
        return self._releases(part, window, trigger)

    def _releases(self, part: int, window: int, trigger: int) -> pa.RecordBatch | None:
        """All rows of a step in ``Steps``; ``None`` if there are none or they were dropped."""
        rows = list(self._rows("Steps", ("Releases",), ranges=[prefix(part, window, trigger)]))
        if not rows or rows[0][0] is None:
            return None
        return arrow.merged([arrow.from_bytes(b64decode(value)) for (value,) in rows])

    @override
    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        all_selections, part = super().selections(shard, after, upto), self._part(shard)
        for states in self._group.shards or ():
            waits = (selection_of(states, s) for s in states.pending if states.part == part)
            last = (1 << 62) if upto is None else upto
            all_selections += [s for s in waits if s is not None and after < s.trigger_time <= last]
        return sorted(all_selections, key=lambda selection: selection[:2])

    @override
    def forget(self, window: int, shard: int) -> None:
        with self._lock:
            self._key_shards.pop((window, shard), None)

    # --- units --------------------------------------------------------------------------

    @override
    def unit_shard(self, shard: int) -> UnitShard:
        with self._lock:
            units = self._unit_shards.get(shard)
            if units is None:
                units = self._unit_shards[shard] = self._begin_units(shard)
            return units

    def _begin_units(self, shard: int) -> SpannerUnitShard:
        part = self._part(shard)
        progress, under_way = self._unit_rows(part)
        units = SpannerUnitShard(part, not progress and not under_way, self._layout)
        units.decided, units.forgotten = progress.get(BOUND, 0), progress.get(FORGOTTEN, 0)
        units.pieces = len(under_way)
        units.reach = max([progress.get(REACH, 0), *under_way])
        units.ahead = units.pieces > 0 or units.reach > units.decided
        return units

    @override
    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        units = instance(units, SpannerUnitShard)
        units.load(self._db, ids)
        units.ahead = units.pieces > 0 or units.reach > units.decided

    @override
    def commit_units(
        self, shard: int, trigger_time: int, units: UnitShard, admitted: Admitted
    ) -> None:
        units = instance(units, SpannerUnitShard)
        try:
            slots = units.take(admitted)
            runs = parts(slots, ROW_MUTATIONS, units.row_bytes(slots))
            for number, run in enumerate(runs, 1):
                self._commit_decision(units, trigger_time, run, number == len(runs))
        except BaseException:
            self.forget_units(shard)
            raise
        units.decided, units.logged = trigger_time, units.table.size
        units.ahead, units.pieces = units.reach > trigger_time, 0
        if units.table.size > CACHED_STATES:
            self.forget_units(shard)

    def _commit_decision(
        self, units: SpannerUnitShard, trigger_time: int, slots: Int64, last: bool
    ) -> None:
        """One commit of a decision: rows of some units, and with the last one the progress."""
        out = Mutations()
        fence = (units.part, BOUND, units.decided, units.pieces)
        # A row of a decision says how far it goes.
        out.insert("Steps", STEP, [[*fence, out.writer, cell(trigger_time.to_bytes(8, "little"))]])
        out.require(units.part, schema.of_decision(units.decided))
        units.write(out, slots)
        if last:
            rows = [[units.part, BOUND, trigger_time]]
            if units.reach > trigger_time:
                rows.append([units.part, REACH, units.reach])
            out.upsert("Progress", PROGRESS, rows)
        self._commit_once(out, fence)
        units.pieces += 1

    @override
    def forget_units(self, shard: int) -> None:
        with self._lock:
            self._unit_shards.pop(shard, None)

    @override
    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        return instance(units, SpannerUnitShard).admitted()

    # --- progress -----------------------------------------------------------------------

    def _part(self, shard: int) -> int:
        return self._first_part + shard

    def _key_progress(self, part: int, window: int) -> tuple[int | None, dict[int, int]]:
        """(step reached, rows in ``Steps`` of each step beyond: parts, and what a copy put there).

        The two are read one after the other.  Had another worker committed the step in between,
        all of its rows would look like a part: progress that has not moved since excludes it.
        """
        reached = self._reached(part, window)
        while rows_by_step := self._rows_of_steps(part, window, (reached or 0) + 1):
            before, reached = reached, self._reached(part, window)
            if reached == before:
                break
        return reached, rows_by_step

    def _rows_of_steps(self, part: int, window: int, first: int) -> dict[int, int]:
        """Rows in ``Steps`` of every step from ``first`` on that has any."""
        rows = self._rows("Steps", ("Step",), ranges=[from_on(part, window, first)])
        return dict(Counter(int(step) for (step,) in rows))

    def _unit_rows(self, part: int) -> tuple[dict[int, int], list[int]]:
        """(progress by kind, trigger times that the rows of a decision under way go up to).

        Read one after the other like those of keys.
        """
        progress = self._unit_reached(part)
        while under_way := self._decision(part, progress.get(BOUND, 0)):
            before, progress = progress, self._unit_reached(part)
            if progress == before:
                break
        return progress, under_way

    def _unit_reached(self, part: int) -> dict[int, int]:
        keys = [(part, kind) for kind in (BOUND, FORGOTTEN, REACH)]
        return dict(self._rows("Progress", ("WindowIndex", "Reached"), keys))

    def _decision(self, part: int, decided: int) -> list[int]:
        rows = self._rows("Steps", ("Releases",), ranges=[prefix(part, BOUND, decided)])
        return [int.from_bytes(b64decode(trigger_time), "little") for (trigger_time,) in rows]

    @override
    def close(self) -> None:
        """Drop what is in memory; the connection is the process's."""
        with self._lock:
            self._key_shards.clear()
            self._unit_shards.clear()
