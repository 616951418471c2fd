"""The stages from the rows of stage 1 to the answer, in this process or on a runner's workers.

**Stage 1 to stage 2**: rows of DuckDB become partials and an answer.  An accepted relation is local
to its unit (`ownership`), so that shards of units can be processed in turn, or on the workers of a
runner: the same query on some units returns their rows.  The number of shards depends on the size
of the files, or on the memory that DuckDB needed; no released byte depends on it.

**On a runner** (`Spread`, `Workers`) files are read in pieces, units are shuffled to shards, and
sums are returned.  The order of charge and answer is the same as without: the question is charged
before the pipeline is built, the noise is drawn here under the run id, and the answer is committed
before it is shown.  If a pipeline fails, asking again runs it again, under the same run id and at
no charge.

**Post-processing** of released columns gives their intervals, and the statement's outer query.  The
outer query (HAVING, ORDER BY, LIMIT, arithmetic, joins with public tables) runs on the released
rows alone.  A column that the outer query passes on unchanged keeps its interval: three more
columns (sd, low, high), with names that no statement can write.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from sqlglot import exp

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.places import FILE_KINDS
from dpstream.accounting.query.bounds import BoundsDesign, Cut, Settled
from dpstream.accounting.query.grids import regridded
from dpstream.accounting.query.plan import QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.one_shot import (
    Bounded,
    QueryAnswer,
    Totals,
    aggregated,
    answer,
    choose_bounds,
)
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.pipelines.formats.receipt import sorted_rows
from dpstream.pipelines.runners.bounded import Runner, run_to_end
from dpstream.pipelines.sql.query_plan import Question, tables_read
from dpstream.pipelines.sql.receipt import MARK, PARTS, estimated
from dpstream.pipelines.sql.work import Work, place_of, read_counts, read_sums
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.ownership import aggregates_in
from dpstream.pipelines.statements.statement import Statement, released_name
from dpstream.pipelines.tables.catalog import RELEASED, Catalog, Table
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError, not_run, too_large
from dpstream.pipelines.tables.files import (
    Piece,
    divisible,
    errors_of,
    files_of,
    is_not,
    rows_of,
)
from dpstream.state.disk_errors import decode_error
from dpstream.state.locks import private_folder
from dpstream.state.numbers import arrow_numbers

#: Rows of files that are worked on together (each turn reads all files again), and the most turns.
ROWS_AT_ONCE, MAX_SHARDS = 1_750_000, 4_096
T = TypeVar("T")


class StageAnswer(NamedTuple):
    """A private answer, and the plan with the bounds that were chosen for it.

    Attributes:
        nulls: columns that are NULL, because too few units have a value to choose bounds.
        cuts: what chosen bounds leave out, by column.
    """

    answer: QueryAnswer
    plan: QueryPlan
    groups: Groups
    nulls: frozenset[str]
    cuts: dict[str, Cut]


class Sums(NamedTuple):
    """PRIVATE sums over all units.

    Attributes:
        groups: the groups that occur.
        totals: sums by group.
        rows: bounded rows, for columns that have rows; each element has those of some of the units.
    """

    groups: Groups
    totals: Totals
    rows: Sequence[Bounded]


class _Shards:
    """A number of shards of units, which grows until the memory is large enough for each."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def _fitted(self, once: Callable[[], T]) -> T:
        """Run a function; if the memory of DuckDB is too small, repeat it with more shards."""
        while True:
            try:
                return once()
            except MemoryLimitError:
                if self._shards >= MAX_SHARDS:
                    raise
                self._shards = min(MAX_SHARDS, 4 * self._shards)


