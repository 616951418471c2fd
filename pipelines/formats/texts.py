"""Text files, CSV and JSON Lines, in bounded memory: one line is one row, whatever the others are.

**Lines** come in blocks of a fixed size, and one line is one row.  Rows are the non-blank lines,
numbered from 0 (a CSV header is not a row).  No setting changes the size of a block, and nothing
that is decided about a line depends on the block it is in.

**JSON**: one text (a line of a file, or a message) is one object, and none changes another.  Every
column comes out as string: JSON strings as they are, numbers and booleans as their shortest JSON
text, so that the next stage reads all text sources alike.  A text is decoded by itself, or by the
same decoder with its neighbours where each is one object (see `Objects.decode_together`); a parser
that infers types from a block would let one number where others have strings decide about its
neighbours.

A byte order mark before a text is dropped: of any text, so that it does not matter which one a
file begins with.

**CSV**: every column comes out as string: the text as it stands, UTF-8 or null; empty and unquoted
is null.  A line break inside quotes makes a line malformed, so that a stray quote cannot swallow
other users' lines, unless the table declares such breaks; so does a NUL byte.  A byte order mark at
the head of the file is none of its header's; anywhere else it is text like any other, whichever
line of whatever block it begins.

**Two readers** make columns of lines whose fields are already counted: Arrow's, and one for each
line.  Arrow's reader looks for the end of a field in words of eight bytes, and of a word with a NUL
byte it does not see what follows the NUL.  So a line with a NUL byte is malformed before Arrow sees
it.  If Arrow still refuses lines, or gives another number of rows, then each line is read by
itself.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from csv import Error as CsvError
from csv import reader
from operator import attrgetter, methodcaller
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pacsv

from dpstream.accounting.arrays import Bool, Int32, UInt8
from dpstream.accounting.errors import UsageError, column_list
from dpstream.pipelines.formats.dialect import Joined, broken, recoded
from dpstream.pipelines.formats.lines import (
    BOM,
    MAX_LINE_BYTES,
    BrokenFileError,
    Lines,
    NoLineBreakError,
    bytes_of,
    line_blocks,
    lines_of,
    too_long,
    with_nul,
)
from dpstream.pipelines.formats.rows import Part, Reason, after, refuse, repair_text
from dpstream.pipelines.project.sections import CsvSection

#: CSV as RFC 4180 has it.
COMMAS = CsvSection()


#: Deepest nesting of a text (the decoder's own limit depends on the caller's stack).
MAX_DEPTH = 200
#: Lines that are decoded together; a malformed one costs its neighbours the time of being decoded
#: one by one.
_LINES = 1 << 12
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_Decoder = msgspec.json.Decoder[Any]
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def read_jsonl(stream: BinaryIO, columns: Sequence[str], nested: bool = False) -> Iterator[Part]:
    """Yield the rows and refused positions of a JSON Lines file, in blocks, every column as
    string.
    """
    objects = Objects(columns, nested)
    for row, lines in line_blocks(stream):
        yield from json_lines(lines, objects, columns).parts(row)


def json_lines(lines: pa.BinaryArray, objects: "Objects", columns: Sequence[str]) -> Lines:
    """Decode each line on its own; ``objects`` decodes ``columns``.

    Args:
        lines: (n,) without a gap between two of them, each with its line feed.
    """
    good, batches = np.ones(len(lines), np.bool_), list[pa.RecordBatch]()
    for begin in range(0, len(lines), _LINES):
        chunk = lines.slice(begin, _LINES)
        values = objects.decode_together(chunk)
        if values is None:
            values = objects.decode(chunk.to_pylist(), MAX_LINE_BYTES + 1)
            good[begin : begin + len(chunk)] = [value is not None for value in values]
            values = [value for value in values if value is not None]
        if values:
            arrays = objects.arrays(values)
            batches.append(pa.RecordBatch.from_arrays(arrays, list(columns)))
    batch = pa.concat_batches(batches) if batches else None
    return lines_of(good, ~good, too_long(lines), batch)


class Objects:
    """Decodes texts of one JSON object each; every column comes out as string.

    An absent field is null; of a repeated field the last one counts.  A column ``a.b`` is the field
    of that name, or where that is null the field ``b`` of an object in ``a``.

    Args:
        nested: whether a needed field that is an array or an object is its JSON text; else it makes
            the text malformed.
    """

    def __init__(self, columns: Sequence[str], nested: bool = False) -> None:
        self._columns, self._nested = columns, nested
        self._roots = roots = {column.split(".")[0] for column in columns if "." in column}
        names = dict.fromkeys([*columns, *sorted(roots)])
        self._fields = {name: f"f{i}" for i, name in enumerate(names)}
        scalar: Any = str | int | float | bool | None
        row_type = msgspec.defstruct(
            "Row",
            [(f, Any if nested or n in roots else scalar, None) for n, f in self._fields.items()],
            rename={f: n for n, f in self._fields.items()},
            gc=nested or bool(roots),  # scalars have no cycles
        )
        self._decoder = _Decoder(row_type)

    def decode(self, texts: list[bytes], most: int) -> list[Any]:
        """Return one value per text, ``None`` where it is malformed or longer than ``most``
        bytes.
        """
        if not texts:
            return []
        if most_brackets(texts) <= MAX_DEPTH and max(map(len, texts)) <= most:
            try:
                return list(map(self._decoder.decode, texts))
            except _BROKEN:
                pass
        return [_decode_one(self._decoder, text, most) for text in texts]

    def decode_together(self, lines: pa.BinaryArray) -> list[Any] | None:
        """Return `decode` of lines with their line feeds; ``None`` where that is to be done one by
        one.

        The decoder takes one value after the other and does not look at line feeds between them.
        Here each line is one value all the same.  JSON has no line feed in a string, so every
        line feed is between two tokens; every line begins with ``{`` and ends with ``}``, and
        inside of a value no ``{`` may follow a ``}``, so no value goes on after a line feed.
        Each line therefore has a value of its own, and there are as many values as lines.
        """
        code, ends = bytes_of(lines)
        if too_long(lines).any() or not _are_objects(code, ends):
            return None
        try:
            values = self._decoder.decode_lines(code.data)
        except _BROKEN:
            return None
        return values if len(values) == len(lines) else None

    def arrays(self, values: list[Any]) -> list[pa.StringArray]:
        """Return the columns of decoded values (none of them ``None``)."""
        return [_texts(self._values(values, column)) for column in self._columns]

    def _values(self, rows: list[Any], column: str) -> list[Any]:
        """The values of a column."""
        values = list(map(attrgetter(self._fields[column]), rows))
        root, *path = column.split(".")
        if path:
            objects = map(attrgetter(self._fields[root]), rows)
            pairs = zip(values, objects, strict=True)
            values = [_inside(part, path) if own is None else own for own, part in pairs]
        if not self._nested and (path or column in self._roots):
            values = [None if isinstance(value, dict | list) else value for value in values]
        return values


def _inside(value: Any, path: Sequence[str]) -> Any:
    """What a path leads to in a decoded object, if to anything."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _are_objects(code: UInt8, ends: Int32) -> bool:
    """Whether each line begins with ``{`` and ends with ``}``, and none is too deep.

    Args:
        code: the bytes of n lines with their line feeds.
        ends: (n + 1,) where each line begins, and the last one ends.
    """
    begins, last = ends[:-1], ends[1:] - 2
    last = last - (code[last] == 13)
    if not ((code[begins] == 123).all() and (code[last] == 125).all()):
        return False
    brackets = code | 32 == 123  # [ and {
    if np.count_nonzero(brackets) < len(begins) + MAX_DEPTH:  # each line has one already
        return True
    return bool(np.add.reduceat(brackets, begins, dtype=np.int32).max() <= MAX_DEPTH)


