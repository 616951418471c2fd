"""Scans of a table: the sums of usable records in some boxes, by cells, in one pass.

DuckDB runs in memory behind a lock (see `pipelines.tables.engine`): it may open the parts of the
version and nothing else.  Unlike there, its optimizers stay on: columns x0, x1, ... of coordinates
are plain whole numbers, which no cast, no text and no NULL can make fail or round.  Digests of the
parts are checked when the table is opened, once by a process: a part that is not as it was written
is refused before anything is charged.  One that changes later fails the query.

``held``: all usable coordinates are copied into memory first, which makes each scan about four
times as fast: for sessions of many queries.

**Boxes and cells in SQL.**  What is written down is public: edges, and how many boxes.

* One box is a comparison for each edge that leaves something out.
* Many disjoint boxes are a join: where a row lies between the edges of some dimensions is a cell
  number; a small table names the boxes of each cell with their ranges in the other dimensions.
  A row meets at most one box, because they are disjoint, so that the join never doubles a row.
* Which range of edges a coordinate is in: a division where the edges are even, else a list that is
  looked up by the coordinate (in the greatest common divisor of the widths), else nested
  comparisons.
"""

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, RunError, UsageError
from dpstream.accounting.limits import MAX_SUMMED
from dpstream.accounting.regions.boxes import checked, club, cut, overlapped, taken
from dpstream.accounting.sessions.aggregates import Cells, Leaves, Needs
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.session.totals import Totals, nothing
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.records.parts import (
    USABLE,
    checked_paths,
    damaged,
    reading,
    stamp_of,
)
from dpstream.pipelines.tables.duckdb_errors import coded
from dpstream.pipelines.tables.files import allow_paths, read_parquet
from dpstream.state.connecting import Closing
from dpstream.state.disk_errors import decode_error

#: Entries of a list that is looked up; rows of the small table of boxes; boxes that are an OR.
MAX_LIST, MAX_ROWS, FEW = 1 << 14, 1 << 20, 2
#: The small table's name.
BOXES = "boxes_of_query"


class Where(NamedTuple):
    """A condition on rows.

    Attributes:
        text: of WHERE, ``true`` if it leaves nothing out.
        join: of FROM, perhaps empty.
        boxes: the table that it names.
    """

    text: str
    join: str = ""
    boxes: pa.Table | None = None


def where(boxes: Int64, held: Int64) -> Where:
    """Return the condition that a row is in one of some boxes.

    Args:
        boxes: (m, d, 2) disjoint, at least one.
        held: (d, 2) the range of existing coordinates: edges beyond it leave nothing out.
    """
    # Return the same rows as few merged boxes, limited to the existing coordinates.
    cut = np.stack(
        [np.maximum(boxes[:, :, 0], held[:, 0]), np.minimum(boxes[:, :, 1], held[:, 1])], axis=2
    )
    cut = cut[(cut[:, :, 0] < cut[:, :, 1]).all(axis=1)]
    boxes = club(cut, np.zeros(len(cut), np.int64))[0] if len(cut) > 1 else cut
    if not len(boxes):
        return Where("false")
    around = np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], axis=1)
    outer = _ranges(around, held)
    if len(boxes) == 1:
        return Where(_all(outer))
    if len(boxes) <= FEW:
        either = " OR ".join(f"({_all(_ranges(box, around))})" for box in boxes)
        return Where(_all([*outer, f"({either})"]))
    return _joined(boxes, around, outer)


