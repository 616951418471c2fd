"""A locked DuckDB with the catalog's tables and nothing else.

A connection in memory that may read exactly the files of the tables that are asked for.  After
they are named, external access, extensions and the settings themselves are locked: ATTACH, COPY,
other files, ``read_text`` and PRAGMA fail in DuckDB, whatever a parser let through.  Tables are
views over their files (or come as Arrow from a database), each column of the catalog's type; what
does not fit its type is NULL.  DuckDB's own error texts quote values and never leave this module.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping

import duckdb
import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.places import COLUMNAR, FILE_KINDS
from dpstream.pipelines.formats.rows import CUT_OFF, Rows
from dpstream.pipelines.tables.arrow import arrow_schema, parts_of
from dpstream.pipelines.tables.catalog import Table, Tables
from dpstream.pipelines.tables.databases import SENTINEL, readers
from dpstream.pipelines.tables.duckdb_errors import coded
from dpstream.pipelines.tables.files import (
    Piece,
    allow_paths,
    casts,
    check_columns,
    cut_off,
    files_of,
    parquet_view,
    quoted,
    rows_of,
    table_parts,
    typed,
)
from dpstream.state.connecting import Closing


class FileRows:
    """Some of a table's files that DuckDB does not read itself.

    DuckDB scans it through Arrow's protocol of capsules; each scan begins anew.
    """

    #: The error that ended a scan before its end; DuckDB reports it in words of its own.
    failure: Exception | None = None

    def __init__(self, table: Table, paths: list[str]) -> None:
        self._table, self._paths = table, paths
        self.schema = arrow_schema(table, paths[0])

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A new stream."""
        reader = pa.RecordBatchReader.from_batches(self.schema, self._noted())
        return reader.__arrow_c_stream__(requested_schema)

    def _noted(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches()
        except Exception as error:
            self.failure = error
            raise

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self._paths:
            for part in parts_of(self._table, path):
                if isinstance(part, Rows):
                    yield pa.RecordBatch.from_arrays(part.batch.columns, schema=self.schema)
                elif CUT_OFF & {*part.reasons}:  # its rest would be missing in the answer
                    raise cut_off(self._table)


def as_bytes(reader: pa.RecordBatchReader) -> tuple[pa.RecordBatchReader, set[str]]:
    """Return a database's rows with texts as bytes, for they may be invalid, and their columns."""
    schema = pa.schema([(f.name, _as_bytes(f.type)) for f in reader.schema])
    batches = (
        pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)],
            schema=schema,
        )
        for batch in reader
    )
    texts = {
        old.name for old, new in zip(reader.schema, schema, strict=True) if old.type != new.type
    }
    return pa.RecordBatchReader.from_batches(schema, batches), texts


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _as_bytes(kind.value_type)
    texts = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return pa.binary() if texts else kind


