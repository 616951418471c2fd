"""Bytes of released files, how they reach the disk, and reading them back."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.json as pajson
import pyarrow.parquet as pq
from pyarrow import csv as pacsv

from accounting.errors import UsageError

KINDS = ("parquet", "csv", "jsonl")


def encode(batch: pa.RecordBatch, kind: str) -> bytes:
    """The file's bytes: the same for the same content (no times, no environment).

    Schema metadata travels only in Parquet.  JSON Lines writes bytes as base64, times in
    RFC 3339 and numbers that are not finite as null.
    """
    table = pa.Table.from_batches([batch])
    if kind == "jsonl":
        return msgspec.json.Encoder().encode_lines(table.to_pylist())
    buffer = io.BytesIO()
    if kind == "csv":
        pacsv.write_csv(table.replace_schema_metadata(None), buffer)
    else:
        pq.write_table(
            table,
            buffer,
            row_group_size=1 << 20,
            version="2.6",
            data_page_version="1.0",
            compression="zstd",
            compression_level=3,
            write_page_checksum=True,
        )
    return buffer.getvalue()


def put_once(path: Path, data: bytes) -> bool:
    """Make ``path`` with ``data``, atomically and on disk, unless it exists.

    Returns:
        Whether the file is new.  Of two writers at once exactly one makes it.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent):
        sync_folder(folder)
    return True


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def same_content(path: Path, data: bytes, kind: str) -> bool:
    """Whether the file at ``path`` holds what ``data`` holds.

    Parquet made by another version of its library differs in bytes, not in content.
    """
    existing = path.read_bytes()
    if existing == data or kind != "parquet":
        return existing == data
    try:
        old, new = (pq.read_table(pa.BufferReader(x)) for x in (existing, data))
    except (pa.ArrowException, OSError):
        return False
    return bool(old.equals(new, check_metadata=True))


def read_releases(path: str | Path, schema: pa.Schema | None = None) -> pa.Table:
    """Every release below a sink's folder, ordered by (window, trigger).

    Args:
        path: the folder given as ``sink.path``.
        schema: types of the columns; CSV and JSON Lines do not keep them, and without it the
            types are guessed (a key ``007`` would become a number).

    Returns:
        The rows of all files; a table without columns if there are none.

    Raises:
        UsageError: a file is not a readable release (names it).
    """
    tables = []
    for file in release_files(path):
        try:
            tables.append(_read(file, schema).replace_schema_metadata(None))
        except (pa.ArrowException, OSError):
            raise UsageError(
                f"release {file.parent.name}/{file.name}",
                "cannot be read",
                "restore the file, or remove it and run the job again on the same state",
            ) from None
    if not tables:
        return pa.table({}) if schema is None else schema.empty_table()
    return pa.concat_tables(tables, promote_options="permissive")


def release_files(path: str | Path) -> Iterator[Path]:
    """Files of releases below a sink's folder, ordered by (window, trigger)."""
    found = (p for kind in KINDS for p in Path(path).glob(f"window-*/trigger-*.{kind}"))
    yield from sorted(found, key=lambda p: (_number(p.parent), _number(p), p.suffix))


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _read(file: Path, schema: pa.Schema | None) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file, partitioning=None, schema=schema)
    if file.suffix == ".csv":
        types = {} if schema is None else {f.name: f.type for f in schema}
        return pacsv.read_csv(file, convert_options=pacsv.ConvertOptions(column_types=types))
    if file.stat().st_size == 0:
        return pa.table({}) if schema is None else schema.empty_table()
    return pajson.read_json(file, parse_options=pajson.ParseOptions(explicit_schema=schema))
