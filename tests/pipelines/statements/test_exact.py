"""Queries for DuckDB that no row makes fail: what an expression of GoogleSQL is in one row."""

import collections
import itertools
import math
import statistics
import time
from decimal import Decimal
from typing import Any

import duckdb as db
import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements import allowed, functions, ownership, statement
from dpstream.pipelines.statements import statement as public_groups
from dpstream.pipelines.statements.allowed import parsed, qualified
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.exact import safe_query, tables_by_unit, tried
from dpstream.pipelines.statements.forms import MAX_TEXT, once, type_of
from dpstream.pipelines.statements.statement import statement_of
from tests.pipelines.sql.pairs import PAIRS
from tests.pipelines.sql.shop import shop


@pytest.mark.parametrize(
    "text",
    ["CAST('x' AS BIGINT)", "1 / 0", "5 % 0", "CAST(1 / 0 AS BIGINT) + 1",
     "9223372036854775807 + 1"],
)  # fmt: skip
def test_what_fails_is_null(text: str) -> None:
    safe = tried(parse_one(text, dialect="duckdb")).sql("duckdb")
    assert db.execute(f"SELECT {safe}").fetchall() == [(None,)]


def test_sums_do_not_depend_on_the_order_of_rows() -> None:
    query = parse_one("SELECT SUM(x) AS s FROM t", dialect="duckdb")
    assert isinstance(query, exp.Select)
    safe, answers, rows = safe_query(query).sql("duckdb"), set(), [1e16, 1.0, -1e16, 3.0]
    assert query.sql("duckdb") == "SELECT SUM(x) AS s FROM t"
    for turn in range(4):
        base = db.connect()
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
    base = db.connect()
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
    assert all(f'"{name}" AS t{i}' in text for i, name in enumerate(("items", "orders", "users")))


def test_extremes_are_the_values_and_no_zero_has_a_sign() -> None:
    schema = {"t": {"x": "FLOAT64", "s": "STRING", "n": "INT64"}}
    text = "SELECT MAX(t.x) AS x, MIN(t.x) AS y, MAX(t.s) AS s, MIN(t.n) AS n FROM t"
    query = qualified(parsed(text), schema)
    assert isinstance(query, exp.Select)
    safe = safe_query(query).sql("duckdb")
    for turn in (1, -1):
        base = db.connect()
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
    base = db.connect()
    base.execute("CREATE TABLE t (n BIGINT); INSERT INTO t VALUES (0), (7)")
    assert base.sql(safe_query(query).sql("duckdb")).fetchall() == [(0,)]


def test_each_part_is_evaluated_once() -> None:
    part = parse_one("NEXTVAL('s')", dialect="duckdb")
    base = db.connect()
    base.execute("CREATE SEQUENCE s")
    text = once("it_.a = it_.a AND it_.a = 1", a=part).sql("duckdb")
    assert base.sql(f"SELECT {text}, NEXTVAL('s')").fetchall() == [(True, 2)]
    assert text.count("NEXTVAL") == 1


@pytest.mark.parametrize("sign", ["=", "<>", "<", "<=", ">", ">="])
@pytest.mark.parametrize("pair", ["nan {} 1", "1 {} nan", "nan {} nan", "nan * 2 {} f", "f {} -nan",
                                  "nan {} x + 1", "nan + 0 {} nan * 1"])  # fmt: skip
def test_nothing_is_equal_to_above_or_below_nan(sign: str, pair: str) -> None:
    assert value(pair.format(sign), nan=float("nan"), f=1.0, x=1) is (sign == "<>")
    assert value(f"NOT ({pair.format(sign)})", nan=float("nan"), f=1.0, x=1) is (sign != "<>")


