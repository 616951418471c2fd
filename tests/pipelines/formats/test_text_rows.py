"""Rows as lines of text: what Python's json module and Arrow's CSV writer make of the same rows."""

import datetime as dt
import decimal
import io
import json
import math
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import csv as pacsv

from dpstream.pipelines.formats import text_rows
from dpstream.pipelines.formats.text_rows import csv_lines, hex_digits, json_lines

UTC = dt.UTC
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("\0\x01\b\t\n\f\r\x1f\x7f\"\\/'=,\x85\u2028é\ufeff\U0001f600"),
)
MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1e16, 1e-5, 5e-324, 0.1, 123456789.0, 1e22])
COLUMNS = [
    ("text", pa.string(), st.text(CHARACTERS, max_size=5)),
    ("bytes", pa.binary(), st.binary(max_size=4)),
    ("id", pa.binary(16), st.binary(min_size=16, max_size=16)),
    ("int", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ("small", pa.int32(), st.integers(-2, 2)),
    ("unsigned", pa.uint64(), st.integers(0, 2**64 - 1)),
    ("float", pa.float64(), FLOATS),
    ("single", pa.float32(), st.floats(width=32)),
    ("bool", pa.bool_(), st.booleans()),
    ("time", pa.timestamp("us", "UTC"), MICROS),
    ("local", pa.timestamp("us"), MICROS),
    ("day", pa.date32(), st.dates()),
    ("price", pa.decimal128(9, 2), st.decimals(-9999, 9999, places=2)),
    ("none", pa.null(), st.none()),
    ('na"me\n,é', pa.int8(), st.integers(-128, 127)),
    ("code", pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a,b", "c\nd", 'e"f'])),
]  # fmt: skip
SCHEMA = pa.schema([(name, kind) for name, kind, _ in COLUMNS])
#: Few distinct values come up often, so that columns of one value do.
ROWS = st.lists(st.tuples(*(st.none() | values for *_, values in COLUMNS)), max_size=6)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    arrays = [pa.array(list(c), kind) for c, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def json_text(value: Any) -> str:
    """The text of a value that is no float, by definition."""
    if isinstance(value, dt.datetime):
        return json_text(value.isoformat().replace("+00:00", "Z"))
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    if isinstance(value, dt.date | decimal.Decimal):
        return f'"{value}"'
    return json.dumps(value, ensure_ascii=False)


def digits(text: str) -> str:
    """Significant digits of a number's text."""
    return text.lower().partition("e")[0].replace(".", "").lstrip("-0").rstrip("0")


def check_float(text: str, value: float | None) -> None:
    """The shortest text that reads back as the number; null where there is none."""
    if value is None or not math.isfinite(value):
        assert text == "null"
    else:
        assert struct.pack("d", float(text)) == struct.pack("d", value)
        assert digits(text) == digits(repr(value)) and len(text) <= 24


@given(ROWS, st.sampled_from([1, 2, 3, 100]))
@example([], 1)
@example([(None,) * len(SCHEMA)] * 2, 100)
@settings(deadline=None)
def test_json_is_what_pythons_json_writes(rows: list[tuple[Any, ...]], at_once: int) -> None:
    batch = batch_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "_ROWS", at_once)
        written = json_lines(batch)
    assert written == json_lines(batch)
    lines = written.decode().split("\n")
    assert lines.pop() == "" and len(lines) == len(rows)
    for line, row in zip(lines, batch.to_pylist(), strict=True):
        fields = json.loads(line, parse_float=lambda text: f"#{text}")
        texts = []
        for name, value in row.items():
            read = fields[name]
            if pa.types.is_floating(SCHEMA.field(name).type):
                text = "null" if read is None else str(read).removeprefix("#")
                check_float(text, value)
            else:
                text = json_text(value)
            texts.append(f"{json_text(name)}:{text}")
        assert line == "{" + ",".join(texts) + "}"


@given(ROWS, st.sampled_from([1, 2, 3, 100]))
@example([], 1)
@settings(deadline=None)
def test_csv_is_what_arrow_writes(rows: list[tuple[Any, ...]], at_once: int) -> None:
    batch = batch_of(rows)
    columns = [hex_digits(c) if text_rows.is_bytes(c.type) else c for c in batch.columns]
    buffer = io.BytesIO()
    pacsv.write_csv(pa.RecordBatch.from_arrays(columns, SCHEMA.names), buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "_ROWS", at_once)
        assert csv_lines(batch) == buffer.getvalue()


@pytest.mark.parametrize("write", [json_lines, csv_lines])
def test_rows_of_a_slice_are_written_alone(write: Any) -> None:
    rows = [(f"k{n}", b"%d" % n, bytes([n]) * 16, *[None] * 13) for n in range(9)]
    part = batch_of(rows).slice(3, 4)
    assert write(part) == write(batch_of(rows[3:7]))


def test_zeros_keep_their_signs() -> None:
    batch = pa.record_batch({"x": [0.0, -0.0, 0.0]})
    assert json_lines(batch) == b'{"x":0.0}\n{"x":-0.0}\n{"x":0.0}\n'


@pytest.mark.parametrize("write", [json_lines, csv_lines])
@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"\xff", b"a\xc3"])
def test_what_is_not_utf8_is_refused(write: Any, text: bytes) -> None:
    for texts in ([text], [b"a", text]):
        column = pa.array(texts, pa.binary()).view(pa.string())
        with pytest.raises(ValueError, match=r"(?i)utf-?8"):
            write(pa.record_batch({"key": column}))


@given(st.lists(st.none() | st.binary(max_size=5)), st.integers(0, 3))
@settings(deadline=None)
def test_hex_digits(values: list[bytes | None], begin: int) -> None:
    texts = hex_digits(pa.array(values, pa.binary())[begin:])
    texts.validate(full=True)
    assert texts.to_pylist() == [v if v is None else v.hex() for v in values[begin:]]
