"""Bounded input that grows: a run continues with files that are added, one pass after the other.

``dpstream run JOB --through INSTANT`` releases what is due by then.  Run again with a later
instant, it reads the files that were added since, and those that held rows beyond the earlier
instant.  All other files were read to their end: they are recognised by their names, and neither
opened nor required, so that no command tells whether one of them was changed or deleted since.  The
operator (or a wall clock) gives the instant, never a record.  It is committed in the store, with
the files of the pass, before a row is read: repeating a pass reads the same files through the same
trigger time, and gives the same bytes.  Up to an instant that is released already, nothing is read.

A pass that was interrupted is repeated alone, before files are added: a record's trigger time is
then a function of its own times and of the pass in which its file was added.

**Files that join**: which are new, what partition each has, how far a pass goes.  A *pass* is a set
of files and the last trigger time that it releases; both are committed in the store before a row is
read.  Files of the first pass have their index by name as partition, those that join later have the
next numbers, by name: a partition, once given, stays.

A file that is renamed is another file: its rows would be read again, within the bound C.

Sensitivity: a record's place (pass, partition, offset) is a function of which file it is in and of
public facts, never of another record.  Its trigger is its own, or the first of its pass if its own
was decided before (`dp_transforms.bounding`); it is late, a dead letter, if its windows were closed
when its file joined (`dp_transforms.ingest.records`).  Both are functions of the record's times and
its pass (mechanism.md rules 0 and 1).  C holds over all passes, because the counts of units stay in
the store.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from dpstream.accounting.errors import (
    NEW_RUN,
    DpstreamError,
    PolicyError,
    RunError,
    UsageError,
    instance,
    required,
)
from dpstream.accounting.figures import EPOCH, moment_of, time_text
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.beam.delivery import delivered_through
from dpstream.dp_transforms.pacing import waiting_partitions
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.files.source import JoinedFiles
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.input_files import (
    SourceFile,
    fingerprint_of,
    identity_part,
    manifest,
    refuse,
)
from dpstream.pipelines.connectors.inputs import Input
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.connectors.run_manifest import all_committed
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.text import instant
from dpstream.pipelines.stream.completeness import Terms, refuse_incomplete
from dpstream.state import open as stores
from dpstream.state.passes import (
    NOTE,
    JoinedFile,
    Passes,
    Period,
    encoded,
    noted_passes,
)
from dpstream.state.retention import reached
from dpstream.state.store import Store

#: Of one file's identity: a keyed digest, in hex.
Digest = Callable[[bytes], str]


class Arranged(NamedTuple):
    """The files that a pass may read, with the partitions that they have.

    Attributes:
        again: files of earlier passes that are not read to their end.
        new: files that join with the next pass.
        identity: parts that identify these files, ``again`` first.
        joined: ``new`` in the form in which the store would record them.
    """

    again: tuple[SourceFile, ...]
    new: tuple[SourceFile, ...]
    identity: tuple[bytes, ...]
    joined: tuple[JoinedFile, ...]


def arrange(files: Sequence[SourceFile], noted: Passes | None, digest: Digest) -> Arranged:
    """Divide files into those that a run reads again and those that are new.

    Args:
        files: the files that the source names now and that are not read to their end, in order of
            their names.
        noted: the passes that the store has; ``None`` for a run that begins.

    Raises:
        PolicyError: a file that must be read again is missing or was changed.
        RunError: a file cannot be read.
    """
    joined = () if noted is None else noted.files
    partitions = {file.name: partition for partition, file in enumerate(joined)}
    again, new = dict[int, tuple[SourceFile, bytes]](), list[tuple[SourceFile, bytes]]()
    notes = list[JoinedFile]()
    for file in files:
        part = identity_part(*fingerprint_of(file))
        note = JoinedFile(digest(name_part(file.name)), digest(part))
        partition = partitions.get(note.name)
        if partition is None:
            new.append((file._replace(partition=len(joined) + len(new)), part))
            notes.append(note)
        elif note == joined[partition]:
            again[partition] = file._replace(partition=partition), part
    for partition in () if noted is None else noted.left:
        if partition not in again:
            raise PolicyError(
                "table.path",
                f"file {partition}, counted in the order in which files joined, has rows that no "
                "pass has released yet, and is missing, renamed or changed",
                f"restore that file, and put corrections into a new file; or {NEW_RUN}",
            )
    read_again = [again[partition] for partition in sorted(again)]
    return Arranged(
        tuple(file for file, _ in read_again),
        tuple(file for file, _ in new),
        tuple(part for _, part in [*read_again, *new]),
        tuple(notes),
    )


def name_part(name: str) -> bytes:
    """Return the bytes whose digest stands for a file's name."""
    return f"name\0{name}".encode()


