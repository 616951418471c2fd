"""Rows as lines of JSON or CSV, written a column at a time.

The text of a value is a function of the value and its type alone: msgspec's JSON encoder defines
it for JSON, Arrow's cast to text for CSV.  Both are called on columns, and Arrow joins the texts
of a row, so no Python object is made for a row.  A column with one value (the window, the trigger,
the plan of a release) is written once for all rows.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.pipelines.formats.lines import split

#: Rows that are joined at once: their texts stay in the processor's cache, and memory is bounded.
_ROWS = 1 << 15
#: Offsets of 64 bits, so that no length of a key is too long for the texts of a block.
_TEXT = pa.large_binary()


def json_lines(batch: pa.RecordBatch) -> bytes:
    """Each row as one JSON object with a line feed.

    Bytes are hex digits, times RFC 3339, and numbers that are not finite null.

    Raises:
        UnicodeDecodeError: a text is not UTF-8 (a lone surrogate has no UTF-8).
    """
    names = [msgspec.json.encode(name) + b":" for name in batch.schema.names]
    before = [b"{" + name if number == 0 else b"," + name for number, name in enumerate(names)]
    return b"".join(_lines(batch, before, b"}\n", _json_texts))


def csv_lines(batch: pa.RecordBatch) -> bytes:
    """A line of column names, and each row as one line; the bytes of Arrow's CSV writer.

    Text is between quotes, bytes are hex digits, and null is an empty field without quotes.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8, or a type has no text in Arrow.
    """
    header = b",".join(_quoted(pa.array(batch.schema.names, pa.string())).to_pylist())
    before = [b"" if number == 0 else b"," for number in range(batch.num_columns)]
    return header + b"\n" + b"".join(_lines(batch, before, b"\n", _csv_texts))


def hex_digits(column: pa.Array) -> pa.StringArray:
    """Bytes as text of hex digits; null stays null.

    Args:
        column: (n,) binary of any width.
    """
    column = pa.concat_arrays([column.cast(pa.binary())])  # begins at the first byte of its buffers
    validity, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[: len(column) + 1] if len(column) else np.zeros(1)
    digits = data.to_pybytes().hex().encode() if data is not None else b""
    buffers = [validity, pa.py_buffer(2 * ends.astype(np.int32)), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(column), buffers)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds bytes, which text formats write as hex digits."""
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _lines(
    batch: pa.RecordBatch,
    before: Sequence[bytes],
    end: bytes,
    texts: Callable[[pa.Array], pa.Array],
) -> Iterator[bytes]:
    """The rows' lines, some at a time: before each value its ``before``, then ``end``."""
    for begin in range(0, batch.num_rows, _ROWS):
        part = batch.slice(begin, _ROWS)
        pieces, literal = list[pa.Array | bytes](), b""
        for start, column in zip(before, part.columns, strict=True):
            literal += start
            if _is_constant(column):
                literal += texts(column[:1])[0].as_py()
            else:
                pieces += [literal, texts(column).cast(_TEXT)]
                literal = b""
        if pieces:
            yield _content(_joined(*pieces, literal + end))
        else:
            yield (literal + end) * part.num_rows


def _joined(*pieces: pa.LargeBinaryArray | bytes) -> pa.LargeBinaryArray:
    """Texts of each row one after the other; bytes are the same in all rows."""
    typed = [pa.scalar(p, _TEXT) if isinstance(p, bytes) else p for p in pieces]
    return pc.binary_join_element_wise(*typed, pa.scalar(b"", _TEXT))


def _content(lines: pa.LargeBinaryArray) -> bytes:
    """All values one after the other."""
    ends = np.frombuffer(lines.buffers()[1], np.int64)
    return bytes(memoryview(lines.buffers()[2])[ends[0] : ends[len(lines)]])


def _is_constant(column: pa.Array) -> bool:
    """Whether all rows have the same value, to the bit."""
    if column.null_count:
        return bool(column.null_count == len(column))
    if len(column) == 1 or pa.types.is_nested(column.type):
        return len(column) == 1
    if pa.types.is_floating(column.type):  # 0.0 and -0.0 are equal and have two texts
        column = column.view(f"int{column.type.bit_width}")
    return bool(pc.all(pc.equal(column, column[0])).as_py())


def _of_distinct(column: pa.Array, texts: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """``texts`` of each distinct value once: for types of few values that are slow to write."""
    coded = column.dictionary_encode(null_encoding="encode")
    return texts(coded.dictionary).take(coded.indices)


def _json_texts(column: pa.Array) -> pa.Array:
    """(n,) JSON texts of the values, none of them null."""
    if is_bytes(column.type):
        column = hex_digits(column)
    if pa.types.is_temporal(column.type):
        return _of_distinct(column, _encoded)
    return _encoded(column)


def _encoded(column: pa.Array) -> pa.BinaryArray:
    """Every value by msgspec, which writes no line feed into a value."""
    lines, _ = split(msgspec.json.Encoder().encode_lines(column.to_pylist()))
    return pc.binary_slice(lines, 0, -1)


def _csv_texts(column: pa.Array) -> pa.Array:
    """(n,) fields of CSV, none of them null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_bytes(column.type):
        column = hex_digits(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column.validate(full=True)
        texts = _quoted(column)
    elif pa.types.is_temporal(column.type):
        texts = _of_distinct(column, lambda values: values.cast(pa.string()))
    else:
        texts = column.cast(pa.string())
    return pc.fill_null(texts.cast(_TEXT), b"")


def _quoted(column: pa.StringArray) -> pa.Array:
    """Text between quotes, a quote in it twice."""
    doubled = pc.replace_substring(column.cast(_TEXT), '"', '""')
    return _joined(b'"', doubled, b'"')
