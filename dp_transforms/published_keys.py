"""Keys that windows have published at their tests, and that later windows remember.

They are read from committed releases, and from nowhere else.  A key that a test selects is
published at the test's own trigger, so the releases of the tests' steps name every key with the
test that selected it.  They are committed together with the state of their step, copied, kept and
expired with it: there is no second list that could differ.

**Remembered keys** are those that later windows know of (mechanism.md section 9).  Window V reads,
once, the selections of tests whose trigger time is not after its start.  A key among them is
published in V like one of a public list: from the first trigger on, at every refresh and at the
close, with noise whether it has records or not.  It is not tested in V, and where published keys
are skipped its pairs take no selection weight there.

Sensitivity.  A key that a test selects is published at the test's own trigger, so the list is a
function of the outputs up to V's start, which is a public time: given equal outputs so far, V
remembers the same keys on neighbouring streams.

* Values.  A remembered key's streams in V are those of any published key: C pairs of a unit, each
  of L, in noise that no other window has (its name says the window).  That they are published
  before V has a record of theirs, and that a test of another window decided so, is adaptive choice
  by outputs.  A row over nothing has the noise of any other row: which keys had records does not
  show.
* Selection.  With ``skip`` a pair reads what was selected by V's start, if it is decided behind
  it, and is new otherwise.  Both are functions of outputs before its decision, so all other units'
  indices are the same on both streams, and the unit's own counter never falls: it adds each w_i at
  most once on every path of outputs, sum w_i^2 <= 1 (`dp_transforms.skipping`).  Without ``skip``
  its pairs move the selection stream of (V, key) as if it were tested, at most n of C, which the
  budget counts; where that stream is continued as the count of units its noise is the stream's
  own.
* Thresholds.  A key that is not tested is published by no chance of its own: a unit has at most C
  (key, window)s that are tested, each with b, as before.  In the proof both sides publish the same
  keys until the first test that one makes and the other does not, so they remember the same until
  then, and its probability is the C b that is counted.

It rests on three things.  The list is the same for whoever asks, on every shard, in every layout
and at every replay: a selection is committed with the step that made it, and no step or decision
of V is taken before all tests up to V's start are (in one shard steps are taken in order of
trigger time; decisions wait for all shards: a window's start is a stop of the public clock, where
it matters).  It changes between windows only: a key forgotten in mid-window would be tested
although it was published there, a second round with a chance b of its own.  And a key is forgotten
by a public rule, here a fixed time after its last selection: by a true count, whether its series
goes on would tell whether it had records.
"""

import itertools
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64
from dpstream.accounting.errors import InvariantError, RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.pacing import may_decide, next_test
from dpstream.state.idtable import IdTable, shard_of, shard_order
from dpstream.state.retention_store import Selection
from dpstream.state.store import NEVER, OvertakenError, Store


