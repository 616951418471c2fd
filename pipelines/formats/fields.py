"""Columns of text lines whose fields are already counted: Arrow's reader, and one for each line.

Arrow's reader looks for the end of a field in words of eight bytes, and of a word with a NUL byte
it does not see what follows the NUL.  So a line with a NUL byte is malformed before Arrow sees it.
If Arrow still refuses lines, or gives another number of rows, then each line is read by itself.
"""

import re
from collections.abc import Sequence

import pyarrow as pa
from pyarrow import csv as pacsv

from dpstream.pipelines.formats.lines import BOM, bytes_of

_QUOTED = re.compile(rb'("(?:[^"]|"")*"|[^,\r\n]*)(?:,|\r?\n)')


def columns_of(
    lines: pa.BinaryArray, width: int, places: Sequence[int], delimiter: str, quotes: bool
) -> list[pa.StringArray]:
    """Some fields of lines, as texts that may not be UTF-8 (see `rows.repair_text`).

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
    """`columns_of` of lines that may have other numbers of fields; at least one line.

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
