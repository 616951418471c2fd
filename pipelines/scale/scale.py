"""The needs of a stated load: workers, shards, database and cost, from measured per-core rates.

Pure: a function of the job, the load and tables of figures (`pipelines.scale.rates`).  All of
it is an upper estimate where the truth depends on the data: as many distinct keys and units a
trigger as the load allows, spread evenly.

How many key shards a job needs on Spanner follows from this: a step is one commit as long as it
fits into one.
"""

import math
from typing import Any

import msgspec
import numpy as np

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import COMMIT_MUTATIONS, DECODE_BITS, MAX_SHARDS, MICROS_PER_SECOND
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.scale.rates import PRICES, RATES, SPANNER, WORKER_BUSY, Figure

#: Mutations of a changed key: its row's six columns.
_ROW = 6
#: Mutations of a list of due keys, one for each trigger that some key is due at.
_LIST = 6
#: Rows that a step writes besides: releases, progress.
_REST = 20


def keys_of_a_commit(job: Job) -> int:
    """Return how many changed keys one commit of a step holds at least (rare unit set rows left
    out).
    """
    lists = min(job.plan.timeline.triggers, COMMIT_MUTATIONS // (10 * _LIST))
    return (COMMIT_MUTATIONS - _REST - _LIST * lists) // _ROW


def shards_for(job: Job, changed_keys: int) -> int:
    """Return the number of shards that keep a trigger with ``keys`` changed keys to one commit a
    step.

    Keys fall on shards by a keyed hash: six standard deviations of room.
    """
    most, shards = keys_of_a_commit(job), 1
    while shards < MAX_SHARDS:
        mean = changed_keys / shards
        if mean + 6 * math.sqrt(mean) <= most:
            break
        shards = max(shards + 1, min(MAX_SHARDS, math.ceil(shards * 1.02)))
    return shards


def shard_figures(job: Job, changed_keys: int | None) -> dict[str, int]:
    """Return the figures of ``dpstream plan`` for a job on Spanner; none for one on a file."""
    if job.state.path is not None:
        return {}
    figures = {"shards": job.state.shards, "keys_of_a_commit": keys_of_a_commit(job)}
    if changed_keys is not None:
        figures |= {"changed_keys": changed_keys, "shards_needed": shards_for(job, changed_keys)}
    return figures


DAY_SECONDS, HOURS_A_MONTH, GIB = 86_400, 730, 1 << 30
#: Rows a step should have at least on one machine: below it start-up of a step is what costs.
ROWS_A_STEP = 1_500
#: Bytes of a Spanner row beside its content, of a key's state and of an id in it.
ROW_BYTES, STATE_BYTES, ID_BYTES, RECORD_BYTES = 60, 80, 16, 24


class Load(msgspec.Struct, frozen=True):
    """A stated load; all of it public by being stated.

    Attributes:
        keys: distinct keys of a window.
        records_per_day: records of an average day.
        units: distinct units of a window; ``None``: as many as records.
        peak: records of the busiest trigger over those of an average one.
        published_keys: keys published at a trigger; ``None``: the most that can be selected.
        within_seconds: how soon after a trigger time its releases must be out; ``None``: one
            interval.
        worker_vcpus, worker_gib: size of a worker.
    """

    keys: int
    records_per_day: int
    units: int | None = None
    peak: float = 2.0
    published_keys: int | None = None
    within_seconds: float | None = None
    worker_vcpus: int = 2
    worker_gib: float = 7.5

    def check(self) -> "Load":
        """Refuse what is no load; returns itself."""
        least = {"keys": 1, "records-per-day": 1, "units": 1, "peak": 1, "published-keys": 0}
        for name, low in least.items():
            value = getattr(self, name.replace("-", "_"))
            if value is not None and not low <= value < math.inf:
                raise UsageError(f"--{name}", f"must be at least {low}", "correct it")
        if self.within_seconds is not None and not 0 < self.within_seconds < math.inf:
            raise UsageError("--within", "must be a positive duration", "write e.g. '60s'")
        return self


class Estimate(msgspec.Struct, frozen=True):
    """The figures of a load and its needs; counts are of an average trigger unless named.

    Attributes:
        interval: seconds between triggers; within: seconds to finish a trigger's steps.
        records, keys_changed, units_changed: of an average trigger, in all open windows.
        keys_published: rows of its releases at most; those without new data are read, and
            written with the release alone.
        shards: for ``shards``; rows_a_step: records of a (shard, trigger).
        key_writes, unit_writes: rows a second over the whole interval.
        peak_records, peak_writes, peak_reads: a second, in the time allowed, at the busiest
            trigger.
        vcpus: busy cores at the peak by part; workers: to have them.
        store: ``sqlite`` or ``spanner``; nodes, state_gib: of the database.
        cost: dollars a month by part.
        warnings: what does not fit.
    """

    interval: float
    within: float
    records: int
    keys_changed: int
    units_changed: int
    keys_published: int
    shards: int
    rows_a_step: int
    key_writes: int
    unit_writes: int
    peak_records: int
    peak_writes: int
    peak_reads: int
    vcpus: dict[str, float]
    workers: int
    store: str
    nodes: int
    state_gib: float
    cost: dict[str, float]
    warnings: tuple[str, ...]


def distinct(values: float, draws: float) -> float:
    """Return the expected count of distinct values in uniform draws; no distribution gives more.

    Args:
        values: how many values there are to draw from.
    """
    return float(-values * np.expm1(-draws / values))


def most_selected(plan: Plan, records: float, keys: float) -> float:
    """Return how many keys the records of one window can lift above the lowest threshold.

    There are at most about records / threshold, or all of them with public keys.
    """
    budget = allocate(plan)
    if budget.tau is None or budget.statistic is None:
        return keys
    lowest = float(np.min(budget.tau)) / (1 << DECODE_BITS) / budget.statistic.alone
    return min(keys, records / max(1.0, lowest))


def estimate(
    job: Job,
    load: Load,
    rates: dict[str, Figure] | None = None,
    prices: dict[str, Figure] | None = None,
) -> Estimate:
    """Return the estimate of a job under a load.

    Raises:
        UsageError: not a load.
    """
    load.check()
    rates, prices = rates or RATES, prices or PRICES
    timeline = job.plan.timeline
    interval = timeline.trigger_every / MICROS_PER_SECOND
    within = min(interval, load.within_seconds or interval)
    windows = timeline.windows_per_record
    of_window = load.records_per_day * (timeline.window / MICROS_PER_SECOND / DAY_SECONDS)
    records = load.records_per_day * interval / DAY_SECONDS
    pairs = records * windows
    keys = windows * distinct(load.keys, records)
    units = records if load.units is None else distinct(load.units, records)
    published = load.published_keys
    if published is None:
        published = math.floor(windows * most_selected(job.plan, of_window, load.keys))
    spanner = job.state.path is None
    busiest = windows * distinct(load.keys, load.peak * records)
    shards = _shards(job, busiest, pairs, spanner)
    peak_records, peak_pairs = (load.peak * n / within for n in (records, pairs))
    peak_writes = load.peak * (units + keys) / within
    peak_reads = peak_writes + max(0.0, published - keys) / within
    vcpus = {"pipeline": (peak_records + peak_pairs) / 2 / rates["pipeline_records"].value}
    if spanner:
        # Of several workers and a database: rows a second that are moved, and that are read and
        # written (measured with two rows read and two written a record).
        vcpus["shuffle"] = (peak_records + peak_pairs) / rates["shuffle_rows"].value
        rows = peak_writes + peak_reads
        vcpus["database_client"] = rows / 4 / rates["spanner_records"].value
    busy = sum(vcpus.values()) / WORKER_BUSY.value
    workers = max(1, math.ceil(busy / load.worker_vcpus)) if spanner else 1
    gib = _state_gib(job, load, of_window, rates, spanner)
    nodes = _nodes(peak_writes, peak_reads, gib) if spanner else 0
    return Estimate(
        interval=interval,
        within=within,
        records=round(pairs),
        keys_changed=round(keys),
        units_changed=round(units),
        keys_published=published,
        shards=shards,
        rows_a_step=round(pairs / shards),
        key_writes=round(keys / interval),
        unit_writes=round(units / interval),
        peak_records=round(peak_records),
        peak_writes=round(peak_writes),
        peak_reads=round(peak_reads),
        vcpus={name: round(value, 2) for name, value in vcpus.items()},
        workers=workers,
        store="spanner" if spanner else "sqlite",
        nodes=nodes,
        state_gib=round(gib, 2),
        cost=_cost(load, workers, nodes, gib, prices) if spanner else {},
        warnings=tuple(_warnings(job, load, busy, of_window * windows, rates, spanner)),
    )


def _shards(job: Job, busiest: float, pairs: float, spanner: bool) -> int:
    """Spanner: a power of two that keeps the busiest step in one commit, so that it can be
    doubled; one machine: few, with steps that are worth their start."""
    if not spanner:
        return max(1, min(4, int(pairs // ROWS_A_STEP)))
    need = shards_for(job, math.ceil(busiest))
    return min(MAX_SHARDS, 1 << (need - 1).bit_length())


def _state_gib(
    job: Job, load: Load, of_window: float, rates: dict[str, Figure], spanner: bool
) -> float:
    """State of the open windows (one that closes is dropped) and of all units."""
    windows = job.plan.timeline.windows_per_record
    if not spanner:
        return of_window * windows * rates["sqlite_bytes"].value / GIB
    streams = 8 * len(job.plan.design.streams)
    text = 16 * len(job.plan.key)
    keys = windows * distinct(load.keys, of_window) * (ROW_BYTES + STATE_BYTES + streams + text)
    units = min(of_window, load.units or of_window) * (ROW_BYTES + ID_BYTES)
    return (keys + units + windows * of_window * (ID_BYTES + RECORD_BYTES)) / GIB


def _nodes(writes: float, reads: float, gib: float) -> int:
    """Spanner nodes for rows a second (a node's peaks are of reads or of writes alone) and size."""
    busy = writes / SPANNER["node_writes"].value + reads / SPANNER["node_reads"].value
    for_size = math.ceil(gib / 1024 / SPANNER["node_tib"].value)
    return max(1, math.ceil(busy / SPANNER["node_busy"].value), for_size)


def _cost(
    load: Load, workers: int, nodes: int, gib: float, prices: dict[str, Figure]
) -> dict[str, float]:
    """Dollars a month of workers that are always there, of nodes and of storage."""
    hours = workers * HOURS_A_MONTH
    cost = {
        "worker_vcpus": hours * load.worker_vcpus * prices["vcpu_hour"].value,
        "worker_memory": hours * load.worker_gib * prices["gib_hour"].value,
        "spanner_nodes": nodes * HOURS_A_MONTH * prices["spanner_node_hour"].value,
        "spanner_storage": gib * prices["spanner_gib_month"].value,
    }
    cost["total"] = sum(cost.values())
    return {name: round(value, 2) for name, value in cost.items()}


def _warnings(
    job: Job, load: Load, busy: float, open_pairs: float, rates: dict[str, Figure], spanner: bool
) -> list[str]:
    out = []
    if not spanner and busy > 1:
        out.append("one process is not enough: use a Spanner store and a distributed runner")
    memory = open_pairs * rates["memory_bytes"].value / GIB
    if not spanner and memory > load.worker_gib:
        out.append(
            f"the state of open windows takes about {memory:,.0f} GiB of memory: use a Spanner "
            "store, or a larger machine (--worker-gib)"
        )
    timeline = job.plan.timeline
    if spanner and shards_for(job, math.ceil(_busiest(load, timeline.trigger_every))) >= MAX_SHARDS:
        out.append(f"{MAX_SHARDS:,} shards are the most: the busiest steps take several commits")
    return out


def _busiest(load: Load, trigger_every: int) -> float:
    records = load.records_per_day * trigger_every / MICROS_PER_SECOND / DAY_SECONDS
    return distinct(load.keys, load.peak * records)


def as_dict(
    estimate: Estimate, load: Load, rates: dict[str, Figure], prices: dict[str, Figure]
) -> dict[str, Any]:
    """Return the estimate with everything it rests on, for machines."""
    used = {**rates, **SPANNER, "worker_busy": WORKER_BUSY, **prices}
    return {
        "load": msgspec.to_builtins(load),
        "estimate": msgspec.to_builtins(estimate),
        "figures": {name: figure._asdict() for name, figure in used.items()},
    }
