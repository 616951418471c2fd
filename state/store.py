"""The Store contract: the needs of the flow, and nothing about any database.

One step is one (window, key shard, trigger).  A worker asks the store for the ``KeyShard`` of
a window, lets the store load the keys of its micro-batch and the keys that are due, changes
them in memory and commits the step: states, releases and progress in one transaction.  Whoever
finds a step committed reads its releases back and never computes it again; whoever loses a race
does the same.

A store may hand out a key before it is due, never later: ``due`` of keys that were only
re-predicted need not survive a restart, because a test repeated too early gives the same
negative answer (the noise of a node is drawn once).

A database may limit what fits into one commit.  A larger step (or decision of BOUND) is split
by key (or unit): every row then says how far it is itself, and the progress row, which makes
the whole visible, is written by the last commit.  Should only some of the commits happen, the
keys in them are ``done`` (the units' records are found among those admitted before), and
whoever repeats the step leaves them as they are.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64, UInt64
from dpstream.state.idtable import IdTable, PairSet
from dpstream.state.keycounts import KeyCounts
from dpstream.state.retention_store import RetentionStore

Ints = npt.NDArray[np.signedinteger[Any]]

#: ``due`` of a key that no test and no publication waits for.
NEVER = np.iinfo(np.int32).max


#: Note of what is known of an input of files: not there (no attempt has read it), one of these, or
#: the time at which the last attempt compared it after its last row.
INPUT = "input"
READING, CHANGED = "reading", "changed"
#: Note of a run that `dpstream run --fresh` began and that no command has finished since.
FRESH = "fresh"

#: Computes ``RunIdentity.calibration`` of a run that begins.
Calibrate = Callable[[], str]


class RunIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a store's run; fixed when it is created, before the first draw.

    Attributes:
        plan_hash: hash of the public plan.
        run_id: 128 random bits in hex; part of every noise node's name.
        epoch: 0; a restore that cannot replay its input increments it.
        shards: number of key shards and of unit shards.
        secret_fingerprint: keyed fingerprint of the secret.
        source_fingerprint: keyed fingerprint of the input.
        plan: the plan itself as JSON, for people.
        insecure: whether a fixed test secret or run id was used; releases are marked with it.
        calibration: the numbers of the run (``accounting.budget.calibration``).
    """

    plan_hash: str
    run_id: str
    epoch: int
    shards: int
    secret_fingerprint: str
    source_fingerprint: str
    plan: str
    insecure: bool = False
    calibration: str = ""


