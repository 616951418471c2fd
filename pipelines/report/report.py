"""``dpstream report``: one page about a run, from public data: plan, budget, releases.

The secret is not opened; of the dead letters only which files of the input are damaged is read, of
the store's file only what was committed when the run began, and of the account what anybody may
know: its limit and what is spent.  So the page can be published with the releases.  ``truth`` is
the exception: it reads raw records, marks the page as not private and makes its file readable for
its owner only.

**Truth** is the releases held against raw records: exact, NOT private, for public data only.  The
records go through the job's own ingest (types, times, bounds), so "true" means: of all usable
records of a window up to the trigger it has come to, before a unit's contributions are bounded.  An
error therefore holds the noise and what bounding leaves out.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.aggregates import Exact, kind_of
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import admitted_schema, key_fields, numpy_view, value_columns
from dpstream.dp_transforms.decision import Batch, expand, open_windows
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.files.source import canonical_records, named_by, recorded
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.jobs.committed import abandoned_before, committed, stored_passes
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.page import mark_of, write_own
from dpstream.pipelines.report.data import (
    Findings,
    Inventory,
    collect,
    floats,
    inventory,
    newest,
    newest_of_each,
    value_schema,
)
from dpstream.pipelines.report.text import key_label, settings
from dpstream.state.durable import PRIVATE, PUBLIC
from dpstream.state.ledger.open import AccountPlace, read_history
from dpstream.state.passes import missing_names

#: Rows of partial sums held before they are summed up.
_HELD_ROWS = 2_000_000
#: True records of a key from which it is in the next group: 0, 1, 10, 100, ...
_DECADES = np.concatenate([[0], 10 ** np.arange(0, 13)])


class Decade(NamedTuple):
    """Keys of one size.

    Attributes:
        low, high: true records of a key in a window, from and to.
        keys: (window, key) pairs of this size; ``released``: those of them with a release.
        errors: published column -> median distance of the newest release from the truth.
    """

    low: int
    high: int
    keys: int
    released: int
    errors: dict[str, float | None]


def by_size(job: Job, pattern: Path, inventory: Inventory, findings: Findings) -> list[Decade]:
    """Return errors and share of released keys by the true size of a key.

    Raises:
        UsageError: the pattern matches no file, or a column is missing.
        RunError: a file cannot be read.
    """
    job, timeline = recorded(job, str(pattern.absolute()), "--truth"), job.plan.timeline
    # What no release covers yet counts nowhere; a stream without end has no last window.
    last = int(findings.windows.max(initial=0)) if timeline.end is None else timeline.windows - 1
    upto = np.zeros(last + 1, np.int64)
    upto[findings.windows] = findings.last_trigger
    totals = _totals(job, upto).sort_by("window")
    windows, parts = totals["window"].to_numpy(), []
    for window, group in inventory.by_window():
        begin, end = np.searchsorted(windows, (window, window + 1))
        none = value_schema(job.plan).empty_table()  # where the window has no release
        rows = pa.concat_tables([none, *newest(job.plan, group)])
        mine = totals.slice(begin, end - begin).drop_columns(["window"])
        parts.append(_distances(job.plan, mine, rows))
    return decades_of(job.plan, pa.concat_tables(parts)) if parts else []


def _totals(job: Job, upto: Int64) -> pa.Table:
    """``window``, key, ``_n`` records, sums ``_v*`` and ``_units`` of every (window, key).

    Names of the job's own columns never begin with "_".
    """
    plan = job.plan
    names = ["window", *(f.name for f in key_fields(plan))]
    groups = names + ["unit"] * (plan.design.units_column is not None)
    held, rows, limit = [_no_totals(plan, groups)], 0, _HELD_ROWS
    for every in _pairs(job):
        pairs = every.filter(pc.less(every["window"], len(upto)))
        open_ = pc.less_equal(pairs["trigger"], pa.array(upto[numpy_view(pairs["window"])]))
        ones = pa.array(np.ones(pairs.num_rows, np.int64))
        part = pa.Table.from_batches([pairs]).append_column("_n", ones).filter(open_)
        part = part.rename_columns({name: f"_{name}" for name in value_columns(plan)})
        held.append(summed(part, groups, held[0].schema))
        rows += held[-1].num_rows
        if rows > limit:
            held = [summed(pa.concat_tables(held), groups, held[0].schema)]
            rows = held[0].num_rows
            limit = max(_HELD_ROWS, 2 * rows)
    totals = summed(pa.concat_tables(held), groups, held[0].schema)
    if plan.design.units_column is None:
        return totals
    units = totals.append_column("_units", pa.array(np.ones(totals.num_rows, np.int64)))
    schema = pa.schema([f for f in units.schema if f.name != "unit"])
    return summed(units.drop_columns(["unit"]), names, schema)


def _no_totals(plan: Plan, groups: list[str]) -> pa.Table:
    fields = [f for f in admitted_schema(plan) if f.name in groups]
    names = ["_n", *(f"_{name}" for name in value_columns(plan))]
    return pa.schema([*fields, *(pa.field(name, pa.int64()) for name in names)]).empty_table()


def summed(table: pa.Table, groups: list[str], schema: pa.Schema) -> pa.Table:
    """Return the sums of the other columns by group."""
    sums = [name for name in schema.names if name not in groups]
    grouped = table.group_by(groups).aggregate([(name, "sum") for name in sums])
    return grouped.rename_columns([*groups, *sums]).select(schema.names).cast(schema)


def _pairs(job: Job) -> Iterator[pa.RecordBatch]:
    """(record, window) pairs of all usable records, late ones left out; none is bounded."""
    plan, ring = job.plan, KeyRing(bytes(32))  # ids only tell units apart here: any key will do
    ids = functools.partial(key_ids, plan, ring.key)
    with named_by("--truth"):
        for records in canonical_records(job, plan, ring):
            everything = Batch(plan, records, ids)
            entry_trigger_time = np.maximum(everything.event_trigger_time, everything.trigger_time)
            _, everything.pairs = open_windows(
                plan.timeline, everything.event_trigger_time, entry_trigger_time
            )
            yield expand(plan, records, np.flatnonzero(everything.pairs > 0), everything)


def _distances(plan: Plan, totals: pa.Table, newest: pa.Table) -> pa.Table:
    """``_n``, ``_released`` and each column's distance from the truth, one row a key."""
    names = [f.name for f in key_fields(plan)]
    marked = newest.append_column("_released", pa.array(np.ones(newest.num_rows, np.bool_)))
    both = totals.join(marked, keys=names, join_type="full outer")
    columns: dict[str, Any] = {
        "_n": pc.fill_null(both["_n"], 0),
        "_released": pc.fill_null(both["_released"], False),
    }
    for aggregate in plan.aggregates:
        distance = np.abs(floats(both[aggregate.name]) - _true(plan, aggregate, both))
        columns[aggregate.name] = pa.array(distance)
    return pa.table(columns)


