"""Errors of published figures, as sums and histograms: NOT private, for public data only.

Published tables are read again, group by group, and held against the truth.  Two kinds of sums are
kept, so that any number of runs and groups fits into memory:

* of each kind of figure at a level (``Errors`` by `Kind`): held against its margin;
* of the measured cells of groups of one size (powers of 10), detail and kind of iteration, which is
  what production's report over several runs shows (`Cell`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import matching_in
from dpstream.accounting.tabulation.parameters import Table
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.dp_transforms.tabulation.expand import Counts
from dpstream.dp_transforms.tabulation.release import GROUP_COLUMNS, PublishedTable, Row, outputs
from dpstream.pipelines.tabulation.public_files import places_of
from dpstream.pipelines.tabulation.text import SEPARATOR
from dpstream.state.disk_errors import decode_error, file_errors


class Figures(NamedTuple):
    """Published figures of groups of one detail.

    Attributes:
        output: the table; detail: the groups' detail; rows: the row that each figure is of.
        groups: (n,) numbers in the level, increasing; values: (n, rows).
    """

    output: PublishedTable
    detail: int
    rows: tuple[Row, ...]
    groups: Int64
    values: Int64


def released_figures(run: Path, table: Table, level: LevelDomain) -> list[Figures]:
    """Return all figures of a table and level in the folder of an output.

    Raises:
        UsageError: a file is not as this program writes it.
    """
    figures, detail_of = list[Figures](), dict[int, Int64]()
    # A total does not say of which detail its group is: its further figures do, and come first.
    for output in reversed(outputs(table)):
        groups, labels, counts = _read(run, output, level)
        for detail, at in _by_detail(output, groups, detail_of).items():
            rows = output.rows[detail]
            expected = np.tile(list(_labels_of(output, rows)), len(at) // len(rows))
            if (labels[at] != expected).any():
                raise _foreign_output(output.folder)
            group_numbers = groups[at][:: len(rows)]
            figures.append(
                Figures(output, detail, rows, group_numbers, counts[at].reshape(-1, len(rows)))
            )
            if len(output.rows) > 1 and output.columns:
                detail_of[detail] = group_numbers
    return figures[::-1]


def _read(run: Path, output: PublishedTable, level: LevelDomain) -> tuple[Int64, Int64, Int64]:
    """(groups, places of labels among all, counts) of all rows."""
    kind = level.level
    pattern = f"{kind.region_type.lower()}-{kind.iteration_level}-*.csv"
    with file_errors(output.folder, "cannot be read"):
        paths = sorted(matching_in(run / output.folder, pattern))
    if not paths:
        raise _foreign_output(output.folder)
    table = pa.concat_tables([_table(path, output) for path in paths]).unify_dictionaries()
    region = places_of(table["REGION_ID"].combine_chunks(), level.regions)
    iteration = places_of(table["ITERATION_CODE"].combine_chunks(), level.iterations)
    label = np.zeros(table.num_rows, np.int64)
    if output.columns:
        texts = [table[name].cast(pa.string()) for name in output.columns]
        joined = pc.binary_join_element_wise(*texts, SEPARATOR).combine_chunks()
        label = places_of(joined.dictionary_encode(), pa.array(_every_label(output)))
    groups = region * len(level.iterations) + iteration
    if (
        any(len(p) and p.min() < 0 for p in (region, iteration, label))
        or (np.diff(groups) < 0).any()
    ):
        raise _foreign_output(output.folder)
    return groups, label, np.asarray(table["COUNT"].to_numpy(), np.int64)


def _table(path: Path, output: PublishedTable) -> pa.Table:
    names = [*GROUP_COLUMNS, *output.columns, "COUNT"]
    types = {name: pa.dictionary(pa.int32(), pa.string()) for name in names[:-1]}
    try:
        table = pa_csv.read_csv(
            path,
            pa_csv.ReadOptions(use_threads=False),
            pa_csv.ParseOptions(delimiter=SEPARATOR, quote_char=False),
            pa_csv.ConvertOptions(column_types={**types, "COUNT": pa.int64()}),
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise decode_error(_foreign_output(output.folder), error, path) from None
    if table.column_names != names:
        raise _foreign_output(output.folder)
    return table


def _every_label(output: PublishedTable) -> list[str]:
    """Each label that any detail has, once."""
    rows = [row for detail in output.rows.values() for row in detail]
    return list(dict.fromkeys(SEPARATOR.join(row.labels) for row in rows))


def _labels_of(output: PublishedTable, rows: tuple[Row, ...]) -> list[int]:
    """Places of the labels of a detail's rows among all."""
    if not output.columns:
        return [0]
    every = {label: place for place, label in enumerate(_every_label(output))}
    return [every[SEPARATOR.join(row.labels)] for row in rows]


def _by_detail(
    output: PublishedTable, groups: Int64, detail_of: Mapping[int, Int64]
) -> dict[int, Int64]:
    """Places of the rows of each detail."""
    details = np.zeros(len(groups), np.int64)
    if output.columns:
        # So many rows as a group has, its detail has figures.
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        sizes = np.diff(starts, append=len(groups))
        widths = {len(rows): detail for detail, rows in output.rows.items()}
        if not set(np.unique(sizes).tolist()) <= widths.keys():
            raise _foreign_output(output.folder)
        by_width = np.array([widths.get(width, 0) for width in range(max(widths) + 1)])
        details = np.repeat(by_width[sizes], sizes)
    else:
        for detail, detail_groups in detail_of.items():
            details[np.isin(groups, detail_groups)] = detail
    return {detail: np.flatnonzero(details == detail) for detail in np.unique(details).tolist()}


def _foreign_output(folder: str) -> UsageError:
    return UsageError(
        folder, "is not as this program writes it", "name the folder of an output as it was made"
    )