FLAG = "--through"


class DueInput(NamedTuple):
    """The input that a run must read now.

    Attributes:
        source: the input, or the files of a pass; ``None``: all due releases are committed, and
            nothing is read.
        noted: the passes in the store; ``None`` before the first pass.
        passes: the passes to commit before a row is read; ``None``: the run has no passes, and
            reads its input at once.
    """

    source: Input | None
    noted: Passes | None = None
    passes: Passes | None = None

    @property
    def compares(self) -> bool:
        """Whether the input must have the run's identity; later passes have other files."""
        return self.source is not None and self.noted is None

    @property
    def missing(self) -> tuple[str, ...]:
        """Expected names that the pass goes on without."""
        missing = () if self.passes is None else self.passes.passes[-1].missing
        return tuple(period.name for period in missing)

    def trigger_times(self, timeline: Timeline) -> range:
        """Return the trigger times whose releases are due."""
        if self.passes is None:
            return range(1, timeline.last_trigger_time + 1)
        return range(self.passes.done + 1, self.passes.passes[-1].through + 1)

    @property
    def contents(self) -> tuple[str, ...] | None:
        """Digests of the files of a pass; ``None``: the run's identity is that of all files."""
        if self.passes is None or self.source is None:
            return None
        joined = self.passes.files
        return tuple(joined[file.partition].content for file in self.source.files())

    def instant(self, timeline: Timeline) -> str | None:
        """Return the instant through which a pass releases.

        ``None`` for the run's end, after which no file can be added, and for a run without passes.
        """
        if self.passes is None:
            return None
        through = self.passes.passes[-1].through
        return None if through == timeline.last_trigger_time else _text(timeline, through)


def due(
    job: Job, through: str | None, terms: Terms, warn: Callable[[str], None]
) -> Iterator[DueInput]:
    """Yield the inputs that must be read now; each is made after the one before it has ended.

    Args:
        through: the instant of a pass.
        terms: what to do where expected files are missing.
        warn: is told that the command waits.

    Raises:
        RunError: expected files are missing.
        UsageError: the text is not an instant, or the source has no files.
        PolicyError: a file that must be read again is missing or changed, or an instant is given
            for a run without passes.
    """
    if job.source.unbounded:
        if through is not None:
            raise UsageError(FLAG, "is for files, which end", "leave it out")
        terms.check(job)
        ended = job.plan.timeline.end is not None and begun_of(job).ended
        yield DueInput(None if ended else input_of(job))
        return
    begun = begun_of(job)
    noted = begun.passes
    if noted is None and through is None:
        if not begun.ended and not begun.reads_whole:
            expected(job, None, None, terms, warn)
        yield DueInput(None if begun.ended else input_of(job))
        return
    if job.plan.timeline.max_skew:
        # What counts at a later trigger time than it is decided at would lie between two passes.
        raise UsageError(
            FLAG, "is for events that are not ahead of their stamps", 'write max_skew = "0s"'
        )
    if begun.reads_whole:
        raise _reads_whole()
    upto = None if through is None else trigger_time_of(job.plan.timeline, through)
    terms.check(job)
    if noted is not None and noted.pending:
        yield _interrupted_pass(job, noted)
        noted = begun_of(job).passes
        if noted is None or noted.pending:
            raise RunError("store", "a pass has not come to its end", "run it again")
        if upto is None or upto <= noted.done:
            return
    if noted is not None and (upto is None or upto <= noted.done):
        yield DueInput(None, noted, noted)
        return
    missing = expected(job, noted, through, terms, warn)
    yield _next(job, noted, required(upto, "a new pass has an end"), missing)


