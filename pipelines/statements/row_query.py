"""Row-local queries of jobs: every output row depends on one input row; checks and execution.

A stream has no whole table to ask: batches of rows arrive, in any size.  A query that each batch
goes through must give, of all batches together, what it gives of all rows at once, and must not
let one unit's rows touch another's.  So it is allowed only what is a function of one row:

* FROM the source itself, or a subquery that is row-local by the same rules; WHERE; a select list
  without aggregates.  Expressions are deterministic functions of one row (`allowed`), NULL where
  they fail (`exact`).
* JOIN or LEFT JOIN of a public table after it, ON plain equality of columns with **all** columns of
  the table's declared key.  No two rows of the table have that key in common (checked when the
  job is loaded, on the very rows that are used, which are part of the plan's hash), equal
  values of these types are equal bytes, and NULL equals nothing: a row meets at most one row of
  the table, which no other row of the source decides.

**Sensitivity.**  By induction over these operators the query is a map f from a row to one row or to
none, fixed by the plan.  Neighbouring inputs differ in the rows of one unit; f applied row by row
leaves them neighbouring, in the images of that unit's rows alone, which are no more than the rows
were.  The unit, the event time, the stamp and the record's id are not computed by f: they are
those of the row it was made of, as is its position, so no two records share a name.  Filters and
look-ups therefore come before bounding and change no sensitivity: C, clamps and thresholds see a
stream as any other.

Refused are aggregates, GROUP BY, DISTINCT, set operations, window functions, LIMIT, joins of
private relations, public tables without a key or by an inequality, and outer joins that would keep
rows of a public table.

**The digest** is part of the plan, and so of every noise node's name: it is of the text as it
stands in its file, the types it was checked with, the columns it reads, the rows of the public
tables it looks up, and of what DuckDB of which version is given to run.  A store goes on with no
other: a version that rewrites a query in another way asks for a new run.

**Look-ups.**  A key that two rows of a public table share would let one row of a stream become two,
so it is checked on the very rows that are used, after they have their canonical form.  Rows whose
key has NULL meet nothing and are left out.

**On workers** DuckDB is behind a lock, with no file and one thread.  A batch is registered with
numbers of its rows, the query gives numbers and columns, and the unit, times and record ids are
taken from the batch by these numbers, untouched, as are positions.  Numbers that rise strictly are
the proof that no row was multiplied: whatever a text was let through, it cannot give one row two
names or two rows one.

**Columns of a batch** are as the query declares them, value by value (`typed`).  The canonical
forms are those of `dp_transforms.ingest.columns`: what a value becomes depends on it alone,
whatever type the rest of its batch arrived in, and text is NFC.  What does not fit, texts above
1,024 bytes, NaN and infinities are NULL.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlglot import exp

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import PolicyError, UsageError, closest, instance, refuse_first
from dpstream.accounting.fields import Field
from dpstream.accounting.places import matching
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.ingest.columns import decoded, identity, instant, measure
from dpstream.pipelines.project.dialect import Reading
from dpstream.pipelines.project.source import LookUp, Query, Source
from dpstream.pipelines.statements.allowed import inlined, parsed, qualified, require
from dpstream.pipelines.statements.dialect import Private
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.forms import type_of
from dpstream.pipelines.statements.ownership import Validator, equalities, select_list
from dpstream.pipelines.statements.statement import UNFORESEEN
from dpstream.pipelines.tables.catalog import (
    ROW,
    TYPES,
    UNIT_TYPES,
    Table,
    Tables,
    file_columns,
    kind_of,
)
from dpstream.pipelines.tables.engine import Engine
from dpstream.state.connecting import Closing
from dpstream.state.disk_errors import file_errors

#: Types whose values are equal only if they are the same bytes, in DuckDB as in the proof.
KEYED = {
    exp.DType.BIGINT,
    exp.DType.TEXT,
    exp.DType.BOOLEAN,
    exp.DType.VARBINARY,
    exp.DType.DATE,
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
}


@dataclasses.dataclass(frozen=True)
class RowTables(Tables):
    """The tables that a row-local query can name.

    Attributes:
        source: the name of the one private table.
        keys: columns of the public tables that no two rows have in common.
    """

    source: str = ""
    keys: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> Table:
        """The private table."""
        return self.tables[self.source]


def row_query(text: str, tables: RowTables) -> exp.Select:
    """Return the tree of a row-local SELECT, every column with its relation.

    Raises:
        DpstreamError: it is not usable, or not row-local.
    """
    try:
        return _checked(text, tables)
    except UNFORESEEN:
        raise refusal("not-supported") from None


def _checked(text: str, tables: RowTables) -> exp.Select:
    tree = qualified(inlined(parsed(text)), tables.schema)
    require(isinstance(tree, exp.Select), "stream-rows", tree)
    tree = instance(tree, exp.Select)
    require(tree.args.get("hint") is None, "one-dp-select", tree)
    check_row_local(tree, tables)
    tree.set("order", None)  # rows keep the order they came in
    scope = Validator(tables).scope(tree)
    for item in select_list(tree).values():
        scope.check_columns(item)
    return tree


def check_row_local(node: exp.Select, tables: RowTables) -> None:
    """Refuse a SELECT that is more than a function of one row of the source.

    Args:
        node: qualified; its columns and units are the validator's.

    Raises:
        DpstreamError: says where and why.
    """
    for part in ("limit", "offset"):
        require(node.args.get(part) is None, "limit", node.args.get(part))
    for part in ("distinct", "group", "having"):
        require(node.args.get(part) is None, "stream-rows", node.args.get(part))
    for item in node.expressions:
        require(not item.find(exp.AggFunc, Private, exp.Window), "stream-rows", item)
    require(node.args.get("from_") is not None, "from", node)
    first = node.args["from_"].this
    if isinstance(first, exp.Table):
        require(first.name == tables.source, "stream-look-up", first)
    else:
        require(isinstance(first.this, exp.Select), "stream-rows", first)
        check_row_local(first.this, tables)
    for join in node.args.get("joins") or ():
        named_table = isinstance(join.this, exp.Table) and join.this.name != tables.source
        require(named_table, "stream-join", join.this)
        require(_looks_up(join, tables), "stream-look-up", join.this)


def _looks_up(join: exp.Join, tables: RowTables) -> bool:
    """Whether a row meets at most one row of the joined public table."""
    kinds = join.side.upper() in ("", "LEFT") and join.kind.upper() in ("", "INNER", "OUTER")
    on, key = join.args.get("on"), set(tables.keys.get(join.this.name, ()))
    if not kinds or on is None or not key:
        return False
    met, alias = set[str](), join.this.alias_or_name
    for pair in equalities(on):
        for mine, theirs in (pair, pair[::-1]):
            if not (isinstance(mine, exp.Column) and isinstance(theirs, exp.Column)):
                continue
            kind = type_of(mine)
            if theirs.table == alias != mine.table and kind == type_of(theirs) and kind in KEYED:
                met.add(theirs.name)
    return key <= met


def numbered(tree: exp.Select, arrived: str, types: dict[str, str]) -> str:
    """Return the DuckDB text of a row-local query whose first column is the row's number.

    Args:
        tree: of `row_query`.
        arrived: the table of rows as they are, with their numbers.
        types: DuckDB's types by column: what the query sees of them.
    """
    query = safe_query(tree)
    _number(query, arrived, types)
    return str(query.sql("duckdb", comments=False))


def _number(node: exp.Select, arrived: str, types: dict[str, str]) -> None:
    first = node.args["from_"].this
    name = first.alias_or_name
    if isinstance(first, exp.Table):
        column = exp.column(ROW, quoted=True)
        items = [
            exp.alias_(
                exp.TryCast(
                    this=exp.column(c, quoted=True), to=exp.DataType.build(t, dialect="duckdb")
                ),
                c,
                quoted=True,
            )
            for c, t in types.items()
        ]
        table = exp.From(this=exp.Table(this=exp.to_identifier(arrived, quoted=True)))
        inner = exp.Select(expressions=[column, *items], from_=table)
        alias = exp.TableAlias(this=exp.to_identifier(name, quoted=True))
        first.replace(exp.Subquery(this=inner, alias=alias))
    else:
        _number(first.this, arrived, types)
    node.set("expressions", [exp.column(ROW, table=name, quoted=True), *node.expressions])


_IDENTITIES = {"STRING": "string", "INT64": "int", "BOOL": "bool", "BYTES": "bytes"}
_CAST = {"DATE": "date", "NUMERIC": "decimal"}


def look_up(config: LookUp, folder: Path) -> tuple[Table, tuple[str, ...]]:
    """Return a public table as a job declares it, and the columns of its key; no row is read.

    Args:
        folder: where its path starts.

    Raises:
        UsageError: its name, place, columns or key are not usable.
    """
    where, name = f"table.{config.name}", config.name.lower()
    if not name.isidentifier() or not name.isascii():
        raise UsageError(where, "is not a usable name", "use letters, digits and _")
    kind, place = kind_of(where, config.path, None, folder)
    columns = file_columns(where, kind, place, config.columns)
    where, key = f"{where}.key_columns", tuple(sorted({column.lower() for column in config.key}))
    refuse_first(
        (
            not key,
            UsageError(where, "must name the columns that no two rows share", "add them"),
        ),
        *(
            (
                column not in columns,
                UsageError(where, "is no column of it", closest(column, columns)),
            )
            for column in key
        ),
    )
    return Table(name, kind, place, columns), key


def look_up_rows(tables: RowTables, name: str) -> pa.Table:
    """Return the rows of a public table whose key is not NULL, in canonical form, by key.

    Raises:
        PolicyError: two of them have one key; UsageError: a key has another type.
        RunError: its files cannot be read.
    """
    table, key = tables.tables[name], list(tables.keys[name])
    if any(tables.types[name][column] not in KEYED for column in key):
        raise UsageError(
            f"table.{name}.key_columns",
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
            f"table.{name}.key_columns",
            "has rows with one key, so that a row could be counted twice",
            "declare a key that is unique, or remove the rows",
        )
    return rows


def content(rows: pa.Table) -> str:
    """Return the digest of typed rows in their order: NULL, and the length and bytes of every
    value.
    """
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


MEMORY = "1GB"
#: The table of the rows of a batch, as they arrived.
ARRIVED = "arrived rows"
FIELD = "query"


class RowQuery(NamedTuple):
    """A checked query with everything that workers need.

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
    """The tables and columns that the query of a job can name.

    Attributes:
        tables: their columns in lower case.
        reads: the source's own names of its columns.
        look_ups: the public tables as the job has them.
    """

    tables: RowTables
    reads: dict[str, str]
    look_ups: tuple[LookUp, ...] = ()


