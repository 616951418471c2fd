"""The summary of a run: public figures of its releases, and, for the operator, counts of its
records.

``Released`` is public: it is counted in what was published.  ``Records`` is exact and private: the
command line shows it with ``--operator`` or on a terminal (`pipelines.cli.parts`), and it
never goes to files, metrics or reports.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import instance
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import release_schema
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.run_manifest import committed_names
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.formats.encodings import name_of, read_parts, release_paths
from dpstream.pipelines.jobs.job import Job

#: Key rows that are held before each is kept once.
_HELD_KEYS = 1 << 20


class Released(msgspec.Struct, frozen=True):
    """Figures of what a run has published; public.

    Attributes:
        windows: windows with a release, and ``empty_windows``: those whose releases have no row.
        releases: one for each trigger time of each of them, and ``rows``: in all of them.
        keys: number of distinct keys.
        relative_sd: the largest sd divided by its value (its magnitude), over the last release of
            every window that has rows; ``None`` if every value is zero.
        median_relative_sd: the median of the same.
    """

    windows: int
    empty_windows: int
    releases: int
    rows: int
    keys: int
    relative_sd: float | None
    median_relative_sd: float | None = None


class Cause(msgspec.Struct, frozen=True):
    """The reason why nothing was released, or no record was usable: what happened, and the fix."""

    problem: str
    fix: str


class Records(msgspec.Struct, frozen=True):
    """Counts of the records that this command has read; exact, for the operator only.

    Attributes:
        read: number of records, and ``dead``: those that became dead letters.
        dead_share: their share; ``None`` if none was read.
        cause: why nothing was released, or why every record is unusable.
    """

    read: int
    dead: int
    dead_share: float | None
    cause: Cause | None


class Summary(msgspec.Struct, frozen=True):
    """The summary of a finished run."""

    released: Released
    operator_only: Records


class Part(NamedTuple):
    """Rows of a release, or of a part of it, with its name."""

    window: int
    trigger: int
    rows: pa.Table


def summarised(job: Job, run: Run, sink: Sink, counts: Mapping[str, int]) -> Summary:
    """Return the summary of a finished run.

    Args:
        counts: the operator's counts of this command (``dp_transforms.telemetry``).

    Raises:
        DpstreamError: a release cannot be read.
    """
    # A store in a file is read three times as fast as the sink's files; a database is asked over
    # a network, and a store may have dropped what its sink has.
    near = run.store.startswith("sqlite:") and not run.open().retained_windows.dropped
    from_files = isinstance(sink, FileSink) and not near
    released = tally(run.plan, _published(run.plan, sink) if from_files else _committed(run))
    return Summary(released, records_of(job, released, counts))


def tally(plan: Plan, parts: Iterable[Part]) -> Released:
    """Return the figures of releases, which are given in order of window and trigger time."""
    names = [field.column for field in plan.key]
    keys = _Distinct(names)
    rows, releases, last = 0, set[tuple[int, int]](), dict[int, tuple[int, list[Float64]]]()
    for window, trigger, table in parts:
        releases.add((window, trigger))
        if table.num_rows == 0:
            continue
        rows += table.num_rows
        keys.add(table)
        # Of the last release that has rows, whatever came before it.
        latest, relative_sds = last.get(window, (0, []))
        relative_sds = relative_sds if trigger == latest else []
        last[window] = trigger, [*relative_sds, *_relative(plan, table)]
    windows = {window for window, _ in releases}
    sds = np.concatenate(
        [np.zeros(0), *(sd for _, window_sds in last.values() for sd in window_sds)]
    )
    return Released(
        windows=len(windows),
        empty_windows=len(windows - set(last)),
        releases=len(releases),
        rows=rows,
        keys=keys.count(),
        relative_sd=float(sds.max()) if sds.size else None,
        median_relative_sd=float(np.median(sds)) if sds.size else None,
    )


def _relative(plan: Plan, table: pa.Table) -> Iterator[Float64]:
    """Yield the relative sds of each aggregate."""
    for aggregate in plan.aggregates:
        value, sd = (
            table.column(name).to_numpy() for name in (aggregate.name, f"{aggregate.name}_sd")
        )
        usable = np.isfinite(value) & np.isfinite(sd) & (value != 0)
        yield sd[usable] / np.abs(value[usable])


class _Distinct:
    """Counts distinct keys."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._held, self._rows = names, list[pa.Table](), 0

    def add(self, table: pa.Table) -> None:
        """Add the keys of some rows."""
        self._held.append(table.select(self._names))
        self._rows += table.num_rows
        if self._rows > _HELD_KEYS:
            self._held = [self._each_once()]
            self._rows = self._held[0].num_rows - _HELD_KEYS

    def _each_once(self) -> pa.Table:
        return pa.concat_tables(self._held).group_by(self._names).aggregate([])

    def count(self) -> int:
        """Return the number of distinct keys."""
        return self._each_once().num_rows if self._held else 0


