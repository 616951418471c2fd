"""Conversion of columns to canonical ones: one meaning for every spelling, row by row.

Each function returns the canonical column and a mask of the rows that have one.  What a row
becomes depends on that row alone: a bad neighbour in the batch never changes it.
Declared types decide (``table.unit_column.type``), not what happens to arrive:

* ``string``: text, NFC-normalised (so NFC and NFD spellings are one key); NUL is allowed.
* ``int``: whole numbers within int64; integral floats below 2^53 count, text of digits too.  Of
  units and record ids, which are only hashed, all 64 bits count: unsigned numbers too.
* ``bool``: true/false, never 0/1.
* ``bytes``: binary, or text as its UTF-8 bytes.
* ``date``: dates; of those counted in milliseconds, whole days only.
* ``timestamp``: instants of any unit and zone, to the nanosecond; without zone they are UTC.
* ``decimal``: decimals of any width and scale, and whole numbers.
Floats are no identities, so ``-0.0``, ``1.0`` and NaN never become keys; nor is text a date, an
instant or a decimal (the source or the statement casts it).  The last three kinds, and NULL as a
value of its own (``nulls``), are for bounded jobs; a stream's fields have the first four.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.figures import EPOCH
from dpstream.accounting.limits import MAX_KEY_BYTES
from dpstream.state.numbers import arrow_numbers, constant, mask, mask_of, valid_of, values_of

_INT_TEXT = r"^[+-]?[0-9]{1,20}$"
_FLOAT_TEXT = r"^[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?$"
_TIME_TEXT = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?)?$"
)
#: The offset at the end of a time's text.
ZONED = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"
#: Digits that fit into an int64 whatever they are; the code of the first digit.
_INT_DIGITS, _ZERO = 18, np.uint8(48)
#: Characters of a time to the microsecond, with its zone Z, and of a date.
_MICROS_TEXT, _DATE_TEXT = 27, 10
_EXACT_FLOAT = 2.0**53
_MILLIS_PER_DAY = 86_400_000
_PER_MICRO = {"s": 1_000_000, "ms": 1_000, "us": 1}


def plain(column: pa.Array) -> pa.Array:
    """Return the column in the plain Arrow layout of its type, with decimals as float64.

    Dictionaries, views, large and fixed-size layouts are undone, so that what follows knows one
    layout of each type.
    """
    column = laid_out(column)
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def laid_out(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column in the plain Arrow layout of its type; decimals stay as they are."""
    column = decoded(column)
    layouts = {"string": pa.string(), "bytes": pa.binary()}
    layout = layouts.get(identity_kind(column.type) or "")
    return column if layout is None or column.type == layout else column.cast(layout)


