"""Released values as Python, JSON and people read them."""

import math
from datetime import UTC, datetime

import duckdb
import msgspec
import pyarrow as pa
import pytest

from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.render.answer import (
    INTERVALS,
    cut_lines,
    json_rows,
    json_value,
    python_values,
    rows_text,
)


@pytest.mark.parametrize(
    ("kind", "literals"),
    [
        ("DATE", {
            "0044-03-15 (BC)": "-0043-03-15", "0001-12-31 (BC)": "+0000-12-31",
            "0005-02-29 (BC)": "-0004-02-29", "10000-01-01": "+10000-01-01",
            "12345-06-07": "+12345-06-07", "200000-02-29": "+200000-02-29",
            "5877642-06-25 (BC)": "-5877641-06-25", "5881580-07-10": "+5881580-07-10",
            "infinity": "infinity", "-infinity": "-infinity",
        }),
        ("TIMESTAMP", {
            "0044-03-15 (BC) 23:59:59": "-0043-03-15T23:59:59",
            "12345-06-07 01:02:03.5": "+12345-06-07T01:02:03.500000",
            "290309-12-22 (BC) 00:00:00": "-290308-12-22T00:00:00", "infinity": "infinity",
        }),
        ("TIMESTAMPTZ", {
            "12345-06-07 01:02:03+00": "+12345-06-07T01:02:03Z", "-infinity": "-infinity",
        }),
    ],
)  # fmt: skip
def test_days_and_instants_beyond_the_calendar_are_exact_texts(
    kind: str, literals: dict[str, str]
) -> None:
    """As DuckDB writes them, and each by itself: the others of its column stay what they are."""
    near = "2024-02-29" if kind == "DATE" else "2024-02-29 01:00:00+00"
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    listed = ", ".join(f"('{text}'::{kind})" for text in (*literals, near))
    column = connection.sql(f"SELECT * FROM (VALUES {listed}, (NULL)) t(x)").to_arrow_table()["x"]
    *far, usual, missing = python_values(column)
    assert far == list(literals.values()) and missing is None
    assert usual.isoformat()[:10] == "2024-02-29" and not isinstance(usual, str)
    words = rows_text(pa.table({"x": column}), {}).split()
    assert set(literals.values()) <= set(words) and any(t.startswith("2024-02-29") for t in words)
    rows = json_rows(pa.table({"x": column}), {})
    assert [row["values"]["x"] for row in rows][: len(far)] == far
    assert rows[-2]["values"]["x"].startswith("2024-02-29")


def test_days_of_every_year_are_those_of_the_calendar() -> None:
    """400 years later every day has the same text but for its year."""
    days = range(-700_000, 2_900_000, 997)
    later = pa.chunked_array([pa.array([day + 25 * 146_097 for day in days], pa.date32())])
    near = pa.chunked_array([pa.array(days, pa.date32())])
    for one, other in zip(python_values(near), python_values(later), strict=True):
        assert other == f"{one.year + 10_000:+}-{one:%m-%d}"
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
