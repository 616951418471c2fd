"""The state: nothing spent, what is most, and which arrays are one.

Decisions against all points of a small space.
"""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions import spent as spending
from dpstream.accounting.regions.amounts import MICRO, MOST
from dpstream.accounting.regions.boxes import disjoint
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.space import Budget, Space
from dpstream.accounting.regions.spent import (
    Own,
    Spent,
    decide,
    outward,
    restored,
    snapped,
    untouched,
)
from tests.accounting.regions.spaces import amounts_of, members, small, some_boxes


def sample_spent() -> Spent:
    """A state of several boxes."""
    spent, rng = untouched(small(), "epsilon"), np.random.default_rng(0)
    for amount in (1, 2, 3, 1):
        spent = charge(spent, some_boxes(rng, spent.space.sizes), amount)
    assert len(spent.boxes) > 5
    return spent


def test_nothing_is_spent_at_first() -> None:
    spent = untouched(small(), "epsilon")
    assert (amounts_of(spent) == 0).all() and len(spent.boxes) == 1
    assert (spent.place, spent.step) == (2, 2)


def test_most_in_boxes() -> None:
    spent, rng = sample_spent(), np.random.default_rng(1)
    for _ in range(50):
        boxes = some_boxes(rng, spent.space.sizes)
        inside = members(boxes, spent.space.sizes)
        assert spent.most_in(boxes) == amounts_of(spent)[inside].max()
    with pytest.raises(UsageError):
        spent.most_in(boxes[:0])


def test_arrays_are_read_only() -> None:
    spent = sample_spent()
    for part in (spent.boxes, spent.amounts):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


def test_a_state_comes_back_from_its_arrays() -> None:
    spent = sample_spent()
    again = restored(spent.space, "epsilon", spent.boxes, spent.amounts, spent.cap)
    assert (amounts_of(again) == amounts_of(spent)).all()
    box = spent.space.box(age=(11, 14))
    one, two = charge(spent, box, 3), charge(again, box, 3)
    assert one.boxes.tobytes() == two.boxes.tobytes() and (one.amounts == two.amounts).all()


def without_last(boxes: Any, amounts: Any) -> Any:
    return boxes[:-1], amounts[:-1]


def doubled(boxes: Any, amounts: Any) -> Any:
    """As many points as the space has, one of them twice and one never."""
    boxes = np.concatenate([boxes, boxes[:1]])
    return boxes, np.concatenate([amounts, amounts[:1]])


def exchanged(boxes: Any, amounts: Any) -> Any:
    """As many points, but two boxes of one size lie on each other."""
    size = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1)
    one = int(np.argmin(size))
    boxes = boxes.copy()
    other = next(n for n in range(len(boxes)) if n != one and size[n] == size[one])
    boxes[other] = boxes[one]
    return boxes, amounts


@pytest.mark.parametrize("broken", [
    without_last, doubled, exchanged,
    lambda b, a: (b.astype(float), a), lambda b, a: (b, a.astype(float)),
    lambda b, a: (b, a[:-1]), lambda b, a: (b[:, :2], a), lambda b, a: (b, a - 100),
    lambda b, a: (b, a + (1 << 62)), lambda b, a: (b[:, :, ::-1], a), lambda b, a: (b + 1, a),
    lambda b, a: (np.concatenate([b] * 40), np.concatenate([a] * 40)),
])  # fmt: skip
def test_arrays_that_are_no_state_are_refused(broken: Any) -> None:
    spent = sample_spent()
    boxes, amounts = broken(np.array(spent.boxes), np.array(spent.amounts))
    with pytest.raises(PolicyError, match="replay the account"):
        restored(spent.space, "epsilon", boxes, amounts, 400)


@pytest.mark.parametrize("cap", [0, -1, 100_001])
def test_caps_that_are_none(cap: int) -> None:
    with pytest.raises(UsageError, match="cap"):
        untouched(small(), "epsilon", cap)


def test_a_kind_that_records_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="kind"):
        untouched(small(), "rho")


def test_every_asked_point_is_in_the_snapped_boxes() -> None:
    rng = np.random.default_rng(0)
    space = small(grid=4)
    for _ in range(100):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert disjoint(snapped_boxes)
        inside = members(boxes, space.sizes)
        charged = members(snapped_boxes, space.sizes)
        assert (charged | ~inside).all()
        for edges in snapped_boxes:
            assert set(edges[0].tolist()) <= {0, 4, 6, 7}
        # No cell that no asked box has a point in.
        for low, high in ((0, 4), (4, 6), (6, 7)):
            met = inside[low:high].any(axis=0)
            assert (charged[low:high] == met).all()


