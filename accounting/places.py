"""Paths in project files: they start from a folder, none is a URL, and none is private and public
at once.  A file's name says its kind, and whether it is compressed, so that no file is read for it.
"""

import contextlib
import errno
import fnmatch
import glob
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path, PurePath
from typing import Literal, get_args

from dpstream.accounting.errors import PolicyError, UsageError

#: One slash: a URL that was normalised as a path has lost the other.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
#: Kinds of files that are read, and of those that releases are written as.
FileKind = Literal["parquet", "csv", "jsonl", "json", "arrow", "orc"]
FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
#: Kinds that have a schema; the others are text.
COLUMNAR: tuple[FileKind, ...] = ("parquet", "arrow", "orc")
ReleaseKind = Literal["parquet", "csv", "jsonl"]
RELEASE_KINDS: tuple[ReleaseKind, ...] = get_args(ReleaseKind)
ENDINGS: dict[str, FileKind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".orc": "orc",
}
#: Names of compressed files end so; the first of them are those that are read.
READ_SUFFIXES = (".gz", ".bz2", ".zst", ".zstd", ".xz", ".zip")
_SUFFIXES = (
    *READ_SUFFIXES,
    ".gzip",
    ".bzip2",
    ".lzma",
    ".lz4",
    ".snappy",
    ".7z",
    ".rar",
    ".br",
)


def below(folder: Path, path: str, field: str) -> Path:
    """Return a path that is relative to a folder.

    Args:
        field: the public name of what gives it.

    Raises:
        UsageError: it is a URL; read as a path it would name a local file.  Or it has a NUL.
    """
    check_path(path, field)
    return folder / path


def check_path(path: str, field: str) -> None:
    """Refuse a text that is no local path, where only local files are read or written.

    Raises:
        UsageError: it is a URL, of which only the scheme is shown, because the rest may have a
            password; or it has a NUL character, which no path may have.
    """
    if "\0" in path:
        raise UsageError(field, "has a NUL character, which no path has", "remove it")
    scheme = _SCHEME.match(path)
    if scheme is not None:
        raise UsageError(
            field,
            f"is a URL ({scheme[1]}://...), and only paths of this machine are supported here",
            "copy the files to this machine or mount them, and name their path",
        )


def refuse_far(folder: Path, base: Path, field: str) -> None:
    """Refuse a folder outside of the project's folder whose parent does not exist.

    If the path is misspelt, or its disk is not mounted, the folders would be made on another disk,
    and the files in them would be missing later.

    Args:
        base: below this folder all folders are made as needed; elsewhere only the last folder of a
            path is made, and none in the root of the file system.
        field: the public name of the setting that gives the folder.

    Raises:
        UsageError: the parent folder does not exist, or is the root of the file system.
    """
    folder = Path(os.path.abspath(folder))
    above = folder.parent
    if folder.exists() or folder.is_relative_to(base):
        return
    if not above.exists() or above == above.parent:
        raise UsageError(
            field,
            "is in a folder that does not exist, outside of the project's folder",
            f"correct the path, or type `mkdir -p {shlex.quote(str(folder))}`",
        )


def matching(pattern: str) -> list[str]:
    """Return the paths that match a glob, as ``glob.glob(pattern, recursive=True)`` does.

    That function treats a folder that cannot be listed as empty, so that files of a table would be
    left out without an error.

    Raises:
        OSError: a folder cannot be listed.
    """
    return [path for path in _matching(pattern) if path]


def _matching(pattern: str) -> Iterator[str]:
    folder, name = os.path.split(pattern)
    if not glob.has_magic(pattern):
        if os.path.lexists(pattern) if name else os.path.isdir(folder):
            yield pattern
        return
    places = [folder]
    if glob.has_magic(folder):
        places = [place for place in _matching(folder) if os.path.isdir(place or os.curdir)]
    for place in places:
        if name == "**":
            names = ["", *_below(place)] if os.path.isdir(place or os.curdir) else []
        elif glob.has_magic(name):
            entries = (each for each in _entries(place) if name[0] == "." or each[0] != ".")
            names = fnmatch.filter(entries, name)
        else:  # of a path that ends with a slash, the folders alone
            there = os.path.lexists if name else os.path.isdir
            names = [name] if there(os.path.join(place, name)) else []
        yield from (os.path.join(place, each) for each in names)


def unescaped(pattern: str) -> str:
    """Return a pattern in which nothing is escaped (``glob.escape``)."""
    for char in "*?[":
        pattern = pattern.replace(f"[{char}]", char)
    return pattern


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder or os.curdir)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise


def _below(folder: str) -> Iterator[str]:
    """Yield all entries below a folder, without hidden ones."""
    for name in _entries(folder):
        if name[0] != ".":
            yield name
            yield from (os.path.join(name, each) for each in _below(os.path.join(folder, name)))


def matching_in(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a glob.

    Raises:
        OSError: a folder cannot be listed.
    """
    return [Path(path) for path in matching(os.path.join(glob.escape(str(folder)), pattern))]


def walked(folder: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what ``os.walk`` yields, but fail at a folder that cannot be listed.

    Raises:
        OSError: a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, NotADirectoryError):
            raise error

    yield from os.walk(folder, onerror=fail)


def files_at(pattern: str) -> set[tuple[int, int]]:
    """Return device and inode of every file of a path, of a glob, or below a folder.

    Two names of one file (links, hard links, a folder and a file in it) have them in common.

    Raises:
        OSError: a folder cannot be listed.
    """
    files = set[tuple[int, int]]()
    for path in matching(pattern):
        for folder, _, names in walked(path):
            files |= _identities(os.path.join(folder, name) for name in names)
        files |= _identities([path])
    return files


def _identities(paths: Iterable[str]) -> set[tuple[int, int]]:
    statuses = set[tuple[int, int]]()
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if not stat.S_ISDIR(status.st_mode):
                statuses.add((status.st_dev, status.st_ino))
    return statuses


def refuse_both(private: Mapping[str, Set[object]], public: Mapping[str, Set[object]]) -> None:
    """Refuse what is private under one name and public under another: rows of a public table are
    shown as they are.

    Args:
        private, public: what each field of the file reads, such as ``files_at``.

    Raises:
        PolicyError: a public one reads what a private one does.
    """
    for name, files in public.items():
        for owner, owned in private.items():
            if not files.isdisjoint(owned):
                raise PolicyError(
                    name,
                    f"is public, and reads what {owner} reads, which is private",
                    "name a public file, or make both private",
                )


def is_packed_name(name: str) -> bool:
    """Return whether a file's name is that of a compressed file."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def unpacked_name(name: str) -> str:
    """Return the name without its ending for compression."""
    return str(PurePath(name).with_suffix("")) if is_packed_name(name) else name


def file_kind(name: str) -> FileKind | None:
    """Return the kind of files by a name or pattern, perhaps compressed; ``None`` if unknown."""
    return ENDINGS.get(PurePath(unpacked_name(name)).suffix.lower())
