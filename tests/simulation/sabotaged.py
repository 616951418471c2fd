"""Sabotaged variants of the product and of a store: each must break a rule in some seed of CI.

Each is one plausible mistake in what makes faults harmless; on an undisturbed run none shows.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dpstream.dp_transforms import bounding, flow, step
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.state import arrow, retention
from dpstream.state.idtable import IdTable
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import SqliteStore
from tests.simulation.faulty import FaultyStore
from tests.simulation.limited import Database, LimitedStore

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


class Sabotage(NamedTuple):
    """A patch, the store that it shows on, and the rule that it must break (any by default).

    ``seeds``: those that find it, for a variant that few of CI's find; ``world --sabotage``
    searches for others when the draws of the world have changed.  ``skipping``: in worlds of jobs
    that skip what is published.
    """

    patch: Patch
    store: str
    rule: str = ""
    seeds: tuple[int, ...] = ()
    skipping: bool = False


def _wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """A patch with one function replaced by ``make(function)``."""

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with mock.patch.object(owner, name, make(getattr(owner, name))):
            yield

    return patch


def _overwriting(real: Any) -> Any:
    """No fence: the last to write a step wins."""

    def write(store: Any, steps: Any) -> None:
        places = [step.row[:3] for step in steps]
        with contextlib.suppress(sqlite3.Error):
            for place in places:
                store._db.execute(
                    "DELETE FROM steps WHERE window = ? AND shard = ? AND trigger = ?", place
                )
        real(store, steps)

    return write


def _no_positions(real: Any) -> Any:
    """Committed decisions are not found again."""

    def admitted_before(store: Any, shard: int, units: Any) -> Any:
        return IdTable(), real(store, shard, units)[1]

    return admitted_before


@contextlib.contextmanager
def _not_forgotten() -> Iterator[None]:
    """States stay in memory after an error, half changed."""
    inside = threading.local()  # steps of several threads begin and end in any order

    def once(stepper: Any, window: int, shard: int, trigger: int, rows: Any) -> Any:
        inside.step = True
        try:
            return real(stepper, window, shard, trigger, rows)
        finally:
            inside.step = False

    def forget(store: Any, window: int, shard: int) -> None:
        if not getattr(inside, "step", False):
            really(store, window, shard)

    real, really = step.Stepper._step_once, FaultyStore.forget
    with (
        mock.patch.object(step.Stepper, "_step_once", once),
        mock.patch.object(FaultyStore, "forget", forget),
    ):
        yield


@contextlib.contextmanager
def _counters_not_forgotten() -> Iterator[None]:
    def decide(plan: Any, store: Any, *rest: Any) -> Any:
        return bounding._decide(plan, store, *rest)

    with mock.patch.object(flow, "decide_records", decide):
        yield


def _fresh(real: Any) -> Any:
    """Noise that is not named by its node."""
    rng = np.random.default_rng(1)

    def draw(*args: Any) -> Any:
        noise, starts = real(*args)
        return noise + rng.integers(-2, 3, len(noise)).astype(noise.dtype), starts

    return draw


def _seen_early(real: Any) -> Any:
    """A step is emitted before it is committed."""

    def commit(store: Any, window: int, shard: int, trigger: int, states: Any, result: Any) -> Any:
        store._point.__self__.sees((window, shard, trigger), result.releases)
        return real(store, window, shard, trigger, states, result)

    return commit


@contextlib.contextmanager
def _emitted_before_commit() -> Iterator[None]:
    """Whoever repeats a step that was seen and not committed draws new noise."""
    with (
        mock.patch.object(RoundedGaussian, "draw", _fresh(RoundedGaussian.draw)),
        mock.patch.object(ContinuousGaussian, "draw", _fresh(ContinuousGaussian.draw)),
        mock.patch.object(FaultyStore, "commit_step", _seen_early(FaultyStore.commit_step)),
    ):
        yield


def _half_a_group(real: Any) -> Any:
    """The last step of a group is not written, and nobody is told."""
    return lambda store, steps: real(store, steps[: max(1, len(steps) - 1)])


def _trigger_time_not_kept(real: Any) -> Any:
    """After a restart the decided trigger time is that of before."""

    def replay(units: Any, rows: Any) -> None:
        real(units, rows)
        units.decided = 0

    return replay


def _counted_from_zero(real: Any) -> Any:
    """Counters of units start again with the worker."""

    def replay(units: Any, rows: Any) -> None:
        real(units, rows)
        units.counts[:] = 0

    return replay


def _emitted_again(real: Any) -> Any:
    """What a source delivers again is emitted again."""
    return lambda plan, store, shard, records, upto, since=0: real(
        plan, store, shard, records, upto, 0
    )


def _from_any_states(real: Any) -> Any:
    """Nobody looks whether the states are those of the step before."""

    def once(stepper: Any, window: int, shard: int, trigger: int, rows: Any) -> Any:
        states = stepper.store.key_shard(window, shard)
        states.committed = max(states.committed, trigger - 1) if states.committed else 0
        return real(stepper, window, shard, trigger, rows)

    return once


def _never_done(real: Any) -> Any:
    """Keys that have taken a step take it again with the rest of it."""

    def load(store: Any, window: int, shard: int, trigger: int, states: Any, ids: Any) -> None:
        real(store, window, shard, trigger, states, ids)
        states.done[:] = False

    return load


def _last_part_fenced(real: Any) -> Any:
    """Only the commit that makes a step visible looks whether it comes too late."""

    def write(database: Any, parts: Any) -> None:
        parts = list(parts)
        if any(last for _, last in parts):
            real(database, parts)
            return
        for part, _ in parts:
            database.keys[part.place].update(part.rows)
            database.releases.setdefault(part[:3], {}).update(part.releases)

    return write


def _taken_back(real: Any) -> Any:
    """A part that comes too late is refused, but marks its keys as not yet so far."""

    def write(database: Any, parts: Any) -> None:
        parts = list(parts)
        for part, _ in parts:
            for key in part.rows:
                entry = database.keys[part.place].get(key)
                if entry is not None and entry.taken >= part.trigger:
                    database.keys[part.place][key] = entry._replace(taken=part.trigger - 1)
        real(database, parts)

    return write


def _never_ahead(real: Any) -> Any:
    return lambda store, shard, units: False


def _due_too_late(real: Any) -> Any:
    """Keys that are due are not loaded without data."""

    def load(store: Any, window: int, shard: int, trigger: int, states: Any, ids: Any) -> None:
        real(store, window, shard, 0, states, ids)

    return load


def _rows_twice(real: Any) -> Any:
    return lambda rows, batch, ids: rows


def _counters_go_too(real: Any) -> Any:
    """Counters go with their unit's last position, whatever its period."""

    def forget(database: Any, shard: int, units: set[bytes], trigger_time: int) -> None:
        real(database, shard, units, trigger_time)
        held = {record.unit for record in database.admitted[shard]}
        for unit in units - held:
            database.counts[shard].pop(unit, None)

    return forget


