"""The stages from the rows of stage 1 to the answer, one shard of units after the other.

**Stage 1 to stage 2**: rows of DuckDB become partials and an answer.  An accepted relation is local
to its unit (`ownership`), so that shards of units can be processed in turn, or on the workers of a
runner (`spread`): the same query on some units returns their rows.  The number of shards depends on
the size of the files, or on the memory that DuckDB needed; no released byte depends on it.

**Post-processing** of released columns gives their intervals, and the statement's outer query.  The
outer query (HAVING, ORDER BY, LIMIT, arithmetic, joins with public tables) runs on the released
rows alone.  A column that the outer query passes on unchanged keeps its interval: three more
columns (sd, low, high), with names that no statement can write.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from sqlglot import exp

from dpstream.accounting.arrays import Int64
from dpstream.accounting.query.bounds import BoundsDesign, Cut, Settled
from dpstream.accounting.query.grids import regridded
from dpstream.accounting.query.plan import QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import (
    Bounded,
    QueryAnswer,
    Totals,
    aggregated,
    answer,
    choose_bounds,
)
from dpstream.dp_transforms.one_shot.partials import Groups
from dpstream.pipelines.formats.receipt import sorted_rows
from dpstream.pipelines.sql.query_plan import Question, named_tables
from dpstream.pipelines.sql.receipt import MARK, PARTS, estimated
from dpstream.pipelines.sql.work import Work
from dpstream.pipelines.statements.allowed import AGGREGATES
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.tables.catalog import RELEASED, Catalog
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError
from dpstream.state.numbers import numbers

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
        rows: bounded rows, for quantiles columns only; each element has those of some of the units.
    """

    groups: Groups
    totals: Totals
    rows: Sequence[Bounded]


class Executor(Protocol):
    """Executes stage 1: this process, or a runner's workers."""

    def summed(self, work: Work, weights: Sequence[int]) -> Sums:
        """Return bounded partials of all units, summed.

        Args:
            weights: selection weights of a unit of 1, 2, .. groups (``Selection.weights``).
        """

    def counted(self, work: Work, design: BoundsDesign) -> dict[str, Int64]:
        """Return exact histograms of all units."""


