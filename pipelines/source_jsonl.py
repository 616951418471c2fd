"""JSON Lines: one line is one object, and no line can change what another becomes.

Every column comes out as string: JSON strings as they are, numbers and booleans as their
shortest JSON text, so that the next stage reads all text sources alike.  Lines are decoded
one by one (in C); a parser of whole blocks would let one malformed line, or one number where
others have strings, decide about its neighbours.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter, methodcaller
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.source_lines import MAX_LINE_BYTES, line_blocks, refused_lines, too_long
from pipelines.source_rows import Part, runs

#: Deepest nesting of a line (the decoder's own limit depends on the caller's stack).
MAX_DEPTH = 200
_Decoder = msgspec.json.Decoder[Any]
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def read_jsonl(stream: BinaryIO, columns: Sequence[str]) -> Iterator[Part]:
    """Rows and refused positions of a JSON Lines file, in blocks, every column as string.

    A line is one object.  An absent field is null; a needed field that is an array or an
    object makes the line malformed; of a repeated field the last one counts.
    """
    fields = [f"f{i}" for i in range(len(columns))]
    scalar = str | int | float | bool | None
    line_type = msgspec.defstruct(
        "Line",
        [(f, scalar, None) for f in fields],
        rename=dict(zip(fields, columns, strict=True)),
    )
    decoder = _Decoder(line_type)
    for row, lines in line_blocks(stream):
        values = _decode(decoder, lines)
        good = np.ones(len(values), np.bool_)
        if None in values:
            good = np.array([v is not None for v in values])
            yield refused_lines(row, ~good, np.zeros_like(good), too_long(lines))
            values = [v for v in values if v is not None]
        if values:
            arrays = [_texts(list(map(attrgetter(f), values))) for f in fields]
            batch = pa.RecordBatch.from_arrays(arrays, list(columns))
            yield from runs(row + np.flatnonzero(good), batch)


def _decode(decoder: _Decoder, lines: pa.BinaryArray) -> list[Any]:
    """One decoded struct per line, ``None`` where it is malformed."""
    texts = lines.to_pylist()
    if _deepest(texts) <= MAX_DEPTH and max(map(len, texts)) <= MAX_LINE_BYTES + 1:
        try:
            return list(map(decoder.decode, texts))
        except _BROKEN:
            pass
    return [_decode_line(decoder, text) for text in texts]


def _deepest(texts: list[bytes]) -> int:
    """An upper bound of the nesting of every line: its opening brackets."""
    squares = map(methodcaller("count", b"["), texts)
    return max(map(int.__add__, squares, map(methodcaller("count", b"{"), texts)))


def _decode_line(decoder: _Decoder, text: bytes) -> Any:
    """One line on its own: the same decoder, so the same outcome in any company."""
    if len(text) > MAX_LINE_BYTES + 1:
        return None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        code = np.frombuffer(text, np.uint8)
        step = np.isin(code, [91, 123]).astype(np.int32) - np.isin(code, [93, 125])
        if step.cumsum().max() > MAX_DEPTH:
            return None
    try:
        return decoder.decode(text)
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
