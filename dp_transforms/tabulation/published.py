"""Totals that are public already, by groups: what chooses the detail of households."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation.parameters import Level
from dpstream.dp_transforms.tabulation.domain import Domain


class Published(NamedTuple):
    """Totals of a level that are public already.

    Attributes:
        groups: (n,) numbers in the level, increasing; totals: (n,).
    """

    groups: Int64
    totals: Int64

    def within(self, first: int, last: int) -> "Published":
        """Those of the groups ``first .. last - 1``."""
        begin, end = np.searchsorted(self.groups, (first, last))
        return Published(self.groups[begin:end], self.totals[begin:end])


def published_of(domain: Domain, totals: pa.Table) -> dict[Level, Published]:
    """The totals of each level; groups that are in none are left out.

    Args:
        totals: REGION_TYPE, REGION_ID, ITERATION_CODE (dictionaries of string) and COUNT (int64);
            each group once.
    """
    out = {}
    kind, region, code = (
        _Texts(totals.column(name)) for name in ("REGION_TYPE", "REGION_ID", "ITERATION_CODE")
    )
    counts = np.asarray(totals.column("COUNT").to_numpy(), np.int64)
    for level in domain.levels:
        rows = np.flatnonzero(kind.places_of(pa.array([level.level.region_type])) >= 0)
        at, iteration = (
            region.places_of(level.regions, rows),
            code.places_of(level.iterations, rows),
        )
        mine = (at >= 0) & (iteration >= 0)
        groups = at[mine] * len(level.iterations) + iteration[mine]
        order = np.argsort(groups)
        out[level.level] = Published(groups[order], counts[rows[mine]][order])
    return out


def regions_of(totals: pa.Table) -> dict[str, pa.StringArray]:
    """The regions of published totals, by type.

    Args:
        totals: as `published_of` has them.
    """
    kind, region = _Texts(totals.column("REGION_TYPE")), _Texts(totals.column("REGION_ID"))
    pairs = np.unique(kind.index * len(region.values) + region.index)
    of, at = np.divmod(pairs, max(1, len(region.values)))
    return {
        kind.values[number].as_py(): region.values.take(pa.array(at[of == number]))
        for number in np.unique(of).tolist()
    }


class _Texts:
    """A column of texts that are few: the distinct values, and (n,) which one each row has."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of no chunks, or more than fits one
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        self.values = array.dictionary
        self.index = np.asarray(array.indices.to_numpy(), np.int64)

    def places_of(self, texts: pa.StringArray, rows: Int64 | None = None) -> Int64:
        """(n,) place of each row's text among the known ones, -1: none."""
        place = pc.index_in(self.values, value_set=texts).fill_null(-1)
        of = np.asarray(place.to_numpy(zero_copy_only=False), np.int64)
        return of[self.index if rows is None else self.index[rows]]