class Remembered:
    """Selected keys in order of time, and those that each window remembers.

    Args:
        lasting: trigger times that a selection is remembered for; ``None``: for ever.
        ids_only: keep no key columns.

    Attributes:
        through: trigger time up to which selections were taken in; -1: none yet.
        columns: key columns and ``_id`` by slot, ``None`` before the first.
    """

    def __init__(self, lasting: int | None = None, ids_only: bool = False) -> None:
        self._lasting, self._ids_only = lasting, ids_only
        self.through = -1
        self.columns: pa.Table | None = None
        self._keys, self._last = IdTable(), np.zeros(0, np.int64)
        self._windows: dict[int, Bool] = {}

    def begin(self, window: int, start: int, selections: Iterable[Selection]) -> None:
        """Take a window's start: what was selected since the start before it, in order of time.

        Args:
            start: trigger time of the window's start, not before ``through``.
        """
        if not start >= self.through:
            raise InvariantError("windows ask for remembered keys in their order")
        fresh = []
        for selection in selections:
            if not self.through < selection.trigger_time <= start:
                raise InvariantError("selections are read in their order")
            before, ids = self._keys.size, ids_of(selection.keys.column("_id"))
            slots = self._keys.intern(ids)
            more = np.zeros(self._keys.size - before, np.int64)
            self._last = np.concatenate([self._last, more])
            self._last[slots] = selection.trigger_time
            new = np.flatnonzero(slots >= before)
            rows = new[np.unique(slots[new], return_index=True)[1]]
            if not self._ids_only:
                fresh.append(selection.keys.take(pa.array(rows)))
        if fresh:
            own = [] if self.columns is None else self.columns.to_batches()
            self.columns = pa.Table.from_batches([*own, *fresh]).combine_chunks()
        self.through = start
        remembered = np.ones(self._keys.size, np.bool_)
        if self._lasting is not None:
            remembered = self._last > start - self._lasting
        self._windows[window] = remembered

    def has_begun(self, window: int) -> bool:
        """Return whether the start of the window was read."""
        return window in self._windows

    def of(self, window: int) -> Int64:
        """Return the slots of the keys that a window remembers."""
        return np.flatnonzero(self._windows[window])

    def knows(self, window: int, ids: Ids) -> Bool:
        """Return (n,) whether a window remembers each of the key ids (n, 2)."""
        remembered = self._windows[window]
        slots = self._keys.find(ids)
        return np.append(remembered, False)[np.where(slots < len(remembered), slots, -1)]

    def holds(self, ids: Ids) -> Bool:
        """Return (n,) whether each of the key ids (n, 2) was ever selected up to ``through``."""
        return np.asarray(self._keys.find(ids) >= 0)

    def end(self, before: int) -> None:
        """Let go of windows before one, and of keys that nobody remembers any more."""
        self._windows = {w: remembered for w, remembered in self._windows.items() if w >= before}
        if self._lasting is None:
            return
        lasting = self._last > self.through - self._lasting
        for flags in self._windows.values():
            lasting[: len(flags)] |= flags
        if 2 * int(lasting.sum()) >= len(lasting):
            return
        keys = IdTable()
        keys.intern(self._keys.ids[lasting])
        self._windows = {
            w: remembered[lasting[: len(remembered)]] for w, remembered in self._windows.items()
        }
        self._keys, self._last = keys, self._last[lasting]
        if self.columns is not None:
            self.columns = self.columns.filter(pa.array(lasting)).combine_chunks()


