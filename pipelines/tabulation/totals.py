"""``pop-group-totals.txt``: the published t1 of persons, by which households choose their detail.

It may be one file, or a folder of the ``*.csv`` files of a t1.  A group is there at most once.
Groups that no level of the run counts are skipped: of region types and states that do not run, of
iterations that their region type does not take, and of AIANNH areas in which no block of the run
lies.  A region of a state that runs counts also where no block lies in it: its groups are measured
like any other, and are empty.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.tabulation.parameters import Level, Parameters
from dpstream.dp_transforms.tabulation.domain import PublicFiles
from dpstream.pipelines.tabulation.config import PUERTO_RICO
from dpstream.pipelines.tabulation.digits import numbers_of
from dpstream.pipelines.tabulation.faults import Fault, Faults
from dpstream.pipelines.tabulation.text import Rows, read_blocks

TOTALS = "pop-group-totals.txt"
COLUMNS = ("REGION_ID", "REGION_TYPE", "ITERATION_CODE", "COUNT")
#: A count has at most so many digits, a sign apart.
_COUNT, _MOST = "^-?[0-9]{1,15}$", 10**15
#: Column of the geography of each region type; the nation has none.
_OF_TYPE = {
    "STATE": "state",
    "COUNTY": "county",
    "TRACT": "tract",
    "PLACE": "place",
    "AIANNH": "aiannh",
}
#: Digits of a region's id by its type; `PR-` types have those of the type without it.
_DIGITS = {"USA": 1, "STATE": 2, "COUNTY": 5, "TRACT": 11, "PLACE": 7, "AIANNH": 4}
NATION = "1"


def total_files(data: Path) -> list[Path]:
    """The files of a t1 in a data folder, sorted; where there is none, the place it must have."""
    path = data / TOTALS
    return sorted(path.glob("*.csv")) or [path] if path.is_dir() else [path]


def read_totals(
    data: Path, files: PublicFiles, parameters: Parameters, all_faults: list[Fault]
) -> pa.Table | None:
    """Totals of the groups that levels of the run count.

    Args:
        data: folder of the data files.
        files: whose regions and iterations there are.
        all_faults: takes faults.

    Returns:
        REGION_TYPE and REGION_ID (dictionary of string), ITERATION_CODE (the same) and COUNT
        (int64), in the order of the files; ``None`` if there is a fault.
    """
    before, domain = len(all_faults), _Domain(files, parameters)
    tables, groups = list[pa.Table](), list[Int64]()
    where = list[tuple[Faults, Int64]]()
    for path in total_files(data):
        faults = Faults(path.name)
        for rows in read_blocks(path, COLUMNS, faults):
            table, group, numbers = domain.counted(rows, faults)
            tables.append(table)
            groups.append(group)
            where.append((faults, numbers))
        all_faults += faults.faults
    all_faults += _again(groups, where)
    if len(all_faults) == before and not domain.has_block:
        rule = "has no group of a region with a block of the run: its tables would be of nobody"
        all_faults.append(Fault(TOTALS, None, "", rule, "give the t1 of the same geography"))
    if len(all_faults) > before:
        return None
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _again(groups: list[Int64], where: list[tuple[Faults, Int64]]) -> Iterator[Fault]:
    """Faults of groups that are there before, in whichever file."""
    every = np.concatenate([*groups, np.zeros(0, np.int64)])
    order = np.argsort(every, kind="stable")
    ordered = every[order]
    again = np.zeros(len(every), np.bool_)
    again[order[1:]] = ordered[1:] == ordered[:-1]
    begin = 0
    for group, (faults, numbers) in zip(groups, where, strict=True):
        own = Faults(faults.file)
        own.rows(
            again[begin : begin + len(group)],
            numbers,
            "",
            "is a group that is there before",
            "keep one of the rows",
        )
        yield from own.faults
        begin += len(group)


class _Domain:
    """Groups of the levels of a run, by number."""

    def __init__(self, files: PublicFiles, parameters: Parameters) -> None:
        levels = parameters.levels
        self.types = pa.array(list(dict.fromkeys(level.region_type for level in levels)))
        self.all_types = pa.array(["USA", *_OF_TYPE, *(f"PR-{name}" for name in _PR)])
        self.codes = files.iterations["CODE"].combine_chunks()
        self.taken = _taken(files.iterations, levels, self.types)
        self.regions = [_regions(files.geography, name) for name in self.types.to_pylist()]
        self.states = pa.array(parameters.state_filter, pa.string())
        #: Whether a row that counts lies in a region with a block.
        self.has_block = False

    def counted(self, rows: Rows, faults: Faults) -> tuple[pa.Table, Int64, Int64]:
        """The rows that levels count, the number of each one's group, and its line."""
        numbers = rows.numbers
        texts = {name: _encoded(rows.table[name]) for name in COLUMNS[:3]}
        types, of_type = texts["REGION_TYPE"].dictionary, _indices(texts["REGION_TYPE"])
        listed = _bool(pc.is_in(types, self.all_types))[of_type]
        faults.rows(~listed, numbers, "REGION_TYPE", "is no region type", "correct it")
        code = _places(texts["ITERATION_CODE"], self.codes)
        faults.rows(
            code < 0,
            numbers,
            "ITERATION_CODE",
            "is no iteration of level 1 or 2",
            "give the t1 of the same iterations",
        )
        count, well = _counts(rows.table["COUNT"].combine_chunks())
        faults.rows(~well, numbers, "COUNT", "is not a whole number", "correct it")
        kind = _places(texts["REGION_TYPE"], self.types)
        ids, of_id = texts["REGION_ID"].dictionary, _indices(texts["REGION_ID"])
        numbered = [self._numbered(place, ids) for place in range(len(self.types))]
        # One row more: types that do not run have no regions.
        region = np.stack([*(n for n, _ in numbered), np.full(len(ids), -1)])[kind, of_id]
        bad = np.stack([*(b for _, b in numbered), np.zeros(len(ids), np.bool_)])[kind, of_id]
        faults.rows(
            bad, numbers, "REGION_ID", "is not the id of a region of its type", "correct it"
        )
        counted = (region >= 0) & (code >= 0) & well
        counted &= self.taken[kind, code]
        lies = [_index(ids, regions) >= 0 for regions in self.regions]
        self.has_block |= bool(np.stack(lies)[kind, of_id][counted].any())
        group = (region * len(self.types) + kind) * len(self.codes) + code
        table = pa.table({**texts, "COUNT": count}).filter(pa.array(counted))
        return table, group[counted], numbers[counted]

    def _numbered(self, place: int, ids: pa.StringArray) -> tuple[Int64, Bool]:
        """(ids,) each as a region of a type: its number, -1 if it does not count; and bad ones.

        A region of a state that does not run is skipped whatever its form.
        """
        name = self.types[place].as_py()
        kind = name.removeprefix("PR-")
        number, well = numbers_of(ids, _DIGITS[kind])
        if kind == "USA":
            counted = well & (number == int(NATION))
            bad = ~counted
        elif kind == "AIANNH":
            counted, bad = _index(ids, self.regions[place]) >= 0, ~well
        else:
            states = pa.array([PUERTO_RICO]) if name != kind else self.states
            mine = _bool(pc.is_in(pc.utf8_slice_codeunits(ids, 0, 2), states))
            counted, bad = mine & well, mine & ~well
        return np.where(counted, number, -1), bad


