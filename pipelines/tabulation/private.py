"""Private files: records become columns of public indices, or dead letters.

**Pieces.**  A file is read in pieces by bytes, and every line is of exactly one, whatever their
size: of the piece in which it begins.  The header is the line that begins the file, and is of the
first piece, which leaves it out.  A line is named by the number of its first byte in the file,
which a worker knows without what comes before its piece.

**Records.**  What becomes of a record is a function of its line and of the public files alone, so
it does not matter which other records there are, in which piece it is read or on which worker.  A
record of a state that does not run is left out, by a public rule and without a word.  A record that
breaks a rule is refused: its position (the number of its first byte in the file) and the first rule
that it breaks go to the dead letter, no value of it.

A record has up to eight race codes and one of ethnicity.  `Null` stands for no code, only behind
the last one; a record without any race code is a fault.

**Dead letters** are for the operator alone.  They are the engine's own: a file named by its
content, below a folder that nobody but its owner can read.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.accounting.tabulation.parameters import AGE_BINS, OLDEST, Parameters
from dpstream.dp_transforms.tabulation.domain import PublicFiles
from dpstream.dp_transforms.tabulation.expand import RACES, Int8, Records
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, split, too_long, with_nul
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.tabulation.config import states_of
from dpstream.pipelines.tabulation.public_files import BLOCK, BLOCK_DIGITS, is_in, searched
from dpstream.pipelines.tabulation.text import (
    field_counts,
    numbers_of,
    parse,
    simple_rows,
    stray_returns,
)
from dpstream.state.disk_errors import file_errors

PIECE_BYTES = 16 << 20
#: Lines of a piece that are worked on together: their columns stay in the processor's cache.
BLOCK_BYTES = 4 << 20


class Piece(NamedTuple):
    """The lines of a file that begin at the bytes ``begin`` to ``end - 1``."""

    path: str
    begin: int
    end: int


class Lines(NamedTuple):
    """Lines of a piece, each with its line feed.

    Attributes:
        lines: (n,) binary; one that is longer than `MAX_LINE_BYTES` may be cut, to no less.
        blank: (n,) which have no character; positions: (n,) the first byte of each in the file.
        returns: whether there is a carriage return anywhere.
    """

    lines: pa.BinaryArray
    blank: Bool
    positions: Int64
    returns: bool


def pieces(path: Path, size: int = PIECE_BYTES) -> list[Piece]:
    """Return a file as pieces of ``size`` bytes, the last one shorter.

    Raises:
        OSError: there is no such file.
    """
    total = os.stat(path).st_size
    return [Piece(str(path), at, min(at + size, total)) for at in range(0, total, size)]


def lines_of(piece: Piece) -> Iterator[Lines]:
    """Yield the lines of a piece, without the header, some megabytes at a time.

    Raises:
        OSError: the file cannot be read.
    """
    data, at = _content(piece)
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + BLOCK_BYTES) + 1 or len(data)
        block = data[begin:end]
        lines, blank = split(block if block.endswith(b"\n") else block + b"\n")
        starts = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines)]
        positions = starts.astype(np.int64) + (at + begin)
        yield Lines(lines, blank, positions, b"\r" in block)
        begin = end


def _content(piece: Piece) -> tuple[bytes, int]:
    """The bytes of a piece's lines, and the place of the first one in the file."""
    with open(piece.path, "rb") as file:
        before = max(0, piece.begin - 1)
        file.seek(before)
        data = file.read(piece.end - before)
        if piece.end - before <= len(data) and not data.endswith(b"\n"):
            # Of a line that is too long only so much that this shows.
            data += file.readline(MAX_LINE_BYTES + 3)
        # What comes first is the end of another piece's line, or the header.
        first = data.find(b"\n") + 1
        return (data[first:], before + first) if first else (b"", before)


RACE_COLUMNS = tuple(f"QRACE{number}" for number in range(1, RACES + 1))
ETHNICITY = "QSPAN"


class Rule(StrEnum):
    """The rule by which a record goes to the dead letter; fixed and public, in order of
    precedence.
    """

    MALFORMED = "malformed"
    LINE_TOO_LONG = "line_too_long"
    FIELD_COUNT = "field_count"
    BLOCK_FORM = "block_form"
    BLOCK_UNKNOWN = "block_unknown"
    AGE = "age"
    SEX = "sex"
    HOUSEHOLDER = "householder"
    RACE_GROUP = "race_group"
    NO_RACE_CODE = "no_race_code"
    RACE_CODE_UNKNOWN = "race_code_unknown"
    RACE_CODE_AFTER_NULL = "race_code_after_null"
    ETHNICITY_CODE_UNKNOWN = "ethnicity_code_unknown"
    HOUSEHOLD_TYPE = "household_type"
    TENURE = "tenure"


class Layout(NamedTuple):
    """A private file.

    Attributes:
        file: the file's name; columns: the header.
        race_group: column of the race group, 01 to 63, which no table uses.
    """

    file: str
    columns: tuple[str, ...]
    race_group: str


LAYOUTS = {
    "p": Layout(
        "person-records.txt",
        ("QAGE", "QSEX", "HOUSEHOLDER", *BLOCK, "CENRACE", *RACE_COLUMNS, ETHNICITY),
        "CENRACE",
    ),
    "h": Layout(
        "household-records.txt",
        (*BLOCK, "HHRACE", *RACE_COLUMNS, ETHNICITY, "HOUSEHOLD_TYPE", "TEN"),
        "HHRACE",
    ),
}


