"""Columns as they arrive: every spelling of a row has one meaning, whatever stands beside it."""

import datetime
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.dp_transforms.ingest import columns
from tests.dp_transforms.runs import (
    BAD,
    BYTE_LAYOUTS,
    TEXT_LAYOUTS,
    Layout,
    cast,
    coded,
    sliced,
    text_expected,
    ticks,
)


def rows_of(pool: Sequence[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(pool), min_size=1, max_size=12)


def check_rows(
    read: Callable[[pa.Array], tuple[Any, np.ndarray]],
    layout: Layout,
    values: Sequence[Any],
    expected: Callable[[Any], Any],
) -> None:
    for build in (layout, sliced(layout)):
        column, ok = read(build(values))
        plain = column.tolist()
        got = [v if good else BAD for v, good in zip(plain, ok, strict=True)]
        assert got == [expected(v) for v in values]


# --- identities ------------------------------------------------------------------------

WORDS = [
    "",
    "a",
    "A",
    " a",
    "a\0",
    "\0",
    "\u00e9",
    "e\u0301",
    "\u212b",
    "\u1112\u1161\u11ab",
    "\U0001f600",
    "x" * 1024,
    "x" * 1025,
    "e\u0301" * 341,
    "\u0958" * 341,  # NFC makes it longer than the limit
    "nan",
    "1",
    None,
]


@pytest.mark.parametrize("layout", TEXT_LAYOUTS.values(), ids=list(TEXT_LAYOUTS))
@settings(max_examples=40)
@given(values=rows_of(WORDS) | st.lists(st.text("ae\u0301\u0327\0\u0958", max_size=5), min_size=1))
def test_text(layout: Layout, values: list[str | None]) -> None:
    check_rows(lambda a: columns.identity(a, "string"), layout, values, text_expected)


BLOBS = [
    b"",
    b"ok",
    b"\xff",
    b"\xed\xa0\x80",  # a lone surrogate
    b"\xc0\x80",  # NUL, overlong
    b"\xf4\x90\x80\x80",  # beyond Unicode
    b"caf\xc3",
    b"\xc3\xa9",
    b"e\xcc\x81",
    b"x" * 1025,
    None,
]


@pytest.mark.parametrize("layout", BYTE_LAYOUTS.values(), ids=list(BYTE_LAYOUTS))
@settings(max_examples=40)
@given(values=rows_of(BLOBS))
def test_bytes_as_text_and_as_bytes(layout: Layout, values: list[bytes | None]) -> None:
    check_rows(lambda a: columns.identity(a, "string"), layout, values, text_expected)
    check_rows(
        lambda a: columns.identity(a, "bytes"),
        layout,
        values,
        lambda v: BAD if v is None or len(v) > 1024 else v,
    )


LIMIT = 2**63
INT_LAYOUTS: list[tuple[str, Layout, list[Any]]] = [
    ("int64", cast(pa.int64()), [0, 1, -1, LIMIT - 1, -LIMIT, None]),
    ("int8", cast(pa.int8()), [0, -128, 127, None]),
    ("uint64", cast(pa.uint64()), [0, LIMIT - 1, LIMIT, 2 * LIMIT - 1, None]),
    (
        "float64",
        cast(pa.float64()),
        [0.0, -0.0, 1.0, 1.5, 2.0**53 - 1, 2.0**53, 1e300, math.inf, -math.inf, 5e-324, None],
    ),
    ("decimal", cast(pa.decimal128(38, 1)), [Decimal(7), Decimal("7.5"), Decimal(2**53 + 1), None]),
    ("huge decimal", cast(pa.decimal256(76, 0)), [Decimal(-3), Decimal(10) ** 70, None]),
    ("fine decimal", cast(pa.decimal128(38, 9)), [Decimal(0), Decimal("1E-9"), Decimal(9), None]),
    (
        "text",
        cast(pa.string()),
        [
            "0",
            "-0",
            "+7",
            "007",
            str(LIMIT - 1),
            str(LIMIT),
            str(-LIMIT),
            str(-LIMIT - 1),
            "",
            " 1",
            "1 ",
            "1\n",
            "1.0",
            "1e3",
            "0x1",
            "٣",
            "--1",
            "9" * 19,
            "9" * 20,
            None,
        ],
    ),
    ("digits", cast(pa.string()), ["0", "007", "1", "9" * 18, "9" * 19, "9" * 20]),
    ("beside digits", cast(pa.string()), ["12", "12:30", "7"]),
    ("dictionary", coded(pa.int64()), [3, -3, None]),
    ("coded text", coded(pa.string()), ["3", "x", None]),
]


def int_expected(value: Any) -> Any:
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[+-]?[0-9]{1,19}", value, re.ASCII) else None
        inexact = False
    else:
        inexact = isinstance(value, float)
    if value is None or value != value or abs(value) == math.inf or value != int(value):
        return BAD
    fits = abs(float(value)) < 2.0**53 if inexact else -LIMIT <= value < LIMIT
    return int(value) if fits else BAD


@pytest.mark.parametrize(
    ("layout", "pool"), [case[1:] for case in INT_LAYOUTS], ids=[case[0] for case in INT_LAYOUTS]
)
@settings(max_examples=40)
@given(data=st.data())
def test_integers(layout: Layout, pool: list[Any], data: st.DataObject) -> None:
    values = data.draw(rows_of(pool))
    check_rows(lambda a: columns.identity(a, "int"), layout, values, int_expected)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**63, 2**64 - 1, None], pa.uint64()),
        pa.array(["0", "9223372036854775808", "18446744073709551615", "18446744073709551616"]),
        pa.array([Decimal(0), Decimal(2**63), Decimal(2**64 - 1), Decimal(2**64)]),
    ],
    ids=["uint64", "text", "decimal"],
)
def test_all_64_bits_of_a_unit_count(column: pa.Array) -> None:
    """A key of such a number is none, as it cannot be published as an INT64."""
    unit, ok = columns.unit_identity(column, "int")
    assert unit.to_pylist()[:3] == [0, -(2**63), -1] and ok.tolist() == [True, True, True, False]
    assert columns.identity(column, "int")[1].tolist() == [True, False, False, False]


