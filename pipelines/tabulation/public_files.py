"""Public files of an execution: race and ethnicity, blocks and their regions, totals of persons.

**Race and ethnicity** are four files: the codes that records have, the iterations that tables
count, and the map.  An iteration of race is counted *alone* (all codes of a record are its own) or
*in combination* (one is); one of ethnicity has no such column.  Iterations of level 0 are not
counted, but codes may belong to them.  A code belongs to at most one iteration of a kind at any
region: of one level, alone or not, among those that large regions take (not COARSE_ONLY), and among
those that small regions take (not DETAILED_ONLY).

``GRF-C.txt`` says which regions every block lies in.  Six columns are used; the file may have
others.  Only blocks of the states of the run count.  A block that is there twice is refused: a join
with it would count a person twice.

``pop-group-totals.txt`` has the published t1 of persons, by which households choose their detail.
It may be one file, or a folder of the ``*.csv`` files of a t1.  A group is there at most once.
Groups that no level of the run counts are skipped: of region types and states that do not run, of
iterations that their region type does not take, and of AIANNH areas in which no block of the run
lies.  A region of a state that runs counts also where no block lies in it: its groups are measured
like any other, and are empty.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.places import matching_in
from dpstream.accounting.tabulation.parameters import Level, Parameters
from dpstream.dp_transforms.tabulation.domain import PublicFiles
from dpstream.pipelines.tabulation.config import PUERTO_RICO
from dpstream.pipelines.tabulation.text import (
    Fault,
    Faults,
    Guard,
    Rows,
    numbers_of,
    read_blocks,
    read_rows,
)
from dpstream.state.disk_errors import file_errors

RACE_ITERATIONS = "race-characteristic-iterations.txt"
ETHNICITY_ITERATIONS = "ethnicity-characteristic-iterations.txt"
CODES = "race-and-ethnicity-codes.txt"
MAP = "race-and-ethnicity-code-to-iteration.txt"
_CODE, _FLAGS = "ITERATION_CODE", ("DETAILED_ONLY", "COARSE_ONLY")
#: Columns of each file.
PARAMETER_FILES: dict[str, tuple[str, ...]] = {
    RACE_ITERATIONS: (_CODE, "ITERATION_NAME", "LEVEL", "ALONE", *_FLAGS),
    ETHNICITY_ITERATIONS: (_CODE, "ITERATION_NAME", "LEVEL", *_FLAGS),
    CODES: ("RACE_ETH_CODE", "RACE_ETH_NAME"),
    MAP: (_CODE, "RACE_ETH_CODE"),
}
NONE = "Null"
_ITERATION, _RACE_ETH = "^[0-9]{4}$", "^[1-9][0-9]{3}$"
#: A record holds the index of its codes in 16 bits.
MAX_CODES = 1 << 14


class Characteristics(NamedTuple):
    """The iterations, codes and members of `dp_transforms.tabulation.domain.PublicFiles`."""

    iterations: pa.Table
    codes: pa.StringArray
    members: npt.NDArray[np.int32]


def read_characteristics(folder: Path, faults: dict[str, Faults]) -> Characteristics | None:
    """Return the four files of a parameter folder.

    Args:
        faults: by file; takes what is wrong.

    Returns:
        ``None`` if there is a fault.
    """
    rows = {
        name: read_rows(folder / name, PARAMETER_FILES[name], faults[name])
        for name in PARAMETER_FILES
    }
    for name, check in _OF_ROWS.items():
        if (listed := rows[name]) is not None:
            faults[name].rows(listed.numbers, *check(listed.table))
    race, ethnicity, codes, pairs = (
        rows[name] for name in (RACE_ITERATIONS, ETHNICITY_ITERATIONS, CODES, MAP)
    )
    if codes is not None and not 0 < len(codes.numbers) <= MAX_CODES:
        faults[CODES].add("", f"has no code, or more than {MAX_CODES:,}", "correct the list")
    if race is None or ethnicity is None or codes is None or pairs is None:
        return None
    faults[ETHNICITY_ITERATIONS].rows(
        ethnicity.numbers,
        (
            _index(ethnicity.table[_CODE], race.table[_CODE]) >= 0,
            _CODE,
            "is an iteration of race too",
            "give iterations of race and ethnicity codes of their own",
        ),
    )
    every = _together(race.table, ethnicity.table)
    characteristics = _resolved(every, codes.table["RACE_ETH_CODE"], pairs, faults[MAP])
    return None if any(faults[name].faults for name in PARAMETER_FILES) else characteristics


def _of_iterations(table: pa.Table) -> list[Guard]:
    """Codes, levels and flags of a list of iterations."""
    levels, zero = _in(table["LEVEL"], "0", "1", "2"), _in(table["LEVEL"], "0")
    flags = [(n, _in(table[n], "True", "False"), _in(table[n], NONE)) for n in _FLAGS]
    return [
        *_of_code(table[_CODE], _CODE, _ITERATION, "four digits"),
        (~levels, "LEVEL", "is not 0, 1 or 2", "correct it"),
        *(
            (~_in(table[n], "True", "False"), n, "is not True or False", "correct it")
            for n in table.column_names
            if n == "ALONE"
        ),
        *(
            guard
            for name, flagged, null in flags
            for guard in (
                (~flagged & ~null, name, "is not True, False or Null", "correct it"),
                (
                    levels & (null != zero) & (flagged | null),
                    name,
                    "is Null where LEVEL is not 0, or is not where it is",
                    "correct one of them",
                ),
            )
        ),
        (
            _in(table["DETAILED_ONLY"], "True") & _in(table["COARSE_ONLY"], "True"),
            "COARSE_ONLY",
            "is True, and DETAILED_ONLY too",
            "an iteration is left out of large or of small regions, not of both",
        ),
    ]


def _of_codes(table: pa.Table) -> list[Guard]:
    rule = "four digits, the first not 0"
    return _of_code(table["RACE_ETH_CODE"], "RACE_ETH_CODE", _RACE_ETH, rule)


def _of_code(column: pa.ChunkedArray, name: str, pattern: str, words: str) -> list[Guard]:
    """Codes are of their form, each once."""
    return [
        (
            ~_bool(pc.match_substring_regex(column, pattern)),
            name,
            f"is not {words}",
            "correct it",
        ),
        (repeated(column), name, "is there before", "keep one of the rows"),
    ]


#: What is checked of each row of a list by itself.
_OF_ROWS: dict[str, Callable[[pa.Table], list[Guard]]] = {
    RACE_ITERATIONS: _of_iterations,
    ETHNICITY_ITERATIONS: _of_iterations,
    CODES: _of_codes,
}


def _together(race: pa.Table, ethnicity: pa.Table) -> pa.Table:
    """Iterations of both lists, those of race first, of level 0 too."""
    both = pa.concat_tables([race, ethnicity], promote_options="default").combine_chunks()

    def flag(name: str) -> pa.ChunkedArray:
        flagged = pa.array(_in(both[name], "True", "False"))
        return pc.if_else(flagged, pc.equal(both[name], "True"), pa.scalar(None, pa.bool_()))

    return pa.table(
        {
            "CODE": both[_CODE],
            "NAME": both["ITERATION_NAME"],
            "LEVEL": pc.index_in(both["LEVEL"], pa.array(["0", "1", "2"])).cast(pa.int8()),
            **{name: flag(name) for name in ("ALONE", *_FLAGS)},
            "ETHNICITY": pa.array(np.arange(both.num_rows) >= race.num_rows),
        }
    )


def _resolved(
    every: pa.Table, codes: pa.ChunkedArray, pairs: Rows, faults: Faults
) -> Characteristics:
    """What tables count: iterations of levels 1 and 2, sorted codes, and which belong to which.

    Pairs of the map are of listed iterations and codes, each once; a code may belong to no
    iteration, but to no two of a kind: the later rows are named.
    """
    counted = every.filter(pc.greater(every["LEVEL"], 0)).combine_chunks()
    ordered = codes.combine_chunks().take(pc.sort_indices(codes))
    table, fix = pairs.table, "correct or remove it"
    again = repeated(pc.binary_join_element_wise(table[_CODE], table["RACE_ETH_CODE"], "|"))
    iteration = _index(table[_CODE], counted["CODE"])
    code = _index(table["RACE_ETH_CODE"], ordered)
    unlisted = _index(table[_CODE], every["CODE"]) < 0
    faults.rows(
        pairs.numbers,
        (unlisted, _CODE, "is no iteration of the two lists", fix),
        (code < 0, "RACE_ETH_CODE", "is not in the list of codes", fix),
        (again, "", "is there before", "keep one of the rows"),
    )
    usable = (iteration >= 0) & (code >= 0) & ~again
    iteration, code = iteration[usable], code[usable]
    alone = _bool(counted["ALONE"].fill_null(True))
    kind = (counted["LEVEL"].to_numpy() * 2 + alone) * 2 + _bool(counted["ETHNICITY"])
    for flag, regions in (("COARSE_ONLY", "nation and states"), ("DETAILED_ONLY", "small regions")):
        taken = ~_bool(counted[flag].fill_null(True))[iteration]
        of_kind = np.where(taken, code * 64 + kind[iteration], -1 - np.arange(len(code)))
        rule = f"puts a code into a second iteration of one level and kind, counted for {regions}"
        second = repeated(pa.chunked_array([of_kind]))
        faults.rows(pairs.numbers[usable], (second, "", rule, "leave the code in one of them"))
    members = np.stack([iteration, code], axis=1).astype(np.int32)
    return Characteristics(counted, ordered, members[np.lexsort(members.T[::-1])])


def repeated(column: pa.ChunkedArray) -> Bool:
    """Return (n,) whether each value occurred before."""
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.to_numpy()
    first = np.full(len(encoded.dictionary), len(indices), np.int64)
    np.minimum.at(first, indices, np.arange(len(indices)))
    return np.asarray(first[indices] != np.arange(len(indices)))


def _in(column: pa.ChunkedArray, *values: str) -> Bool:
    return _bool(pc.is_in(column, pa.array(values)))


GEOGRAPHY = "GRF-C.txt"
#: Columns that name a block, and their digits; those of data files are the same.
BLOCK = {"TABBLKST": 2, "TABBLKCOU": 3, "TABTRACTCE": 6, "TABBLK": 4}
_PLACE, _AREA = {"PLACEFP": 5}, {"AIANNHCE": 4}
GEOGRAPHY_COLUMNS = {**BLOCK, **_PLACE, **_AREA}
NO_PLACE, NO_AREA = 99_999, 9_999
BLOCK_DIGITS = sum(BLOCK.values())


def read_geography(path: Path, states: tuple[str, ...], faults: Faults) -> pa.Table | None:
    """Return the blocks of the states of a run, sorted.

    Args:
        states: FIPS codes.

    Returns:
        Columns as `dp_transforms.tabulation.domain.PublicFiles` has them; ``None`` if there is a
        fault.
    """
    before = len(faults.faults)
    within = np.array(sorted(map(int, states)), np.int64)
    parts = [
        _part(rows, within, faults)
        for rows in read_blocks(path, [*GEOGRAPHY_COLUMNS], faults, True)
    ]
    if not parts:
        if len(faults.faults) == before:
            faults.add("", "has no rows", "give the blocks of every state that runs")
        return None
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    block, place, area, numbers = (column[order] for column in columns)
    again = np.append(False, block[1:] == block[:-1])
    rule = "is a block that is there before: its records would count twice"
    faults.rows(numbers, (again, "TABBLKST .. TABBLK", rule, "keep one of the rows"))
    if not is_in(within, np.unique(block // 10 ** (BLOCK_DIGITS - 2))).all():
        fix = "give the blocks of every state that runs, or run without it"
        faults.add("TABBLKST", "has no block of a state of the run", fix)
    return None if len(faults.faults) > before else _table(block, place, area)


def _part(rows: Rows, within: Int64, faults: Faults) -> tuple[Int64, Int64, Int64, Int64]:
    """Block, place and area of well-formed rows of the run, and their lines in the file.

    Faults of rows of other states are faults as well.
    """
    columns, good = dict[str, Int64](), np.ones(len(rows.numbers), np.bool_)
    for name, width in GEOGRAPHY_COLUMNS.items():
        column = rows.table[name].combine_chunks()
        columns[name], well = numbers_of(column, width)
        faults.rows(rows.numbers, (~well, name, f"is not {width} digits", "correct it"))
        good &= well
    inside = good & is_in(columns["TABBLKST"], within)
    block = np.zeros(len(good), np.int64)
    for name, width in BLOCK.items():
        block = block * 10**width + columns[name]
    place, area = columns["PLACEFP"], columns["AIANNHCE"]
    return block[inside], place[inside], area[inside], rows.numbers[inside]


def searched(values: Int64, ordered: Int64) -> tuple[Int64, Bool]:
    """Return (n,) the place of each value among sorted ones, and (n,) whether it is there."""
    if not len(ordered):
        return np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return at, np.asarray(ordered[at] == values)


def is_in(values: Int64, ordered: Int64) -> Bool:
    """Return (n,) whether each value is among sorted ones."""
    return searched(values, ordered)[1]


def _table(block: Int64, place: Int64, area: Int64) -> pa.Table:
    """The columns of sorted blocks as texts."""
    text = texts(block, BLOCK_DIGITS)
    state = pc.utf8_slice_codeunits(text, 0, 2)
    of_place = pc.binary_join_element_wise(state, texts(place, 5), "")
    within = block // 10 ** (BLOCK_DIGITS - 2) != int(PUERTO_RICO)
    none = pa.scalar(None, pa.string())
    return pa.table(
        {
            "block": text,
            "state": state,
            "county": pc.utf8_slice_codeunits(text, 0, 5),
            "tract": pc.utf8_slice_codeunits(text, 0, 11),
            "place": pc.if_else(pa.array(place != NO_PLACE), of_place, none),
            # Areas are counted outside of Puerto Rico only.
            "aiannh": pc.if_else(pa.array((area != NO_AREA) & within), texts(area, 4), none),
        }
    )


def texts(numbers: Int64, width: int) -> pa.StringArray:
    """Return numbers as texts of ``width`` digits."""
    return pc.utf8_lpad(pa.array(numbers).cast(pa.string()), width, "0")


TOTALS = "pop-group-totals.txt"
_TOTALS_COLUMNS = ("REGION_ID", "REGION_TYPE", "ITERATION_CODE", "COUNT")
#: A count has at most so many digits, a sign apart.
_COUNT = "^-?[0-9]{1,15}$"
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
    """Return the files of a t1 in a data folder, sorted; where there is none, the place it must
    have.
    """
    path = data / TOTALS
    if not path.is_dir():
        return [path]
    with file_errors(TOTALS, "cannot be read"):
        return sorted(matching_in(path, "*.csv")) or [path]


def read_totals(
    data: Path, files: PublicFiles, parameters: Parameters, all_faults: list[Fault]
) -> pa.Table | None:
    """Return the totals of the groups that levels of the run count.

    Args:
        data: folder of the data files.
        files: the public files, with all regions and iterations.
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
        for rows in read_blocks(path, _TOTALS_COLUMNS, faults):
            table, group, numbers = domain.counted(rows, faults)
            tables.append(table)
            groups.append(group)
            where.append((faults, numbers))
        all_faults += faults.faults
    all_faults += _repeated_groups(groups, where)
    if len(all_faults) == before and not domain.has_block:
        rule = "has no group of a region with a block of the run: its tables would be of nobody"
        all_faults.append(Fault(TOTALS, None, "", rule, "give the t1 of the same geography"))
    if len(all_faults) > before:
        return None
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _repeated_groups(groups: list[Int64], where: list[tuple[Faults, Int64]]) -> Iterator[Fault]:
    """Faults of groups that are there before, in whichever file."""
    again = repeated(pa.chunked_array([*groups, np.zeros(0, np.int64)]))
    begin = 0
    for group, (faults, numbers) in zip(groups, where, strict=True):
        own = Faults(faults.file)
        mask = again[begin : begin + len(group)]
        own.rows(numbers, (mask, "", "is a group that is there before", "keep one of the rows"))
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
        texts = {
            name: rows.table[name].combine_chunks().dictionary_encode()
            for name in _TOTALS_COLUMNS[:3]
        }
        types, of_type = texts["REGION_TYPE"].dictionary, _indices(texts["REGION_TYPE"])
        listed = _bool(pc.is_in(types, self.all_types))[of_type]
        code = places_of(texts["ITERATION_CODE"], self.codes)
        count, well = _counts(rows.table["COUNT"].combine_chunks())
        kind = places_of(texts["REGION_TYPE"], self.types)
        ids, of_id = texts["REGION_ID"].dictionary, _indices(texts["REGION_ID"])
        numbered = [self._numbered(place, ids) for place in range(len(self.types))]
        # One row more: types that do not run have no regions.
        region = np.stack([*(n for n, _ in numbered), np.full(len(ids), -1)])[kind, of_id]
        bad = np.stack([*(b for _, b in numbered), np.zeros(len(ids), np.bool_)])[kind, of_id]
        faults.rows(
            numbers,
            (
                ~listed,
                "REGION_TYPE",
                "is no region type",
                f"use {', '.join(self.all_types.to_pylist())}",
            ),
            (
                code < 0,
                "ITERATION_CODE",
                "is no iteration of level 1 or 2",
                "give the t1 of the same iterations",
            ),
            (~well, "COUNT", "is not a whole number", "correct it"),
            (bad, "REGION_ID", "is not the id of a region of its type", "correct it"),
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
    well = _bool(pc.match_substring_regex(column, _COUNT))
    digits = pc.if_else(pa.array(well), column, "0")
    return np.asarray(digits.cast(pa.int64()).to_numpy(), np.int64), well


def _indices(column: pa.DictionaryArray) -> Int64:
    return np.asarray(column.indices.to_numpy(), np.int64)


def _index(texts: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray) -> Int64:
    """The place of each text among values, -1 where it is none of them."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return np.asarray(pc.index_in(texts, values).fill_null(-1).to_numpy(), np.int64)


def places_of(column: pa.DictionaryArray, values: pa.StringArray) -> Int64:
    """Return (n,) the place of each row's text among values, -1 where it is none of them."""
    return np.asarray(_index(column.dictionary, values)[_indices(column)])


def _bool(column: pa.ChunkedArray | pa.Array) -> Bool:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)