class RememberedKeys:
    """The keys of a shard that windows remember, as the store has them; for one thread at a time.

    Args:
        plan, store: of the run.
        shard: the key shard.
        ids_only: keep no key columns.
    """

    def __init__(self, plan: Plan, store: Store, shard: int, ids_only: bool = False) -> None:
        self._plan, self._store, self._shard = plan, store, shard
        self._ids_only = ids_only
        self._read = Remembered(plan.design.remembered_for, ids_only)

    def at(self, window: int) -> Remembered:
        """Return remembered keys after the window's start, when all tests of its shards are
        committed.

        Each selection is read once; also those of windows that are open at that time are begun.
        """
        if self._read.has_begun(window):
            return self._read
        timeline, lasting = self._plan.timeline, self._plan.design.remembered_for
        start = timeline.base(window)
        if start < self._read.through:  # long closed: not asked for in order
            self._read = Remembered(lasting, self._ids_only)
        selections = self._since(start)
        for other in timeline.windows_at(start + 1):
            at = timeline.base(other)
            if other <= window and at >= self._read.through and not self._read.has_begun(other):
                fresh = [s for s in selections if self._read.through < s.trigger_time <= at]
                self._read.begin(other, at, fresh)
        span = 2 * (timeline.triggers // max(1, timeline.base(1)) + 1)
        self._read.end(window - span)
        return self._read

    def _since(self, start: int) -> list[Selection]:
        after, lasting = self._read.through, self._plan.design.remembered_for
        if lasting is not None and after < 0:
            # Of the windows that are open at this start the oldest began at most T before.
            after = max(after, start - self._plan.timeline.triggers - lasting)
        return self._store.selections(self._shard, after, start)

    def unknown(self, ids: Ids) -> Bool:
        """Return (n,) whether each selected key (n, 2) must be noted.

        Where a run remembers for good, a key that was selected before is there already.
        """
        if self._plan.design.remembered_for is not None:
            return np.ones(len(ids), np.bool_)
        return ~self._read.holds(ids)


class _Window:
    """Keys of a window and key shard by slot and the number of the test that selected each
    (``NEVER`` behind them, at slot -1), as far as tests were read."""

    def __init__(self) -> None:
        self.keys, self.read = IdTable(), 0
        self.test = np.full(1, NEVER, np.int32)

    def add(self, test: int, ids: Ids) -> None:
        """What a test has published, keys of before included; in order, each test once."""
        if test != self.read:
            return
        self.keys.intern(ids)
        more = self.keys.size - (len(self.test) - 1)
        new = np.full(more, self.read, np.int32)
        self.test = np.concatenate([self.test[:-1], new, self.test[-1:]])
        self.read += 1


class PublishedKeys:
    """The keys that the windows of a run have published, for all threads of a process.

    Ids are looked up by key shard.  What a shard has committed is read when the first of its ids is
    looked up: ids only, once for each process.

    Args:
        plan, store: of the run.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self._windows: dict[tuple[int, int], _Window] = {}
        self._remembered = {
            shard: RememberedKeys(plan, store, shard, ids_only=True)
            for shard in range(store.identity.shards if plan.design.remembers else 0)
        }
        self._begun = set[int]()

    @classmethod
    def of_process(cls, plan: Plan, store: Store) -> "PublishedKeys":
        """Return the instance that all threads of this process share."""
        # ``setdefault`` is atomic, so that two threads get the same instance.
        shared: PublishedKeys = store.__dict__.setdefault("_published_keys", cls(plan, store))
        return shared

    def of_keys(self, ids: Ids, first: Int64, count: Int64, decided: int, upto: int) -> Int32:
        """Return (n,) bits of the windows that have published each record's key.

        Bit k: window ``first + k`` has published it by a test at or before trigger time
        ``decided``, or remembers it and has begun by then.

        Args:
            ids: (n, 2) of the records' keys; first, count: (n,) their open windows.
            upto: last trigger time that is decided with them.

        Raises:
            OvertakenError: a test lies within what is to be decided, so that ``decided`` is old.
            RunError: a step at or before it is not committed.
        """
        # One status for all of them: no test lies between their trigger times.
        test = next_test(self._plan, decided)
        if test is not None and test < upto:
            raise OvertakenError
        out = np.zeros(len(first), np.int32)
        if decided == 0 or not len(first):
            return out
        for nth in range(int(count.max())):
            rows = np.flatnonzero(count > nth)
            windows = first[rows] + nth
            for window in range(int(windows.min()), int(windows.max()) + 1):
                mine = rows[windows == window]
                if not len(mine):
                    continue
                out[mine] |= self._published(window, ids[mine], decided).astype(np.int32) << nth
        return out

    def _published(self, window: int, ids: Ids, decided: int) -> Bool:
        shards, published = self._store.identity.shards, np.zeros(len(ids), np.bool_)
        order, bounds = shard_order(shard_of(ids, shards), shards)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            rows = order[begin:end]
            if len(rows):
                with self._store.at_work("published", number):
                    published[rows] = self._published_of(window, number, ids[rows], decided)
        return published

    def _published_of(self, window: int, shard: int, ids: Ids, decided: int) -> Bool:
        tests = self._plan.design.test_triggers
        number = int(np.searchsorted(tests, decided - self._plan.timeline.base(window), "right"))
        published_before = self._published_by_start(window, shard, ids, decided)
        if number == 0:
            return published_before
        if (window, shard) not in self._windows:
            self._forget(window, shard)
        window_keys = self._windows.setdefault((window, shard), _Window())
        while window_keys.read < number:
            test = window_keys.read
            window_keys.add(test, self._released(window, shard, int(tests[test])))
        # For another shard more may have been read: what a later test published is not known here.
        return np.asarray(
            published_before | (window_keys.test[window_keys.keys.find(ids)] < number)
        )

    def _published_by_start(self, window: int, shard: int, ids: Ids, decided: int) -> Bool:
        """Which keys earlier windows have published by the window's start."""
        start = self._plan.timeline.base(window)
        if not self._remembered or not 0 < start <= decided:
            return np.zeros(len(ids), np.bool_)
        # Of windows that were open at the start; those that closed before were stops of the clock.
        if window not in self._begun and not may_decide(self._plan, self._store, start + 1):
            raise _uncommitted()
        self._begun.add(window)
        return self._remembered[shard].at(window).knows(window, ids)

    def _released(self, window: int, shard: int, trigger: int) -> Ids:
        rows = self._store.committed_releases(window, shard, trigger)
        if rows is None:
            raise _uncommitted()
        return ids_of(rows.column("_id"))

    def _forget(self, window: int, shard: int) -> None:
        """Let go of windows of a shard that have closed long before this one opened."""
        timeline = self._plan.timeline
        span = 2 * (timeline.triggers // max(1, timeline.base(1)) + 1)
        for other in [w for w, of in list(self._windows) if of == shard and w < window - span]:
            del self._windows[other, shard]
            self._begun.discard(other)


def _uncommitted() -> RunError:
    return RunError(
        "mechanism.skip",
        "records are decided before what the last test published is committed",
        "run the job again; if it does not help, report it",
    )
