"""How a table's files are written: characters, fields, numbers and times that its section declares.

One row never decides how another is read: everything here is declared, and a value that is not
written as declared is NULL, whatever its neighbours are.

**Characters.**  Text in another encoding becomes UTF-8 before it is divided into lines.  Only
encodings are read in which a character does not depend on those before it, and in which no
character holds the byte of a line end: so damage stays within its line.  UTF-16 is decoded in code
units from the file's first byte.  A byte that is no character becomes one that is no UTF-8, and so
makes the value NULL in which it stands.

**Numbers.**  Signs of thousands and decimals are those that are declared.  ``1,234`` is one number
in one country and another in the next: a number that is not written as declared is none.

**Times.**  A format has the directives of ``strptime`` below, each at most once; names of months
are English.  Texts without an offset are times of the declared zone
(`accounting.zones`).
"""

import codecs
import functools
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import instance
from dpstream.accounting.zones import zone_of
from dpstream.dp_transforms.ingest.columns import ZONED, decoded, identity, instant, plain
from dpstream.pipelines.formats.rows import Part, Rows
from dpstream.pipelines.project.dialect import DIRECTIVES, Reading
from dpstream.pipelines.project.sections import CsvSection, TimeColumn
from dpstream.state.numbers import mask_of, valid_of, values_of

_SECOND, _MINUTE, _DAY = 1_000_000, 60_000_000, 86_400_000_000
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
#: Microseconds are fewer, so that offsets can be added.
_MOST = 2**62
#: Microseconds of a tick.
_UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def parts_as(parts: Iterable[Part], reading: Reading) -> Iterator[Part]:
    """Yield the parts of a file; see `read_as`."""
    for part in parts:
        if isinstance(part, Rows) and reading.converts:
            yield Rows(part.offset, read_as(part.batch, reading))
        else:
            yield part


