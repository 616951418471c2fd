"""Public text files: columns separated by ``|`` below a header that is not quoted; and faults.

One line is one row; a quote is a character like any other.  Lines end in a line feed, or in
carriage return and line feed; a carriage return anywhere else is a fault, and so is a NUL byte.  A
byte order mark at the head of the file is none of its header's, as in every file that the engine
reads; anywhere else it is text.  Blank lines are no rows, and are counted in the rows' numbers.

Every fault has its file, row, column, rule and fix.  Public files say nothing of a person, but a
wrong file may have been put in their place: so a fault names rows and columns and never shows a
value.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.lines import (
    BOM,
    MAX_LINE_BYTES,
    BrokenFileError,
    split,
    too_long,
    with_nul,
)
from dpstream.pipelines.formats.texts import arrow_columns, columns_of
from dpstream.state.disk_errors import cause_of

#: Faults of one rule and column of a file that are listed one by one; the rest is counted.
MAX_LISTED = 10_000


class Fault(NamedTuple):
    """One rule that a public file breaks.

    Attributes:
        file: the file's name, without folders.
        row: number of the line in the file, the header's is 1; ``None``: of the whole file.
        column: or field; empty: of the whole row or file.
        rule: what is not as it must be, in words; fix: what to do.
    """

    file: str
    row: int | None
    column: str
    rule: str
    fix: str

    def __str__(self) -> str:
        where = [self.file]
        where += [] if self.row is None else [f"row {self.row}"]
        where += [self.column] if self.column else []
        return f"{', '.join(where)}: {self.rule}. Fix: {self.fix}."


#: A rule of rows: (n,) which ones break it; column, rule and fix, as a `Fault` has them.
Guard = tuple[Bool, str, str, str]


class Faults:
    """Gathers the faults of one file, in the order in which they are found.

    Args:
        file: the file's name, without folders.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults = list[Fault]()

    def add(self, column: str, rule: str, fix: str, row: int | None = None) -> None:
        """Add one fault."""
        self.faults.append(Fault(self.file, row, column, rule, fix))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Take a file that is missing, or cannot be read, for a fault of it."""
        try:
            yield
        except FileNotFoundError:
            self.add("", "is missing", "put it into its folder")
        except OSError as error:
            cause = cause_of(error)
            self.add("", f"cannot be read: {cause.reason}", cause.fix)

    def check(self, *guards: tuple[bool, str, str, str]) -> None:
        """Add a fault for each guard that holds: column, rule and fix."""
        for holds, column, rule, fix in guards:
            if holds:
                self.add(column, rule, fix)

    def rows(self, numbers: Int64, *guards: Guard) -> None:
        """Add a fault of each row that a guard marks.

        Args:
            numbers: (n,) the rows' numbers in the file.
        """
        for bad, column, rule, fix in guards:
            at = numbers[np.flatnonzero(bad)]
            for number in at[:MAX_LISTED].tolist():
                self.add(column, rule, fix, number)
            if len(at) > MAX_LISTED:
                self.add(column, f"{rule} (and {len(at) - MAX_LISTED:,} more rows)", fix)


def refuse(faults: Sequence[Fault]) -> None:
    """Refuse public files that have faults; nothing is charged for them.

    Raises:
        UsageError: there is one; shows the first and how many there are.
    """
    if faults:
        first = faults[0]
        more = f" ({len(faults):,} faults)" if len(faults) > 1 else ""
        where = first.file if first.row is None else f"{first.file} row {first.row}"
        raise UsageError(
            f"{where} {first.column}".strip(),
            f"{first.rule}{more}",
            f"{first.fix}; `dpstream census plan --faults` lists all" if more else first.fix,
        )


def numbers_of(column: pa.StringArray, width: int) -> tuple[Int64, Bool]:
    """Return (n,) the numbers of texts of ``width`` ASCII digits, and (n,) whether each is one.

    Args:
        column: without nulls; width: at most 18.

    Returns:
        ((n,) int64, 0 where a text is of another form; (n,) which texts are of this one).
    """
    good = pc.and_(pc.equal(pc.binary_length(column), width), pc.ascii_is_decimal(column))
    numbers = pc.if_else(good, column, "0").cast(pa.int64()).to_numpy()
    return np.asarray(numbers, np.int64), np.asarray(good.to_numpy(zero_copy_only=False), np.bool_)


SEPARATOR = "|"
#: Text that is parsed at once.
BLOCK_BYTES = 8 << 20


class Rows(NamedTuple):
    """Rows of a file that have as many fields as its header.

    Attributes:
        table: columns of strings, those that were asked for; numbers: (n,) int64, each row's line
            in the file, the header's is 1.
    """

    table: pa.Table
    numbers: Int64


def read_rows(
    path: Path, columns: Sequence[str], faults: Faults, more: bool = False
) -> Rows | None:
    """Return all rows of a public file; see `read_blocks`.

    Returns:
        ``None`` where the file cannot be read or its header is not usable.
    """
    before = len(faults.faults)
    blocks = list(read_blocks(path, columns, faults, more))
    if not blocks and len(faults.faults) > before:
        return None
    empty = pa.table({column: pa.array([], pa.string()) for column in columns})
    tables = [block.table for block in blocks] or [empty]
    numbers = [block.numbers for block in blocks] or [np.zeros(0, np.int64)]
    return Rows(pa.concat_tables(tables).combine_chunks(), np.concatenate(numbers))


def read_blocks(
    path: Path, columns: Sequence[str], faults: Faults, more: bool = False
) -> Iterator[Rows]:
    """Yield the rows of a public file, some megabytes at a time.

    Args:
        columns: the columns that the header must have, in this order.
        faults: takes what is wrong: the file, its header, its lines.
        more: whether further columns are allowed, anywhere; they are ignored.
    """
    with faults.reading(), open(path, "rb") as file:
        names = usable_header(first_line(file), columns, faults, more)
        if names is None:
            return
        row = 2
        try:
            for block in _blocks_of_lines(file):
                rows, many = _rows(block, row, names, columns, faults)
                row += many
                yield rows
        except BrokenFileError:
            most = f"{limits.MAX_UNBROKEN_BYTES:,} bytes"
            faults.add("", f"has no line break in {most}", "write each row into a line of its own")


def first_line(file: BinaryIO) -> bytes:
    """Return the first line of a file without byte order mark and line feed.

    A line that is longer than any may be comes out cut.
    """
    return file.readline(MAX_LINE_BYTES + 1).removesuffix(b"\n").removeprefix(BOM)


def _blocks_of_lines(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file in blocks that end with a line; the last one gets its line feed.

    A line that is longer than any may be comes out cut.

    Raises:
        BrokenFileError: a line is longer than `limits.MAX_UNBROKEN_BYTES`.
    """
    unbroken, carry = 0, b""
    while data := file.read(BLOCK_BYTES):
        unbroken += len(data)
        body, feed, carry = (carry[: MAX_LINE_BYTES + 2] + data).rpartition(b"\n")
        unbroken = len(carry) if feed else unbroken
        if unbroken > limits.MAX_UNBROKEN_BYTES:
            raise BrokenFileError
        if feed:
            yield body + feed
    if carry:
        yield carry if carry.endswith(b"\n") else carry + b"\n"


