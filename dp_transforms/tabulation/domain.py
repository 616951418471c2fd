"""The public domain of every table: which regions and iterations there are, from public files.

Nothing of a data file enters here, so the cells of a table, their order and with it the names of
their noise are the same whatever the data are.  Regions are those that a block of the geography
lies in, and of Puerto Rico or not by the state of the block; no block is of both.  Households have
the regions of the published totals too, also where no block lies in one: its groups are empty.

Totals that are public already, by groups, choose the detail of households (``Published``).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.tabulation.parameters import Level, Parameters
from dpstream.accounting.tabulation.plan import Stability, stability

#: The state whose blocks are those of Puerto Rico's levels, and of no other.
PUERTO_RICO = "72"
#: Which column of the geography has the regions of a type; ``None``: one region, the nation.
_COLUMN = {
    "USA": None,
    "STATE": "state",
    "COUNTY": "county",
    "TRACT": "tract",
    "PLACE": "place",
    "AIANNH": "aiannh",
}
_NATION = "1"


class PublicFiles(NamedTuple):
    """The public files of an execution, parsed and checked.

    Attributes:
        iterations: CODE (string, distinct), NAME (string), LEVEL (int8, 1 or 2), ALONE (bool, null
            for ethnicities), DETAILED_ONLY, COARSE_ONLY, ETHNICITY (bool); those of level 0 are
            left out.
        codes: race and ethnicity codes, sorted.
        members: (k, 2) int32, row of an iteration and index of a code that belongs to it.
        geography: block (string of 15 digits, distinct), state (2), county (5), tract (11),
            place (7, null: none), aiannh (4, null: none); only what is in the run.
    """

    iterations: pa.Table
    codes: pa.StringArray
    members: npt.NDArray[np.int32]
    geography: pa.Table


class Members(NamedTuple):
    """Iterations of one kind by code, compressed by rows.

    Attributes:
        starts: (codes + 1,) where the iterations of a code begin.
        iterations: indices of iterations in the level.
    """

    starts: Int64
    iterations: Int32


class LevelDomain(NamedTuple):
    """Population groups of a level: each region with each iteration.

    Group ``r * len(iterations) + i`` is region r with iteration i.

    Attributes:
        level: the level, by which tables name it.
        regions: sorted ids; iterations: sorted codes.
        total_only: (iterations,) of which the total alone is measured (DETAILED_ONLY).
        alone, combined, ethnicity: the iterations of a code, by kind.
        stability: s, with what it follows from.
    """

    level: Level
    regions: pa.StringArray
    iterations: pa.StringArray
    total_only: Bool
    alone: Members
    combined: Members
    ethnicity: Members
    stability: Stability

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.regions) * len(self.iterations)


class Domain(NamedTuple):
    """Population groups of an execution.

    Attributes:
        levels: those with a budget and a group, in public order.
        regions_of: by type of region, (blocks,) index of the region that a block lies in, -1: none.
        races: how many race codes of a record count, max_race_codes.
    """

    levels: tuple[LevelDomain, ...]
    regions_of: dict[str, Int32]
    races: int

    def of(self, level: Level) -> LevelDomain | None:
        """Return a level's groups; ``None`` if it has none or is off."""
        return next((entry for entry in self.levels if entry.level == level), None)


def domain_of(
    files: PublicFiles,
    parameters: Parameters,
    more: Mapping[str, pa.StringArray] | None = None,
) -> Domain:
    """Return the groups of all levels that run.

    Args:
        more: by type, regions of published totals; a block may lie in them or not.
    """
    levels, regions_of = list[LevelDomain](), dict[str, Int32]()
    names = dict[str, pa.StringArray]()
    for level in parameters.levels:
        if all(parameters.budget(table.name, level) == 0 for table in parameters.tables):
            continue
        kind = level.region_type
        if kind not in names:
            own = (more or {}).get(kind, pa.array([], pa.string()))
            names[kind], regions_of[kind] = _regions(files.geography, level, own)
        level_domain = _level(files, level, names[kind], parameters.max_race_codes)
        if level_domain.groups:
            levels.append(level_domain)
    return Domain(tuple(levels), regions_of, parameters.max_race_codes)


def _regions(
    geography: pa.Table, level: Level, more: pa.StringArray
) -> tuple[pa.StringArray, Int32]:
    """Sorted ids of a type's regions, and each block's."""
    inside = pc.equal(geography.column("state"), PUERTO_RICO)
    mine = inside if level.puerto_rico else pc.invert(inside)
    column = _COLUMN[level.region_type.removeprefix("PR-")]
    ids: pa.ChunkedArray | pa.Scalar = pa.scalar(_NATION)
    if column is not None:
        ids = geography.column(column)
    region = pc.if_else(mine, ids, pa.scalar(None, pa.string()))
    if isinstance(region, pa.ChunkedArray):
        region = region.combine_chunks()
    regions = pc.unique(pa.concat_arrays([pc.unique(region).drop_null(), more])).sort()
    place = pc.index_in(region, value_set=regions).fill_null(-1)
    return regions, np.asarray(place.to_numpy(zero_copy_only=False), np.int32)


