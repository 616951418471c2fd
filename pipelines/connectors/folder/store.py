"""A folder of files on a disk or in an object store (``gs://``, ``s3://``, ``abfs://``).

Through `pyarrow.fs`, which is in Arrow's wheel and reads ranges of objects natively; Beam's own
file systems would need an extra package for each store.  A local folder needs neither.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow.fs as pafs
from apache_beam.utils import retry

from dpstream.accounting.errors import RunError, UsageError

#: How long a store may be away before the job fails, and the pauses between two tries.
PATIENCE_SECONDS = 600
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 15.0
#: Faults of one name, which trying again does not mend.
_OF_THE_NAME = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_ERRNOS = {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO}


class Found(NamedTuple):
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
        """Whether it is on a disk of this machine."""
        return self.url.startswith("file://")

    def open(self) -> Any:
        """The file system; made where it is used."""
        if self._system is None:
            try:
                self._system, base = pafs.FileSystem.from_uri(self.url)
            except (OSError, ValueError, NotImplementedError):
                base = None
            if base is None:
                raise UsageError(
                    "source.path",
                    "is neither a folder nor a URL of a known store",
                    "write a path, or a URL such as gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
                )
            self._base = base.rstrip("/")
        return self._system

    def path(self, name: str) -> str:
        """A name's path in the file system."""
        self.open()
        return f"{self._base}/{name}" if name else self._base

    def list(self, below: str = "", recursive: bool = True) -> Iterator[Found]:
        """Files below a folder of it, in no order; none if it is not there.

        Raises:
            OSError: the store cannot be read.
        """
        system = self.open()
        selector = pafs.FileSelector(self.path(below), recursive=recursive, allow_not_found=True)
        prefix = len(self._base) + 1
        for info in system.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield Found(info.path[prefix:], int(info.size or 0), (info.mtime_ns or 0) // 1000)

    def folders(self, below: str) -> Iterator[str]:
        """Names of the folders in a folder of it."""
        selector = pafs.FileSelector(self.path(below), allow_not_found=True)
        prefix = len(self._base) + 1
        for info in self.open().get_file_info(selector):
            if info.type == pafs.FileType.Directory:
                yield info.path[prefix:]

    def is_there(self) -> bool:
        """Whether the folder itself is there (an object store has prefixes only)."""
        return not self.local or os.path.isdir(self.path(""))

    def info(self, name: str) -> Found | None:
        """A file's size and time of change; ``None`` if there is no such file."""
        info = self.open().get_file_info(self.path(name))
        if info.type != pafs.FileType.File:
            return None
        return Found(name, int(info.size or 0), (info.mtime_ns or 0) // 1000)

    def stream(self, name: str) -> BinaryIO:
        """A file's bytes: to be read from any place, to be closed.

        Raises:
            OSError: with its number; see `of_the_name`.
        """
        if self.local:
            return open(self.path(name), "rb")
        return cast(BinaryIO, _Remote(self.open(), self.path(name)))


class _Remote:
    """An object as a file, whose faults are the system's: Arrow's have no number, and a damaged
    file's have none either."""

    def __init__(self, system: Any, path: str) -> None:
        self._file = _numbered(lambda: system.open_input_file(path))
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes."""
        return cast(bytes, _numbered(lambda: self._file.read(None if size < 0 else size)))

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        return cast(int, _numbered(lambda: self._file.seek(offset, whence)))

    def tell(self) -> int:
        """The place."""
        return cast(int, self._file.tell())

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has places."""
        return True

    def writable(self) -> bool:
        """It cannot be written."""
        return False

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Let go of it."""
        self.closed = True
        self._file.close()

    def __enter__(self) -> "_Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbered(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        if error.errno is not None:
            raise
    raise OSError(errno.EIO, "the store failed")


def of_the_name(error: OSError) -> bool:
    """Whether a fault is of this one file's name, and not of the store."""
    return isinstance(error, _OF_THE_NAME) or error.errno in _ERRNOS


def patiently(call: Callable[[], Any]) -> Any:
    """What ``call`` gives; a store that is away is asked again for `PATIENCE_SECONDS`.

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
    raise away()


def away() -> RunError:
    """The store has been away for too long."""
    return RunError(
        "source.path",
        f"cannot be read for {PATIENCE_SECONDS // 60} minutes",
        "check the store, the network and permissions, and run again",
    )


def normal_url(path: str) -> str:
    """One spelling of a folder's URL: its identity.

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
