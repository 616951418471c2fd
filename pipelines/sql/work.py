"""The work on the units of a shard: rows of DuckDB become partials, bounds and sums.

It is the same in this process and on a runner's workers.  All of it is public except the secret,
which comes from elsewhere.

**Files** that workers write for the launcher hold sums of a shard's units, in the run's folder.
PRIVATE: only the owner can read the folder, which is removed when the answer is drawn
(`state.locks`).  Sums are exact and by group, without units.  The rows that quantiles and counts of
distinct values are computed from are (group, value, weight).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import RunError, instance
from dpstream.accounting.fields import FieldType
from dpstream.accounting.query.bounds import BoundsDesign
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.query.parts import centre_of, middle_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Bounded, Partials, Rows, Totals, bounded, counted
from dpstream.dp_transforms.one_shot.bounding import at_most
from dpstream.dp_transforms.one_shot.groups import Groups, encoded, keyed
from dpstream.dp_transforms.one_shot.partials import per_group
from dpstream.pipelines.sql.query_plan import stage_one
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.statement import PrivateSelect
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.state.disk_errors import decode_error
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.numbers import arrow_numbers, valid_of, values_of

#: What ids are made of, by the type of a group.
KINDS = {
    exp.DType.BIGINT: "int",
    exp.DType.DECIMAL: "decimal",
    exp.DType.BOOLEAN: "bool",
    exp.DType.TEXT: "string",
    exp.DType.VARBINARY: "bytes",
    exp.DType.DATE: "date",
    exp.DType.TIMESTAMP: "timestamp",
    exp.DType.TIMESTAMPTZ: "timestamp",
}
#: Bounds of what automatic bounds are looked for in, in grid steps.
_WIDE = 1 << 40


class Work(NamedTuple):
    """The work of one pass over the units.

    Attributes:
        query: the DuckDB query of stage 1 without its GROUP BY.
        by: the GROUP BY of that query, as SQL.
        public: the DuckDB query that lists the public groups; ``None`` without public groups.
        groups: names and types of the group columns.
        unit: type of the unit's ids.
        plan: the statement's plan; its columns are those of stage 1, in order.
        name: run id and digest of the question.
    """

    query: str
    by: str
    public: str | None
    groups: tuple[tuple[str, exp.DType], ...]
    unit: FieldType
    plan: QueryPlan
    name: tuple[bytes, bytes]

    @classmethod
    def of(
        cls,
        select: PrivateSelect,
        catalog: Catalog,
        plan: QueryPlan,
        name: tuple[bytes, bytes],
        wide: bool = False,
    ) -> "Work":
        """Return the work of the private part of a statement.

        Args:
            wide: use bounds that no value reaches.
        """
        if wide:
            low = {c.name: 0 if c.kind == "count" else -_WIDE for c in plan.columns}
            grids = {c.name: (c.grid, low[c.name], _WIDE) for c in plan.columns}
        else:
            grids = grids_of(plan)
        query = stage_one(select, catalog, grids)
        by = query.args["group"].sql("duckdb")
        query.set("group", None)
        listed = None if select.public is None else typed_public(select)
        public = listed and listed.sql("duckdb", comments=False)
        groups = tuple((group.name, group.type) for group in select.groups)
        text = query.sql("duckdb", comments=False)
        return cls(text, by, public, groups, catalog.unit.type, plan, name)

    def stage_one(self, shards: int = 1, shard: int = 0) -> str:
        """Return the query of stage 1 for one shard of units."""
        mine = "" if shards == 1 else f" WHERE HASH(unit) % {shards} = {shard}"
        return f"{self.query}{mine} {self.by}"

    def initial_groups(self, engine: Engine, ring: KeyRing) -> Groups:
        """Return the groups before a row is read: none, or the public ones."""
        public = None if self.public is None else engine.run(self.public)
        names, kinds = [name for name, _ in self.groups], [KINDS[kind] for _, kind in self.groups]
        return Groups(names, kinds, ring.key, public)

    def partials(self, unit_rows: pa.Table, groups: Groups, ring: KeyRing) -> Partials:
        """Convert stage 1's rows of some units to partials."""
        unit, unit_ids = self._units(unit_rows, ring)
        group = self._codes(unit_rows, groups)
        partials = Partials(unit, group, unit_ids, groups.ids)
        sums: list[Int64] = []
        rows: dict[str, Rows] = {}
        for i, column in enumerate(self.plan.columns):
            if column.kind in ("count", "sum", "mean"):
                sums.append(_ints(unit_rows, f"value_{i}"))
            if column.kind == "mean":
                sums.append(_ints(unit_rows, f"count_{i}"))
            if column.distinct or column.kind in ("var", "stddev", "quantiles"):
                at, value = _lists(unit_rows, i)
                if column.has_rows:
                    rows[column.name] = Rows(unit[at], group[at], value)
                else:
                    sums += self._moments(column, partials, at, value, ring)
        return partials._replace(sums=tuple(sums), rows=rows)

    def bounded(self, partials: Partials, ring: KeyRing) -> Bounded:
        """Hold the partials of some units within the plan's bounds."""
        return bounded(self.plan, partials, ring, self.name)

    def counted(
        self, unit_rows: pa.Table, groups: Groups, ring: KeyRing, design: BoundsDesign
    ) -> dict[str, Int64]:
        """Return PRIVATE exact histograms of some units, for the choice of bounds; they add up."""
        unit, ids = self._units(unit_rows, ring)
        group = self._codes(unit_rows, groups)
        out = {}
        for i, column in enumerate(self.plan.columns):
            rows = _values(unit_rows, i, unit, group)
            histogram = next(h for h in design.histograms if h.name == column.name)
            out[histogram.name] = counted(histogram, rows, (ids, groups.ids), ring, self.name)
        return out

    def _units(self, unit_rows: pa.Table, ring: KeyRing) -> tuple[Int64, Ids]:
        """Return (rows,) slots of units, and their ids."""
        slots, values = encoded(unit_rows.column("unit"))
        return slots, keyed(ring.unit, [self.unit], [values])

    def _codes(self, unit_rows: pa.Table, groups: Groups) -> Int64:
        if not self.groups:
            return np.zeros(unit_rows.num_rows, np.int64)
        return groups.codes([unit_rows.column(f"group_{i}") for i in range(len(self.groups))])

    def _moments(
        self, column: QueryColumn, partials: Partials, at: Int64, value: Int64, ring: KeyRing
    ) -> tuple[Int64, Int64, Int64]:
        """Return sum, squares and count of at most r rows of each partial, by a keyed choice."""
        pair = partials.unit, np.maximum(partials.group, 0)
        chosen = at_most(column, partials, pair, at, value, ring, self.name)
        at, value = at[chosen], value[chosen]
        size, centred = len(partials.unit), value - middle_of(column)
        total, square = per_group(at, centred, size), centred * centred - centre_of(column)
        there = np.bincount(at, minlength=size).astype(np.int64)
        return total, per_group(at, square, size), there