#: What is an expression's value, by the row that it is of.
VALUES: list[tuple[dict[str, Any], list[tuple[str, object]]]] = [
    ({"nan": float("nan"), "f": 1.0, "x": 1, "no": None, "s": "c"},
     [("nan IN (f, nan)", False), ("nan NOT IN (f, nan)", True), ("nan IN (f, no)", None),
     ("nan * 1 IN (f, nan + 1)", False), ("f IN (nan, f)", True), ("f IN (nan, no)", None),
     ("f + 1 IN (nan, 2 * f)", True), ("nan IN (1.0, 2.0)", False), ("x IN (nan, f)", True),
     ("nan BETWEEN f AND nan", False), ("nan NOT BETWEEN f AND nan", True),
     ("f BETWEEN nan AND 5", False), ("f BETWEEN 0 AND nan", False),
     ("f BETWEEN 0 AND 2 * f", True),
     ("f BETWEEN no AND nan", False), ("f BETWEEN no AND 2", None), ("nan BETWEEN no AND no", None),
     ("x BETWEEN f AND nan", False), ("NOT x + 1 BETWEEN f AND nan * 1", True),
     ("CASE nan WHEN nan THEN 1 ELSE 0 END", 0),
     ("CASE nan WHEN f THEN 1 WHEN nan THEN 2 END", None),
     ("CASE f WHEN nan THEN 1 WHEN f * 1 THEN 2 END", 2), ("CASE no WHEN no THEN 1 ELSE 3 END", 3),
     ("CASE nan * 1 WHEN nan THEN 1 WHEN 1.5 THEN 2 ELSE x END", 1),
     ("LEAST(f, no, nan)", None), ("GREATEST(no, f)", None), ("LEAST(f + 1, x * 2, 3)", 2),
     ("GREATEST(f, x + 1)", 2), ("LEAST(s, 'b')", "b"), ("GREATEST(LEAST(x, 5), LEAST(x, 0))", 1)]),
    ({"x": 5},
     [("DIV(x - 12, 2)", -3), ("3 * DIV(x, 2)", 6), ("x - 1 - DIV(x - 1, 2)", 2),
      ("-DIV(x, 2)", -2),
     ("10 - DIV(x, 1 + 1) * 2", 6), ("DIV(DIV(x, 2), 2)", 1), ("DIV(20, DIV(x, 2))", 10),
     ("3 * MOD(x, 3)", 6), ("10 - MOD(x - 1, 3)", 9), ("MOD(MOD(x, 3) + 2, 3)", 1),
     ("x / (x - 1) * 4", 5.0), ("DIV(x, x - 5)", None), ("DIV(x, 2) & 3", 2),
     ("SAFE_DIVIDE(x + 1, x - 3) * 2", 6.0)]),
    ({"f": 2.5},
     [("CAST(f AS INT64)", 3), ("CAST(f + 1 AS INT64)", 4), ("CAST(-f AS INT64)", -3),
     ("CAST(0.5 * f AS INT64)", 1), ("CAST(CAST(f AS INT64) AS STRING)", "3"),
     ("CAST(f AS STRING)", "2.5"), ("CAST(f * 2 AS STRING)", "5"), ("CAST(f * 0 AS STRING)", "0"),
     ("CAST(1e20 * f AS STRING)", "2.5e+20"), ("CAST(0.5 * 2 AS STRING)", "1"),
     ("CAST(f * 1e300 * 1e300 AS INT64)", None)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected", "row"), [(*case, row) for row, cases in VALUES for case in cases]
)
def test_values(text: str, expected: object, row: dict[str, Any]) -> None:
    assert value(text, **row) == expected


@pytest.mark.parametrize("name", ["LEAST", "GREATEST"])
@pytest.mark.parametrize("order", list(itertools.permutations(("nan", "f", "x + 1"))))
def test_of_extremes_no_order_decides(name: str, order: tuple[str, ...]) -> None:
    row = {"nan": float("nan"), "f": 1.0, "x": 1}
    assert math.isnan(value(f"{name}({', '.join(order)})", **row))
    assert math.isnan(value("NULLIF(nan, nan * 1)", **row)) and value("NULLIF(f, f)", f=1.0) is None


def test_extremes_do_not_grow_with_their_depth() -> None:
    sizes = []
    for depth in (4, 8):
        text = "x"
        for _ in range(depth):
            text = f"LEAST({text} + 1, 7)"
        tree = parse_one(f"SELECT {text} AS v FROM t", dialect=DpSql())
        item = qualified(tree, {"t": {"x": "INT64"}}).expressions[0].unalias()  # type: ignore[arg-type]
        sizes.append(len(tried(item, exp.DType.BIGINT).sql("duckdb")))
    assert sizes[1] < 2.5 * sizes[0]


@pytest.mark.parametrize("text", ["f {} 1", "f * 1 {} x", "x {} f", "f {} f + no", "nan {} no",
                                  "no {} nan * 1"])  # fmt: skip
def test_other_comparisons_stay(text: str) -> None:
    row = {"f": 1.0, "x": 1, "no": None, "nan": float("nan")}
    for sign in ("=", "<>", "<", ">="):
        expected = None if "no" in text.split() else sign in ("=", ">=")
        assert value(text.format(sign), **row) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("SUBSTR(s, 0, 2)", "he"), ("SUBSTR(s, -10, 3)", "hel"), ("SUBSTR(s, -3, 2)", "ll"),
     ("SUBSTR(s, 2)", "ello"), ("SUBSTR(s, 0)", "hello"), ("SUBSTR(s, 2, -1)", None),
     ("SUBSTR(s, n, n)", None), ("SUBSTR(s, 2, 3)", "ell"), ("LEFT(s, n)", None),
     ("LEFT(s, -1)", None), ("LEFT(s, 2)", "he"), ("LEFT(s, n + 3)", "he"), ("RIGHT(s, -1)", None),
     ("RIGHT(s, 2)", "lo"), ("RIGHT(s, 0 - n)", "o"), ("SUBSTR(s, n)", "o"),
     (r"s LIKE 'h\\_llo'", False), (r"'a_b' LIKE 'a\\_b'", True), (r"'axb' LIKE 'a\\_b'", False),
     (r"'100%' LIKE '100\\%'", True), (r"'100x' LIKE '100\\%'", False), ("s LIKE 'h%'", True),
     ("s LIKE p", True), ("s LIKE CONCAT(s, CHR_)", None), ("s LIKE 'h%CHR_'", None),
     ("CONCAT(s, CHR_) LIKE CONCAT(s, CHR_, CHR_)", True), (r"NOT '100x' LIKE '100\\%'", True)],
)  # fmt: skip
def test_texts(text: str, expected: object) -> None:
    text = text.replace("'h%CHR_'", r"'h%\\'").replace("CHR_", r"'\\'")
    assert value(text, s="hello", n=-1, p="%l_o") == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [("CONCAT(long, long)", 2_000), ("long || 'x'", 1_001), ("CONCAT(long)", 1_000),
     ("CONCAT(long, no)", None), ("REPLACE(long, 'a', 'bcd')", 3_000),
     ("REPLACE(long, 'aa', '')", 0),
     ("REPLACE(long, 'a', 'bcdefg') || long", 7_000), ("REPLACE(long, '', 'b')", 1_000),
     ("REPLACE(long, 'x', long)", 1_000), ("REPLACE(long, 'a', no)", None),
     ("REPLACE(long, 'a', long)", None), ("CONCAT('é', '\U0001f3f3')", 2)],
)  # fmt: skip
def test_texts_that_grow(text: str, size: int | None) -> None:
    grown_text = value(text.replace("no", "CAST(no AS STRING)"), long="a" * 1_000, no=None)
    assert (None if grown_text is None else len(grown_text)) == size


