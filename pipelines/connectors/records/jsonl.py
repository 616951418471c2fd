"""JSON: one text (a line of a file, or a message) is one object, and none changes another.

Every column comes out as string: JSON strings as they are, numbers and booleans as their
shortest JSON text, so that the next stage reads all text sources alike.  Texts are
decoded one by one (in C); a parser of whole blocks would let one malformed line, or one number
where others have strings, decide about its neighbours.

A byte order mark before a text is dropped: of any text, so that it does not matter which one a
file begins with.
"""

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter, methodcaller
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.pipelines.connectors.records.lines import (
    BOM,
    MAX_LINE_BYTES,
    Lines,
    line_blocks,
    lines_of,
    too_long,
)
from dpstream.pipelines.connectors.records.rows import Part, Refused, runs

#: Deepest nesting of a text (the decoder's own limit depends on the caller's stack).
MAX_DEPTH = 200
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_Decoder = msgspec.json.Decoder[Any]
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def read_jsonl(stream: BinaryIO, columns: Sequence[str]) -> Iterator[Part]:
    """Rows and refused positions of a JSON Lines file, in blocks, every column as string."""
    objects = Objects(columns)
    for row, lines in line_blocks(stream):
        found = json_lines(lines, objects, columns)
        if found.reasons:
            yield Refused(row + found.bad, found.reasons)
        if found.batch is not None:
            yield from runs(row + found.good, found.batch)


def json_lines(lines: pa.BinaryArray, objects: "Objects", columns: Sequence[str]) -> Lines:
    """What lines become, each on its own; ``objects`` decodes ``columns``."""
    values, batch = objects.decode(lines.to_pylist(), MAX_LINE_BYTES + 1), None
    good = np.ones(len(values), np.bool_)
    if None in values:
        good = np.array([v is not None for v in values])
        values = [v for v in values if v is not None]
    if values:
        batch = pa.RecordBatch.from_arrays(objects.arrays(values), list(columns))
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

    def arrays(self, values: list[Any]) -> list[pa.StringArray]:
        """The columns of decoded values (none of them ``None``)."""
        return [_texts(list(map(attrgetter(f), values))) for f in self._fields]


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
    if str not in kinds:
        lines = msgspec.json.Encoder().encode_lines(values).split(b"\n")[:-1]
        texts = pa.array(lines, pa.binary()).view(pa.string())
        return pc.if_else(pc.equal(texts, "null"), None, texts)
    encode = msgspec.json.encode
    return pa.array(
        [v if v is None or isinstance(v, str) else encode(v).decode() for v in values], pa.string()
    )
