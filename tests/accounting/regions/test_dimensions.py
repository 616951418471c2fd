"""Values become coordinates by stated rules, records and predicates by the same ones."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.dimensions import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Timestamp,
)

AGE = Integer(name="age", low=-2, high=5)
FARE = Real(name="fare", low=-0.3, high=1.0, step=0.1)
CITY = Category(name="city", codes=("Rome", "Bern", "Oslo"))
TIME = Timestamp(name="time", low=1_000, high=4_500, step=1_000)
LEFT = Budget(name="left", most=2.0, step=250_000)


def test_integers() -> None:
    coordinates = AGE.coordinates(np.array([-3, -2, 0, 4, 5]))
    assert coordinates.at.tolist() == [0, 0, 2, 6, 0]
    assert coordinates.usable.tolist() == [False, True, True, True, False]
    assert AGE.values == AGE.size == 7


@pytest.mark.parametrize("kind", ["i1", "u1", "i8", "u8", "f4", "f8"])
def test_integers_of_any_width(kind: str) -> None:
    wide = Integer(name="n", low=-1_000, high=1_000)
    coordinates = wide.coordinates(np.array([0, 7, 100], kind))
    assert coordinates.at.tolist() == [1_000, 1_007, 1_100] and coordinates.usable.all()


def test_numbers_that_are_not_whole_or_far_away_are_outside() -> None:
    coordinates = AGE.coordinates(np.array([0.5, np.nan, np.inf, -np.inf, 1e300, 2.0]))
    assert coordinates.usable.tolist() == [False] * 5 + [True]
    assert not AGE.coordinates(np.array([1 << 63], np.uint64)).usable.any()


def test_missing_values_have_a_point_of_their_own_or_are_refused() -> None:
    point = Integer(name="age", low=-2, high=5, missing="point")
    values, null = np.array([0, 9, 1]), np.array([False, False, True])
    coordinates = point.coordinates(values, null)
    assert point.size == 8 and coordinates.at.tolist() == [2, 7, 7] and coordinates.usable.all()
    assert AGE.coordinates(values, null).usable.tolist() == [True, False, False]


def test_reals_lie_between_the_lines_of_decimals() -> None:
    lines = [float(f"{n / 10:.1f}") for n in range(-3, 11)]
    coordinates = FARE.coordinates(np.array(lines))
    assert coordinates.at[:-1].tolist() == list(range(13)) and not coordinates.usable[-1]
    below = np.nextafter(np.array(lines[1:]), -10)
    assert FARE.coordinates(below).at.tolist() == list(range(13))
    assert [FARE.edge(line) for line in lines] == list(range(14))
    assert not FARE.coordinates(np.array([np.nan, np.inf, -0.31])).usable.any()


def test_instants() -> None:
    coordinates = TIME.coordinates(np.array([999, 1_000, 1_999, 2_000, 4_499, 4_500]))
    assert coordinates.at.tolist() == [0, 0, 0, 1, 3, 0] and coordinates.usable.tolist() == [
        0,
        1,
        1,
        1,
        1,
        0,
    ]
    stamps = np.array([2_000, "NaT"], "datetime64[us]")
    assert TIME.coordinates(stamps).usable.tolist() == [True, False]
    assert TIME.values == 4 and TIME.edge(2_000) == 1 and TIME.edge(4_500) == 4


@pytest.mark.parametrize("kind", [np.str_, object])
def test_categories(kind: Any) -> None:
    coordinates = CITY.coordinates(np.array(["Oslo", "Rome", "Paris", "Bern"], kind))
    assert coordinates.at[coordinates.usable].tolist() == [2, 0, 1] and not coordinates.usable[2]
    assert not CITY.coordinates(np.array([None, np.nan], object)).usable.any()
    assert [CITY.edge(code) for code in CITY.codes] == [0, 1, 2]


def test_budgets_go_down_and_a_record_without_one_has_none() -> None:
    coordinates = LEFT.coordinates(np.array([0.9999999, 1.0, np.nan, -1.0, np.inf, 0.2]))
    assert coordinates.at.tolist() == [3, 4, 0, 0, 8, 0]
    assert coordinates.usable.tolist() == [True, True, False, False, True, True]
    assert LEFT.coordinates(np.array([1.0, 1.0]), np.array([True, False])).at.tolist() == [0, 4]
    # At least .6 are those of .75 and more.
    assert LEFT.edge(0.6) == 3 and LEFT.edge(0) == 0 and LEFT.edge(100) == 9


@pytest.mark.parametrize(("dimension", "value"), [
    (FARE, 0.55), (TIME, 1_500), (CITY, "Paris"), (AGE, "old"), (AGE, float("nan")),
    (FARE, float("inf")), (LEFT, "none"),
])  # fmt: skip
def test_edges_that_are_none(dimension: Dimension, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        dimension.edge(value)
    assert str(value) not in str(refused.value)


def test_edges_beyond_are_the_ends_and_parts_of_integers_go_up() -> None:
    assert AGE.edge(-100) == 0 and AGE.edge(100) == 7 and AGE.edge(0.5) == AGE.edge(1) == 3
    assert FARE.edge(-9) == 0 and FARE.edge(9.99) == 13


@pytest.mark.parametrize("values", [np.array(["1"]), np.array([1 + 1j]), np.array([b"x"])])
def test_columns_of_another_type_are_refused(values: Any) -> None:
    for dimension in (AGE, FARE, TIME, LEFT):
        with pytest.raises(UsageError, match="must be a column of"):
            dimension.coordinates(values)
    with pytest.raises(UsageError, match="must be a column of texts"):
        CITY.coordinates(np.array([1.0]))


@pytest.mark.parametrize("wrong", [
    Integer(name="", low=0, high=1), Integer(name="x", low=1, high=1),
    Integer(name="x", low=2, high=1), Integer(name="x", low=0, high=1 << 41),
    Integer(name="x", low=1 << 62, high=(1 << 62) + 5), Integer(name="x", low=0, high=5, grid=0),
    Integer(name="x", low=0, high=5, grid=6), Real(name="x", low=0, high=1, step=0.3),
    Real(name="x", low=0, high=1, step=0), Real(name="x", low=0, high=float("nan"), step=1),
    Real(name="x", low=1e15, high=1e15 + 1, step=0.01), Timestamp(name="x", low=0, high=9, step=0),
    Timestamp(name="x", low=9, high=0), Category(name="x", codes=()),
    Category(name="x", codes=("a", "a")), Category(name="x", codes=("a\0",)),
    Budget(name="x", most=-1.0), Budget(name="x", most=1e6), Budget(name="x", most=1.0, step=0),
    Budget(name="x", most=1.0, missing="point"),
])  # fmt: skip
def test_dimensions_without_meaning_are_refused(wrong: Dimension) -> None:
    with pytest.raises(UsageError):
        wrong.check()


def test_the_others_are_accepted() -> None:
    for dimension in (AGE, FARE, CITY, TIME, LEFT):
        dimension.check()
