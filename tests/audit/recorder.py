"""Runs the whole flow and keeps what each stage did, by the names the test gave the records."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding, flow, step
from dpstream.dp_transforms.batches import concat, ids_of, record_schema
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory, canonical_public_keys
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.dp_transforms.selection import wait_for_test
from dpstream.state import open as stores
from dpstream.state.idtable import shard_of
from dpstream.state.sqlite.store import SqliteStore
from tests.audit.neighbours import PUBLIC, Record, deliveries
from tests.bounded import bound
from tests.streams import KEYS, RUN_ID

#: (window, page, trigger); (window, role, stream, page id, round).
Step = tuple[int, str, int]
Path_ = tuple[int, str, str, bytes]


@dataclasses.dataclass(frozen=True)
class Row:
    """An admitted (record, window) pair; ``rank`` as BOUND gave it (0 where it gives none).

    ``index`` is that of the selection weight it takes, -1 for none; the rank where none is skipped.
    """

    serial: int
    window: int
    step_index: int
    rank: int
    index: int
    order: tuple[int, int, int]  # (stamp, partition, offset)
    unit: bytes
    page: str
    values: tuple[int, ...]


@dataclasses.dataclass
class Trace:
    """What a run did.

    Attributes:
        rows: admitted pairs as BOUND emitted them.
        counts: (units, sums) of a key at a step, before selection; sums are the value prefixes
            and, with weights, the weighted count of units.
        selected_after: whether a key is selected after a step.
        tau: thresholds in use; sigmas: sd of a node by (role, stream); names: tweak of each
            noise path; draws: noise of its nodes.
        clashes: nodes that were drawn twice with different noise.
        released: (window, trigger) -> page -> published columns.
    """

    plan: Plan
    rows: list[Row] = dataclasses.field(default_factory=list)
    counts: dict[Step, tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    selected_after: dict[Step, bool] = dataclasses.field(default_factory=dict)
    tau: list[Any] = dataclasses.field(default_factory=list)
    sigmas: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    names: dict[Path_, bytes] = dataclasses.field(default_factory=dict)
    draws: dict[tuple[bytes, int], float] = dataclasses.field(default_factory=dict)
    clashes: int = 0
    released: dict[tuple[int, int], dict[str, dict[str, float]]] = dataclasses.field(
        default_factory=dict
    )

    def admitted(self) -> dict[int, list[tuple[int, int, int]]]:
        """Serial -> (window, step index, rank) of each admitted pair."""
        out: dict[int, list[tuple[int, int, int]]] = {}
        for row in self.rows:
            out.setdefault(row.serial, []).append((row.window, row.step_index, row.rank))
        return {serial: sorted(pairs) for serial, pairs in out.items()}


def begin(plan: Plan, folder: Path, shards: int, keys: SecretSource = KEYS) -> Run:
    """A run on a new store below ``folder``."""
    number = len(list(folder.glob("s*.db")))
    public = None
    if not plan.design.selects:
        public = canonical_public_keys(plan, pa.table({"page": list(PUBLIC)}))
    url = f"sqlite:{folder / f's{number}.db'}"
    return begin_run(plan, keys, url, shards, run_id=RUN_ID, public=public)[0]


def record(
    plan: Plan,
    records: tuple[Record, ...],
    folder: Path,
    shards: int,
    seed: int | None = None,
    follow: Mapping[tuple[int, str], list[int]] | None = None,
) -> Trace:
    """Run the whole flow on a delivery of the records.

    Args:
        follow: (window, page) -> triggers of its selections, which tests are made to say.
    """
    batches, serials = deliveries(records, seed)
    trace = Trace(plan)
    run = begin(plan, folder, shards)
    try:
        with (
            watched(trace, serials),
            contextlib.nullcontext() if follow is None else forced(follow),
        ):
            releases, _ = flow.run_in_memory(run, batches)
    finally:
        stores.close_all()
    for batch in releases:
        metadata = batch.schema.metadata
        name = (int(metadata[b"dpstream.window"]), int(metadata[b"dpstream.trigger"]))
        trace.released[name] = {row["page"]: row for row in batch.to_pylist()}
    return trace


@contextlib.contextmanager
def forced(selections: Mapping[tuple[int, str], list[int]]) -> Iterator[None]:
    """Tests say what another run's said."""
    window_of: dict[int, int] = {}
    sticky = step.Stepper._chosen

    def remember(stepper: Any, states: Any, window: int, slots: Any, trigger: int) -> Any:
        window_of[id(states)] = window
        return sticky(stepper, states, window, slots, trigger)

    def select(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> Any:
        pages = states.key_columns(slots).column("page").to_pylist()
        window = window_of[id(states)]
        chosen = [trigger in selections.get((window, page), ()) for page in pages]
        return np.array(chosen, np.bool_)

    def every_test(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> None:
        if trigger < plan.timeline.triggers:
            wait_for_test(plan, states, slots, trigger + 1)

    with (
        mock.patch.object(step.Stepper, "_chosen", remember),
        mock.patch.object(step, "select", select),
        mock.patch.object(step, "predict", every_test),
    ):
        yield


def record_bound_by_trigger_times(
    plan: Plan, records: tuple[Record, ...], folder: Path, shards: int
) -> Trace:
    """BOUND alone, one call for each trigger time with the records of that trigger time only."""
    batches, serials = deliveries(records)
    trace = Trace(plan)
    run = begin(plan, folder, shards)
    timeline = plan.timeline
    try:
        canonicalise = CanonicaliserFactory(plan, run.keys, run.public)()
        good = concat([canonicalise(batch)[0] for batch in batches], record_schema(plan))
        trigger_time = np.clip(
            timeline.trigger_time_of(good.column("stamp").to_numpy()), 1, timeline.last_trigger_time
        )
        shard = shard_of(ids_of(good.column("unit")), shards)
        store = run.open()
        with watched(trace, serials):
            for upto in range(1, timeline.last_trigger_time + 1):
                for number in range(shards):
                    now = good.filter(pa.array((trigger_time == upto) & (shard == number)))
                    bound(plan, store, number, now, upto)
    finally:
        stores.close_all()
    return trace


@contextlib.contextmanager
def watched(trace: Trace, serials: dict[tuple[int, int], int]) -> Iterator[None]:
    """Keep what the stages do while the block runs; whatever code is in force is watched."""
    with contextlib.ExitStack() as stack:

        def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

        wrap(bounding, "expand", lambda real: _keep_rows(trace, serials, real))
        stack.enter_context(mock.patch.object(flow, "COMMIT_STEPS", 1))  # each step is looked at
        wrap(SqliteStore, "commit_step", lambda real: _keep_steps(trace, real))
        wrap(step.Stepper, "_stream", lambda real: _labelled(trace, real))
        wrap(NoiseStream, "names", lambda real: _keep_names(trace, real))
        wrap(RoundedGaussian, "draw", lambda real: _keep_draws(trace, real))
        wrap(ContinuousGaussian, "draw", lambda real: _keep_draws(trace, real))
        yield


def _keep_rows(trace: Trace, serials: dict[tuple[int, int], int], real: Any) -> Any:
    def expand(plan: Plan, records: pa.RecordBatch, rows: Any, batch: Any) -> Any:
        out = real(plan, records, rows, batch)
        where = np.repeat(rows, batch.pairs[rows])
        columns_of = ("stamp", "partition", "offset")
        orders = zip(
            *(records.column(name).to_numpy()[where].tolist() for name in columns_of), strict=True
        )
        columns = [c for c in out.schema.names if c.startswith("v")]
        for order, row in zip(orders, out.to_pylist(), strict=True):
            rank = row.get("rank", 0)
            place = (row["window"], row["trigger"], rank, row.get("_index", rank), order)
            values = tuple(row[c] for c in columns)
            trace.rows.append(Row(serials[order[1:]], *place, row["unit"], row["page"], values))
        return out

    return expand


def _keep_steps(trace: Trace, real: Any) -> Any:
    def commit_step(
        store: Any, window: int, shard: int, trigger: int, states: Any, result: Any
    ) -> Any:
        pages = states.key_columns(np.arange(states.size)).column("page").to_pylist()
        for slot, page in enumerate(pages):
            counts = int(states.units[slot]), tuple(states.values[slot].tolist())
            trace.counts[window, page, trigger] = counts
            trace.selected_after[window, page, trigger] = bool(states.selected[slot])
        if "thresholds" in states.scratch and not trace.tau:
            trace.tau = states.scratch["thresholds"]._tau.tolist()
        return real(store, window, shard, trigger, states, result)

    return commit_step


def _labelled(trace: Trace, real: Any) -> Any:
    def stream(stepper: Any, window: int, role: str, noise: Any, tested: bool = False) -> Any:
        out = real(stepper, window, role, noise, tested)
        out.label = (window, role, noise.name)
        trace.sigmas[role, noise.name] = noise.sigma
        return out

    return stream


def _keep_names(trace: Trace, real: Any) -> Any:
    def names(stream: Any, key_ids: Any) -> Any:
        tweaks = real(stream, key_ids)
        for key, tweak in zip(key_ids, tweaks, strict=True):
            path = (*stream.label, key.tobytes())
            if trace.names.setdefault(path, tweak.tobytes()) != tweak.tobytes():
                trace.clashes += 1
        return tweaks

    return names


def _keep_draws(trace: Trace, real: Any) -> Any:
    def draw(sampler: Any, prf: Any, tweaks: Any, first: Any, last: Any) -> Any:
        noise, starts = real(sampler, prf, tweaks, first, last)
        for row in range(len(tweaks)):
            tweak = tweaks[row].tobytes()
            for node in range(int(first[row]), int(last[row])):
                value = noise[starts[row] + node - first[row]].item()
                if trace.draws.setdefault((tweak, node), value) != value:
                    trace.clashes += 1
        return noise, starts

    return draw
