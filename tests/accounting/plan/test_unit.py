"""The identity of a privacy unit, the units that several runs have in common, and their cost."""

import itertools
import math
from fractions import Fraction
from typing import Any

import mpmath
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import Spend, total_of, within
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan import unit as module
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.plan.unit import (
    Account,
    UnitIdentity,
    common_unit,
    composed,
    identity_of,
    several_mu,
    together,
)
from dpstream.state.ledger.events import Charge
from tests.accounting.plans import DAY, Make


class Entry(msgspec.Struct, frozen=True):
    """What the ledger keeps of a charge, as far as the unit matters."""

    unit: str = "user over the whole stream"
    identity: str = ""
    periods: int | None = 1
    together: int | None = 1
    epsilon: float = 1.0
    delta: float = 1e-7
    mu: float | None = 0.25
    threshold_delta: float = 1e-8
    rho: float | None = None


def per(period: int, phase: int = 0, event_time: str = "time", name: str = "user") -> UnitIdentity:
    return UnitIdentity(name, "string", event_time, period, phase)


ALL = UnitIdentity("user", "string")


def test_the_text_is_canonical_and_has_a_version() -> None:
    assert ALL.text == 'unit/1 {"name":"user","type":"string"}'
    month = per(30 * DAY, 15 * DAY)
    assert month.text == (
        'unit/1 {"event_time":"time","name":"user","period":2592000000000,'
        '"phase":1296000000000,"type":"string"}'
    )
    for unit in (ALL, month, per(7, 3, "ä\n", 'a"b')):
        assert UnitIdentity.read(unit.text) == unit
    assert (
        month.description
        == "user (string), per 30 days of time, counted from 15 days into 1970 (UTC)"
    )
    assert ALL.description == "user (string), all records"


@pytest.mark.parametrize(
    "text",
    [
        "user over the whole stream",
        'unit/2 {"name":"user","type":"string"}',
        '{"name":"user","type":"string"}',
        'unit/1 {"type":"string","name":"user"}',
        'unit/1 {"name":"user","type":"string","more":1}',
        'unit/1 {"name":"user","period":5,"type":"string"}',
        'unit/1 {"event_time":"t","name":"user","period":5,"phase":5,"type":"string"}',
    ],
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="unit in another form") as caught:
        UnitIdentity.read(text)
    assert caught.value.field == "account.path"


def test_what_the_identity_of_a_plan_is(make_plan: Make) -> None:
    plan = make_plan(period=100_000_000, windows=3)
    first = identity_of(plan)
    assert first == UnitIdentity("user", "string", "time", 100_000_000, 0)
    assert identity_of(make_plan(windows=3)) == ALL

    def moved(micros: int) -> UnitIdentity:
        timeline = plan.timeline
        ends = {"start": timeline.start + micros, "end": timeline.end + micros}  # type: ignore[operator]
        return identity_of(
            msgspec.structs.replace(plan, timeline=msgspec.structs.replace(timeline, **ends))
        )

    assert moved(100_000_000) == moved(-300_000_000) == first
    others = [
        moved(1),
        moved(50_000_000),
        identity_of(msgspec.structs.replace(plan, event_time="arrival")),
        identity_of(msgspec.structs.replace(plan, unit=Field("user", "int"))),
        identity_of(msgspec.structs.replace(plan, unit=Field("account"))),
        identity_of(make_plan(period=100_000_001, windows=3)),
        identity_of(make_plan(windows=3)),
        identity_of(plan, "person"),
    ]
    assert len({unit.text for unit in (first, *others)}) == 9
    column = msgspec.structs.replace(plan, unit=Field("account"))
    assert identity_of(column, "person") == identity_of(plan, "person")


# --- the common unit -----------------------------------------------------------------------------


def cells(units: list[UnitIdentity], length: int) -> list[set[int]]:
    """The finest partition of times 0 .. length - 1 of which every unit's periods are parts."""
    bound = list(range(length))

    def root(i: int) -> int:
        return i if bound[i] == i else root(bound[i])

    for unit, (a, b) in itertools.product(units, itertools.pairwise(range(length))):
        assert unit.period is not None and unit.phase is not None
        if (a - unit.phase) // unit.period == (b - unit.phase) // unit.period:
            bound[root(b)] = root(a)
    groups: dict[int, set[int]] = {}
    for time in range(length):
        groups.setdefault(root(time), set()).add(time)
    return list(groups.values())


@pytest.mark.parametrize("shapes", [((2, 1), (3, 0)), ((4, 3), (6, 1)), ((4, 3), (6, 0)),
                                    ((5, 2), (5, 3)), ((3, 2), (12, 5)), ((2, 0), (3, 1), (4, 2)),
                                    ((6, 5), (6, 5)), ((1, 0), (7, 6)), ((3, 1), (7, 4)),
                                    ((4, 1), (6, 3), (10, 5))])  # fmt: skip
