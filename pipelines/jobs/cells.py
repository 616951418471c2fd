"""The cells of a workload's domain as the public keys of a job: a cell's number replaces the key.

A record's cell is a function of its own key columns and of the public domain.  The columns are
read as those of every job are.  A value that is missing, mistyped, not listed or outside the edges
gives no cell, so that the record is a dead letter by the rule for its key.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field, FieldType
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.workloads.attributes import Attribute, framed, normal
from dpstream.accounting.workloads.workload import codes
from dpstream.dp_transforms.ingest import columns

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
        column = pa.array(flat, mask=flat < 0)
        at = batch.schema.get_field_index(CELL.column)
        if at < 0:
            return batch.append_column(CELL.column, column)
        return batch.set_column(at, CELL.column, column)


class JobCells(NamedTuple):
    """The domain of a job, and how the noise of its cells is mixed."""

    domain: CellDomain
    mixing: Mixing


def domain_digest(attributes: Sequence[Attribute]) -> str:
    """Return a 128-bit hex digest of names, values and edges in their order."""
    body = b"".join(framed(attribute.canonical()) for attribute in attributes)
    return hashlib.blake2b(body, digest_size=16, person=b"dpstream-cells").hexdigest()


def cell_key(
    attributes: Sequence[Attribute], key: Sequence[Field], partial_key: bool = False
) -> tuple[Field, ...]:
    """Return the key columns in the order of the attributes.

    Args:
        partial_key: ``key`` may have only some of the attributes (a job has few key columns); the
            others get the type of their values.

    Raises:
        UsageError: a key column is not an attribute, or has another type than the values.
    """
    fields = {field.column: field for field in key}
    names = {attribute.name for attribute in attributes}
    if partial_key and fields.keys() <= names:
        fields = {a.name: Field(a.name, _type(a)) for a in attributes} | fields
    if set(fields) != names:
        raise UsageError(
            "key",
            "names other columns than the workload has attributes",
            "list the attributes' columns there, no others",
        )
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