class KeyShard:
    """States of the keys of one (window, shard), columnar and addressed by slot.

    Attributes (arrays by slot; only the first ``size`` entries mean anything):
        units: exact units that selection has counted.
        values: (n, V) exact prefix of each value stream; with selection weights the weighted
            count of units stands last.
        due: trigger at which the key must be looked at even without data.
        done: the key has taken step ``committed + 1`` already, in a commit of a part of it.
        selected: 1 once the key is selected, else 0.
        keys: Arrow key columns, in the plan's order.
        scratch: caches of the flow (noise paths); lives as long as this object.
    """

    def __init__(self, key_schema: pa.Schema, streams: int) -> None:
        self.committed = 0
        self.table = IdTable()
        self.pairs = PairSet()
        self.units = np.zeros(0, np.int64)
        self.values = np.zeros((0, streams), np.int64)
        self.due = np.zeros(0, np.int32)
        self.selected = np.zeros(0, np.int32)
        self.done = np.zeros(0, np.bool_)
        self.scratch: dict[str, Any] = {}
        self.logged = 0
        self._schema = key_schema
        self._chunks: list[pa.Table] = []
        self._fresh: list[pa.Table] = []

    @property
    def size(self) -> int:
        """The number of keys."""
        return self.table.size

    def intern(self, ids: Ids, keys: pa.RecordBatch) -> Int64:
        """Return slots of the keys, new ones created empty; ``keys`` has the key columns by row."""
        before = self.size
        slots = self.table.intern(ids)
        if self.size > before:
            self._grow()
            # The first row of each new slot: rows are assigned last to first, so it stays.
            new_rows = np.flatnonzero(slots >= before)[::-1]
            first = np.empty(self.size - before, np.int64)
            first[slots[new_rows] - before] = new_rows
            columns = [keys.column(f.name) for f in self._schema]
            table = pa.Table.from_arrays(columns, schema=self._schema).take(pa.array(first))
            self._append(table.combine_chunks())
        return slots

    def _append(self, table: pa.Table) -> None:
        """Keep few chunks: each at least twice as long as the next, so merging stays linear."""
        self._fresh.append(table)
        self._chunks.append(table)
        while len(self._chunks) > 1 and self._chunks[-2].num_rows < 2 * self._chunks[-1].num_rows:
            last = self._chunks.pop()
            self._chunks[-1] = pa.concat_tables([self._chunks[-1], last]).combine_chunks()

    def fresh_keys(self) -> pa.Table:
        """Return key columns of the slots ``logged .. size - 1``, created since the last commit."""
        return pa.concat_tables([self._schema.empty_table(), *self._fresh])

    def mark_committed(self, trigger: int, logged: bool = True) -> None:
        """Record that the states are durable as of ``trigger``.

        Args:
            logged: whether the new keys are written; ``False`` where a group of steps still waits.
        """
        self.committed = trigger
        self.done[:] = False
        if logged:
            self.logged, self._fresh = self.size, []

    def key_columns(self, slots: Int64) -> pa.Table:
        """Return the key columns of the slots."""
        table = pa.concat_tables([self._schema.empty_table(), *self._chunks])
        return table.take(pa.array(slots))

    def due_at(self, trigger: int) -> Int64:
        """Return slots whose due trigger is at or before ``trigger``."""
        return np.flatnonzero(self.due[: self.size] <= trigger)

    def _grow(self) -> None:
        have = len(self.units)
        if self.size <= have:
            return
        more = max(self.size, have + have // 2, 1024) - have
        self.units = np.concatenate([self.units, np.zeros(more, np.int64)])
        self.values = np.concatenate(
            [self.values, np.zeros((more, self.values.shape[1]), np.int64)]
        )
        self.due = np.concatenate([self.due, np.full(more, NEVER, np.int32)])
        self.selected = np.concatenate([self.selected, np.zeros(more, np.int32)])
        self.done = np.concatenate([self.done, np.zeros(more, np.bool_)])


class StepResult(msgspec.Struct, frozen=True):
    """The changes of a step: everything that must be durable before its releases are published.

    Attributes:
        changed: slots whose units, values or round changed.
        examined: slots that were examined: changed, due or published.
        pair_slots, pair_units: unit pairs counted for the first time.
        releases: the released rows of this shard, possibly none; published: their slots.
        closes: this was the window's last trigger; its states may be dropped.
        selected: slots that a test selected, if later windows remember them (``selections``).
        trigger_time: global trigger time of the step.
    """

    changed: Int64
    examined: Int64
    pair_slots: Int64
    pair_units: Ids
    releases: pa.RecordBatch
    published: Int64
    closes: bool
    selected: Int64 | None = None
    trigger_time: int = 0


class UnitShard:
    """Counters of the units of one shard: admitted pairs, by slot of the unit.

    Attributes:
        decided: last global trigger time whose records of all units have been admitted or rejected.
        ahead: records of some units beyond it are decided, in a commit of a part of a decision.
        forgotten: positions decided up to this trigger time have been dropped, their windows are
            closed.
        counts: (n,) admitted pairs of each unit.
        indices: (n,) those that were the first of their (unit, window, key), where a bound per key
            is kept here (``Admitted.per_key``); else 0.
        keys: admitted records of each (unit, window, key), where a bound per key is kept here.
        period_end: (n,) last trigger time at which a record of the unit can be decided (its privacy
            period is closed after it); ``NEVER`` without periods.
    """

    def __init__(self) -> None:
        self.decided = self.forgotten = 0
        self.ahead = False
        self.table = IdTable()
        self.counts = np.zeros(0, np.int32)
        self.indices = np.zeros(0, np.int32)
        self.keys = KeyCounts()
        self.period_end = np.zeros(0, np.int32)
        self.logged = 0

    def intern(self, units: Ids) -> Int64:
        """Return slots of the units, new ones with a count of 0."""
        slots = self.table.intern(units)
        if self.table.size > len(self.counts):
            more = max(self.table.size, 2 * len(self.counts)) - len(self.counts)
            self.counts = np.concatenate([self.counts, np.zeros(more, np.int32)])
            self.indices = np.concatenate([self.indices, np.zeros(more, np.int32)])
            self.period_end = np.concatenate([self.period_end, np.full(more, NEVER, np.int32)])
        return slots


class PerKey(NamedTuple):
    """The decisions on records of which at most k of a (unit, window, key) are admitted.

    Attributes:
        keys: (n,) first 64 bits of the ids of their keys.
        first: first window that was open for each.
        taken: bit i: window ``first + i`` is admitted; fresh: and is the first pair of its (unit,
            window, key), which counts the unit there and takes an index of selection.  Where pairs
            on published keys take none all pairs are first ones (k = 1), and ``fresh`` tells
            those that take an index.
    """

    keys: UInt64
    first: Int32
    taken: UInt64
    fresh: UInt64

    def at(self, rows: Int64 | Bool | slice) -> "PerKey":
        """Return some of the records."""
        return PerKey(self.keys[rows], self.first[rows], self.taken[rows], self.fresh[rows])


class Admitted(msgspec.Struct, frozen=True):
    """Admitted records, columnar: their positions and the decisions on them.

    Attributes:
        partition, offset: position of each record.
        unit: (n,) slot of its unit; pairs: (n,) admitted windows; trigger_time: (n,) when it was
            decided (later than its stamp's only when it was delivered late).
        rank: (n,) pairs of the unit admitted before it, kept where their order matters; with a
            bound per key those that were the first of theirs.
        per_key: more, where a bound per key is kept.
        digest: (n,) of what each record holds, where ids of records take the place of positions.
    """

    partition: Int32
    offset: Int64
    unit: Int32
    pairs: Int32
    trigger_time: Int32
    rank: Int32 | None = None
    per_key: PerKey | None = None
    digest: UInt64 | None = None

    def at(self, rows: Int64 | Bool | slice) -> "Admitted":
        """Return some of the records."""
        return Admitted(
            self.partition[rows],
            self.offset[rows],
            self.unit[rows],
            self.pairs[rows],
            self.trigger_time[rows],
            None if self.rank is None else self.rank[rows],
            None if self.per_key is None else self.per_key.at(rows),
            None if self.digest is None else self.digest[rows],
        )


class OvertakenError(Exception):
    """Signals that another worker committed a step or a decision first.

    Read what it committed, and do the rest.
    """


class Store(RetentionStore):
    """A database that keeps one run's state; see the module's text for the contract.

    Attributes:
        groups_whole: whether ``grouped`` commits all steps of a block or none of them, however
            many there are.
    """

    identity: RunIdentity
    groups_whole: ClassVar[bool] = True

    def at_work(self, stage: str, shard: int) -> AbstractContextManager[Any]:
        """Hold the states of a shard of BOUND or RELEASE while a thread works on them.

        The threads of a process share them.  A runner may give a bundle to a process whose
        earlier attempt at it, long taken for lost, is still in the midst of it: the new one
        waits, or it would count from half-changed states.
        """
        # Both calls are atomic, so that two threads find the same lock.
        locks: dict[tuple[str, int], threading.Lock] = self.__dict__.setdefault("_at_work", {})
        return locks.setdefault((stage, shard), threading.Lock())

    @abstractmethod
    def key_shard(self, window: int, shard: int) -> KeyShard:
        """Return the states of a (window, shard), as of its last committed step.

        Which keys it holds is the store's affair until ``load_keys`` names those of a step.
        """

    @abstractmethod
    def load_keys(self, window: int, shard: int, trigger: int, states: KeyShard, ids: Ids) -> None:
        """Bring the states of the keys ``ids`` (as far as they have any) and of all keys due
        at or before ``trigger`` into memory.

        Args:
            ids: (n, 2) ids of every key that the step may touch, in any order, repeated or not.
        """

    @abstractmethod
    def commit_step(
        self, window: int, shard: int, trigger: int, states: KeyShard, result: StepResult
    ) -> pa.RecordBatch:
        """Commit one step durably; returns the committed releases, those of keys that were
        ``done`` before included.

        Inside ``grouped`` the step becomes durable, and may be seen, when the block ends.

        Raises:
            OvertakenError: another worker committed this step, or a part of it, before; or
                the states are not those of the step before.
        On any error the states in memory are dropped and must be loaded again.
        """

    @abstractmethod
    def grouped(self) -> AbstractContextManager[None]:
        """Commit all steps of the block (of this thread) when it ends: all or none of them, if
        ``groups_whole``.

        Raises:
            OvertakenError: another worker committed one of them, or together they are too large for
                one transaction; none is written that was not before.
        On any error the states of all its steps are dropped from memory.
        """

    @abstractmethod
    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        """Return releases of a committed step; ``None`` if it is not committed, or they were
        dropped.
        """

    def completed(self, shards: int, first: int = 0) -> dict[int, int]:
        """Return, by window from ``first`` on, the last trigger that all ``shards`` have committed.

        It is 0 if some have committed none.  Dropped windows are left out.
        """
        by_window: dict[int, list[int]] = {}
        for window, _, trigger in self.progress(first):
            by_window.setdefault(window, []).append(trigger)
        # A shard that has not begun a window has committed nothing of it.
        return {w: min(t) if len(t) == shards else 0 for w, t in by_window.items()}

    @abstractmethod
    def forget(self, window: int, shard: int) -> None:
        """Drop the states in memory; the next use loads what is committed."""

    @abstractmethod
    def unit_shard(self, shard: int) -> UnitShard:
        """Return the counters of a unit shard, as of its last committed decision.

        Which units it holds is the store's affair until ``load_units`` names them.
        """

    @abstractmethod
    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        """Bring the counters of the units ``ids`` (as far as they have any) into memory.

        ``ahead`` is true from here on if it holds for any of them: another worker may have
        committed a part of a decision since the shard was read.
        """

    @abstractmethod
    def commit_units(
        self, shard: int, trigger_time: int, units: UnitShard, admitted: Admitted
    ) -> None:
        """Commit the decisions on all records up to ``trigger_time`` durably.

        Raises:
            OvertakenError: another worker decided this shard, or expired units of it; the
                counters in memory are dropped and must be loaded again.
        """

    @abstractmethod
    def forget_units(self, shard: int) -> None:
        """Drop the counters in memory; the next use loads what is committed."""

    @abstractmethod
    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        """Return admitted records of all units that were loaded (or of all), indexed by
        ``state.arrow.position_ids`` with the slots of ``units``.
        """

    def token(self) -> str:
        """Return the random text that every begin renews; at first empty
        (``state.ledger.lineage``).
        """
        return self.metadata("token") or ""

    def renew_token(self, old: str, new: str) -> bool:
        """Replace the token durably if it is still ``old``; returns whether it was."""
        return self.swap_metadata("token", old or None, new)

    @property
    def input_changed(self) -> bool:
        """Return whether input files were changed while a run of this store read them: final."""
        return self.metadata(INPUT) == CHANGED

    @property
    def reading(self) -> bool:
        """Return whether an attempt is reading files now, or was interrupted."""
        return self.metadata(INPUT) == READING

    @property
    def compared_input(self) -> str | None:
        """Return when the input was compared after its last row was read; ``None``: it is read now
        or never was, an attempt was interrupted, or it has changed.
        """
        note = self.metadata(INPUT)
        return None if note in (READING, CHANGED) else note

    def note_input(self, new: str) -> None:
        """Record what is known of the input of files; that they were ``CHANGED`` stays.

        Args:
            new: ``READING``: an attempt reads files, and if it is interrupted, a change may go
                unnoticed; or the time at which they were compared after the last row was read.
        """
        old = self.metadata(INPUT)
        while old not in (new, CHANGED) and not self.swap_metadata(INPUT, old, new):
            old = self.metadata(INPUT)

    @abstractmethod
    def close(self) -> None:
        """Release files and connections."""
