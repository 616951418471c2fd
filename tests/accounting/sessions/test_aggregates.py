"""Questions: what may be asked and what it needs, coordinates as numbers, names of noise."""

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.parts import cell_at, cells_of
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Space
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    Axis,
    Cells,
    Question,
    average,
    canonical,
    leaves_of,
    line_of,
    median,
    quantiles,
    sum_of,
    tree_column,
)
from tests.sessions import space


@pytest.mark.parametrize(("dimension", "unit"), [
    (Integer(name="x", low=-3, high=5), Fraction(1)),
    (Real(name="x", low=-0.4, high=1.6, step=0.5), Fraction(1, 10)),
    (Real(name="x", low=0, high=100, step=0.25), Fraction(1, 4)),
    (Real(name="x", low=-74.05, high=-73.75, step=0.001), Fraction(1, 1000)),
    (Real(name="x", low=0, high=3_000, step=30), Fraction(30)),
])  # fmt: skip
def test_coordinates_as_numbers(dimension: Integer | Real, unit: Fraction) -> None:
    line = line_of(dimension)
    assert line.unit == unit
    for at in range(min(dimension.values, 20)):
        value = line.unit * line.at(at)
        assert dimension.edge(value) == at
        assert float(value) == pytest.approx(line.low + at * line.step, abs=1e-12)


def test_columns_without_numbers_or_of_too_many() -> None:
    columns = (
        Category(name="x", codes=("A",)),
        Integer(name="y", low=0, high=2),
        Budget(name="e", most=1),
    )
    with pytest.raises(UsageError, match="x: cannot be aggregated") as caught:
        average("x").check(Space(columns))
    assert caught.value.fix.endswith(": y")
    line_of(Integer(name="x", low=0, high=1 << 31))
    for low, high in ((0, 1 << 40), (0, (1 << 31) + 1), (1 << 33, (1 << 33) + 5)):
        with pytest.raises(UsageError, match="too many steps"):
            line_of(Integer(name="x", low=low, high=high))


SPACE = space()


def question(*aggregates: Aggregate, **other: Any) -> Question:
    usual: dict[str, Any] = {"kind": "epsilon", "amount": 1, "aggregates": aggregates}
    return Question(**(usual | other))


def test_columns_that_are_no_numbers() -> None:
    for name in ("city", "epsilon"):
        with pytest.raises(UsageError, match="cannot be aggregated"):
            question(average(name)).check(SPACE)


@pytest.mark.parametrize("bad", [
    (), (COUNT, COUNT), (Aggregate("count", "age"),), (Aggregate("sum"),), (sum_of("x"),),
    (quantiles("age", ()),), (quantiles("age", (1.5,)),), (quantiles("age", (0.5, 0.5)),),
    (Aggregate("sum", "age", (0.5,)),), (Aggregate("count", share=0.0),),
    (Aggregate("count", share=float("nan")),), (COUNT, Aggregate("sum", "age", label="count_sd")),
    # Their figures have other names, but their noise would be one.
    (quantiles("age", (0.25,)), quantiles("age", (0.75,))),
    (Aggregate("quantiles", "age", (0.2, 0.4), label="a"),
     Aggregate("quantiles", "price", (0.6, 0.8), label="a")),
])  # fmt: skip
def test_what_has_no_meaning(bad: tuple[Aggregate, ...]) -> None:
    with pytest.raises(UsageError):
        question(*bad).check(SPACE)


@pytest.mark.parametrize("other", [
    {"amount": 0}, {"amount": -1}, {"amount": 0.5}, {"kind": "delta"},
    {"cells": Cells((Axis("age", (1,)),))},
    {"cells": Cells((Axis("age", (0, 8)),)), "aggregates": (Aggregate("count", label="age"),)},
])  # fmt: skip
def test_questions_without_meaning(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        question(**({"aggregates": (COUNT,)} | other)).check(SPACE)
    question(COUNT, median("age"), cells=Cells((Axis("age", (0, 8)),))).check(SPACE)


def test_names_in_the_answer() -> None:
    assert [a.outputs for a in (COUNT, sum_of("x"), average("x"), median("x"))] == [
        ("count",), ("sum_x",), ("average_x",), ("median_x",),
    ]  # fmt: skip
    assert quantiles("x", (0.25, 0.5)).outputs == ("quantiles_x_0.25", "quantiles_x_0.5")


def test_needs() -> None:
    query = question(COUNT, sum_of("age"), average("age"), median("price"), average("price"))
    needs = query.needs(SPACE, SPACE.everything)
    assert needs.columns == ("age", "price")
    assert [of.column for of in needs.leaves] == ["price"]
    assert question(COUNT).needs(SPACE, SPACE.everything) == ((), ())


def test_leaves_are_the_trees() -> None:
    wide = type(SPACE)((Integer(name="x", low=0, high=10_000, missing="point"),
                        *SPACE.dimensions[3:]))  # fmt: skip
    for low, high in ((0, 10_001), (17, 9_000), (5, 6), (100, 356), (3, 260), (9_998, 10_000)):
        box = wide.everything.copy()
        box[0, 0] = low, high
        of = leaves_of(wide, box, "x")
        column = tree_column("", of.low, of.high, (0.5,))
        at = np.arange(of.low, of.high)
        leaf = (at - of.low) * of.size // of.width
        assert of.size == cells_of(column) and (leaf == cell_at(column, at)).all()
        assert leaf.min() == 0 and leaf.max() < of.size and of.high <= 10_000


def test_what_a_question_says_never_changes() -> None:
    query = question(COUNT, quantiles("age", (0.5, 1)), cells=Cells((Axis("city", (0, 1, 2)),)))
    box = SPACE.box(age=(0, 2))
    assert canonical(query, box) == (
        b'["dpstream session question/1","epsilon",1,[["count","",[],1.0,"count"],'
        b'["quantiles","age",[0.5,1.0],1.0,"quantiles_age"]],[["city",[0,1,2]]],'
        b"[[[3,5],[0,5],[0,2],[0,3],[0,1]]]]"
    )
    others = [
        msgspec.structs.replace(query, **change)
        for change in ({"amount": 2}, {"kind": "rho"}, {"cells": Cells()}, {"aggregates": (COUNT,)})
    ]
    texts = {canonical(other, box) for other in others} | {canonical(query, SPACE.everything)}
    assert len(texts) == 5 and canonical(query, box) not in texts
