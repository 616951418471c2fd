"""Queries that no row can make fail and no order can change: asked of DuckDB itself."""

from decimal import Decimal

import duckdb
import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.allowed import parsed, qualified
from dpstream.pipelines.statements.exact import safe_query, tables_by_unit, tried
from tests.pipelines.sql.shop import shop


@pytest.mark.parametrize(
    "text",
    ["CAST('x' AS BIGINT)", "1 / 0", "5 % 0", "CAST(1 / 0 AS BIGINT) + 1",
     "9223372036854775807 + 1"],
)  # fmt: skip
def test_what_fails_is_null(text: str) -> None:
    safe = tried(parse_one(text, dialect="duckdb")).sql("duckdb")
    assert duckdb.execute(f"SELECT {safe}").fetchall() == [(None,)]


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


@pytest.mark.parametrize("how", ["UNION ALL", "UNION DISTINCT"])
def test_decimals_keep_their_digits_in_set_operations(how: str) -> None:
    """DuckDB would round those of one side to the width of the other."""
    schema = {"a": {"w": "NUMERIC"}, "b": {"d": "NUMERIC"}}
    text = f"SELECT q.w FROM (SELECT w FROM a {how} (SELECT d FROM b)) AS q"
    query = qualified(parsed(text), schema)
    assert isinstance(query, exp.Select)
    base = duckdb.connect()
    base.execute("CREATE TABLE a (w DECIMAL(38, 0)); INSERT INTO a VALUES (2)")
    base.execute("CREATE TABLE b (d DECIMAL(38, 9)); INSERT INTO b VALUES (1.5)")
    rows = base.sql(safe_query(query).sql("duckdb")).fetchall()
    assert sorted(rows) == [(Decimal("1.5"),), (Decimal(2),)]


def test_tables_are_their_rows_that_have_a_unit() -> None:
    query = parse_one("SELECT items.qty FROM items JOIN pages ON TRUE")
    assert isinstance(query, exp.Select)
    text = tables_by_unit(query, shop()).sql("duckdb")
    assert '"t2"."uid" IS NULL' in text and text.count("JOIN") == 3
    assert " pages ON TRUE" in text  # public: as it is


def test_extremes_are_the_values_and_no_zero_has_a_sign() -> None:
    schema = {"t": {"x": "FLOAT64", "s": "STRING", "n": "INT64"}}
    text = "SELECT MAX(t.x) AS x, MIN(t.x) AS y, MAX(t.s) AS s, MIN(t.n) AS n FROM t"
    query = qualified(parsed(text), schema)
    assert isinstance(query, exp.Select)
    safe = safe_query(query).sql("duckdb")
    for turn in (1, -1):
        base = duckdb.connect()
        base.execute("CREATE TABLE t (x DOUBLE, s VARCHAR, n BIGINT)")
        rows = [(0.0, "a", 7), (-0.0, "b", 5), (-2.5, "", 9)][::turn]
        base.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        [extremes] = base.sql(safe).fetchall()
        assert extremes == (0.0, -2.5, "b", 5) and str(extremes[0]) == "0.0"


def test_computed_columns_have_the_type_that_was_found() -> None:
    node = parse_one("a + 1", dialect="duckdb")
    wanted = {
        exp.DType.BIGINT: "BIGINT", exp.DType.TEXT: "TEXT", exp.DType.DATE: "DATE",
        exp.DType.DOUBLE: "DOUBLE", exp.DType.UNKNOWN: "DOUBLE",
        exp.DType.DECIMAL: "DECIMAL(38, 9)",
    }  # fmt: skip
    for kind, name in wanted.items():
        assert tried(node.copy(), kind).sql("duckdb") == f"TRY_CAST(TRY(a + 1) AS {name})"
    assert tried(node.copy()).sql("duckdb") == "TRY(a + 1)"


@pytest.mark.parametrize(
    "equal", ["t.n * 9223372036854775807 = t.n", "t.n = t.n * 4611686018427387904"]
)
def test_equalities_with_a_column_do_not_fail(equal: str) -> None:
    query = qualified(parsed(f"SELECT t.n FROM t WHERE {equal}"), {"t": {"n": "INT64"}})
    assert isinstance(query, exp.Select)
    base = duckdb.connect()
    base.execute("CREATE TABLE t (n BIGINT); INSERT INTO t VALUES (0), (7)")
    assert base.sql(safe_query(query).sql("duckdb")).fetchall() == [(0,)]


def test_names_of_tables_may_be_words_of_the_language() -> None:
    query = parse_one("SELECT items.qty FROM items")
    assert isinstance(query, exp.Select)
    text = tables_by_unit(query, shop()).sql("duckdb")
    assert all(f'"{name}" AS t{i}' in text for i, name in enumerate(("items", "orders", "users")))
