"""Close files of a folder that grows: write the next marker, whole or not at all.

To be called by one producer at a time after its files are complete.  Files are closed by this
call: their rows get its instant as stamp.  Call it often, also without files: until the next
marker nothing is released.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.folder.store import MARKERS, Folder, is_hidden, is_name
from dpstream.pipelines.connectors.folder.watch import Markers, nothing_seen
from dpstream.pipelines.connectors.unbounded import wall_micros
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once


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
    """Files that no marker names yet, sorted; hidden ones do not count.

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
    """An instant with microseconds, in UTC."""
    seconds, rest = divmod(micros, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:06d}Z"


def _put(folder: Folder, name: str, data: bytes) -> None:
    """Make a file, whole or not at all; an object store writes no others."""
    if folder.local:
        put_once(Path(folder.path(name)), data)
        return
    with folder.open().open_output_stream(folder.path(name)) as stream:
        stream.write(data)
