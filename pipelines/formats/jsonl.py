"""JSON: one text (a line of a file, or a message) is one object, and none changes another.

Every column comes out as string: JSON strings as they are, numbers and booleans as their
shortest JSON text, so that the next stage reads all text sources alike.  A text is decoded by
itself, or by the same decoder with its neighbours where each is one object (see
`Objects.decode_together`); a parser that infers types from a block would let one number where
others have strings decide about its neighbours.

A byte order mark before a text is dropped: of any text, so that it does not matter which one a
file begins with.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter, methodcaller
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Int32, UInt8
from dpstream.pipelines.formats.lines import (
    BOM,
    MAX_LINE_BYTES,
    Lines,
    bytes_of,
    line_blocks,
    lines_of,
    too_long,
)
from dpstream.pipelines.formats.rows import Part, Refused, runs

#: Deepest nesting of a text (the decoder's own limit depends on the caller's stack).
MAX_DEPTH = 200
#: Lines that are decoded together; a malformed one costs its neighbours the time of being decoded
#: one by one.
_LINES = 1 << 12
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_Decoder = msgspec.json.Decoder[Any]
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def read_jsonl(stream: BinaryIO, columns: Sequence[str]) -> Iterator[Part]:
    """Rows and refused positions of a JSON Lines file, in blocks, every column as string."""
    objects = Objects(columns)
    for row, lines in line_blocks(stream):
        parsed = json_lines(lines, objects, columns)
        if parsed.reasons:
            yield Refused(row + parsed.bad, parsed.reasons)
        if parsed.batch is not None:
            yield from runs(row + parsed.good, parsed.batch)


def json_lines(lines: pa.BinaryArray, objects: "Objects", columns: Sequence[str]) -> Lines:
    """What lines become, each on its own; ``objects`` decodes ``columns``.

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

    An absent field is null; a needed field that is an array or an object makes the text
    malformed; of a repeated field the last one counts.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._fields = [f"f{i}" for i in range(len(columns))]
        scalar = str | int | float | bool | None
        row_type = msgspec.defstruct(
            "Row",
            [(f, scalar, None) for f in self._fields],
            rename=dict(zip(self._fields, columns, strict=True)),
            gc=False,  # scalars only: no cycles
        )
        self._decoder = _Decoder(row_type)

    def decode(self, texts: list[bytes], most: int) -> list[Any]:
        """One value per text, ``None`` where it is malformed or longer than ``most`` bytes."""
        if not texts:
            return []
        if _deepest(texts) <= MAX_DEPTH and max(map(len, texts)) <= most:
            try:
                return list(map(self._decoder.decode, texts))
            except _BROKEN:
                pass
        return [_decode_one(self._decoder, text, most) for text in texts]

    def decode_together(self, lines: pa.BinaryArray) -> list[Any] | None:
        """`decode` of lines with their line feeds; ``None`` where that is to be done one by one.

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
        """The columns of decoded values (none of them ``None``)."""
        return [_texts(list(map(attrgetter(f), values))) for f in self._fields]


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


def _deepest(texts: list[bytes]) -> int:
    """An upper bound of the nesting of every text: its opening brackets."""
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
