"""Text files, CSV and JSON Lines: one line is one row, independent of all other lines.

Every column comes out as string: of CSV the text as it stands, UTF-8 or null; empty and unquoted is
null.  A line break inside quotes is not supported: such a line is malformed, so that a stray
quote cannot swallow other users' lines; so is a line with a NUL byte.  A byte order mark at the
head of the file is none of its header's; anywhere else it is text like any other, whichever line of
whatever block it begins.

**Two readers** make columns of lines whose fields are already counted: Arrow's, and one for each
line.  Arrow's reader looks for the end of a field in words of eight bytes, and of a word with a NUL
byte it does not see what follows the NUL.  So a line with a NUL byte is malformed before Arrow sees
it.  If Arrow still refuses lines, or gives another number of rows, then each line is read by
itself.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pacsv

from dpstream.accounting.arrays import Bool
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.lines import (
    BOM,
    MAX_LINE_BYTES,
    BrokenFileError,
    Lines,
    bytes_of,
    line_blocks,
    lines_of,
    read_jsonl,
    too_long,
    with_nul,
)
from dpstream.pipelines.formats.rows import Part, Reason, after, refuse, repair_text

_QUOTED = re.compile(rb'("(?:[^"]|"")*"|[^,\r\n]*)(?:,|\r?\n)')


def columns_of(
    lines: pa.BinaryArray, width: int, places: Sequence[int], delimiter: str, quotes: bool
) -> list[pa.StringArray]:
    """Return some fields of lines, as texts that may not be UTF-8 (see `rows.repair_text`).

    Args:
        lines: (n,) without a gap between two of them.  Each has ``width`` fields, no NUL byte, and
            a line end at its end only.
        places: the numbers of the fields.
        delimiter: between two fields, one ASCII character.
        quotes: whether a field may be quoted, as RFC 4180 says; an empty field without quotes is
            then null.
    """
    if len(lines) == 0:
        return [pa.array([], pa.string()) for _ in places]
    arrays = arrow_columns(lines, width, places, delimiter, quotes)
    return _one_by_one(lines, places, delimiter, quotes) if arrays is None else arrays


def arrow_columns(
    lines: pa.BinaryArray, width: int, places: Sequence[int], delimiter: str, quotes: bool
) -> list[pa.StringArray] | None:
    """Return `columns_of` of lines that may have other numbers of fields; at least one line.

    Returns:
        ``None`` if Arrow does not read each line as one row of ``width`` fields.
    """
    data = pa.py_buffer(bytes_of(lines)[0])
    if data[:3].to_pybytes() == BOM:
        data = pa.py_buffer(BOM + data.to_pybytes())  # Arrow drops one; it is part of the row
    names = [str(number) for number in range(width)]
    needed = [names[place] for place in places]
    try:
        table = pacsv.read_csv(
            pa.BufferReader(data),
            pacsv.ReadOptions(use_threads=False, block_size=data.size + 1, column_names=names),
            pacsv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if quotes else False,
                newlines_in_values=False,
                ignore_empty_lines=False,
            ),
            pacsv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(needed, pa.string()),
                include_columns=needed,
                null_values=[""],
                strings_can_be_null=quotes,
                quoted_strings_can_be_null=False,
            ),
        ).combine_chunks()
    except pa.ArrowInvalid:  # its text shows a line
        return None
    if table.num_rows != len(lines):
        return None
    return [table.column(number).chunk(0) for number in range(len(needed))]


def _one_by_one(
    lines: pa.BinaryArray, places: Sequence[int], delimiter: str, quotes: bool
) -> list[pa.StringArray]:
    """The same of each line, by its definition."""
    rows = []
    for line in lines.to_pylist():
        if quotes:
            rows.append([_value(field) for field in _QUOTED.findall(line)])
        else:
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            rows.append(text.split(delimiter.encode("ascii")))
    columns = ([row[place] for row in rows] for place in places)
    return [pa.array(column, pa.binary()).view(pa.string()) for column in columns]


def _value(field: bytes) -> bytes | None:
    """What a field of CSV means."""
    if field.startswith(b'"'):
        return field[1:-1].replace(b'""', b'"')
    return field or None


#: What to do about a file whose fields are separated by other characters.
ANEW = "write it anew, in DuckDB: COPY (FROM read_csv('FILE', all_varchar = true)) TO 'data.csv'"
_FIELD = r'(?:"(?:[^"\r\n]|"")*"|[^",\r\n]*)'
_WELL_FORMED = rf"^{_FIELD}(?:,{_FIELD})*\r?\n$"


def csv_header(stream: BinaryIO) -> list[str] | None:
    """Return the column names of a CSV file's first line; ``None`` if it has no readable one."""
    line = stream.read(MAX_LINE_BYTES + 1).partition(b"\n")[0].removeprefix(BOM)
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
        return next(csv.reader([text], strict=True), []) or None if text else None
    except (UnicodeDecodeError, csv.Error):
        return None


