"""One step of one (window, key shard, trigger): the pure function of the flow behind BOUND.

Order of a step: aggregate the micro-batch; examine the keys that it changed and the keys that are
due; select; publish what the calendar schedules; predict.  Nothing is visible before
``Store.commit_step`` returned, and what is visible is what it returned.

A step is taken once for each key, also after a reshard and when it is committed in parts.  Shards
of a store that is resharded may be at different steps; the new shards continue after the last one,
and keys that came from a shard that was ahead must not take those steps again (``ReshardProgress``,
``TakenSteps``).  A step too large for one transaction is committed in parts by key
(``KeyShard.done``).  Either way the step is computed for the remaining keys, and its releases are
those that one undivided step would have given: keys do not depend on each other.

A step that tests and publishes nothing is quiet: its rows are added together with those of the next
one, if both share a commit (``Stepper.steps``).
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.budget.allocation import StreamNoise, plain_count
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import InvariantError, RunError
from dpstream.accounting.limits import STEP_ATTEMPTS
from dpstream.accounting.mixing import Mixing, checked_mixing
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.aggregation import aggregate, distinct
from dpstream.dp_transforms.batches import (
    admitted_schema,
    concat,
    empty,
    ids_of,
    shard_release_schema,
)
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.mixing import MixedNoise
from dpstream.dp_transforms.noise.paths import NoiseStream, Sampler
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import GeometricNodes, RoundedGaussian, TruncatedNodes
from dpstream.dp_transforms.perturbation import MixedPaths, Published, PublishedPaths, publish
from dpstream.dp_transforms.published_keys import RememberedKeys
from dpstream.dp_transforms.selection import (
    NoisyThresholds,
    candidates,
    is_quiet,
    next_publication,
    predict,
    publishes,
    select,
    wait_for_test,
)
from dpstream.state.arrow import id_array
from dpstream.state.idtable import IdTable, shard_of
from dpstream.state.retention_store import ReshardProgress
from dpstream.state.seals import damaged
from dpstream.state.store import NEVER, KeyShard, OvertakenError, RunIdentity, StepResult, Store

_NO_SLOTS: Int64 = np.zeros(0, np.int64)


class TakenSteps:
    """The steps that the keys of a store's open windows have taken.

    Args:
        reshards: by window, the progress of the keys' earlier shards at each reshard.
    """

    def __init__(self, reshards: Mapping[int, Sequence[ReshardProgress]]) -> None:
        self._reshards = reshards

    def may_differ(self, window: int) -> bool:
        """Return whether some keys of a shard may have taken steps that others have not."""
        return window in self._reshards

    def before_reshard(self, window: int, trigger: int, ids: Ids) -> Bool:
        """Return (n,) whether each key id (n, 2) took the step on its shard of an earlier
        layout.
        """
        ahead = np.zeros(len(ids), np.bool_)
        for reshard in self._reshards.get(window, ()):
            progress = np.array(reshard.progress, np.int32)
            ahead |= progress[shard_of(ids, len(progress))] >= trigger
        return ahead

    def remaining(
        self, states: KeyShard, window: int, trigger: int, slots: Int64, ids: Ids
    ) -> tuple[Int64, Bool | None]:
        """Return the keys and rows that a step must still be computed for.

        Args:
            states: the shard; its keys that have taken the step are marked as done.
            slots: keys that are due; ids: (n, 2) key ids of the step's rows.

        Returns:
            (remaining due keys, (n,) rows whose key remains; ``None``: all of both).
        """
        ahead = None
        if self.may_differ(window):
            ahead = self.before_reshard(window, trigger, ids)
            states.done[: states.size] |= self.before_reshard(window, trigger, states.table.ids)
        if not states.done.any():
            return slots, None if ahead is None else ~ahead
        at = states.table.find(ids)
        rows = (at < 0) | ~states.done[at]
        return slots[~states.done[slots]], rows if ahead is None else rows & ~ahead


@functools.lru_cache(maxsize=32)
def sampler_of(noise: StreamNoise, tested: bool = False) -> Sampler:
    """Return the sampler of a stream's noise."""
    if noise.most:
        return TruncatedNodes(noise.scale, noise.most, noise.sooner, tested)
    if noise.scale:
        return GeometricNodes(noise.scale)
    rounded = noise.strategy_object.rounds_nodes
    return RoundedGaussian(noise.sigma) if rounded else ContinuousGaussian(noise.sigma)


