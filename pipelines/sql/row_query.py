"""``[source.query]`` of a job: its tables, its checked text, its digest, and what runs on workers.

The digest is part of the plan, and so of every noise node's name: it is of the text as it stands
in the job file, the types it was checked with, and the rows of the public tables it looks up.  A
store goes on with no other.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.jobs.tables import LookUpConfig, QueryConfig, SourceConfig
from dpstream.pipelines.jobs.text import closest
from dpstream.pipelines.sql.catalog import UNIT_TYPES, Table
from dpstream.pipelines.sql.columns import file_columns, kind_of
from dpstream.pipelines.sql.engine import Engine
from dpstream.pipelines.sql.row_local import (
    KEYED,
    RowTables,
    numbered,
    refuse_names,
    row_query,
)
from dpstream.pipelines.sql.row_types import DUCKDB, typed

#: The table of the rows of a batch, as they arrived.
ARRIVED = "arrived rows"
FIELD = "source.query"


class RowQuery(NamedTuple):
    """A checked query with all it needs; it travels to workers.

    Attributes:
        sql: of DuckDB; its first column is the row's number, the others are ``names``.
        names: columns that it gives.
        reads: the source's own names by those of the query; types: SQL types by the latter.
        passing: columns that pass by it.
        look_ups: rows of the public tables.
        unit: of the job.
        digest: of everything that decides about a row.
    """

    sql: str
    names: tuple[str, ...]
    reads: dict[str, str]
    types: dict[str, str]
    passing: tuple[str, ...]
    look_ups: dict[str, pa.Table]
    unit: UnitIdentity
    digest: str


class Readable(NamedTuple):
    """What a text of a job can name.

    Attributes:
        tables: their columns in lower case.
        reads: the source's own names of its columns.
        look_ups: the public tables as the job has them.
    """

    tables: RowTables
    reads: dict[str, str]
    look_ups: tuple[LookUpConfig, ...] = ()


def readable(source: SourceConfig, unit: Field, folder: Path) -> Readable:
    """The tables of a job's ``[source.query]``; no row is read.

    Args:
        source: with its own path resolved.
        unit: of the schema.
        folder: where paths of public tables start.

    Raises:
        UsageError: columns or tables are not usable.
    """
    config = source.query or QueryConfig()
    declared = config.columns
    if declared is None:
        names, types = _own_columns(source)
    else:
        names = {name.lower(): name for name in declared}
        types = file_columns(FIELD, source.kind, source.path, declared)
    own, kind = unit.column.lower(), UNIT_TYPES[unit.type]
    if names.get(own, unit.column) != unit.column or types.get(own, kind) != kind:
        raise UsageError(
            f"{FIELD}.columns", "has another unit than the schema", "correct the unit's type"
        )
    types = types | file_columns(f"{FIELD}.columns", "stream", "", {own: kind})
    source_name = config.table.lower()
    rows = Table(_named(FIELD, source_name), "stream", "", types, own, units=(own,))
    found, keys = {source_name: rows}, dict[str, tuple[str, ...]]()
    for number, one in enumerate(config.look_up):
        where = f"{FIELD}.look_up[{number}]"
        table = _look_up(where, one, folder)
        if table.name in found:
            raise UsageError(f"{where}.name", "is there twice", "choose another name")
        found[table.name] = table
        keys[table.name] = _key(where, one, table)
    identity = UnitIdentity(unit.column, unit.type)
    tables = RowTables(identity, found, source=source_name, keys=keys)
    return Readable(tables, names | {own: unit.column}, config.look_up)


def _own_columns(source: SourceConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Names and types of a Parquet source's columns, from the first file's footer."""
    import glob

    import pyarrow.parquet as pq

    types = file_columns(FIELD, source.kind, source.path, None)
    schema = pq.read_schema(sorted(glob.glob(source.path, recursive=True))[0])
    return {name.lower(): name for name in schema.names if name.lower() in types}, types


def _named(where: str, name: str) -> str:
    if not name.isidentifier() or not name.isascii():
        raise UsageError(f"{where}.table", "is not a usable name", "use letters, digits and _")
    return name


def _look_up(where: str, config: LookUpConfig, folder: Path) -> Table:
    kind, place = kind_of(where, config.path, None, folder)
    columns = file_columns(where, kind, place, config.columns)
    return Table(_named(where, config.name.lower()), kind, place, columns)


