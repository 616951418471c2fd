"""``GRF-C.txt``: which regions every block lies in.

Six columns are used; the file may have others.  Only blocks of the states of the run count.  A
block that is there twice is refused: a join with it would count a person twice.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64
from dpstream.pipelines.tabulation.config import PUERTO_RICO
from dpstream.pipelines.tabulation.text import Faults, Rows, numbers_of, read_blocks

GEOGRAPHY = "GRF-C.txt"
#: Columns that name a block, and their digits; those of data files are the same.
BLOCK = {"TABBLKST": 2, "TABBLKCOU": 3, "TABTRACTCE": 6, "TABBLK": 4}
_PLACE, _AREA = {"PLACEFP": 5}, {"AIANNHCE": 4}
COLUMNS = {**BLOCK, **_PLACE, **_AREA}
NO_PLACE, NO_AREA = 99_999, 9_999
BLOCK_DIGITS = sum(BLOCK.values())


def read_geography(path: Path, states: tuple[str, ...], faults: Faults) -> pa.Table | None:
    """The blocks of the states of a run, sorted.

    Args:
        states: FIPS codes.

    Returns:
        Columns as `dp_transforms.tabulation.domain.PublicFiles` has them; ``None`` if there is a
        fault.
    """
    before = len(faults.faults)
    within = np.array(sorted(map(int, states)), np.int64)
    parts = [_part(rows, within, faults) for rows in read_blocks(path, [*COLUMNS], faults, True)]
    if not parts:
        if len(faults.faults) == before:
            faults.add("", "has no rows", "give the blocks of every state that runs")
        return None
    block, place, area, numbers = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(block, kind="stable")
    block, place, area, numbers = block[order], place[order], area[order], numbers[order]
    again = np.append(False, block[1:] == block[:-1])
    rule = "is a block that is there before: its records would count twice"
    faults.rows(again, numbers, "TABBLKST .. TABBLK", rule, "keep one of the rows")
    if not is_in(within, np.unique(block // 10 ** (BLOCK_DIGITS - 2))).all():
        fix = "give the blocks of every state that runs, or run without it"
        faults.add("TABBLKST", "has no block of a state of the run", fix)
    return None if len(faults.faults) > before else _table(block, place, area)


def _part(rows: Rows, within: Int64, faults: Faults) -> tuple[Int64, Int64, Int64, Int64]:
    """Block, place and area of well-formed rows of the run, and their lines in the file.

    Faults of rows of other states are faults as well.
    """
    columns, good = dict[str, Int64](), np.ones(len(rows.numbers), np.bool_)
    for name, width in COLUMNS.items():
        column = rows.table[name].combine_chunks()
        columns[name], well = numbers_of(column, width)
        faults.rows(~well, rows.numbers, name, f"is not {width} digits", "correct it")
        good &= well
    inside = good & is_in(columns["TABBLKST"], within)
    block = np.zeros(len(good), np.int64)
    for name, width in BLOCK.items():
        block = block * 10**width + columns[name]
    place, area = columns["PLACEFP"], columns["AIANNHCE"]
    return block[inside], place[inside], area[inside], rows.numbers[inside]


def is_in(values: Int64, ordered: Int64) -> Bool:
    """Which values are among sorted ones."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[at] == values)


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
    """Numbers as texts of ``width`` digits."""
    out = np.empty((len(numbers), width), np.uint8)
    left = numbers.copy()
    for place in range(width - 1, -1, -1):
        left, digit = np.divmod(left, 10)
        out[:, place] = digit + ord("0")
    offsets = np.arange(len(numbers) + 1, dtype=np.int64) * width
    kind = pa.string() if offsets[-1] < 1 << 31 else pa.large_string()
    ends = offsets.astype(np.int32) if kind == pa.string() else offsets
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(out)]
    return pa.Array.from_buffers(kind, len(numbers), buffers)
