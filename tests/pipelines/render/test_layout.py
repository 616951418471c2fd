"""Labels, tables and values of text: aligned, complete, and safe to print."""

import math
from datetime import UTC, date, datetime

from dpstream.pipelines.render.layout import (
    count,
    each,
    labelled,
    page,
    table_text,
    value_text,
    with_interval,
    wrapped,
)


def test_further_lines_stand_below_the_text() -> None:
    lines = [*labelled("Can run", "no", "Fix: wait"), *each("Warning", ["a", "b"])]
    text = "Can run     no\n            Fix: wait\nWarning     a\nWarning     b\n"
    assert page(lines) == text and page([]) == "" and each("Note", []) == []


def test_long_texts_are_wrapped() -> None:
    lines = wrapped("Budget", "word " * 40)
    assert len(lines) == 3 and all(len(line) <= 100 for line in lines)
    assert lines[1].startswith(" " * 12 + "word")


def test_numbers_have_their_noun() -> None:
    assert [count(n, "charge") for n in (0, 1, 2_000)] == ["0 charges", "1 charge", "2,000 charges"]
    assert count(3, "box", "boxes") == "3 boxes"


def test_values_are_one_safe_line() -> None:
    values = {
        1_234_567.0: "1,234,567", 0.1234567: "0.123457", 1e16: "1e+16", 1.5: "1.5", -2.0: "-2",
        None: "NULL", b"\x00\xff": "00ff", "a\x1b[2J\n": "a\ufffd[2J\ufffd", math.inf: "Infinity",
        datetime(2024, 1, 2, 3, tzinfo=UTC): "2024-01-02T03:00:00Z", date(2024, 1, 2): "2024-01-02",
        True: "True",
    }  # fmt: skip
    assert {value: value_text(value) for value in values} == values
    assert value_text([1.0, None]) == "[1, NULL]"


def test_an_interval_is_its_half_width() -> None:
    """And the value has the digits of that, because further ones are noise."""
    assert with_interval(100.0, 90.2, 109.8) == "100 ±9.8"
    assert with_interval(28.0607, 22.38, 33.74) == "28.06 ±5.68"
    assert with_interval(0.1, 0.1, 0.1) == "0.1 ±0"
    assert with_interval(5.5, 4.5, 6.5) == "5.5 ±1" and value_text(-0.0) == "0"
    assert with_interval(1_234.567, 984.6, 1_484.6) == "1,235 ±250"
    # Of a median, and of a value that a bound has cut.
    assert with_interval(9.13, 9.048, 12.0) == "9.13 [9.05, 12]"
    assert with_interval(20, 16.4, 20.0) == "20 [16.4, 20]"
    assert with_interval(0.0123456, 0.0121456, 0.0125456) == "0.0123456 ±2e-4"
    assert (
        with_interval(7, 5.0, 9.5) == "7 ±2.25" and with_interval([1.5], 1.0, 2.0) == "[1.5] ±0.5"
    )
    for low, high in ((None, 1.0), (1.0, None), (-math.inf, math.inf), (math.nan, 1.0)):
        assert with_interval(1.23456, low, high) == "1.23456"


def test_columns_are_aligned() -> None:
    text = table_text(["page", "n"], [["a", "long name"], ["1", "10"]], [False, True])
    assert text.splitlines() == [
        "page        n", "---------  --", "a           1", "long name  10",
    ]  # fmt: skip
    assert table_text(["n"], [[]], [True]) == "n\n-\n"
    assert table_text([""], [["", ""]], [False]).splitlines() == ["", "-", "", ""]
