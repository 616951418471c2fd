"""The running account: what is added up run by run is what all runs together cost."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import total_of
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan import account as module
from dpstream.accounting.plan.account import Account
from dpstream.accounting.plan.unit import UnitIdentity, composed
from dpstream.state.ledger.events import Charge
from tests.accounting.plans import DAY

UNITS = [
    UnitIdentity("user", "string"),
    UnitIdentity("user", "string", "time", DAY, 0),
    UnitIdentity("user", "string", "time", 30 * DAY, 0),
    UnitIdentity("user", "string", "time", 30 * DAY, DAY // 2),
    UnitIdentity("user", "int"),
]


def charge(figures: tuple[int, str, float]) -> Charge:
    unit, kind, size = figures
    noise: dict[str, Any] = {"mu": None}
    if kind != "plain":
        noise = {"mu": None, kind: size / 10}
    text = UNITS[unit].text
    return Charge("r", "p", text, size, 1e-9, threshold_delta=0.0, periods=4, **noise)


charges = st.tuples(
    st.integers(0, len(UNITS) - 1), st.sampled_from(["mu", "rho", "plain"]), st.floats(0.01, 1.0)
).map(charge)


def recomposed(runs: list[Charge]) -> object:
    try:
        return total_of(composed(runs).spends)
    except PolicyError as error:
        return str(error)


def incremental(account: Account, more: list[Charge]) -> object:
    try:
        return account._with(more)
    except PolicyError as error:
        return str(error)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(charges, max_size=5),
    st.lists(charges, min_size=1, max_size=2),
    st.sampled_from([(0.1, 1e-12), (1.0, 1e-9), (2.0, 1e-6), (99.0, 1e-6)]),
)
def test_a_proposed_limit_has_room_and_a_smaller_one_has_not(
    runs: list[Charge], more: list[Charge], limit: tuple[float, float]
) -> None:
    if isinstance(recomposed([*runs, *more]), str):
        return  # refused for their units
    account = Account()
    for run in runs:
        account.add(run)
    proposed = account.limit_for(more, *limit)
    assert proposed is not None and account.within(more, *proposed)
    assert proposed[0] >= limit[0] and proposed[1] >= limit[1]
    if proposed[0] > limit[0]:  # four digits, rounded up
        assert not account.within(more, proposed[0] * 0.998, proposed[1])
    if proposed[1] > limit[1]:
        assert not account.within(more, 1e9, limit[1])


def test_no_limit_is_proposed_that_promises_nothing() -> None:
    account = Account()
    assert account.limit_for([charge((0, "plain", 2e9))], 1.0, 1e-6) is None
    large = msgspec.structs.replace(charge((0, "plain", 1.0)), delta=0.02)
    assert account.limit_for([large, large], 1.0, 1e-6) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(charges, max_size=8), st.lists(charges, min_size=1, max_size=2), st.integers(0, 8))
def test_it_is_what_all_runs_together_cost(
    runs: list[Charge], more: list[Charge], left: int
) -> None:
    account, added = Account(), list[Charge]()
    for run in runs:
        account.add(run)
        added.append(run)
        expected = recomposed([*added, *more])
        if isinstance(recomposed(added), str):
            assert isinstance(incremental(account, more), str)  # refused already for what is there
        else:
            assert incremental(account, more) == expected
    account.cut(left)
    if not isinstance(recomposed(added[:left]), str):
        assert incremental(account, more) == recomposed([*added[:left], *more])


def test_a_run_of_a_known_unit_is_not_composed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    account, times = Account(), list[int]()

    def counted(runs: list[Charge]) -> object:
        times.append(len(runs))
        return composed(runs)

    monkeypatch.setattr(module, "composed", counted)
    for number in range(20):
        run = charge((1, "mu", 0.1))
        assert account.within([run], 9.0, 1e-5)
        account.add(run)
        if number == 0:
            assert account.within([], 9.0, 1e-5)
            times.clear()
    assert times == []
    # One of a unit that is new here changes what the others cost.
    assert account.within([charge((2, "mu", 0.1))], 99.0, 1e-2) and times == [21]
    with pytest.raises(PolicyError, match="by name or type"):
        account.within([charge((4, "mu", 0.1))], 99.0, 1e-2)
    assert account.within([charge((1, "mu", 0.1))], 9.0, 1e-5)  # of a unit that is there
