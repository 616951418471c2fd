"""DuckDB behind a lock: the catalog's tables and nothing else.

A connection in memory that may read exactly the files of the tables that are asked for.  After
they are named, external access, extensions and the settings themselves are locked: ATTACH, COPY,
other files, ``read_text`` and PRAGMA fail in DuckDB, whatever a parser let through.  Tables are
views over their files (or come as Arrow from a database), each column of the catalog's type; what
does not fit its type is NULL.  DuckDB's own error texts quote values and never leave this module.
"""

import contextlib
import csv
import gzip
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.pipelines.sql.catalog import Table, Tables
from dpstream.pipelines.sql.databases import SENTINEL, readers
from dpstream.pipelines.sql.inputs import FILES, files_of

MEMORY = "2GB"
_TYPES = {
    "INT64": "BIGINT", "FLOAT64": "DOUBLE", "NUMERIC": "DECIMAL(38, 9)", "BOOL": "BOOLEAN",
    "STRING": "VARCHAR", "BYTES": "BLOB", "DATE": "DATE", "TIMESTAMP": "TIMESTAMPTZ",
    "DATETIME": "TIMESTAMP",
}  # fmt: skip
_UNSAFE = (
    "type_pushdown", "scalar_fn_pushdown", "common_subexpressions", "statistics_propagation",
)  # fmt: skip
_LOCKS = (
    "SET TimeZone = 'UTC'",
    "SET temp_directory = ''",
    "SET enable_progress_bar = false",  # it would stand between the rows of an answer
    # A cast that moves into the reader of CSV drops a row where it should give NULL.  What two
    # TRYs have in common leaves both, a scan's functions leave their TRY, and dates are tried on
    # the statistics of rows that WHERE drops: all of these raise what should be NULL.
    f"SET disabled_optimizers = '{','.join(_UNSAFE)}'",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class Piece(NamedTuple):
    """A part of a table's files that is read by itself.

    Attributes:
        table: its name; path: one of its files.
        first, rows: of a Parquet file; no rows: the whole file.
    """

    table: str
    path: str
    first: int = 0
    rows: int = 0


class Engine:
    """A locked DuckDB with some of a catalog's tables; a context that closes it.

    Args:
        catalog: of the tables; names: which of them.
        empty: tables have their columns and no rows, and no file is opened: to check a query.
        ordered: rows of a result keep the order of what they come from.
        piece: only this part of its table.
        rows: of tables whose files are not read: some rows, as another engine gave them.  A column
            that is not there is NULL; ``None``: no rows.
        memory, threads: that it may use (default: as many threads as there are cores, up to 8).

    Raises:
        DpstreamError: a table cannot be read.
    """

    def __init__(
        self,
        catalog: Tables,
        names: Iterable[str],
        empty: bool = False,
        ordered: bool = False,
        memory: str = MEMORY,
        piece: Piece | None = None,
        rows: Mapping[str, pa.Table | None] = {},
        threads: int | None = None,
    ) -> None:
        self._piece, self._given = piece, rows
        self._tables = {name: catalog.tables[name] for name in sorted(names)}
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads or max(1, min(8, os.cpu_count() or 1)),
            "memory_limit": memory,
            "preserve_insertion_order": ordered,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
        }
        self._db = duckdb.connect(":memory:", config=config)
        try:
            with _coded():
                self._register(empty)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._db.close()

    def register(self, name: str, rows: pa.Table) -> None:
        """Add a table of rows that are public."""
        with _coded():
            self._db.register(name, rows)

    def run(self, query: exp.Expr | str) -> pa.Table:
        """The rows of a query.

        Raises:
            MemoryLimitError: beyond the limit; RunError: DuckDB cannot run it.
        """
        text = query if isinstance(query, str) else query.sql("duckdb", comments=False)
        with _coded():
            return self._db.sql(text).to_arrow_table()

    @property
    def rows(self) -> int:
        """About how many rows the files hold: from footers and sizes, to divide the work by."""
        return sum(rows_of(table) for table in self._tables.values() if table.kind in FILES)

    def _register(self, empty: bool) -> None:
        databases = {}
        allowed: list[str] = []
        for name, table in self._tables.items():
            if name in self._given:
                continue
            if table.kind not in FILES:
                databases[name] = table
            elif not empty:
                allowed += files_of(table) if self._piece is None else [self._piece.path]
        if allowed:
            self._db.execute(f"SET allowed_paths = [{', '.join(_text(p) for p in allowed)}]")
        for lock in _LOCKS:
            self._db.execute(lock)
        for name, table in self._tables.items():
            given = self._given.get(name)
            if given is not None:
                self._db.register(f"rows of {name}", given)
                self._db.execute(f"CREATE VIEW {_name(name)} AS {_shown(table, given)}")
            elif empty or table.kind not in FILES or name in self._given:
                columns = ", ".join(f"{_name(c)} {_typed(table, c)}" for c in table.columns)
                self._db.execute(f"CREATE TABLE {_name(name)} ({columns})")
            else:
                self._db.execute(f"CREATE VIEW {_name(name)} AS {_view(table, self._piece)}")
        if databases and not empty:
            self._copy(databases)

    def _copy(self, tables: dict[str, Table]) -> None:
        with readers(tables) as found:
            for name, read in found.items():
                table = tables[name]
                self._db.register("remote rows", read())
                own = f" WHERE {SENTINEL} = 0" if table.kind == "sqlite" else ""
                self._db.execute(
                    f"INSERT INTO {_name(name)} SELECT {_casts(table)} FROM {_name('remote rows')}"
                    f"{own}"
                )
                self._db.unregister("remote rows")


