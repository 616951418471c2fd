"""Queries that no row can make fail and no order can change: asked of DuckDB itself."""

import duckdb
import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.sql.exact import safe_query, tables_by_unit, tried
from tests.pipelines.sql.shop import shop


@pytest.mark.parametrize(
    "text",
    ["CAST('x' AS BIGINT)", "1 / 0", "5 % 0", "CAST(1 / 0 AS BIGINT) + 1",
     "9223372036854775807 + 1"],
)  # fmt: skip
def test_what_fails_is_null(text: str) -> None:
    safe = tried(parse_one(text, dialect="duckdb")).sql("duckdb")
    assert duckdb.sql(f"SELECT {safe}").fetchall() == [(None,)]


def test_columns_and_literals_stay() -> None:
    for text in ("a", "1", "NULL"):
        node = parse_one(text)
        assert tried(node) == node


def test_sums_do_not_depend_on_the_order_of_rows() -> None:
    query = parse_one("SELECT SUM(x) AS s FROM t", dialect="duckdb")
    assert isinstance(query, exp.Select)
    safe, answers, rows = safe_query(query).sql("duckdb"), set(), [1e16, 1.0, -1e16, 3.0]
    assert query.sql("duckdb") == "SELECT SUM(x) AS s FROM t"
    for turn in range(4):
        base = duckdb.connect()
        base.execute("CREATE TABLE t (x DOUBLE)")
        base.executemany("INSERT INTO t VALUES (?)", [[x] for x in rows[turn:] + rows[:turn]])
        answers |= set(base.sql(safe).fetchall())
    assert len(answers) == 1


def test_tables_are_their_rows_that_have_a_unit() -> None:
    query = parse_one("SELECT items.qty FROM items JOIN pages ON TRUE")
    assert isinstance(query, exp.Select)
    text = tables_by_unit(query, shop()).sql("duckdb")
    assert '"t2"."uid" IS NULL' in text and text.count("JOIN") == 3
    assert " pages ON TRUE" in text  # public: as it is