def _rows(
    block: bytes, row: int, names: list[str], columns: Sequence[str], faults: Faults
) -> tuple[Rows, int]:
    """The rows of a block whose first line has a number, and how many lines it has."""
    lines, blank = split(block)
    numbers = np.arange(len(lines), dtype=np.int64) + row
    simple = b"\r" not in block and is_utf8(lines)
    table = simple_rows(lines, blank, names, columns) if simple else None
    if table is not None:
        return Rows(table, numbers), len(lines)
    good = ~blank
    for bad, rule, fix in line_faults(lines, len(names)):
        faults.rows(numbers, (bad & ~blank, "", rule, fix))
        good &= ~bad
    good_lines = lines if good.all() else lines.filter(pa.array(good))
    return Rows(parse(good_lines, names, columns), numbers[good]), len(lines)


def simple_rows(
    lines: pa.BinaryArray, blank: Bool, names: Sequence[str], columns: Sequence[str]
) -> pa.Table | None:
    """Return the columns of lines without carriage returns, if nothing is wrong with any of them.

    Returns:
        ``None`` if one is blank, too long, has a NUL byte or another number of fields.
    """
    if len(lines) == 0 or blank.any() or too_long(lines).any() or with_nul(lines).any():
        return None
    places = [list(names).index(column) for column in columns]
    arrays = arrow_columns(lines, len(names), places, SEPARATOR, quotes=False)
    return None if arrays is None else pa.table(arrays, list(columns))