class LocalShards(_Shards):
    """Stage 1 in this process: shards of units, one after the other.

    Args:
        engine: DuckDB with the tables.
        shards: number of shards of units; ``None``: by the size of the files.
    """

    def __init__(self, engine: Engine, ring: KeyRing, shards: int | None = None) -> None:
        super().__init__(shards or min(MAX_SHARDS, 1 + engine.rows // ROWS_AT_ONCE))
        self._engine, self._ring = engine, ring

    def summed(self, work: Work, weights: Sequence[int]) -> Sums:
        """Return bounded partials of all units, summed.

        Args:
            weights: selection weights of a unit of 1, 2, .. groups (``Selection.weights``).
        """

        def once() -> Sums:
            groups, totals = work.initial_groups(self._engine, self._ring), list[Totals]()
            bounded: list[Bounded] = []
            tables = any(column.has_rows for column in work.plan.columns)
            for unit_rows in self._rows(work):
                partials = work.partials(unit_rows, groups, self._ring)
                del unit_rows  # it and what follows are not in memory together
                rows = work.bounded(partials, self._ring)
                del partials
                more = aggregated(rows, len(groups.ids), weights)
                totals = [totals[0].plus(more) if totals else more]
                if tables:
                    bounded.append(rows)
                del more, rows  # nor these and the next query
            return Sums(groups, totals[0], bounded)

        return self._fitted(once)

    def counted(self, work: Work, design: BoundsDesign) -> dict[str, Int64]:
        """Return exact histograms of all units."""

        def once() -> dict[str, Int64]:
            groups, out = work.initial_groups(self._engine, self._ring), dict[str, Int64]()
            for unit_rows in self._rows(work):
                for name, cells in work.counted(unit_rows, groups, self._ring, design).items():
                    out[name] = cells + out[name] if name in out else cells
            return out

        return self._fitted(once)

    def _rows(self, work: Work) -> Iterator[pa.Table]:
        """Yield the rows of stage 1, shard by shard."""
        for shard in range(self._shards):
            unit_rows = self._engine.run(work.stage_one(self._shards, shard))
            self._engine.release()
            yield unit_rows
            del unit_rows  # the next rows and these are not in memory together


def private_answer(
    question: Question,
    catalog: Catalog,
    executor: "LocalShards | Workers",
    ring: KeyRing,
    run_id: str,
) -> StageAnswer:
    """Read rows, bound and aggregate contributions, draw noise.

    Args:
        executor: processes the units' rows.

    Raises:
        RunError: DuckDB cannot run the query.
    """
    name, design = (bytes.fromhex(run_id), question.digest.encode()), question.gridded.design
    settled = Settled(question.plan, frozenset(), {})
    if design is not None:  # bounds from histograms that this run pays for
        named = {column.name: column for column in question.plan.columns if column.automatic}
        functions = tuple(f for f in question.per_column.functions if f.name in named)
        select = replace(question.per_column, functions=functions)
        wide_plan = replace(question.plan, columns=tuple(named.values()))
        wide = Work.of(select, catalog, wide_plan, name, wide=True)
        settled = choose_bounds(question.plan, design, executor.counted(wide, design), ring, name)
        bounds = {
            column.name: (column.low or 0.0, column.high or 0.0)
            for column in settled.plan.columns
            if column.name in named
        }
        plan = regridded(question.plan, bounds, question.gridded.bits)
        settled = settled._replace(plan=plan)
    plan = settled.plan
    budget = question.gridded.budget(plan)
    sums = executor.summed(Work.of(question.per_column, catalog, plan, name), budget.weights)
    drawn = answer(plan, budget, sums.totals, sums.rows, sums.groups.ids, ring, name)
    return StageAnswer(drawn, plan, sums.groups, settled.nulls, settled.cuts)


def released(question: Question, answered: StageAnswer) -> pa.Table:
    """Return the released relation with intervals, by canonical names; sorted, so that the order
    reveals nothing.
    """
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    groups = answered.groups.values
    if groups is not None:
        chosen = groups.take(arrow_numbers(np.asarray(answered.answer.group, np.int64)))
        columns = dict(zip(chosen.column_names, chosen.columns, strict=True))
    for function in question.select.functions:
        output = question.outputs[function.name]
        estimate = answered.answer.columns[output.column]
        absent = output.column in answered.nulls
        columns |= estimated(function.name, estimate, output.places, function.many, absent)
    by = [] if groups is None else groups.column_names
    return sorted_rows(pa.table(columns), by)


def empty(question: Question, types: Iterable[pa.DataType]) -> pa.Table:
    """Return a released relation without rows, to check the outer query on."""
    columns = {
        group.name: pa.nulls(0, kind)
        for group, kind in zip(question.select.groups, types, strict=True)
    }
    for function in question.select.functions:
        kind = pa.list_(pa.float64()) if function.many else pa.float64()
        for name in (function.name, *(f"{function.name}{MARK}{part}" for part in PARTS)):
            columns[name] = pa.nulls(0, kind)
    return pa.table(columns)


def outer(question: Question, engine: Engine, rows: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of the outer query, with the intervals of unchanged columns.

    Args:
        engine: an ordered one with the public tables that the outer query reads.
        rows: the released relation of each private SELECT.
    """
    relations = [_labelled(part, of) for part, of in zip(question.singles, rows, strict=True)]
    return outer_rows(question.statement, engine, relations)


def outer_rows(statement: Statement, engine: Engine, rows: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of the outer query of labelled rows; see `outer`."""
    tree, names = statement.outer.copy(), dict[str, set[str]]()
    parts = statement.parts or (statement,)
    for number, (part, relation) in enumerate(zip(parts, rows, strict=True)):
        names[released_name(number)] = {f.name for f in part.functions}
        engine.register(released_name(number), relation)
    _with_intervals(tree, names)
    return engine.run(safe_query(tree))  # type: ignore[arg-type]


def passed_on(question: Question, rows: pa.Table) -> pa.Table | None:
    """Return the rows of an outer query that only names columns; ``None`` if it does more."""
    return named_rows(question.statement.outer, _labelled(question, rows))


def named_rows(outer: exp.Query, labelled: pa.Table) -> pa.Table | None:
    """Return labelled rows as a query names them; ``None`` if it does more.

    It needs no database, whose start and end are a tenth of a small answer.
    """
    parts = {part for part, value in outer.args.items() if value}
    if not isinstance(outer, exp.Select) or parts != {"expressions", "from_"}:
        return None
    source, columns = (
        outer.args["from_"].this,
        {i.alias_or_name: i.unalias() for i in outer.selects},
    )
    released = isinstance(source, exp.Table) and source.name == RELEASED
    if not released or not all(isinstance(column, exp.Column) for column in columns.values()):
        return None
    ends = ("", *(f"{MARK}{part}" for part in PARTS))
    names = {
        f"{name}{end}": f"{column.name}{end}" for name, column in columns.items() for end in ends
    }
    there = {name: of for name, of in names.items() if of in labelled.column_names}
    return pa.table({name: labelled.column(of) for name, of in there.items()})


def _labelled(question: Question, rows: pa.Table) -> pa.Table:
    """Return the released relation with the statement's labels, sorted by its groups."""
    groups = [group.name for group in question.statement.groups]
    columns = {label: rows.column(question.names[label]) for label in groups}
    for function in question.statement.functions:
        for end in ("", *(f"{MARK}{part}" for part in PARTS)):
            columns[f"{function.name}{end}"] = rows.column(f"{question.names[function.name]}{end}")
    return sorted_rows(pa.table(columns), groups)


def _with_intervals(node: exp.Expr, names: Mapping[str, set[str]]) -> set[str]:
    """Add the intervals of unchanged columns to a query; return the columns that have one.

    Args:
        names: of each released relation the columns that have one.
    """
    if isinstance(node, exp.Subquery):
        return _with_intervals(node.this, names)
    if not isinstance(node, exp.Select):
        return set()
    aggregated = any(map(aggregates_in, node.expressions))
    if node.args.get("group") is not None or node.args.get("distinct") is not None or aggregated:
        return set()
    intervals: dict[str, set[str]] = {}
    for part in filter(None, (node.args.get("from_"), *(node.args.get("joins") or ()))):
        source = part.this
        if isinstance(source, exp.Table):
            intervals[source.alias_or_name] = names.get(source.name, set())
        else:
            intervals[source.alias_or_name] = _with_intervals(source, names)
    interval_columns = set()
    for item in list(node.expressions):
        column = item.unalias()
        if isinstance(column, exp.Column) and column.name in intervals.get(column.table, ()):
            interval_columns.add(item.alias_or_name)
            for part in PARTS:
                inner = exp.column(f"{column.name}{MARK}{part}", table=column.table, quoted=True)
                name = f"{item.alias_or_name}{MARK}{part}"
                node.append("expressions", exp.alias_(inner, name, quoted=True))
    return interval_columns


#: Rows of a piece of a file, and of a shard: a worker holds them as they were read, too.
PIECE_ROWS = 1_050_000


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
        self.shards = shards or min(MAX_SHARDS, max(1 + rows // PIECE_ROWS, runner.parallelism))
        self._pieces = [piece for table in private for piece in pieces_of(table)]

    def executor(self, keys: SecretSource, ring: KeyRing, run_id: str) -> "Workers":
        """Return the workers of a charged run."""
        return Workers(self, keys.of_run(run_id, ring.fingerprint), ring, run_id)

    def run(
        self,
        run_id: str,
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

        def expected_errors() -> list[DpstreamError]:
            """Errors that workers may raise about files and memory; the last is memory."""
            tables = self._catalog.tables.values()
            return [*(one for table in tables for one in errors_of(table)), not_run(), too_large()]

        run_to_end(
            self._runner,
            run_id,
            lambda pipeline: build(pipeline, task, self._pieces),
            handed_over,
            expected_errors,
        )

    def public(self) -> Engine:
        """Return an engine with the public tables."""
        names = [table.name for table in self._catalog.tables.values() if table.unit is None]
        return Engine(self._catalog, names)


class Workers(_Shards):
    """Stage 1 on a runner's workers."""

    def __init__(self, spread: Spread, keys: SecretSource, ring: KeyRing, run_id: str) -> None:
        super().__init__(spread.shards)
        self._spread, self._keys, self._ring, self._run_id = spread, keys, ring, run_id

    def summed(self, work: Work, weights: Sequence[int]) -> Sums:
        """Return bounded partials of all units, summed; see `LocalShards`."""
        names = [column.name for column in work.plan.columns if column.has_rows]

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
        """Return exact histograms of all units."""
        names = [column.name for column in work.plan.columns]
        return self._done(work, (), design, lambda folder: read_counts(folder, self._shards, names))

    def _done(
        self,
        work: Work,
        weights: Sequence[int],
        design: BoundsDesign | None,
        read: Callable[[Path], T],
    ) -> T:
        """Run the pipeline and read its result."""

        def once() -> T:
            with private_folder(self._spread.beside, "account.path") as folder:
                self._spread.run(
                    self._run_id, str(folder), self._keys, work, weights, design, self._shards
                )
                return read(folder)

        return self._fitted(once)


def _check(table: Table) -> None:
    """Refuse a table whose pieces would be read differently from the whole."""
    if table.kind not in FILE_KINDS:
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
            raise decode_error(is_not(table, "Parquet"), error, Path(path)) from None
    if any(not schema.equals(schemas[0]) for schema in schemas):
        raise UsageError(
            f"table {table.name}", "has files of different columns", "ask without --runner"
        )


def pieces_of(table: Table) -> Iterator[Piece]:
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
            if rows and (rows >= PIECE_ROWS or last):  # a piece without rows is a whole file
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