def _level(files: PublicFiles, level: Level, regions: pa.StringArray, races: int) -> LevelDomain:
    """A level over these regions."""
    table = files.iterations
    left_out = _flags(table, "COARSE_ONLY" if level.detailed else "DETAILED_ONLY")
    taken = (np.asarray(table.column("LEVEL").to_numpy()) == level.iteration_level) & ~left_out
    rows = np.flatnonzero(taken)
    codes = table.column("CODE").combine_chunks().take(pa.array(rows))
    order = np.asarray(pc.sort_indices(codes).to_numpy(), np.int64)
    rows = rows[order]
    index = np.full(table.num_rows, -1, np.int32)
    index[rows] = np.arange(len(rows), dtype=np.int32)
    race, single = ~_flags(table, "ETHNICITY"), _flags(table, "ALONE")
    alone, combined, ethnicity = (
        _pairs(files.members, index, kind) for kind in (race & single, race & ~single, ~race)
    )
    size = len(files.codes)
    return LevelDomain(
        level,
        regions,
        codes.take(pa.array(order)),
        _flags(table, "DETAILED_ONLY")[rows],
        _members(alone, size),
        _members(combined, size),
        _members(ethnicity, size),
        stability(alone, combined, ethnicity, races),
    )


def _flags(table: pa.Table, name: str) -> Bool:
    """A column of truths; null is false."""
    column = table.column(name).fill_null(False)
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)


def _pairs(members: npt.NDArray[np.int32], index: Int32, kind: Bool) -> Int32:
    """(k, 2) index of an iteration in the level and of a code, each once, sorted by code."""
    place_of_code = np.where(kind, index, -1)[members[:, 0]]
    pairs = np.stack([place_of_code, members[:, 1]], axis=1)[place_of_code >= 0]
    pairs = np.unique(pairs, axis=0)
    return np.asarray(pairs[np.argsort(pairs[:, 1], kind="stable")], np.int32)


def _members(pairs: Int32, codes: int) -> Members:
    starts = np.searchsorted(pairs[:, 1], np.arange(codes + 1)).astype(np.int64)
    return Members(starts, np.ascontiguousarray(pairs[:, 0]))


class Shard(NamedTuple):
    """A range of a level's groups, by regions; work and output files are made by shards.

    Attributes:
        number: among all shards of an execution.
        level: index of the level in the domain.
        part: number among the shards of the level.
        first, last: groups ``first .. last - 1``, whole regions.
    """

    number: int
    level: int
    part: int
    first: int
    last: int


#: Groups of a shard, unless one region has more.
SHARD_GROUPS = 500_000


def shards_of(levels: Sequence[LevelDomain], groups: int = SHARD_GROUPS) -> tuple[Shard, ...]:
    """Return all shards; they depend on public files alone."""
    out = list[Shard]()
    for number, level in enumerate(levels):
        m, regions = len(level.iterations), len(level.regions)
        step = max(1, groups // m)
        for part, first in enumerate(range(0, regions, step)):
            last = min(regions, first + step)
            out.append(Shard(len(out), number, part, first * m, last * m))
    return tuple(out)


class Published(NamedTuple):
    """Totals of a level that are public already.

    Attributes:
        groups: (n,) numbers in the level, increasing; totals: (n,).
    """

    groups: Int64
    totals: Int64

    def within(self, first: int, last: int) -> "Published":
        """Return those of the groups ``first .. last - 1``."""
        begin, end = np.searchsorted(self.groups, (first, last))
        return Published(self.groups[begin:end], self.totals[begin:end])


def published_of(domain: Domain, totals: pa.Table) -> dict[Level, Published]:
    """Return the published totals of each level; groups without one are left out.

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
    """Return the regions of published totals, by type.

    Args:
        totals: as `published_of` has them.
    """
    kind, region = _Texts(totals.column("REGION_TYPE")), _Texts(totals.column("REGION_ID"))
    pairs = np.unique(kind.index * len(region.values) + region.index)
    kind_numbers, at = np.divmod(pairs, max(1, len(region.values)))
    return {
        kind.values[number].as_py(): region.values.take(pa.array(at[kind_numbers == number]))
        for number in np.unique(kind_numbers).tolist()
    }


class _Texts:
    """A column of texts that are few: the distinct values, and (n,) which one each row has."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        self.values = array.dictionary
        self.index = np.asarray(array.indices.to_numpy(), np.int64)

    def places_of(self, texts: pa.StringArray, rows: Int64 | None = None) -> Int64:
        """(n,) place of each row's text among the known ones, -1: none."""
        place = pc.index_in(self.values, value_set=texts).fill_null(-1)
        places = np.asarray(place.to_numpy(zero_copy_only=False), np.int64)
        return places[self.index if rows is None else self.index[rows]]