def _true(plan: Plan, aggregate: Aggregate, table: pa.Table) -> Float64:
    """The column's exact values; a mean over nothing is NaN."""
    records = floats(pc.fill_null(table["_n"], 0))
    units = total = stream = None
    if "_units" in table.column_names:
        units = floats(pc.fill_null(table["_units"], 0))
    derived = {made.name: made for made in plan.design.derived}
    own = derived[aggregate.name].mean if aggregate.name in derived else aggregate.name
    for index, made in enumerate(plan.design.streams):
        if made.column is not None and made.name == own:
            stream = derived[aggregate.name].stream if aggregate.name in derived else made
            total = floats(pc.fill_null(table[f"_v{index}"], 0)) + made.mid * records
    return kind_of(aggregate).exact(stream, Exact(records, units, total))


def decades_of(plan: Plan, table: pa.Table) -> list[Decade]:
    """Return, by the number of digits of a key's size, keys, released keys and median errors."""
    size, released = floats(table["_n"]), np.asarray(table["_released"])
    group = np.searchsorted(_DECADES, size, side="right") - 1
    out = []
    for at in np.unique(group):
        mine = group == at
        errors = {
            a.name: finite_median(floats(table[a.name])[mine & released]) for a in plan.aggregates
        }
        low = int(_DECADES[at])
        high = 10 * low - 1 if low else 0
        out.append(Decade(low, high, int(mine.sum()), int((mine & released).sum()), errors))
    return out


