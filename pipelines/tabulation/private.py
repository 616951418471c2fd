"""Private files: records become columns of public indices, or dead letters.

What becomes of a record is a function of its line and of the public files alone, so it does not
matter which other records there are, in which piece it is read or on which worker.  A record of a
state that does not run is left out, by a public rule and without a word.  A record that breaks a
rule is refused: its position (the number of its first byte in the file) and the first rule that it
breaks go to the dead letter, no value of it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.accounting.tabulation.parameters import AGE_BINS, OLDEST, Parameters
from dpstream.dp_transforms.tabulation.domain import PublicFiles
from dpstream.dp_transforms.tabulation.records import Int8, Records
from dpstream.pipelines.formats.lines import too_long, with_nul
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.tabulation.config import states_of
from dpstream.pipelines.tabulation.digits import numbers_of
from dpstream.pipelines.tabulation.geography import BLOCK, BLOCK_DIGITS, is_in
from dpstream.pipelines.tabulation.layouts import ETHNICITY, LAYOUTS, RACE_COLUMNS, Layout, Rule
from dpstream.pipelines.tabulation.pieces import Lines, Piece, lines_of
from dpstream.pipelines.tabulation.text import field_counts, parse, simple_rows, stray_returns

_NULL = "Null"
#: Leaves of T3 and T4 by the texts of household type and tenure; who pays no rent counts as renter.
_TYPES, _TENURES = ("1", "2", "3", "4", "5"), {"1": 0, "2": 1, "3": 2, "4": 2}
_RACE_GROUPS = pa.array([f"{group:02d}" for group in range(1, 64)])


class Lookup(NamedTuple):
    """What records are looked up in: public, and the same on every worker.

    Attributes:
        program: ``p`` or ``h``; blocks: sorted numbers of the blocks of the run; states: the same
            of its states; codes: race and ethnicity codes.
    """

    program: str
    blocks: Int64
    states: Int64
    codes: pa.StringArray

    @property
    def layout(self) -> Layout:
        """Of the private file."""
        return LAYOUTS[self.program]


class Parsed(NamedTuple):
    """What lines have become.

    Attributes:
        records: those of the run that keep every rule; positions: (n,) of each.
        refused: the others of the run.
    """

    records: Records
    positions: Int64
    refused: Refused


def lookup_of(files: PublicFiles, parameters: Parameters) -> Lookup:
    """The look-up of public files; rows of their geography are sorted by block."""
    block, good = numbers_of(files.geography["block"].combine_chunks(), BLOCK_DIGITS)
    if not good.all() or not (np.diff(block) > 0).all():
        raise InvariantError("the reader of the geography sorts it")
    states = np.array(sorted(map(int, states_of(parameters))), np.int64)
    return Lookup(parameters.program, block, states, files.codes)


def read_piece(piece: Piece, lookup: Lookup) -> Iterator[Parsed]:
    """The records of a piece of a private file, in its order.

    Raises:
        OSError: the file cannot be read.
    """
    for lines in lines_of(piece):
        yield parsed(lines, lookup)


def parsed(lines: Lines, lookup: Lookup) -> Parsed:
    """The records of some lines."""
    layout = lookup.layout
    fault, table = _rows(lines, layout)
    well = np.flatnonzero(fault == _NOTHING)
    columns = _Columns(table, lookup)
    rules = columns.faults()
    fault[well] = rules
    good = rules == _NOTHING
    bad = np.flatnonzero(fault >= 0)
    names = [rule.value for rule in Rule]
    refused = Refused(lines.positions[bad], [names[rule] for rule in fault[bad].tolist()])
    return Parsed(columns.records(good), lines.positions[well[good]], refused)


def strict_refusal(file: str) -> PolicyError:
    """What is raised with ``--strict`` where a record breaks a rule; says nothing of which."""
    return PolicyError(
        file,
        "has a record that breaks a rule of its format, and --strict refuses these; whether there "
        "is one depends on the data, so this refusal says something about them",
        "look into the dead letters without --strict, correct the file, and tell nobody else",
    )


#: What a line is before its rules are known: nothing is wrong, or it is none of the run's.
_NOTHING, _SKIPPED = -1, -2
_ORDER = {rule: number for number, rule in enumerate(Rule)}


def _rows(lines: Lines, layout: Layout) -> tuple[Int8, pa.Table]:
    """(n,) the fault of each line as a line, and the columns of those without one."""
    fault = np.full(len(lines.lines), _NOTHING, np.int8)
    columns = layout.columns
    table = None if lines.returns else simple_rows(lines.lines, lines.blank, columns, columns)
    if table is not None:
        return fault, table
    of_line = (
        (field_counts(lines.lines) != len(columns), Rule.FIELD_COUNT),
        (too_long(lines.lines), Rule.LINE_TOO_LONG),
        (stray_returns(lines.lines) | with_nul(lines.lines), Rule.MALFORMED),
    )
    for bad, rule in of_line:
        fault[bad] = _ORDER[rule]
    fault[lines.blank] = _SKIPPED
    good_lines = lines.lines.filter(pa.array(fault == _NOTHING))
    return fault, parse(good_lines, columns, columns)


class _Columns:
    """Columns of well-formed lines, looked up."""

    def __init__(self, table: pa.Table, lookup: Lookup) -> None:
        self._lookup, self._rows = lookup, table.num_rows
        self._table = {name: _array(table[name]) for name in table.column_names}
        self._leaf = dict[str, Int8]()
        self._codes = np.full((table.num_rows, len(RACE_COLUMNS) + 1), -1, np.int16)
        self._block = np.zeros(table.num_rows, np.int32)

    def records(self, mask: Bool) -> Records:
        """The records of some rows without fault."""
        if mask.all():
            return Records(self._block, self._codes, self._leaf)
        leaf = {name: values[mask] for name, values in self._leaf.items()}
        return Records(self._block[mask], self._codes[mask], leaf)

    def faults(self) -> Int8:
        """(n,) the first rule that each row breaks, or that it is none of the run's."""
        fault_codes = np.full(self._rows, _NOTHING, np.int8)
        bad = self._races()
        bad |= self._persons() if self._lookup.program == "p" else self._households()
        group = _index(self._table[self._lookup.layout.race_group], _RACE_GROUPS)
        bad[Rule.RACE_GROUP] = group < 0
        bad[Rule.BLOCK_FORM], bad[Rule.BLOCK_UNKNOWN], outside = self._blocks()
        for rule in reversed(Rule):
            if rule in bad:
                fault_codes[bad[rule]] = _ORDER[rule]
        fault_codes[outside] = _SKIPPED
        return fault_codes

    def _blocks(self) -> tuple[Bool, Bool, Bool]:
        """Rows whose block is of no such form, is unknown, or lies in another state."""
        block, good = np.zeros(self._rows, np.int64), np.ones(self._rows, np.bool_)
        outside = good
        for name, width in BLOCK.items():
            part, well = numbers_of(self._table[name], width)
            if name == "TABBLKST":
                outside = well & ~is_in(part, self._lookup.states)
            good &= well
            block = block * 10**width + part
        at, present = _search(block, self._lookup.blocks)
        self._block = at
        return ~good, ~present, outside

    def _races(self) -> dict[Rule, Bool]:
        """Codes of race and ethnicity; `Null` is no code, and has none behind it."""
        values = pa.concat_arrays([self._lookup.codes, pa.array([_NULL])])
        null = len(values) - 1
        unknown, after = np.zeros(self._rows, np.bool_), np.zeros(self._rows, np.bool_)
        ended = np.zeros(self._rows, np.bool_)
        for place, name in enumerate(RACE_COLUMNS):
            code = _index(self._table[name], values)
            none = code == null
            unknown |= code < 0
            after |= ended & ~none
            ended = none
            self._codes[:, place] = np.where(none, -1, code)
            if place == 0:
                lacking = none
        ethnicity = _index(self._table[ETHNICITY], self._lookup.codes)
        self._codes[:, -1] = ethnicity
        return {
            Rule.NO_RACE_CODE: lacking,
            Rule.RACE_CODE_UNKNOWN: unknown,
            Rule.RACE_CODE_AFTER_NULL: after,
            Rule.ETHNICITY_CODE_UNKNOWN: ethnicity < 0,
        }

    def _persons(self) -> dict[Rule, Bool]:
        """The leaf of persons, age by sex; no table counts householders."""
        age = _index(self._table["QAGE"], _AGE_TEXTS)
        sex = _index(self._table["QSEX"], pa.array(["1", "2"]))
        householder = _index(self._table["HOUSEHOLDER"], pa.array(["True", "False"]))
        bins = len(AGE_BINS[23]) + 1
        self._leaf["t1t2"] = (_AGE_LEAVES[age] + bins * sex).astype(np.int8)
        return {Rule.AGE: age < 0, Rule.SEX: sex < 0, Rule.HOUSEHOLDER: householder < 0}

    def _households(self) -> dict[Rule, Bool]:
        """Leaves of T3 and T4."""
        kind = _index(self._table["HOUSEHOLD_TYPE"], pa.array(_TYPES))
        tenure = _index(self._table["TEN"], pa.array([*_TENURES]))
        self._leaf["t3"] = kind.astype(np.int8)
        self._leaf["t4"] = np.array([*_TENURES.values()], np.int8)[tenure]
        return {Rule.HOUSEHOLD_TYPE: kind < 0, Rule.TENURE: tenure < 0}


def _ages() -> tuple[pa.StringArray, Int64]:
    """Every text of an age, zero-padded or not, and its bin of 23."""
    of = {f"{age:0{width}d}": age for age in range(OLDEST + 1) for width in (1, 2, 3)}
    bins = np.searchsorted(np.array(AGE_BINS[23]), list(of.values()), side="right")
    return pa.array([*of]), bins.astype(np.int64)


_AGE_TEXTS, _AGE_LEAVES = _ages()


def _index(column: pa.StringArray, values: pa.StringArray) -> Int32:
    """(n,) the place of each text among values, -1 where it is none of them."""
    return np.asarray(pc.index_in(column, values).fill_null(-1).to_numpy(), np.int32)


def _search(values: Int64, ordered: Int64) -> tuple[Int32, Bool]:
    """(n,) the place of each value among sorted ones, and which are there."""
    at = np.searchsorted(ordered, values)
    at = np.minimum(at, max(len(ordered) - 1, 0))
    present = ordered[at] == values if len(ordered) else np.zeros(len(values), np.bool_)
    return at.astype(np.int32), np.asarray(present)


def _array(column: pa.ChunkedArray) -> pa.StringArray:
    return column.combine_chunks()