def cell(column: str, edges: Int64) -> str:
    """Return the expression for the number of the range between edges that has a coordinate."""
    widths = np.diff(edges)
    low, unit = int(edges[0]), int(np.gcd.reduce(widths))
    if len(widths) == 1:
        return "0"
    moved = f"({column}::BIGINT - {low})" if low else f"{column}::BIGINT"
    if (widths == unit).all():
        return f"{moved} // {unit}" if unit > 1 else moved
    if int(edges[-1] - low) // unit <= MAX_LIST:
        steps = np.repeat(np.arange(len(widths)), widths // unit).tolist()
        at = f"{moved} // {unit}" if unit > 1 else moved
        return f"{steps}[{at} + 1]"
    return _nested(column, edges.tolist(), 0, len(widths))


def _nested(column: str, edges: list[int], first: int, last: int) -> str:
    if last - first == 1:
        return str(first)
    middle = (first + last) // 2
    return (
        f"CASE WHEN {column} < {edges[middle]} THEN {_nested(column, edges, first, middle)} "
        f"ELSE {_nested(column, edges, middle, last)} END"
    )


def _ranges(box: Int64, around: Int64) -> list[str]:
    """Return the comparisons of a box that leave something of a larger one out."""
    conditions = []
    for place, ((low, high), (least, end)) in enumerate(
        zip(box.tolist(), around.tolist(), strict=True)
    ):
        if low > least:
            conditions.append(f"x{place} >= {low}")
        if high < end:
            conditions.append(f"x{place} < {high}")
    return conditions


def _all(parts: list[str]) -> str:
    return " AND ".join(parts) or "true"


def _joined(boxes: Int64, around: Int64, outer: list[str]) -> Where:
    """Return cells of some dimensions, and in each the boxes with their ranges in the others."""
    apart = [place for place in range(boxes.shape[1]) if (boxes[:, place] != around[place]).any()]
    edges = {place: np.unique(boxes[:, place]) for place in apart}
    chosen, cells, rows = list[int](), 1, np.ones(len(boxes))
    for place in sorted(apart, key=lambda place: -len(edges[place])):
        first, last = (np.searchsorted(edges[place], boxes[:, place, side]) for side in (0, 1))
        more = rows * (last - first)
        if more.sum() <= MAX_ROWS and cells * len(edges[place]) < 1 << 40:
            chosen.append(place)
            cells, rows = cells * len(edges[place]), more
    number, owner = _cells_of(boxes, chosen, edges)
    columns = {"cell": number}
    on = ["cell = " + _number(chosen, edges)]
    for place in apart:
        if place not in chosen:
            columns |= {
                f"low{place}": boxes[owner, place, 0],
                f"high{place}": boxes[owner, place, 1],
            }
            on += [f"x{place} >= low{place}", f"x{place} < high{place}"]
    return Where(_all(outer), f" JOIN {BOXES} ON {' AND '.join(on)}", pa.table(columns))


def _number(chosen: list[int], edges: dict[int, Int64]) -> str:
    """Return the expression for the cell number of a row."""
    cell_number = "0"
    for place in chosen:
        cell_number = (
            f"({cell_number} * {len(edges[place]) - 1} + {cell(f'x{place}', edges[place])})"
        )
    return cell_number


def _cells_of(boxes: Int64, chosen: list[int], edges: dict[int, Int64]) -> tuple[Int64, Int64]:
    """Return (cell numbers, boxes): all pairs of a box and a cell that it fills in the chosen."""
    number, owner = np.zeros(len(boxes), np.int64), np.arange(len(boxes))
    for place in chosen:
        first = np.searchsorted(edges[place], boxes[owner, place, 0])
        count = np.searchsorted(edges[place], boxes[owner, place, 1]) - first
        at = np.repeat(np.arange(len(owner)), count)
        within = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
        number = number[at] * (len(edges[place]) - 1) + first[at] + within
        owner = owner[at]
    return number, owner


MEMORY = "2GB"
_LOCKS = (
    "SET TimeZone = 'UTC'",
    "SET temp_directory = ''",
    "SET enable_progress_bar = false",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class Scan(Closing):
    """The present records of a table; a context that closes it.

    Records that are added later are not in it.

    Args:
        folder: the table's folder; table: the table's public model.
        held: copy the coordinates into memory.

    Attributes:
        manifest: manifest of the table's version that was opened.

    Raises:
        RunError: there is no table, or a part differs from what was written.
        PolicyError: the folder holds another table.
    """

    def __init__(self, folder: Path, table: SessionTable, held: bool = False) -> None:
        self._space = table.space
        config: dict[str, Any] = {
            "threads": min(8, os.cpu_count() or 1),
            "memory_limit": MEMORY,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading(folder))
            manifest = read_manifest(folder, table)
            self._paths = checked_paths(folder, manifest.usable())
            self._stamps = self._stamped()
            self._held = _coordinates(self._paths, self._space.everything[0])
            self._db = stack.enter_context(contextlib.closing(duckdb.connect(config=config)))
            with _coded(self._paths):
                self._open(held)
            self.manifest, self._in_memory = manifest, held
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the table."""
        self._stack.close()

    def totals(self, boxes: Int64, cells: Cells, needs: Needs) -> Totals:
        """Return the sums of usable records in some boxes, by one scan.

        Args:
            boxes: (m, d, 2) disjoint, not snapped: what may be read; perhaps none.
            cells: see `Cells`.
            needs: what is computed of each cell beside its number of records.

        Raises:
            UsageError: boxes outside the space, or a column with too many coordinates.
            RunError: the scan failed.
        """
        columns = {name: self._space.place(name) for name in needs.columns}
        for name, place in columns.items():
            if self._space.sizes[place] > MAX_SUMMED:
                raise UsageError(
                    name,
                    f"has more than {MAX_SUMMED:,} coordinates, which sums are not made of",
                    "give it a wider step, in a table made anew",
                )
        items = ["count(*) AS n"]
        for place in columns.values():
            if self._always(place):
                items.append(f"sum(x{place})::BIGINT AS s{place}")
                continue
            there = f"FILTER (x{place} < {self._space.values[place]})"
            items += [
                f"count(*) {there} AS n{place}",
                f"(sum(x{place}) {there})::BIGINT AS s{place}",
            ]
        totals = nothing(cells.count, needs)
        rows = self._run(boxes, cells, items, needs.leaves)
        first = rows.taken(0)
        np.add.at(totals.records, first.cell, first.items["n"])
        for name, place in columns.items():
            there = "n" if self._always(place) else f"n{place}"
            np.add.at(totals.columns[name].records, first.cell, first.items[there])
            np.add.at(totals.columns[name].total, first.cell, first.items[f"s{place}"])
        for tree, leaves in enumerate(needs.leaves):
            mine = rows.taken(tree)
            leaf = mine.items[f"l{tree}"]
            has = leaf >= 0  # a missing value has none
            totals.leaves[leaves.column][mine.cell[has], leaf[has]] = mine.items["n"][has]
        return totals

    def _run(
        self, boxes: Int64, cells: Cells, items: list[str], trees: Sequence[Leaves]
    ) -> "_Rows":
        """Return the cells with records, and each item of them; with trees by leaf of each tree."""
        around = self._space.everything[0].copy()
        axes = [(self._space.place(axis.name), np.array(axis.edges)) for axis in cells.axes]
        for place, edges in axes:
            around[place] = edges[0], edges[-1]
        keys = [(cell(f"x{place}", edges), len(edges) - 1) for place, edges in axes]
        boxes = checked(self._space, boxes)
        boxes = cut(taken(boxes, overlapped(boxes, around)), around)
        condition = where(boxes, self._held) if len(boxes) else Where("false")
        if condition.text == "false":
            none = [item.rpartition(" ")[2] for item in items]
            none += [f"{kind}{i}" for i in range(len(trees)) for kind in "lg"]
            return _Rows(np.zeros(0, np.int64), dict.fromkeys(none, np.zeros(0, np.int64)))
        named = [f"{key} AS k{i}" for i, (key, _) in enumerate(keys)]
        named += [f"{self._leaf(leaves)} AS l{i}" for i, leaves in enumerate(trees)]
        if len(trees) > 1:
            named += [f"GROUPING(l{i}) AS g{i}" for i in range(len(trees))]
        by = [f"k{i}" for i in range(len(keys))]
        sets = [", ".join([*by, f"l{i}"]) for i in range(len(trees))] or [", ".join(by)]
        group = f" GROUP BY {sets[0]}" if sets[0] else ""
        if len(sets) > 1:
            group = f" GROUP BY GROUPING SETS (({'), ('.join(sets)}))"
        columns = self._select(
            f"SELECT {', '.join([*named, *items])} FROM t{condition.join} "
            f"WHERE {condition.text}{group}",
            condition,
        )
        number = np.zeros(len(columns["n"]), np.int64)
        for i, (_, size) in enumerate(keys):
            number = number * size + columns[f"k{i}"]
        return _Rows(number, columns)

    def _always(self, place: int) -> bool:
        """Return whether every usable record has a value there: no coordinate means missing."""
        return bool(self._space.values[place] == self._space.sizes[place])

    def _leaf(self, leaves: Leaves) -> str:
        """Return the expression for a row's leaf of a tree, -1 without a value."""
        place = self._space.place(leaves.column)
        leaf = f"(x{place}::BIGINT - {leaves.low}) * {leaves.size} // {leaves.width}"
        if self._always(place):
            return leaf
        return f"CASE WHEN x{place} < {self._space.values[place]} THEN {leaf} ELSE -1 END"

    def _select(self, text: str, condition: Where) -> dict[str, Int64]:
        if not self._in_memory and self._stamped() != self._stamps:
            raise damaged()
        with _coded(self._paths):
            if condition.boxes is not None:
                self._db.register(BOXES, condition.boxes)
            try:
                rows = self._db.execute(text).fetchnumpy()  # a relation is bound twice
            finally:
                if condition.boxes is not None:
                    self._db.unregister(BOXES)
        if not self._in_memory and self._stamped() != self._stamps:
            raise damaged()
        if not all(column.dtype.kind in "iu" for column in rows.values()):
            raise InvariantError("whole numbers alone are exact")
        return {name: np.ma.filled(column, 0).astype(np.int64) for name, column in rows.items()}

    def _open(self, held: bool) -> None:
        if self._paths:
            self._db.execute(allow_paths(self._paths))
        for lock in _LOCKS:
            self._db.execute(lock)
        columns = ", ".join(f"x{place}" for place in range(len(self._space.dimensions)))
        if not self._paths:
            typed = ", ".join(f"x{place} BIGINT" for place in range(len(self._space.dimensions)))
            self._db.execute(f"CREATE TABLE t ({typed})")
            return
        kind = "TABLE" if held else "VIEW"
        rows = read_parquet(self._paths)
        self._db.execute(f"CREATE {kind} t AS SELECT {columns} FROM {rows} WHERE {USABLE}")

    def _stamped(self) -> list[tuple[int, int, int, int]]:
        try:
            return [stamp_of(path) for path in self._paths]
        except OSError as error:
            raise decode_error(damaged(), error) from None


class _Rows(NamedTuple):
    """Groups of rows: (k,) the cell of each, and (k,) each item of it."""

    cell: Int64
    items: dict[str, Int64]

    def taken(self, tree: int) -> "_Rows":
        """Return the groups by the leaves of one tree, which contain each row once."""
        mine = self.items["n"] > 0
        if f"g{tree}" in self.items:
            mine &= self.items[f"g{tree}"] == 0
        return _Rows(self.cell[mine], {name: column[mine] for name, column in self.items.items()})


def _coordinates(paths: list[str], extent: Int64) -> Int64:
    """Return (d, 2) a box of all coordinates in some parts, by the bounds in their footers."""
    low, high = extent[:, 1].copy(), extent[:, 0].copy()
    for path in paths:
        meta = pq.read_metadata(path)
        for group in range(meta.num_row_groups):
            for place in range(len(extent)):
                bounds = meta.row_group(group).column(place).statistics
                if bounds is None or not bounds.has_min_max:
                    return extent
                low[place] = min(low[place], bounds.min)
                high[place] = max(high[place], bounds.max + 1)
    return np.stack([low, high], axis=1)


def _coded(paths: list[str]) -> AbstractContextManager[None]:
    """Replace DuckDB's errors while it scans these files."""
    large = RunError("table", "needs more memory than it may have", "ask for fewer cells")
    return coded(paths, large, RunError("table", "cannot be scanned", "check memory and disk"))