def finite_median(distances: Float64) -> float | None:
    """Return the median of the finite distances; ``None`` without one."""
    finite = distances[np.isfinite(distances)]
    return float(np.median(finite)) if len(finite) else None


#: What a page begins with; a file that begins otherwise is never replaced.
MARK = mark_of("report")
TRUTH_LABEL = "computed from the raw data: NOT private, do not publish"
STAMPS = ("UNSOUND", "INSECURE")


class Report(NamedTuple):
    """Everything the page shows.

    Attributes:
        job, plan, budget: the job, what its settings mean in its run and what that spends: as
            committed when it began, or computed again where the store's file is not here.
        figures: `accounting.guarantee.describe` of them.
        inventory, findings: the releases and what was read of them.
        truth: errors by true size of a key, from raw records, or ``None``.
        damaged: files of the input that were not read to their end, with the reason.
        incomplete: expected names of files that windows were released without, by window.
        abandoned: windows that `dpstream state restore --abandon` gave up before their end.
        account: what was spent on the data set, as `dpstream account show` has it: ``limit`` (of
            a unit, ``per`` period or for all time), share ``used`` of it, number of ``charges``;
            ``None``: there is no account, it cannot be read, or each record has its own budget.
    """

    job: Job
    plan: Plan
    budget: Budget
    figures: dict[str, Any]
    inventory: Inventory
    findings: Findings
    truth: list[Decade] | None = None
    damaged: Mapping[str, str] = MappingProxyType({})
    incomplete: Mapping[int, tuple[str, ...]] = MappingProxyType({})
    abandoned: Sequence[int] = ()
    account: dict[str, Any] | None = None

    @property
    def expected(self) -> int | None:
        """Releases of the finished run; ``None``: it has no end."""
        timeline = self.job.plan.timeline
        return None if timeline.end is None else timeline.windows * timeline.triggers

    @property
    def run_ids(self) -> list[str]:
        """Run ids in the releases, without their stamps; more than one is more than one charge."""
        return [name.rpartition("-")[2] for name in self.inventory.run_ids]

    @property
    def stamps(self) -> list[str]:
        """``UNSOUND`` and ``INSECURE``, as the releases or the job say."""
        borne = {stamp for name in self.inventory.run_ids for stamp in name.split("-")[:-1]}
        borne |= {"INSECURE"} if self.job.insecure else set()
        borne |= set() if self.figures["guarantee"]["sound"] else {"UNSOUND"}
        return [stamp for stamp in STAMPS if stamp in borne]


def build(job: Job, truth: Path | None = None) -> Report:
    """Read the releases and compute the figures.

    Args:
        job: a checked job.
        truth: file or glob of raw records of the job's own schema; only for public data.

    Raises:
        UsageError: no folder of releases, releases of another plan, no such records.
    """
    releases = inventory(job)
    plan, budget = _in_force(job, releases)
    findings = collect(job.plan, releases)
    decades = None if truth is None else by_size(job, truth, releases, findings)
    with contextlib.closing(sink_of(job)) as sink:
        epochs = 1 + max((each.epoch for each in sink.manifests() if each is not None), default=0)
    figures = describe(plan, budget, epochs=epochs) | {"plan_hash": job.plan.hash}
    damaged = input_of(job).damaged()
    passes = stored_passes(job)
    newest_triggers = zip(findings.windows.tolist(), findings.last_trigger.tolist(), strict=True)
    incomplete = {
        window: names
        for window, trigger in newest_triggers
        if (names := missing_names(passes, plan.timeline, window, trigger))
    }
    ended = findings.windows[findings.last_trigger == plan.timeline.triggers]
    return Report(
        job,
        plan,
        budget,
        figures,
        releases,
        findings,
        decades,
        damaged,
        incomplete,
        abandoned=np.setdiff1d(np.arange(abandoned_before(job)), ended).tolist(),
        account=None if job.ledger is None else _account(job.ledger),
    )


