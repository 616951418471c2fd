"""The files of a bounded source: in one order, with one identity, whatever machine lists them.

A file's partition is its index in the manifest; a row's offset is its number in the file.

The store fixes the input: the files of a run are compared before every delivery.

The identity of bounded input (names, sizes and contents) is committed, keyed, before the first row
is read.  `InputWatch` compares the files before each write to the sink, wherever that happens: size
and times of every file as they were before the identity was computed with what they are now.  Where
they differ the contents are digested, once: files that were only touched, or copied as they were,
go on with their new times; others are a **verdict**, committed in the store.  Nothing is written,
and every later command that would continue the store refuses (`refuse_changed`).

**Soundness.**  All rows that lead to a release were read before the sink gets the release, so
before the comparison; and a write changes a file's status time, which nobody can set back.  Equal
times therefore mean that every row of these releases was read from the committed input: there is no
window between a comparison and a delivery.  Steps that rows of another input have led to may be
committed in the store by then; they are never delivered.  A file that changes after its rows were
read stops the run as well, because whoever repeats the run would read other rows.

**Sensitivity.**  One run id then stands for one input, and neighbouring inputs differ by the
records of one unit in *that* input (mechanism.md): a position names one record, a unit's C pairs
are counted over all that is read, and a repeated step draws the same noise for the same counts.
With two inputs under one run id, a position that was decided for a record would admit another one
without counting it, and repeated noise would lie on other counts.  The verdict itself says that the
operator's files changed, which is no function of a record.

Input that nothing is read from any more is not looked at: when an attempt has compared it after its
last row, the store holds that moment (``Store.compared_input``).  A run whose last step is
committed by then is answered from store and sink, and a pass leaves out the files that earlier
passes have read to their end.  Otherwise a repeated command would say, without noise, whether a
byte of the input has changed since.

Input without an end has no identity of its own: the steps that are committed are the input.  A
record is decided once, by its position or id, in the transaction of its step, and a step is never
computed again once it is committed.

What is not noticed: a file that is changed and then, before the next comparison or after a kill,
restored to the committed bytes; a system that does not keep times of status.
"""

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa

from dpstream.accounting.errors import NEW_RUN, DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.figures import second_text
from dpstream.accounting.places import matching, unescaped
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.formats.rows import unreadable
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.source import no_file
from dpstream.state import open as stores
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.ledger.events import now_micros
from dpstream.state.store import CHANGED, READING, Store

MAX_FILES = 1 << 20
#: What the system says of a link that leads to nothing, or in a circle.
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


class SourceFile(NamedTuple):
    """One file of the input.

    Its partition, its name below the pattern's fixed folder, its path, its size in bytes, and when
    its content and its status were changed (the second cannot be set back).
    """

    partition: int
    name: str
    path: str
    size: int
    changed: tuple[int, int]


def manifest(job: Job, left_out: Callable[[str], bool] | None = None) -> tuple[SourceFile, ...]:
    """Return the source's files, sorted by name (code points of the POSIX form).

    Args:
        left_out: returns whether the file of a name is not opened, whatever its state is; if it is
            given, no file need be left.

    Raises:
        UsageError: no file, too many, something that is none, or files inside the sink's folder.
        RunError: the operating system does not tell what a name is of.
    """
    pattern = job.source.path
    # The folder above the first wildcard of an absolute pattern.
    fixed = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part) and glob.escape(unescaped(part)) != part:
            break
        fixed.append(unescaped(part))
    root = str(Path(*fixed))
    folders = "**" in Path(pattern).parts
    with file_errors("table.path", "has a folder that cannot be listed"):
        names = {path: _name(path, root) for path in matching(pattern)}
    looked_at = (p for p, name in names.items() if left_out is None or not left_out(name))
    statuses = {path: _status(path, folders) for path in looked_at}
    paths = {path: status for path, status in statuses.items() if status is not None}
    if not paths and left_out is None:
        raise no_file(pattern)
    if len(paths) > MAX_FILES:
        raise UsageError("table.path", f"matches more than {MAX_FILES} files", "narrow it")
    if job.sink.folder is not None and _lies_in(job.sink.folder, paths):
        raise UsageError(
            "sink.path", "holds files of the source", "write releases to a folder of their own"
        )
    named = sorted((names[path], path) for path in paths)
    return tuple(
        SourceFile(i, name, path, paths[path].st_size, times_of(paths[path]))
        for i, (name, path) in enumerate(named)
    )


def times_of(status: os.stat_result) -> tuple[int, int]:
    """Return when a file's content and its status were changed, in nanoseconds."""
    return status.st_mtime_ns, status.st_ctime_ns


def _name(path: str, root: str) -> str:
    """A path below the root, in one spelling."""
    below = path.removeprefix(f"{root}/")
    if below != path and os.sep == "/" and os.path.normpath(below) == below:
        return below
    return Path(os.path.relpath(path, root)).as_posix()


def _lies_in(folder: Path, paths: Iterable[str]) -> bool:
    """Whether some path is below a folder, wherever links lead; each parent is looked at once."""
    inside, parents = os.path.realpath(folder), set[str]()
    for path in paths:
        parents.add(os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path))
    real = (os.path.realpath(parent) for parent in parents)
    return any(os.path.commonpath([inside, parent]) == inside for parent in real)


