"""Stage 1 on a runner: files are read in pieces, units are shuffled to shards, sums are returned.

The order of charge and answer is the same as without a runner: the question is charged before the
pipeline is built, the noise is drawn here under the run id, and the answer is committed before it
is shown.  If a pipeline fails, asking again runs it again, under the same run id and at no charge.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from sqlglot import exp

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.query.bounds import BoundsDesign
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource, destroy_keys
from dpstream.dp_transforms.one_shot import Bounded, Totals
from dpstream.pipelines.runners.bounded import Runner, run_to_end
from dpstream.pipelines.sql.query_plan import Question, tables_read
from dpstream.pipelines.sql.stage import MAX_SHARDS, Sums
from dpstream.pipelines.sql.work import Work, place_of, read_counts, read_sums
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError, not_run, too_large
from dpstream.pipelines.tables.files import (
    FILES,
    Piece,
    divisible,
    errors_of,
    files_of,
    is_not,
    rows_of,
)
from dpstream.state.disk_errors import verdict
from dpstream.state.locks import private_folder

#: Rows of a piece of a file, and of a shard: a worker holds them as they were read, too.
ROWS_AT_ONCE = 1_050_000
T = TypeVar("T")


class Spread:
    """A runner's workers for one question; checks before the charge that they can be used.

    Args:
        shards: number of shards of units; ``None``: by the size of the files and the number of
            workers.

    Attributes:
        shards: the number of shards.
        beside: the folder that workers write to: the account's.

    Raises:
        UsageError: the runner cannot be used, or a table cannot be read in pieces.
    """

    def __init__(
        self, runner: Runner, question: Question, catalog: Catalog, shards: int | None = None
    ) -> None:
        runner.check()
        names = tables_read(question.select, catalog)
        tables = {name: catalog.tables[name] for name in catalog.tables if name in names}
        for table in tables.values():
            _check(table)
        self._runner, self.beside = runner, catalog.beside
        self._catalog = dataclasses.replace(catalog, tables=tables, secret=SecretSource())
        private = [table for table in _owners_first(tables) if table.unit is not None]
        columns = _columns(question)
        self._columns = {table.name: _needed(table, tables, columns) for table in private}
        rows = sum(rows_of(table) for table in private)
        self.shards = shards or min(MAX_SHARDS, max(1 + rows // ROWS_AT_ONCE, runner.parallelism))
        self._pieces = [piece for table in private for piece in _pieces(table)]

    def executor(self, keys: SecretSource, ring: KeyRing, run_id: str) -> "Workers":
        """Return the workers of a charged run."""
        return Workers(self, keys.of_run(run_id, ring.fingerprint), ring, run_id)

    def run(
        self,
        folder: str,
        keys: SecretSource,
        work: Work,
        weights: Sequence[int],
        design: BoundsDesign | None,
        shards: int,
    ) -> None:
        """Run the pipeline to its end.

        Raises:
            DpstreamError: the pipeline failed.
        """
        from dpstream.pipelines.sql.flow import Task, build

        task = Task(
            work, design, self._catalog, self._columns, tuple(weights), shards, folder, keys
        )

        def handed_over() -> bool:
            return all(place_of(Path(folder), shard).exists() for shard in range(shards))

        run_to_end(
            self._runner,
            lambda pipeline: build(pipeline, task, self._pieces),
            handed_over,
            self._expected_errors,
        )

    def _expected_errors(self) -> list[DpstreamError]:
        """Return the errors that workers may raise about files and memory; the last is memory."""
        tables = self._catalog.tables.values()
        return [*(one for table in tables for one in errors_of(table)), not_run(), too_large()]

    def public(self) -> Engine:
        """Return an engine with the public tables."""
        names = [table.name for table in self._catalog.tables.values() if table.unit is None]
        return Engine(self._catalog, names)


class Workers:
    """A runner's workers, which do stage 1."""

    def __init__(self, spread: Spread, keys: SecretSource, ring: KeyRing, run_id: str) -> None:
        self._spread, self._keys, self._ring, self._run_id = spread, keys, ring, run_id
        self._shards = spread.shards

    def summed(self, work: Work, weights: Sequence[int]) -> Sums:
        """Return bounded partials of all units, summed; see `stage.Executor`."""
        names = [column.name for column in work.plan.columns if column.kind == "quantiles"]

        def read(folder: Path) -> Sums:
            with self._spread.public() as engine:
                groups = work.initial_groups(engine, self._ring)
            totals, bounded = list[Totals](), list[Bounded]()
            for more, rows in read_sums(folder, self._shards, groups, names):
                totals = [totals[0].plus(more) if totals else more]
                bounded.append(rows)
            return Sums(groups, totals[0], bounded)

        return self._done(work, weights, None, read)

    def counted(self, work: Work, design: BoundsDesign) -> dict[str, Int64]:
        """Return exact histograms of all units; see `stage.Executor`."""
        names = [column.name for column in work.plan.columns]
        return self._done(work, (), design, lambda folder: read_counts(folder, self._shards, names))

    def _done(
        self,
        work: Work,
        weights: Sequence[int],
        design: BoundsDesign | None,
        read: Callable[[Path], T],
    ) -> T:
        """Run and read the result; if a worker's memory is too small, repeat with more shards."""
        while True:
            try:
                with private_folder(self._spread.beside, "account.path") as folder:
                    self._spread.run(str(folder), self._keys, work, weights, design, self._shards)
                    return read(folder)
            except MemoryLimitError:
                if self._shards >= MAX_SHARDS:
                    raise
                self._shards = min(MAX_SHARDS, 4 * self._shards)
            finally:
                destroy_keys(self._run_id)


