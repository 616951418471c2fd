"""One run of the real flow on synthetic rows: own folder, secret and store, nothing charged.

Synthetic neighbours become Arrow rows, and released rows become numbers per trial.  Units and keys
are numbers: nothing here comes from a job's data.  Trial i owns the keys
``i * width .. (i + 1) * width - 1``; trials of both sides share one run, on disjoint keys.
"""

import glob
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from dpstream.accounting.aggregates import AGGREGATE_KINDS, COUNT
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import begin_run
from dpstream.pipelines.connectors.inputs import positioned
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import public_key_digest
from dpstream.pipelines.jobs.secret import new_secret, secret_source
from dpstream.pipelines.project.job_section import SinkSection
from dpstream.pipelines.project.source import Source
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.open import PROJECT_FILE
from tests.audit.evidence.design import TrialDesign


class TrialRows(NamedTuple):
    """Parallel int64 arrays: unit and key numbers, event times (micros), and whether the row
    is one of the unit a trial is about."""

    unit: Int64
    key: Int64
    event: Int64
    own: Bool


def rows_of(
    plan: Plan,
    trials: Int64,
    added: Bool,
    width: int,
    pattern: Int64,
    when: Int64,
    others: int,
    feeds: Sequence[tuple[int, int]],
) -> TrialRows:
    """Return the rows of some trials.

    Args:
        trials: numbers of the trials; added: which of them are on side D'.
        width: keys of a trial; pattern: key (0 .. width - 1) of each of the unit's records;
            when: their triggers in window 0.
        others: units on every key at every (window, trigger) of ``feeds``, a record each.
    """
    timeline = plan.timeline

    def instant(window: int, at: int) -> int:
        return timeline.start + window * timeline.slide + (at - 1) * timeline.trigger_every

    keys = (trials[:, None] * width + np.arange(width)).ravel()
    parts = []
    for number, (window, at) in enumerate(feeds):
        key = np.repeat(keys, others)
        nth = np.tile(np.arange(others), len(keys))
        unit = ((key * others + nth) * len(feeds) + number) * 2 + 1
        parts.append(
            TrialRows(
                unit, key, np.full(len(key), instant(window, at)), np.zeros(len(key), np.bool_)
            )
        )
    mine = trials[added]
    key = (mine[:, None] * width + pattern).ravel()
    event = np.tile(timeline.start + (when - 1) * timeline.trigger_every, len(mine))
    parts.append(
        TrialRows(np.repeat(mine * 2, len(pattern)), key, event, np.ones(len(key), np.bool_))
    )
    return TrialRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def numbered_field(plan: Plan) -> Field:
    """Return the key column that holds a key's number."""
    for field in plan.key:
        if field.type != "bool":
            return field
    raise UsageError(
        "key", "has only yes/no columns: too few keys for an audit", "audit another job"
    )


def table_of(plan: Plan, rows: TrialRows, inputs: dict[str, tuple[float, float]]) -> pa.Table:
    """Return rows as the job's input columns."""
    columns: dict[str, pa.Array] = {plan.unit.column: _typed(plan.unit, "u", rows.unit)}
    columns.update(key_columns(plan, rows.key))
    time = pa.array(rows.event).view(pa.timestamp("us", tz="UTC"))
    columns[plan.event_time] = time
    if plan.stamp != "event_time":
        columns[plan.stamp] = time
    if plan.record_id is not None and plan.record_id.column not in columns:
        numbers = np.arange(len(rows.unit))  # all are different records
        columns[plan.record_id.column] = _typed(plan.record_id, "r", numbers)
    for name, (own, other) in inputs.items():
        columns[name] = pa.array(np.where(rows.own, own, other))
    return pa.table(columns)


def key_columns(plan: Plan, numbers: Int64) -> dict[str, pa.Array]:
    """Return the key columns of numbered keys; columns other than the numbered one are constant."""
    where = numbered_field(plan)
    fixed = {"string": "x", "int": 0, "bool": True, "bytes": b"x"}
    return {
        f.column: _typed(f, "k", numbers)
        if f is where
        else pa.array([fixed[f.type]]).take(pa.array(np.zeros(len(numbers), np.int64)))
        for f in plan.key
    }