def _account(place: AccountPlace) -> dict[str, Any] | None:
    """The public facts of an account; see `Report`."""
    try:
        account = read_history(place)
    except DpstreamError:
        return None
    if account.limit is None:
        return None
    filters = account.filters
    return {
        "per": account.created.unit.covers,
        "limit": dict(zip(("epsilon", "delta"), account.limit, strict=True)),
        "charges": len(account.charges),
        "used": filters.used(account.spent.fullest(filters).total),
    }


def _in_force(job: Job, releases: Inventory) -> tuple[Plan, Budget]:
    """What the run whose releases these are draws and tests with."""
    begun = committed(job)
    named = {name.rpartition("-")[2] for name in releases.run_ids}
    if begun is not None and named <= {begun.run_id}:
        return begun.plan, begun.budget
    return job.plan, allocate(job.plan)


def as_dict(report: Report) -> dict[str, Any]:
    """Return the page's figures for machines, JSON-able."""
    findings, timeline = report.findings, report.job.plan.timeline
    windows = zip(findings.windows, findings.last_trigger, findings.keys, strict=True)
    return {
        "plan_hash": report.job.plan.hash,
        "run_ids": report.run_ids,
        "stamps": report.stamps,
        "private": report.truth is not None,
        "damaged_files": dict(report.damaged),
        "incomplete": {
            str(timeline.window_bounds(window)[0]): list(names)
            for window, names in report.incomplete.items()
        },
        "plan": report.figures,
        "account": report.account,
        "releases": {
            "expected": report.expected,
            "present": len(report.inventory.releases),
            "rows": sum(release.keys for release in report.inventory.releases),
            "windows": [
                {
                    "window": int(window),
                    "start_micros": timeline.window_bounds(int(window))[0],
                    "last_trigger": int(trigger),
                    "keys": int(keys),
                }
                for window, trigger, keys in windows
            ],
            "keys": findings.all_keys.distinct,
            "drawn_window": [
                {"trigger": release.trigger, "keys": release.keys}
                for release in findings.drawn_window
            ],
        },
        "busiest": _busiest(report),
        "truth": report.truth
        and {
            "label": TRUTH_LABEL,
            "by_true_records": [decade._asdict() for decade in report.truth],
        },
        "settings": dict(settings(report.job, report.plan)),
    }


def _busiest(report: Report) -> list[dict[str, Any]]:
    """The busiest keys' newest values."""
    plan, keys = report.job.plan, report.findings.all_keys
    names = [f.name for f in key_fields(plan)]
    rows = keys.rows.take(newest_of_each(keys)[: report.findings.busiest.num_rows]).to_pylist()
    return [
        {
            "key": key_label(key, names),
            "columns": {
                a.name: {"value": row[a.name], "sd": row[f"{a.name}_sd"]} for a in plan.aggregates
            },
        }
        for key, row in zip(report.findings.busiest.to_pylist(), rows, strict=True)
    ]


def write(report: Report, page: str, out: Path) -> None:
    """Write a page; replaces an older report, never another file.

    Raises:
        UsageError: another file is there.
        PolicyError: a page with raw figures would lie among the releases.
        RunError: it cannot be written.
    """
    sink = report.job.sink.folder
    if report.truth is not None and sink is not None and sink.resolve() in out.resolve().parents:
        raise PolicyError(
            "--out", "lies in the folder of the releases", "keep what is not private elsewhere"
        )
    write_own(out, page, MARK, PRIVATE if report.truth is not None else PUBLIC)
