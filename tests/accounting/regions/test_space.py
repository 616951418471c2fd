"""Spaces: which are accepted, boxes of values, coordinates of records."""

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.dimensions import Budget, Category, Integer
from dpstream.accounting.regions.space import Space
from tests.accounting.regions.spaces import small

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
    with pytest.raises(UsageError, match="not one of the table"):
        small().box(height=(1, 2))
