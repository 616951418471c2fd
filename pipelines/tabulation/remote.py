"""Files of an execution in a store (``gs://``): public ones are fetched, tables are put there.

Workers of a service share no disk.  Each fetches the public files once; a piece of the records is
read as a range of its object (`private.pieces`); a table is put as an object, whole or not at all.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.ask.draft import File, write_file
from dpstream.pipelines.ask.folder import Written
from dpstream.pipelines.tabulation.config import CONFIG
from dpstream.pipelines.tabulation.private import LAYOUTS
from dpstream.pipelines.tabulation.public_files import GEOGRAPHY, PARAMETER_FILES, TOTALS
from dpstream.state.disk_errors import file_error, file_errors

#: Enough for a header.
_HEAD_BYTES = 1 << 16


def is_remote(place: str) -> bool:
    """Return whether a place is a URL."""
    return "://" in place


@contextlib.contextmanager
def fetched(
    parameters: str, data: str, program: str, records: bool = False
) -> Iterator[tuple[Path, Path]]:
    """Fetch the folders of parameters and data: all public files.

    Args:
        records: whether to fetch the header of the records, too.

    Raises:
        UsageError: a file is missing.
        RunError: the store cannot be read.
    """
    if not is_remote(parameters) and not is_remote(data):
        yield Path(parameters), Path(data)
        return
    with tempfile.TemporaryDirectory(prefix="dpstream-tables-") as folder:
        here = Path(folder, "parameters"), Path(folder, "data")
        for name in (CONFIG, *PARAMETER_FILES):
            _fetch(parameters, name, here[0])
        _fetch(data, GEOGRAPHY, here[1])
        if records:
            name = LAYOUTS[program].file
            head = _read(data, name, _HEAD_BYTES)
            (here[1] / name).write_bytes(head[: head.find(b"\n") + 1] or head)
        if program == "h":
            for name in _totals(data):
                _fetch(data, name, here[1])
        yield here


def _totals(data: str) -> list[str]:
    """The file, or the files of the folder, of published totals."""
    from dpstream.pipelines.connectors.folder.store import Folder

    folder = Folder(data)
    try:
        if folder.info(TOTALS) is not None:
            return [TOTALS]
        inside = [entry.name for entry in folder.list(TOTALS, recursive=False)]
    except OSError as error:
        raise _unreadable(TOTALS, error) from None
    return sorted(name for name in inside if name.endswith(".csv")) or [TOTALS]


#: Name, bytes and time of change of an object.
Stamp = tuple[str, int, int]


def stamp_of(data: str, program: str) -> Stamp:
    """Name, bytes and time of change of the records: what tells an object from a later one.

    Raises:
        UsageError: they are missing.
        RunError: the store cannot be read.
    """
    from dpstream.pipelines.connectors.folder.store import Folder

    name = LAYOUTS[program].file
    try:
        entry = Folder(data).info(name)
    except OSError as error:
        raise _unreadable(name, error) from None
    if entry is None:
        raise UsageError(name, "is missing", "put it into its folder")
    return name, entry.size, entry.changed


def check_still(data: str, program: str, stamp: Stamp) -> None:
    """Refuse records that are no longer those of a stamp.

    Raises:
        PolicyError: they changed.
        RunError: the store cannot be read.
    """
    if stamp_of(data, program) != stamp:
        raise PolicyError(
            stamp[0], "changed while it was read", "make another output: a new charge"
        )


def put(folder: str, file: File) -> Written:
    """Write a file of a draft, or an object; who writes it again writes the same.

    Raises:
        RunError: the store cannot be written.
    """
    if not is_remote(folder):
        write_file(Path(folder), file)
        return _written(file)
    from dpstream.pipelines.connectors.folder.store import Folder

    place = Folder(folder)
    system, path = place.open(), place.path(file.name)
    with file_errors("out_folder", "cannot be written"):
        if place.local:
            system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(path) as out:
            out.write(file.content)
    return _written(file)


def get(folder: str, name: str) -> bytes | None:
    """Return an object, ``None``: there is none.

    Raises:
        RunError: the store cannot be read.
    """
    from dpstream.pipelines.connectors.folder.store import Folder

    try:
        if Folder(folder).info(name) is None:
            return None
        return _read(folder, name)
    except OSError as error:
        raise _unreadable(name, error) from None


def _written(file: File) -> Written:
    digest = hashlib.blake2b(file.content, digest_size=16).hexdigest()
    return Written(len(file.content), digest)


def _fetch(folder: str, name: str, target: Path) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).write_bytes(_read(folder, name))


def _read(folder: str, name: str, most: int = -1) -> bytes:
    from dpstream.pipelines.connectors.folder.store import Folder

    try:
        with Folder(folder).stream(name) as file:
            return file.read(most)
    except FileNotFoundError:
        raise UsageError(name, "is missing", "put it into its folder") from None
    except OSError as error:
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: OSError) -> RunError:
    return file_error(name, "cannot be read", error)
