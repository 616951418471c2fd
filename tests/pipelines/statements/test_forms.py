"""What DuckDB makes of GoogleSQL's nodes: the values that GoogleSQL gives."""

import duckdb
import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.exact import tried
from tests.pipelines.sql.values import value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("DIV(x - 12, 2)", -3), ("3 * DIV(x, 2)", 6), ("x - 1 - DIV(x - 1, 2)", 2), ("-DIV(x, 2)", -2),
     ("10 - DIV(x, 1 + 1) * 2", 6), ("DIV(DIV(x, 2), 2)", 1), ("DIV(20, DIV(x, 2))", 10),
     ("3 * MOD(x, 3)", 6), ("10 - MOD(x - 1, 3)", 9), ("MOD(MOD(x, 3) + 2, 3)", 1),
     ("x / (x - 1) * 4", 5.0), ("DIV(x, x - 5)", None), ("DIV(x, 2) & 3", 2),
     ("SAFE_DIVIDE(x + 1, x - 3) * 2", 6.0)],
)  # fmt: skip
def test_operators_keep_their_operands(text: str, expected: float | None) -> None:
    assert value(text, x=5) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CAST(f AS INT64)", 3), ("CAST(f + 1 AS INT64)", 4), ("CAST(-f AS INT64)", -3),
     ("CAST(0.5 * f AS INT64)", 1), ("CAST(CAST(f AS INT64) AS STRING)", "3"),
     ("CAST(f AS STRING)", "2.5"), ("CAST(f * 2 AS STRING)", "5"), ("CAST(f * 0 AS STRING)", "0"),
     ("CAST(1e20 * f AS STRING)", "2.5e+20"), ("CAST(0.5 * 2 AS STRING)", "1"),
     ("CAST(f * 1e300 * 1e300 AS INT64)", None)],
)  # fmt: skip
def test_casts_of_floats(text: str, expected: object) -> None:
    assert value(text, f=2.5) == expected


def test_the_parts_of_a_form_are_not_the_statements() -> None:
    """A column or table may be called as the form calls its parts."""
    safe = tried(parse_one("CONCAT(it_.p0, it_.a)", dialect=DpSql())).sql("duckdb")
    rows = duckdb.execute(f"SELECT {safe} FROM (SELECT 'x' AS p0, 'y' AS a) AS it_").fetchall()
    assert rows == [("xy",)]


def test_forms_stand_in_each_other() -> None:
    text = "REPLACE(CONCAT(SUBSTR(s, 0, 3), LEFT(s, n + 2)), 'h', CAST(2.0 * n AS STRING)) || 'z'"
    assert value(text, s="hello", n=-1) == "-2el-2z"
    inner = "s"
    for _ in range(10):  # each operand once, not 2^10 times
        inner = f"SUBSTR(CONCAT({inner}, 'x'), 0, 2)"
    assert value(inner, s="b") == "bx"


@pytest.mark.parametrize(
    ("day", "numbers"),  # GoogleSQL's: day of week, week, ISO week
    [("2024-01-06", (7, 0, 1)), ("2024-01-07", (1, 1, 1)), ("2023-01-01", (1, 1, 52)),
     ("2024-12-31", (3, 52, 1)), ("2020-02-29", (7, 8, 9)), ("bad", (None, None, None))],
)  # fmt: skip
def test_days_and_weeks_have_googlesql_s_numbers(day: str, numbers: tuple[int | None, ...]) -> None:
    for part, number in zip(("DAYOFWEEK", "WEEK", "ISOWEEK"), numbers, strict=True):
        text = f"EXTRACT({part} FROM CAST('{day}' AS DATE))"
        safe = tried(parse_one(text, dialect="bigquery"), exp.DType.BIGINT).sql("duckdb")
        assert duckdb.execute(f"SELECT {safe}").fetchall() == [(number,)]


def test_a_difference_of_instants_is_of_whole_units() -> None:
    """DuckDB's own counts the boundaries between them."""
    text = "TIMESTAMP_DIFF(TIMESTAMP '2024-01-05 02:00:00', TIMESTAMP '2024-01-05 00:00:01', HOUR)"
    safe = tried(parse_one(text, dialect="bigquery"), exp.DType.BIGINT).sql("duckdb")
    assert duckdb.execute(f"SELECT {safe}").fetchall() == [(1,)]