def read_as(batch: pa.RecordBatch, reading: Reading) -> pa.RecordBatch:
    """Return rows with times as instants and numbers with a decimal point, as they are declared."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in columns.keys() & {*reading.numbers}:
        columns[name] = number_texts(columns[name], reading.csv)
    if reading.time is not None and reading.time.column in columns:
        columns[reading.time.column] = instants(columns[reading.time.column], reading.time)
    metadata = batch.schema.metadata
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns), metadata=metadata)


# --- characters ------------------------------------------------------------------------------


class FromBeginning(io.RawIOBase, ABC):
    """A stream that is made of another one, and can only begin again.

    Args:
        raw: the other one, at its beginning; who opened it closes it.
    """

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Forget what was read."""

    @override
    def readable(self) -> bool:
        """Return true."""
        return True

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek to the beginning; other positions are not supported."""
        if offset or whence:
            raise io.UnsupportedOperation
        self._raw.seek(0)
        self._begin()
        return 0


class Recoded(FromBeginning):
    """The text of a file as UTF-8, read from its beginning.

    Args:
        raw: the text, at its beginning.
        encoding: one of `pipelines.project.dialect.ENCODINGS`.
    """

    def __init__(self, raw: BinaryIO, encoding: str) -> None:
        self._encoding = encoding
        super().__init__(raw)

    @override
    def _begin(self) -> None:
        self._decoder = codecs.getincrementaldecoder(self._encoding)(_INVALID)

    @override
    def read(self, size: int = -1) -> bytes:
        """Return about ``size`` bytes; none at the end."""
        while True:
            data = self._raw.read(size)
            text = self._decoder.decode(data, final=not data)
            if text or not data:
                return text.encode("utf-8", "surrogateescape")


class Joined(FromBeginning):
    """A text in UTF-8 whose line breaks between quotes are bytes that no such text has.

    `texts` reads it by its lines, and makes line breaks of these bytes again (`broken`).  Bytes
    that are none of UTF-8 stay such.
    """

    @override
    def _begin(self) -> None:
        self._open = 0

    @override
    def read(self, size: int = -1) -> bytes:
        """Return about ``size`` bytes; none at the end."""
        code = np.frombuffer(self._raw.read(size).translate(_NO_UTF_8), np.uint8)
        quotes = self._open + np.cumsum(code == 34, dtype=np.int32)
        self._open = quotes[-1] % 2 if len(quotes) else self._open
        inside = quotes % 2 == 1
        code = np.where(inside & (code == 10), np.uint8(_FEED), code)
        return np.where(inside & (code == 13), np.uint8(_RETURN), code).tobytes()


#: What stands for line feeds and carriage returns, and what such bytes of the text become.
_FEED, _RETURN = 0xFF, 0xFE
_NO_UTF_8 = bytes(range(0xFE)) + b"\xc0\xc0"


def broken(column: pa.StringArray) -> pa.StringArray:
    """Return texts of `Joined` with their line breaks."""
    raw = pc.replace_substring(column.view(pa.binary()), bytes([_FEED]), b"\n")
    return pc.replace_substring(raw, bytes([_RETURN]), b"\r").view(pa.string())


def recoded(text: BinaryIO, encoding: str) -> BinaryIO:
    """Return a text as UTF-8."""
    return text if encoding == "utf-8" else cast(BinaryIO, Recoded(text, encoding))


def _invalid(error: UnicodeError) -> tuple[str, int]:
    """One byte, or one code unit of UTF-16, that is no character: one that is no UTF-8."""
    error = instance(error, UnicodeDecodeError)
    if error.encoding.startswith("utf-16"):
        return "\udcff", min(error.start + 2, len(error.object))
    byte = error.object[error.start]  # several as they are could be a character of UTF-8
    return "\udcff" if byte > 127 else chr(byte), error.start + 1


_INVALID = "dpstream-invalid"
codecs.register_error(_INVALID, _invalid)


# --- numbers ---------------------------------------------------------------------------------


def number_texts(column: pa.Array, csv: CsvSection) -> pa.Array:
    """Return texts of numbers with a decimal point and nothing between thousands; NULL where a
    text is not written as declared.
    """
    column = plain(column)
    if not pa.types.is_string(column.type):
        return column
    point, between = re.escape(csv.decimal), re.escape(csv.thousands)
    grouped = f"|[0-9]{{1,3}}(?:{between}[0-9]{{3}})+" if csv.thousands else ""
    digits = rf"(?:[0-9]+{grouped})(?:{point}[0-9]*)?|{point}[0-9]+"
    form = rf"^[+-]?(?:{digits})(?:[eE][+-]?[0-9]+)?$"
    good = pc.match_substring_regex(column, form)
    if csv.thousands:
        column = pc.replace_substring(column, csv.thousands, "")
    column = pc.replace_substring(column, csv.decimal, ".")
    return pc.if_else(good, column, pa.scalar(None, pa.string()))


# --- times -----------------------------------------------------------------------------------


def instants(column: pa.Array, time: TimeColumn) -> pa.Array:
    """Return a time column as instants, NULL where a value is not written as declared.

    Args:
        column: texts; or, without a format, what `ingest.columns.instant` reads.
        time: its format, unit and zone.

    Returns:
        (n,) timestamps in microseconds, in UTC.
    """
    column = plain(decoded(column))
    if time.unit is not None:
        micros, good = _counted(column, _UNITS[time.unit])
    elif time.format is not None:
        micros, good, is_local = _formatted(column, time.format)
        micros = zone_of(time.zone).utc(micros) if is_local and time.zone else micros
    else:
        micros, good = instant(column)
        if time.zone is not None:
            local = _are_local(column)
            good &= ~local | ((micros > -_MOST) & (micros < _MOST))
            micros = np.where(good, micros, 0)
            micros = np.where(local, zone_of(time.zone).utc(micros), micros)
    return pa.array(micros, pa.int64(), mask=~good).view(pa.timestamp("us", "UTC"))


def _are_local(column: pa.Array) -> Bool:
    """Which times have no offset."""
    kind = column.type
    if pa.types.is_string(kind):
        return ~mask_of(pc.fill_null(pc.match_substring_regex(column, ZONED), False))
    naive = pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None)
    return np.full(len(column), naive)


def _counted(column: pa.Array, micros: int) -> tuple[Int64, Bool]:
    """Numbers of ticks since 1970, as texts too; a tick has so many microseconds."""
    if pa.types.is_floating(column.type):
        floats = values_of(pc.fill_null(column.cast(pa.float64()), np.nan))
        with np.errstate(over="ignore"):  # a warning would tell of a row
            numbers = np.round(floats * micros)
        good = np.abs(numbers) < _MOST
        return np.where(good, numbers, 0).astype(np.int64), good
    fraction = np.zeros(len(column), np.int64)
    if pa.types.is_string(column.type):
        parts = pc.extract_regex(column, r"^(?P<whole>[+-]?[0-9]+)(?:\.(?P<rest>[0-9]{0,9}))?$")
        column = pc.struct_field(parts, "whole")
        rest = values_of(pc.utf8_rpad(_field(parts, "rest", "0"), 9, "0").cast(pa.int64()))
        below = mask_of(pc.fill_null(pc.starts_with(column, "-"), False))
        fraction = np.where(below, -rest, rest) * micros // 1_000_000_000
    integers, good = identity(column, "int")
    ticks = values_of(integers)
    good = good & (ticks < _MOST // micros) & (ticks > -_MOST // micros)
    return np.where(good, ticks * micros + fraction, 0), good


def _field(parts: pa.StructArray, name: str, filler: str) -> pa.StringArray:
    """A group of a pattern, filled where the pattern does not match or the group is empty."""
    texts = pc.fill_null(pc.struct_field(parts, name), filler)
    return pc.if_else(pc.equal(texts, ""), filler, texts)


class _Format(NamedTuple):
    pattern: str
    names: frozenset[str]


@functools.lru_cache(maxsize=64)
def _pattern(text: str) -> _Format:
    """The pattern of a format; its groups are called like its directives."""
    pieces = re.split("%(.)", text)
    names = pieces[1::2]
    groups = [f"(?P<{n}>{DIRECTIVES[n]})" if n != "%" else "%" for n in names]
    literals = [re.escape(piece) for piece in pieces[::2]]
    body = "".join(map("".join, zip(literals, [*groups, ""], strict=True)))
    return _Format(f"^{body}$", frozenset(names) - {"%"})


def _formatted(column: pa.Array, text: str) -> tuple[Int64, Bool, bool]:
    """Micros of texts in a format, which of them have it, and whether they are local times."""
    form = _pattern(text)
    if not pa.types.is_string(column.type):
        return np.zeros(len(column), np.int64), np.zeros(len(column), np.bool_), False
    parts = pc.extract_regex(column, form.pattern)
    good = valid_of(parts)

    def number(name: str, default: int = 0) -> Int64:
        if name not in form.names:
            return np.full(len(column), default, np.int64)
        return values_of(_field(parts, name, str(default)).cast(pa.int64()))

    year = number("Y", 1970)
    if "y" in form.names:
        year = number("y")
        year = year + np.where(year < 69, 2000, 1900)
    month = number("m", 1)
    if "b" in form.names or "B" in form.names:
        month, named = _month(parts, "b" if "b" in form.names else "B")
        good &= named
    hour = number("H")
    if "I" in form.names:
        hour = number("I", 12)
        good &= (hour >= 1) & (hour <= 12)
        hour = hour % 12 + 12 * mask_of(pc.match_substring_regex(_field(parts, "p", "am"), "^[pP]"))
    day, minute, second = number("d", 1), number("M"), number("S")
    good &= (year >= 1) & (month >= 1) & (month <= 12)
    good &= (hour < 24) & (minute < 60) & (second < 60)
    first = np.where(good, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    begin = first.astype("datetime64[D]").astype(np.int64)
    end = (first + 1).astype("datetime64[D]").astype(np.int64)
    good &= (day >= 1) & (day <= end - begin)
    micros = (begin + day - 1) * _DAY + hour * 3600 * _SECOND + minute * _MINUTE + second * _SECOND
    if "f" in form.names:
        micros += values_of(pc.utf8_rpad(_field(parts, "f", "0"), 9, "0").cast(pa.int64())) // 1000
    if "z" in form.names:
        offset, usable = _offset(_field(parts, "z", "Z"))
        good, micros = good & usable, micros - offset
    return np.where(good, micros, 0), good, "z" not in form.names


def _month(parts: pa.StructArray, name: str) -> tuple[Int64, Bool]:
    """Numbers of English names of months, short or in full, and which are some."""
    names = pc.ascii_lower(_field(parts, name, "jan"))
    words = _MONTHS if name == "b" else _FULL
    at = pc.index_in(names, value_set=pa.array(words))
    return values_of(pc.fill_null(at, 0)).astype(np.int64) + 1, valid_of(at)


_FULL = [
    *("january", "february", "march", "april", "may", "june", "july", "august"),
    *("september", "october", "november", "december"),
]


def _offset(texts: pa.StringArray) -> tuple[Int64, Bool]:
    """Micros of offsets such as ``+02:00`` and ``Z``, and which are less than a day."""
    digits = pc.if_else(pc.equal(texts, "Z"), "+0000", pc.replace_substring(texts, ":", ""))
    hours = values_of(pc.utf8_slice_codeunits(digits, 1, 3).cast(pa.int64()))
    minutes = values_of(pc.utf8_slice_codeunits(digits, 3, 5).cast(pa.int64()))
    size = hours * 60 + minutes
    sign = np.where(mask_of(pc.starts_with(digits, "-")), -1, 1)
    return sign * size * _MINUTE, (hours < 24) & (minutes < 60)