def usable_header(
    line: bytes, columns: Sequence[str], faults: Faults, more: bool = False
) -> list[str] | None:
    """Return the names of a header that has the columns, in their order; the others are never
    shown.
    """
    expected = f"begin the file with {SEPARATOR.join(columns)}"
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text:
        faults.add("", "has no header in UTF-8", expected, 1)
        return None
    names, before = text.split(SEPARATOR), len(faults.faults)
    for column in columns:
        if names.count(column) != 1:
            rule = "is missing" if column not in names else "is there more than once"
            faults.add(column, f"{rule} in the header", expected, 1)
    extra = [number for number, name in enumerate(names, 1) if name not in columns]
    if extra and not more:
        places = ", ".join(map(str, extra[:20]))
        faults.add("", f"has columns that are not its own (number {places})", expected, 1)
    if len(faults.faults) == before and [name for name in names if name in columns] != [*columns]:
        faults.add("", "has its columns in another order", expected, 1)
    return names if len(faults.faults) == before else None


def line_faults(lines: pa.BinaryArray, width: int) -> Iterator[tuple[Bool, str, str]]:
    """Yield (which lines, rule, fix) for each thing that can be wrong with a line; no line has
    two.
    """
    foreign = (
        np.zeros(len(lines), np.bool_)
        if is_utf8(lines)
        else np.array([not _decodes(line.as_py()) for line in lines], np.bool_)
    )
    miscounted = field_counts(lines) != width
    good = np.ones(len(lines), np.bool_)
    for bad, rule, fix in (
        (too_long(lines), f"is longer than {MAX_LINE_BYTES:,} bytes", "shorten the line"),
        (stray_returns(lines), "has a carriage return inside", "end lines in a line feed"),
        (with_nul(lines), "has a NUL byte", "remove it"),
        (miscounted, f"does not have {width} fields, as the header has", "correct the line"),
        (foreign, "is not UTF-8", "write the file in UTF-8"),
    ):
        yield bad & good, rule, fix
        good &= ~bad


def field_counts(lines: pa.BinaryArray) -> Int64:
    """Return (n,) the number of fields of each line."""
    return np.asarray(pc.count_substring(lines, SEPARATOR).to_numpy() + 1, np.int64)


def stray_returns(lines: pa.BinaryArray) -> Bool:
    """Return (n,) whether each line has a carriage return other than that before its line feed."""
    returns = pc.count_substring(lines, "\r").to_numpy()
    if not returns.any():
        return np.zeros(len(lines), np.bool_)
    return np.asarray(returns != pc.ends_with(lines, "\r\n").to_numpy(zero_copy_only=False))


def is_utf8(lines: pa.BinaryArray) -> bool:
    """Return whether all lines are, each of them."""
    try:
        lines.view(pa.string()).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def parse(lines: pa.BinaryArray, names: Sequence[str], columns: Sequence[str]) -> pa.Table:
    """Return the columns of lines that have as many fields as ``names``.

    They have no NUL byte, and at most a carriage return at their end.

    Args:
        lines: without a gap between two of them, each with its line feed.
        names: of all fields, those of ``columns`` once each; others may repeat.
    """
    places = [list(names).index(column) for column in columns]
    return pa.table(columns_of(lines, len(names), places, SEPARATOR, quotes=False), list(columns))