def most_brackets(texts: list[bytes]) -> int:
    """Return an upper bound of the nesting of every text: its opening brackets."""
    squares = map(methodcaller("count", b"["), texts)
    return max(map(int.__add__, squares, map(methodcaller("count", b"{"), texts)))


def _decode_one(decoder: _Decoder, text: bytes, most: int) -> Any:
    """One text on its own: the same decoder, so the same outcome in any company."""
    if len(text) > most:
        return None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        code = np.frombuffer(_STRING.sub(b"", text), np.uint8)
        step = np.isin(code, [91, 123]).astype(np.int32) - np.isin(code, [93, 125])
        if step.cumsum().max(initial=0) > MAX_DEPTH:
            return None
    try:
        return decoder.decode(text.removeprefix(BOM))
    except _BROKEN:
        return None


def _texts(values: list[Any]) -> pa.StringArray:
    """JSON scalars as text: strings as they are, others as their shortest JSON text."""
    kinds = set(map(type, values))
    if kinds <= {str, type(None)}:
        return pa.array(values, pa.string())
    if kinds == {int}:
        with contextlib.suppress(OverflowError, pa.ArrowInvalid):  # more than 64 bits
            return pa.array(values, pa.int64()).cast(pa.string())
    if str not in kinds:
        lines = msgspec.json.Encoder().encode_lines(values).split(b"\n")[:-1]
        texts = pa.array(lines, pa.binary()).view(pa.string())
        return pc.if_else(pc.equal(texts, "null"), None, texts)
    encode = msgspec.json.encode
    return pa.array(
        [v if v is None or isinstance(v, str) else encode(v).decode() for v in values], pa.string()
    )


