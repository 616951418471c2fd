"""The final table of a job: the newest figure of each key in each window, in one file.

The columns are ``window_start`` and ``window_end``, the key's columns, and for each published
column NAME: ``NAME`` and ``NAME_sd`` as released, ``NAME_low`` and ``NAME_high`` (a 95% interval of
the noise, not clipped) and ``NAME_quality``.  Rows are ordered by window and key.  Each (window,
key) has one row, from the newest release that holds the key.  The table is post-processing of
releases, so it costs nothing.

**Quality** is the first of these that holds:

* ``too uncertain``: the job's ``publication.withhold`` says so.  It comes first, because such a
  value must not be shown, whatever else is true of it.  A value that is zero, negative or null is
  too uncertain, because no share of it bounds its noise;
* ``not final``: a later trigger of the window is to come;
* ``incomplete``: the newest release was published without a file that was expected;
* ``final``.

**Sources.**  A sink of files has every release, so its folder is read and the secret is not
needed; the store says which files were missing, if it can be read.  For other sinks the store is
read, without the windows whose releases it has dropped.

**When it is written.**  `dpstream run` writes it at the end of a pass or run with files as its
sink.  A stream without end has no end of a pass, and stopping it must not take longer the older it
is: there `dpstream state final` writes it.  A table is written beside the old one, and replaces it
when it is complete.  The memory that is needed is that of a part of a release.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Bool, Float64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.facts import FACTS, encoded
from dpstream.accounting.places import RELEASE_KINDS, ReleaseKind
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.query.calibration import half_width
from dpstream.dp_transforms.batches import empty, in_batches_of, key_fields, release_schema
from dpstream.dp_transforms.release import in_key_order
from dpstream.dp_transforms.selection import publishes
from dpstream.pipelines.connectors.files.sink import facts_in
from dpstream.pipelines.connectors.run_manifest import committed_step
from dpstream.pipelines.formats.encodings import (
    PART_ROWS,
    encode,
    name_of,
    read_parts,
    release_paths,
)
from dpstream.pipelines.jobs.committed import stored_passes
from dpstream.pipelines.jobs.job import Job
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import make_folder, replacing
from dpstream.state.passes import missing_names, noted_passes
from dpstream.state.store import Store

#: Name of the file in the folder of the releases, without its ending.  Readers of a folder as one
#: data set leave out names that begin with "_".
FINAL = "_final"
TOO_UNCERTAIN, NOT_FINAL, INCOMPLETE = "too uncertain", "not final", "incomplete"
IS_FINAL = "final"
#: How the text files begin.
_BEGINS = {"csv": b'"window_start","window_end",', "jsonl": b'{"window_start":'}
_INSTANT = pa.timestamp("us", "UTC")


class FinalWindow(NamedTuple):
    """The newest rows of a window, each key once.

    Attributes:
        number: of the window; ``trigger``: of its newest release.
        incomplete: whether that one was published without an expected file.
        rows: key columns, values and their sds, in order of keys.
    """

    number: int
    trigger: int
    incomplete: bool
    rows: Iterator[pa.RecordBatch]


class FinalTable(NamedTuple):
    """A final table to write.

    Attributes:
        plan: what its releases were made with.
        facts: of their run (`accounting.facts`).
        windows: its windows in order; read once.
    """

    plan: Plan
    facts: dict[str, Any]
    windows: Iterator[FinalWindow]


def final_in(job: Job, folder: Path) -> FinalTable:
    """Return the final table of the releases in a job's folder.

    Raises:
        UsageError: nothing was released there, or by a run of another plan.
    """
    facts, plan, passes = facts_in(folder), job.plan, stored_passes(job)
    if facts["run"]["plan_hash"] != plan.hash:
        raise UsageError(
            "sink.path",
            "holds releases of another plan",
            "give the job they were made with: any other would state a wrong guarantee",
        )

    def lacks_files(window: int, trigger: int) -> bool:
        return bool(missing_names(passes, plan.timeline, window, trigger))

    def windows() -> Iterator[FinalWindow]:
        paths = (path for path in release_paths(folder) if path.suffix == f".{job.sink.kind}")
        for number, group in groupby(paths, lambda path: name_of(path)[0]):
            releases = {name_of(path)[1]: path for path in group}
            needed = _needed(plan, sorted(releases, reverse=True))
            rows = (
                batch
                for trigger in needed
                for part in read_parts(releases[trigger], _released(plan), job.sink.guarded)
                for batch in part.to_batches()
            )
            # A release is in order of keys already; several are merged.
            ordered = rows if len(needed) == 1 else _in_order(plan, rows)
            yield FinalWindow(number, needed[0], lacks_files(number, needed[0]), ordered)

    return FinalTable(plan, facts, windows())


def final_of(plan: Plan, store: Store, facts: dict[str, Any]) -> FinalTable:
    """Return the final table of the releases in a store.

    Args:
        plan: as the store's run was begun with; facts: of the run.
    """
    shards, dropped = store.identity.shards, store.retained_windows.dropped
    passes = noted_passes(store)

    def windows() -> Iterator[FinalWindow]:
        for number, last in sorted(store.completed(shards).items()):
            if last > 0 and number >= dropped:
                rows = (
                    committed_step(store, number, shard, trigger).select(_released(plan).names)
                    for trigger in _needed(plan, range(last, 0, -1))
                    for shard in range(shards)
                )
                incomplete = bool(missing_names(passes, plan.timeline, number, last))
                yield FinalWindow(number, last, incomplete, _in_order(plan, rows))

    return FinalTable(plan, facts, windows())


def _needed(plan: Plan, triggers: Sequence[int]) -> list[int]:
    """The newest triggers, newest first, whose releases have every key of the window once.

    A selected key is published at every refresh, so nothing older than the last one matters; what
    came after it are keys selected since.
    """
    later = list(takewhile(lambda trigger: not publishes(plan, trigger), triggers))
    return [*later, *triggers[len(later) : len(later) + 1]]


def _released(plan: Plan) -> pa.Schema:
    """The key columns, the values and their sds."""
    names = [f.name for f in key_fields(plan)]
    names += [name for a in plan.aggregates for name in (a.name, f"{a.name}_sd")]
    schema = release_schema(plan)
    return pa.schema([schema.field(name) for name in names])


def _in_order(plan: Plan, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (part for _, part in in_key_order(plan, rows, _released(plan)))


def final_schema(plan: Plan) -> pa.Schema:
    """Return the columns of a final table.

    Raises:
        UsageError: two of them have one name.
    """
    fields = [pa.field("window_start", _INSTANT), pa.field("window_end", _INSTANT)]
    fields += key_fields(plan)
    for a in plan.aggregates:
        numbers = (a.name, f"{a.name}_sd", f"{a.name}_low", f"{a.name}_high")
        fields += [pa.field(name, pa.float64()) for name in numbers]
        fields.append(pa.field(f"{a.name}_quality", pa.string()))
    names = [field.name for field in fields]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(
            "key", f"or an aggregate has the name {double} of a final table", "rename the column"
        )
    return pa.schema(fields)


def _batches(table: FinalTable, job: Job) -> Iterator[pa.RecordBatch]:
    """The rows of a final table, window by window."""
    plan, schema = table.plan, final_schema(table.plan)
    geometric = table.facts["mechanism"]["noise"] != "Gaussian"
    width = half_width("geometric" if geometric else "gaussian")
    publication = job.section.publication
    limit = None if publication is None else publication.uncertain_above
    for number, trigger, incomplete, parts in table.windows:
        status = INCOMPLETE if incomplete else IS_FINAL
        if trigger != plan.timeline.triggers:
            status = NOT_FINAL
        for rows in parts:
            size = rows.num_rows
            columns = [
                pa.array(np.full(size, at), pa.int64()).cast(_INSTANT)
                for at in plan.timeline.window_bounds(number)
            ]
            columns += [rows.column(field.name) for field in key_fields(plan)]
            for a in plan.aggregates:
                value, sd = (_defined(rows.column(name)) for name in (a.name, f"{a.name}_sd"))
                half = pc.multiply(sd, width)
                columns += [value, sd, pc.subtract(value, half), pc.add(value, half)]
                values, sds = (each.to_numpy(zero_copy_only=False) for each in (value, sd))
                withheld = pa.array(too_uncertain(values, sds, limit))
                columns.append(pc.if_else(withheld, TOO_UNCERTAIN, status))
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _defined(column: pa.Array) -> pa.Array:
    """Values with null for NaN, as releases have it."""
    return pc.if_else(pc.is_nan(column), None, column)


def too_uncertain(values: Float64, sds: Float64, share: float | None) -> Bool:
    """Return which values are not shown: the sd is above a share of them, or they are not above 0.

    Args:
        values, sds: (n,) NaN where none is defined.
        share: `PublicationSection.uncertain_above`; ``None``: all are shown.
    """
    if share is None:
        return np.zeros(len(values), np.bool_)
    return ~((values > 0) & (sds <= share * values))


def write_final(table: FinalTable, job: Job, out: Path, field: str = "sink.path") -> int:
    """Write a final table, in the format of its name's ending; return its number of rows.

    It replaces what is there when it is complete: a path that somebody has chosen is checked before
    (`require_final`).  In a folder of releases the name is the run's own, whose table may be
    damaged.

    Args:
        field: what names the file, for errors.

    Raises:
        UsageError: a release is damaged, or a name is taken.
        RunError: it cannot be written.
    """
    kind = next(kind for kind in RELEASE_KINDS if out.suffix.lower() == f".{kind}")
    schema, rows = final_schema(table.plan), 0
    with file_errors(field, "cannot be written"):
        make_folder(out.parent)
        with replacing(out) as draft, _writer(draft, kind, table, job) as write:
            for batch in in_batches_of(PART_ROWS, _batches(table, job), schema):
                write(batch)
                rows += batch.num_rows
    return rows


def require_final(out: Path, field: str) -> None:
    """Refuse a path at which another file is than a final table.

    Raises:
        UsageError: another file is there.
        RunError: it cannot be read.
    """
    kind = out.suffix.lower().removeprefix(".")
    with file_errors(field, "cannot be read"):
        if out.exists() and not _is_final(out, kind):
            fix = "move that file away, or choose another name"
            raise UsageError(field, f"{out.name} exists and is another file", fix)


def _is_final(path: Path, kind: str) -> bool:
    """Whether a file begins as a final table does, or is one without rows."""
    if kind != "parquet":
        with open(path, "rb") as file:
            begin = file.read(len(_BEGINS[kind]))
        return begin == _BEGINS[kind] or (kind == "jsonl" and not begin)
    try:
        schema = pq.read_schema(path)
        return FACTS.encode() in (schema.metadata or {}) and schema.names[0] == "window_start"
    except pa.ArrowInvalid:
        return False


@contextlib.contextmanager
def _writer(
    draft: Path, kind: ReleaseKind, table: FinalTable, job: Job
) -> Iterator[Callable[[pa.RecordBatch], object]]:
    """Yield what appends rows to a file of a kind."""
    schema = final_schema(table.plan)
    if kind == "parquet":
        schema = schema.with_metadata({FACTS: encoded(table.facts)})
        options = {"version": "2.6", "compression": "zstd", "write_page_checksum": True}
        with pq.ParquetWriter(draft, schema, **options) as writer:
            yield lambda batch: writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        return
    with open(draft, "wb") as file:
        header = encode(empty(schema), kind, job.sink.guarded)
        file.write(header)
        yield lambda batch: file.write(encode(batch, kind, job.sink.guarded)[len(header) :])
