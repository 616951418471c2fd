"""The files of a bounded source: in one order, with one identity, whatever machine lists them.

A file's partition is its index in the manifest; a row's offset is its number in the file.
"""

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.rows import unreadable
from dpstream.pipelines.jobs.job import Job
from dpstream.state.disk_errors import file_error

MAX_FILES = 1 << 20
#: What the system says of a link that leads to nothing, or in a circle.
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


class SourceFile(NamedTuple):
    """One file: its partition, its name below the pattern's fixed folder, its path, its size in
    bytes, and when its content and its status were changed (the second cannot be set back)."""

    partition: int
    name: str
    path: str
    size: int
    changed: tuple[int, int]


def manifest(job: Job) -> tuple[SourceFile, ...]:
    """The source's files, sorted by name (code points of the POSIX form).

    Raises:
        UsageError: no file, too many, something that is none, or files inside the sink's folder.
        RunError: the operating system does not tell what a name is of.
    """
    pattern = job.source.path
    root = _fixed_folder(pattern)
    folders = "**" in Path(pattern).parts
    statuses = {path: _status(path, folders) for path in glob.glob(pattern, recursive=True)}
    paths = {path: status for path, status in statuses.items() if status is not None}
    if not paths:
        raise UsageError(
            "table.path",
            f"matches no file: {_unescaped(pattern)}",
            "correct the path or the pattern",
        )
    if len(paths) > MAX_FILES:
        raise UsageError("table.path", f"matches more than {MAX_FILES} files", "narrow it")
    if job.sink.folder is not None and _lies_in(job.sink.folder, paths):
        raise UsageError(
            "sink.path", "holds files of the source", "write releases to a folder of their own"
        )
    named = sorted((_name(path, root), path) for path in paths)
    return tuple(
        SourceFile(i, name, path, paths[path].st_size, times_of(paths[path]))
        for i, (name, path) in enumerate(named)
    )


def times_of(status: os.stat_result) -> tuple[int, int]:
    """When a file's content and its status were changed, in nanoseconds."""
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
    """(name, bytes, BLAKE2b-128 hex of the content) of every file, in manifest order.

    The state keys this before it keeps it: an unkeyed digest of private data is no secret.

    Raises:
        RunError: a file cannot be read.
    """
    return [fingerprint_of(file) for file in manifest(job)]


def fingerprint_of(file: SourceFile) -> tuple[str, int, str]:
    """``fingerprint_parts`` of one file.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(file.path, "rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
            return file.name, stream.tell(), digest.hexdigest()
    except OSError:
        raise unreadable(file.partition) from None


def identity_part(name: str, size: int, digest: str) -> bytes:
    """A fingerprint as a part of the input's identity."""
    return f"{name}\0{size}\0{digest}".encode()


def stamps(job: Job) -> list[tuple[str, int, tuple[int, int]]]:
    """(name, bytes, times of change) of every file: cheap, to notice a change while it is read."""
    return [(file.name, file.size, file.changed) for file in manifest(job)]


def named(file: SourceFile) -> str:
    """A file in words, without its name, which may be somebody's."""
    return f"file {file.partition} of the manifest"


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard of an absolute pattern."""
    fixed = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part) and glob.escape(_unescaped(part)) != part:
            break
        fixed.append(_unescaped(part))
    return str(Path(*fixed))


def _unescaped(part: str) -> str:
    for char in "*?[":
        part = part.replace(f"[{char}]", char)
    return part
