"""``dpstream due``: which releases should be out by now, which are, and what is next.

A release should be out once its trigger time has passed on the public clock.  It is out when the
sink has it, whatever the store says.  If the sink cannot be read back, the store is asked instead.
The store also says which windows were abandoned.  The answer and its exit code are therefore
functions of the plan, of the clock, of what is published and of what was abandoned.  The command
looks only for the file names that the table expects (`pipelines.project.expected`): it opens no
file and lists no other name.

A collector gets the same figures in a file, in the text format of Prometheus.  They are public;
the operator's counts go to another file (`pipelines.operate.operator_report`).
"""

import contextlib
from datetime import datetime
from pathlib import Path

import msgspec

from dpstream.accounting.figures import moment_of, time_text
from dpstream.dp_transforms.beam.delivery import delivered_through
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import Name, ReadableSink
from dpstream.pipelines.jobs.committed import abandoned_before, opened_store, stored_passes
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate.metrics import DUE_METRICS, textfile
from dpstream.pipelines.render.page import write_own
from dpstream.pipelines.stream.completeness import (
    absent,
    came_late,
    required_periods,
    window_text,
)
from dpstream.state.durable import PUBLIC
from dpstream.state.passes import closed_without
from dpstream.state.retention import reached

METRICS_FLAG = "--metrics"


class Overdue(msgspec.Struct, frozen=True):
    """A release that should be out and is not: its window, and its trigger time."""

    window: str
    trigger_time: str


class Due(msgspec.Struct, frozen=True):
    """The public state of a job's releases at an instant.

    Attributes:
        job: its name.
        as_of: the instant of the look.
        due_through: the last trigger time that has passed; ``None``: none has.
        out_through: the last trigger time through which all releases are out; ``None``: none is.
        next: the next trigger time; ``None``: the job has no more.
        overdue: releases that should be out and are not.
        missing: expected names of files that the overdue releases need and that are not there.
        incomplete: expected names that windows were released without, by window.
        abandoned: windows that `dpstream state restore --abandon` gave up: what is not out of them
            never will be, and is not overdue.
        warnings: which files came after their windows were released without them.
    """

    job: str
    as_of: str
    due_through: str | None
    out_through: str | None
    next: str | None
    overdue: tuple[Overdue, ...]
    missing: tuple[str, ...]
    incomplete: dict[str, tuple[str, ...]]
    abandoned: tuple[str, ...]
    warnings: tuple[str, ...]


def due_at(job: Job, instant: int) -> Due:
    """Return which releases of a job should be out at an instant (micros), and which are.

    Raises:
        DpstreamError: the sink or the store cannot be read.
    """
    timeline = job.plan.timeline
    passed = max(0, timeline.passed(instant))
    last = None if timeline.end is None else timeline.last_trigger_time
    through = passed if last is None else min(passed, last)
    out, overdue, complete = _published(job), list[Overdue](), through
    given_up, abandoned = abandoned_before(job), list[str]()
    for time in range(1, through + 1):
        for window in timeline.windows_at(time):
            if (window, time - timeline.base(window)) in out:
                continue
            name = window_text(timeline, timeline.window_bounds(window))
            if window < given_up:
                abandoned.append(name)
            else:
                overdue.append(Overdue(name, _text(job, time)))
                complete = min(complete, time - 1)
    passes = stored_passes(job)
    missing = absent(job, required_periods(job, passes, through)) if overdue else []
    incomplete = dict[str, tuple[str, ...]]()
    for closed in () if passes is None else closed_without(passes, timeline):
        window_name = window_text(timeline, closed.bounds)
        incomplete[window_name] = (*incomplete.get(window_name, ()), closed.missing.name)
    return Due(
        job=job.name,
        as_of=time_text(moment_of(instant)),
        due_through=_text(job, through) if through else None,
        out_through=_text(job, complete) if complete else None,
        next=None if last is not None and passed >= last else _text(job, passed + 1),
        overdue=tuple(overdue),
        missing=tuple(period.name for period in missing),
        incomplete=incomplete,
        abandoned=tuple(dict.fromkeys(abandoned)),
        warnings=tuple(came_late(job, passes)),
    )


def _text(job: Job, trigger_time: int) -> str:
    return time_text(moment_of(job.plan.timeline.instant_of(trigger_time)))


def _published(job: Job) -> set[Name]:
    """Return the releases that are out."""
    with contextlib.closing(sink_of(job)) as sink:
        if isinstance(sink, ReadableSink):
            plans = {each.plan_hash for each in sink.manifests() if each is not None}
            own = job.plan.hash in plans  # else they are releases of another run
            return {(one.window, one.trigger) for one in sink.published()} if own else set()
    with opened_store(job) as store:
        if store is None:
            return set()
        timeline = job.plan.timeline
        if job.source.unbounded:
            times = range(1, delivered_through(store) + 1)
            return {
                (w, time - timeline.base(w)) for time in times for w in timeline.windows_at(time)
            }
        done = reached(store, timeline)
        steps = {window: timeline.triggers for window in range(done.complete)} | done.open
        return {(w, trigger) for w, last in steps.items() for trigger in range(1, last + 1)}


def write_metrics(due: Due, path: Path) -> None:
    """Write the figures for a collector; a reader sees the old file or the new one.

    Raises:
        UsageError: another file is there.
        RunError: it cannot be written.
    """
    instants = (due.as_of, due.due_through, due.out_through, due.next)
    seconds = [None if t is None else datetime.fromisoformat(t).timestamp() for t in instants]
    numbers = [len(due.overdue), len(due.missing), len(due.incomplete)]
    text = textfile(due.job, zip(DUE_METRICS, [*seconds, *numbers], strict=True))
    write_own(path, text, f"# HELP {DUE_METRICS[0].name} ", PUBLIC, METRICS_FLAG)