def _check(table: Table) -> None:
    """Refuse a table whose pieces would be read differently from the whole."""
    if table.kind not in FILES:
        raise UsageError(
            f"table {table.name}",
            "is of a database, which workers do not read",
            "ask without --runner, or name files",
        )
    if table.kind != "parquet":
        return
    schemas = []
    for path in files_of(table):
        try:
            schemas.append(pq.read_schema(path).remove_metadata())
        except (OSError, pa.ArrowException) as error:
            raise verdict(is_not(table, "Parquet"), error, Path(path)) from None
    if any(not schema.equals(schemas[0]) for schema in schemas):
        raise UsageError(
            f"table {table.name}", "has files of different columns", "ask without --runner"
        )


def _pieces(table: Table) -> Iterator[Piece]:
    """Yield the files; large Parquet files by row groups."""
    for path in files_of(table):
        if table.kind != "parquet" or not divisible(table, path):
            yield Piece(table.name, path)
            continue
        footer, first, rows = pq.read_metadata(path), 0, 0
        if not footer.num_rows:
            yield Piece(table.name, path)
        for number in range(footer.num_row_groups):
            rows += footer.row_group(number).num_rows
            last = number == footer.num_row_groups - 1
            if rows and (rows >= ROWS_AT_ONCE or last):  # a piece without rows is a whole file
                yield Piece(table.name, path, first, rows)
                first, rows = first + rows, 0


def _owners_first(tables: dict[str, Table]) -> list[Table]:
    """Sort tables so that each follows the table that owns its rows."""

    def depth(table: Table) -> int:
        return 0 if table.via is None else 1 + depth(tables[table.via.table])

    return sorted(tables.values(), key=depth)


def _columns(question: Question) -> set[str]:
    """Return the names of all columns in a question, of whatever table."""
    select = question.select
    nodes: list[exp.Expr] = [select.source, select.unit]
    nodes += [group.expression for group in select.groups]
    nodes += [f.argument for f in select.functions if f.argument is not None]
    if select.public is not None:
        nodes.append(select.public)
    return {column.name for node in nodes for column in node.find_all(exp.Column)}


def _needed(table: Table, tables: dict[str, Table], columns: Iterable[str]) -> tuple[str, ...]:
    """Return a table's columns that are asked for, lead to its owner, or own others."""
    needed = {*columns, *table.units}
    if table.via is not None:
        needed |= {mine for mine, _ in table.via.on}
    for other in tables.values():
        if other.via is not None and other.via.table == table.name:
            needed |= {key for _, key in other.via.on}
    return tuple(column for column in table.columns if column in needed)
