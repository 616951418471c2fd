"""The state: nothing spent, what is most, and which arrays are one."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.spent import Spent, restored, untouched
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
