"""What compares: NaN is not equal to, above or below anything, as GoogleSQL has it."""

import itertools
import math

import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.exact import tried
from dpstream.pipelines.statements.resolve import qualified
from tests.pipelines.sql.values import value


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