def _status(path: str, folders: bool) -> os.stat_result | None:
    """A file's status; what is none would be left out in silence, and is refused.

    Args:
        folders: the pattern looks into any folders (``**``) and so matches the folders
            themselves: they are passed over.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise file_error("table.path", "cannot be read", error) from None
        what = "a link that leads to no file"
    else:
        if stat.S_ISREG(status.st_mode):
            return status
        if folders and stat.S_ISDIR(status.st_mode):
            return None
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
    raise UsageError(
        "table.path", f"matches {what}", "take it away, or write a pattern that matches files only"
    )


def fingerprint_parts(job: Job) -> list[tuple[str, int, str]]:
    """Return (name, bytes, BLAKE2b-128 hex of the content) of every file, in manifest order.

    The state keys this before it keeps it: an unkeyed digest of private data is no secret.

    Raises:
        RunError: a file cannot be read.
    """
    return [fingerprint_of(file) for file in manifest(job)]


def fingerprint_of(file: SourceFile) -> tuple[str, int, str]:
    """Return ``fingerprint_parts`` of one file.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(file.path, "rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
            return file.name, stream.tell(), digest.hexdigest()
    except OSError as error:
        raise unreadable(file.partition, error) from None


def identity_part(name: str, size: int, digest: str) -> bytes:
    """Return a fingerprint as a part of the input's identity."""
    return f"{name}\0{size}\0{digest}".encode()


def stamps(job: Job) -> list[tuple[str, int, tuple[int, int]]]:
    """Return (name, bytes, times of change) of every file: cheap, to notice a change while it is
    read.
    """
    return [(file.name, file.size, file.changed) for file in manifest(job)]


def file_in_words(file: SourceFile) -> str:
    """Return a file by its name, which is public."""
    return f"file {file.name!r}"


class InputWatch:
    """Compares the files of a run with those at its begin; pickles, for workers.

    Args:
        files: those of the input, as they were before their identity was computed.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)
        self._run: Run | None = None
        self._digests: tuple[str, ...] | None = None

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files, as they were when they were last compared."""
        return self._files

    def begin(self, run: Run, digests: tuple[str, ...] | None = None) -> "InputWatch":
        """Return the watch for a run whose identity is committed, before it reads a row.

        Args:
            digests: keyed digest of each file; ``None``: the store's identity is that of all.

        Raises:
            RunError: a file has changed while its identity was computed: nothing was read yet.
        """
        self._run, self._digests = run, digests
        if self._files:
            run.open().note_input(READING)
            if self._now() != self._files:
                raise RunError(
                    "table.path",
                    "a file changed while the run began",
                    "run it again once the files are complete",
                )
        return self

    def check(self) -> None:
        """Refuse to deliver what changed files may have led to.

        Raises:
            PolicyError: a file has changed; the store keeps that verdict.
            RunError: a file is gone or cannot be read: nothing is decided.
        """
        now = self._now()
        if self._run is None or now == self._files:
            return
        store = self._run.open()
        refuse(store)
        if not self._same(now):
            store.note_input(CHANGED)
            refuse(store)
        self._files = now

    def _now(self) -> tuple[SourceFile, ...]:
        return tuple(map(_with_current_status, self._files))

    def _same(self, now: Sequence[SourceFile]) -> bool:
        """Whether the contents are the committed ones."""
        if self._run is None or any(file.size < 0 for file in now):
            return False
        parts = [identity_part(*fingerprint_of(file)) for file in now]
        with self._run.keys.ring() as ring:
            if self._digests is None:
                committed = self._run.open().identity.source_fingerprint
                return ring.source_fingerprint(parts) == committed
            return tuple(ring.source_fingerprint([part]) for part in parts) == self._digests

    def end(self) -> None:
        """Run ``check`` after the last row was read, and record the time in the store."""
        self.check()
        if self._run is not None and self._files:
            self._run.open().note_input(second_text(now_micros()))


class CompareInput(beam.PTransform):  # type: ignore[misc]
    """Passes each release on after the input was compared, for pipelines with sinks of their
    own.
    """

    def __init__(self, watch: InputWatch) -> None:
        super().__init__()
        self._watch = watch

    def expand(self, releases: Any) -> Any:
        """Return one ParDo."""
        return releases | beam.ParDo(_Compare(self._watch)).with_output_types(pa.RecordBatch)


class _Compare(beam.DoFn):
    def __init__(self, watch: InputWatch) -> None:
        self._watch = watch

    @guarded("source")
    def process(self, element: pa.RecordBatch) -> list[pa.RecordBatch]:
        """One release; its rows were read before."""
        self._watch.check()
        return [element]


def _with_current_status(file: SourceFile) -> SourceFile:
    """A file as it is now; its size is -1 where it is no file any more."""
    try:
        status = os.stat(file.path)
    except FileNotFoundError:
        raise RunError(
            "table.path",
            f"file {file.partition} of the manifest is gone while the run reads",
            "bring it back as it was, and run again",
        ) from None
    except OSError as error:
        raise file_error("table.path", "cannot be read", error) from None
    if status.st_size == file.size and times_of(status) == file.changed:
        return file
    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return file._replace(size=size, changed=times_of(status))


def refuse(store: Store) -> None:
    """Refuse a store whose input has changed.

    Raises:
        PolicyError: it has.
    """
    if store.input_changed:
        raise PolicyError(
            "table.path",
            "a file changed while a run read it, so this store's noise would belong to two inputs;"
            " nothing that was read after the change is published",
            NEW_RUN,
        )


def refuse_changed(job: Job) -> None:
    """Run ``refuse`` of a job's store, if there is one that can be opened.

    Raises:
        PolicyError: its input has changed.
    """
    url = job.state.store or ""
    if not stores.exists(url):
        return
    try:
        store = stores.backend(url).open(job.plan)
    except DpstreamError:
        return  # no store, or one that another process is making: `begin` waits, or says so
    try:
        refuse(store)
    finally:
        store.close()