def _typed(field: Field, prefix: str, numbers: Int64) -> pa.Array:
    if field.type == "bool":
        raise UsageError(
            "table.unit_column", "of two values is no unit to audit", "audit another job"
        )
    if field.type == "int":
        return pa.array(numbers)
    text = pc.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")
    return text.cast(pa.binary()) if field.type == "bytes" else text


class Released(NamedTuple):
    """Released rows: numbers of their keys, windows and triggers, and the table itself."""

    key: Int64
    window: Int64
    trigger: Int64
    table: pa.Table


def released(plan: Plan, table: pa.Table) -> Released:
    """Return the numbers of released rows."""
    if table.num_rows == 0:
        none = np.zeros(0, np.int64)
        return Released(none, none, none, table)
    field = numbered_field(plan)
    key = table.column(field.column)
    if field.type != "int":
        key = pc.utf8_slice_codeunits(key.cast(pa.string()), 1).cast(pa.int64())
    begin = table.column("window_start").cast(pa.int64()).to_numpy()
    window = (begin - plan.timeline.start) // plan.timeline.slide
    trigger = table.column("trigger").to_numpy().astype(np.int64)
    return Released(key.to_numpy().astype(np.int64), window, trigger, table)


def totals(design: TrialDesign, rows: Released) -> Float64:
    """Return (rows, columns) released values in grid units of their streams, less those of others.

    A mean becomes a sum again: times the released count, or the others' number without one.
    """
    index = np.minimum(np.searchsorted(design.at, rows.trigger), len(design.at) - 1)
    expected = design.expected()[index]
    fed = np.searchsorted(np.array(design.feeds), rows.trigger, side="right") * design.others
    counts = next((c.name for c in design.columns if c.kind == COUNT), None)
    out = np.empty(expected.shape)
    for i, column in enumerate(design.columns):
        value = rows.table.column(column.name).to_numpy().astype(np.float64) / column.grid
        if AGGREGATE_KINDS[column.kind].divides:
            count = fed if counts is None else rows.table.column(counts).to_numpy()
            value = np.nan_to_num((value - column.middle) * count, nan=0.0)
        out[:, i] = value - expected[:, i]
    return out


_SHARDS = 4
#: Windows of an audit's runs, and the most of them.
_WINDOWS, MAX_WINDOWS = 2, 200


class Fixed(NamedTuple):
    """A fixed test secret and run id, so that a test's draws are always the same."""

    insecure_test_secret: str
    run_id: str


class TrialInput(NamedTuple):
    """Rows of one run, and the numbers of the public keys where the plan has some."""

    table: pa.Table
    keys: Int64


def audited_plan(plan: Plan) -> Plan:
    """Return the job's plan on two windows: a unit's worst case lies in one of them. Where
    thresholds allow for several units of a person, on as many as it takes until a window meets as
    many privacy periods as in the job.

    Raises:
        UsageError: that would take more than ``MAX_WINDOWS``.
    """
    timeline = plan.timeline
    if timeline.end is not None and timeline.windows <= _WINDOWS:
        return plan
    most = MAX_WINDOWS if timeline.end is None else min(timeline.windows, MAX_WINDOWS)
    met = plan.design.units_alone
    if met == 1:
        return _on(plan, _WINDOWS)
    if _on(plan, most).design.units_alone < met:
        raise UsageError(
            "audit",
            f"none of the first {most} windows meets {met} privacy periods, as later ones do, and "
            "an audit runs no more",
            "audit a copy of the job with a shorter budget.covers or a longer slide",
        )
    # A later end takes nothing from any window.
    numbers = range(_WINDOWS, most + 1)
    first = bisect_left(numbers, met, key=lambda n: _on(plan, n).design.units_alone)
    return _on(plan, numbers[first])


def _on(plan: Plan, windows: int) -> Plan:
    """The plan with an end after the start of so many windows."""
    timeline = plan.timeline
    end = timeline.start + windows * timeline.slide
    short = msgspec.structs.replace(
        timeline, end=end if timeline.end is None else min(end, timeline.end)
    )
    ended = msgspec.structs.replace(plan, timeline=short)
    if ended.design.skips == plan.design.skips:
        return ended
    # Windows that follow each other closely skip by themselves only where there is an end.
    return with_privacy(ended, skip=plan.design.skips)


