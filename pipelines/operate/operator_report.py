"""``dpstream run --operator-report`` and ``--check``: private counts in a file of their own.

The report has exact counts of records: it is for the operator alone.  Its file can be read by its
owner only, lies outside of the releases and of git, and appears complete or not at all.

**A look before the charge** (`look`) is the operator's choice: a run that would count nothing costs
nothing.  It reads the records as `dpstream check` does, and stops the run by one public rule: *rows
were read and none of them is usable*, or a source that ends has no row.  That a run was stopped is
one bit of the private records, which no noise covers.  Its text is the same whatever the records
are; reasons go to the report.  Without the choice nothing before the charge reads a record.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.figures import second_text
from dpstream.accounting.places import refuse_far
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.jobs.charging import check_begin, unfinished_fresh
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate.check import Checked, check_source
from dpstream.pipelines.operate.metrics import Name, textfile
from dpstream.pipelines.project.expected import files_of
from dpstream.pipelines.render.page import require_own, write_own
from dpstream.pipelines.stream.run import Result
from dpstream.pipelines.stream.summary import Records
from dpstream.state.disk_errors import file_errors, require_folder
from dpstream.state.durable import PRIVATE, make_folder
from dpstream.state.ledger.events import now_micros
from dpstream.state.repository import refuse_tracked

FLAG = "--operator-report"
_MARK = '{"file":"dpstream operator report"'


class OperatorReport(
    msgspec.Struct, frozen=True, tag_field="file", tag="dpstream operator report", kw_only=True
):
    """What an operator's report has; private.

    Attributes:
        schema_version: of these names.
        job: its name, ``run_id``: of the run; ``None``: none was begun by this command.
        written: when, in UTC.
        counts: of the records that this command has read, by the names of the operator's metrics.
        records: their summary, with the reason if nothing was released.
        cut_share: share of the records, in each of their windows, that C has cut.
        rows_by_file: rows that this command has read of each file.
        files_by_period: number of files of each expected name of the job, as they are now.
        unexpected: files that were read and have no expected name.
        damaged_files: names of files of a growing folder that were not read to their end, with the
            reason.
        check: what `--check` has counted.
        error: the error that the command has ended with.
    """

    schema_version: int = 1
    job: str
    run_id: str | None = None
    written: str
    counts: dict[str, int] = {}
    records: Records | None = None
    cut_share: float | None = None
    rows_by_file: dict[str, int] = {}
    files_by_period: dict[str, int] = {}
    unexpected: tuple[str, ...] = ()
    damaged_files: dict[str, str] = {}
    check: Checked | None = None
    error: dict[str, Any] | None = None


class Reporter:
    """Writes the report of a command, whether it ends well or not.

    Args:
        path: of the file; ``None``: none is written.

    Raises:
        PolicyError: the file lies in the folder of the releases, or is tracked by git.
        UsageError: another file is there, or its folder is not.
    """

    def __init__(self, job: Job, path: Path | None) -> None:
        self._job, self.path = job, path
        self._checked: Checked | None = None
        self._result: Result | None = None
        if path is None:
            return
        sink = job.sink.folder
        if sink is not None and sink.resolve() in path.resolve().parents:
            raise PolicyError(
                FLAG, "lies in the folder of the releases", "keep what is not private elsewhere"
            )
        refuse_tracked(FLAG, path, "it has counts of private records")
        refuse_far(path.parent, job.path.parent, FLAG)
        require_folder(FLAG, path.parent)
        require_own(path, self._mark, FLAG)

    @contextmanager
    def of_failure(self) -> Iterator[None]:
        """Write also the report of a command that fails in the block."""
        try:
            yield
        except DpstreamError as error:
            self._write(error)
            raise

    def write(self, result: Result) -> None:
        """Write the report of a result.

        Raises:
            RunError: it cannot be written.
        """
        self._result = result
        self._write(None)

    def _write(self, error: DpstreamError | None) -> None:
        if self.path is None:
            return
        result = self._result
        counts = {} if result is None else result.operator_only
        summary = None if result is None else result.summary
        rejected, admitted = (
            counts.get(f"operator_pairs_{kind}", 0) for kind in ("rejected", "admitted")
        )
        rows = dict(() if result is None else result.rows_by_file)
        by_period, unexpected = _of_names(self._job, rows)
        report = OperatorReport(
            job=self._job.name,
            run_id=None if result is None else result.run_id,
            written=second_text(now_micros()),
            counts={
                name.removeprefix("operator_"): amount
                for name, amount in sorted(counts.items())
                if name.startswith("operator_")
            },
            records=None if summary is None else summary.operator_only,
            cut_share=rejected / (rejected + admitted) if rejected + admitted else None,
            rows_by_file=rows,
            files_by_period=by_period,
            unexpected=unexpected,
            damaged_files={} if result is None else input_of(self._job).damaged(),
            check=self._checked,
            error=None if error is None else error.as_dict(),
        )
        with file_errors(FLAG, "cannot be written"):
            make_folder(self.path.absolute().parent, PRIVATE)
        write_own(self.path, self._text(report), self._mark, PRIVATE, FLAG)

    @property
    def _mark(self) -> str:
        """How the file begins."""
        return f"# {_MARK}" if self.path is not None and self.path.suffix == ".prom" else _MARK

    def _text(self, report: OperatorReport) -> bytes:
        """Return the report's file: JSON, or the counts for the operator's own collector."""
        if self._mark == _MARK:
            return msgspec.json.encode(report)
        figures = [
            (Name(f"dpstream_operator_{name}", "gauge", "Private: of the last command."), amount)
            for name, amount in sorted(report.counts.items())
        ]
        return f"{self._mark}, private\n{textfile(report.job, figures)}".encode()

    def look(self, fresh: bool, command: str, progress: Callable[[int, int], None]) -> None:
        """Stop a run that is not charged yet and would count no record.

        Args:
            fresh: a new run is asked for.
            command: that shows the reasons.

        Raises:
            UsageError: no record is usable, or the source gives a record to one reader only.
            DpstreamError: the run would be refused without reading a record.
        """
        job = self._job
        expected = check_begin(job, fresh and unfinished_fresh(job) is None)
        if expected.charged or (job.ledger is None and expected.identity is not None):
            return
        self._checked = checked = check_source(job, None, progress)
        if not checked.usable and (checked.read or not job.source.unbounded):
            raise UsageError(
                "--check",
                "has stopped the run before anything was charged: no record is usable",
                f"type `{command}`, which shows the reasons",
            )


def _of_names(job: Job, rows: Mapping[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the files of each expected name, and the files that were read and have none."""
    rule, timeline = job.expectation, job.plan.timeline
    if rule is None or timeline.end is None:
        return {}, ()
    periods = rule.periods(timeline.start, timeline.end)
    paths = {period.name: files_of(period, job.path.parent) for period in periods}
    named = {path for each in paths.values() for path in each}
    # The names of files are their paths below some folder.
    ends = {path[at + 1 :] for path in named for at, char in enumerate(path) if char == "/"}
    unexpected = (name for name in rows if name not in ends)
    return {name: len(each) for name, each in paths.items() if each}, tuple(unexpected)