@settings(max_examples=40)
@given(values=rows_of(["true", "TRUE", "False", "1", "0", "", " true", "yes", None]))
def test_booleans_as_text(values: list[str | None]) -> None:
    expected = {"true": True, "false": False}
    check_rows(
        lambda a: columns.identity(a, "bool"),
        cast(pa.string()),
        values,
        lambda v: BAD if v is None else expected.get(v.lower(), BAD),
    )


WRONG = [
    ("string", pa.array([1])),
    ("string", pa.array([1.0])),
    ("string", pa.array([True])),
    ("string", pa.array([["a"]])),
    ("string", pa.array([{"a": 1}])),
    ("string", pa.nulls(1)),
    ("string", pa.array([datetime.date(2024, 1, 1)])),
    ("int", pa.array([True])),
    ("int", pa.array([b"1"])),
    ("int", pa.array([[1]])),
    ("int", pa.array([datetime.datetime(2024, 1, 1)])),
    ("bool", pa.array([1])),
    ("bool", pa.array([b"true"])),
    ("bytes", pa.array([1])),
    ("bytes", pa.array([["a"]])),
]


@pytest.mark.parametrize(("declared", "array"), WRONG, ids=[f"{d}-{a.type}" for d, a in WRONG])
def test_wrong_types_have_no_identity(declared: str, array: pa.Array) -> None:
    column, ok = columns.identity(array, declared)
    assert not ok.any() and len(column) == len(array) and column.null_count == 0


# --- values ----------------------------------------------------------------------------

VALUE_LAYOUTS: list[tuple[str, Layout, list[Any]]] = [
    (
        "float64",
        cast(pa.float64()),
        [0.0, -0.0, 1.25, -7.5, 5e-324, -5e-324, 1e308, -1e308, math.inf, -math.inf, None],
    ),
    ("float32", cast(pa.float32()), [0.5, -0.0, 3e38, math.inf, None]),
    ("int64", cast(pa.int64()), [0, -3, LIMIT - 1, -LIMIT, None]),
    ("uint64", cast(pa.uint64()), [2, 2 * LIMIT - 1, None]),
    ("decimal", cast(pa.decimal128(38, 2)), [Decimal("1.25"), Decimal("-99999.5"), None]),
    ("huge decimal", cast(pa.decimal256(76, 0)), [Decimal(10) ** 70, Decimal(2), None]),
    (
        "text",
        cast(pa.string()),
        [
            "1.25",
            "-.5",
            "5.",
            "+1e2",
            "1e308",
            "1e999",
            "-1e-400",
            "0" * 40 + ".5",
            "9" * 40,
            "",
            " 1",
            "1\n",
            "nan",
            "NaN",
            "inf",
            "-Infinity",
            "0x10",
            "1_0",
            "1,5",
            "٣",
            None,
        ],
    ),
    ("coded", coded(pa.float64()), [1.5, None]),
    ("coded text", coded(pa.string()), ["1.5", "x", None]),
]
NUMBER = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")


def value_expected(value: Any) -> Any:
    if value is None or (isinstance(value, str) and not NUMBER.fullmatch(value)):
        return BAD
    number = float(value)
    return number if math.isfinite(number) else BAD