@functools.cache
def _quoted(delimiter: str) -> re.Pattern[bytes]:
    """A field, perhaps in quotes, and what ends it."""
    end = re.escape(delimiter)
    return re.compile(rf'("(?:[^"]|"")*"|[^{end}\r\n]*)(?:{end}|\r?\n)'.encode())


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
            rows.append([_value(field) for field in _quoted(delimiter).findall(line)])
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


@functools.cache
def _well_formed(delimiter: str) -> str:
    """The pattern of a line of CSV."""
    end = re.escape(delimiter)
    field = rf'(?:"(?:[^"\r\n]|"")*"|[^"{end}\r\n]*)'
    return rf"^{field}(?:{end}{field})*\r?\n$"


def csv_header(stream: BinaryIO, csv: CsvSection = COMMAS) -> list[str] | None:
    """Return the column names of a CSV file: of its header, or those that are declared.

    Returns:
        ``None`` if it has no readable header.
    """
    if csv.names is not None:
        return list(csv.names)
    head = recoded(stream, csv.encoding).read((csv.skip_rows + 1) * MAX_LINE_BYTES + 1)
    lines = head.removeprefix(BOM).split(b"\n", csv.skip_rows + 1)
    if len(lines) <= csv.skip_rows or len(lines[csv.skip_rows]) > MAX_LINE_BYTES:
        return None
    try:
        text = lines[csv.skip_rows].removesuffix(b"\r").decode("utf-8")
        fields = reader([text], strict=True, delimiter=csv.delimiter)
        return next(fields, []) or None if text else None
    except (UnicodeDecodeError, CsvError):
        return None


def csv_positions(
    header: Sequence[str],
    columns: Sequence[str],
    csv: CsvSection = COMMAS,
    subject: str = "a CSV file",
) -> list[int]:
    """Return the position of each needed column in the header of a file, the ``subject``.

    Raises:
        UsageError: a column is missing or there twice.  The other names of the header are
            not shown: in a file without a header they would be data.
    """
    for column in columns:
        if len(header) == 1 and header[0] != column:
            other = ";" if csv.delimiter == "," else ","
            raise UsageError(
                "table.csv",
                f"divides fields at {csv.delimiter!r}, which the header of {subject} has not",
                f'say in the table what does, e.g. csv = {{ delimiter = "{other}" }}',
            )
        if header.count(column) != 1:
            present = [c for c in columns if header.count(c) == 1]
            raise UsageError(
                f"column '{column}'",
                f"is {'twice' if column in header else 'not'} in {subject} of {len(header)} columns"
                f"; of those that are read it has: {column_list(present) or 'none'}",
                "correct the name in the project file or in the file's first line",
            )
    return [header.index(column) for column in columns]


def read_csv(stream: BinaryIO, columns: Sequence[str], csv: CsvSection = COMMAS) -> Iterator[Part]:
    """Yield the rows and refused positions of a CSV file, in blocks, every column as string.

    Raises:
        UsageError: a needed column is not in the header.
    """
    header = csv_header(stream, csv)
    if header is None:
        yield refuse(0, Reason.UNREADABLE_FILE)
        return
    where = csv_positions(header, columns, csv)
    stream.seek(0)
    skipped = csv.skip_rows + (csv.names is None)
    mark = b"" if skipped else BOM  # else a line that is left out has it
    text, joins = recoded(stream, csv.encoding), csv.line_breaks_in_quotes
    for row, lines in line_blocks(cast(BinaryIO, Joined(text)) if joins else text, skipped, mark):
        yield from csv_lines(lines, len(header), where, columns, csv.delimiter, joins).parts(row)


