"""Public tables that a row-local query looks up by a key: their rows, in one form, and a digest.

A key that two rows share would let one row of a stream become two, so it is checked on the very
rows that are used, after they have their canonical form.  Rows whose key has NULL meet nothing and
are left out.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.project.job_parts import LookUpConfig
from dpstream.pipelines.project.text import closest
from dpstream.pipelines.statements.row_local import KEYED, RowTables
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.columns import file_columns, kind_of
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.row_types import typed

FIELD = "look_up"


def look_up_table(config: LookUpConfig, folder: Path) -> Table:
    """A public table as a job declares it; no row is read.

    Args:
        folder: where its path starts.

    Raises:
        UsageError: its name, place or columns are not usable.
    """
    where, name = f"{FIELD}.{config.name}", config.name.lower()
    if not name.isidentifier() or not name.isascii():
        raise UsageError(where, "is not a usable name", "use letters, digits and _")
    kind, place = kind_of(where, config.path, None, folder)
    return Table(name, kind, place, file_columns(where, kind, place, config.columns))


def key_of(config: LookUpConfig, table: Table) -> tuple[str, ...]:
    """The columns of its key.

    Raises:
        UsageError: there are none, or one is no column of it.
    """
    where, key = f"{FIELD}.{config.name}.key_columns", sorted({name.lower() for name in config.key})
    if not key:
        raise UsageError(where, "must name the columns that no two rows share", "add them")
    for name in key:
        if name not in table.columns:
            raise UsageError(where, "is no column of it", closest(name, table.columns))
    return tuple(key)


def look_up_rows(tables: RowTables, name: str) -> pa.Table:
    """The rows of a public table whose key is not NULL, in canonical form, by key.

    Raises:
        PolicyError: two of them have one key; UsageError: a key has another type.
        RunError: its files cannot be read.
    """
    table, key = tables.tables[name], list(tables.keys[name])
    if any(tables.types[name][column] not in KEYED for column in key):
        raise UsageError(
            f"{FIELD}.{name}.key_columns",
            "has a key of a type whose equal values can differ",
            "use STRING, INT64, BOOL, BYTES, DATE, TIMESTAMP or DATETIME",
        )
    with Engine(tables, [name], ordered=True) as engine:
        read = engine.run(f'SELECT * FROM "{name}"')
    rows = pa.table({c: typed(read.column(c), kind) for c, kind in table.columns.items()})
    for column in key:
        rows = rows.filter(pc.is_valid(rows.column(column)))
    rows = rows.sort_by([(column, "ascending") for column in key]).combine_chunks()
    if rows.group_by(key).aggregate([]).num_rows != rows.num_rows:
        raise PolicyError(
            f"{FIELD}.{name}.key_columns",
            "has rows with one key, so that a row could be counted twice",
            "declare a key that is unique, or remove the rows",
        )
    return rows


def content(rows: pa.Table) -> str:
    """Digest of typed rows in their order: NULL, and the length and bytes of every value."""
    digest = hashlib.blake2b(digest_size=16, person=b"dpstream-look-up")
    for name in rows.column_names:
        column = rows.column(name)
        valid = column.is_valid().to_numpy()
        digest.update(f"{name}:{len(column)};".encode() + np.packbits(valid).tobytes())
        if not pa.types.is_binary(column.type):
            column = column.cast(pa.string()).cast(pa.binary())
        data = column.drop_null()
        digest.update(pc.binary_length(data).to_numpy().astype("<i4").tobytes())
        digest.update(b"".join(data.to_pylist()))
    return digest.hexdigest()