def test_the_common_unit_by_enumeration(shapes: tuple[tuple[int, int], ...]) -> None:
    """Against joining periods that share a time until nothing is left to join."""
    units, length = [per(*shape) for shape in shapes], 240
    unit_cells = cells(units, length)
    for order in itertools.permutations(units):
        unit = common_unit(order)
        inner = [cell for cell in unit_cells if 0 not in cell and length - 1 not in cell]
        if unit.period is None:
            assert inner == []
            continue
        assert unit.phase is not None
        ids = {frozenset((t - unit.phase) // unit.period for t in cell) for cell in inner}
        assert all(len(cell_ids) == 1 for cell_ids in ids)
        assert {len(cell) for cell in inner} == {unit.period}


def test_the_common_unit_of_long_periods_is_exact() -> None:
    """Its phase is that of both, in whole microseconds, where products exceed a float's digits."""
    one, other = per(30 * DAY + 7, 11 * DAY + 3), per(7 * DAY + 1, 5 * DAY + 2)
    for unit in (common_unit([one, other]), common_unit([other, one])):
        assert isinstance(unit.phase, int) and unit.period == math.lcm(30 * DAY + 7, 7 * DAY + 1)
        assert unit.phase % (30 * DAY + 7) == 11 * DAY + 3
        assert unit.phase % (7 * DAY + 1) == 5 * DAY + 2


def test_a_run_without_a_period_has_all_records_in_common() -> None:
    for units in ([ALL, per(DAY)], [per(DAY), ALL], [ALL, ALL]):
        assert common_unit(units) == ALL


def test_units_that_add_up_to_nothing_are_refused() -> None:
    month = per(30 * DAY)
    for other, words in (
        (per(30 * DAY, event_time="arrival"), "event time"),
        (per(30 * DAY, name="account"), "name or type"),
        (UnitIdentity("user", "int"), "name or type"),
    ):
        for pair in ((month, other), (other, month)):
            with pytest.raises(PolicyError, match=f"another privacy unit by .*{words}") as caught:
                composed([Entry(identity=unit.text, periods=3) for unit in pair])
            assert caught.value.field == "data_set"


def test_what_units_in_common_cost() -> None:
    """A month of whole days: 30 units of the days' run; half a month later: all the stream has."""
    month, later, day = per(30 * DAY), per(30 * DAY, 15 * DAY), per(DAY)
    entries = [Entry(identity=month.text, periods=12), Entry(identity=day.text, periods=360)]
    composition = composed(entries)
    assert (
        composition.unit_text == month.description
        and composition.units == [1, 30]
        and len(composition.warnings) == 1
    )
    assert [s.mu for s in composition.spends] == [0.25, pytest.approx(math.sqrt(30) * 0.25)]
    assert [s.threshold_delta for s in composition.spends] == [1e-8, pytest.approx(30e-8)]
    # Its parts are counted: alone it promises nothing, and nothing is rounded down.
    several = composition.spends[1]
    assert Fraction(several.threshold_delta) >= 30 * Fraction(1e-8)
    assert math.isinf(several.epsilon) and several.delta >= 1e-7 + several.threshold_delta
    # Windows that meet two, three or any number of its days.
    for units, factor in ((2, 60), (3, 90), (None, 900), (30, 900), (1000, 900)):
        days = msgspec.structs.replace(entries[1], together=units)
        assert composed([entries[0], days]).spends[1].mu == pytest.approx(math.sqrt(factor) * 0.25)
    # A run of four days has no more than four.
    short = msgspec.structs.replace(entries[1], periods=4)
    assert composed([entries[0], short]).units == [1, 4]
    apart = [Entry(identity=unit.text, periods=12) for unit in (month, later)]
    composition = composed(apart)
    assert composition.unit_text == "user (string), all records" and composition.units == [12, 12]
    # What used to be composed as one unit: sqrt(2) mu.
    assert all(s.mu == pytest.approx(math.sqrt(12) * 0.25) for s in composition.spends)
    # Five weeks and 30 days: 210 days in common, whatever the end.
    weeks = Entry(identity=per(35 * DAY).text, periods=None)
    composition = composed([msgspec.structs.replace(apart[0], periods=None), weeks])
    assert composition.unit_text == per(210 * DAY).description and composition.units == [7, 6]
    for endless in (apart[0], Entry(identity=ALL.text)):
        pair = [endless, msgspec.structs.replace(apart[1], periods=None)]
        with pytest.raises(PolicyError, match="no last period") as caught:
            composed(pair)
        assert caught.value.field == "data_set"


def test_one_unit_costs_what_its_runs_say() -> None:
    entries = [Entry(identity=per(DAY).text, periods=None, together=None)] * 3
    composition = composed(entries)
    assert (
        composition.spends == entries
        and composition.units == [1, 1, 1]
        and composition.warnings == []
    )
    assert composed([]).unit_text is None
    assert within(composed(entries[:1]).spends, 1.0, 1e-7)


PLAIN = Entry(
    identity=per(DAY).text, periods=5, together=2, mu=None, threshold_delta=0.0, epsilon=0.7,
    delta=1e-9,
)  # fmt: skip


def of_all_records(plain: Entry) -> Spend:
    return composed([Entry(identity=ALL.text), plain]).spends[1]


def test_plain_charges_of_periods_that_share_no_window_compose() -> None:
    """91 months of (2, 1e-7) are (182, 9.1e-6): no window has two units of a person."""
    apart = msgspec.structs.replace(PLAIN, together=1, periods=91, epsilon=2.0, delta=1e-7)
    spend = of_all_records(apart)
    assert 182 <= spend.epsilon <= 182 * (1 + 1e-9)
    assert 91e-7 <= spend.delta <= 91e-7 * (1 + 1e-9)
    assert of_all_records(msgspec.structs.replace(apart, delta=0.02)).delta == 1.0


def test_a_plain_charge_of_several_units_is_group_privacy() -> None:
    spend = of_all_records(PLAIN)
    assert spend.mu is None and spend.threshold_delta == 0
    assert spend.epsilon == pytest.approx(3.5) and spend.epsilon >= 3.5
    with mpmath.workdps(40):
        exact = mpmath.mpf(1e-9) * sum(mpmath.exp(i * mpmath.mpf(0.7)) for i in range(5))
        assert exact <= spend.delta <= exact * (1 + mpmath.mpf("1e-11"))
    # A pure budget stays pure; a stream without end has the days of the month.
    pure = msgspec.structs.replace(PLAIN, delta=0.0)
    assert of_all_records(pure).delta == 0.0
    endless = msgspec.structs.replace(PLAIN, periods=None)
    composition = composed([Entry(identity=per(30 * DAY).text), endless])
    assert composition.units == [1, 30] and composition.spends[1].epsilon == pytest.approx(21)


@pytest.mark.parametrize(("epsilon", "periods"), [(0.1, 50_000), (1e-3, 700_000), (4.0, 6)])
def test_a_plain_charge_of_very_many_units_promises_no_delta(epsilon: float, periods: int) -> None:
    """Minutes of months: their sum of e^(i epsilon) is beyond what a float holds."""
    many = msgspec.structs.replace(PLAIN, epsilon=epsilon, periods=periods)
    spend = of_all_records(many)
    assert spend.epsilon >= epsilon * periods * (1 - 1e-12)
    assert spend.delta == 1.0 or periods == 6
    assert of_all_records(msgspec.structs.replace(many, delta=0.01)).delta == 1.0


# --- several units of one person -----------------------------------------------------------------


def test_several_units_are_never_rounded_down() -> None:
    assert several_mu(0.3, 1, 1) == several_mu(0.3, 1, None) == 0.3
    for units, alike, factor in ((1, 1, 1), (4, 1, 4), (4, 2, 8), (4, 9, 16), (4, None, 16)):
        assert several_mu(0.3, units, alike) == pytest.approx(math.sqrt(factor) * 0.3)
        assert several_mu(0.3, units, alike) >= math.sqrt(factor) * 0.3


LINES = [
    Timeline(0, end, window, slide, 1, lateness, period=period)
    for window, slide, period in itertools.product(
        (1, 2, 3, 4, 6, 9), (1, 2, 3, 4), (1, 2, 3, 5, 6, 8)
    )
    for end, lateness in ((7, 0), (24, 2), (None, 0), (None, 5))
    if slide <= window
]  # fmt: skip


def test_how_many_periods_a_window_meets_by_enumeration() -> None:
    for line in LINES:
        windows = 200 if line.end is None else line.windows
        most = 0
        for window in range(windows):
            begin, end = line.window_bounds(window)
            events = np.arange(begin, end if line.end is None else min(end, line.end))
            most = max(most, len(set(line.period_of(events).tolist())))
        assert line.periods_met == most, line
    assert max(line.periods_met for line in LINES) == 9
    assert {line.periods for line in LINES} >= {None, 1, 7, 24}
    assert Timeline(0, None, 5, 5, 1).periods_met == Timeline(0, 50, 5, 5, 1).periods == 1
    year = Timeline(5, 5 + 10**7, 10, 1, 1, period=4 * 10**6)
    assert year.periods_met == 2 and year.periods == 3


def test_what_adds_up(make_plan: Make) -> None:
    apart, meeting = {"period": 100_000_000, "windows": 4}, {"period": 50_000_000, "windows": 4}
    assert together(make_plan(**apart)) == together(make_plan(public_keys="x", **apart)) == 1
    assert together(make_plan(public_keys="x", **meeting)) == 2
    assert together(make_plan(**meeting)) is None


def test_zcdp_of_several_units() -> None:
    """k^2 rho whatever adds up; with thresholds the run's own guarantee, k times over."""
    day, month = per(DAY), per(30 * DAY)
    noisy = Entry(identity=day.text, periods=5, mu=None, rho=0.01, threshold_delta=0.0)
    other = Entry(identity=month.text)
    spend = composed([noisy, other]).spends[0]
    assert spend.rho is not None
    assert spend.rho == pytest.approx(25 * 0.01) and spend.rho >= 0.25 and spend.mu is None
    guarded = msgspec.structs.replace(noisy, threshold_delta=1e-8)
    spend = composed([guarded, other]).spends[0]
    assert spend.rho is None and spend.epsilon >= 5 * guarded.epsilon
    assert spend.delta > 5 * guarded.delta


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
        return account.total(more)
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
