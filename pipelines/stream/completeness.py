"""Whether all expected files have come: a run is refused before its charge if they have not.

``expect`` of a table (`pipelines.project.expected`) names what complete data has, by a public rule.
A run needs the names of all periods that begin before its last trigger time: a release counts what
has happened before its own.  They are looked for before the input is listed, so that no file can be
taken for complete that the run then does not read; and nothing is opened.

Later passes look for what no pass has looked for, and for what an earlier one has missed in windows
that still take records; files that were read to their end may be gone.  What ``--incomplete`` goes
on without is committed with the pass, before a row is read.

**Public.**  Every text here is a function of ``expect``, of the calendar and of which expected
names are there (`pipelines.project.expected`): never of a record, of another name, or of how many
files have one.
"""

import glob
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.figures import moment_of, time_text
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.jobs.committed import stored_passes
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.expected import FIELD, files_of, proposed
from dpstream.state.passes import Passes, Period, closed_without

_EXAMPLE = "raw/date={day}/*.csv.gz"
#: Names that a message lists.
_LISTED = 5
#: Seconds between two looks at the files.
_LOOK_EVERY = 10.0


class Terms(NamedTuple):
    """What to do if expected files are missing.

    Attributes:
        wait: microseconds to wait for them, before the run is refused; ``None``: not at all.
        incomplete: whether to go on without them.
    """

    wait: int | None = None
    incomplete: bool = False

    def check(self, job: Job) -> None:
        """Refuse terms of a job whose table has no ``expect``."""
        flag = "--wait" if self.wait is not None else "--incomplete"
        if job.expectation is None and (self.wait is not None or self.incomplete):
            fix = f'add to the table, for example, expect = "{_EXAMPLE}"'
            fix = "leave it out: this source has no end" if job.source.unbounded else fix
            raise UsageError(flag, "needs a table with `expect`", fix)


#: Refuse at once.
STRICT = Terms()


def required_periods(job: Job, noted: Passes | None, upto: int) -> list[Period]:
    """Return the periods whose files a run needs through a trigger time.

    Args:
        noted: the passes before, all of them released; ``None``: it begins, or reads all at once.
    """
    rule, timeline = job.expectation, job.plan.timeline
    if rule is None:
        return []
    done = 0 if noted is None else noted.done
    if done >= upto:
        return []
    begin, end = timeline.instant_of(done), min(timeline.instant_of(upto), timeline.horizon)
    periods = rule.periods(begin, end)
    if noted is None:
        return periods
    first, _ = timeline.window_bounds(timeline.windows_at(done + 1).start)
    again = [period for period in noted.passes[-1].missing if period.end > first]
    return again + [period for period in periods if period.begin >= begin]


def absent(job: Job, periods: Iterable[Period]) -> list[Period]:
    """Return the periods whose name no file has.

    Raises:
        RunError: a folder cannot be listed.
    """
    return [period for period in periods if not files_of(period, job.path.parent)]


def refuse_incomplete(
    job: Job,
    noted: Passes | None,
    upto: int,
    through: str,
    terms: Terms,
    warn: Callable[[str], None],
) -> tuple[Period, ...]:
    """Return the periods whose files are missing, if the run may go on without them.

    Args:
        noted, upto: see `required_periods`.
        through: what to type with ``--incomplete``, for a run that reads its input as a whole.
        terms: whether to wait, and whether to go on.
        warn: is told that the command waits.

    Raises:
        RunError: files are missing; nothing was charged or committed.
    """
    terms.check(job)
    periods = required_periods(job, noted, upto)
    missing = absent(job, periods)
    until = time.monotonic() + (terms.wait or 0) / 1e6
    if missing and terms.wait:
        warn(f"the run waits for missing files: {names_text(missing)}")
    while missing and time.monotonic() < until:
        time.sleep(min(_LOOK_EVERY, max(0.0, until - time.monotonic())))
        missing = absent(job, missing)
    if not missing or terms.incomplete:
        return tuple(missing)
    waited = f" after {terms.wait / 1e6:g} s" if terms.wait else ""
    shorter = _complete_through(job.plan.timeline, noted, missing)
    raise RunError(
        FIELD,
        f"names files that are missing{waited}: {names_text(missing)}; nothing was charged or"
        " released",
        "type the same command again when the files are there; or with --wait 2h, to wait for them;"
        f" or with {through}--incomplete, to release without them, which the releases then"
        f" say{shorter}",
    )


def _complete_through(timeline: Timeline, noted: Passes | None, missing: Sequence[Period]) -> str:
    """Return what to type to release only what is complete, if that is anything."""
    last = timeline.passed(min(period.begin for period in missing))
    if last <= (0 if noted is None else noted.done):
        return ""
    return (
        f"; or with --through {time_text(moment_of(timeline.instant_of(last)))}, to release only"
        " what is complete"
    )


def names_text(periods: Sequence[Period]) -> str:
    """Return the names of periods as text; of many the first."""
    names = ", ".join(period.name for period in periods[:_LISTED])
    more = f", and {len(periods) - _LISTED:,} more" if len(periods) > _LISTED else ""
    return names + more


def came_late(job: Job, passes: Passes | None = None) -> list[str]:
    """Return one warning if expected files have come after their windows were closed without them.

    A store that cannot be read counts as absent: the commands that use it report it.

    Args:
        passes: of the job's store, if they are read already.
    """
    if job.expectation is None:
        return []
    passes = stored_passes(job) if passes is None else passes
    if passes is None:
        return []
    timeline = job.plan.timeline
    there = {
        period: bool(files_of(period, job.path.parent))
        for period in {each for one in passes.passes for each in one.missing}
    }
    late = [each for each in closed_without(passes, timeline) if there[each.missing]]
    windows = [
        f"{window_text(timeline, bounds)} ({', '.join(each.missing.name for each in group)})"
        for bounds, group in itertools.groupby(late, lambda each: each.bounds)
    ]
    if not windows:
        return []
    more = f", and {len(windows) - _LISTED:,} more" if len(windows) > _LISTED else ""
    return [
        "files came after their windows were released without them, so their records do not"
        f" count: {', '.join(windows[:_LISTED])}{more}. Fix: type `dpstream run {job.name} --fresh`"
        " with the last --through, for a new run that counts them, at a new charge"
    ]


def window_text(timeline: Timeline, bounds: tuple[int, int]) -> str:
    """Return a window by its first instant, or its days in the job's calendar."""
    begin, end = bounds
    if timeline.calendar is not None:
        return timeline.calendar.days(begin, end)
    return time_text(moment_of(begin))


def unchecked(job: Job) -> list[str]:
    """Return a warning for a run with ``--through`` on a pattern of files without ``expect``."""
    source, folder = job.source, f"{glob.escape(str(job.path.parent))}/"
    if source.expect is not None or source.unbounded or not glob.has_magic(source.path):
        return []
    pattern = source.path.removeprefix(folder)
    if not glob.has_magic(pattern):
        return []
    own = proposed(pattern, (source.first_file() or "").removeprefix(f"{job.path.parent}/"))
    return [
        f"table.{job.section.table} has no `expect`, so a run does not notice a missing file."
        f' Fix: add to it, for example, expect = "{own or _EXAMPLE}"'
    ]
