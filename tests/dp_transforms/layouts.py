"""Arrow layouts of the same rows, and what a row's text should become."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

#: What a test expects of a row that has no canonical form.
BAD = "no canonical form"
Layout = Callable[[Sequence[Any]], pa.Array]


def raw(kind: pa.DataType) -> Layout:
    """Text or bytes without any check of the content."""

    def build(values: Sequence[bytes | None]) -> pa.Array:
        ends = np.cumsum([0] + [len(v or b"") for v in values]).astype(np.int32)
        valid = np.packbits([v is not None for v in values], bitorder="little")
        data = pa.py_buffer(b"".join(v or b"" for v in values))
        buffers = [pa.py_buffer(valid.tobytes()), pa.py_buffer(ends), data]
        return pa.Array.from_buffers(kind, len(values), buffers)

    return build


def cast(kind: pa.DataType, then: pa.DataType | None = None) -> Layout:
    def build(values: Sequence[Any]) -> pa.Array:
        array = pa.array(values, kind)
        return array if then is None else array.cast(then)

    return build


def coded(kind: pa.DataType) -> Layout:
    return lambda values: pa.array(values, kind).dictionary_encode()


def sliced(layout: Layout) -> Layout:
    """The same rows in the middle of a longer array."""

    def build(values: Sequence[Any]) -> pa.Array:
        padded = [*values[-1:], *values, *values[:1]]
        return layout(padded).slice(1, len(values))

    return build


def ticks(kind: pa.DataType, width: pa.DataType) -> Layout:
    return lambda values: pa.array(values, width).view(kind)


TEXT_LAYOUTS: dict[str, Layout] = {
    "string": cast(pa.string()),
    "large": cast(pa.large_string()),
    "view": cast(pa.string_view()),
    "dictionary": coded(pa.string()),
    "large dictionary": coded(pa.large_string()),
}
BYTE_LAYOUTS: dict[str, Layout] = {
    "binary": cast(pa.binary()),
    "large": cast(pa.large_binary()),
    "view": cast(pa.binary_view()),
    "text without check": raw(pa.string()),
    "dictionary": coded(pa.binary()),
}


def text_expected(value: str | bytes | None) -> str:
    if value is None:
        return BAD
    try:
        encoded = value.encode() if isinstance(value, str) else value
        normal = unicodedata.normalize("NFC", encoded.decode("utf-8"))
    except UnicodeError:
        return BAD
    return normal if max(len(encoded), len(normal.encode())) <= 1024 else BAD
