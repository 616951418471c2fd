"""Forms in DuckDB's words: parts are put in once; comparisons, texts, casts and divisions."""

import itertools
import math

import duckdb as db
import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.allowed import qualified
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.exact import tried
from dpstream.pipelines.statements.forms import (
    MAX_TEXT,
    decimal,
    duckdb,
    is_literal,
    kind_of,
    named,
    once,
)
from tests.pipelines.sql.values import value


def test_each_part_is_evaluated_once() -> None:
    part = parse_one("NEXTVAL('s')", dialect="duckdb")
    base = db.connect()
    base.execute("CREATE SEQUENCE s")
    text = once("it_.a = it_.a AND it_.a = 1", a=part).sql("duckdb")
    assert base.sql(f"SELECT {text}, NEXTVAL('s')").fetchall() == [(True, 2)]
    assert text.count("NEXTVAL") == 1


def test_short_parts_stand_for_themselves() -> None:
    def make(names: dict[str, str]) -> str:
        return f"{names['a']} + {names['a']}"

    short = named(make, {"a": exp.column("x")}).sql("duckdb")
    assert short == "x + x" and "it_" in named(make, {"a": parse_one("x * 2")}).sql("duckdb")
    assert named(make, {"a": parse_one("-2")}).sql("duckdb") == "(-2) + (-2)"


def test_no_node_stands_in_two_places() -> None:
    tree = duckdb(":x + :x", x=exp.column("x"))
    assert tree.left is not tree.right and tree.left.parent is tree.right.parent is tree


def test_what_is_known_of_a_node() -> None:
    assert is_literal(parse_one("-1.5")) and is_literal(parse_one("'a'"))
    assert not is_literal(parse_one("-x")) and kind_of(parse_one("x")) is None
    assert decimal().sql("duckdb") == "DECIMAL(38, 9)"


@pytest.mark.parametrize("sign", ["=", "<>", "<", "<=", ">", ">="])
@pytest.mark.parametrize("pair", ["nan {} 1", "1 {} nan", "nan {} nan", "nan * 2 {} f", "f {} -nan",
                                  "nan {} x + 1", "nan + 0 {} nan * 1"])  # fmt: skip
def test_nothing_is_equal_to_above_or_below_nan(sign: str, pair: str) -> None:
    assert value(pair.format(sign), nan=float("nan"), f=1.0, x=1) is (sign == "<>")
    assert value(f"NOT ({pair.format(sign)})", nan=float("nan"), f=1.0, x=1) is (sign != "<>")


@pytest.mark.parametrize(
    ("text", "expected"),
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
     ("GREATEST(f, x + 1)", 2), ("LEAST(s, 'b')", "b"), ("GREATEST(LEAST(x, 5), LEAST(x, 0))", 1)],
)  # fmt: skip
def test_what_compares_inside_has_the_same_nan(text: str, expected: object) -> None:
    row = {"nan": float("nan"), "f": 1.0, "x": 1, "no": None, "s": "c"}
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