MEMORY = "2GB"
_UNSAFE = (
    "type_pushdown",
    "scalar_fn_pushdown",
    "common_subexpressions",
    "statistics_propagation",
)
_LOCKS = (
    "SET TimeZone = 'UTC'",
    "SET temp_directory = ''",
    "SET enable_progress_bar = false",  # it would stand between the rows of an answer
    # What two TRYs have in common leaves both, a scan's functions leave their TRY, and dates are
    # tried on the statistics of rows that WHERE drops: all of these raise what should be NULL.
    f"SET disabled_optimizers = '{','.join(_UNSAFE)}'",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


@functools.cache
def _unlocked() -> duckdb.DuckDBPyConnection:
    """Return a database without tables, for limits: each database costs 15 ms to open."""
    return duckdb.connect(":memory:", config={"threads": 1})


class Engine(Closing):
    """A locked DuckDB with some of a catalog's tables; a context that closes it.

    Args:
        catalog: the catalog; names: names of its tables that are needed.
        empty: tables have their columns and no rows, and no file is opened: to check a query.
        ordered: rows of a result keep the order of what they come from.
        piece: only this part of its table.
        rows: of tables whose files are not read: some rows, as another engine gave them.  A column
            that is not there is NULL; ``None``: no rows.
        memory, threads: limits of DuckDB (default: one thread for each core, up to 8).

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
        self._texts, self._paths = list[FileRows](), list[str]()
        self._tables = {name: catalog.tables[name] for name in sorted(names)}
        threads = threads or max(1, min(8, os.cpu_count() or 1))
        self._lots = 1 if ordered else threads
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads,
            "memory_limit": memory,
            "preserve_insertion_order": ordered,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
        }
        self._db = duckdb.connect(":memory:", config=config)
        try:
            with coded(self._paths, too_large(), not_run()):
                self._register(empty)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def release(self) -> None:
        """Give back what DuckDB has freed and keeps for its next query: 75 MiB of 1M rows.

        It does so wherever one of its databases is given a limit, and this one's is locked.
        """
        with _unlocked().cursor() as other:
            other.execute(f"SET memory_limit = '{MEMORY}'")

    def register(self, name: str, rows: pa.Table) -> None:
        """Add a table of rows that are public."""
        with coded([], too_large(), not_run()):
            self._db.register(name, rows)

    def run(self, query: exp.Expr | str) -> pa.Table:
        """Return the rows of a query.

        Raises:
            MemoryLimitError: beyond the limit; RunError: DuckDB cannot run it.
        """
        text = query if isinstance(query, str) else query.sql("duckdb", comments=False)
        for each in self._texts:
            each.failure = None  # of an earlier query
        try:
            with coded(self._paths, too_large(), not_run()):
                return self._db.sql(text).to_arrow_table()
        except RunError as error:
            failures = [each.failure for each in self._texts]
            if any(isinstance(failure, MemoryError) for failure in failures):
                raise too_large() from None
            own = next((each for each in failures if isinstance(each, DpstreamError)), error)
        raise own

    @property
    def rows(self) -> int:
        """About how many rows the files hold: from footers and sizes, to divide the work by."""
        return sum(rows_of(table) for table in self._tables.values() if table.kind in FILE_KINDS)

    def _register(self, empty: bool) -> None:
        databases = {}
        for name, table in self._tables.items():
            if name in self._given:
                continue
            if table.kind not in FILE_KINDS:
                databases[name] = table
            elif not empty and table.kind == "parquet":
                self._paths += files_of(table) if self._piece is None else [self._piece.path]
        if self._paths:
            self._db.execute(allow_paths(self._paths))
        for lock in _LOCKS:
            self._db.execute(lock)
        for name, table in self._tables.items():
            given = self._given.get(name)
            if given is not None:
                self._db.register(f"rows of {name}", given)
                self._db.execute(f"CREATE VIEW {quoted(name)} AS {_values_query(table, given)}")
            elif empty or table.kind not in FILE_KINDS or name in self._given:
                columns = ", ".join(f"{quoted(c)} {typed(table, c)}" for c in table.columns)
                self._db.execute(f"CREATE TABLE {quoted(name)} ({columns})")
            else:
                paths = files_of(table) if self._piece is None else [self._piece.path]
                # Pages are decoded before a charge.
                check_columns(table, paths, unpacked=table.kind not in COLUMNAR)
                select = (
                    parquet_view(table, self._piece, self._lots)
                    if table.kind == "parquet"
                    else " UNION ALL ".join(self._selects(table, paths))
                )
                self._db.execute(f"CREATE VIEW {quoted(name)} AS {select}")
        if databases and not empty:
            self._copy(databases)

    def _selects(self, table: Table, paths: list[str]) -> Iterator[str]:
        """SELECTs of files that come as Arrow: of one schema together."""
        together = [[path] for path in paths] if table.kind in COLUMNAR else [paths]
        for number, alike in enumerate(together):
            rows, name = FileRows(table, alike), f"{number} of {table.name}"
            self._texts.append(rows)
            self._db.register(name, rows)
            yield f"SELECT {casts(table)} FROM {quoted(name)}"

    def _copy(self, tables: dict[str, Table]) -> None:
        with readers(tables) as streams:
            for name, read in streams.items():
                table = tables[name]
                rows, texts = as_bytes(read())
                self._db.register("remote rows", rows)
                own = f" WHERE {SENTINEL} = 0" if table.kind == "sqlite" else ""
                self._db.execute(
                    f"INSERT INTO {quoted(name)} SELECT {casts(table, encoded=texts)} "
                    f"FROM {quoted('remote rows')}{own}"
                )
                self._db.unregister("remote rows")


def contents_of(catalog: Tables, name: str) -> list[bytes]:
    """Return the bytes that identify the content of a public table, wherever it is.

    They are those of files; of a database they stand for the rows in no order.

    Raises:
        DpstreamError: it cannot be read.
    """
    table = catalog.tables[name]
    if table.kind in FILE_KINDS:
        return table_parts(table)
    cells = (f"COALESCE(SHA256(CAST({quoted(c)} AS VARCHAR)), '')" for c in table.columns)
    rows = f"SELECT SHA256(CONCAT_WS(',', {', '.join(cells)})) AS row FROM {quoted(name)}"
    with Engine(catalog, [name]) as engine:
        digest = engine.run(f"SELECT SHA256(STRING_AGG(row, '' ORDER BY row)) AS d FROM ({rows})")
    return [f"{name}\0{list(table.columns)}\0{digest['d'][0].as_py()}".encode()]


class MemoryLimitError(RunError):
    """Signals that DuckDB reached its limit of memory; fewer units at once may fit."""


def too_large() -> MemoryLimitError:
    """Return the error for DuckDB's memory limit."""
    return MemoryLimitError(
        "statement", "needs more memory than it may have", "select fewer columns or rows"
    )


def not_run() -> RunError:
    """Return the error for every other error of DuckDB."""
    return RunError(
        "statement",
        "cannot be run by DuckDB in its rewritten form",
        "give operands one type by CAST, check patterns and the files of the tables",
    )


def _values_query(table: Table, given: pa.Table) -> str:
    """A SELECT of rows that another engine gave."""
    items = (
        quoted(column)
        if column in given.column_names
        else f"CAST(NULL AS {typed(table, column)}) AS {quoted(column)}"
        for column in table.columns
    )
    return f"SELECT {', '.join(items)} FROM {quoted(f'rows of {table.name}')}"