def _indices_forgotten(real: Any) -> Any:
    """A decision that is read back takes the unit's first indices again."""

    def recall(plan: Any, store: Any, shard: int, batch: Any, *more: Any) -> Any:
        out = real(plan, store, shard, batch, *more)
        if batch.rank.flags.writeable:
            batch.rank[batch.seen] &= ~(0x3FF << 10)
        return out

    return recall


def _counted_by_this_worker(real: Any) -> Any:
    """The counter of indices is not read back: a worker that takes over counts from zero."""

    def replay(units: Any, rows: Any) -> None:
        real(units, rows)
        units.counts[:] &= 0xFFFF

    return replay


SABOTAGED: dict[str, Sabotage] = {
    "recalled pairs take the first weights": Sabotage(
        _wrapped(bounding, "_recall", _indices_forgotten), "sqlite", skipping=True
    ),
    "indices from zero after a restart": Sabotage(
        _wrapped(arrow, "replay_units", _counted_by_this_worker), "sqlite", skipping=True
    ),
    "steps without a fence": Sabotage(
        _wrapped(SqliteStore, "_write_steps", _overwriting), "sqlite", seeds=(98,)
    ),
    "positions ignored on replay": Sabotage(
        _wrapped(SqliteStore, "admitted_before", _no_positions), "sqlite"
    ),
    "states kept after an error": Sabotage(_not_forgotten, "sqlite"),
    "counters kept after an error": Sabotage(_counters_not_forgotten, "sqlite"),
    "fresh noise when a step is repeated": Sabotage(
        _emitted_before_commit, "sqlite", "a release has two values"
    ),
    "half a group committed": Sabotage(
        _wrapped(SqliteStore, "_write_steps", _half_a_group), "sqlite"
    ),
    "decided trigger time not kept": Sabotage(
        _wrapped(arrow, "replay_units", _trigger_time_not_kept), "sqlite"
    ),
    "counts from zero after a restart": Sabotage(
        _wrapped(arrow, "replay_units", _counted_from_zero), "sqlite"
    ),
    "records of a key counted from zero after a restart": Sabotage(
        _wrapped(arrow, "enter_keys", lambda real: lambda units, records: None), "sqlite"
    ),
    "recalled records counted twice": Sabotage(_wrapped(bounding, "firsts", _rows_twice), "sqlite"),
    "records delivered again emitted again": Sabotage(
        _wrapped(flow, "decide_records", _emitted_again), "sqlite"
    ),
    "steps from old states": Sabotage(
        _wrapped(step.Stepper, "_step_once", _from_any_states), "sqlite"
    ),
    "two bundles of a shard at once in a process": Sabotage(
        _wrapped(FaultyStore, "at_work", lambda real: lambda *_: contextlib.nullcontext()),
        "sqlite",
        seeds=(34,),
    ),
    "done keys step twice": Sabotage(_wrapped(LimitedStore, "load_keys", _never_done), "limited"),
    "parts without a fence": Sabotage(
        _wrapped(Database, "write", _last_part_fenced), "limited", seeds=(51,)
    ),
    "steps taken back by a late part": Sabotage(
        _wrapped(Database, "write", _taken_back), "limited", seeds=(451,)
    ),
    "parts of a decision not seen": Sabotage(
        _wrapped(LimitedStore, "_ahead", _never_ahead), "limited"
    ),
    "due keys not loaded": Sabotage(_wrapped(LimitedStore, "load_keys", _due_too_late), "limited"),
    "counters gone with their positions": Sabotage(
        _wrapped(Database, "forget", _counters_go_too), "limited"
    ),
    "positions gone before their window": Sabotage(
        _wrapped(
            retention,
            "settled_trigger_time",
            lambda _: lambda line, windows: line.base(windows + 1),
        ),
        "sqlite",
    ),
}
