"""What the report reads: the releases of a run, in bounded memory, and nothing that is private.

Only needed columns are read, a file (of Parquet: a part of a file) at a time; what is kept is
a row per release, six keys, and a few hundred points.  Everything here is post-processing of
published values.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.dp_transforms.prediction import publishes
from dpstream.pipelines.connectors.records.formats import name_of, read_parts, release_files
from dpstream.pipelines.jobs.job import Job

#: Keys shown one by one; more small pictures are not read.
BUSIEST = 6
#: Points of a scatter; more do not show more, but make a page heavy.
POINTS = 600
#: Triggers of the latest window whose values are drawn; further ones are skipped evenly.
DRAWN_TRIGGERS = 400
#: Rows held before older releases of the same keys are dropped.
_HELD_ROWS = 1_000_000


class ReleaseFile(NamedTuple):
    """One file of the sink: its window and trigger, where it is, how many keys it holds, and
    whether its CSV is guarded (see `pipelines.connectors.records.formulas`)."""

    window: int
    trigger: int
    path: Path
    keys: int
    guard: bool = True


class Inventory(NamedTuple):
    """All releases of a folder in the order (window, trigger), and the run ids they bear."""

    releases: tuple[ReleaseFile, ...]
    run_ids: tuple[str, ...]

    def by_window(self) -> Iterator[tuple[int, list[ReleaseFile]]]:
        """(window, its releases), windows in order."""
        for window, group in groupby(self.releases, lambda release: release.window):
            yield window, list(group)


class Findings(NamedTuple):
    """What the pictures show.

    Attributes:
        windows, last_trigger, keys: (n,) windows with releases, how far each has come, and how
            many distinct keys the public knows of it.
        latest: releases of the latest window in which a key was released; may be empty.
        busiest: up to six rows of that window's newest values: key columns, values, sds.
        series: for each of them a table of ``trigger``, values and sds over the window.
        scatter: published column -> (values, sds) of a sample of each window's newest values.
    """

    windows: Int64
    last_trigger: Int64
    keys: Int64
    latest: tuple[ReleaseFile, ...]
    busiest: pa.Table
    series: tuple[pa.Table, ...]
    scatter: dict[str, tuple[Float64, Float64]]


def value_schema(plan: Plan) -> pa.Schema:
    """Key columns, then each published column and its sd."""
    wanted = {f.name for f in key_fields(plan)}
    wanted |= {name for a in plan.aggregates for name in (a.name, f"{a.name}_sd")}
    return pa.schema([f for f in release_schema(plan) if f.name in wanted])


def ranked_by(plan: Plan) -> str:
    """The column that says how busy a key is: a count if there is one."""
    kinds = {a.kind: a.name for a in reversed(plan.aggregates)}
    return kinds.get("count") or kinds.get("units") or plan.aggregates[0].name


def inventory(job: Job) -> Inventory:
    """The releases of a job's sink.

    Raises:
        UsageError: there is no folder, or it holds releases of another plan.
    """
    folder = job.sink.folder
    if folder is None:
        raise UsageError(
            "sink.kind",
            f"is '{job.sink.kind}', and a report reads files",
            "write them with `dpstream state releases JOB --out`, and name that folder in the job's"
            " [sink]",
        )
    if not folder.is_dir():
        raise UsageError(
            "sink.path", "is no folder: nothing was released yet", "run `dpstream run JOB` first"
        )
    schema = release_schema(job.plan)
    stamps = pa.schema([schema.field("plan_hash"), schema.field("run_id")])
    found, run_ids = [], set()
    for path in release_files(folder):
        if path.suffix != f".{job.sink.kind}":
            continue
        rows = 0
        for part in read_parts(path, stamps):
            rows += part.num_rows
            run_ids |= set(part["run_id"].unique().to_pylist())
            if part.num_rows and part["plan_hash"].unique().to_pylist() != [job.plan.hash]:
                raise _foreign()
        found.append(ReleaseFile(*name_of(path), path, rows, job.sink.guarded))
    line = job.plan.timeline
    beyond = line.end is not None and any(r.window >= line.windows for r in found)
    if beyond or any(r.window < 0 or not 1 <= r.trigger <= line.triggers for r in found):
        raise _foreign()
    return Inventory(tuple(found), tuple(sorted(run_ids)))


def _foreign() -> UsageError:
    return UsageError(
        "sink.path",
        "holds releases of another plan",
        "give the job file they were made with: any other would state a wrong guarantee",
    )


def newest(plan: Plan, releases: Sequence[ReleaseFile]) -> Iterator[pa.Table]:
    """The newest row of each key released in one window, in parts.

    Args:
        releases: the window's, in order of triggers.
    """
    schema = value_schema(plan)
    if plan.design.restarts:
        yield _newest_of_rounds(plan, releases)
        return
    # A selected key is published at every refresh: nothing older than the last one matters,
    # and what came after it are keys selected since, each once.
    for release in reversed(releases):
        yield from read_parts(release.path, schema, release.guard)
        if publishes(plan, release.trigger):
            return


def _newest_of_rounds(plan: Plan, releases: Sequence[ReleaseFile]) -> pa.Table:
    """A key can come again at any trigger: older rows are dropped now and then."""
    schema = value_schema(plan)
    held, rows, limit = [schema.empty_table()], 0, _HELD_ROWS
    for release in reversed(releases):
        for part in read_parts(release.path, schema, release.guard):
            held.append(part)
            rows += part.num_rows
        if rows > limit:
            held = [_first_of_key(plan, pa.concat_tables(held))]
            rows = held[0].num_rows
            limit = max(_HELD_ROWS, 2 * rows)
    return _first_of_key(plan, pa.concat_tables(held))


def _first_of_key(plan: Plan, table: pa.Table) -> pa.Table:
    names = [f.name for f in key_fields(plan)]
    others = [name for name in table.schema.names if name not in names]
    keep_nulls = pc.ScalarAggregateOptions(skip_nulls=False)
    grouped = table.group_by(names, use_threads=False)  # threads would lose the order
    first = grouped.aggregate([(name, "first", keep_nulls) for name in others])
    return first.rename_columns([*names, *others]).select(table.schema.names)


def collect(plan: Plan, found: Inventory) -> Findings:
    """Read what the pictures need."""
    groups = list(found.by_window())
    shown = [index for index, (_, group) in enumerate(groups) if any(r.keys for r in group)]
    names = [a.name for a in plan.aggregates]
    points: dict[str, list[tuple[Float64, Float64]]] = {name: [] for name in names}
    quota = max(8, 2 * POINTS // max(1, len(shown)))
    keys = np.zeros(len(groups), np.int64)
    busiest = value_schema(plan).empty_table()
    for index in shown:
        for part in newest(plan, groups[index][1]):
            keys[index] += part.num_rows
            for name in names:
                points[name].append(thin(*_pair(part, name), quota))
            if index == shown[-1]:
                busiest = _busiest(plan, pa.concat_tables([busiest, part]))
    latest = tuple(groups[shown[-1]][1]) if shown else ()
    return Findings(
        windows=np.array([window for window, _ in groups], np.int64),
        last_trigger=np.array([group[-1].trigger for _, group in groups], np.int64),
        keys=keys,
        latest=latest,
        busiest=busiest,
        series=_series(plan, latest, busiest),
        scatter={name: thin(*_joined(points[name]), POINTS) for name in names},
    )


def thin(values: Float64, sds: Float64, limit: int) -> tuple[Float64, Float64]:
    """At most ``limit`` of the points: the largest quarter, and the rest evenly by size."""
    order = np.argsort(-np.abs(values), kind="stable")
    if len(order) > limit:
        head = limit // 4
        rest = np.linspace(head, len(order) - 1, limit - head).astype(np.int64)
        order = np.concatenate([order[:head], order[rest]])
    return values[order], sds[order]


def evenly(count: int, limit: int) -> Int64:
    """At most ``limit`` of the numbers below ``count``, first and last among them."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, limit)).astype(np.int64))


