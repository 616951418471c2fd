"""A folder on disk or in an object store (``gs://``, ``s3://``, ``abfs://``); its closed files.

Through `pyarrow.fs`, which is in Arrow's wheel and reads ranges of objects natively; Beam's own
file systems would need an extra package for each store.  A local folder needs neither.

Where a row of a file stands is a function of the file's name and the row alone (`place`).  Neither
the order of a listing nor another file can move it, so a file that is read again gives the same
positions.  Partition (31 bits) and base (62 bits) come from BLAKE2b-128 of the name; offset = base
+ row.  Two records of one unit share a position, and count as one, with a chance below
files^2 * rows * 2^-93 (a million files of a million rows: 2^-33); a position names a record of its
unit, so records of two units never do.  The digest is not keyed: it hides nothing.

**Closed files** of a folder that grows are known in two ways.

**Markers**: objects ``_closed/<RFC 3339 instant>.jsonl`` (or, so that a listing stays short,
``_closed/<date>/...``), written whole by the producer in the order of their instants.  A marker
names the files that were closed by its instant, a JSON object a line::

    {"file": "a/1.parquet", "closed": "2024-01-01T00:00:05Z", "rows": 1200}

and says that every file closed before its instant has now been named.  An empty one says that
nothing was closed.

**Settled**: a file is closed when it has lain unchanged for a while.

The files that were read are stored as an instant, up to which every entry was read, and some
hundred (instant, digest of the name) after it: entries that are listed a little late are not lost,
and a folder of a million files needs no more.

**Closing files** (`close_files`) writes the next marker, whole or not at all.  It is to be called
by one producer at a time after its files are complete.  Files are closed by this call: their rows
get its instant as stamp.  Call it often, also without files: until the next marker nothing is
released.
"""

import bisect
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import pyarrow.fs as pafs
from apache_beam.utils import retry
from typing_extensions import override

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.places import READ_SUFFIXES
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.connectors.inputs import wall_micros
from dpstream.pipelines.formats.rows import Part, Reason, Refused, refuse
from dpstream.pipelines.formats.texts import read_jsonl
from dpstream.pipelines.project.text import instant_micros
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once

#: How long a store may be away before the job fails, and the pauses between two tries.
PATIENCE_SECONDS = 600
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 15.0
#: Faults of one name, which trying again does not mend.
_OF_THE_NAME = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_ERRNOS = {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO}
#: Marker objects lie there; one names the files that were closed before its instant.
MARKERS = "_closed"
MAX_NAME_BYTES = 1024
#: Rows that a file is taken to have at most, where a position is looked up.
_MAX_ROWS = 1 << 48


class ListedFile(NamedTuple):
    """A file of a listing: name below the folder, bytes, time of change in micros."""

    name: str
    size: int
    changed: int


