"""The public keys of a job: a list, or the cells of a domain.

**A list** is a CSV file whose header names the key columns of the job; it may be compressed as the
files of a source may be.

**Cells** of a workload's domain are public keys by their numbers: a cell's number replaces the key.
A record's cell is a function of its own key columns and of the public domain.  The columns are read
as those of every job are.  A value that is missing, mistyped, not listed or outside the edges gives
no cell, so that the record is a dead letter by the rule for its key.
"""

import csv
import hashlib
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Field, FieldType
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.workloads.attributes import Attribute, framed, normal
from dpstream.accounting.workloads.workload import codes
from dpstream.dp_transforms.ingest import columns
from dpstream.pipelines.formats.compression import checked_codec, plain
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, BrokenFileError
from dpstream.state.disk_errors import unreadable

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
    if job.public_keys is None:
        raise UsageError("public_keys", "is not set", "name a CSV file of the public keys")
    rows = _rows(Path(job.public_keys), job.plan.key)
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
            lines = iter(lambda: text.readline(MAX_LINE_BYTES), "")  # a longer one is no key
            reader = csv.reader(lines, strict=True)
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
    except OSError as error:
        raise unreadable("public_keys", error) from None
    except (UnicodeDecodeError, csv.Error, BrokenFileError):
        raise UsageError(
            "public_keys", "cannot be read as a CSV file in UTF-8", "correct its content"
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


#: The column that takes the place of the key.
CELL = Field("cell", "int")


class CellDomain(NamedTuple):
    """The public domain that a job's key columns are mapped to.

    Attributes:
        attributes: the domain, in the order in which cells are numbered.
        key: the job's own key columns, one for each attribute, in that order.
    """

    attributes: tuple[Attribute, ...]
    key: tuple[Field, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of cells of each attribute."""
        return tuple(attribute.size for attribute in self.attributes)

    @property
    def table(self) -> pa.Table:
        """Return the public key list: the numbers of all cells."""
        numbers = np.arange(math.prod(self.sizes), dtype=np.int64)
        return pa.table(
            [pa.array(numbers)], schema=pa.schema([pa.field(CELL.column, pa.int64(), False)])
        )

    @property
    def digest(self) -> str:
        """A 128-bit hex digest of the domain, which a plan has instead of a key list.

        It covers more than the numbers: the same cells under other names or edges hold other
        records, and noise that is drawn for one must not be drawn for the other.
        """
        return domain_digest(self.attributes)

    def codes(self, batch: pa.RecordBatch) -> Int64:
        """Return (attributes, rows) the number of each row's cell on each axis, -1 for none."""
        pairs = zip(self.attributes, self.key, strict=True)
        cell_codes = [
            _cells(attribute, batch.column(field.column), field) for attribute, field in pairs
        ]
        return np.array(cell_codes, np.int64).reshape(len(cell_codes), batch.num_rows)

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with the cell of each row, null for none."""
        flat = codes(self.sizes, self.codes(batch))
        return put_cells(batch, pa.array(flat, mask=flat < 0))


def put_cells(batch: pa.RecordBatch, cells: pa.Array) -> pa.RecordBatch:
    """Return a batch with this column of cells, in the place of one that it has."""
    at = batch.schema.get_field_index(CELL.column)
    if at < 0:
        return batch.append_column(CELL.column, cells)
    return batch.set_column(at, CELL.column, cells)


class JobCells(NamedTuple):
    """The domain of a job, and the mixing of its cells' noise."""

    domain: CellDomain
    mixing: Mixing


def domain_digest(attributes: Sequence[Attribute]) -> str:
    """Return a 128-bit hex digest of names, values and edges in their order."""
    body = b"".join(framed(attribute.canonical()) for attribute in attributes)
    return hashlib.blake2b(body, digest_size=16, person=b"dpstream-cells").hexdigest()


def cell_key(attributes: Sequence[Attribute], key: Sequence[Field]) -> tuple[Field, ...]:
    """Return the key columns in the order of the attributes.

    A job has few key columns, so ``key`` may have only some of the attributes; the others get the
    type of their values.

    Raises:
        UsageError: a key column is not an attribute, or has another type than the values.
    """
    fields = {a.name: Field(a.name, _type(a)) for a in attributes}
    others = [field.column for field in key if field.column not in fields]
    if others:
        raise UsageError(
            "key",
            f"names {', '.join(others)}; the attributes of the workload are "
            f"{', '.join(sorted(fields))}",
            f"list columns of these attributes there, at most {limits.MAX_KEY_COLUMNS}: those that "
            "it leaves out need no line",
        )
    fields |= {field.column: field for field in key}
    for attribute in attributes:
        field = fields[attribute.name]
        wanted = _type(attribute)
        if field.type != wanted and not attribute.edges:
            raise UsageError(
                "key",
                f"has another type for '{attribute.name}' than the workload's values",
                f'write type = "{wanted}" there',
            )
    return tuple(fields[attribute.name] for attribute in attributes)


def _cells(attribute: Attribute, column: pa.Array, field: Field) -> Int64:
    """Return (rows,) the number of each row's cell on one axis, -1 for none."""
    if attribute.edges:
        numbers, ok = columns.measure(column)
        return np.where(ok, attribute.cells(np.where(ok, numbers, attribute.edges[0])), -1)
    typed, ok = columns.identity(column, field.type)
    listed = pa.array([normal(value) for value in attribute.values], typed.type)
    positions = pc.index_in(typed, value_set=listed).fill_null(-1).to_numpy(zero_copy_only=False)
    return np.where(ok, positions, -1).astype(np.int64)


def _type(attribute: Attribute) -> FieldType:
    return "string" if attribute.values and isinstance(attribute.values[0], str) else "int"