def csv_lines(
    lines: pa.BinaryArray,
    width: int,
    where: Sequence[int],
    columns: Sequence[str],
    delimiter: str = ",",
    joined: bool = False,
) -> Lines:
    """Decode each line of a file with ``width`` columns on its own.

    Args:
        lines: (n,) without a gap between two of them, each with its line feed, none blank.
        where: the needed columns' places; ``columns``: their names.
        joined: whether they are lines of `dialect.Joined`.
    """
    arrays = _together(lines, width, where, delimiter)
    if arrays is not None:
        good = np.ones(len(lines), np.bool_)
        return lines_of(good, ~good, ~good, _batch_of(arrays, columns, joined))
    malformed, miscounted = _faults(lines, width, delimiter)
    longer = too_long(lines)
    good = ~(malformed | miscounted | longer)
    rows = lines if good.all() else lines.filter(pa.array(good))
    batch = None
    if len(rows):
        arrays = columns_of(rows, width, where, delimiter, quotes=True)
        batch = _batch_of(arrays, columns, joined)
    return lines_of(good, malformed, longer, batch)


def _batch_of(
    arrays: Sequence[pa.StringArray], columns: Sequence[str], joined: bool
) -> pa.RecordBatch:
    arrays = [*map(broken, arrays)] if joined else arrays
    return pa.RecordBatch.from_arrays(list(map(repair_text, arrays)), list(columns))


def _together(
    lines: pa.BinaryArray, width: int, where: Sequence[int], delimiter: str
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
    form = _well_formed(delimiter)
    if (code == 34).any() and not pc.all(pc.match_substring_regex(lines, form)).as_py():
        return None
    return arrow_columns(lines, width, where, delimiter, quotes=True)


def _faults(lines: pa.BinaryArray, width: int, delimiter: str) -> tuple[Bool, Bool]:
    """Which lines are malformed, and which others have another number of fields."""
    returns = pc.count_substring(lines, "\r").to_numpy()
    malformed = returns != 0
    if malformed.any():
        malformed = returns != pc.match_substring_regex(lines, r"\r\n$").to_numpy(False)
    malformed = malformed | with_nul(lines)
    fields = pc.count_substring(lines, delimiter).to_numpy() + 1
    quoted = np.flatnonzero(pc.match_substring(lines, '"').to_numpy(False))
    if len(quoted):
        quoted_lines = lines.take(pa.array(quoted))
        malformed = malformed.copy()
        well_formed = pc.match_substring_regex(quoted_lines, _well_formed(delimiter))
        malformed[quoted] |= ~well_formed.to_numpy(False)
        bare = pc.replace_substring_regex(quoted_lines, r'"(?:[^"]|"")*"', "")
        fields = fields.copy()
        fields[quoted] = pc.count_substring(bare, delimiter).to_numpy() + 1
    return malformed, ~malformed & (fields != width)


def read_text(
    kind: str,
    stream: BinaryIO,
    columns: Sequence[str],
    nested: bool = False,
    csv: CsvSection = COMMAS,
) -> Iterator[Part]:
    """Yield the rows and refused positions of a text file, in blocks, every column as string.

    A compressed file that breaks off gives one refused position for its rest, as a row group of
    Parquet does: the blocks before it are read, always the same ones.

    Args:
        kind: ``csv`` or ``jsonl``.
        stream: the text (see `compression.plain`), at its beginning.
        columns: the columns that are needed.
        nested: whether an array or object of JSON is its text; see `Objects`.
        csv: how CSV files are written.

    Raises:
        UsageError: a needed column is not in a CSV header.
        OSError: the operating system cannot read the file.
    """
    end = 0
    parts = read_csv(stream, columns, csv) if kind == "csv" else read_jsonl(stream, columns, nested)
    try:
        for part in parts:
            end = max(end, after(part))
            yield part
    except NoLineBreakError:
        yield refuse(end, Reason.NO_LINE_BREAK)
    except BrokenFileError:
        yield refuse(end, Reason.UNREADABLE_REST if end else Reason.UNREADABLE_FILE)
