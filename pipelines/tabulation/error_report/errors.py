"""Errors of published figures, as sums and histograms: NOT private, for public data only.

Two kinds of sums are kept, so that any number of runs and groups fits into memory:

* of each kind of figure at a level (``Errors`` by `Kind`): held against its margin;
* of the measured cells of groups of one size (powers of 10), detail and kind of iteration, which is
  what production's report over several runs shows (`Cell`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.tabulation.parameters import Table
from dpstream.dp_transforms.tabulation.aggregate import Counts
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.dp_transforms.tabulation.release import Row
from dpstream.pipelines.tabulation.error_report.releases import Figures

#: Powers of 10 that groups are sorted by: 0 to 1, above 1 to 10, and so on.
_POWERS = 10 ** np.arange(0, 12)


class Kind(NamedTuple):
    """A kind of figure at a level, named as plans name it.

    Attributes:
        level: label; table: t1 to t4; figure, detail: see `accounting.tabulation.describe`.
    """

    level: str
    table: str
    figure: str
    detail: int | None


class Cell(NamedTuple):
    """Groups whose measured cells are looked at together.

    Attributes:
        table: its name; region_type, iteration_level: of the level.
        detailed_only: of the iteration; size: power of 10 of the group's true total.
        detail: that it was measured in.
    """

    table: str
    region_type: str
    iteration_level: int
    detailed_only: bool
    size: int
    detail: int


class Errors:
    """Errors of many figures: their number, sums, and how often each size of error came."""

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
        """How many figures there are."""
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
        """Share of figures whose error is at most this."""
        return float(self._sizes[: margin + 1].sum() / self.figures)

    def quantile(self, chance: float = 0.95) -> float:
        """Quantile of the absolute error, linear between two figures."""
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
    """Published figures with the exact ones."""
    cells = counts.cells(figures.groups, table.details[figures.detail])
    truth = np.stack([cells[:, list(row.cells)].sum(axis=1) for row in figures.rows], axis=1)
    only = level.total_only[figures.groups % len(level.iterations)]
    return Part(figures, truth, cells.sum(axis=1), only)


def kinds_of(part: Part, table: Table, level: LevelDomain) -> Iterator[tuple[Kind, Int64, int]]:
    """Each kind of figure, its errors, and how many groups they are of."""
    folder, detail = part.figures.output.folder.partition("/")[0], part.figures.detail
    label = level.level.label
    if folder == "t1":
        for only, what, of in ((True, _ONLY, None), (False, "total", detail)):
            rows = part.only == only
            if rows.any():
                yield Kind(label, folder, what, of), part.errors[rows], int(rows.sum())
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
    """Errors of some rows of groups that are alike, and how many groups they are."""
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
    """(n,) power of 10 that a total is at most, above the one before."""
    return np.searchsorted(_POWERS, totals, side="left").astype(np.int64)


def interval(power: int) -> str:
    """Sizes of a power of 10 in words, as production has them."""
    high = float(_POWERS[power])
    return f"[0.0, {high}]" if power == 0 else f"({high / 10}, {high}]"
