"""Race and ethnicity: the codes that records have, the iterations that tables count, and the map.

An iteration of race is counted *alone* (all codes of a record are its own) or *in combination* (one
is); one of ethnicity has no such column.  Iterations of level 0 are not counted, but codes may
belong to them.  A code belongs to at most one iteration of a kind at any region: of one level,
alone or not, among those that large regions take (not COARSE_ONLY), and among those that small
regions take (not DETAILED_ONLY).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64
from dpstream.pipelines.tabulation.text import Faults, Rows, read_rows

RACE_ITERATIONS = "race-characteristic-iterations.txt"
ETHNICITY_ITERATIONS = "ethnicity-characteristic-iterations.txt"
CODES = "race-and-ethnicity-codes.txt"
MAP = "race-and-ethnicity-code-to-iteration.txt"
_CODE, _FLAGS = "ITERATION_CODE", ("DETAILED_ONLY", "COARSE_ONLY")
#: Columns of each file.
COLUMNS: dict[str, tuple[str, ...]] = {
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
    """As `dp_transforms.tabulation.domain.PublicFiles` has them: iterations, codes, members."""

    iterations: pa.Table
    codes: pa.StringArray
    members: npt.NDArray[np.int32]


def read_characteristics(folder: Path, faults: dict[str, Faults]) -> Characteristics | None:
    """The four files of a parameter folder.

    Args:
        faults: by file; takes what is wrong.

    Returns:
        ``None`` if there is a fault.
    """
    rows = {name: read_rows(folder / name, COLUMNS[name], faults[name]) for name in COLUMNS}
    for name in (RACE_ITERATIONS, ETHNICITY_ITERATIONS):
        if (listed := rows[name]) is not None:
            _check_iterations(listed, faults[name])
    if (codes := rows[CODES]) is not None:
        _check_codes(codes, faults[CODES])
    race, ethnicity, pairs = rows[RACE_ITERATIONS], rows[ETHNICITY_ITERATIONS], rows[MAP]
    if race is None or ethnicity is None or codes is None or pairs is None:
        return None
    shared = pc.is_in(ethnicity.table[_CODE], race.table[_CODE].combine_chunks())
    faults[ETHNICITY_ITERATIONS].rows(
        _bool(shared),
        ethnicity.numbers,
        _CODE,
        "is an iteration of race too",
        "give iterations of race and ethnicity codes of their own",
    )
    every = _together(race.table, ethnicity.table)
    _check_map(pairs, every, codes, faults[MAP])
    characteristics = _resolved(every, codes.table["RACE_ETH_CODE"], pairs.table)
    _check_kinds(characteristics, pairs, faults[MAP])
    return None if any(faults[name].faults for name in COLUMNS) else characteristics


def _check_iterations(rows: Rows, faults: Faults) -> None:
    """Codes, levels and flags of a list of iterations."""
    table, numbers = rows
    _check_code(table[_CODE], numbers, _CODE, _ITERATION, "four digits", faults)
    levels = _in(table["LEVEL"], ["0", "1", "2"])
    faults.rows(~levels, numbers, "LEVEL", "is not 0, 1 or 2", "correct it")
    if "ALONE" in table.column_names:
        alone = _in(table["ALONE"], ["True", "False"])
        faults.rows(~alone, numbers, "ALONE", "is not True or False", "correct it")
    zero = _in(table["LEVEL"], ["0"])
    flags = {name: _in(table[name], ["True", "False"]) for name in _FLAGS}
    for name, flagged in flags.items():
        null = _in(table[name], [NONE])
        faults.rows(~flagged & ~null, numbers, name, "is not True, False or Null", "correct it")
        unlike = levels & (null != zero) & (flagged | null)
        rule = "is Null where LEVEL is not 0, or is not where it is"
        faults.rows(unlike, numbers, name, rule, "correct one of them")
    both = _in(table["DETAILED_ONLY"], ["True"]) & _in(table["COARSE_ONLY"], ["True"])
    fix = "an iteration is left out of large or of small regions, not of both"
    faults.rows(both, numbers, "COARSE_ONLY", "is True, and DETAILED_ONLY too", fix)


def _check_codes(rows: Rows, faults: Faults) -> None:
    rule = "four digits, the first not 0"
    _check_code(rows.table["RACE_ETH_CODE"], rows.numbers, "RACE_ETH_CODE", _RACE_ETH, rule, faults)
    if not 0 < len(rows.numbers) <= MAX_CODES:
        faults.add("", f"has no code, or more than {MAX_CODES:,}", "correct the list")


def _check_code(
    column: pa.ChunkedArray, numbers: Int64, name: str, pattern: str, words: str, faults: Faults
) -> None:
    """Codes are of their form, each once."""
    bad = ~_bool(pc.match_substring_regex(column, pattern))
    faults.rows(bad, numbers, name, f"is not {words}", "correct it")
    faults.rows(repeated(column), numbers, name, "is there before", "keep one of the rows")


def _check_map(rows: Rows, iterations: pa.Table, codes: Rows, faults: Faults) -> None:
    """Pairs are of codes of the lists, each once; a code may belong to no iteration."""
    table, numbers = rows
    code = codes.table["RACE_ETH_CODE"]
    listed = _bool(pc.is_in(table[_CODE], iterations["CODE"].combine_chunks()))
    faults.rows(~listed, numbers, _CODE, "is no iteration of the two lists", "correct or remove it")
    listed = _bool(pc.is_in(table["RACE_ETH_CODE"], code.combine_chunks()))
    faults.rows(
        ~listed, numbers, "RACE_ETH_CODE", "is not in the list of codes", "correct or remove it"
    )
    pair = pc.binary_join_element_wise(table[_CODE], table["RACE_ETH_CODE"], "|")
    faults.rows(repeated(pair), numbers, "", "is there before", "keep one of the rows")


def _together(race: pa.Table, ethnicity: pa.Table) -> pa.Table:
    """Iterations of both lists, those of race first, of level 0 too."""

    def flag(column: pa.ChunkedArray) -> pa.ChunkedArray:
        flagged = pc.is_in(column, pa.array(["True", "False"]))
        return pc.if_else(flagged, pc.equal(column, "True"), pa.scalar(None, pa.bool_()))

    def typed(table: pa.Table, alone: pa.ChunkedArray, ethnicities: bool) -> pa.Table:
        level = pc.index_in(table["LEVEL"], pa.array(["0", "1", "2"])).cast(pa.int8())
        return pa.table(
            {
                "CODE": table[_CODE],
                "NAME": table["ITERATION_NAME"],
                "LEVEL": level,
                "ALONE": alone,
                "DETAILED_ONLY": flag(table["DETAILED_ONLY"]),
                "COARSE_ONLY": flag(table["COARSE_ONLY"]),
                "ETHNICITY": pa.array(np.full(table.num_rows, ethnicities)),
            }
        )

    none = pa.chunked_array([pa.nulls(ethnicity.num_rows, pa.bool_())])
    of_race = typed(race, flag(race["ALONE"]), ethnicities=False)
    return pa.concat_tables([of_race, typed(ethnicity, none, ethnicities=True)]).combine_chunks()


def _resolved(every: pa.Table, codes: pa.ChunkedArray, pairs: pa.Table) -> Characteristics:
    """What tables count: iterations of levels 1 and 2, sorted codes, and which belong to which."""
    counted = every.filter(pc.greater(every["LEVEL"], 0)).combine_chunks()
    ordered = codes.combine_chunks().take(pc.sort_indices(codes))
    iteration = pc.index_in(pairs[_CODE], counted["CODE"].combine_chunks()).fill_null(-1)
    code = pc.index_in(pairs["RACE_ETH_CODE"], ordered).fill_null(-1)
    members = np.stack([iteration.to_numpy(), code.to_numpy()], axis=1).astype(np.int32)
    members = members[(members >= 0).all(axis=1)]
    return Characteristics(counted, ordered, members[np.lexsort(members.T[::-1])])


def _check_kinds(characteristics: Characteristics, pairs: Rows, faults: Faults) -> None:
    """No code is in two iterations of a kind; names the later rows of the map."""
    counted, table = characteristics.iterations, pairs.table
    at = pc.index_in(table[_CODE], counted["CODE"].combine_chunks()).fill_null(-1).to_numpy()
    code = pc.index_in(table["RACE_ETH_CODE"], characteristics.codes).fill_null(-1).to_numpy()
    usable = (at >= 0) & (code >= 0)
    usable &= ~repeated(pc.binary_join_element_wise(table[_CODE], table["RACE_ETH_CODE"], "|"))
    at, code = at[usable], code[usable].astype(np.int64)
    alone = _bool(counted["ALONE"].fill_null(True))
    kind = (counted["LEVEL"].to_numpy() * 2 + alone) * 2 + _bool(counted["ETHNICITY"])
    for flag, regions in (("COARSE_ONLY", "nation and states"), ("DETAILED_ONLY", "small regions")):
        taken = ~_bool(counted[flag].fill_null(True))[at]
        of_kind = np.where(taken, code * 64 + kind[at], -1 - np.arange(len(at)))
        faults.rows(
            repeated(pa.chunked_array([of_kind])),
            pairs.numbers[usable],
            "",
            f"puts a code into a second iteration of one level and kind, counted for {regions}",
            "leave the code in one of them",
        )


def repeated(column: pa.ChunkedArray) -> Bool:
    """(n,) which values have been there before."""
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.to_numpy()
    first = np.full(len(encoded.dictionary), len(indices), np.int64)
    np.minimum.at(first, indices, np.arange(len(indices)))
    return np.asarray(first[indices] != np.arange(len(indices)))


def _in(column: pa.ChunkedArray, values: list[str]) -> Bool:
    return _bool(pc.is_in(column, pa.array(values)))


def _bool(column: pa.ChunkedArray) -> Bool:
    return np.asarray(column.to_numpy(), np.bool_)