_PR = ("STATE", "COUNTY", "TRACT", "PLACE")


def _taken(
    iterations: pa.Table, levels: tuple[Level, ...], types: pa.StringArray
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """(region types, iterations) which iteration is counted in regions of which type."""
    detailed = ~_bool(iterations["COARSE_ONLY"])
    coarse = ~_bool(iterations["DETAILED_ONLY"])
    large = {level.region_type: level.detailed for level in levels}
    rows = [detailed if large[name] else coarse for name in types.to_pylist()]
    return np.stack(rows)


def _regions(geography: pa.Table, region_type: str) -> pa.StringArray:
    """Ids of the regions of a type."""
    if region_type == "USA":
        return pa.array([NATION])
    puerto_rico = region_type.startswith("PR-")
    own = pc.equal(geography["state"], "72")
    rows = geography.filter(own if puerto_rico else pc.invert(own))
    ids = rows[_OF_TYPE[region_type.removeprefix("PR-")]].drop_null()
    return pc.unique(ids)


def _counts(column: pa.StringArray) -> tuple[Int64, Bool]:
    """(counts, which texts are whole numbers of at most 15 digits); 0 where one is not."""
    # Arrow reads hexadecimal digits too, behind an x.
    simple = b"x" not in (raw := (column.buffers()[2] or pa.py_buffer(b"")).to_pybytes())
    if simple and b"X" not in raw:
        try:
            count = np.asarray(column.cast(pa.int64()).to_numpy(), np.int64)
            if ((count > -_MOST) & (count < _MOST)).all():
                return count, np.ones(len(count), np.bool_)
        except pa.ArrowInvalid:  # its text shows the value
            pass
    well = _bool(pc.match_substring_regex(column, _COUNT))
    digits = pc.if_else(pa.array(well), column, "0")
    return np.asarray(digits.cast(pa.int64()).to_numpy(), np.int64), well


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """A column of few different texts."""
    return column.combine_chunks().dictionary_encode()


def _indices(column: pa.DictionaryArray) -> Int64:
    return np.asarray(column.indices.to_numpy(), np.int64)


def _index(texts: pa.StringArray, values: pa.StringArray) -> Int64:
    """The place of each text among values, -1 where it is none of them."""
    return np.asarray(pc.index_in(texts, values).fill_null(-1).to_numpy(), np.int64)


def _places(column: pa.DictionaryArray, values: pa.StringArray) -> Int64:
    """(n,) the same of the rows of a column."""
    return np.asarray(_index(column.dictionary, values)[_indices(column)])


def _bool(column: pa.ChunkedArray | pa.Array) -> Bool:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)
