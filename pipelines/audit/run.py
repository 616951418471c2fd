"""One run of the real flow on synthetic rows: own folder, secret and store, nothing charged."""

import glob
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.release import released_table
from dpstream.dp_transforms.run import begin_run
from dpstream.pipelines.audit.rows import key_columns
from dpstream.pipelines.connectors.inputs import positioned
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import public_key_digest
from dpstream.pipelines.jobs.secret import new_secret, secret_source
from dpstream.pipelines.project.job_parts import KeysConfig, SinkConfig, SourceConfig
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.open import PROJECT_FILE

_SHARDS = 4
#: Windows of an audit's runs, and the most of them.
_WINDOWS, MAX_WINDOWS = 2, 200


class Fixed(NamedTuple):
    """A fixed test secret and run id, so that a test's draws are always the same."""

    insecure_test_secret: str
    insecure_test_run_id: str


class TrialInput(NamedTuple):
    """Rows of one run, and the numbers of the public keys where the plan has some."""

    table: pa.Table
    keys: Int64


def audited_plan(plan: Plan) -> Plan:
    """The job's plan on two windows: a unit's worst case lies in one of them.  Where thresholds
    allow for several units of a person, on as many as it takes until a window meets as many
    privacy periods as in the job.

    Raises:
        UsageError: that would take more than ``MAX_WINDOWS``.
    """
    line = plan.timeline
    if line.end is not None and line.windows <= _WINDOWS:
        return plan
    most = MAX_WINDOWS if line.end is None else min(line.windows, MAX_WINDOWS)
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
    line = plan.timeline
    end = line.start + windows * line.slide
    short = msgspec.structs.replace(line, end=end if line.end is None else min(end, line.end))
    ended = msgspec.structs.replace(plan, timeline=short)
    if ended.design.skips == plan.design.skips:
        return ended
    # Windows that follow each other closely skip by themselves only where there is an end.
    privacy = msgspec.structs.replace(plan.privacy, skip=plan.design.skips)
    return msgspec.structs.replace(ended, privacy=privacy)


class Runner:
    """Runs of one audited job in one folder, all with one key.

    Args:
        job: the job; of it only the plan, the types of its columns and the number of shards are
            used, never its key, input, store, sink or ledger.
        folder: an empty folder of the audit's own.
        through_beam: run the whole pipeline from Parquet to Parquet, not its pure function in
            memory.
        fixed: for tests.
    """

    def __init__(self, job: Job, folder: Path, through_beam: bool, fixed: Fixed | None) -> None:
        self.plan = audited_plan(job.plan)
        self._job, self._folder = job, folder
        self._beam, self._fixed, self._runs = through_beam, fixed, 0
        self._secret = folder / "noise.secret"
        if fixed is None:
            new_secret(self._secret)

    def run(self, given: TrialInput, again: bool = False) -> pa.Table:
        """All releases of a new run.

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
        run_id = fixed.insecure_test_run_id if fixed else None
        if run_id is not None and again:
            run_id = f"{int(run_id, 16) ^ 1:032x}"
        pattern = str(Path(glob.escape(str(folder))) / "rows.parquet")
        return replace(
            self._job,
            path=folder / PROJECT_FILE,
            source=SourceConfig("parquet", pattern, self._job.source.stamp_column),
            privacy=replace(
                self._job.privacy,
                secret=SecretSource(None, fixed.insecure_test_secret)
                if fixed
                else SecretSource(f"file:{self._secret}"),
                insecure_test_run_id=run_id,
            ),
            keys=KeysConfig(str(folder / "keys.csv") if not self.plan.design.selects else None),
            state=replace(
                self._job.state,
                store=f"sqlite:{folder / 'state.db'}",
                shards=min(_SHARDS, self._job.state.shards),
            ),
            ledger=None,
            sink=SinkConfig(
                "parquet", str(folder / "releases"), dead_letter=str(folder / "dead_letter")
            ),
            plan=self.plan,
            tuning=None,
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
            run_id=job.privacy.insecure_test_run_id,
            public=public,
        )
        try:
            releases, dead = run_in_memory(run, _batches(given.table, job.performance.batch_rows))
        finally:
            run.destroy_keys()
            stores.close_all()
        if dead:
            raise InvariantError("records that the audit makes are never refused")
        return released_table(releases)

    def _through_beam(self, job: Job, given: TrialInput) -> pa.Table:
        pq.write_table(given.table, Path(job.path).with_name("rows.parquet"))
        if job.keys.public is not None:
            path = Path(job.keys.public)
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
    """(2 trials,) which trials are on side D': as many as on D, drawn by the seed."""
    added = np.zeros(2 * trials, np.bool_)
    added[np.random.default_rng(seed).permutation(2 * trials)[:trials]] = True
    return added