def readable(source: Source, unit: Field, folder: Path) -> Readable:
    """Return the tables that a job's query can name; no row is read.

    Args:
        source: the job's source, whose path is absolute or a URL.
        unit: of the schema.
        folder: where paths of public tables start.

    Raises:
        UsageError: columns or tables are not usable.
    """
    config = source.query or Query()
    where, declared = f"table.{config.table}", config.columns
    if declared is None:  # those of Parquet, from the first file's footer
        types = file_columns(where, source.kind, source.path, None)
        with file_errors(where, "cannot be read"):
            schema = pq.read_schema(sorted(matching(source.path))[0])
        names = {name.lower(): name for name in schema.names if name.lower() in types}
    else:
        names = {name.lower(): name for name in declared}
        types = file_columns(where, source.kind, source.path, declared)
    own, kind = unit.column.lower(), UNIT_TYPES[unit.type]
    declares = declared is not None and types.get(own, kind) != kind
    if declares or names.get(own, unit.column) != unit.column:
        raise UsageError(
            f"{where}.columns",
            "has another type of the unit than the data set",
            "correct one of them",
        )
    types = types | file_columns(where, "stream", "", {own: kind})
    source_name = config.table.lower()
    if not source_name.isidentifier() or not source_name.isascii():
        raise UsageError("table", "is not a usable name in SQL", "use letters, digits and _")
    fields = tuple(declared or ())
    rows = Table(
        name=source_name,
        kind="stream",
        place="",
        columns=types,
        unit=own,
        units=(own,),
        fields=fields,
        reading=Reading(config.csv),
    )
    named_tables, keys = {source_name: rows}, dict[str, tuple[str, ...]]()
    for one in config.look_up:
        table, key = look_up(one, folder)
        if table.name in named_tables:
            raise UsageError(f"table.{one.name}", "is there twice", "choose another name")
        named_tables[table.name], keys[table.name] = table, key
    identity = UnitIdentity(unit.column, unit.type)
    tables = RowTables(identity, named_tables, source=source_name, keys=keys)
    return Readable(tables, names | {own: unit.column}, config.look_up)


