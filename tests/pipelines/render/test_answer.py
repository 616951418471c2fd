"""Released values as Python, JSON and people read them."""

import math
from datetime import UTC, datetime

import msgspec
import pyarrow as pa

from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.render.answer import (
    INTERVALS,
    cut_lines,
    json_value,
    python_values,
    rows_text,
)


def test_days_beyond_the_calendar_are_numbers() -> None:
    days = pa.chunked_array([pa.array([0, 5_000_000], pa.date32())])
    assert python_values(days) == [0, 5_000_000]
    assert python_values(pa.chunked_array([pa.array([1, None])])) == [1, None]


def test_values_that_json_has_not() -> None:
    values = [
        b"\x01",
        [math.nan, 1],
        math.inf,
        -math.inf,
        None,
        True,
        datetime(2024, 1, 2, tzinfo=UTC),
    ]
    assert [json_value(value) for value in values] == [
        "01", ["NaN", 1], "Infinity", "-Infinity", None, True, "2024-01-02T00:00:00Z",
    ]  # fmt: skip


def test_rows_show_half_of_an_interval() -> None:
    table = pa.table({"page": ["a", "b"], "n": [1_234.0, None]})
    text = rows_text(table, {"n": [[1_200.0, None], [1_268.0, None]]})
    assert text.splitlines() == [
        "page          n",
        "----  ---------",
        "a     1,234 ±34",
        "b          NULL",
    ]
    assert "±" not in rows_text(table, {})


CUT = Cut("values", 0.0, 9.0, 0.0, 0.02, 0.01, 0.1, 0.3)


def test_what_bounds_cut_is_said_of_each() -> None:
    """Each kind of bound has its own subject; given bounds are named."""
    kinds = ("values", "bounds", "rows", "groups")
    cuts = {kind: msgspec.structs.replace(CUT, of=kind) for kind in kinds}
    lines = cut_lines(cuts, ("rows of s",), "user", "page", True)
    assert lines[0] == INTERVALS and len(lines) == 6
    assert lines[1].startswith(
        "Bounds of values, chosen privately: 0 to 9; about 0% of values are below"
    )
    assert (
        "counts up to 9 times the given bounds" in lines[2]
        and "random page of each user" in lines[2]
    )
    assert lines[3].startswith("At most 9 rows of one user in a page count, chosen privately")
    assert (
        lines[4].startswith("At most 9 pages of one user count")
        and "pairs of user and page" in lines[4]
    )
    assert lines[5] == "Not estimated: what the given bounds cut (rows of s)."
    assert all("about 10% of" in line and "up to 30%" in line for line in lines[1:5])
    assert cut_lines({}, (), "user", "", False) == []
