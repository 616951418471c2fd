"""The public key list of a job.

It is a CSV file whose header names the key columns of the job; it may be compressed
as the files of a source may be.
"""

import csv
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from dpstream.accounting import limits
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.formats.compression import BrokenFileError, checked_codec, plain

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job

Value = str | int | bool | bytes
_ARROW = {"string": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "bytes": pa.binary()}


def read_public_keys(job: "Job") -> pa.Table:
    """Return the public key list: distinct rows, sorted; columns and types of the plan's key.

    Raises:
        UsageError: the job names no list, or the file is not one.
        PolicyError: the file is not the one that the plan was made with.
    """
    if job.cells is not None:
        return job.cells.domain.table
    if job.keys.public is None:
        raise UsageError("public_keys", "is not set", "name a CSV file of the public keys")
    rows = _rows(Path(job.keys.public), job.plan.key)
    if _digest(rows, job.plan.key) != job.plan.public_keys:
        raise PolicyError("public_keys", "changed since the plan was made", "load the job again")
    columns = list(zip(*rows, strict=True))
    return pa.table(
        [pa.array(c, _ARROW[f.type]) for c, f in zip(columns, job.plan.key, strict=True)],
        schema=pa.schema([pa.field(f.column, _ARROW[f.type], False) for f in job.plan.key]),
    )


def public_key_digest(path: Path, fields: Sequence[Field]) -> str:
    """Return a 128-bit hex digest of a public key list: of its set of typed rows, without order.

    Raises:
        UsageError: the file cannot be read, a column is missing, or a line (named by its number)
            is not a key.
    """
    return _digest(_rows(path, fields), fields)


def public_keys_digest(table: pa.Table, fields: Sequence[Field]) -> str:
    """Return the same digest for a canonical list (``ingest.records.canonical_public_keys``)."""
    columns = [table.column(field.column).to_pylist() for field in fields]
    return _digest(sorted(set(zip(*columns, strict=True))), fields)


def _digest(rows: list[tuple[Value, ...]], fields: Sequence[Field]) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"dpstream-pubkeys")
    for field in fields:
        digest.update(f"{len(field.column)}:{field.column}:{field.type};".encode())
    for row in rows:
        for value in row:
            data = value if isinstance(value, bytes) else str(value).encode()
            digest.update(len(data).to_bytes(4, "big") + data)
    return digest.hexdigest()


def _rows(path: Path, fields: Sequence[Field]) -> list[tuple[Value, ...]]:
    """Return the distinct typed rows of the list, sorted."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError("public_keys", "is not a file", "name a CSV file of the public keys")
    try:
        with open(path, "rb") as raw:
            codec = checked_codec(raw, str(path), "csv", "public_keys", "the list")
            text = io.TextIOWrapper(plain(raw, codec), newline="", encoding="utf-8-sig")
            reader = csv.reader(text, strict=True)
            header = next(reader, [])
            missing = [f.column for f in fields if header.count(f.column) != 1]
            if missing:
                raise UsageError(
                    "public_keys",
                    f"its header must name each key column once; not so: {', '.join(missing)}",
                    "correct the first line of the file",
                )
            where = [header.index(f.column) for f in fields]
            rows = {_typed(row, where, fields, len(header), reader.line_num) for row in reader}
    except (OSError, UnicodeDecodeError, csv.Error, BrokenFileError):
        raise UsageError(
            "public_keys", "cannot be read as a CSV file in UTF-8", "check path and content"
        ) from None
    if not rows:
        raise UsageError("public_keys", "lists no key", "add the keys to publish")
    return sorted(rows)


def _typed(
    row: list[str], where: list[int], fields: Sequence[Field], width: int, line: int
) -> tuple[Value, ...]:
    """Return one row's key values; an error has only the line's number."""
    try:
        if len(row) != width:
            raise ValueError
        return tuple(_value(row[i], f.type) for i, f in zip(where, fields, strict=True))
    except ValueError:
        raise UsageError(
            "public_keys", f"line {line} is not a key of the job's types", "correct the line"
        ) from None


def _value(text: str, kind: str) -> Value:
    """Return a key component of its declared type; raise ``ValueError`` without text if it has
    another.
    """
    if len(text.encode()) > limits.MAX_KEY_BYTES:
        raise ValueError
    if kind == "int":
        number = int(text) if text.lstrip("-").isascii() else None
        if number is None or str(number) != text or not -(1 << 63) <= number < 1 << 63:
            raise ValueError
        return number
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"
    return text.encode() if kind == "bytes" else text