def csv_positions(header: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the position of each needed column in the header.

    Raises:
        UsageError: a column is missing or there twice.  The other names of the header are
            not shown: in a file without a header they would be data.
    """
    for column in columns:
        if len(header) == 1 and header[0] != column and re.search(r"[;\t|]", header[0]):
            raise UsageError(
                "table.path",
                "the header of a CSV file has no comma, and fields are separated by commas",
                ANEW,
            )
        if header.count(column) != 1:
            present = [c for c in columns if header.count(c) == 1]
            raise UsageError(
                f"column '{column}'",
                f"is not, or not just once, in the header of a CSV file of {len(header)} columns "
                f"(found: {', '.join(present) or 'none of those the job names'})",
                "correct the job, its table or the file's first line",
            )
    return [header.index(column) for column in columns]


def read_csv(stream: BinaryIO, columns: Sequence[str]) -> Iterator[Part]:
    """Yield the rows and refused positions of a CSV file, in blocks, every column as string.

    Raises:
        UsageError: a needed column is not in the header.
    """
    header = csv_header(stream)
    if header is None:
        yield refuse(0, Reason.UNREADABLE_FILE)
        return
    where = csv_positions(header, columns)
    stream.seek(0)
    for row, lines in line_blocks(stream, header=True):
        yield from csv_lines(lines, len(header), where, columns).parts(row)


def csv_lines(
    lines: pa.BinaryArray, width: int, where: Sequence[int], columns: Sequence[str]
) -> Lines:
    """Decode each line of a file with ``width`` columns on its own.

    Args:
        lines: (n,) without a gap between two of them, each with its line feed, none blank.
        where: the needed columns' places; ``columns``: their names.
    """
    arrays = _together(lines, width, where)
    if arrays is not None:
        good = np.ones(len(lines), np.bool_)
        return lines_of(good, ~good, ~good, _batch_of(arrays, columns))
    malformed, miscounted = _faults(lines, width)
    longer = too_long(lines)
    good = ~(malformed | miscounted | longer)
    rows = lines if good.all() else lines.filter(pa.array(good))
    batch = None
    if len(rows):
        batch = _batch_of(columns_of(rows, width, where, ",", quotes=True), columns)
    return lines_of(good, malformed, longer, batch)


def _batch_of(arrays: Sequence[pa.StringArray], columns: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(map(repair_text, arrays)), list(columns))


def _together(
    lines: pa.BinaryArray, width: int, where: Sequence[int]
) -> list[pa.StringArray] | None:
    """The needed columns, if a few looks at all lines together show that each is a row.

    Arrow refuses lines of another number of fields; what else is wrong with a line it may read in
    its own way, so that is looked for first.
    """
    if len(lines) == 0:
        return None
    code, ends = bytes_of(lines)
    if too_long(lines).any() or not code.all():
        return None
    returns = np.count_nonzero(code == 13)
    if returns and returns != np.count_nonzero(code[ends[1:] - 2] == 13):
        return None
    if (code == 34).any() and not pc.all(pc.match_substring_regex(lines, _WELL_FORMED)).as_py():
        return None
    return arrow_columns(lines, width, where, ",", quotes=True)


def _faults(lines: pa.BinaryArray, width: int) -> tuple[Bool, Bool]:
    """Which lines are malformed, and which others have another number of fields."""
    returns = pc.count_substring(lines, "\r").to_numpy()
    malformed = returns != 0
    if malformed.any():
        malformed = returns != pc.match_substring_regex(lines, r"\r\n$").to_numpy(False)
    malformed = malformed | with_nul(lines)
    fields = pc.count_substring(lines, ",").to_numpy() + 1
    quoted = np.flatnonzero(pc.match_substring(lines, '"').to_numpy(False))
    if len(quoted):
        quoted_lines = lines.take(pa.array(quoted))
        malformed = malformed.copy()
        malformed[quoted] |= ~pc.match_substring_regex(quoted_lines, _WELL_FORMED).to_numpy(False)
        bare = pc.replace_substring_regex(quoted_lines, r'"(?:[^"]|"")*"', "")
        fields = fields.copy()
        fields[quoted] = pc.count_substring(bare, ",").to_numpy() + 1
    return malformed, ~malformed & (fields != width)


def read_text(
    kind: str, stream: BinaryIO, columns: Sequence[str], nested: bool = False
) -> Iterator[Part]:
    """Yield the rows and refused positions of a text file, in blocks, every column as string.

    A compressed file that breaks off gives one refused position for its rest, as a row group of
    Parquet does: the blocks before it are read, always the same ones.

    Args:
        kind: ``csv`` or ``jsonl``.
        stream: the text (see `compression.plain`), at its beginning.
        columns: the columns that are needed.
        nested: whether an array or object of JSON is its text; see `lines.Objects`.

    Raises:
        UsageError: a needed column is not in a CSV header.
        OSError: the operating system cannot read the file.
    """
    end = 0
    csv_file = kind == "csv"
    parts = read_csv(stream, columns) if csv_file else read_jsonl(stream, columns, nested)
    try:
        for part in parts:
            end = max(end, after(part))
            yield part
    except BrokenFileError:
        yield refuse(end, Reason.UNREADABLE_REST if end else Reason.UNREADABLE_FILE)