class LocalShards:
    """Shards of units, one after the other in this process.

    Args:
        engine: DuckDB with the tables.
        shards: number of shards of units; ``None``: by the size of the files.
    """

    def __init__(self, engine: Engine, ring: KeyRing, shards: int | None = None) -> None:
        self._engine, self._ring = engine, ring
        self._shards = shards or min(MAX_SHARDS, 1 + engine.rows // ROWS_AT_ONCE)

    def summed(self, work: Work, weights: Sequence[int]) -> Sums:
        """Return bounded partials of all units, summed; see `Executor`."""

        def once() -> Sums:
            groups, totals = work.initial_groups(self._engine, self._ring), list[Totals]()
            bounded: list[Bounded] = []
            quantiles = any(column.kind == "quantiles" for column in work.plan.columns)
            for unit_rows in self._rows(work):
                partials = work.partials(unit_rows, groups, self._ring)
                del unit_rows  # it and what follows are not in memory together
                rows = work.bounded(partials, self._ring)
                del partials
                more = aggregated(rows, len(groups.ids), weights)
                totals = [totals[0].plus(more) if totals else more]
                if quantiles:
                    bounded.append(rows)
                del more, rows  # nor these and the next query
            return Sums(groups, totals[0], bounded)

        return self._fitted(once)

    def counted(self, work: Work, design: BoundsDesign) -> dict[str, Int64]:
        """Return exact histograms of all units; see `Executor`."""

        def once() -> dict[str, Int64]:
            groups, out = work.initial_groups(self._engine, self._ring), dict[str, Int64]()
            for unit_rows in self._rows(work):
                for name, cells in work.counted(unit_rows, groups, self._ring, design).items():
                    out[name] = cells + out[name] if name in out else cells
            return out

        return self._fitted(once)

    def _fitted(self, once: Callable[[], T]) -> T:
        """Run a function; if DuckDB's memory is too small, repeat it with more shards."""
        while True:
            try:
                return once()
            except MemoryLimitError:
                if self._shards >= MAX_SHARDS:
                    raise
                self._shards = min(MAX_SHARDS, 4 * self._shards)

    def _rows(self, work: Work) -> Iterator[pa.Table]:
        """Yield the rows of stage 1, shard by shard."""
        for shard in range(self._shards):
            unit_rows = self._engine.run(work.stage_one(self._shards, shard))
            self._engine.release()
            yield unit_rows
            del unit_rows  # the next rows and these are not in memory together


class Stage:
    """One run of a question.

    Args:
        executor: processes the units' rows.
    """

    def __init__(
        self, question: Question, catalog: Catalog, executor: Executor, ring: KeyRing, run_id: str
    ) -> None:
        self._question, self._catalog, self._executor = question, catalog, executor
        self._ring, self._name = ring, (bytes.fromhex(run_id), question.digest.encode())

    def run(self) -> StageAnswer:
        """Read rows, bound and aggregate contributions, draw noise.

        Raises:
            RunError: DuckDB cannot run the query.
        """
        question, settled = self._question, Settled(self._question.plan, frozenset(), {})
        if question.gridded.design is not None:
            settled = self._bounds(question.gridded.design)
        plan = settled.plan
        budget = question.gridded.budget(plan)
        work = Work.of(question.per_column, self._catalog, plan, self._name)
        sums = self._executor.summed(work, budget.weights)
        groups = sums.groups
        drawn = answer(plan, budget, sums.totals, sums.rows, groups.ids, self._ring, self._name)
        return StageAnswer(drawn, plan, groups, settled.nulls, settled.cuts)

    def _bounds(self, design: BoundsDesign) -> Settled:
        """Return the plan with bounds from histograms that this run pays for."""
        question = self._question
        named = {column.name: column for column in question.plan.columns if column.automatic}
        functions = tuple(f for f in question.per_column.functions if f.name in named)
        select = replace(question.per_column, functions=functions)
        plan = replace(question.plan, columns=tuple(named.values()))
        work = Work.of(select, self._catalog, plan, self._name, wide=True)
        counts = self._executor.counted(work, design)
        settled = choose_bounds(question.plan, design, counts, self._ring, self._name)
        bounds = {
            column.name: (column.low or 0.0, column.high or 0.0)
            for column in settled.plan.columns
            if column.name in named
        }
        return settled._replace(plan=regridded(question.plan, bounds, question.gridded.bits))


_AGGREGATES = tuple(AGGREGATES)


def released(question: Question, private_answer: StageAnswer) -> pa.Table:
    """Return the released relation with intervals, by canonical names; sorted, so that the order
    reveals nothing.
    """
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    groups = private_answer.groups.values
    if groups is not None:
        chosen = groups.take(numbers(np.asarray(private_answer.answer.group, np.int64)))
        columns = dict(zip(chosen.column_names, chosen.columns, strict=True))
    for function in question.select.functions:
        output = question.outputs[function.name]
        estimate = private_answer.answer.columns[output.column]
        absent = output.column in private_answer.nulls
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


def outer(question: Question, catalog: Catalog, rows: pa.Table, check: bool = False) -> pa.Table:
    """Return the rows of the outer query, with the intervals of unchanged columns.

    Args:
        rows: the released relation.
        check: whether public tables are replaced by empty ones.
    """
    tree = question.statement.outer.copy()
    _with_intervals(tree, {f.name for f in question.statement.functions})
    tables = named_tables([tree], catalog)
    with Engine(catalog, tables, empty=check, ordered=True) as engine:
        engine.register(RELEASED, _labelled(question, rows))
        return engine.run(safe_query(tree))  # type: ignore[arg-type]


def _labelled(question: Question, rows: pa.Table) -> pa.Table:
    """Return the released relation with the statement's labels, sorted by its groups."""
    groups = [group.name for group in question.statement.groups]
    columns = {label: rows.column(question.names[label]) for label in groups}
    for function in question.statement.functions:
        for end in ("", *(f"{MARK}{part}" for part in PARTS)):
            columns[f"{function.name}{end}"] = rows.column(f"{question.names[function.name]}{end}")
    return sorted_rows(pa.table(columns), groups)


def _with_intervals(node: exp.Expr, names: set[str]) -> set[str]:
    """Add the intervals of unchanged columns to a query; return the columns that have one."""
    if isinstance(node, exp.Subquery):
        return _with_intervals(node.this, names)
    if not isinstance(node, exp.Select):
        return set()
    aggregated = any(item.find(*_AGGREGATES) for item in node.expressions)
    if node.args.get("group") is not None or node.args.get("distinct") is not None or aggregated:
        return set()
    intervals: dict[str, set[str]] = {}
    for part in (node.args["from_"], *(node.args.get("joins") or ())):
        source = part.this
        if isinstance(source, exp.Table):
            intervals[source.alias_or_name] = names if source.name == RELEASED else set()
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