class Folder:
    """A folder by its URL or local path.

    Args:
        path: absolute local path, ``file://`` URL, or a URL that `pyarrow.fs` knows.

    Raises:
        UsageError: no such kind of URL.
    """

    def __init__(self, path: str) -> None:
        self.url = normal_url(path)
        self._system: Any = None
        self._base = ""
        self.open()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url, self._system, self._base = state["url"], None, ""

    @property
    def local(self) -> bool:
        """Return whether it is on a disk of this machine."""
        return self.url.startswith("file://")

    def open(self) -> Any:
        """Return the file system; made where it is used."""
        if self._system is None:
            try:
                self._system, base = pafs.FileSystem.from_uri(self.url)
            except (OSError, ValueError, NotImplementedError):
                base = None
            if base is None:
                raise UsageError(
                    "table.path",
                    "is neither a folder nor a URL of a known store",
                    "write a path, or a URL such as gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
                )
            self._base = base.rstrip("/")
        return self._system

    def path(self, name: str) -> str:
        """Return a name's path in the file system."""
        self.open()
        return f"{self._base}/{name}" if name else self._base

    def list(self, below: str = "", recursive: bool = True) -> Iterator[ListedFile]:
        """Yield the files below a folder of it, in no order; none if it does not exist.

        Raises:
            OSError: the store cannot be read.
        """
        for name, info in self._entries(below, pafs.FileType.File, recursive):
            yield ListedFile(name, int(info.size or 0), (info.mtime_ns or 0) // 1000)

    def folders(self, below: str) -> Iterator[str]:
        """Yield the names of the folders in a folder of it."""
        return (name for name, _ in self._entries(below, pafs.FileType.Directory, False))

    def _entries(self, below: str, kind: Any, recursive: bool) -> Iterator[tuple[str, Any]]:
        selector = pafs.FileSelector(self.path(below), recursive=recursive, allow_not_found=True)
        for info in self.open().get_file_info(selector):
            if info.type == kind:
                yield info.path[len(self._base) + 1 :], info

    def is_there(self) -> bool:
        """Return whether the folder itself is there (an object store has prefixes only)."""
        return not self.local or os.path.isdir(self.path(""))

    def info(self, name: str) -> ListedFile | None:
        """Return a file's size and time of change; ``None`` if there is no such file."""
        info = self.open().get_file_info(self.path(name))
        if info.type != pafs.FileType.File:
            return None
        return ListedFile(name, int(info.size or 0), (info.mtime_ns or 0) // 1000)

    def stream(self, name: str) -> BinaryIO:
        """Return a file's bytes: to be read from any place, to be closed.

        Raises:
            OSError: with its number; see `of_the_name`.
        """
        if self.local:
            return open(self.path(name), "rb")
        return cast(BinaryIO, _Remote(self.open(), self.path(name)))


class _Remote(io.RawIOBase):
    """An object as a file, whose faults are the system's: Arrow's have no number, and a damaged
    file's have none either."""

    def __init__(self, system: Any, path: str) -> None:
        super().__init__()
        self._file = _numbered(lambda: system.open_input_file(path))

    @override
    def read(self, size: int = -1) -> bytes:
        return cast(bytes, _numbered(lambda: self._file.read(None if size < 0 else size)))

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        return cast(int, _numbered(lambda: self._file.seek(offset, whence)))

    @override
    def tell(self) -> int:
        return cast(int, self._file.tell())

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()


def _numbered(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        if error.errno is not None:
            raise
    raise OSError(errno.EIO, "the store failed")


def of_the_name(error: OSError) -> bool:
    """Return whether a fault is of this one file's name, and not of the store."""
    return isinstance(error, _OF_THE_NAME) or error.errno in _ERRNOS


def patiently(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, with retries for `PATIENCE_SECONDS` if the store is away.

    Raises:
        OSError: a fault of the name.
        RunError: the store stayed away.
    """
    again = retry.with_exponential_backoff(
        num_retries=10_000,
        initial_delay_secs=FIRST_PAUSE_SECONDS,
        max_delay_secs=LAST_PAUSE_SECONDS,
        stop_after_secs=PATIENCE_SECONDS,
        retry_filter=lambda error: isinstance(error, OSError) and not of_the_name(error),
        logger=lambda *_: None,  # its texts quote paths and errors
    )
    try:
        return again(call)()
    except OSError as error:
        if of_the_name(error):
            raise
    raise away_error()


def away_error() -> RunError:
    """Return the error for a store that has been away for too long."""
    return RunError(
        "table.path",
        f"cannot be read for {PATIENCE_SECONDS // 60} minutes",
        "check the store, the network and permissions, and run again",
    )


def normal_url(path: str) -> str:
    """Return one spelling of a folder's URL: its identity.

    Local paths are resolved; slashes at the end and double ones go.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        return Path(path).resolve().as_uri()
    if scheme.lower() == "file":
        from urllib.parse import unquote

        return Path(unquote(rest)).resolve().as_uri()
    place, question, options = rest.partition("?")
    joined = "/".join(part for part in place.split("/") if part)
    return f"{scheme.lower()}://{joined}{question}{options}"


class Place(NamedTuple):
    """A file's partition and the offset of its row 0."""

    partition: int
    base: int


def place(name: str) -> Place:
    """Return the position of the first row of the file ``name`` (relative to the folder, with
    ``/``).
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    number = int.from_bytes(digest, "big")
    return Place(number >> 97, (number >> 35) & ((1 << 62) - 1))


def is_name(name: str) -> bool:
    """Return whether a text is the one way to write a file's name below the folder.

    Not absolute, no ``..``, ``.`` or empty component, none that begins with ``_closed``'s own
    folder, no NUL or line break, at most `MAX_NAME_BYTES`.
    """
    parts = name.split("/")
    return (
        not {"", ".", ".."} & set(parts)
        and parts[0] != MARKERS
        and not {"\0", "\n", "\r", "\\"} & set(name)
        and len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    )


def is_hidden(name: str) -> bool:
    """Return whether a listing passes over a name: a part begins with ``_`` or ``.``."""
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def find(names: Iterable[str], partition: int, offset: int) -> list[tuple[str, int]]:
    """Return the files and rows that a position can stand for: (name, row)."""
    matches = []
    for name in names:
        at = place(name)
        if at.partition == partition and 0 <= offset - at.base < _MAX_ROWS:
            matches.append((name, offset - at.base))
    return matches


#: Entries above the floor.
LOOK_BACK = 512
#: What file clocks may differ from the workers', and how coarse their times may be.
MARGIN = 2_000_000
#: Files that leave together.
FILES_AT_ONCE = 1_000
Entry = tuple[int, int]
#: (name, closed in micros, rows or -1, bytes or -1)
ClosedFile = tuple[str, int, int, int]


class SeenFiles(NamedTuple):
    """The entries that are done: all up to ``floor``, and ``recent`` (ascending)."""

    floor: Entry
    recent: tuple[Entry, ...] = ()

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is done."""
        at = bisect.bisect_left(self.recent, entry)
        return entry <= self.floor or self.recent[at : at + 1] == (entry,)

    def with_entries(self, entries: Iterable[Entry]) -> "SeenFiles":
        """Return the same with new entries done."""
        merged = sorted({*self.recent, *entries})
        low, high = merged[:-LOOK_BACK], tuple(merged[-LOOK_BACK:])
        return SeenFiles(max([self.floor, *low[-1:]]), high)


class Step(NamedTuple):
    """Files and refused positions that are released together.

    Attributes:
        seen: what is done after it.
        files: newly closed.
        refused: positions that are no files, each with its place.
        upto: no row that is stamped before this instant (micros) will come, ``None``: unknown.
    """

    seen: SeenFiles
    files: list[ClosedFile]
    refused: list[tuple[Place, Refused]]
    upto: int | None


def nothing_seen(begin: int, markers: bool) -> SeenFiles:
    """Return the state before anything is read.

    Files that were closed before ``begin`` are not needed; a marker of that instant names no
    others.
    """
    return SeenFiles((begin, 1 << 62) if markers and begin else (begin, -1))


class Markers:
    """The markers of a folder.

    Args:
        folder: where.
        begin: files that were closed before it are passed over (0: none).
        behind: how much earlier (micros) than its closing a row of a file may be stamped.
    """

    def __init__(self, folder: Folder, begin: int = 0, behind: int = 0) -> None:
        self.folder, self.begin, self.behind = folder, begin, behind

    def steps(self, seen: SeenFiles, now: int) -> Iterator[Step]:
        """Yield the new markers in the order of their instants.

        Args:
            seen: what is done.
            now: markers of later instants are left for later: one in the far future would make
                all that follows late.

        Raises:
            OSError: the store cannot be read.
        """
        entries = sorted((at, place(name).base, name) for at, name in self.instants(seen))
        for at, digest, name in entries:
            if at > now or seen.has((at, digest)):
                continue
            files, refused = self._read(name, at)
            seen = seen.with_entries([(at, digest)])
            yield Step(seen, files, refused, at - self.behind)

    def instants(self, seen: SeenFiles) -> Iterator[tuple[int, str]]:
        """Yield (instant, name) of markers above the floor's day."""
        for entry in self.folder.list(MARKERS, recursive=False):
            yield from _instant(entry.name)
        for day in self.folder.folders(MARKERS):
            begins = _instant(f"{MARKERS}/{day.rpartition('/')[2]}T00:00:00Z.jsonl")
            if any(at + 86_400_000_000 > seen.floor[0] for at, _ in begins):
                for entry in self.folder.list(day, recursive=False):
                    yield from _instant(entry.name)

    def _read(self, name: str, before: int) -> tuple[list[ClosedFile], list[tuple[Place, Refused]]]:
        """Files that a marker names, none closed after its instant; lines that name none.

        A file closed at the instant itself is of the next trigger time, if it is one: the
        watermark of the marker does not pass it.
        """
        files: dict[str, ClosedFile] = {}
        refused: list[tuple[Place, Refused]] = []
        where = place(name)
        try:
            with self.folder.stream(name) as stream:
                parts: list[Part] = list(read_jsonl(stream, ("file", "closed", "rows")))
        except OSError as error:
            if not of_the_name(error):
                raise
            return [], [(where, refuse(0, Reason.UNREADABLE_FILE))]
        for part in parts:
            if isinstance(part, Refused):
                refused.append((where, part))
                continue
            closed, valid = instant(part.batch.column("closed"))
            lines = zip(part.batch.to_pylist(), closed.tolist(), valid.tolist(), strict=True)
            for row, (line, at, good) in enumerate(lines, part.offset):
                file, rows = line["file"], rows_of_text(line["rows"])
                reason = _fault(file, good and at <= before, rows, files)
                if reason is not None:
                    refused.append((where, refuse(row, reason)))
                elif at >= self.begin:
                    files[file] = (file, at, -1 if rows is None else rows, -1)
        return list(files.values()), refused


def _fault(
    name: str | None, timed: bool, rows: int | None, closed_files: dict[str, ClosedFile]
) -> Reason | None:
    if name is None or not timed or rows == -1:
        return Reason.MALFORMED
    if not is_name(name):
        return Reason.BAD_NAME
    return Reason.LISTED_TWICE if name in closed_files else None


def rows_of_text(text: str | None) -> int | None:
    """Return the count of rows in a text: ``None`` without a text, -1 if it is no count."""
    if text is None:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else -1


def _instant(name: str) -> Iterator[tuple[int, str]]:
    """A marker's instant, if the name is one."""
    stem = name.rpartition("/")[2].removesuffix(".jsonl")
    if name.endswith(".jsonl"):
        try:
            yield instant_micros("marker", stem), name
        except UsageError:
            return


class Settled:
    """The files of a folder that have lain unchanged for a while.

    Args:
        folder: where.
        suffix: of the names that count, before that of a compression; hidden ones do not.
        settle: micros.
    """

    def __init__(self, folder: Folder, suffix: str, settle: int) -> None:
        self.folder, self.settle = folder, settle
        packed = () if suffix == ".parquet" else READ_SUFFIXES
        self.suffixes = (suffix, *(suffix + more for more in packed))

    def steps(self, seen: SeenFiles, now: int) -> Iterator[Step]:
        """Yield the newly settled files in the order of their times of change.

        A file that changed after it was read is refused, not read again.

        Raises:
            OSError: the store cannot be read.
        """
        ready: list[tuple[Entry, ListedFile]] = []
        for file in self.folder.list():
            entry = (file.changed, place(file.name).base)
            if file.changed <= now - self.settle and not seen.has(entry) and self._counts(file):
                ready.append((entry, file))
        ready.sort(key=lambda each: each[0])
        before = {digest for _, digest in seen.recent}
        for start in range(0, len(ready), FILES_AT_ONCE):
            chunk = ready[start : start + FILES_AT_ONCE]
            seen = seen.with_entries(entry for entry, _ in chunk)
            again = [info.name for entry, info in chunk if entry[1] in before]
            yield Step(
                seen,
                [(f.name, f.changed, -1, f.size) for entry, f in chunk if entry[1] not in before],
                [(place(name), refuse(0, Reason.FILE_CHANGED)) for name in again],
                None,
            )
        yield Step(seen, [], [], now - self.settle - MARGIN)

    def _counts(self, file: ListedFile) -> bool:
        name = file.name
        return name.endswith(self.suffixes) and is_name(name) and not is_hidden(name)


def close_files(path: str | Path, files: Iterable[str] = (), at: int | None = None) -> str:
    """Write a marker that names files.

    Args:
        path: the folder or its URL.
        files: names below it, with ``/``.
        at: the marker's instant in micros (default: now); after that of the last marker.

    Returns:
        The marker's name below the folder.

    Raises:
        UsageError: a name that is none, or is no file; no later instant.
        RunError: the folder cannot be read or written.
    """
    folder, at, names = Folder(str(path)), wall_micros() if at is None else at, list(files)
    for name in names:
        if not is_name(name) or folder.info(name) is None:
            raise UsageError(
                "file",
                "is not one below the folder",
                "give its name relative to the folder, with /",
            )
    if any(closed >= at for closed, _ in Markers(folder).instants(nothing_seen(0, True))):
        raise UsageError("marker", "is not later than the last one", "check the clock")
    closed = rfc3339(at - 1)
    lines = b"".join(msgspec.json.encode({"file": n, "closed": closed}) + b"\n" for n in names)
    instant = rfc3339(at)
    marker = f"{MARKERS}/{instant[:10]}/{instant}.jsonl"
    with file_errors("folder", "cannot be written"):
        _put(folder, marker, lines)
    return marker


def new_files(path: str | Path) -> list[str]:
    """Return the files that no marker names yet, sorted; hidden ones do not count.

    Raises:
        UsageError, RunError: see `close_files`.
    """
    folder = Folder(str(path))
    with file_errors("folder", "cannot be read"):
        steps = Markers(folder).steps(nothing_seen(0, True), 1 << 62)
        named = {file[0] for step in steps for file in step.files}
        names = {file.name for file in folder.list()}
    return sorted(name for name in names - named if is_name(name) and not is_hidden(name))


def rfc3339(micros: int) -> str:
    """Return an instant with microseconds, in UTC."""
    seconds, rest = divmod(micros, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:06d}Z"


def _put(folder: Folder, name: str, data: bytes) -> None:
    """Make a file, whole or not at all; an object store writes no others."""
    if folder.local:
        put_once(Path(folder.path(name)), data)
        return
    with folder.open().open_output_stream(folder.path(name)) as stream:
        stream.write(data)
