"""Closed files of a growing folder: how files are closed, and the newly closed ones.

It is the source without its pipeline.  There are two ways to know.

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
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import READ_SUFFIXES
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.connectors.folder.store import (
    MARKERS,
    Folder,
    ListedFile,
    Place,
    is_hidden,
    is_name,
    of_the_name,
    place,
)
from dpstream.pipelines.connectors.unbounded import wall_micros
from dpstream.pipelines.formats.lines import read_jsonl
from dpstream.pipelines.formats.rows import Part, Reason, Refused, refuse
from dpstream.pipelines.project.text import instant_micros
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once

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

    def more(self, entries: Iterable[Entry]) -> "SeenFiles":
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
            seen = seen.more([(at, digest)])
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
            seen = seen.more(entry for entry, _ in chunk)
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