class MemoryLimitError(RunError):
    """DuckDB reached its limit of memory; fewer units at once may fit."""


@contextlib.contextmanager
def _coded() -> Iterator[None]:
    """DuckDB's errors as coded ones, without their texts and causes."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        found: DpstreamError = MemoryLimitError(
            "statement", "needs more memory than it may have", "select fewer columns or rows"
        )
    except (duckdb.Error, pa.ArrowException, UnicodeError):
        found = RunError(
            "statement",
            "cannot be run by DuckDB in its rewritten form",
            "give operands one type by CAST, check patterns and the files of the tables",
        )
    else:
        return
    raise found from None


def rows_of(table: Table) -> int:
    """About how many rows a table's files hold."""
    found = 0
    for path in files_of(table):
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            if table.kind == "parquet":
                found += pq.read_metadata(path).num_rows
            else:
                found += os.path.getsize(path) // 24
    return found


def _shown(table: Table, given: pa.Table) -> str:
    """A SELECT of rows that another engine gave."""
    items = (
        _name(column)
        if column in given.column_names
        else f"CAST(NULL AS {_typed(table, column)}) AS {_name(column)}"
        for column in table.columns
    )
    return f"SELECT {', '.join(items)} FROM {_name(f'rows of {table.name}')}"


def _view(table: Table, piece: Piece | None) -> str:
    """A SELECT of a table's files with the catalog's types."""
    paths = files_of(table) if piece is None else [piece.path]
    if table.kind == "parquet":
        some = "" if piece is None or not piece.rows else (
            f" WHERE file_row_number >= {piece.first} "
            f"AND file_row_number < {piece.first + piece.rows}"
        )  # fmt: skip
        more = ", file_row_number = true" if some else ""
        read = f"read_parquet({_list(paths)}, union_by_name = true{more})"
        return f"SELECT {_casts(table)} FROM {read}{some}"
    if table.kind == "jsonl":
        names = ", ".join(f"{_text(c)}: 'VARCHAR'" for c in table.columns)
        return (
            f"SELECT {_casts(table)} FROM read_json({_list(paths)}, columns = {{{names}}}, "
            "format = 'newline_delimited', ignore_errors = true)"
        )
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in paths:
        alike[_header(table, path)].append(path)
    return " UNION ALL ".join(_csv(table, header, some) for header, some in alike.items())


def _csv(table: Table, header: tuple[str, ...], paths: list[str]) -> str:
    """Dialect and columns are given, so that no row decides about them."""
    names = ", ".join(f"{_text(f'c{i}')}: 'VARCHAR'" for i in range(len(header)))
    places = {name.lower(): f"c{i}" for i, name in enumerate(header)}
    missing = [c for c in table.columns if c not in places]
    if missing:
        raise RunError(
            f"table {table.name}", "has a file without one of its columns", "correct its header"
        )
    return (
        f"SELECT {_casts(table, places)} FROM read_csv({_list(paths)}, columns = {{{names}}}, "
        "auto_detect = false, header = true, delim = ',', quote = '\"', escape = '\"', "
        "ignore_errors = true)"
    )


def _header(table: Table, path: str) -> tuple[str, ...]:
    """The names in a CSV file's first line; they are public."""
    try:
        opened = gzip.open if path.endswith(".gz") else open
        if path.endswith(".zst"):
            return tuple(table.columns)
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            return tuple(next(csv.reader(file), ()))
    except (OSError, UnicodeError, csv.Error):
        found = RunError(f"table {table.name}", "has a file that is not CSV", "correct it")
    raise found


def _casts(table: Table, places: dict[str, str] | None = None) -> str:
    """A table's columns with its types; texts that are units in one spelling (NFC)."""
    items = []
    for column in table.columns:
        source = _name(column if places is None else places[column])
        item = f"TRY_CAST({source} AS {_typed(table, column)})"
        if column in table.units and table.columns[column] == "STRING":
            item = f"nfc_normalize({item})"
        items.append(f"{item} AS {_name(column)}")
    return ", ".join(items)


def _typed(table: Table, column: str) -> str:
    """DuckDB's type of a column; decimals of Parquet keep their own width."""
    kind = table.columns[column]
    if kind == "NUMERIC" and table.kind == "parquet":
        with contextlib.suppress(OSError, pa.ArrowException, IndexError):
            for field in pq.read_schema(files_of(table)[0]):
                if field.name.lower() == column and pa.types.is_decimal(field.type):
                    if field.type.precision <= 38:
                        return f"DECIMAL({field.type.precision}, {field.type.scale})"
                    break
    return _TYPES[kind]


def _list(paths: list[str]) -> str:
    return f"[{', '.join(_text(p) for p in paths)}]"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