def _key(where: str, config: LookUpConfig, table: Table) -> tuple[str, ...]:
    key = tuple(sorted({name.lower() for name in config.key}))
    if not key:
        raise UsageError(f"{where}.key", "must name the columns that no two rows share", "add them")
    for name in key:
        if name not in table.columns:
            raise UsageError(f"{where}.key", "is no column of it", closest(name, table.columns))
    return key


def compiled(source: SourceConfig, plan: Plan, folder: Path) -> RowQuery:
    """The query of a job's tables, checked; reads its public tables.

    Args:
        source: with its own path resolved.
        plan: of the job, with or without the query's digest.
        folder: where paths of public tables start.

    Raises:
        DpstreamError: the text is missing, not usable, not row-local, or a key is not unique.
    """
    config = source.query
    if config is None or not config.text:
        raise UsageError(
            f"{FIELD}.text", "is required", "write it by `dpstream sql --stream JOB --emit`"
        )
    known = readable(source, plan.unit, folder)
    tables = known.tables
    tree = row_query(config.text, tables)
    names = tuple(item.alias_or_name for item in tree.expressions)
    passing = [plan.unit.column, plan.event_time]
    passing += [plan.stamp] if plan.stamp != "event_time" else []
    passing += [] if plan.record_id is None else [plan.record_id.column]
    refuse_names(set(names), set(passing))
    needed = {field.column for field in plan.key} | {
        a.column for a in plan.aggregates if a.column is not None
    }
    if needed - set(names) - set(passing):
        raise UsageError(
            f"{FIELD}.text", "does not give every column of the key and the aggregates",
            "select them, each under its name",
        )  # fmt: skip
    types = {name: tables.rows.columns[name] for name in sorted(known.reads)}
    look_ups = {name: look_up_rows(tables, name) for name in sorted(tables.keys)}
    sql = numbered(tree, ARRIVED, {name: DUCKDB[kind] for name, kind in types.items()})
    parts: list[Any] = [config.text, tables.source, types]
    parts += [
        [name, tables.tables[name].columns, tables.keys[name], _content(rows)]
        for name, rows in look_ups.items()
    ]
    digest = hashlib.blake2b(
        msgspec.json.encode(parts, order="sorted"), digest_size=16, person=b"dpstream-row-sql"
    ).hexdigest()
    reads = {name: known.reads[name] for name in types}
    return RowQuery(
        sql, names, reads, types, tuple(dict.fromkeys(passing)), look_ups, tables.unit, digest
    )


def look_up_rows(tables: RowTables, name: str) -> pa.Table:
    """The rows of a public table whose key is not NULL, in canonical form, by key.

    Raises:
        PolicyError: two of them have one key; UsageError: a key has another type.
    """
    table, key = tables.tables[name], list(tables.keys[name])
    if any(tables.types[name][column] not in KEYED for column in key):
        raise UsageError(
            f"{FIELD}.look_up", "has a key of a type whose equal values can differ",
            "use STRING, INT64, BOOL, BYTES, DATE, TIMESTAMP or DATETIME",
        )  # fmt: skip
    with Engine(tables, [name], ordered=True) as engine:
        read = engine.run(f'SELECT * FROM "{name}"')
    rows = pa.table({c: typed(read.column(c), kind) for c, kind in table.columns.items()})
    for column in key:
        rows = rows.filter(pc.is_valid(rows.column(column)))
    rows = rows.sort_by([(column, "ascending") for column in key]).combine_chunks()
    if rows.group_by(key).aggregate([]).num_rows != rows.num_rows:
        raise PolicyError(
            f"{FIELD}.look_up", "has rows with one key, so that a row could be counted twice",
            "declare a key that is unique, or remove the rows",
        )  # fmt: skip
    return rows


def _content(rows: pa.Table) -> str:
    """Digest of typed rows in their order: NULL, and the length and bytes of every value."""
    digest = hashlib.blake2b(digest_size=16, person=b"dpstream-look-up")
    for name in rows.column_names:
        column = rows.column(name).combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        digest.update(f"{name}:{len(column)};".encode() + np.packbits(valid).tobytes())
        text = column.cast(pa.string()) if not _raw(column.type) else column
        data = text.cast(pa.binary()).drop_null()
        digest.update(pc.binary_length(data).to_numpy(zero_copy_only=False).astype("<i4").tobytes())
        digest.update(b"".join(data.to_pylist()))
    return digest.hexdigest()


def _raw(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