def _published(plan: Plan, sink: Sink) -> Iterator[Part]:
    """Yield the releases of a folder."""
    sink = instance(sink, FileSink)
    full_schema, names = release_schema(plan), _names(plan)
    schema = pa.schema([full_schema.field(name) for name in names])
    for path in release_paths(sink.folder):
        window, trigger = name_of(path)
        yield Part(window, trigger, schema.empty_table())
        for table in read_parts(path, schema, sink.guard):
            yield Part(window, trigger, table)


def _committed(run: Run) -> Iterator[Part]:
    """Yield the releases in the store."""
    store = run.open()
    dropped = store.retained_windows.dropped
    for window, trigger in committed_names(run, store):
        if window < dropped:
            continue
        for shard in range(run.shards):
            rows = store.committed_releases(window, shard, trigger)
            if rows is not None:
                yield Part(window, trigger, pa.Table.from_batches([rows]).select(_names(run.plan)))


def _names(plan: Plan) -> list[str]:
    values = [name for a in plan.aggregates for name in (a.name, f"{a.name}_sd")]
    return [*(field.column for field in plan.key), *values]


def records_of(job: Job, released: Released, counts: Mapping[str, int]) -> Records:
    """Return counts of the records that this command has read, and why nothing was released."""
    at_source, dead = counts.get("operator_dead_source", 0), counts.get("operator_dead_letters", 0)
    read = counts.get("operator_records_in", 0) + at_source
    cause = None
    if 0 < read == dead:
        cause = _all_dead(job, counts, read)
    elif released.rows == 0 < released.releases:  # none: the store has let go of them
        cause = _empty(job, counts, read - dead)
    return Records(read, dead, dead / read if read else None, cause)


def _empty(job: Job, counts: Mapping[str, int], usable: int) -> Cause:
    """Return why a run has no row, if at least one record that it read was usable."""
    name = job.name
    if not counts:
        return Cause(
            "nothing was released; an earlier command or other workers read the records, so the"
            " reason is not known here",
            f"`dpstream plan {name}` says how many units a key needs in a window",
        )
    if usable == 0 and job.source.query is not None:
        return Cause(
            "the source holds no record, or query keeps none",
            "correct the query's WHERE, or the files that table.path names",
        )
    if usable == 0:
        return Cause("the source holds no record", "correct the files that table.path names")
    return Cause(
        f"usable records: {usable:,}; no key has enough units in a window to be published",
        f"`dpstream plan {name}` says how many a key needs; take longer windows, fewer"
        " triggers, a larger epsilon, or name the keys in public_keys",
    )


def _all_dead(job: Job, counts: Mapping[str, int], dead: int) -> Cause:
    """Return the most frequent reason for unusable records, as what to correct."""
    causes = causes_of(job)
    reason = max(causes, key=lambda reason: counts.get(f"operator_dead_{reason}", 0))
    cause, amount = causes[reason], counts.get(f"operator_dead_{reason}", 0)
    most = f"none of {dead:,} records is usable, {amount:,} of them for this reason"
    return Cause(f"{most}: {cause.problem}", cause.fix)


#: What else may be wrong with the texts of a format.
_AS_WRITTEN = {
    "csv": ', or in the table their encoding, e.g. csv = { encoding = "cp1252" }',
    **dict.fromkeys(("json", "jsonl"), ", and the column's name as the objects have it"),
}


def causes_of(job: Job) -> dict[str, Cause]:
    """Return the meaning for this job of each reason for an unusable record, and its fix."""
    plan, timeline = job.plan, job.plan.timeline
    start, end = (
        np.datetime64(t, "us").astype("M8[s]") for t in (timeline.start, timeline.horizon)
    )
    keys = ", ".join(f"'{field.column}' ({field.type})" for field in plan.key)
    columns = ", ".join(f"'{a.column}'" for a in plan.aggregates if a.column is not None)
    kind = job.source.format or job.source.kind
    its_type = f"write the type that it has, and texts as UTF-8{_AS_WRITTEN.get(kind, '')}"
    texts = {
        "unit": (
            f"table.unit_column: column '{plan.unit.column}' holds no {plan.unit.type}, or is null",
            f'{its_type}; for texts, write type = "string" in the unit of the data set',
        ),
        "key": (f"key: a column of {keys} holds no value of its type, or is null", its_type),
        "time": (
            f"table.time_column: '{plan.event_time}' holds no time, is null, or is a time before"
            f" {start}Z or not before {end}Z",
            "set start and end around the data, or name the column of its times",
        ),
        "late": (
            "table.stamp: the stamps lie after the windows of the event times",
            'write stamp = "event_time", or a longer allowed_lateness',
        ),
        "value": (
            f"aggregate.column: {columns} holds no number, or is null",
            "write plain numbers, such as 12.5, also for what is missing, or name a column of"
            " numbers"
            + '; or say in the table how they are written, e.g. csv = { decimal = ",", thousands ='
            ' "." }' * (kind == "csv"),
        ),
        "not_public": (
            "public_keys: no record has one of the public keys",
            "correct the list, or the types of key",
        ),
        "record_id": (
            "table.record_id: the column holds no value of its type, or is null",
            its_type,
        ),
        "source": (
            f"source: there is no readable row of {job.source.kind}",
            "correct table.format, or the files",
        ),
    }
    return {reason: Cause(*words) for reason, words in texts.items()}
