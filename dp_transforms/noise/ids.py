"""Keyed 128-bit ids of units and keys: MACs of their typed, length-prefixed canonical form.

A row's message is (length, context) and then, for each field in the declared order, a tag of one
byte, the length of its data in four bytes, and the data; it is padded with zeros to whole blocks.
The length of the whole comes first, so no message is another's beginning (a CBC-MAC needs that),
and tags and lengths make the message injective: two rows have one message only if they agree in
context, number of fields, and kind and value of each.

| kind | tag | data |
| --- | --- | --- |
| ``string`` | s | UTF-8 of the NFC text |
| ``bytes`` | y | the bytes |
| ``int`` | i | int64 |
| ``bool`` | b | 0 or 1 as int64 |
| ``date`` | d | days since 1970-01-01 as int64 |
| ``timestamp`` | t | seconds since the epoch, floored, and nanoseconds of the second, as int64 |
| ``decimal`` | m | exponent e as int32 and significand s as int256, of the value s * 10^e |
| NULL of a kind | n | the kind's tag |

Integers are little-endian two's complements.  A value has one form, whatever Arrow type it came
in: 1.50 at scale 2 and 1.5 at scale 1 are both (-1, 15), because s is no multiple of ten (and
zero is (0, 0)); a time in seconds has no nanoseconds.  Widths, dictionaries, chunks and views are
undone before (``columns.identity``).  Kinds never collide: the int 1, the decimal 1, true and
"1" are four ids, midnight of a day is not the day, and the NULL of a string is not that of an int.

A row's message depends on that row alone: a column with some nulls is encoded in two parts, and
the rows of values get the ids that they have without their neighbours.

Messages are assembled by numpy where all have one length, else by Arrow, which copies bytes about
as fast as a compiled loop.  So a question that needs ids does not wait for the compiler.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.libraries import njit
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.state.numbers import arrow_numbers, valid_of, values_of

Bytes = npt.NDArray[np.uint8]
#: A component, as (type tag, data bytes, (n+1,) offsets of its rows).
Component = tuple[int, Bytes, Int64]
_BLOCK = 16
#: What stands before a component's data, and before that of a row's first one.
_PREFIX = np.dtype([("tag", "u1"), ("width", "<u4")])
_FIRST = np.dtype([("size", "<u8"), ("context", "<i8"), *_PREFIX.descr])
Words = npt.NDArray[np.uint32]
#: Bytes of the messages that are worked on together: what fits the processor's cache.
_BYTES_AT_ONCE = 1 << 20
_TAGS = {
    **{"string": ord("s"), "int": ord("i"), "bool": ord("b"), "bytes": ord("y")},
    **{"date": ord("d"), "timestamp": ord("t"), "decimal": ord("m")},
}
_NULL = ord("n")
#: What an id can be made of; a stream's fields have the first four (``plan.FieldType``).
ID_KINDS = tuple(_TAGS)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_NANOS = 1_000_000_000
#: A significand is 8 words of 32 bits; the exponent stands before it.
_WORDS = 8


def frame(context: Int64, components: Sequence[Component]) -> tuple[Ids, Int64]:
    """Return length-prefixed, typed rows as blocks for ``Prf.mac``.

    Args:
        context: (n,) int64 mixed into the first block (a privacy period, or 0).
        components: for each column (type tag, data bytes, (n+1,) offsets).

    Returns:
        (blocks, lengths): the first block of a row is (total bytes, context).
    """
    rows, widths = len(context), [np.diff(offsets) for _, _, offsets in components]
    alike = rows > 0 and all((width == width[0]).all() for width in widths)
    if alike:  # one row's arithmetic is all rows'
        widths = [width[:1] for width in widths]
    size = np.full(len(widths[0]), len(components) * _PREFIX.itemsize)
    for width in widths:
        size += width
    blocks = (size + (_BLOCK - 1)) // _BLOCK
    prefixes = [np.empty(rows, _PREFIX if number else _FIRST) for number in range(len(components))]
    prefixes[0]["size"], prefixes[0]["context"] = size, context
    for prefix, width, (tag, _, _) in zip(prefixes, widths, components, strict=True):
        prefix["tag"], prefix["width"] = tag, width
    if alike:
        lengths = np.full(rows, 1 + blocks[0])
        return _of_one_width(prefixes, components, int(lengths[0])), lengths
    return _joined(prefixes, components, _BLOCK * blocks - size), 1 + blocks


def _bytes(prefix: npt.NDArray[np.void]) -> Bytes:
    return prefix.view(np.uint8)


def _of_one_width(
    prefixes: Sequence[npt.NDArray[np.void]], components: Sequence[Component], blocks: int
) -> Ids:
    """Rows of so many blocks, whose components have one width each."""
    rows, at = len(prefixes[0]), 0
    message = np.zeros((rows, 2 * blocks), np.uint64)
    out = message.view(np.uint8)
    for prefix, (_, data, offsets) in zip(prefixes, components, strict=True):
        for part in (_bytes(prefix), data[offsets[0] : offsets[-1]]):
            width = len(part) // rows
            out[:, at : at + width] = part.reshape(rows, width)
            at += width
    return message.reshape(-1, 2)


def _joined(
    prefixes: Sequence[npt.NDArray[np.void]], components: Sequence[Component], padding: Int64
) -> Ids:
    """Rows of any widths; ``padding``: (n,) zero bytes at the end of each."""
    rows, parts = len(padding), list[tuple[Bytes, Int64]]()
    for prefix, (_, data, offsets) in zip(prefixes, components, strict=True):
        parts += [(_bytes(prefix), np.arange(rows + 1) * prefix.itemsize), (data, offsets)]
    ends = np.zeros(rows + 1, np.int64)
    np.cumsum(padding, out=ends[1:])
    parts.append((np.zeros(int(ends[-1]), np.uint8), ends))
    total = sum(int(offsets[-1] - offsets[0]) for _, offsets in parts)
    largest = max(total, *(int(offsets[-1]) for _, offsets in parts))
    kind, index = (pa.binary(), np.int32) if largest < 1 << 31 else (pa.large_binary(), np.int64)
    columns = []
    for data, offsets in parts:
        buffers = [None, pa.py_buffer(offsets.astype(index)), pa.py_buffer(data)]
        columns.append(pa.Array.from_buffers(kind, rows, buffers))
    joined = pc.binary_join_element_wise(*columns, pa.scalar(b"", kind))
    return np.frombuffer(joined.buffers()[2] or b"", np.uint64, total // 8).reshape(-1, 2)


def typed_ids(
    prf: Prf, fields: Sequence[tuple[str, pa.Array]], context: Int64 | None = None
) -> Ids:
    """Return keyed 128-bit ids of typed, length-prefixed rows.

    Args:
        prf: AES under the id key of the purpose.
        fields: (declared kind, canonical column) of each component (``columns.identity``).
        context: (n,) int64 that is part of the identity (the privacy period).
    """
    rows = len(fields[0][1])
    if context is None:
        context = np.zeros(rows, np.int64)
    # A block for the length, and each component with its tag and length, rounded up.
    size = 32 * rows + sum(column.nbytes for _, column in fields)
    at_once = max(1, _BYTES_AT_ONCE * rows // size) if rows else 1
    if rows <= at_once:
        return _typed_ids(prf, fields, context)
    ids = np.empty((rows, 2), np.uint64)
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        parts = [(kind, column[part]) for kind, column in fields]
        ids[part] = _typed_ids(prf, parts, context[part])
    return ids


def _typed_ids(prf: Prf, fields: Sequence[tuple[str, pa.Array]], context: Int64) -> Ids:
    if not any(column.null_count for _, column in fields):
        return _ids(prf, [(_TAGS[kind], *_data(kind, column)) for kind, column in fields], context)
    # Which fields are null, as bits: rows of one pattern are encoded together.
    pattern = np.zeros(len(context), np.int64)
    for bit, (_, column) in enumerate(fields):
        pattern |= (~valid_of(column)).astype(np.int64) << bit
    ids = np.empty((len(context), 2), np.uint64)
    for nulls in np.unique(pattern):
        rows = np.flatnonzero(pattern == nulls)
        parts = []
        for bit, (kind, column) in enumerate(fields):
            if nulls >> bit & 1:
                tags = np.full(len(rows), _TAGS[kind], np.uint8)
                parts.append((_NULL, tags, np.arange(len(rows) + 1)))
            else:
                parts.append((_TAGS[kind], *_data(kind, column.take(arrow_numbers(rows)))))
        ids[rows] = _ids(prf, parts, context[rows])
    return ids


def _ids(prf: Prf, parts: Sequence[tuple[int, Bytes, Int64]], context: Int64) -> Ids:
    message, lengths = frame(context, parts)
    return prf.mac(message, lengths)


def _data(kind: str, column: pa.Array) -> tuple[Bytes, Int64]:
    """Data bytes of a column without nulls, and where each row's begin and the last's end."""
    rows = len(column)
    if kind in ("string", "bytes"):
        _, offset_buffer, data_buffer = column.buffers()
        ends = np.frombuffer(offset_buffer, np.int32)
        offsets = ends[column.offset : column.offset + rows + 1].astype(np.int64)
        return np.frombuffer(data_buffer or b"", np.uint8), offsets
    data: npt.NDArray[Any]
    if kind == "timestamp":
        data = _seconds_and_nanos(column)
    elif kind == "decimal":
        data = _reduced(column)
    else:
        numeric = column.cast(pa.int32()) if kind == "date" else column
        data = np.ascontiguousarray(values_of(numeric.cast(pa.int64())))
    size = data.nbytes // rows if rows else 0
    return data.view(np.uint8).reshape(-1), np.arange(rows + 1, dtype=np.int64) * size


def _seconds_and_nanos(column: pa.Array) -> Int64:
    """(n, 2): floored, so that one instant has one form before 1970 as well."""
    per = _PER_SECOND[column.type.unit]
    ticks = values_of(column.cast(pa.int64()))
    out = np.empty((len(ticks), 2), np.int64)
    out[:, 0] = ticks // per
    out[:, 1] = (ticks - out[:, 0] * per) * (_NANOS // per)
    return out


def _reduced(column: pa.Array) -> Words:
    """(n, 9) exponent and significand without factors of ten."""
    words = column.type.bit_width // 32
    raw = np.frombuffer(column.buffers()[1] or b"", np.uint32)
    value = raw[words * column.offset :][: words * len(column)].reshape(-1, words)
    out = np.empty((len(column), 1 + _WORDS), np.uint32)
    _reduce(np.ascontiguousarray(value), -column.type.scale, out)
    return out


@njit(cache=True, nogil=True)
def _reduce(value: Words, exponent: int, out: Words) -> None:  # pragma: no cover - compiled
    digit = np.empty(_WORDS, np.int64)
    quotient = np.empty(_WORDS, np.int64)
    mask = np.int64(0xFFFFFFFF)
    width = value.shape[1]
    for i in range(value.shape[0]):
        negative = (np.int64(value[i, width - 1]) >> 31) == 1
        used, carry = 0, np.int64(1)
        for k in range(_WORDS):
            word = np.int64(value[i, k]) if k < width else (mask if negative else np.int64(0))
            if negative:  # its magnitude: inverted, and one more
                word = (word ^ mask) + carry
                carry = word >> 32
                word &= mask
            digit[k] = word
            if word != 0:
                used = k + 1
        power = np.int64(exponent) if used else np.int64(0)
        # First nine factors of ten at once; what they divide ends in nine zero bits.
        for divisor, step, bits in ((1_000_000_000, 9, 511), (10, 1, 1)):
            while used and digit[0] & bits == 0:
                rest = np.int64(0)
                for k in range(used - 1, -1, -1):
                    rest = (rest << 32) | digit[k]
                    quotient[k] = rest // divisor
                    rest -= quotient[k] * divisor
                if rest != 0:
                    break
                for k in range(used):
                    digit[k] = quotient[k]
                while digit[used - 1] == 0:
                    used -= 1
                power += step
        out[i, 0] = np.uint32(power & mask)
        carry = np.int64(1)
        for k in range(_WORDS):
            word = digit[k]
            if negative:
                word = (word ^ mask) + carry
                carry = word >> 32
                word &= mask
            out[i, 1 + k] = np.uint32(word)


def key_ids(plan: Plan, prf: Prf, batch: pa.RecordBatch) -> Ids:
    """Return (n, 2) ids of the key columns of canonical rows.

    They are computed once, in BOUND, and go with the admitted pairs.  Records without them hold 16
    bytes less each for as long as they are buffered: 0.9 GB for 59 million.
    """
    return typed_ids(prf, [(f.type, batch.column(f.column)) for f in plan.key])
