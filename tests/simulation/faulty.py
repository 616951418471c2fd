"""A worker's store in which every call is a point: to change turns, to be slow, to fail, to die."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError
from dpstream.state.idtable import IdTable
from dpstream.state.store import Admitted, KeyShard, StepResult, Store, UnitShard

T = TypeVar("T")
#: (when, what) -> whether the call fails here; does not return to a worker that died.
Point = Callable[[str, str], bool]


def injected() -> RunError:
    """What a store raises when its database does not answer."""
    return RunError("store", "an injected failure", "repeat the work")


class _Group(threading.local):
    """Places that the group of this thread has touched."""

    places: list[tuple[int, int]] | None = None


class FaultyStore(Store):
    """``Store`` whose calls may fail before they took effect, or after: outcome unknown.

    Args:
        inner: the real store of this worker, used by nobody else.
        point: the world's dice; called in the thread of the work.
        wait: ends the turn.
        keep: told (store, shard) before positions of it may go.
    """

    def __init__(
        self,
        inner: Store,
        point: Point,
        wait: Callable[[], None],
        keep: Callable[[Store, int], None],
    ) -> None:
        self.inner, self._point, self._wait, self._keep = inner, point, wait, keep
        self._busy: set[tuple[str, int]] = set()
        self.identity = inner.identity
        self._group = _Group()
        if hasattr(inner, "hook"):  # the points between the commits of one step
            inner.hook = self._at

    def _at(self, when: str, what: str) -> None:
        if self._point(when, what):
            raise injected()

    def _call(
        self, what: str, effect: Callable[[], T], drop: Callable[[], None] | None = None
    ) -> T:
        self._at("before", what)
        out = effect()
        try:
            self._at("after", what)
        except RunError:
            if drop is not None:
                drop()  # as a store does that cannot tell what happened
            raise
        return out

    @contextlib.contextmanager
    def at_work(self, stage: str, shard: int) -> Iterator[None]:
        """As the lock of the real store, but who waits gives its turn back."""
        while (stage, shard) in self._busy:
            self._wait()
        self._busy.add((stage, shard))
        try:
            yield
        finally:
            self._busy.discard((stage, shard))

    def key_shard(self, window: int, shard: int) -> KeyShard:
        return self._call(
            f"key_shard {window} {shard}", lambda: self.inner.key_shard(window, shard)
        )

    def load_keys(self, window: int, shard: int, trigger: int, states: KeyShard, ids: Ids) -> None:
        self._call(
            f"load_keys {window} {shard} {trigger}",
            lambda: self.inner.load_keys(window, shard, trigger, states, ids),
        )

    def commit_step(
        self, window: int, shard: int, trigger: int, states: KeyShard, result: StepResult
    ) -> pa.RecordBatch:
        if self._group.places is not None:
            self._group.places.append((window, shard))
        return self._call(
            f"commit_step {window} {shard} {trigger}",
            lambda: self.inner.commit_step(window, shard, trigger, states, result),
            lambda: self.inner.forget(window, shard),
        )

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        places = self._group.places = list[tuple[int, int]]()
        try:
            with self.inner.grouped():
                yield
                self._at("before", "group")
            try:
                self._at("after", "group")
            except RunError:
                for place in places:
                    self.inner.forget(*place)
                raise
        finally:
            self._group.places = None

    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        return self._call(
            f"committed_releases {window} {shard} {trigger}",
            lambda: self.inner.committed_releases(window, shard, trigger),
        )

    def completed(self, shards: int, first: int = 0) -> dict[int, int]:
        return self._call("completed", lambda: self.inner.completed(shards, first))

    def forget(self, window: int, shard: int) -> None:
        self.inner.forget(window, shard)

    def unit_shard(self, shard: int) -> UnitShard:
        return self._call(f"unit_shard {shard}", lambda: self.inner.unit_shard(shard))

    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        self._call(f"load_units {shard}", lambda: self.inner.load_units(shard, units, ids))

    def commit_units(
        self, shard: int, trigger_time: int, units: UnitShard, admitted: Admitted
    ) -> None:
        self._call(
            f"commit_units {shard} {trigger_time}",
            lambda: self.inner.commit_units(shard, trigger_time, units, admitted),
            lambda: self.inner.forget_units(shard),
        )

    def forget_units(self, shard: int) -> None:
        self.inner.forget_units(shard)

    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        return self._call(
            f"admitted_before {shard}", lambda: self.inner.admitted_before(shard, units)
        )

    def forget_positions(self, shard: int, trigger_time: int) -> None:
        def forget() -> None:
            self._keep(self.inner, shard)
            self.inner.forget_positions(shard, trigger_time)

        self._call(f"forget_positions {shard} {trigger_time}", forget)

    def close(self) -> None:
        self.inner.close()


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda store, *args: store._call(name, lambda: getattr(store.inner, name)(*args))


# The rest of the contract, which the flow seldom calls.
for _name in FaultyStore.__abstractmethods__:
    setattr(FaultyStore, _name, _passed_on(_name))
FaultyStore.__abstractmethods__ = frozenset()