@pytest.mark.parametrize(
    ("layout", "pool"),
    [case[1:] for case in VALUE_LAYOUTS],
    ids=[case[0] for case in VALUE_LAYOUTS],
)
@settings(max_examples=40)
@given(data=st.data())
def test_values(layout: Layout, pool: list[Any], data: st.DataObject) -> None:
    values = data.draw(rows_of(pool))
    if layout is VALUE_LAYOUTS[1][1]:
        values = [v if v is None else float(np.float32(v)) for v in values]
    check_rows(columns.measure, layout, values, value_expected)


def test_nan_is_no_value() -> None:
    assert columns.measure(pa.array([math.nan, 1.0]))[1].tolist() == [False, True]


@pytest.mark.parametrize(
    "array",
    [pa.array([True]), pa.array([b"1"]), pa.nulls(1), pa.array([[1.0]]), pa.array([{"a": 1.0}])],
    ids=lambda a: str(a.type),
)
def test_wrong_types_have_no_value(array: pa.Array) -> None:
    assert not columns.measure(array)[1].any()


# --- times -----------------------------------------------------------------------------

TIME_TEXT = {
    "2024-01-01T00:00:00Z": 1_704_067_200_000_000,
    "2024-01-01T00:00:00.123456Z": 1_704_067_200_123_456,
    "2024-01-01 00:00": 1_704_067_200_000_000,
    "2024-01-01T00:00:00.5": 1_704_067_200_500_000,
    "2024-01-01T00:00:00.1234567899": BAD,  # ten digits
    "2024-01-01T00:00:00.123456789Z": 1_704_067_200_123_456,
    "2024-01-01T00:00+02:00": 1_704_060_000_000_000,
    "2024-01-01T00:00:00-0230": 1_704_076_200_000_000,
    "1969-12-31T23:59:59.9999999Z": -1,
    "0001-01-01T00:00:00Z": -62_135_596_800_000_000,
    "9999-12-31T23:59:59Z": 253_402_300_799_000_000,
    "0000-01-01T00:00:00Z": BAD,
    "2024-02-29T00:00:00Z": 1_709_164_800_000_000,
    "2023-02-29T00:00:00Z": BAD,
    "2024-13-01T00:00:00Z": BAD,
    "2024-01-01T24:00:00Z": BAD,
    "2024-01-01T23:59:60Z": BAD,
    "2024-01-01T00:00:00+24:00": BAD,
    "2024-01-01": 1_704_067_200_000_000,
    "2024-01-01Z": BAD,
    "2024-01-01T00:00:00Z\n": BAD,
    "\u0662024-01-01T00:00:00Z": BAD,
    "": BAD,
    None: BAD,
}


@settings(max_examples=50)
@given(values=rows_of(list(TIME_TEXT)) | rows_of([t for t in TIME_TEXT if t and t[-1] == "Z"]))
def test_times_as_text(values: list[str | None]) -> None:
    check_rows(columns.instant, cast(pa.string()), values, TIME_TEXT.__getitem__)


def in_micros(per_second: int) -> Callable[[int | None], Any]:
    def expected(value: int | None) -> Any:
        micros = None if value is None else value * 1_000_000 // per_second
        return BAD if micros is None or not -LIMIT < micros < LIMIT else micros

    return expected


@pytest.mark.parametrize(("unit", "per_second"), [("s", 1), ("ms", 10**3), ("us", 10**6)])
@settings(max_examples=40)
@given(values=rows_of([-LIMIT, LIMIT - 1, -LIMIT // 1000, 0, -1, 1, 1_704_067_200, None]))
def test_times_as_timestamps(unit: str, per_second: int, values: list[int | None]) -> None:
    for kind in (pa.timestamp(unit), pa.timestamp(unit, "Asia/Tokyo")):
        check_rows(columns.instant, ticks(kind, pa.int64()), values, in_micros(per_second))


def test_other_times() -> None:
    nanos = ticks(pa.timestamp("ns"), pa.int64())
    check_rows(columns.instant, nanos, [-1, 999, -LIMIT, None], _nanos)
    days = ticks(pa.date32(), pa.int32())
    check_rows(columns.instant, days, [0, -1, 19723, -(2**31), 2**31 - 1, None], _days)
    assert columns.instant(pa.array([2**63], pa.uint64()))[1].tolist() == [False]
    for array in (pa.array([1.0]), pa.array([True]), pa.nulls(1), pa.array([b"2024"])):
        assert not columns.instant(array)[1].any()


def _nanos(value: int | None) -> Any:
    return BAD if value is None else value // 1000


def _days(value: int | None) -> Any:
    return BAD if value is None or abs(value) >= 10**8 else value * 86_400_000_000
