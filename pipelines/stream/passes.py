"""Bounded input that grows: a run continues with files that are added, one pass after the other.

``dpstream run JOB --through INSTANT`` releases what is due by then.  Run again with a later
instant, it reads the files that were added since, and those that held rows beyond the earlier
instant; all other files are only compared with their fingerprints.  The operator (or a wall clock)
gives the instant, never a record.  It is committed in the store, with the files of the pass, before
a row is read: repeating a pass reads the same files through the same trigger time, and gives the
same bytes.

A pass that was interrupted is repeated alone, before files are added: a record's trigger time is
then a function of its own times and of the pass in which its file was added.

**Files that join**: which are new, what partition each has, how far a pass goes.  A *pass* is a set
of files and the last trigger time that it releases; both are committed in the store before a row is
read.  Files of the first pass have their index by name as partition, those that join later have the
next numbers, by name: a partition, once given, stays.

Sensitivity: a record's place (pass, partition, offset) is a function of which file it is in and of
public facts, never of another record.  Its trigger is its own, or the first of its pass if its own
was decided before (`dp_transforms.bounding`); it is late, a dead letter, if its windows were closed
when its file joined (`dp_transforms.ingest.records`).  Both are functions of the record's times and
its pass (mechanism.md rules 0 and 1).  C holds over all passes, because the counts of units stay in
the store.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import (
    NEW_RUN,
    DpstreamError,
    PolicyError,
    RunError,
    UsageError,
    required,
)
from dpstream.accounting.figures import EPOCH, moment_of, time_text
from dpstream.accounting.plan.timeline import Timeline
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
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.text import instant
from dpstream.state import open as stores
from dpstream.state.retention import reached
from dpstream.state.store import Store

#: Of one file's identity: a keyed digest, in hex.
Digest = Callable[[bytes], str]


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files that joined together, and the last trigger time that was released with them.

    Attributes:
        files: keyed digests of name, size and content, in order of their partitions.
        through: global trigger time.
    """

    files: tuple[str, ...]
    through: int


class Passes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a store's growing input; private, like the store.

    Attributes:
        passes: the passes in order; every pass but the last is completely released.
        done: trigger time through which all is released and in the sink.
        left: partitions that the next trigger times need: all of the last pass while it is not
            done, else those with rows beyond ``done``.
    """

    passes: tuple[Pass, ...]
    done: int = 0
    left: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Digests of all files, by partition."""
        return tuple(digest for one in self.passes for digest in one.files)

    @property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """(first partition, trigger time released before) of every pass but the first."""
        passes, partition = list[tuple[int, int]](), 0
        for before, _ in itertools.pairwise(self.passes):
            partition += len(before.files)
            passes.append((partition, before.through))
        return tuple(passes)

    @property
    def pending(self) -> bool:
        """Return whether the last pass has something left to do."""
        return self.done < self.passes[-1].through

    def next(self, files: Sequence[str], through: int) -> "Passes":
        """Return the same and one more pass."""
        new = range(len(self.files), len(self.files) + len(files))
        passes = (*self.passes, Pass(tuple(files), through))
        return Passes(passes, self.done, (*self.left, *new))

    def ended(self, left: Sequence[int]) -> "Passes":
        """Return the same once the last pass is done."""
        return Passes(self.passes, self.passes[-1].through, tuple(left))


class Arranged(NamedTuple):
    """The files of a run, as it reads them.

    Attributes:
        earlier: those of the passes so far, by partition, and ``new``: those that are to join, with
            the partitions that they will have.
        first: identity of the first pass's files (all, where there is none yet).
        digests: of ``new``.
    """

    earlier: tuple[SourceFile, ...]
    new: tuple[SourceFile, ...]
    first: list[bytes]
    digests: tuple[str, ...]


def arrange(files: Sequence[SourceFile], noted: Passes | None, digest: Digest) -> Arranged:
    """Tell files that a run has read from those that are new.

    Args:
        files: all that the source names now, in order of their names.
        noted: the store's note, ``None`` for a run that begins.

    Raises:
        PolicyError: a file that the run has read is gone or was changed.
        RunError: a file cannot be read.
    """
    parts = [identity_part(*fingerprint_of(file)) for file in files]
    by_digest = {digest(part): at for at, part in enumerate(parts)}
    order = () if noted is None else noted.files
    gone = [partition for partition, name in enumerate(order) if name not in by_digest]
    if gone:
        raise PolicyError(
            "table.path",
            f"{len(gone)} of the {len(order)} files that this run has read are gone, renamed or"
            f" changed (the first: file {gone[0]} in the order in which they joined)",
            "bring them back as they were, corrections in a new file; or begin a new run on a new"
            " store",
        )
    partitions = [by_digest.pop(name) for name in order]
    new = sorted(by_digest.values())
    placed = [files[at]._replace(partition=n) for n, at in enumerate([*partitions, *new])]
    begun = new if noted is None else partitions[: len(noted.passes[0].files)]
    names = {at: name for name, at in by_digest.items()}
    return Arranged(
        tuple(placed[: len(partitions)]),
        tuple(placed[len(partitions) :]),
        [parts[at] for at in begun],
        tuple(names[at] for at in new),
    )