def compiled(source: Source, plan: Plan, folder: Path) -> RowQuery:
    """Return the query of a job's tables, checked, also by DuckDB; reads its public tables.

    Args:
        source: the job's source, whose path is absolute or a URL.
        plan: of the job, with or without the query's digest.
        folder: where paths of public tables start.

    Raises:
        DpstreamError: the text is missing, not usable, not row-local, or a key is not unique.
    """
    config = source.query
    if config is None or not config.text:
        raise UsageError(
            FIELD, "is empty", "write a SELECT into its file, as `dpstream sql --stream` does"
        )
    job_tables = readable(source, plan.unit, folder)
    tables = job_tables.tables
    tree = row_query(config.text, tables)
    names = tuple(item.alias_or_name for item in tree.expressions)
    passing = _passing(plan, set(names))
    used = {column.name for column in tree.find_all(exp.Column)}
    types = {name: tables.rows.columns[name] for name in sorted(used & set(job_tables.reads))}
    sql = numbered(tree, ARRIVED, {name: TYPES[kind] for name, kind in types.items()})
    named = {table.name for table in tree.find_all(exp.Table)}
    look_ups = {name: look_up_rows(tables, name) for name in sorted(named & set(tables.keys))}
    reads = {name: job_tables.reads[name] for name in types}
    parts: list[Any] = [config.text, tables.source, types, reads, sql, duckdb.__version__]
    parts += [
        [name, tables.tables[name].columns, tables.keys[name], content(rows)]
        for name, rows in look_ups.items()
    ]
    digest = hashlib.blake2b(
        msgspec.json.encode(parts, order="sorted"), digest_size=16, person=b"dpstream-row-sql"
    ).hexdigest()
    query = RowQuery(sql, names, reads, types, passing, look_ups, tables.unit, digest)
    with opened(query) as engine:  # what cannot run is said before anybody pays for it
        nothing = {c: typed(pa.array([], pa.string()), kind) for c, kind in types.items()}
        engine.register(ARRIVED, pa.table({ROW: pa.array([], pa.int64()), **nothing}))
        engine.run(sql)
    return query


