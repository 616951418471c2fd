"""Decisions against all points of a small space."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.decision import decide
from dpstream.accounting.regions.spent import Spent, untouched
from tests.accounting.regions.spaces import amounts_of, members, small, some_boxes


def left_of(spent: Spent) -> Int64:
    """initial - spent of every point."""
    sizes = spent.space.sizes
    initial = np.arange(sizes[2]) * spent.step
    return np.broadcast_to(initial, tuple(sizes)) - amounts_of(spent)


def check_against_points(spent: Spent, boxes: Int64, amount: int) -> None:
    """All of a decision, with and without drop, on a grid of one."""
    sizes, left = spent.space.sizes, left_of(spent)
    inside = members(boxes, sizes)
    enough = inside & (left >= amount)
    strict, loose = (decide(spent, boxes, amount, drop) for drop in (False, True))
    for found in (strict, loose):
        assert (members(found.asked, sizes) == inside).all()
        assert found.largest == max(left[inside].min(), 0)
        assert (members(found.lacking, sizes) == inside & ~enough).all()
        for box, least in zip(found.lacking, found.left.tolist(), strict=True):
            assert least == max(left[members(box[None], sizes)].min(), 0)
    assert strict.accepted == enough[inside].all()
    assert (members(strict.charged, sizes) == (inside & strict.accepted)).all()
    assert loose.accepted == enough.any()
    assert (members(loose.charged, sizes) == enough).all()


def test_decisions_are_those_of_every_point() -> None:
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        spent = untouched(small(step=step), "epsilon")
        for amount in (1, 3, 2, 1, 5):
            for _ in range(12):
                boxes = some_boxes(rng, spent.space.sizes)
                check_against_points(spent, boxes, int(rng.integers(1, 12)))
            spent = charge(spent, some_boxes(rng, spent.space.sizes), amount)


def test_the_largest_amount_passes_and_one_more_does_not() -> None:
    spent = charge(untouched(small(), "epsilon"), small().box(age=(12, 14)), 3)
    box = small().box(age=(11, 13), initial=("0.000008", None))
    largest = decide(spent, box, 100).largest
    assert largest == 5 and decide(spent, box, 5).accepted and not decide(spent, box, 6).accepted


def test_the_snapped_box_is_checked() -> None:
    space = small(grid=4)
    spent = charge(untouched(space, "epsilon"), space.box(age=(10, 11)), 9)
    box = space.box(age=(12, 13), initial=("0.000010", None))
    assert not decide(spent, box, 5).accepted
    assert decide(spent, space.box(age=(14, 15), initial=("0.000010", None)), 5).accepted


def test_a_record_without_budget_is_never_used() -> None:
    spent = untouched(small(), "epsilon")
    assert not decide(spent, small().whole, 1).accepted
    assert decide(spent, small().whole, 1, drop=True).charged[:, 2, 0].tolist() == [1]


@pytest.mark.parametrize("amount", [0, -5, 1 << 40, 0.5])
def test_amounts_that_are_none(amount: int) -> None:
    with pytest.raises(UsageError):
        decide(untouched(small(), "epsilon"), small().whole, amount)


def test_no_boxes_are_no_query() -> None:
    with pytest.raises(UsageError, match="are none"):
        decide(untouched(small(), "epsilon"), small().whole[:0], 1)
