"""Numbers of a statement are literals: no expression, no other column, nothing infinite."""

import pytest
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.numbers import integer_literal, number, pair


def tree(text: str) -> exp.Expression:
    return parse_one(text, dialect="bigquery")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-2.5", -2.5), ("- - 3", 3.0), ("1e3", 1000.0), ("1e999", None), ("'1'", None),
     ("1 + 1", None), ("x", None), ("-x", None), ("NULL", None)],
)  # fmt: skip
def test_a_number_is_a_literal(text: str, value: float | None) -> None:
    assert number(tree(text)) == value
    assert number(None) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("10", 10), ("2", None), ("11", None), ("3.0", None), ("-3", None), ("'3'", None)],
)
def test_a_whole_number_lies_in_its_range(text: str, value: int | None) -> None:
    assert integer_literal(tree(text), 3, 10) == value
    assert integer_literal(exp.Literal.number("٣"), 3, 10) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("(0, 5)", (0.0, 5.0)), ("(-1.5, 1)", (-1.5, 1.0)), ("(5, 5)", None), ("(5, 0)", None),
     ("(1, 2, 3)", None), ("(0, 1e60)", (0.0, 1e60)), ("(0, 1.1e60)", None), ("(-1e-61, 0)", None),
     ("(0, 5e-324)", None), ("(-1e-60, 0)", (-1e-60, 0.0)), ("(-1e308, 1e308)", None),
     ("(x, 1)", None), ("(1)", None)],
)  # fmt: skip
def test_a_pair_is_ordered(text: str, value: tuple[float, float] | None) -> None:
    assert pair(tree(text)) == value
