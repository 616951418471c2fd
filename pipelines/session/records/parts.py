"""The files of a table: parts that never change, and a manifest that lists those that count.

    manifest.json     the parts, by their digests; replaced atomically by each change
    part-*.parquet    some records: coordinates x0, x1, ..., whether usable, and keyed id
    dead_letter/      rows that were no records, or not usable: file, row, rule
    lock, readers     between processes

All of it is private (mode 0600 in a folder 0700).  A part is named by its digest, and is durable
before a manifest names it: a writer that is killed in between has changed nothing, and the next
writer removes its files.  A part that loses a record is written anew.  Readers keep the version
that they opened: parts that no manifest names are removed when no reader is open.

Records of a row group lie in the order of their initial budgets: almost every question compares
those, and rows of equal budget, one after the other, are decoded and compared as runs.  Row groups
keep the order in which records came, so that bounds of arrivals still tell them apart.  No answer
depends on the order, because sums are of integers.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.regions.space import Budget, Space
from dpstream.pipelines.session.records import manifest
from dpstream.pipelines.session.records.manifest import HASHER, Manifest, Part, digest
from dpstream.state import locks
from dpstream.state.disk_errors import decode_error, file_error, file_errors
from dpstream.state.durable import PRIVATE, make_folder, put_once, sweep

#: Rows of a part, and of its row groups.
PART_ROWS, GROUP_ROWS = 1_000_000, 122_880
USABLE, ID = "usable", "id"
_FIELD = "table.coordinates"


def schema_of(space: Space, named: bool) -> pa.Schema:
    """Return a part's columns: each dimension's in the least type that holds its coordinates."""
    fields: list[tuple[str, pa.DataType]] = [
        (f"x{place}", _type(size)) for place, size in enumerate(space.sizes.tolist())
    ]
    fields.append((USABLE, pa.bool_()))
    return pa.schema([*fields, *([(ID, pa.binary(16))] if named else [])])


def _type(size: int) -> pa.DataType:
    for bits, kind in ((8, pa.uint8()), (16, pa.uint16()), (32, pa.uint32())):
        if size <= 1 << bits:
            return kind
    return pa.int64()


def table_of(schema: pa.Schema, at: Int64, usable: bool, ids: Ids | None) -> pa.Table:
    """Return records of one sort in the form of a part."""
    columns: list[Any] = [
        pa.array(at[:, place]).cast(schema.field(place).type) for place in range(at.shape[1])
    ]
    columns.append(pa.array(np.full(len(at), usable)))
    if ids is not None:
        raw = pa.py_buffer(np.ascontiguousarray(ids))
        columns.append(pa.Array.from_buffers(pa.binary(16), len(ids), [None, raw]))
    return pa.table(columns, schema=schema)


def budgets_of(space: Space) -> tuple[str, ...]:
    """Return the columns of initial budgets."""
    return tuple(
        f"x{p}" for p, dimension in enumerate(space.dimensions) if isinstance(dimension, Budget)
    )


def ordered(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return records, those of each row group in the order of some columns; equal ones stay."""
    keys = [rows.column(name).to_numpy() for name in columns]
    keys = [key for key in keys if len(key) and key.min() < key.max()]
    if not keys:
        return rows
    order = np.lexsort((*reversed(keys), np.arange(rows.num_rows) // GROUP_ROWS))
    return rows.take(pa.array(order))


def write_part(folder: Path, rows: pa.Table, usable: bool, by: Sequence[str] = ()) -> Part:
    """Write a part durably; no manifest names it yet.

    Args:
        by: columns that the records of a row group are ordered by.

    Raises:
        RunError: it cannot be written.
    """
    buffer = io.BytesIO()
    pq.write_table(
        ordered(rows, by),
        buffer,
        compression="lz4",
        row_group_size=GROUP_ROWS,
        use_dictionary=[name for name in rows.column_names if name != ID],
    )
    data = buffer.getvalue()
    part = Part(digest(data), rows.num_rows, usable)
    with file_errors(_FIELD, "cannot be written"):
        put_once(folder / part.name, data, PRIVATE)
    return part


def read_part(folder: Path, part: Part, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a part, whose digest was checked.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return pq.read_table(pa.OSFile(str(folder / part.name)), columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        failure = decode_error(damaged(), error, folder / part.name)
    raise failure


def ids_in(rows: pa.Table) -> Ids:
    """Return (n, 2) keyed ids of rows."""
    arrays = [
        np.frombuffer(chunk.buffers()[1] or b"", np.uint64).reshape(-1, 2)[
            chunk.offset : chunk.offset + len(chunk)
        ]
        for chunk in rows.column(ID).chunks
    ]
    return np.concatenate([np.zeros((0, 2), np.uint64), *arrays])


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the lock of the only writer of a folder, which is made; wait for another writer.

    Raises:
        RunError: the folder cannot be made or locked.
    """
    with contextlib.ExitStack() as stack:
        with file_errors(_FIELD, "cannot be written"):
            make_folder(folder, PRIVATE)
            locked = stack.enter_context(locks.held(folder / "lock"))
            sweep(folder)
        if not locked:
            raise RunError(_FIELD, "is on a file system without locks", "use a local file system")
        yield


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keep all parts from being removed as long as this is open.

    Raises:
        RunError: there is no table.
    """
    try:
        descriptor = os.open(folder / "readers", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        raise RunError(_FIELD, "holds no table", "make it with `dpstream table init`") from None
    except OSError as error:
        raise file_error(_FIELD, "cannot be read", error) from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def tidy(folder: Path, manifest: Manifest) -> bool:
    """Remove the parts that a version does not name, unless a reader is open; return whether done.

    Only the writer calls it.
    """
    names = {path.name for path in manifest.paths(folder)}
    gone = [path for path in folder.glob("part-*.parquet") if path.name not in names]
    with contextlib.suppress(FileNotFoundError), locks.free(folder / "readers") as nobody:
        if not nobody and gone:
            return False
        for path in gone:
            path.unlink(missing_ok=True)
        return True
    for path in gone:  # nobody has ever read
        path.unlink(missing_ok=True)
    return True


def checked_paths(folder: Path, parts: list[Part]) -> list[str]:
    """Return the files of some parts, after a check that they are as they were written.

    Each is read once by a process, and again if the file has changed.

    Raises:
        RunError: a file has changed, or cannot be read.
    """
    paths = [str(folder / part.name) for part in parts]
    try:
        stamps = [stamp_of(path) for path in paths]
        with ThreadPoolExecutor(2) as pool:
            digests = list(pool.map(_digest_of, paths, stamps))
    except OSError as error:
        raise file_error(_FIELD, "cannot be read", error) from None
    if digests != [part.digest for part in parts]:
        raise damaged()
    return paths


def stamp_of(path: str) -> tuple[int, int, int, int]:
    """Return (inode, bytes, times of change) of a file, which change when it is written.

    Raises:
        OSError: there is no file.
    """
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def damaged() -> RunError:
    """Return the error for a part that differs from what was written."""
    return manifest.damaged("has a part that is not as it was written")


@functools.lru_cache(maxsize=1 << 16)
def _digest_of(path: str, _: tuple[int, int, int, int]) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, HASHER).hexdigest()
