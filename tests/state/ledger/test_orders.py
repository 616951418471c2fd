"""What an order may do: its reads lie in what it pays for, and orders that are none."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.sessions.table import Quotas, Rules
from dpstream.state.ledger import orders
from dpstream.state.ledger.balances import Balances
from dpstream.state.ledger.orders import (
    Planned,
    SessionRefusedError,
    Views,
    check_analyst,
    planned,
)
from tests.accounting.regions.spaces import amounts_of, members, some_boxes
from tests.state.ledger.region_conformance import initials, order, table


def reads(orders_: int, grid: int) -> None:
    """Every read point is asked, is charged, and had enough."""
    rng, model = np.random.default_rng(0), table(grid=grid)
    sizes, seen = model.space.sizes, 0
    for number in range(orders_):
        if number % 15 == 0:
            state = Balances.first(model)
        boxes, amount = some_boxes(rng, sizes), int(rng.integers(1, 4))
        cover = ("city", "age")[: int(rng.integers(3))]
        question = order(boxes, amount, drop=True, cover=cover)
        decision, read = planned(question, state, Rules(), 0)
        inside, paid = members(boxes, sizes), members(decision.charged, sizes)
        enough = initials(model, "epsilon") - amounts_of(state.spent["epsilon"]) >= amount
        assert (members(read, sizes) == (inside & paid)).all() and (enough | ~paid).all()
        assert decision.accepted == bool(len(read)) and (decision.accepted or not paid.any())
        if decision.accepted:
            seen += 1
            spent = charge(state.spent["epsilon"], decision.charged, amount)
            state = Balances(model, spent={**state.spent, "epsilon": spent})
    assert seen > orders_ // 3


@pytest.mark.parametrize("grid", [1, 4])
def test_reads_are_asked_and_paid(grid: int) -> None:
    reads(60, grid)


def test_reading_all_that_was_asked_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_common", lambda boxes, _: boxes)
    with pytest.raises(AssertionError):
        reads(60, 1)


def test_reading_all_that_is_charged_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_common", lambda _, others: others)
    with pytest.raises(AssertionError):
        reads(60, 4)


def test_only_points_beside_the_asked_ones_have_enough() -> None:
    """Then nothing is charged, with drop too."""
    model = table()
    box = model.space.box(city=("A", "B"), initial=("0.000008", None))
    state = Balances.first(model)
    spent = charge(state.spent["epsilon"], box, 16)
    state = Balances(model, spent={**state.spent, "epsilon": spent})
    plan = planned(order(box, 1, drop=True, cover=("city",)), state, Rules(), 0)
    assert not plan.decision.accepted and not len(plan.read) and not len(plan.decision.charged)


@pytest.mark.parametrize(
    ("boxes", "more"),
    [
        (table().space.everything * 2, {}),
        (table().space.everything.astype(float), {}),
        (np.repeat(table().space.everything, 2, axis=0), {}),
        (table().space.everything, {"cover": ("none",)}),
        (table().space.everything, {"amount": 0}),
        ([[[0, float("nan")]] * 4], {}),
    ],
)
def test_orders_that_are_none(boxes: Any, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        planned(order(boxes, **more), Balances.first(table()), Rules(), 0)


def test_no_boxes_are_refused_without_a_charge() -> None:
    plan = planned(order(table().space.everything[:0]), Balances.first(table()), Rules(), 0)
    assert not plan.decision.accepted and plan.decision.largest == 0


def test_too_many_boxes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_QUERY_BOXES", 2)
    model = table()
    state = Balances.first(model)
    spent = charge(state.spent["epsilon"], model.space.box(age=(12, 13), city=("B", "C")), 16)
    state = Balances(model, spent={**state.spent, "epsilon": spent})
    with pytest.raises(UsageError, match="drop"):
        planned(order(model.space.everything, drop=True), state, Rules(), 0)


def test_views_tell_of_kinds_that_records_have() -> None:
    views = Views(Balances.first(table(rho=False)), 7)
    assert views.usable == 7 and not views.spent("epsilon").amounts.any()
    with pytest.raises(UsageError, match="kind"):
        views.spent("rho")


def test_a_refusal_says_what_would_pass() -> None:
    model = table()
    box = model.space.box(initial=("0.000008", None))
    plan: Planned = planned(order(box, 9), Balances.first(model), Rules(), 0)
    error = SessionRefusedError(plan.decision)
    assert "at most 8e-06" in error.fix and "in 1 box" in error.rule and error.exit_code == 3
    make, given = error.__reduce__()  # as it comes back from another process
    assert make(*given).args == error.args and make(*given).decision.largest == 8
    rules = Rules(quotas=Quotas(epsilon={"ann": 5}))
    own = Balances.first(model).with_own(("epsilon", "ann"), [])
    assert planned(order(box, 9), own, rules, 0).decision.largest == 5


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_of_analysts(name: str) -> None:
    check_analyst("ann " + "x" * 190)
    with pytest.raises(UsageError, match="analyst"):
        check_analyst(name)
