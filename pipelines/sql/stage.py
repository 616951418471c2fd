"""Stage 1 to stage 2: rows of DuckDB, shard by shard of units, become partials, and an answer.

An accepted relation is local to its unit (`ownership`), so units can be worked on in turns: the
same query with a filter on a hash of the unit gives the same rows.  How many turns there are
follows the size of the files, or the memory that DuckDB asked for; no released byte depends on it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from sqlglot import exp

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.query.bounds import VALUES
from dpstream.accounting.query.parts import centre_of, middle_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import (
    Bounded,
    Partials,
    QueryAnswer,
    Rows,
    Totals,
    aggregated,
    answer,
    bounded,
    choose_bounds,
)
from dpstream.dp_transforms.one_shot.aggregation import per_group
from dpstream.dp_transforms.one_shot.bounding import smallest
from dpstream.pipelines.sql.catalog import Catalog
from dpstream.pipelines.sql.engine import Engine, MemoryLimitError
from dpstream.pipelines.sql.exact import safe_query
from dpstream.pipelines.sql.groups import Groups, encoded, keyed
from dpstream.pipelines.sql.query_plan import Question, grids_of, regridded
from dpstream.pipelines.sql.rewrite import stage_one
from dpstream.pipelines.sql.statement import Statement

#: Rows of files that are worked on together, and the most turns.
ROWS_AT_ONCE, MAX_SHARDS = 1_050_000, 4_096
#: Bounds of what automatic bounds are looked for in, in grid steps.
_WIDE = 1 << 40


class Found(NamedTuple):
    """A private answer, and the plan with the bounds that were chosen for it.

    Attributes:
        nulls: columns without bounds, because too few units have a value: NULL.
    """

    answer: QueryAnswer
    plan: QueryPlan
    groups: Groups
    nulls: frozenset[str]


class Stage:
    """One run of a question on the tables of an engine.

    Args:
        shards: turns of units, ``None``: as many as the size of the files asks for.
    """

    def __init__(
        self,
        question: Question,
        catalog: Catalog,
        engine: Engine,
        ring: KeyRing,
        run_id: str,
        shards: int | None = None,
    ) -> None:
        self._question, self._catalog, self._engine = question, catalog, engine
        self._ring, self._name = ring, (bytes.fromhex(run_id), question.digest.encode())
        self._shards = shards or min(MAX_SHARDS, 1 + engine.rows // ROWS_AT_ONCE)

    def run(self) -> Found:
        """Read, bound, aggregate, draw.

        Raises:
            RunError: DuckDB cannot run it.
        """
        while True:
            try:
                return self._run()
            except MemoryLimitError:
                if self._shards >= MAX_SHARDS:
                    raise
                self._shards = min(MAX_SHARDS, 4 * self._shards)

    def _run(self) -> Found:
        question, plan, nulls = self._question, self._question.plan, frozenset[str]()
        if question.design is not None:
            plan, nulls = self._bounds()
        budget, groups = question.budget(plan), self._groups()
        totals: Totals | None = None
        kept: list[Bounded] = []
        quantiles = any(column.kind == "quantiles" for column in plan.columns)
        for found in self._rows(question.asked, plan):
            partials = self._partials(found, question.asked, plan, groups)
            del found
            rows = bounded(plan, partials, self._ring, self._name)
            more = aggregated(rows, len(groups.ids), budget.weights)
            totals = more if totals is None else totals.plus(more)
            if quantiles:
                kept.append(rows)
        assert totals is not None
        drawn = answer(plan, budget, totals, kept, groups.ids, self._ring, self._name)
        return Found(drawn, plan, groups, nulls)

    def _groups(self) -> Groups:
        statement = self._question.statement
        public = None
        if statement.public is not None:
            public = self._engine.run(typed_public(statement))
        names = [g.name for g in statement.groups]
        return Groups(names, [g.type for g in statement.groups], self._ring.key, public)

    def _rows(self, asked: Statement, plan: QueryPlan, wide: bool = False) -> Iterator[pa.Table]:
        """Rows of stage 1, shard by shard; ``wide``: within bounds that nothing reaches."""
        if wide:
            low = {c.name: 0 if c.kind == "count" else -_WIDE for c in plan.columns}
            grids = {c.name: (c.grid, low[c.name], _WIDE) for c in plan.columns}
        else:
            grids = grids_of(plan)
        query = stage_one(asked, self._catalog, grids)
        for shard in range(self._shards):
            mine = query
            if self._shards > 1:
                one = f"hash(unit) % {self._shards} = {shard}"
                mine = query.copy().where(one, dialect="duckdb")
            yield self._engine.run(mine)

    def _bounds(self) -> tuple[QueryPlan, frozenset[str]]:
        """The plan with bounds from histograms that this run pays for."""
        question = self._question
        assert question.design is not None
        named = {column.name: column for column in question.plan.columns if column.automatic}
        asked_for = tuple(f for f in question.asked.functions if f.name in named)
        asked = replace(question.asked, functions=asked_for)
        plan = replace(question.plan, columns=tuple(named.values()))
        tables: dict[str, list[Rows]] = {name: [] for name in named}
        units: list[Ids] = []
        groups, before = self._groups(), 0
        for found in self._rows(asked, plan, wide=True):
            unit, ids = self._units(found)
            group = _codes(found, asked, groups)
            known = Partials(unit, group, ids, groups.ids)
            for i, name in enumerate(named):
                rows = self._values(found, named[name], i, unit, group)
                if self._shards > 1:  # the same few that will be chosen from all
                    key = (b"of a unit", *self._name, name.encode())
                    some = smallest(known, rows, rows.unit, VALUES, self._ring, key)
                    rows = Rows(*(part[some] for part in rows))
                tables[name].append(rows._replace(unit=rows.unit + before))
            units.append(ids)
            before += len(ids)
        joined = {
            name: Rows(*(np.concatenate(part) for part in zip(*rows, strict=True)))
            for name, rows in tables.items()
        }
        settled = choose_bounds(
            question.plan, question.design, joined, (np.concatenate(units), groups.ids),
            self._ring, self._name,
        )  # fmt: skip
        bounds = {
            column.name: (column.low or 0.0, column.high or 0.0)
            for column in settled.plan.columns
            if column.name in named
        }
        return regridded(question.plan, bounds, question.bits), settled.nulls

    def _values(
        self, found: pa.Table, column: QueryColumn, i: int, unit: Int64, group: Int64
    ) -> Rows:
        """What a column's bounds are for: each row's value, or each (unit, group)'s."""
        if f"rows_{i}" in found.column_names:
            at, value = _lists(found, i)
            rows = Rows(unit[at], group[at], value)
        else:
            rows = Rows(unit, group, _ints(found, f"value_{i}"))
            if f"count_{i}" in found.column_names:
                there = np.flatnonzero(_ints(found, f"count_{i}") > 0)
                rows = Rows(*(part[there] for part in rows))
        public = np.flatnonzero(rows.group >= 0)
        return Rows(*(part[public] for part in rows))

    def _units(self, found: pa.Table) -> tuple[Int64, Ids]:
        """(rows,) slots of units, and their ids."""
        slots, values = encoded(found.column("unit"))
        return slots, keyed(self._ring.unit, [self._catalog.unit.type], [values])

    def _partials(
        self, found: pa.Table, asked: Statement, plan: QueryPlan, groups: Groups
    ) -> Partials:
        unit, unit_ids = self._units(found)
        group = _codes(found, asked, groups)
        known = Partials(unit, group, unit_ids, groups.ids)
        sums: list[Int64] = []
        rows: dict[str, Rows] = {}
        for i, column in enumerate(plan.columns):
            if column.kind in ("count", "sum", "mean"):
                sums.append(_ints(found, f"value_{i}"))
            if column.kind == "mean":
                sums.append(_ints(found, f"count_{i}"))
            if column.kind in ("var", "stddev", "quantiles"):
                at, value = _lists(found, i)
                if column.kind == "quantiles":
                    rows[column.name] = Rows(unit[at], group[at], value)
                else:
                    sums += self._moments(column, known, at, value)
        return known._replace(sums=tuple(sums), rows=rows)

    def _moments(
        self, column: QueryColumn, known: Partials, at: Int64, value: Int64
    ) -> tuple[Int64, Int64, Int64]:
        """Sum, squares and count of at most r of each partial's rows, by a keyed choice."""
        counts = np.bincount(at, minlength=len(known.unit))
        over = np.flatnonzero((counts > column.most_rows)[at])
        if over.size:
            some = at[over]
            few = Rows(known.unit[some], np.maximum(known.group[some], 0), value[over])
            name = (b"of a group", *self._name, column.name.encode())
            chosen = smallest(known, few, some, column.most_rows, self._ring, name)
            left = counts[at] <= column.most_rows
            left[over[chosen]] = True
            at, value = at[left], value[left]
        size, centred = len(known.unit), value - middle_of(column)
        total, square = per_group(at, centred, size), centred * centred - centre_of(column)
        counted = np.bincount(at, minlength=size).astype(np.int64)
        return total, per_group(at, square, size), counted


def typed_public(statement: Statement) -> exp.Expr:
    """The query of the public groups, in the form that no row makes fail."""
    assert isinstance(statement.public, exp.Select)
    return safe_query(statement.public)


def _codes(found: pa.Table, asked: Statement, groups: Groups) -> Int64:
    if not asked.groups:
        return np.zeros(found.num_rows, np.int64)
    return groups.codes([found.column(f"group_{i}") for i in range(len(asked.groups))])


def _ints(found: pa.Table, name: str) -> Int64:
    return np.asarray(found.column(name).to_numpy(), np.int64)


def _lists(found: pa.Table, i: int) -> tuple[Int64, Int64]:
    """Rows of a list column: the number of the partial, and the value."""
    column = found.column(f"rows_{i}")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    values = pc.list_flatten(column).to_numpy().astype(np.int64)
    return np.repeat(np.arange(found.num_rows), lengths), values