class Runner:
    """Runs of one audited job in one folder, all with one key.

    Args:
        job: the job; of it only the plan, the types of its columns and the number of shards are
            used, never its key, input, store, sink or ledger.
        folder: an empty folder of the audit's own.
        through_beam: run the whole pipeline from Parquet to Parquet, not its pure function in
            memory.
        fixed: values that are random otherwise, for tests.
    """

    def __init__(self, job: Job, folder: Path, through_beam: bool, fixed: Fixed | None) -> None:
        self.plan = audited_plan(job.plan)
        self._job, self._folder = job, folder
        self._beam, self._fixed, self._runs = through_beam, fixed, 0
        self._secret = folder / "noise.secret"
        if fixed is None:
            new_secret(self._secret)

    def run(self, given: TrialInput, again: bool = False) -> pa.Table:
        """Return all releases of a new run.

        Args:
            again: with a fixed run id, take another one.
        """
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        job = self._job_in(folder, again)
        return self._through_beam(job, given) if self._beam else self._in_memory(job, given)

    def _job_in(self, folder: Path, again: bool) -> Job:
        fixed, replace = self._fixed, msgspec.structs.replace
        run_id = fixed.run_id if fixed else None
        if run_id is not None and again:
            run_id = f"{int(run_id, 16) ^ 1:032x}"
        pattern = str(Path(glob.escape(str(folder))) / "rows.parquet")
        return replace(
            self._job,
            path=folder / PROJECT_FILE,
            source=Source("parquet", pattern, self._job.source.stamp_column),
            section=replace(self._job.section, choice=None),
            secret=SecretSource(None, fixed.insecure_test_secret)
            if fixed
            else SecretSource(f"file:{self._secret}"),
            public_keys=str(folder / "keys.csv") if not self.plan.design.selects else None,
            state=replace(
                self._job.state,
                store=f"sqlite:{folder / 'state.db'}",
                shards=min(_SHARDS, self._job.state.shards),
            ),
            ledger=None,
            sink=SinkSection("parquet", str(folder / "releases")),
            dead_letter=str(folder / "dead_letter"),
            plan=self.plan,
            test_run_id=run_id,
        )

    def _in_memory(self, job: Job, given: TrialInput) -> pa.Table:
        public = None
        if not self.plan.design.selects:
            public = canonical_public_keys(self.plan, pa.table(key_columns(self.plan, given.keys)))
        run, _ = begin_run(
            self.plan,
            secret_source(job),
            job.state.store or "",
            job.state.shards,
            source=[b"audit"],
            run_id=job.test_run_id,
            public=public,
        )
        try:
            releases, dead = run_in_memory(run, _batches(given.table, job.batch_rows))
        finally:
            run.destroy_keys()
            stores.close_all()
        if dead:
            raise InvariantError("records that the audit makes are never refused")
        return pa.Table.from_batches([b.replace_schema_metadata(None) for b in releases])

    def _through_beam(self, job: Job, given: TrialInput) -> pa.Table:
        pq.write_table(given.table, Path(job.path).with_name("rows.parquet"))
        if job.public_keys is not None:
            path = Path(job.public_keys)
            pcsv.write_csv(pa.table(key_columns(self.plan, given.keys)), path)
            digest = public_key_digest(path, self.plan.key)
            job = msgspec.structs.replace(
                job, plan=msgspec.structs.replace(self.plan, public_keys=digest)
            )
        result = run_job(job)
        if result.operator_only.get("operator_dead_letters"):
            raise InvariantError("records that the audit makes are never refused")
        return read_releases(job.sink.path)


def _batches(table: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    """Its rows, each at its own position, however many chunks the table has."""
    offset = 0
    for chunk in table.to_batches():
        yield from positioned(Rows(offset, chunk), 0, rows)
        offset += chunk.num_rows


def sides(trials: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return (2 trials,) which trials are on side D': as many as on D, drawn by the seed."""
    added = np.zeros(2 * trials, np.bool_)
    added[np.random.default_rng(seed).permutation(2 * trials)[:trials]] = True
    return added