FLAG = "--through"
_NOTE = "passes"


class Due(NamedTuple):
    """A pass that is to be run.

    Attributes:
        source: the files that it reads.
        noted: the passes in the store; ``None`` before the first pass.
        passes: the passes to commit before a row is read.
    """

    source: JoinedFiles
    noted: Passes | None
    passes: Passes

    @property
    def first(self) -> int:
        """The first trigger time that it releases."""
        return self.passes.done + 1

    @property
    def through(self) -> int:
        """The last trigger time that it releases."""
        return self.passes.passes[-1].through

    def instant(self, timeline: Timeline) -> str | None:
        """Return the instant of ``through``; ``None`` for the end, after which no file can be
        added.
        """
        return None if self.through == timeline.last_trigger_time else _text(timeline, self.through)


def due(job: Job, through: str | None) -> Iterator[Due | None]:
    """Yield the passes to run now, each made when the one before it has ended.

    ``None`` stands for all of the input at once, which is how a job is read whose run was not
    begun with ``--through``.

    Raises:
        UsageError: the text is not an instant, or the source has no files.
        PolicyError: a file that was read is missing or changed, there are new files but no
            instant, or everything up to the instant was released before.
    """
    if job.source.unbounded:
        if through is not None:
            raise UsageError(FLAG, "is for files, which end", "leave it out")
        yield None
        return
    noted = noted_of(job)
    if noted is None and through is None:
        yield None
        return
    if job.plan.timeline.max_skew:
        # What counts at a later trigger time than it is decided at would lie between two passes.
        raise UsageError(
            FLAG, "is for events that are not ahead of their stamps", 'write max_skew = "0s"'
        )
    upto = None if through is None else trigger_time_of(job.plan.timeline, through)
    if noted is not None and noted.pending:
        yield _interrupted_pass(job, noted)
        noted = noted_of(job)
        if noted is None or noted.pending:
            raise RunError("store", "a pass has not come to its end", "run it again")
        if upto is None or upto <= noted.done:
            return
    yield _next(job, noted, upto)


def trigger_time_of(timeline: Timeline, through: str) -> int:
    """Return the last global trigger time at or before an instant.

    Args:
        through: RFC 3339, a date (its midnight in UTC), ``now`` or ``end``.

    Raises:
        UsageError: the text is not an instant, or the instant is before the first trigger time.
    """
    if through == "end":
        return timeline.last_trigger_time
    if through == "now":
        micros = time.time_ns() // 1_000
    else:
        micros = (instant(FLAG, through) - EPOCH) // timedelta(microseconds=1)
    trigger_time = (micros - timeline.start) // timeline.trigger_every
    if trigger_time < 1:
        raise UsageError(
            FLAG,
            "lies before the first trigger time, so nothing would be released",
            "give an instant at or after start and one release_every",
        )
    return int(min(trigger_time, timeline.last_trigger_time))


def noted_of(job: Job) -> Passes | None:
    """Return the passes in the job's store; ``None`` without a store, or if it is read as a whole.

    Raises:
        PolicyError: its input has changed while a run read it.
    """
    url = job.state.store or ""
    if not stores.exists(url):
        return None
    try:
        store = stores.backend(url).open(job.plan)
    except DpstreamError:
        return None  # no store, or one that another process is making: `begin` waits, or says so
    try:
        if store.identity.plan_hash != job.plan.hash:
            return None  # `begin` refuses it
        refuse(store)  # before the files are compared: to bring them back does not help
        return _decoded(store.metadata(_NOTE))
    finally:
        store.close()


def same_input(job: Job, store: Store) -> bool:
    """Return whether the files are those that a store was begun with, or has read in its passes."""
    noted = _decoded(store.metadata(_NOTE))
    if noted is not None:
        try:
            return bool(_arranged(job, noted).earlier)
        except PolicyError:
            return False
    with secret_source(job).ring() as ring:
        parts = input_of(job).identity()
        return bool(ring.source_fingerprint(parts) == store.identity.source_fingerprint)


