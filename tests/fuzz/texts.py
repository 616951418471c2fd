"""Text files: every row is read or refused, as a reader written from the formats' definitions says,
whatever the size of the blocks.

The definitions: RFC 4180 for a line of CSV (without line breaks inside quotes), RFC 8259 for a line
of JSON Lines, and docs/guides/files.md for what both become.  `expected_csv` and `expected_jsonl`
read byte for byte and share no code with the program.
"""

import bz2
import io
import json
import math
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pyarrow as pa

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats import compression
from dpstream.pipelines.formats import lines as line_module
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.formats.texts import read_text

COLUMNS = ("user", "page", "n")
MAX_LINE, MAX_NAME, MAX_DEPTH = 1 << 20, 1 << 17, 200
BLOCKS = (7, 64, 1000)
TOKENS = {
    "csv": [b'"', b'""', b",", b"\r\n", b"\n", b"\n\n", b"\r", b"\xef\xbb\xbf", b'""""', b"user",
            b'"a,b"', b'\n"', b'",', b"\xc3\xa9", b"\xed\xa0\x80", b"\t", b";"],
    "jsonl": [b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"\n", b"null", b"true", b"NaN",
              b"\\ud800", b"\\u0000", b"\\u0075ser", b'"user":', b'"n":', b"-0", b"1E5", b"1.",
              b"[" * 201, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\/", b'{"user":1,"user":[]}'],
    "packed": [b"\x1f\x8b\x08\x00", b"BZh9", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b"\0" * 8],
}  # fmt: skip
#: Values, or the reason why it is none; ``("either", ..)``: what the definition leaves open.
Row = tuple[Any, ...] | str


class WrongError(AssertionError):
    """A reader did not do what it must."""


def check(kind: str, data: bytes) -> None:
    """Read a file as the program does, in blocks of several sizes, and by definition."""
    read = _outcome(kind, io.BytesIO(data))
    for size in BLOCKS if len(data) < 2_000 else (100_000,) if len(data) < 300_000 else ():
        with mock.patch.object(line_module, "BLOCK_BYTES", size):
            if _outcome(kind, io.BytesIO(data)) != read:
                raise WrongError(f"other rows in other blocks: of {size} bytes")
    if isinstance(read, str):
        return
    expected = expected_csv(data) if kind == "csv" else expected_jsonl(data)
    if expected is None:
        return
    if len(read) != len(expected):
        raise WrongError(f"lost rows: {len(read)} of {len(expected)} are read or refused")
    for number, (row, right) in enumerate(zip(read, expected, strict=True)):
        if not _same(row, right):
            raise WrongError(f"another row: {number} is {_short(row)} and must be {_short(right)}")


def packed(kind: str, data: bytes) -> None:
    """Read a compressed file: a whole one has the rows of its text."""
    codec = compression.codec_of(data[: compression.HEAD_BYTES], "x")
    if codec is None or codec == compression.FOREIGN:
        return
    read = _outcome(kind, compression.plain(io.BytesIO(data), codec))
    if read != _outcome(kind, compression.plain(io.BytesIO(data), codec)):
        raise WrongError("a second reading gives other rows")
    text = _unpacked(codec, data)
    if text is not None and len(text) < 10 << 20 and read != _outcome(kind, io.BytesIO(text)):
        raise WrongError("a whole compressed file has other rows than its text")


def _unpacked(codec: str, data: bytes) -> bytes | None:
    """The text of a whole gzip or bzip2 file, member by member; else ``None``."""
    begin: Any = {"gzip": lambda: zlib.decompressobj(31), "bz2": bz2.BZ2Decompressor}.get(codec)
    text = b""
    while data and begin is not None:
        member = begin()
        try:
            text += member.decompress(data)
        except (zlib.error, OSError):
            return None
        if not member.eof:
            return None
        data = member.unused_data
    return text if begin is not None else None


def _outcome(kind: str, stream: Any) -> list[Row] | str:
    """Every position once, as its values or the reason; or a public refusal of the file."""
    rows: dict[int, Row] = {}
    try:
        for part in read_text(kind, stream, COLUMNS):
            new = dict(_positions(part))
            if new.keys() & rows.keys():
                raise WrongError("a position is there twice")
            rows |= new
    except UsageError as error:
        return str(error.field)
    if sorted(rows) != list(range(len(rows))):
        raise WrongError("a position is missing")
    return [rows[number] for number in range(len(rows))]


def _positions(part: Any) -> Iterator[tuple[int, Row]]:
    if isinstance(part, Refused):
        yield from zip(part.offsets.tolist(), part.reasons, strict=True)
        return
    part.batch.validate(full=True)
    if part.batch.schema.types != [pa.string()] * len(COLUMNS):
        raise WrongError("a column is no string")
    columns = (column.to_pylist() for column in part.batch.columns)
    yield from enumerate(zip(*columns, strict=True), part.offset)


def _same(row: Row, right: Any) -> bool:
    if isinstance(right, tuple) and right[:1] == ("either",):
        return any(_same(row, one) for one in right[1:])
    if isinstance(row, str) or isinstance(right, str):
        return bool(row == right)
    return all(map(_same_value, row, right))


def _same_value(text: str | None, right: Any) -> bool:
    if not isinstance(right, float) or text is None:
        return bool(text == right)
    return float(text) == right and math.copysign(1, float(text)) == math.copysign(1, right)


def _short(row: Any) -> str:
    text = repr(row)
    return text if len(text) < 200 else f"{text[:200]}.. of {len(text)}"


def _lines(data: bytes) -> list[bytes]:
    """Lines without their line feeds; the last may have none."""
    lines = data.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


# CSV


def expected_csv(data: bytes) -> list[Row] | None:
    """Rows by definition; ``None`` where the header is none of RFC 4180."""
    head, *lines = _lines(data) or [b""]
    names = csv_fields(head.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r"))
    if names is None or len(head) >= MAX_NAME or not all(map(_is_text, head.split(b","))):
        return None
    header = [name and name.decode() for name in names]
    if any(header.count(column) != 1 for column in COLUMNS):
        return None
    places = [header.index(column) for column in COLUMNS]
    return [_csv_row(line, len(header), places) for line in lines if line not in (b"", b"\r")]


def _csv_row(line: bytes, width: int, places: list[int]) -> Row:
    if len(line) > MAX_LINE:
        return "line_too_long"
    fields = csv_fields(line.removesuffix(b"\r"))
    if fields is None:
        return "malformed"
    if len(fields) != width:
        return "field_count"
    return tuple(_text(fields[place]) for place in places)


def csv_fields(line: bytes) -> list[bytes | None] | None:
    """Fields of a line by RFC 4180; an empty one without quotes is null."""
    if b"\0" in line or b"\r" in line:
        return None
    if b'"' not in line:
        return [field or None for field in line.split(b",")]
    fields, at = list[bytes | None](), 0
    while True:
        if line[at : at + 1] == b'"':
            value, at = bytearray(), at + 1
            while line[at : at + 1] != b'"' or line[at : at + 2] == b'""':
                if at >= len(line):
                    return None
                value.append(line[at])
                at += 2 if line[at : at + 1] == b'"' else 1
            at += 1
            fields.append(bytes(value))
        else:
            end = line.find(b",", at)
            plain = line[at:] if end < 0 else line[at:end]
            if b'"' in plain:
                return None
            fields.append(plain or None)
            at += len(plain)
        if at == len(line):
            return fields
        if line[at : at + 1] != b",":
            return None
        at += 1


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None and _is_text(value) else None


# JSON Lines


def expected_jsonl(data: bytes) -> list[Any]:
    """Rows by definition."""
    return [_json_row(line) for line in _lines(data) if line not in (b"", b"\r")]


class _Pairs(list[tuple[str, Any]]):
    """An object, with each of its names."""


def _json_row(line: bytes) -> Any:
    if len(line) > MAX_LINE:
        return "line_too_long"
    line = line.removeprefix(b"\xef\xbb\xbf")
    if _depth(line) > MAX_DEPTH:
        return "malformed"
    try:
        value = json.loads(line.decode(), parse_constant=_refuse, object_pairs_hook=_Pairs)
    except UnicodeDecodeError:
        return _in_other_names(line)
    except ValueError:
        return "malformed"
    return _scalars(value)


def _scalars(value: Any) -> Any:
    if not isinstance(value, _Pairs):
        return "malformed"
    row = dict[str, Any]()
    for name, scalar in value:
        if name in COLUMNS:
            if isinstance(scalar, list) or (isinstance(scalar, float) and math.isinf(scalar)):
                return "malformed"
            if isinstance(scalar, str) and not _is_storable(scalar):
                return "malformed"
            row[name] = scalar
    values = tuple(_json_text(row.get(name)) for name in COLUMNS)
    return values if _is_storable(value) else ("either", "malformed", values)


def _is_storable(value: Any) -> bool:
    """Whether no text in it has half of a surrogate pair, which UTF-8 does not write.

    RFC 8259 leaves open what becomes of one; in what no job names, at any depth, the row may be
    read.
    """
    if isinstance(value, str):
        return not any(0xD800 <= ord(char) < 0xE000 for char in value)
    return not isinstance(value, list | tuple) or all(map(_is_storable, value))


def _json_text(value: Any) -> Any:
    """Strings as they are, floats as numbers, others as JSON text."""
    return value if value is None or isinstance(value, str | float) else json.dumps(value)


def _in_other_names(line: bytes) -> Any:
    """Bytes that are not UTF-8 in a field that no job names: the row may be read without it."""
    try:
        value = json.loads(line.decode(errors="replace"), parse_constant=_refuse,
                           object_pairs_hook=_Pairs)  # fmt: skip
    except ValueError:
        return "malformed"
    row = _scalars(value)
    if isinstance(row, str) or "\ufffd" in str(row):
        return "malformed"
    return row if row[:1] == ("either",) else ("either", "malformed", row)


def _refuse(_: str) -> None:
    raise ValueError


def _depth(line: bytes) -> int:
    """Deepest nesting, of brackets that are in no string."""
    depth = deepest = 0
    inside = escaped = False
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return 0
    for byte in line:
        if inside:
            inside = escaped or byte != 34
            escaped = not escaped and byte == 92
        elif byte == 34:
            inside = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def target(name: str) -> Any:
    """How a file of a kind is checked."""
    if name == "packed":
        return lambda data: packed("csv", data)
    return lambda data: check(name, data)