def expected(
    job: Job,
    noted: Passes | None,
    through: str | None,
    terms: Terms,
    warn: Callable[[str], None],
) -> tuple[Period, ...]:
    """Return the periods that a run goes on without; see `completeness.refuse_incomplete`.

    Args:
        through: the instant of a pass; ``None``: the run reads its input as a whole.

    Raises:
        UsageError: a run that reads its input as a whole is to go on; it has no note of passes that
            could say so.
    """
    timeline = job.plan.timeline
    if through is None and terms.incomplete:
        raise UsageError("--incomplete", f"needs {FLAG}", f"add {FLAG} end")
    upto = timeline.last_trigger_time if through is None else trigger_time_of(timeline, through)
    more = f"{FLAG} end " if through is None else ""
    return refuse_incomplete(job, noted, upto, more, terms, warn)


def trigger_time_of(timeline: Timeline, through: str) -> int:
    """Return the last global trigger time at or before an instant.

    Args:
        through: RFC 3339, a date (its midnight in the calendar's zone or UTC), ``now`` or ``end``.

    Raises:
        UsageError: the text is not an instant, or the instant is before the first trigger time.
    """
    if through == "end":
        return timeline.last_trigger_time
    if through == "now":
        micros = time.time_ns() // 1_000
    else:
        micros = (instant(FLAG, through, timeline.zone) - EPOCH) // timedelta(microseconds=1)
    trigger_time = timeline.passed(micros)
    if trigger_time < 1:
        raise UsageError(
            FLAG,
            "lies before the first trigger time, so nothing would be released",
            "give an instant at or after start and one release_every",
        )
    return min(trigger_time, timeline.last_trigger_time)


class Begun(NamedTuple):
    """The state of a run's input, as the store has it.

    Attributes:
        passes: passes of an input that grows; ``None``: the store has none.
        ended: whether nothing is read any more unless files join.
        reads_whole: whether the run has no passes and has already decided a record or a step.
    """

    passes: Passes | None = None
    ended: bool = False
    reads_whole: bool = False


def begun_of(job: Job) -> Begun:
    """Return the state of the input in the job's store; nothing without a store of the job's plan.

    Raises:
        PolicyError: its input has changed while a run read it.
    """
    url = job.state.store or ""
    if not stores.exists(url):
        return Begun()
    try:
        store = stores.backend(url).open(job.plan)
    except DpstreamError:
        return Begun()  # no store, or one that another process is making: `begin` says so
    with contextlib.closing(store):
        if store.identity.plan_hash != job.plan.hash:
            return Begun()  # `begin` refuses it
        refuse(store)  # before the files are compared: to restore them does not help then
        noted, timeline = noted_passes(store), job.plan.timeline
        if noted is not None:
            return Begun(noted, not noted.pending)
        return Begun(None, _has_ended(job, store), _decided(store, timeline))


def same_input(job: Job, store: Store) -> bool:
    """Return whether a store's run would read only the files that it was begun with or that joined
    it.
    """
    noted = noted_passes(store)
    if noted is not None:
        try:
            return not noted.pending or bool(_interrupted_pass(job, noted))
        except PolicyError:
            return False
    with secret_source(job).ring() as ring:
        parts = input_of(job).identity()
        return bool(ring.source_fingerprint(parts) == store.identity.source_fingerprint)


