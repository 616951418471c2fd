"""Expressions of DuckDB's: parts are put in once, and none stands in two places."""

import duckdb as db
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.expressions import (
    decimal,
    duckdb,
    is_literal,
    kind_of,
    named,
    once,
)


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