def inward(space: Space, boxes: Int64) -> Int64:
    """Sabotaged: edges move to the grid line inside."""
    snapped_boxes = outward(space, boxes)
    snapped_boxes[:, 0, 0] = np.minimum(-(-boxes[:, 0, 0] // 4) * 4, boxes[:, 0, 1] - 1)
    return snapped_boxes


def test_snapping_inward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "outward", inward)
    with pytest.raises(AssertionError):
        test_every_asked_point_is_in_the_snapped_boxes()


def test_a_grid_of_one_changes_nothing_but_the_number() -> None:
    rng = np.random.default_rng(1)
    space = small()
    for _ in range(30):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert len(snapped_boxes) <= len(boxes)
        assert (members(snapped_boxes, space.sizes) == members(boxes, space.sizes)).all()


def test_missing_values_are_a_cell_of_their_own() -> None:
    space = small(grid=4)
    assert outward(space, space.box(age=(15, 16)))[0, 0].tolist() == [4, 6]
    assert outward(space, np.array([[[6, 7], [0, 1], [0, 1]]]))[0, 0].tolist() == [6, 7]


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
    for outcome in (strict, loose):
        assert (members(outcome.boxes, sizes) == inside).all()
        assert outcome.largest == max(left[inside].min(), 0)
        assert (members(outcome.lacking, sizes) == inside & ~enough).all()
        for box, least in zip(outcome.lacking, outcome.left.tolist(), strict=True):
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


def check_rules(
    spent: Spent, own: Spent, boxes: Int64, amount: int, usable: int, quota: int
) -> bool:
    """All of a decision under an unlock schedule and a quota; whether both were short somewhere."""
    sizes = spent.space.sizes
    initial = np.arange(sizes[2]) * spent.step * usable // MICRO
    budget = np.broadcast_to(initial, tuple(sizes)) - amounts_of(spent)
    rest = quota - amounts_of(own)
    inside = members(boxes, sizes)
    enough = inside & (np.minimum(budget, rest) >= amount)
    for drop in (False, True):
        outcome = decide(spent, boxes, amount, drop, usable, Own(own, quota))
        assert outcome.largest == max(np.minimum(budget, rest)[inside].min(), 0)
        assert (members(outcome.lacking, sizes) == inside & ~enough).all()
        for box, least in zip(outcome.lacking, outcome.left.tolist(), strict=True):
            here = members(box[None], sizes)
            short = budget if (budget[here] < amount).all() else rest
            assert least == max(short[here].min(), 0)
        accepted = enough.any() if drop else enough[inside].all()
        assert outcome.accepted == accepted
        assert (members(outcome.charged, sizes) == (enough if drop else inside & accepted)).all()
    return bool((inside & (budget < amount)).any() and (inside & (rest < amount)).any())


def rule_history() -> None:
    rng, both = np.random.default_rng(3), 0
    for step in (1, 2, 3):
        spent = own = untouched(small(step=step), "epsilon")
        for amount in (1, 3, 2, 1):
            for _ in range(8):
                boxes = some_boxes(rng, spent.space.sizes)
                usable = int(rng.choice([0, 1, 299_999, 500_000, MICRO]))
                both += check_rules(spent, own, boxes, int(rng.integers(1, 7)), usable, 4)
            boxes = some_boxes(rng, spent.space.sizes)
            spent, mine = charge(spent, boxes, amount), bool(rng.integers(2))
            own = charge(own, boxes, amount) if mine else own
    assert both > 10


def test_rules_of_the_steward_are_those_of_every_point() -> None:
    rule_history()


def test_a_share_rounded_up_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spending._left
    monkeypatch.setattr(spending, "_left", lambda *given: real(*given) + (given[-1] < MICRO))
    with pytest.raises(AssertionError):
        rule_history()


def test_the_largest_budgets_do_not_overflow() -> None:
    space = Space((Budget(name="initial", most=1_000.0),))
    spent = restored(space, "epsilon", space.everything, np.array([1 << 61]), 10)
    for usable in (1, MICRO - 1, MICRO):
        assert not decide(spent, space.everything, MOST, True, usable).accepted
    top = space.box(initial=(1_000, None))
    assert decide(untouched(space, "epsilon"), top, MOST).accepted
    assert decide(untouched(space, "epsilon"), top, MOST - 1_000, True, MICRO - 1).accepted
    for drop in (False, True):  # nothing is unlocked, whatever the initial budget
        assert not decide(untouched(space, "epsilon"), top, 1, drop, 0).accepted


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
    assert not decide(spent, small().everything, 1).accepted
    assert decide(spent, small().everything, 1, drop=True).charged[:, 2, 0].tolist() == [1]


@pytest.mark.parametrize("amount", [0, -5, 1 << 40, 0.5])
def test_amounts_that_are_none(amount: int) -> None:
    with pytest.raises(UsageError):
        decide(untouched(small(), "epsilon"), small().everything, amount)


def test_no_boxes_are_no_query() -> None:
    with pytest.raises(UsageError, match="are none"):
        decide(untouched(small(), "epsilon"), small().everything[:0], 1)