class Stepper:
    """Runs steps of one job.

    Args:
        plan: the public plan.
        ring: key ring.
        store: the store of the states; its identity names the noise.
        public: (table, ids) of this job's public keys, or ``None``.
        look_ahead: steps of noise computed ahead (performance only).
        mixing: how the noise of public keys is mixed, if the plan mixes it.
    """

    def __init__(
        self,
        plan: Plan,
        ring: KeyRing,
        store: Store,
        public: tuple[pa.Table, Ids] | None = None,
        look_ahead: int | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        self.keys, self.store = ring, store
        # The numbers of the run, not of this program or processor.
        self.plan, self.budget = calibrated(plan, store.identity.calibration)
        self._run_name = run_name(store.identity)
        self._public = public
        self._mixing, self._cells = None, IdTable()
        if plan.cells is not None:
            ids = np.empty((0, 2), np.uint64) if public is None else public[1]
            self._mixing = checked_mixing(plan.cells, mixing, len(ids))
            self._cells.intern(ids)
        # Shared by the shards of a window, for as long as one of them is at work.
        self._mixed: weakref.WeakValueDictionary[tuple[int, str], MixedNoise] = (
            weakref.WeakValueDictionary()
        )
        self._mixed_lock = threading.Lock()
        drawn = self.budget.selection or self.budget.units or self.budget.values[0]
        self._look_ahead = look_ahead or max(4, min(32, drawn.strategy_object.triggers // 12))
        self._input = admitted_schema(plan)
        self._nothing = empty(shard_release_schema(plan))
        self._unchanged = (_NO_SLOTS, _NO_SLOTS, _NO_SLOTS, np.zeros((0, 2), np.uint64))
        self._taken = TakenSteps(store.reshards)
        self._remembered: dict[int, RememberedKeys] = {}

    def step(
        self, window: int, shard: int, trigger: int, rows: pa.RecordBatch | None
    ) -> tuple[pa.RecordBatch, bool]:
        """Return the committed releases of a step, computed now or read back.

        Args:
            rows: admitted pairs with this window, shard and step == ``trigger``.

        Returns:
            (releases, whether this call computed them).
        """
        with self.store.at_work("release", shard):
            return self._step_again(window, shard, trigger, rows)

    def _step_again(
        self,
        window: int,
        shard: int,
        trigger: int,
        rows: pa.RecordBatch | None,
    ) -> tuple[pa.RecordBatch, bool]:
        """Do ``step``, repeated as often as another worker is faster."""
        # Whoever is overtaken, another worker has made progress: at most a few times a step.
        for _ in range(STEP_ATTEMPTS):
            with contextlib.suppress(OvertakenError):
                return self._step_once(window, shard, trigger, rows)
        raise RunError("store", "another worker is always faster", "let it run on")

    def _step_once(
        self,
        window: int,
        shard: int,
        trigger: int,
        rows: pa.RecordBatch | None,
    ) -> tuple[pa.RecordBatch, bool]:
        """Do ``step``; raise ``OvertakenError`` if another worker committed it meanwhile."""
        states = self.store.key_shard(window, shard)
        if trigger <= states.committed:
            committed = self.store.committed_releases(window, shard, trigger)
            if committed is None:
                raise damaged()  # a run skips the windows that dropped theirs
            if trigger == self.plan.timeline.triggers:
                self.store.forget(window, shard)
            return committed, False
        if trigger > states.committed + 1:
            # Another worker has taken the steps between: look again.
            self.store.forget(window, shard)
            raise OvertakenError
        try:
            result = self._compute(states, window, shard, trigger, rows)
            return self.store.commit_step(window, shard, trigger, states, result), True
        except BaseException:
            # Half-changed states must not count these rows again when the step is repeated.
            self.store.forget(window, shard)
            self._remembered.pop(shard, None)
            raise

    def steps(
        self, shard: int, group: Sequence[tuple[int, int, pa.RecordBatch]]
    ) -> list[tuple[pa.RecordBatch, bool]]:
        """Do ``step`` for each (window, trigger, rows) in order, committed together."""
        with self.store.at_work("release", shard):
            try:
                with self.store.grouped():
                    return self._take(shard, group)
            except OvertakenError:
                # Each by itself: what the other worker committed is read back.
                self._remembered.pop(shard, None)
                return [self._step_again(window, shard, *rest) for window, *rest in group]
            except BaseException:
                # What was selected in the group, and read before it was committed, is not.
                self._remembered.pop(shard, None)
                raise

    def _take(
        self, shard: int, group: Sequence[tuple[int, int, pa.RecordBatch]]
    ) -> list[tuple[pa.RecordBatch, bool]]:
        """Do steps that share one commit; rows of quiet steps are added at the next step.

        A quiet step (`selection.is_quiet`) only adds its rows to the states, and nobody reads the
        states before the group is committed.  A step that was committed before is read back, so
        its rows never wait.  They do not either where the group could be committed in part, without
        the step that they wait for, or where some keys have taken the one step and not the other.
        """
        last = {window: number for number, (window, *_) in enumerate(group)}
        waiting: dict[int, list[pa.RecordBatch]] = {}
        out = []
        for number, (window, trigger, own) in enumerate(group):
            parts, rows = [*waiting.pop(window, ()), own], None
            may_wait = self.store.groups_whole and not self._taken.may_differ(window)
            waits = may_wait and number < last[window] and is_quiet(self.plan, trigger)
            if waits and trigger == self.store.key_shard(window, shard).committed + 1:
                waiting[window] = parts
            else:
                rows = own if len(parts) == 1 else concat(parts, self._input)
            out.append(self._step_once(window, shard, trigger, rows))
        return out

    def _compute(
        self,
        states: KeyShard,
        window: int,
        shard: int,
        trigger: int,
        rows: pa.RecordBatch | None,
    ) -> StepResult:
        rows = rows if rows is not None else empty(self._input)
        time = self.plan.timeline.base(window) + trigger
        if not rows.num_rows and is_quiet(self.plan, trigger):
            return StepResult(*self._unchanged, self._nothing, _NO_SLOTS, False, trigger_time=time)
        ids = ids_of(rows.column("_id"))
        public, public_ids = self._entering_keys(window, shard, trigger)
        named = np.concatenate([ids, public_ids]) if len(public_ids) else ids
        self.store.load_keys(window, shard, trigger, states, named)
        entered = _NO_SLOTS if public is None else self._enter_keys(states, public, public_ids)
        before = states.due_at(trigger)
        before, open_rows = self._taken.remaining(states, window, trigger, before, ids)
        if open_rows is not None:
            rows = rows.filter(pa.array(open_rows))
        batch = aggregate(self.plan, states, rows, self.budget.weights)
        slots = distinct(np.concatenate([batch.touched, before]), states.size)
        states.due[before] = NEVER
        closes = trigger == self.plan.timeline.triggers
        chosen, selected = self._chosen(states, window, slots, trigger)
        if len(chosen):
            paths = self._paths(states, window)
            remembered = ~np.isin(chosen, selected)
            published = publish(self.plan, self.budget, states, paths, chosen, trigger, remembered)
            releases = self._rows(states, chosen, published)
        else:
            releases = self._nothing
        changed = distinct(np.concatenate([batch.touched, selected, entered]), states.size)
        noted = None
        if self.plan.design.remembers and len(selected):
            noted = selected[self._remembered_of(shard).unknown(states.table.ids[selected])]
        pairs = batch.pair_slots, batch.pair_units
        return StepResult(changed, slots, *pairs, releases, chosen, closes, noted, time)

    def _chosen(
        self, states: KeyShard, window: int, slots: Int64, trigger: int
    ) -> tuple[Int64, Int64]:
        """(slots to publish, slots newly selected); a selection lasts for the window."""
        newly = slots[:0]
        if self.plan.design.selects:
            tested = candidates(self.plan, states, slots)
            if self.plan.design.selects_at(trigger):
                thresholds = self._thresholds(states, window)
                passed = select(self.plan, thresholds, states, tested, trigger)
                newly = tested[passed]
                states.selected[newly] = 1
                predict(self.plan, thresholds, states, tested[~passed], trigger)
            else:
                wait_for_test(self.plan, states, tested, trigger)
        # Every selected key is due at every publication, data or not: publication follows the
        # public calendar alone.
        selected = slots[states.selected[slots] > 0]
        states.due[selected] = next_publication(self.plan, trigger)
        return (selected if publishes(self.plan, trigger) else newly), newly

    def _entering_keys(self, window: int, shard: int, trigger: int) -> tuple[pa.Table | None, Ids]:
        """Public and remembered keys that enter a shard at this step and their ids: all at the
        first."""
        none = np.empty((0, 2), np.uint64)
        if trigger > 1:
            return None, none
        if self._public is not None:
            table, ids = self._public
            mine = shard_of(ids, self.store.identity.shards) == shard
        elif self.plan.design.remembers and window:
            remembered = self._remembered_of(shard).at(window)
            slots = remembered.of(window)
            if remembered.columns is None or not len(slots):
                return None, none
            table = remembered.columns.take(pa.array(slots))
            ids = ids_of(table.column("_id").combine_chunks())
            mine = np.ones(len(ids), np.bool_)
        else:
            return None, none
        mine = np.flatnonzero(mine & ~self._taken.before_reshard(window, trigger, ids))
        return table.take(pa.array(mine)), ids[mine]

    def _remembered_of(self, shard: int) -> RememberedKeys:
        if shard not in self._remembered:
            self._remembered[shard] = RememberedKeys(self.plan, self.store, shard)
        return self._remembered[shard]

    @staticmethod
    def _enter_keys(states: KeyShard, keys: pa.Table, ids: Ids) -> Int64:
        """They are released from the window's first trigger on, data or not."""
        if len(ids) == 0:
            return _NO_SLOTS
        slots = states.intern(ids, keys.combine_chunks().to_batches()[0])
        slots = slots[~states.done[slots]]
        states.selected[slots] = 1
        states.due[slots] = 1
        return slots

    def _thresholds(self, states: KeyShard, window: int) -> NoisyThresholds:
        if "thresholds" not in states.scratch:
            budget = self.budget
            if budget.selection is None or budget.statistic is None:
                raise InvariantError("a plan with selection has its budget")
            # What is tested may be published: same name, same noise.
            role = "value" if budget.selection in budget.values else "selection"
            selection = self._stream(window, role, budget.selection, tested=True)
            terms = [(selection, budget.statistic.weighted)]
            plain = plain_count(self.plan, budget.units, budget.values)
            if plain is not None:
                # The stream that is published: same name, same noise.
                role = "units" if plain is budget.units else "value"
                terms.append((self._stream(window, role, plain), budget.statistic.counted))
            states.scratch["thresholds"] = NoisyThresholds(
                terms, self.plan, budget, self._look_ahead
            )
        thresholds: NoisyThresholds = states.scratch["thresholds"]
        return thresholds

    def _paths(self, states: KeyShard, window: int) -> PublishedPaths | MixedPaths:
        if "paths" not in states.scratch and self._mixing is not None:
            streams = [
                self._mixed_noise(window, noise, self._mixing) for noise in self.budget.values
            ]
            states.scratch["paths"] = MixedPaths(streams, self._cells, self._mixing.row_norms)
        if "paths" not in states.scratch:
            units = None
            if self.budget.units is not None:
                # The count of units may be the selection stream continued.
                role = "units" if self.plan.design.units_apart else "selection"
                units = self._stream(window, role, self.budget.units)
            values = [self._stream(window, "value", noise) for noise in self.budget.values]
            untested = None
            tested = self.budget.selection
            if tested is not None and tested.most and self.plan.design.remembers:
                plain = msgspec.structs.replace(tested, most=0, sooner=0)
                untested = self._stream(window, "known", plain)
            states.scratch["paths"] = PublishedPaths(values, units, untested)
        paths: PublishedPaths | MixedPaths = states.scratch["paths"]
        return paths

    def _mixed_noise(self, window: int, noise: StreamNoise, mixing: Mixing) -> MixedNoise:
        with self._mixed_lock:
            mixed_noise = self._mixed.get((window, noise.name))
            if mixed_noise is None:
                mixed_noise = MixedNoise(self._stream(window, "value", noise), mixing)
                self._mixed[window, noise.name] = mixed_noise
            return mixed_noise

    def _stream(
        self, window: int, role: str, noise: StreamNoise, tested: bool = False
    ) -> NoiseStream:
        bounds, sampler = self.plan.timeline.window_bounds(window), sampler_of(noise, tested)
        return NoiseStream(self.keys, self._run_name, bounds, role, noise, sampler)

    def _rows(self, states: KeyShard, slots: Int64, published: Published) -> pa.RecordBatch:
        keys = states.key_columns(slots).combine_chunks().to_batches()[0]
        more = {"_id": id_array(states.table.ids[slots])}
        for name, values in published.values.items():
            more[name], more[f"{name}_sd"] = pa.array(values), pa.array(published.sds[name])
        fields = [*keys.schema, *(pa.field(name, column.type) for name, column in more.items())]
        arrays = [*keys.columns, *more.values()]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def run_name(identity: RunIdentity) -> tuple[bytes, ...]:
    """Return the part of every node's name that distinguishes runs, epochs and plans."""
    return (
        bytes.fromhex(identity.run_id),
        identity.epoch.to_bytes(8, "little"),
        bytes.fromhex(identity.plan_hash),
    )
