"""Tables of SQLite and PostgreSQL as Arrow, by ADBC: DuckDB itself stays without any access.

The remote query gives every column in a form that no row can make fail: SQLite's cells of another
type than declared are NULL, numbers that have no exact Arrow type come as text.  DuckDB casts them
to the catalog's types afterwards, NULL where they do not fit.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.extras import require
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.files import quoted, sqlite_path
from dpstream.state.connecting import CONNECT_SECONDS, connecting
from dpstream.state.private_log import what_next

#: A first row fixes the types of SQLite's columns, which have none of their own; it is told by a
#: column that no table has (a colon).
SENTINEL = '"dpstream:first"'
_SQLITE: dict[str, tuple[str, str]] = {
    "INT64": ("CASE WHEN typeof({c}) = 'integer' THEN {c} END", "0"),
    "FLOAT64": ("CASE WHEN typeof({c}) IN ('integer', 'real') THEN CAST({c} AS REAL) END", "0.5"),
    "BYTES": ("CASE WHEN typeof({c}) = 'blob' THEN {c} END", "x'00'"),
}
_TEXT = ("CAST({c} AS TEXT)", "''")
_AFFINITIES = (
    ("integer", ("INT",)),
    ("text", ("CHAR", "CLOB", "TEXT")),
    ("blob", ("BLOB",)),
    ("real", ("REAL", "FLOA", "DOUB")),
)
_COLUMNS = (
    "SELECT a.attname::text, COALESCE(b.typname, t.typname)::text, "
    "(CASE WHEN b.oid IS NULL THEN a.atttypmod ELSE t.typtypmod END)::bigint "
    "FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
    "LEFT JOIN pg_type b ON b.oid = t.typbasetype AND t.typtype = 'd' "
    "WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped"
)
_AS_TEXT = ("NUMERIC", "FLOAT64", "STRING")


@contextlib.contextmanager
def readers(tables: Mapping[str, Table]) -> Iterator[dict[str, Callable[[], pa.RecordBatchReader]]]:
    """Yield a reader for each database table; tables of one PostgreSQL database share a snapshot.

    Raises:
        RunError: a database cannot be reached or read; its own words are not passed on.
    """
    with contextlib.ExitStack() as stack:
        open_: dict[str, Any] = {}
        out: dict[str, Callable[[], pa.RecordBatchReader]] = {}
        for name, table in tables.items():
            if table.place not in open_:
                open_[table.place] = _connected(table, stack)
            out[name] = functools.partial(_read, open_[table.place], table, stack)
        yield out


def _connected(table: Table, stack: contextlib.ExitStack) -> Any:
    require("sql", "dpstream sql")
    try:
        if table.kind == "sqlite":
            import adbc_driver_sqlite.dbapi as driver

            place = quote(str(Path(sqlite_path(table)).absolute()))
            return stack.enter_context(driver.connect(f"file:{place}?mode=ro"))
        import adbc_driver_postgresql.dbapi as postgresql

        # libpq would wait for ever for a server that accepts and says nothing.
        os.environ.setdefault("PGCONNECT_TIMEOUT", f"{CONNECT_SECONDS:.0f}")
        with connecting("PostgreSQL"):
            connection = stack.enter_context(postgresql.connect(table.place))
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        return connection
    except Exception as error:
        raise _failed(table, error) from None


def _read(connection: Any, table: Table, stack: contextlib.ExitStack) -> pa.RecordBatchReader:
    try:
        cursor = stack.enter_context(connection.cursor())
        cursor.execute(remote_query(table))
        return cursor.fetch_record_batch()
    except Exception as error:
        raise _failed(table, error) from None


def enforces_unique(table: Table, columns: tuple[str, ...]) -> bool:
    """Return whether a PostgreSQL server keeps these columns, or some of them, unique by an index.

    Raises:
        RunError: the database cannot be reached or read.
    """
    query = (
        "SELECT (SELECT array_to_json(array_agg(a.attname))::text FROM pg_attribute a WHERE "
        "a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)) FROM pg_index i WHERE "
        "i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indimmediate "
        "AND i.indpred IS NULL AND i.indexprs IS NULL"
    )
    rows = _fetched(table, query, (_remote(table),))
    constraints = ({name.lower() for name in json.loads(row[0])} for row in rows)
    return any(names <= set(columns) for names in constraints)


def _fetched(table: Table, query: str, parameters: tuple[str, ...]) -> list[Any]:
    """Return the rows of a query about a table, of a connection of its own."""
    with contextlib.ExitStack() as stack:
        connection = _connected(table, stack)
        try:
            cursor = stack.enter_context(connection.cursor())
            cursor.execute(query, parameters)
            return list(cursor.fetchall())
        except Exception as error:
            raise _failed(table, error) from None


class ServerColumn(NamedTuple):
    """A column as its database describes it.

    Attributes:
        type: PostgreSQL's name of it (of a domain, of what it is made of); SQLite's affinity in
            lower case, which is what becomes of values.
        digits: most of them behind the point of a ``numeric``; ``None``: as many as it likes.
    """

    type: str
    digits: int | None = None


def server_columns(table: Table) -> dict[str, ServerColumn]:
    """Return the columns of a database's table by name; no row is read.

    Raises:
        RunError: the database cannot be reached or read.
    """
    if table.kind == "sqlite":  # its names have no case
        schema, _, name = (table.remote or table.name).rpartition(".")
        query = "SELECT name, type FROM pragma_table_xinfo(?, ?)"
        rows = _fetched(table, query, (name, schema or "main"))
        return {column.lower(): ServerColumn(_affinity(kind)) for column, kind in rows}
    rows = _fetched(table, _COLUMNS, (_remote(table),))
    return {column: ServerColumn(kind, _digits(modifier)) for column, kind, modifier in rows}


def _affinity(declared: str | None) -> str:
    """SQLite's own rules."""
    kind = (declared or "").upper()
    for affinity, words in _AFFINITIES:
        if any(word in kind for word in words):
            return affinity
    return "numeric" if kind else "blob"


def _digits(modifier: int) -> int | None:
    if modifier < 4:
        return None
    digits = (modifier - 4) & 0x7FF
    return digits - 0x800 if digits & 0x400 else digits


def _remote(table: Table) -> str:
    return ".".join(quoted(part) for part in (table.remote or table.name).split("."))


def remote_query(table: Table) -> str:
    """Return the query that the database is sent."""
    remote = _remote(table)
    if table.kind == "postgresql":
        items = [
            f"CAST({quoted(c)} AS text) AS {quoted(c)}" if kind in _AS_TEXT else quoted(c)
            for c, kind in table.columns.items()
        ]
        return f"SELECT {', '.join(items)} FROM {remote}"
    forms = [(quoted(c), *_SQLITE.get(kind, _TEXT)) for c, kind in table.columns.items()]
    first = ", ".join(f"{example} AS {c}" for c, _, example in forms)
    rest = ", ".join(form.format(c=c) for c, form, _ in forms)
    return f"SELECT 1 AS {SENTINEL}, {first} UNION ALL SELECT 0, {rest} FROM {remote}"


def _failed(table: Table, error: Exception) -> DpstreamError:
    if isinstance(error, DpstreamError):
        return error
    fix = "check the address, the name and the columns in the project file, and the rights"
    return RunError(
        f"table {table.name}",
        f"cannot be read from its database ({type(error).__name__})",
        f"{fix}; {what_next(error, 'see the log of the database')}",
    )