def test_no_text_grows_beyond_its_bound() -> None:
    """What a text takes before it is dropped would tell of the row that has it."""
    text = "long"
    for _ in range(8):
        text = f"CONCAT({text}, {text})"
    assert value(text, long="a" * 1_000) is None and len(value(text, long="a" * 200)) == 51_200
    assert len(value("CONCAT(long, long)", long="a" * (MAX_TEXT // 2))) == MAX_TEXT
    assert value("CONCAT(long, long, 'a')", long="a" * (MAX_TEXT // 2)) is None
    assert len(value("REPLACE(long, 'a', 'bb')", long="a" * (MAX_TEXT // 2))) == MAX_TEXT
    assert value("REPLACE(long, 'a', 'bb')", long="a" * (MAX_TEXT // 2 + 1)) is None
    assert value("CAST(CAST(long AS BYTES) || CAST(long AS BYTES) AS STRING)", long="ab") == "abab"


def test_the_parts_of_a_form_are_not_the_statements() -> None:
    """A column or table may be called as the form calls its parts."""
    safe = tried(parse_one("CONCAT(it_.p0, it_.a)", dialect=DpSql())).sql("duckdb")
    rows = db.execute(f"SELECT {safe} FROM (SELECT 'x' AS p0, 'y' AS a) AS it_").fetchall()
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
        assert db.execute(f"SELECT {safe}").fetchall() == [(number,)]


def test_a_difference_of_instants_is_of_whole_units() -> None:
    """DuckDB's own counts the boundaries between them."""
    text = "TIMESTAMP_DIFF(TIMESTAMP '2024-01-05 02:00:00', TIMESTAMP '2024-01-05 00:00:01', HOUR)"
    safe = tried(parse_one(text, dialect="bigquery"), exp.DType.BIGINT).sql("duckdb")
    assert db.execute(f"SELECT {safe}").fetchall() == [(1,)]


_TYPES = {"x": "INT64", "f": "FLOAT64", "nan": "FLOAT64", "s": "STRING", "p": "STRING",
          "n": "INT64", "no": "FLOAT64", "d": "DATE", "long": "STRING"}  # fmt: skip
_SQL = {"INT64": "BIGINT", "FLOAT64": "DOUBLE", "STRING": "TEXT", "DATE": "DATE"}


def value(text: str, **columns: Any) -> Any:
    """What an expression is in one row."""
    tree = parse_one(f"SELECT {text} AS v FROM t", dialect=DpSql())
    schema = {"t": {name: _TYPES[name] for name in columns or {"x": 0}}}
    tree = qualified(tree, schema)  # type: ignore[arg-type]
    item = tree.expressions[0].unalias()
    safe = tried(item, type_of(item) or exp.DType.UNKNOWN).sql("duckdb")
    base = db.connect()
    names = ", ".join(f"{name} {_SQL[_TYPES[name]]}" for name in columns or {"x": 0})
    base.execute(f"CREATE TABLE t ({names})")
    base.execute(f"INSERT INTO t VALUES ({', '.join('?' for _ in columns or [0])})",
                 list(columns.values()) or [0])  # fmt: skip
    return base.sql(f"SELECT {safe} FROM t").fetchall()[0][0]


# Whose unit each row has, joins that would let units meet, and every rule of ownership.


_CATALOG = shop()
_MODULES = (allowed, functions, ownership, public_groups, statement)
#: Raised where sqlglot gives up, not by a rule of ours that could be switched off.
_NOT_ASKED = {"syntax", "too-large", "select-only", "unknown-column"}


def code_of(text: str) -> str | None:
    """The rule that a statement breaks; ``None`` if it is accepted."""
    try:
        statement_of(text, _CATALOG)
    except DpstreamError as error:
        return str(error.code)  # type: ignore[attr-defined]
    return None


def test_pairs() -> None:
    assert len({refused for _, refused, _ in PAIRS}) >= 300
    codes: dict[str, str | None] = {}
    wrong = []
    for accepted, refused, rule in PAIRS:
        if accepted not in codes:
            codes[accepted] = code_of(accepted)
        if codes[accepted] is not None:
            wrong.append((codes[accepted], accepted))
        code = code_of(refused)
        if code != rule:
            wrong.append((code, refused))
    assert not wrong


def test_every_rule_has_a_pair() -> None:
    used = {rule for _, _, rule in PAIRS}
    assert used - set(RULES) == set()
    ours = {rule for rule in RULES if not rule.startswith("stream-")}  # others: `test_statement`
    assert ours - used == {"within-reach"}  # of a plan: `sql.test_within`


def _off(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Switch one rule off wherever it is asked."""
    honest = allowed.require

    def require(holds: object, code: str, node: Any = None) -> None:
        if code != rule:
            honest(holds, code, node)

    for module in _MODULES:
        monkeypatch.setattr(module, "require", require)


@pytest.mark.parametrize("rule", sorted(set(RULES) - _NOT_ASKED))
def test_a_rule_switched_off_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = collections.Counter(bad for _, bad, of in PAIRS if of == rule)
    _off(monkeypatch, rule)
    for text in list(refused)[:3]:
        try:
            assert code_of(text) != rule
        except (AssertionError, AttributeError, TypeError, KeyError, IndexError, ValueError):
            continue  # what follows relies on the rule


def test_what_is_not_asked_is_refused_too() -> None:
    assert {rule for _, _, rule in PAIRS} & _NOT_ASKED == _NOT_ASKED


def test_validation_is_fast() -> None:
    """At most 20 ms for statements of the usual size, also here where others work."""
    text = (
        "WITH a AS (SELECT uid, SUM(seconds) AS s FROM visits GROUP BY uid) "
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 6, delta = 1e-9, "
        "max_groups_contributed = 32) page, SUM(s, contribution_bounds_per_group => (0, 1)) AS s, "
        "COUNT(*) AS n FROM a JOIN visits USING (uid) GROUP BY page HAVING n > 5 ORDER BY n DESC"
    )
    spent = []
    for _ in range(11):
        start = time.process_time()
        statement_of(text, _CATALOG)
        spent.append(time.process_time() - start)
    assert statistics.median(spent) <= 0.020


_DP = ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
       "max_groups_contributed = 4) COUNT(*) AS n FROM ")  # fmt: skip


def test_a_column_is_no_key_because_of_its_name() -> None:
    """pages.uid is called as the key of users is, and says nothing of who owns a row."""
    paged = "(SELECT v.uid, p.uid AS k FROM visits AS v JOIN pages AS p ON v.page = p.page) AS a"
    for key, rule in (("k", "join-without-unit"), ("uid", None)):
        text = f"{_DP} {paged} JOIN users AS u ON a.{key} = u.uid"
        assert code_of(text) == rule
    assert code_of(f"{_DP} {paged} JOIN orders AS o ON a.k = o.customer_id") == "join-without-unit"


def test_an_order_within_is_dropped() -> None:
    parsed_statement = statement_of(f"{_DP} (SELECT uid, n FROM visits ORDER BY n) AS a", _CATALOG)
    assert parsed_statement.source.find(exp.Order) is None


def test_rows_left_out_are_refused_without_a_limit_too() -> None:
    assert code_of(f"{_DP} (SELECT uid, n FROM visits ORDER BY n OFFSET 2) AS a") == "limit"


def test_public_relations_are_combined() -> None:
    both = "(SELECT page FROM pages UNION ALL SELECT dept FROM depts) AS p"
    assert code_of(f"{_DP} visits AS v JOIN {both} ON v.page = p.page") is None
