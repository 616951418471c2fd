"""What each window has published at its tests: read from committed releases, and nowhere else.

A key that a test selects is published at the test's own trigger, so the releases of the tests'
steps name every key with the test that selected it.  They are committed together with the state
of their step, copied, kept and expired with it: there is no second list that could differ.
"""

import numpy as np

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.pacing import may_decide, next_test
from dpstream.dp_transforms.remembered_keys import RememberedKeys
from dpstream.state.idtable import IdTable
from dpstream.state.store import NEVER, OvertakenError, Store


class _Window:
    """Keys of a window by slot and the number of the test that selected each (``NEVER`` behind
    them, at slot -1), as far as tests were read."""

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
    """Which keys the windows of a run have published; each thread has its own.

    Args:
        plan, store: of the run.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self._windows: dict[int, _Window] = {}
        every = range(store.identity.shards)
        self._remembered = RememberedKeys(plan, store, every) if plan.design.remembers else None

    def of_keys(self, ids: Ids, first: Int64, count: Int64, decided: int, upto: int) -> Int32:
        """(n,) bit k: the record's window ``first + k`` has published its key by a test at or
        before trigger time ``decided``, or remembers it and has begun by then.

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
            for window in np.unique(windows).tolist():
                mine = rows[windows == window]
                out[mine] |= self._published(window, ids[mine], decided).astype(np.int32) << nth
        return out

    def _published(self, window: int, ids: Ids, decided: int) -> Bool:
        tests = self._plan.design.test_triggers
        number = int(np.searchsorted(tests, decided - self._plan.timeline.base(window), "right"))
        published_before = self._published_by_start(window, ids, decided)
        if number == 0:
            return published_before
        if window not in self._windows:
            self._forget(window)
        window_keys = self._windows.setdefault(window, _Window())
        while window_keys.read < number:
            test = window_keys.read
            window_keys.add(test, self._released(window, int(tests[test])))
        # For another shard more may have been read: what a later test published is not known here.
        return np.asarray(
            published_before | (window_keys.test[window_keys.keys.find(ids)] < number)
        )

    def _published_by_start(self, window: int, ids: Ids, decided: int) -> Bool:
        """Which keys earlier windows have published by the window's start."""
        start = self._plan.timeline.base(window)
        if self._remembered is None or not 0 < start <= decided:
            return np.zeros(len(ids), np.bool_)
        # Of windows that were open at the start; those that closed before were stops of the clock.
        if not self._remembered.begun(window) and not may_decide(
            self._plan, self._store, start + 1
        ):
            raise _uncommitted()
        return self._remembered.at(window).knows(window, ids)

    def _released(self, window: int, trigger: int) -> Ids:
        ids = []
        for shard in range(self._store.identity.shards):
            rows = self._store.committed_releases(window, shard, trigger)
            if rows is None:
                raise _uncommitted()
            ids.append(ids_of(rows.column("_id")))
        return np.concatenate(ids)

    def _forget(self, window: int) -> None:
        """Let go of windows that have closed long before this one opened."""
        line = self._plan.timeline
        span = 2 * (line.triggers // max(1, line.base(1)) + 1)
        for other in [w for w in self._windows if w < window - span]:
            del self._windows[other]


def _uncommitted() -> RunError:
    return RunError(
        "mechanism.skip",
        "records are decided before what the last test published is committed",
        "run the job again; if it does not help, report it",
    )
