"""Scans of a table: what usable records in some boxes add up to, by cells, in one pass.

DuckDB runs in memory behind a lock (see `pipelines.tables.engine`): it may open the parts of the
version and nothing else.  Unlike there, its optimizers stay on: columns are plain whole numbers,
which no cast, no text and no NULL can make fail.  Digests of the parts are checked when the table
is opened, once by a process: a part that is not as it was written is refused before anything is
charged.  One that changes later fails the query.

``held``: all usable coordinates are copied into memory first, which makes each scan about four
times as fast: for sessions of many queries.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, RunError, UsageError
from dpstream.accounting.limits import MAX_SUMMED
from dpstream.accounting.regions.boxes import checked, cut, overlapped, taken
from dpstream.accounting.sessions.aggregates import Leaves, Needs
from dpstream.accounting.sessions.cells import Cells
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.session.totals import Totals, nothing
from dpstream.pipelines.session.records.manifest import Manifest, read_manifest
from dpstream.pipelines.session.records.parts import (
    USABLE,
    checked_paths,
    damaged,
    reading,
    stamp_of,
)
from dpstream.pipelines.session.records.scan_sql import BOXES, Where, cell, where
from dpstream.pipelines.tables.files import literal
from dpstream.state.closing import Closing

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

    It keeps the version of the table that it opened.

    Args:
        folder: the table's; table: its model.
        threads: default: as many as there are cores, up to 8.
        held: copy the coordinates into memory.
        memory: limit of DuckDB's memory.

    Raises:
        RunError: there is no table, or a part differs from what was written.
        PolicyError: it is another table.
    """

    def __init__(
        self,
        folder: Path,
        table: SessionTable,
        threads: int | None = None,
        held: bool = False,
        memory: str = MEMORY,
    ) -> None:
        self._space = table.space
        config: dict[str, Any] = {
            "threads": threads or max(1, min(8, os.cpu_count() or 1)),
            "memory_limit": memory,
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
            with _coded():
                self._open(held)
            self._manifest, self._in_memory = manifest, held
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the table."""
        self._stack.close()

    @property
    def version(self) -> int:
        """The version of the table, which grows with every change of its records."""
        return self._manifest.version

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether these are the records of a manifest.

        Versions alone do not decide it: they begin again when a table is made again.
        """
        return self._manifest == manifest

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
        for tree, of in enumerate(needs.leaves):
            mine = rows.taken(tree)
            leaf = mine.items[f"l{tree}"]
            has = leaf >= 0  # a missing value has none
            totals.leaves[of.column][mine.cell[has], leaf[has]] = mine.items["n"][has]
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
        named += [f"{self._leaf(of)} AS l{i}" for i, of in enumerate(trees)]
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

    def _leaf(self, of: Leaves) -> str:
        """Return the expression for a row's leaf of a tree, -1 without a value."""
        place = self._space.place(of.column)
        leaf = f"(x{place}::BIGINT - {of.low}) * {of.size} // {of.width}"
        if self._always(place):
            return leaf
        return f"CASE WHEN x{place} < {self._space.values[place]} THEN {leaf} ELSE -1 END"

    def _select(self, text: str, condition: Where) -> dict[str, Int64]:
        if not self._in_memory and self._stamped() != self._stamps:
            raise damaged()
        with _coded():
            if condition.boxes is not None:
                self._db.register(BOXES, condition.boxes)
            try:
                rows = self._db.execute(text).fetchnumpy()  # a relation is bound twice
            finally:
                if condition.boxes is not None:
                    self._db.unregister(BOXES)
        if not self._in_memory and self._stamped() != self._stamps:
            raise damaged()
        if not all(of.dtype.kind in "iu" for of in rows.values()):
            raise InvariantError("whole numbers alone are exact")
        return {name: np.ma.filled(of, 0).astype(np.int64) for name, of in rows.items()}

    def _open(self, held: bool) -> None:
        if self._paths:
            listed = ", ".join(map(literal, self._paths))
            self._db.execute(f"SET allowed_paths = [{listed}]")
        for lock in _LOCKS:
            self._db.execute(lock)
        columns = ", ".join(f"x{place}" for place in range(len(self._space.dimensions)))
        if not self._paths:
            typed = ", ".join(f"x{place} BIGINT" for place in range(len(self._space.dimensions)))
            self._db.execute(f"CREATE TABLE t ({typed})")
            return
        kind = "TABLE" if held else "VIEW"
        self._db.execute(
            f"CREATE {kind} t AS SELECT {columns} FROM read_parquet([{listed}]) WHERE {USABLE}"
        )

    def _stamped(self) -> list[tuple[int, int, int, int]]:
        try:
            return [stamp_of(path) for path in self._paths]
        except OSError:
            raise damaged() from None


class _Rows(NamedTuple):
    """Groups of rows: (k,) the cell of each, and (k,) each item of it."""

    cell: Int64
    items: dict[str, Int64]

    def taken(self, tree: int) -> "_Rows":
        """Return the groups by the leaves of one tree, which contain each row once."""
        mine = self.items["n"] > 0
        if f"g{tree}" in self.items:
            mine &= self.items[f"g{tree}"] == 0
        return _Rows(self.cell[mine], {name: of[mine] for name, of in self.items.items()})


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


@contextlib.contextmanager
def _coded() -> Iterator[None]:
    """Replace DuckDB's errors by coded ones, without their texts and causes."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        failure = RunError("table", "needs more memory than it may have", "ask for fewer cells")
    except duckdb.Error:
        failure = RunError("table", "cannot be scanned", "check memory and disk")
    else:
        return
    raise failure from None