def commit(run: Run, pass_: Due) -> Run:
    """Commit a pass in the store of its run, before anything is read; return the run with it.

    Raises:
        PolicyError: the run was begun to read its input as a whole.
        RunError: another process has begun another pass meanwhile.
    """
    store = run.open()
    if pass_.noted is None:
        done = reached(store, run.plan.timeline)
        decided = any(store.unit_progress(shard).decided for shard in range(run.shards))
        if decided or done.complete or any(done.open.values()):
            raise PolicyError(
                FLAG,
                "is for runs that were begun with it, and this one reads its input as a whole",
                f"leave it out to go on with this run; for input that grows {NEW_RUN}",
            )
    before, after = _encoded(pass_.noted), _encoded(pass_.passes)
    swapped = before == after or store.swap_metadata(_NOTE, before, after)
    if not swapped and store.metadata(_NOTE) != after:
        raise RunError("store", "another run has begun a pass meanwhile", "run it again")
    return run._replace(upto=pass_.through, joined=pass_.passes.joined)


def check_no_passes(run: Run) -> None:
    """Refuse to read as a whole the input of a run that reads it in passes.

    Raises:
        RunError: another process has begun the first pass meanwhile.
    """
    if run.open().metadata(_NOTE) is not None:
        raise RunError("store", "its run reads its input in passes", "run it again")


def end(run: Run, pass_: Due) -> None:
    """Record that all of a pass is released and in the sink, and what the next pass must read.

    If another process has recorded it meanwhile, it has recorded the same.
    """
    store, read = run.open(), pass_.source.partitions
    left = waiting_partitions(store, run.shards, pass_.through, read)
    after = pass_.passes.ended(left)
    store.swap_metadata(_NOTE, _encoded(pass_.passes), _encoded(after))


def _interrupted_pass(job: Job, noted: Passes) -> Due:
    """Return a pass that was interrupted, with the files that it was begun with."""
    arranged = _arranged(job, noted)
    source = JoinedFiles(job, arranged.earlier, noted.left, arranged.first)
    return Due(source, noted, noted)


def _next(job: Job, noted: Passes | None, upto: int | None) -> Due:
    """Return the pass with the new files."""
    arranged = _arranged(job, noted)
    check_types(job, arranged.new)
    files = (*arranged.earlier, *arranged.new)
    if noted is None:
        passes = Passes(()).next(arranged.digests, required(upto, "a new pass has an end"))
    elif not arranged.new and (upto is None or upto == noted.done):
        return Due(JoinedFiles(job, files, (), arranged.first), noted, noted)
    else:
        passes = noted.next(arranged.digests, _later(job, noted, upto, len(arranged.new)))
    source = JoinedFiles(job, files, passes.left, arranged.first)
    return Due(source, noted, passes)


def _later(job: Job, noted: Passes, upto: int | None, new: int) -> int:
    """Return the trigger time of a further pass."""
    timeline = job.plan.timeline
    if upto is not None and upto > noted.done:
        return upto
    if noted.done == timeline.last_trigger_time:
        raise PolicyError(
            "table.path" if new else FLAG,
            "comes too late: everything through end is released",
            f"take the new files away, or write a later end and {NEW_RUN}",
        )
    after = _text(timeline, noted.done)
    if upto is None:
        raise UsageError(
            FLAG,
            f"is required: {new} {'file is' if new == 1 else 'files are'} new, and nothing says"
            " through when the input is complete"
            f" (all through {after} is released)",
            "give an instant after that, or take the new files away",
        )
    raise UsageError(
        FLAG, f"is not later than {after}, and all until then is released", "give a later instant"
    )


def _arranged(job: Job, noted: Passes | None) -> Arranged:
    files: tuple[SourceFile, ...] = manifest(job)
    with secret_source(job).ring() as ring:
        return arrange(files, noted, lambda part: ring.source_fingerprint([part]))


def _encoded(passes: Passes | None) -> str | None:
    return None if passes is None else msgspec.json.encode(passes).decode()


def _decoded(text: str | None) -> Passes | None:
    return None if text is None else msgspec.json.decode(text, type=Passes)


def _text(timeline: Timeline, trigger_time: int) -> str:
    """Return the instant of a trigger time, as it may be written for the flag."""
    return time_text(moment_of(timeline.instant_of(trigger_time)))
