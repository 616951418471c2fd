"""Releases of a run as the report reads them: an inventory, and the newest row of each key.

Only needed columns are read, a file (of Parquet: a part of a file) at a time, and nothing that is
private.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.dp_transforms.prediction import publishes
from dpstream.pipelines.formats.encodings import name_of, read_parts, release_files
from dpstream.pipelines.jobs.job import Job

#: Rows held before older releases of the same keys are dropped.
_HELD_ROWS = 1_000_000


class ReleaseFile(NamedTuple):
    """One file of the sink: its window and trigger, where it is, how many keys it holds, and
    whether its CSV is guarded (see `pipelines.formats.encodings`)."""

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
            "write them with `dpstream state releases JOB --out FOLDER`, and name that folder in "
            "the job's sink",
        )
    if not folder.is_dir():
        raise UsageError(
            "sink.path", "is no folder: nothing was released yet", "run `dpstream run JOB` first"
        )
    schema = release_schema(job.plan)
    stamps = pa.schema([schema.field("plan_hash"), schema.field("run_id")])
    releases, run_ids = [], set()
    for path in release_files(folder):
        if path.suffix != f".{job.sink.kind}":
            continue
        rows = 0
        for part in read_parts(path, stamps):
            rows += part.num_rows
            run_ids |= set(part["run_id"].unique().to_pylist())
            if part.num_rows and part["plan_hash"].unique().to_pylist() != [job.plan.hash]:
                raise _foreign()
        releases.append(ReleaseFile(*name_of(path), path, rows, job.sink.guarded))
    line = job.plan.timeline
    beyond = line.end is not None and any(r.window >= line.windows for r in releases)
    if beyond or any(r.window < 0 or not 1 <= r.trigger <= line.triggers for r in releases):
        raise _foreign()
    return Inventory(tuple(releases), tuple(sorted(run_ids)))


def _foreign() -> UsageError:
    return UsageError(
        "sink.path",
        "holds releases of another plan",
        "give the job they were made with: any other would state a wrong guarantee",
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


def newest_rows(plan: Plan, releases: Sequence[ReleaseFile]) -> pa.Table:
    """All of ``newest`` as one table, of no row where the window has none."""
    return pa.concat_tables([value_schema(plan).empty_table(), *newest(plan, releases)])


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


def floats(column: pa.ChunkedArray) -> Float64:
    """A column of numbers; null is NaN."""
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