def opened(query: RowQuery) -> Engine:
    """Return a locked DuckDB with the public tables of a query and no file, on one thread, in
    order.
    """
    engine = Engine(RowTables(query.unit, {}), (), ordered=True, memory=MEMORY, threads=1)
    for name, rows in query.look_ups.items():
        engine.register(name, rows)
    return engine


def _passing(plan: Plan, names: set[str]) -> tuple[str, ...]:
    """Columns that pass by a query which gives ``names``.

    Raises:
        DpstreamError: it gives one of them, or not all others that the plan reads.
    """
    passing = [plan.unit.column, plan.event_time]
    passing += [plan.stamp] if plan.stamp != "event_time" else []
    passing += [] if plan.record_id is None else [plan.record_id.column]
    require(not names & set(passing), "stream-name")
    needed = {field.column for field in plan.key}
    needed |= {a.column for a in plan.aggregates if a.column is not None}
    if needed - names - set(passing):
        raise UsageError(
            FIELD,
            "does not give every column of the key and the aggregates",
            "select them, each under its name",
        )
    return tuple(dict.fromkeys(passing))


class RowEngine(Closing):
    """A running row-local query; a context that closes it.

    Args:
        query: checked.
    """

    def __init__(self, query: RowQuery) -> None:
        self._query, self._engine = query, opened(query)

    def close(self) -> None:
        """Close DuckDB."""
        self._engine.close()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that the query keeps, in their order, with their positions as metadata.

        Raises:
            PolicyError: the query is not row-local; RunError: DuckDB cannot run it.
        """
        # Both load Beam, which a statement that becomes a job's file does not need.
        from dpstream.dp_transforms.ingest.records import positions
        from dpstream.pipelines.formats.small import Located, positioned_runs

        query = self._query
        arrived = {
            name: typed(batch.column(own), query.types[name]) for name, own in query.reads.items()
        }
        numbers = pa.array(np.arange(batch.num_rows, dtype=np.int64))
        self._engine.register(ARRIVED, pa.table({ROW: numbers, **arrived}))
        table = self._engine.run(query.sql)
        rows, order = _rows(table.column(0), batch.num_rows)
        columns = {name: batch.column(name).take(rows) for name in query.passing}
        for name, column in zip(query.names, table.columns[1:], strict=True):
            array = column.combine_chunks()
            array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
            columns[name] = array if order is None else array.take(order)
        if not len(rows):
            return pa.RecordBatch.from_pydict(columns)
        row_numbers = rows.to_numpy()
        partition, offset = (where[row_numbers] for where in positions(batch))
        out = Located(partition, offset, pa.RecordBatch.from_pydict(columns))
        return next(positioned_runs(out, len(row_numbers)))


def _rows(column: pa.ChunkedArray, size: int) -> tuple[pa.Array, pa.Array | None]:
    """The numbers of the rows that stay, rising, and the places to take columns from.

    Raises:
        PolicyError: a row is there twice, or none that came.
    """
    numbers: Int64 = column.drop_null().to_numpy()
    order = None
    if (np.diff(numbers) <= 0).any():
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
    inside = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < size)
    if column.null_count or not inside or (np.diff(numbers) <= 0).any():
        raise PolicyError(
            "query",
            "gives a row of the source twice, or rows that are none of its",
            "join public tables by keys that are unique",
        )
    return pa.array(numbers), None if order is None else pa.array(order)


def typed(column: pa.Array | pa.ChunkedArray, kind: str) -> pa.Array:
    """Return a column for a query that declares it of ``kind``.

    Dates and decimals in text stay text, which the query casts; decimals of 256 bits become text,
    because DuckDB takes none of Arrow: a query would fail on the first batch, after the charge.

    Args:
        kind: one of `catalog.TYPES`.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if kind == "FLOAT64":
        numbers, ok = measure(column)
        return pa.array(numbers, mask=~ok)
    if kind in ("TIMESTAMP", "DATETIME"):
        ticks, ok = instant(column)
        zone = "UTC" if kind == "TIMESTAMP" else None
        return pa.array(ticks, mask=~ok).cast(pa.timestamp("us", zone))
    if kind in _CAST:
        column = decoded(column)
        if pa.types.is_decimal256(column.type):
            column = column.cast(pa.string())
        text, ok = identity(column, "string")
        if not ok.any():
            return _with_nulls(*identity(column, _CAST[kind]))
        return _with_nulls(text, ok)
    return _with_nulls(*identity(column, _IDENTITIES[kind]))


def _with_nulls(column: pa.Array, ok: Bool) -> pa.Array:
    """NULL in the place of fillers."""
    if ok.all():
        return column
    return pc.if_else(pa.array(ok), column, pa.scalar(None, column.type))