_NULL = "Null"
#: Leaves of T3 and T4 by the texts of household type and tenure; who pays no rent counts as renter.
_TYPES, _TENURES = ("1", "2", "3", "4", "5"), {"1": 0, "2": 1, "3": 2, "4": 2}
_RACE_GROUPS = pa.array([f"{group:02d}" for group in range(1, 64)])


class Lookup(NamedTuple):
    """The tables in which records are looked up: public, and the same on every worker.

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
        """The layout of the private file."""
        return LAYOUTS[self.program]


class Parsed(NamedTuple):
    """The parsed lines.

    Attributes:
        records: those of the run that keep every rule; positions: (n,) of each.
        refused: the others of the run.
    """

    records: Records
    positions: Int64
    refused: Refused


def lookup_of(files: PublicFiles, parameters: Parameters) -> Lookup:
    """Return the look-up of public files; rows of their geography are sorted by block."""
    block, good = numbers_of(files.geography["block"].combine_chunks(), BLOCK_DIGITS)
    if not good.all() or not (np.diff(block) > 0).all():
        raise InvariantError("the reader of the geography sorts it")
    states = np.array(sorted(map(int, states_of(parameters))), np.int64)
    return Lookup(parameters.program, block, states, files.codes)


def read_piece(piece: Piece, lookup: Lookup) -> Iterator[Parsed]:
    """Yield the records of a piece of a private file, in its order.

    Raises:
        OSError: the file cannot be read.
    """
    for lines in lines_of(piece):
        yield parsed(lines, lookup)


def parsed(lines: Lines, lookup: Lookup) -> Parsed:
    """Return the records of some lines."""
    fault, table = _rows(lines, lookup.layout)
    well = np.flatnonzero(fault == _NOTHING)
    columns = _Columns(table, lookup)
    rules = columns.faults()
    fault[well] = rules
    good = rules == _NOTHING
    bad = np.flatnonzero(fault >= 0)
    names = [rule.value for rule in Rule]
    refused = Refused(lines.positions[bad], [names[rule] for rule in fault[bad].tolist()])
    return Parsed(columns.records(good), lines.positions[well[good]], refused)


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
        self._table = {name: table[name].combine_chunks() for name in table.column_names}
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
        at, present = searched(block, self._lookup.blocks)
        self._block = at.astype(np.int32)
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
    ages = {f"{age:0{width}d}": age for age in range(OLDEST + 1) for width in (1, 2, 3)}
    bins = np.searchsorted(np.array(AGE_BINS[23]), list(ages.values()), side="right")
    return pa.array([*ages]), bins.astype(np.int64)


_AGE_TEXTS, _AGE_LEAVES = _ages()


def _index(column: pa.StringArray, values: pa.StringArray) -> Int32:
    """(n,) the place of each text among values, -1 where it is none of them."""
    return np.asarray(pc.index_in(column, values).fill_null(-1).to_numpy(), np.int32)


def dead_letter_folder(out: Path) -> Path:
    """Return the default folder of dead letters: ``dead_letter/`` beside the output."""
    return out.parent / "dead_letter" / out.name


def letters_of(refused: Refused) -> pa.RecordBatch:
    """Return refused positions as the engine's dead letters, of the only file."""
    # Beam comes with it: only where a record was refused.
    from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA

    columns = [
        pa.array(np.zeros(len(refused.offsets), np.int32)),
        pa.array(refused.offsets, pa.int64()),
        pa.array(refused.reasons, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTER_SCHEMA)


def write_letters(folder: Path, refused: Iterable[Refused]) -> int:
    """Write what was refused to a folder, which nobody else can read.

    Returns:
        How many records there are of them; for the operator, as it depends on the data.

    Raises:
        RunError: they cannot be written.
    """
    batches = [letters_of(one) for one in refused if len(one.offsets)]
    if not batches:
        return 0
    from dpstream.pipelines.connectors.write import write_dead_letters

    with file_errors("--dead-letter", "cannot be written"):
        write_dead_letters(folder, batches)
    return sum(batch.num_rows for batch in batches)


def read_records(path: Path, lookup: Lookup, letters: Path | None) -> Iterator[Records]:
    """Yield all records of a file.

    Args:
        letters: folder of refused records; ``None``: they refuse the file.

    Raises:
        PolicyError: a record was refused, and there is no folder for it.
        RunError: the file cannot be read, or a dead letter not written.
    """
    with file_errors(path.name, "cannot be read"):
        every = pieces(path)
    for piece in every:
        yield from read_one(piece, lookup, letters)


def read_one(
    piece: Piece,
    lookup: Lookup,
    letters: Path | None,
    callback: Callable[[int], None] = lambda _: None,
) -> Iterator[Records]:
    """Yield the same of a piece; its dead letters are one file, whoever reads it.

    Args:
        callback: how many there are, for the operator.
    """
    name, refused = Path(piece.path).name, []
    with file_errors(name, "cannot be read"):
        for parsed in read_piece(piece, lookup):
            if letters is None and len(parsed.refused.offsets):
                raise PolicyError(  # it does not say which record, nor which rule
                    name,
                    "has a record that breaks a rule of its format, and --strict refuses these; "
                    "whether there is one depends on the data, so this refusal says something "
                    "about them",
                    "look into the dead letters without --strict, correct the file, and tell "
                    "nobody else",
                )
            refused.append(parsed.refused)
            yield parsed.records
    if letters is not None:
        callback(write_letters(letters, refused))