#: Powers of 10 that groups are sorted by: 0 to 1, above 1 to 10, and so on.
_POWERS = 10 ** np.arange(0, 12)


class Kind(NamedTuple):
    """A kind of figure at a level, named as plans name it.

    Attributes:
        level: label; table: t1 to t4; figure, detail: see `accounting.tabulation.plan`.
    """

    level: str
    table: str
    figure: str
    detail: int | None


class Cell(NamedTuple):
    """Groups whose measured cells are compared together.

    Attributes:
        table: the table's name; region_type, iteration_level: the level's.
        detailed_only: whether only the iteration's total is measured.
        size: power of 10 of the group's true total.
        detail: the detail in which it was measured.
    """

    table: str
    region_type: str
    iteration_level: int
    detailed_only: bool
    size: int
    detail: int


class Errors:
    """Errors of many figures: their number, sums, and the count of each size of error."""

    def __init__(self) -> None:
        self.groups, self.total, self.squares = 0, 0, 0.0
        self._sizes = np.zeros(1, np.int64)

    def add(self, errors: Int64, groups: int) -> None:
        """Add the errors of the figures of some groups."""
        self.groups += groups
        self.total += int(errors.sum())
        self.squares += float((errors.astype(np.float64) ** 2).sum())
        counts = np.bincount(np.abs(errors).reshape(-1))
        both = np.zeros(max(len(counts), len(self._sizes)), np.int64)
        both[: len(counts)] += counts
        both[: len(self._sizes)] += self._sizes
        self._sizes = both

    @property
    def figures(self) -> int:
        """The number of figures."""
        return int(self._sizes.sum())

    @property
    def bias(self) -> float:
        """Mean error."""
        return self.total / self.figures

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return float(np.sqrt(self.squares / self.figures))

    def within(self, margin: int) -> float:
        """Return the share of figures whose error is at most ``margin``."""
        return float(self._sizes[: margin + 1].sum() / self.figures)

    def quantile(self, chance: float = 0.95) -> float:
        """Return a quantile of the absolute error, linear between two figures."""
        place = (self.figures - 1) * chance
        below = int(place)
        reached = np.cumsum(self._sizes)
        low, high = (
            int(np.searchsorted(reached, min(at, self.figures - 1), side="right"))
            for at in (below, below + 1)
        )
        return low + (high - low) * (place - below)


class Part(NamedTuple):
    """Figures of one detail with their truth.

    Attributes:
        figures: as published; truth: (n, rows) exact; totals: (n,) exact totals of the groups.
        only: (n,) whether only the total of a group is ever measured.
    """

    figures: Figures
    truth: Int64
    totals: Int64
    only: Bool

    @property
    def errors(self) -> Int64:
        """(n, rows)."""
        return self.figures.values - self.truth

    @property
    def measured(self) -> list[int]:
        """Rows that are measured cells and no sums; none of totals whose cells are elsewhere."""
        return [i for i, row in enumerate(self.figures.rows) if len(row.cells) == 1]


def part_of(figures: Figures, table: Table, level: LevelDomain, counts: Counts) -> Part:
    """Return published figures with the exact ones."""
    cells = counts.cells(figures.groups, table.details[figures.detail])
    truth = np.stack([cells[:, list(row.cells)].sum(axis=1) for row in figures.rows], axis=1)
    only = level.total_only[figures.groups % len(level.iterations)]
    return Part(figures, truth, cells.sum(axis=1), only)


def kinds_of(part: Part, table: Table, level: LevelDomain) -> Iterator[tuple[Kind, Int64, int]]:
    """Yield each kind of figure, its errors, and how many groups they are of."""
    folder, detail = part.figures.output.folder.partition("/")[0], part.figures.detail
    label = level.level.label
    if folder == "t1":
        for only, what, group_numbers in ((True, _ONLY, None), (False, "total", detail)):
            rows = part.only == only
            if rows.any():
                yield Kind(label, folder, what, group_numbers), part.errors[rows], int(rows.sum())
        return
    alike = dict[str, list[int]]()
    for place, row in enumerate(part.figures.rows):
        alike.setdefault(_named(row, part.figures.rows, table), []).append(place)
    for what, places in alike.items():
        yield Kind(label, folder, what, detail), part.errors[:, places], len(part.errors)


_ONLY = "total of a group of which only the total is measured"


def _named(row: Row, rows: tuple[Row, ...], table: Table) -> str:
    if not table.data_cells:
        return "sex by age" if len(row.cells) == 1 else "sex"
    alike = [other.labels[0] for other in rows if len(other.cells) == len(row.cells)]
    return f"data cells {', '.join(alike)}"


def cells_of(
    part: Part, table: Table, level: LevelDomain, places: list[int]
) -> Iterator[tuple[Cell, Int64, int]]:
    """Yield the errors of some rows of groups that are alike, and how many groups they are."""
    size, kind = size_of(part.totals), level.level
    # Households of a detail are measured alike, whatever their iteration.
    alone = part.only & (not table.data_cells)
    for power in np.unique(size).tolist() if places else ():
        for only in (False, True):
            rows = (size == power) & (alone == only)
            if rows.any():
                detail = part.figures.detail
                cell = Cell(table.name, kind.region_type, kind.iteration_level, only, power, detail)
                yield cell, part.errors[rows][:, places], int(rows.sum())


def size_of(totals: Int64) -> Int64:
    """Return (n,) power of 10 that a total is at most, above the one before."""
    return np.searchsorted(_POWERS, totals, side="left").astype(np.int64)


def interval(power: int) -> str:
    """Return the interval of a power of 10 as text, as production has it."""
    high = float(_POWERS[power])
    return f"[0.0, {high}]" if power == 0 else f"({high / 10}, {high}]"