def _pair(table: pa.Table, name: str) -> tuple[Float64, Float64]:
    """Values and sds of a column where both are defined."""
    values, sds = (floats(table[column]) for column in (name, f"{name}_sd"))
    known = np.isfinite(values) & np.isfinite(sds)
    return values[known], sds[known]


def floats(column: pa.ChunkedArray) -> Float64:
    """A column of numbers; null is NaN."""
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


def _joined(parts: list[tuple[Float64, Float64]]) -> tuple[Float64, Float64]:
    none = (np.zeros(0), np.zeros(0))
    values, sds = zip(*[none, *parts], strict=True)
    return np.concatenate(values), np.concatenate(sds)


def _busiest(plan: Plan, table: pa.Table) -> pa.Table:
    order = [(ranked_by(plan), "descending")]
    order += [(f.name, "ascending") for f in key_fields(plan)]
    return table.sort_by(order).slice(0, BUSIEST)


def _series(plan: Plan, releases: Sequence[ReleaseFile], keys: pa.Table) -> tuple[pa.Table, ...]:
    """The released rows of a few keys over one window's triggers."""
    if not keys.num_rows:
        return ()
    held: list[list[pa.Table]] = [[] for _ in range(keys.num_rows)]
    for at in evenly(len(releases), DRAWN_TRIGGERS):
        release = releases[at]
        for part in read_parts(release.path, value_schema(plan), release.guard):
            for row, tables in enumerate(held):
                mine = part.filter(_is_key(plan, part, keys, row))
                number = np.full(mine.num_rows, release.trigger, np.int64)
                tables.append(mine.append_column("trigger", pa.array(number)))
    return tuple(pa.concat_tables(tables) for tables in held)


def _is_key(plan: Plan, table: pa.Table, keys: pa.Table, row: int) -> pa.ChunkedArray:
    masks = [pc.equal(table[f.name], keys[f.name][row]) for f in key_fields(plan)]
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return mask