def typed_public(select: PrivateSelect) -> exp.Expr:
    """Return the query of the public groups, in a form that fails for no row."""
    return safe_query(instance(select.public, exp.Select))


def _values(unit_rows: pa.Table, i: int, unit: Int64, group: Int64) -> Rows:
    """Return the values that a column's bounds limit: each row's, or each (unit, group)'s."""
    if f"value_{i}" not in unit_rows.column_names:
        at, value = _lists(unit_rows, i)
        return Rows(unit[at], group[at], value)
    there = valid_of(unit_rows.column(f"value_{i}"))
    if f"count_{i}" in unit_rows.column_names:
        there = _ints(unit_rows, f"count_{i}") > 0
    rows = Rows(unit, group, _ints(unit_rows, f"value_{i}"))
    return rows if there.all() else Rows(*(part[there] for part in rows))


def _ints(unit_rows: pa.Table, name: str) -> Int64:
    """Return whole numbers; 0 for an absent partial."""
    column = unit_rows.column(name)
    values = np.asarray(values_of(column), np.int64)
    return np.where(valid_of(column), values, 0) if column.null_count else values


def _lists(unit_rows: pa.Table, i: int) -> tuple[Int64, Int64]:
    """Return a list column as the number of the partial and the value."""
    column = unit_rows.column(f"rows_{i}")
    lengths = pc.list_value_length(column)
    sizes = np.where(valid_of(lengths), values_of(lengths), 0).astype(np.int64)
    values = values_of(pc.list_flatten(column)).astype(np.int64)
    return np.repeat(np.arange(unit_rows.num_rows), sizes), values


