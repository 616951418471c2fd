"""A scope of joins: whose unit each row has, and joins that would let units meet."""

import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.relations import Column, Relation, Scope, equalities
from dpstream.pipelines.statements.rules import RULES

PRIVATE = Relation({"uid": Column(None, unit=True), "x": Column(None)}, True)
PUBLIC = Relation({"x": Column(None)}, False)


def joined(sql: str, right: Relation = PRIVATE, left: Relation = PRIVATE) -> Scope:
    scope = Scope("a", left)
    [join] = parse_one(f"SELECT 1 FROM a {sql}").args["joins"]
    scope.joined("b", right, join)
    return scope


def column(text: str) -> exp.Expression:
    return parse_one(text)


def test_an_inner_join_has_the_unit_on_both_sides() -> None:
    scope = joined("JOIN b ON a.uid = b.uid")
    assert scope.is_unit(column("a.uid")) and scope.is_unit(column("b.uid"))
    assert not scope.is_unit(column("a.x"))


def test_an_outer_join_leaves_one_side_or_needs_both() -> None:
    left = joined("LEFT JOIN b ON a.uid = b.uid")
    assert left.is_unit(column("a.uid")) and not left.is_unit(column("b.uid"))
    right = joined("RIGHT JOIN b ON a.uid = b.uid")
    assert right.is_unit(column("b.uid")) and not right.is_unit(column("a.uid"))
    full = joined("FULL JOIN b ON a.uid = b.uid")
    assert not full.is_unit(column("a.uid"))
    assert full.is_unit(column("COALESCE(a.uid, b.uid)")) and full.is_unit(full.unit())


def test_a_public_relation_adds_no_unit() -> None:
    scope = joined("JOIN b ON a.x = b.x", PUBLIC)
    assert scope.private and scope.unit().sql() == '"a"."uid"'
    assert not joined("JOIN b ON a.x = b.x", PUBLIC, PUBLIC).private


@pytest.mark.parametrize(
    ("sql", "right", "code"),
    [
        ("JOIN b ON a.x = b.x", PRIVATE, "join-without-unit"),
        ("CROSS JOIN b", PRIVATE, "join-without-unit"),
        ("JOIN b ON a.uid = b.uid OR a.x = b.x", PRIVATE, "join-without-unit"),
        ("RIGHT JOIN b ON a.x = b.x", PUBLIC, "outer-join-public"),
        ("JOIN b ON a.uid = b.y", PUBLIC, "unknown-column"),
        ("JOIN b USING (uid)", PRIVATE, "join-kind"),
        ("LEFT JOIN b", PUBLIC, "join-kind"),
        ("JOIN b ON a.uid = b.uid AND SUM(a.x) > 1", PRIVATE, "aggregate-place"),
    ],
)
def test_joins_that_are_refused(sql: str, right: Relation, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        joined(sql, right)
    assert RULES[code].text in str(error.value)


def test_only_what_must_hold_is_an_equality() -> None:
    pairs = equalities(column("(a.x = b.x) AND a.y = (b.y) AND (a.z = b.z OR TRUE)"))
    assert [(one.name, other.name) for one, other in pairs] == [("x", "x"), ("y", "y")]


def test_two_relations_have_two_names() -> None:
    scope = Scope("a", PRIVATE)
    [join] = parse_one("SELECT 1 FROM a JOIN a ON a.uid = a.uid").args["joins"]
    with pytest.raises(DpstreamError) as error:
        scope.joined("a", PRIVATE, join)
    assert RULES["duplicate-column"].text in str(error.value)


def test_a_unit_or_a_constant_is_no_unit() -> None:
    scope = joined("FULL JOIN b ON a.uid = b.uid")
    assert not scope.is_unit(column("COALESCE(a.uid, 5)"))
    assert not scope.is_unit(column("COALESCE(5, a.uid, b.uid)"))