def decoded(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array of values, whether it came in chunks or as codes; values of an
    extension type are those of its storage.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # more text than one array holds: an error
            column = pa.concat_arrays(column.chunks)
    while isinstance(column, pa.ExtensionArray):
        column = column.storage
    if not pa.types.is_dictionary(column.type):
        return column
    values = column.dictionary
    if values.type in (pa.string_view(), pa.binary_view()):  # of which Arrow takes none by number
        values = plain(values)
    return values.take(column.indices)


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values that a dictionary or extension type holds.

    Periods of pandas keep theirs: their numbers are not what their owner sees.
    """
    while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        if getattr(kind, "extension_name", None) == "pandas.period":
            break
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    return kind


def identity_kind(kind: pa.DataType, null: str | None = "string") -> str | None:
    """Return which of ``ids.ID_KINDS`` values of a type are; ``None``: no identity.

    Args:
        null: the kind of a column of which every value is NULL.
    """
    types, kind = pa.types, value_type(kind)
    tests = {
        "string": (types.is_string, types.is_large_string, types.is_string_view),
        "bytes": (
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
        ),
        "int": (types.is_integer,),
        "bool": (types.is_boolean,),
        "date": (types.is_date,),
        "timestamp": (types.is_timestamp,),
        "decimal": (types.is_decimal,),
    }
    other = null if types.is_null(kind) else None
    return next((name for name, fits in tests.items() if any(test(kind) for test in fits)), other)


class Named(NamedTuple):
    """A column of a schema, or a part of a struct: name or path, type, names on the path."""

    name: str
    type: pa.DataType
    path: tuple[str, ...]


def named_columns(schema: pa.Schema) -> list[Named]:
    """Return the columns of a schema, and the parts of structs by their paths (``event.page``).

    A column that is called as a path is written wins over the path.  Two columns of one name are
    there twice.
    """
    own = {*schema.names}
    return [each for each in _named(schema) if len(each.path) == 1 or each.name not in own]


def _named(fields: Iterable[pa.Field], above: tuple[str, ...] = ()) -> Iterator[Named]:
    for field in fields:
        path = (*above, field.name)
        yield Named(".".join(path), field.type, path)
        if pa.types.is_struct(field.type):
            yield from _named(field.type, path)


def column_at(table: pa.RecordBatch | pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """Return a column by its name, or a part of a struct by its path; it is there once."""
    first, *rest = next(each.path for each in named_columns(table.schema) if each.name == name)
    return pc.struct_field(table.column(first), rest) if rest else table.column(first)


def identity(
    column: pa.Array | pa.ChunkedArray, declared: str, nulls: bool = False, hashed: bool = False
) -> tuple[pa.Array, Bool]:
    """Return a unit or key column of a declared type; missing or mistyped rows are masked out.

    Args:
        column: rows in any Arrow layout.
        declared: one of ``ids.ID_KINDS``.
        nulls: NULL is a value of its own: such rows are good and stay null.
        hashed: only ids are made of the values: of ``int`` an unsigned number stands for the signed
            one of the same 64 bits.  Two ids that so become one are bounded as one unit.

    Returns:
        (column of the Arrow type of ``declared``, mask): masked rows hold a filler and must not
        be used; without ``nulls`` there are no nulls.
    """
    column = decoded(column)
    array, ok = (
        _exact_integers(column, hashed) if declared == "int" else _identity(column, declared)
    )
    if nulls and column.null_count:
        absent = ~valid_of(column)
        array = pc.if_else(mask(absent), pa.nulls(1, array.type)[0], array)
        ok = ok | absent
    return array, ok


def unit_identity(column: pa.Array | pa.ChunkedArray, declared: str) -> tuple[pa.Array, Bool]:
    """Return `identity` of privacy units, hashed: an empty text, and no bytes, are no unit.

    Statements read such units as NULL (`pipelines.tables.files.casts`).
    """
    unit, ok = identity(column, declared, hashed=True)
    if declared in ("string", "bytes"):
        ok = ok & mask_of(pc.greater(pc.binary_length(unit), 0))
    return unit, ok


def _identity(column: pa.Array, declared: str) -> tuple[pa.Array, Bool]:
    if declared in _OF_TYPED:
        return _OF_TYPED[declared](column)
    column = plain(column)
    if declared in _OF_PLAIN:
        return _OF_PLAIN[declared](column)
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        raw = column.cast(pa.binary())
        ok = valid_of(raw) & _short(raw)
        return _fill(raw, ok, b""), ok
    return _none(column, pa.binary(), b"")


def _dates(column: pa.Array) -> tuple[pa.Array, Bool]:
    if pa.types.is_date32(column.type):
        return _fill_bits(column), valid_of(column)
    if not pa.types.is_date64(column.type):
        return arrow_numbers(np.zeros(len(column), np.int32)).view(pa.date32()), _never(column)
    ok = valid_of(column)
    millis = values_of(_fill_bits(column).view(pa.int64()))
    days = millis // _MILLIS_PER_DAY
    ok &= (days * _MILLIS_PER_DAY == millis) & (days == days.astype(np.int32))
    return arrow_numbers(np.where(ok, days, 0).astype(np.int32)).view(pa.date32()), ok


def _instants(column: pa.Array) -> tuple[pa.Array, Bool]:
    """The same ticks as UTC: a zone only says how an instant is shown."""
    if not pa.types.is_timestamp(column.type):
        zeros = arrow_numbers(np.zeros(len(column), np.int64))
        return zeros.view(pa.timestamp("us", "UTC")), _never(column)
    utc = pa.timestamp(column.type.unit, "UTC")
    return _fill_bits(column.view(utc)), valid_of(column)


def _decimals(column: pa.Array) -> tuple[pa.Array, Bool]:
    kind = column.type
    if pa.types.is_integer(kind):
        return _fill_bits(column).cast(pa.decimal128(20, 0)), valid_of(column)
    if not pa.types.is_decimal(kind):
        return arrow_numbers(np.zeros(len(column), np.int64)).cast(pa.decimal128(20, 0)), _never(
            column
        )
    if kind.bit_width < 128:
        column = column.cast(pa.decimal128(kind.precision, kind.scale))
    return _fill_bits(column), valid_of(column)


def _fill_bits(column: pa.Array) -> pa.Array:
    """Zero in the place of null."""
    if column.null_count == 0:
        return column
    return column.fill_null(constant(0, column.type))


def _never(column: pa.Array) -> Bool:
    return np.zeros(len(column), np.bool_)


def _text(column: pa.Array) -> tuple[pa.Array, Bool]:
    if pa.types.is_binary(column.type):
        column = column.view(pa.string())  # which checks nothing
    if not pa.types.is_string(column.type):
        return _none(column, pa.string(), "")
    ok = valid_of(column)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        ok &= _decodable(column)
        column = _fill(column.view(pa.binary()), ok, b"").cast(pa.string())
    ok &= _short(column.cast(pa.binary()))
    column = _fill(column, ok, "")
    other = pc.invert(pc.string_is_ascii(column))
    if pc.any(other, min_count=0).as_py():
        column = pc.replace_with_mask(column, other, _composed(column.filter(other)))
        ok &= _short(column.cast(pa.binary()))
    return column, ok


def _composed(column: pa.Array) -> pa.Array:
    """NFC of each distinct text (Arrow's ``utf8_normalize`` decomposes whatever the form)."""
    coded = column.dictionary_encode()
    words = [unicodedata.normalize("NFC", word) for word in coded.dictionary.to_pylist()]
    return pa.array(words, pa.string()).take(coded.indices)


def _decodable(column: pa.Array) -> Bool:
    """Rows that are UTF-8; only reached when some row is not."""
    good = np.zeros(len(column), np.bool_)
    for row, value in enumerate(column.view(pa.binary()).to_pylist()):
        try:
            good[row] = value is not None and value.decode("utf-8") is not None
        except UnicodeDecodeError:
            continue
    return good


def _exact_integers(column: pa.Array, hashed: bool) -> tuple[pa.Array, Bool]:
    """Whole numbers; decimals are exact, by their digits."""
    if pa.types.is_decimal(column.type):
        column = pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$|^0E.*$", "")
        column = pc.if_else(pc.equal(column, ""), "0", column)  # Arrow writes 0 as 0E-9
    return _integers(plain(column), hashed)


def _integers(column: pa.Array, hashed: bool = False) -> tuple[pa.Array, Bool]:
    kind = column.type
    if pa.types.is_string(kind):
        if _are_digits(column):
            return column.cast(pa.int64()), np.ones(len(column), np.bool_)
        ok = valid_of(column) & mask_of(pc.match_substring_regex(column, _INT_TEXT))
        values = np.zeros(len(column), np.int64)
        wide = _fill(column, ok, "0")
        values, fits = _parse_int(wide, hashed)
        return arrow_numbers(values), ok & fits
    if pa.types.is_integer(kind):
        ok = valid_of(column)
        if kind == pa.uint64() and hashed:
            return arrow_numbers(values_of(_fill(column, ok, 0)).view(np.int64)), ok
        if kind == pa.uint64():
            ok &= values_of(column) < np.uint64(1 << 63)
        return _fill(column, ok, 0).cast(pa.int64()), ok
    if pa.types.is_floating(kind):
        floats = _floats(column.cast(pa.float64()))
        ok = np.isfinite(floats) & (np.abs(floats) < _EXACT_FLOAT)
        ok &= floats == np.floor(np.where(ok, floats, 0.5))
        return arrow_numbers(np.where(ok, floats, 0).astype(np.int64)), ok
    return _none(column, pa.int64(), 0)


def _are_digits(column: pa.StringArray) -> bool:
    """Whether every text is 1 to 18 digits: an int64, and Arrow reads digits as decimal."""
    if column.null_count or len(column) == 0:
        return False
    sizes = values_of(pc.binary_length(column))
    _, offsets, data = column.buffers()
    begin = int(np.frombuffer(offsets, np.int32)[column.offset])
    code = np.frombuffer(data or b"", np.uint8)[begin : begin + int(sizes.sum(dtype=np.int64))]
    return bool(sizes.min() >= 1 and sizes.max() <= _INT_DIGITS and (code - _ZERO < 10).all())


def _parse_int(column: pa.Array, hashed: bool) -> tuple[Int64, Bool]:
    """Digits of at most 20 places as int64, and which of them fit."""
    column = pc.replace_substring_regex(column, r"^\+", "")
    try:
        return values_of(column.cast(pa.int64())), np.ones(len(column), bool)
    except pa.ArrowInvalid:
        exact = [int(text) for text in column.to_pylist()]
        end = 2**64 if hashed else 2**63
        fits = np.array([-(2**63) <= value < end for value in exact], np.bool_)
        signed = [value - 2**64 if value >= 2**63 else value for value in exact]
        integers = [value if good else 0 for value, good in zip(signed, fits, strict=True)]
        return np.array(integers, np.int64), fits


def _booleans(column: pa.Array) -> tuple[pa.Array, Bool]:
    if pa.types.is_boolean(column.type):
        ok = valid_of(column)
        return _fill(column, ok, False), ok
    if pa.types.is_string(column.type):
        lower = pc.ascii_lower(_fill(column, valid_of(column), ""))
        yes = mask_of(pc.equal(lower, "true"))
        return mask(yes), yes | mask_of(pc.equal(lower, "false"))
    return _none(column, pa.bool_(), False)


def measure(column: pa.Array) -> tuple[Float64, Bool]:
    """Return a value column as (n,) float64, and (n,) which rows have a finite number.

    NULL, NaN, infinities, booleans and text that is no decimal number have none; such rows hold 0.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_string(kind):
        good = valid_of(column) & mask_of(pc.match_substring_regex(column, _FLOAT_TEXT))
        column = _fill(column, good, "nan").cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.zeros(len(column)), np.zeros(len(column), np.bool_)
    values = _floats(column.cast(pa.float64(), safe=False))
    ok = np.isfinite(values)
    return np.where(ok, values, 0.0), ok


def instant(column: pa.Array) -> tuple[Int64, Bool]:
    """Return a time column as int64 micros since the epoch (floored).

    Timestamps of any unit and zone (without zone: UTC), dates (their midnight), whole numbers of
    micros, or RFC 3339 text, which may be a date alone.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_timestamp(kind):
        ok = valid_of(column)
        ticks = values_of(_fill(column.cast(pa.int64()), ok, 0))
        if kind.unit == "ns":
            return ticks // 1000, ok
        factor = _PER_MICRO[kind.unit]
        limit = np.iinfo(np.int64).max // factor
        fits = (ticks >= -limit) & (ticks <= limit)
        return np.where(fits, ticks, 0) * factor, ok & fits
    if pa.types.is_date64(kind):
        return instant(column.cast(pa.int64()).cast(pa.timestamp("ms")))
    if pa.types.is_date32(kind):
        ok = valid_of(column)
        days = values_of(_fill(column.cast(pa.int32()), ok, 0))
        fits = (days > -(10**8)) & (days < 10**8)
        return np.where(fits, days, 0).astype(np.int64) * 86_400_000_000, ok & fits
    if pa.types.is_integer(kind):
        integers, ok = _integers(column)
        return values_of(integers), ok
    if pa.types.is_string(kind):
        return _parse_times(column)
    return np.zeros(len(column), np.int64), np.zeros(len(column), np.bool_)


def _parse_times(column: pa.Array) -> tuple[Int64, Bool]:
    ok = valid_of(column) & mask_of(pc.match_substring_regex(column, _TIME_TEXT))
    # Arrow knows a year 0, the slow way below does not: neither may decide.
    ok &= ~mask_of(pc.starts_with(column, "0000"))
    text = _fill(column, ok, "1970-01-01T00:00:00Z")
    dates = pc.equal(pc.binary_length(text), _DATE_TEXT)
    if pc.any(dates).as_py():
        text = pc.if_else(dates, pc.binary_join_element_wise(text, "T00:00", ""), text)
    if not pc.all(pc.ends_with(text, "Z")).as_py():
        zoned = mask_of(pc.match_substring_regex(text, ZONED))
        text = pc.if_else(mask(zoned), text, pc.binary_join_element_wise(text, "Z", ""))
    if (values_of(pc.binary_length(text)) > _MICROS_TEXT).any():
        text = pc.replace_substring_regex(text, r"(\.[0-9]{6})[0-9]+", r"\1")
    try:
        ticks = text.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        return values_of(ticks), ok
    except pa.ArrowInvalid:
        return _parse_times_one_by_one(text, ok)


def _parse_times_one_by_one(column: pa.Array, ok: Bool) -> tuple[Int64, Bool]:
    """Only reached when some row looks like a time but is none (a 13th month)."""
    ticks, ok = np.zeros(len(column), np.int64), ok.copy()
    for row, text in enumerate(column.to_pylist()):
        try:
            since = datetime.fromisoformat(text) - EPOCH
            ticks[row] = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
        except (ValueError, OverflowError):
            ok[row] = False
    return ticks, ok


def _floats(column: pa.Array) -> Float64:
    """Floats; NaN where they are NULL."""
    values = values_of(column)
    return values if not column.null_count else np.where(valid_of(column), values, np.nan)


def _short(raw: pa.Array) -> Bool:
    return valid_of(raw) & (values_of(pc.binary_length(raw)) <= MAX_KEY_BYTES)


def _fill(column: pa.Array, ok: Bool, filler: int | str | bytes) -> pa.Array:
    if ok.all() and column.null_count == 0:
        return column
    return pc.if_else(mask(ok), column, constant(filler, column.type))


def _none(column: pa.Array, kind: pa.DataType, filler: object) -> tuple[pa.Array, Bool]:
    size = len(column)
    return pa.array([filler] * size, kind), np.zeros(size, np.bool_)


_Reader = Callable[[pa.Array], tuple[pa.Array, Bool]]
#: Identities of a declared type: by Arrow's own type, and of columns in a plain layout.
_OF_TYPED: dict[str, _Reader] = {"date": _dates, "timestamp": _instants, "decimal": _decimals}
_OF_PLAIN: dict[str, _Reader] = {"string": _text, "bool": _booleans}