def _has_ended(job: Job, store: Store) -> bool:
    """Return whether all steps are committed, and the input was unchanged when they were."""
    timeline = job.plan.timeline
    if not all_committed(store, timeline):
        return False
    if job.source.unbounded:  # the committed steps are its input
        return delivered_through(store) >= timeline.last_trigger_time
    return store.compared_input is not None


def _decided(store: Store, timeline: Timeline) -> bool:
    """Return whether the run in a store has decided a record or committed a step."""
    done, shards = reached(store, timeline), range(store.identity.shards)
    decided = any(store.unit_progress(shard).decided for shard in shards)
    return bool(decided or done.complete or any(done.open.values()))


def _reads_whole() -> PolicyError:
    return PolicyError(
        FLAG,
        "is for runs that were begun with it, and this run was begun without it",
        f"leave it out to continue this run; for input that grows {NEW_RUN}",
    )


def commit(run: Run, due: DueInput) -> Run:
    """Commit a pass in the store of its run, before anything is read; return the run with it.

    Raises:
        PolicyError: the run was begun to read its input as a whole.
        RunError: another process has begun another pass meanwhile.
    """
    store, passes = run.open(), required(due.passes, "a pass is committed")
    if due.noted is None and _decided(store, run.plan.timeline):
        raise _reads_whole()
    before, after = encoded(due.noted), encoded(passes)
    swapped = before == after or store.swap_metadata(NOTE, before, after)
    if not swapped and store.metadata(NOTE) != after:
        raise RunError("store", "another run has begun a pass meanwhile", "run it again")
    return run._replace(upto=passes.passes[-1].through, joined=passes.joined)


def check_no_passes(run: Run) -> None:
    """Refuse to read as a whole the input of a run that reads it in passes.

    Raises:
        RunError: another process has begun the first pass meanwhile.
    """
    if run.open().metadata(NOTE) is not None:
        raise RunError("store", "its run reads its input in passes", "run it again")


def end(run: Run, due: DueInput) -> None:
    """Record that all of a pass is released and in the sink, and what the next pass must read.

    If another process has recorded it meanwhile, it has recorded the same.
    """
    store, passes = run.open(), required(due.passes, "a pass ends")
    read = instance(due.source, JoinedFiles).partitions
    through = passes.passes[-1].through
    after = passes.ended(waiting_partitions(store, run.shards, through, read))
    store.swap_metadata(NOTE, encoded(passes), encoded(after))


def _interrupted_pass(job: Job, noted: Passes) -> DueInput:
    """Return a pass that was interrupted, with the files that it was begun with and no others."""
    arranged = _arranged(job, noted, joins=False)
    return DueInput(JoinedFiles(job, arranged.again, arranged.identity), noted, noted)


def _next(job: Job, noted: Passes | None, upto: int, missing: Sequence[Period]) -> DueInput:
    """Return the pass with the new files."""
    arranged = _arranged(job, noted, joins=True)
    check_types(job, arranged.new)
    passes = (Passes(()) if noted is None else noted).next(arranged.joined, upto, missing)
    source = JoinedFiles(job, (*arranged.again, *arranged.new), arranged.identity)
    return DueInput(source, noted, passes)


def _arranged(job: Job, noted: Passes | None, joins: bool) -> Arranged:
    """Return the files that are read again and, if files may join, the new ones."""
    with secret_source(job).ring() as ring:

        def digest(part: bytes) -> str:
            return str(ring.source_fingerprint([part]))

        if noted is None:
            return arrange(manifest(job), None, digest)
        joined = {file.name for file in noted.files}
        again = {noted.files[partition].name for partition in noted.left}

        def left_out(name: str) -> bool:
            digest_of_name = digest(name_part(name))
            return digest_of_name not in again and (digest_of_name in joined or not joins)

        return arrange(manifest(job, left_out), noted, digest)


def _text(timeline: Timeline, trigger_time: int) -> str:
    """Return the instant of a trigger time, as it may be written for the flag."""
    return time_text(moment_of(timeline.instant_of(trigger_time)))
