"""Spaces: which are accepted, boxes of values, coordinates of records."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.embedding import Piece, embedding
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from tests.accounting.regions.spaces import small

AGES = Integer(name="age", low=-2, high=5)
FARE = Real(name="fare", low=-0.3, high=1.0, step=0.1)
CITY = Category(name="city", codes=("Rome", "Bern", "Oslo"))
TIME = Timestamp(name="time", low=1_000, high=4_500, step=1_000)
BUDGETS = Budget(name="left", most=2.0, step=250_000)


def test_integers() -> None:
    coordinates = AGES.coordinates(np.array([-3, -2, 0, 4, 5]))
    assert coordinates.at.tolist() == [0, 0, 2, 6, 0]
    assert coordinates.usable.tolist() == [False, True, True, True, False]
    assert AGES.values == AGES.size == 7


@pytest.mark.parametrize("kind", ["i1", "u1", "i8", "u8", "f4", "f8"])
def test_integers_of_any_width(kind: str) -> None:
    wide = Integer(name="n", low=-1_000, high=1_000)
    coordinates = wide.coordinates(np.array([0, 7, 100], kind))
    assert coordinates.at.tolist() == [1_000, 1_007, 1_100] and coordinates.usable.all()


def test_numbers_that_are_not_whole_or_far_away_are_outside() -> None:
    coordinates = AGES.coordinates(np.array([0.5, np.nan, np.inf, -np.inf, 1e300, 2.0]))
    assert coordinates.usable.tolist() == [False] * 5 + [True]
    assert not AGES.coordinates(np.array([1 << 63], np.uint64)).usable.any()


def test_missing_values_have_a_point_of_their_own_or_are_refused() -> None:
    point = Integer(name="age", low=-2, high=5, missing="point")
    values, null = np.array([0, 9, 1]), np.array([False, False, True])
    coordinates = point.coordinates(values, null)
    assert point.size == 8 and coordinates.at.tolist() == [2, 7, 7] and coordinates.usable.all()
    assert AGES.coordinates(values, null).usable.tolist() == [True, False, False]


def test_reals_lie_between_the_lines_of_decimals() -> None:
    lines = [float(f"{n / 10:.1f}") for n in range(-3, 11)]
    coordinates = FARE.coordinates(np.array(lines))
    assert coordinates.at[:-1].tolist() == list(range(13)) and not coordinates.usable[-1]
    below = np.nextafter(np.array(lines[1:]), -10)
    assert FARE.coordinates(below).at.tolist() == list(range(13))
    assert [FARE.edge(line) for line in lines] == list(range(14))
    assert not FARE.coordinates(np.array([np.nan, np.inf, -0.31])).usable.any()


@pytest.mark.parametrize("step", [0.5, 2.0**-24, 2.0**-30])
@pytest.mark.parametrize("first", [0, -5])
def test_reals_lie_between_the_lines_of_a_power_of_two(step: float, first: int) -> None:
    """Whose decimals have more digits than a float shows."""
    dimension = Real(name="x", low=first * step, high=(first + 99) * step, step=step)
    dimension.check()
    lines = np.array([(first + n) * step for n in range(100)])
    assert dimension.values == 99 and [dimension.edge(float(x)) for x in lines] == [*range(100)]
    assert dimension.coordinates(lines).at[:-1].tolist() == list(range(99))
    assert dimension.coordinates(np.nextafter(lines[1:], -9)).at.tolist() == list(range(99))
    halved = Real(name="x", low=first * step, high=(first + 99) * step, step=step / 2)
    [side] = embedding(Space((dimension, BUDGETS)), Space((halved, BUDGETS))).sides[:1]
    assert side.pieces == (Piece(0, 198, 0, 2),)


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
    coordinates = BUDGETS.coordinates(np.array([0.9999999, 1.0, np.nan, -1.0, np.inf, 0.2]))
    assert coordinates.at.tolist() == [3, 4, 0, 0, 8, 0]
    assert coordinates.usable.tolist() == [True, True, False, False, True, True]
    assert BUDGETS.coordinates(np.array([1.0, 1.0]), np.array([True, False])).at.tolist() == [0, 4]
    # At least .6 are those of .75 and more.
    assert BUDGETS.edge(0.6) == 3 and BUDGETS.edge(0) == 0 and BUDGETS.edge(100) == 9


@pytest.mark.parametrize(("dimension", "value"), [
    (FARE, 0.55), (TIME, 1_500), (CITY, "Paris"), (AGES, "old"), (AGES, float("nan")),
    (FARE, float("inf")), (BUDGETS, "none"),
])  # fmt: skip
def test_edges_that_are_none(dimension: Dimension, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        dimension.edge(value)
    assert str(value) not in str(refused.value)


def test_edges_beyond_are_the_ends_and_parts_of_integers_go_up() -> None:
    assert AGES.edge(-100) == 0 and AGES.edge(100) == 7 and AGES.edge(0.5) == AGES.edge(1) == 3
    assert FARE.edge(-9) == 0 and FARE.edge(9.99) == 13


@pytest.mark.parametrize("values", [np.array(["1"]), np.array([1 + 1j]), np.array([b"x"])])
def test_columns_of_another_type_are_refused(values: Any) -> None:
    for dimension in (AGES, FARE, TIME, BUDGETS):
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
    for dimension in (AGES, FARE, CITY, TIME, BUDGETS):
        dimension.check()


AGE, LEFT = Integer(name="age", low=0, high=9), Budget(name="left", most=1.0)


def test_a_box_of_values() -> None:
    space = small()
    box = space.box(age=(12, 14), initial=("0.000004", None))
    assert box.tolist() == [[[2, 4], [0, 3], [2, 9]]]
    assert space.box().tolist() == space.everything.tolist() == [[[0, 7], [0, 3], [0, 9]]]
    # A bound leaves out missing values, which are at 6.
    assert space.box(age=(12, None))[0, 0].tolist() == [2, 6]
    assert space.box(age=(None, None))[0, 0].tolist() == [0, 7]


def test_records_are_where_their_values_say() -> None:
    columns = {
        "age": np.array([10, 99, 15]),
        "city": np.array(["B", "A", "D"]),
        "initial": np.array([4e-6, 17e-6, 1e-6]),
    }
    at, usable = small().coordinates(columns)
    assert at[:2].tolist() == [[0, 1, 2], [6, 0, 8]] and usable.tolist() == [True, True, False]
    with pytest.raises(UsageError, match="city: has no column"):
        small().coordinates({"age": columns["age"], "initial": columns["initial"]})


def test_a_record_is_in_the_box_of_its_value() -> None:
    space = small()
    for age in range(10, 16):
        low, high = space.box(age=(age, age + 1))[0, 0]
        at, _ = space.coordinates(
            {"age": np.arange(10, 16), "city": np.full(6, "A"), "initial": np.ones(6)}
        )
        assert np.flatnonzero((at[:, 0] >= low) & (at[:, 0] < high)).tolist() == [age - 10]


def test_budgets_of_two_kinds() -> None:
    space = Space((AGE, LEFT, Budget(name="rho", kind="rho", most=0.5)))
    assert (space.budget_place("epsilon"), space.budget_place("rho")) == (1, 2)
    with pytest.raises(UsageError):
        Space((AGE, LEFT)).budget_place("rho")


@pytest.mark.parametrize("wrong", [
    (), (AGE,), (AGE, AGE, LEFT), (LEFT, Budget(name="other", most=1.0)),
    (LEFT, Category(name="c", codes=())),
    (*(Integer(name=str(n), low=0, high=2) for n in range(16)), LEFT),
])  # fmt: skip
def test_spaces_that_are_refused(wrong: tuple[Integer, ...]) -> None:
    with pytest.raises(UsageError):
        Space(wrong)


def test_unknown_dimensions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no dimension 'height'.*known here: ") as caught:
        small().box(height=(1, 2))
    assert all(dimension.name in caught.value.fix for dimension in small().dimensions)