_NONE = np.zeros(0, np.int64)


def place_of(folder: Path, shard: int) -> Path:
    """Return a shard's file; the number of shards is public."""
    return folder / f"shard-{shard:04d}.arrow"


def write_counts(path: Path, counts: dict[str, Int64]) -> None:
    """Write the histograms of a shard."""
    _write(path, [pa.table({"count": arrow_numbers(cells)}) for cells in counts.values()])


def read_counts(folder: Path, shards: int, names: Sequence[str]) -> dict[str, Int64]:
    """Return the histograms of all shards, added up.

    Raises:
        RunError: a shard's file is missing.
    """
    out = dict[str, Int64]()
    for shard in range(shards):
        tables = _read(place_of(folder, shard), len(names))
        for name, table in zip(names, tables, strict=True):
            cells = _column(table, "count")
            out[name] = cells + out[name] if name in out else cells
    return out


def write_sums(path: Path, groups: Groups, totals: Totals, rows: Bounded) -> None:
    """Write the sums of a shard by group, and its rows for quantiles."""
    columns = {f"sum_{i}": arrow_numbers(part) for i, part in totals.sums.items()}
    columns |= {"units": arrow_numbers(totals.units), "weighted": arrow_numbers(totals.weighted)}
    if groups.values is not None:
        columns |= {f"group_{i}": column for i, column in enumerate(groups.values.columns)}
    parts = [
        {
            "group": arrow_numbers(rows.group[at]),
            "value": arrow_numbers(value),
            "weight": arrow_numbers(weight),
        }
        for at, value, weight in rows.rows.values()
    ]
    _write(path, [pa.table(part) for part in (columns, *parts)])


def read_sums(
    folder: Path, shards: int, groups: Groups, names: Sequence[str]
) -> Iterator[tuple[Totals, Bounded]]:
    """Yield the sums of each shard by the launcher's codes of groups, to which new ones are added.

    Args:
        names: names of the columns that have rows.

    Raises:
        RunError: a shard's file is missing.
    """
    for shard in range(shards):
        first, *tables = _read(place_of(folder, shard), 1 + len(names))
        by = [name for name in first.column_names if name.startswith("group_")]
        codes = (
            groups.codes([first.column(name) for name in by])
            if by
            else np.zeros(first.num_rows, np.int64)
        )

        def put(name: str, first: pa.Table = first, codes: Int64 = codes) -> Int64:
            out = np.zeros(len(groups.ids), np.int64)
            out[codes] = _column(first, name)
            return out

        sums = [name for name in first.column_names if name.startswith("sum_")]
        column_sums = {int(name.removeprefix("sum_")): put(name) for name in sums}
        rows = {}
        for name, table in zip(names, tables, strict=True):
            parts = [_column(table, part) for part in ("group", "value", "weight")]
            rows[name] = (parts[0], parts[1], parts[2])
        yield (
            Totals(put("units"), put("weighted"), column_sums),
            Bounded(_NONE, codes, _NONE, {}, rows),
        )


def _write(path: Path, tables: Sequence[pa.Table]) -> None:
    with replacing(path, PRIVATE) as draft, open(draft, "wb") as out:
        for table in tables:
            with pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)


def _read(path: Path, tables: int) -> list[pa.Table]:
    """Read several tables from one file, one after the other."""
    try:
        with pa.memory_map(str(path)) as file:
            return [pa.ipc.open_stream(file).read_all() for _ in range(tables)]
    except (OSError, pa.ArrowInvalid) as error:
        absent = RunError(
            "runner",
            "has not handed over a part of the answer",
            "give workers and this process one folder: the account's",
        )
        failure = (
            absent if isinstance(error, FileNotFoundError) else decode_error(absent, error, path)
        )
    raise failure


def _column(table: pa.Table, name: str) -> Int64:
    return np.asarray(values_of(table.column(name)), np.int64)
