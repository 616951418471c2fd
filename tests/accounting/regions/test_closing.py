"""Closed boxes: refused to every query, one region, and nothing beside them changes."""

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions import closing
from dpstream.accounting.regions.amounts import MOST
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.closing import closable, close
from dpstream.accounting.regions.decision import decide
from dpstream.accounting.regions.spent import untouched
from tests.accounting.regions.spaces import amounts_of, members, small, some_boxes, wide


def closings(histories: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(histories):
        space = small()
        spent = untouched(space, "epsilon")
        for _ in range(6):
            spent = charge(spent, some_boxes(rng, space.sizes), int(rng.integers(1, 4)))
        before, boxes = amounts_of(spent), some_boxes(rng, space.sizes)
        inside = members(boxes, space.sizes)
        after = amounts_of(close(spent, boxes))
        assert (after[inside] == MOST).all() and (after[~inside] == before[~inside]).all()


def test_closed_points_have_spent_everything_and_no_other() -> None:
    closings(40)


def test_closing_at_a_small_amount_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "MOST", 3)
    with pytest.raises(AssertionError):
        closings(40)


def test_ranges_closed_one_after_the_other_are_one_region() -> None:
    space = wide(3, 100)
    spent = untouched(space, "epsilon")
    for low in range(0, 60, 10):
        spent = charge(spent, space.box(x0=(low, low + 7), x1=(3, 60), initial=(1, None)), 1_000)
        spent = close(spent, space.box(x0=(low, low + 10)))
    assert len(spent.boxes) == 2 and spent.amounts.max() == MOST
    box = space.box(x0=(50, 70), initial=(1_000, None))
    decision = decide(spent, box, 1, drop=True)
    assert decision.accepted and not decide(spent, box, 1).accepted
    assert decision.charged[:, 0].tolist() == [[60, 70]]
    assert decision.left.tolist() == [0] and decision.lacking[:, 0].tolist() == [[50, 60]]


def test_under_a_full_cap_more_is_closed_never_less() -> None:
    rng = np.random.default_rng(4)
    for cap in (1, 3, 8):
        space = small()
        spent = untouched(space, "epsilon", cap)
        for _ in range(4):
            spent = charge(spent, some_boxes(rng, space.sizes), 2)
        boxes = some_boxes(rng, space.sizes)
        after = close(spent, boxes)
        assert len(after.boxes) <= cap
        assert (amounts_of(after)[members(boxes, space.sizes)] == MOST).all()
        assert (amounts_of(after) >= np.minimum(amounts_of(spent), MOST)).all()


def test_only_whole_cells_are_closed() -> None:
    space = small(grid=4)
    for box in (space.box(age=(10, 12)), space.everything[:0]):
        with pytest.raises(UsageError, match="whole cells"):
            closable(space, box)
    assert len(closable(space, space.box(age=(10, 14)))) == 1
    spent = untouched(space, "epsilon")
    assert close(spent, space.everything[:0]) is spent
