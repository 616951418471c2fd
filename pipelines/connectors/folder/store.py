"""A folder of files on a disk or in an object store (``gs://``, ``s3://``, ``abfs://``).

Through `pyarrow.fs`, which is in Arrow's wheel and reads ranges of objects natively; Beam's own
file systems would need an extra package for each store.  A local folder needs neither.

Where a row of a file stands is a function of the file's name and the row alone (`place`).  Neither
the order of a listing nor another file can move it, so a file that is read again gives the same
positions.  Partition (31 bits) and base (62 bits) come from BLAKE2b-128 of the name; offset = base
+ row.  Two records of one unit share a position, and count as one, with a chance below
files^2 * rows * 2^-93 (a million files of a million rows: 2^-33); a position names a record of its
unit, so records of two units never do.  The digest is not keyed: it hides nothing.
"""

import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow.fs as pafs
from apache_beam.utils import retry
from typing_extensions import override

from dpstream.accounting.errors import RunError, UsageError

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
