"""The identity of a privacy unit, and the cost of a run to it."""

import itertools
import math
from fractions import Fraction

import mpmath
import msgspec
import numpy as np
import pytest

from dpstream.accounting.composition import Spend, decimal_value
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.plan.unit import (
    UnitIdentity,
    cost_to,
    identity_of,
    periods_of,
    several_mu,
    span_of,
    together,
)
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
    span: tuple[int, int | None] | None = None


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
        == "user (string), per 30 days of time, one begins at 1970-01-16T00:00:00Z"
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
    with pytest.raises(PolicyError, match="privacy unit in a format") as caught:
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


# --- other units than the account's --------------------------------------------------------------


def test_another_unit_is_refused() -> None:
    month = per(30 * DAY)
    for other, field in (
        (per(30 * DAY, event_time="arrival"), "budget.covers"),
        (per(30 * DAY, DAY), "budget.covers"),
        (per(31 * DAY), "budget.covers"),
        (per(30 * DAY, name="account"), "unit.name"),
        (UnitIdentity("user", "int"), "unit.name"),
    ):
        for unit, run in ((month, other), (other, month)):
            with pytest.raises(PolicyError) as caught:
                cost_to(unit, Entry(identity=run.text, periods=3))
            assert caught.value.field == field
    with pytest.raises(PolicyError, match="no last period") as caught:
        cost_to(ALL, Entry(identity=month.text, periods=None))
    assert caught.value.field == "account.path"


def test_a_unit_of_whole_parts_costs_them_together() -> None:
    """A month of whole days: 30 units of the days' run, wherever both are counted from."""
    month, day = per(30 * DAY, 3 * DAY), per(DAY)
    entry = Entry(identity=day.text, periods=360)
    spend, units = cost_to(month, entry)
    assert units == 30 and spend.mu == pytest.approx(math.sqrt(30) * 0.25)
    # Its parts are counted: alone it promises nothing, and nothing is rounded down.
    assert Fraction(spend.threshold_delta) >= 30 * Fraction(1e-8)
    assert math.isinf(spend.epsilon) and spend.delta >= 1e-7 + spend.threshold_delta
    # Windows that meet two, three or any number of its days.
    for met, factor in ((2, 60), (3, 90), (None, 900), (30, 900), (1000, 900)):
        days = msgspec.structs.replace(entry, together=met)
        assert cost_to(month, days).spend.mu == pytest.approx(math.sqrt(factor) * 0.25)
    # A run of four days has no more than four, and a person all of its days.
    assert cost_to(month, msgspec.structs.replace(entry, periods=4)).units == 4
    assert cost_to(ALL, entry).units == 360


def test_a_part_of_a_unit_costs_a_replacement() -> None:
    """A week of a person, of a question about all records: 2 mu, 4 rho, and group privacy."""
    week, month = per(7 * DAY), per(28 * DAY, 7 * DAY)
    for text in (ALL.text, month.text):
        noisy = Entry(identity=text, periods=3)
        spend, units = cost_to(week, noisy)
        assert units == 2 and spend.mu is not None and 0.5 <= spend.mu <= 0.5 * (1 + 1e-9)
        assert spend.threshold_delta == pytest.approx(2e-8) and math.isinf(spend.epsilon)
        rho = msgspec.structs.replace(noisy, mu=None, rho=0.1, threshold_delta=0.0)
        spend = cost_to(week, rho).spend
        assert spend.rho is not None and 0.4 <= spend.rho <= 0.4 * (1 + 1e-9)
        plain = msgspec.structs.replace(noisy, mu=None, epsilon=0.7, threshold_delta=0.0)
        spend = cost_to(week, plain).spend
        assert spend.epsilon == pytest.approx(1.4)
        assert spend.delta == pytest.approx(1e-7 * (1 + math.exp(0.7)))


def test_one_unit_costs_what_its_runs_say() -> None:
    for unit in (ALL, per(DAY)):
        entry = Entry(identity=unit.text, periods=None, together=None)
        assert cost_to(unit, entry) == (entry, 1)


@pytest.mark.parametrize(
    ("span", "periods"),
    [
        (None, (None, None)),
        ((17, 31), (1, 3)),
        ((13, 23), (1, 2)),
        ((12, 23), (0, 2)),
        ((13, 24), (1, 3)),
        ((-9, 3), (-2, 0)),
        ((3, None), (0, None)),
    ],
)
def test_a_span_is_rounded_outward(
    span: tuple[int, int | None] | None, periods: tuple[int | None, int | None]
) -> None:
    """Periods of 10 that begin at 3, 13, 23 and so on."""
    entry = Entry(identity=per(10, 3).text, span=span)
    assert periods_of(per(10, 3), entry) == periods
    assert periods_of(ALL, entry) == (None, None)


def test_the_span_of_a_run_holds_every_record_that_counts(make_plan: Make) -> None:
    assert span_of(make_plan(windows=3)) is None
    plan = make_plan(period=100_000_000, windows=3)
    span = span_of(plan)
    assert span is not None and span[0] == plan.timeline.start
    assert span[1] is not None and plan.timeline.end is not None and span[1] >= plan.timeline.end
    endless = msgspec.structs.replace(plan.timeline, end=None)
    assert span_of(msgspec.structs.replace(plan, timeline=endless)) == (span[0], None)


PLAIN = Entry(
    identity=per(DAY).text, periods=5, together=2, mu=None, threshold_delta=0.0, epsilon=0.7,
    delta=1e-9,
)  # fmt: skip


def of_all_records(plain: Entry) -> Spend:
    return cost_to(ALL, plain).spend


def test_plain_charges_of_periods_that_share_no_window_compose() -> None:
    """91 months of (2, 1e-7) are (182, 9.1e-6): no window has two units of a person."""
    apart = msgspec.structs.replace(PLAIN, together=1, periods=91, epsilon=2.0, delta=1e-7)
    spend = of_all_records(apart)
    assert 182 <= spend.epsilon <= 182 * (1 + 1e-9)
    assert 91e-7 <= spend.delta <= 91e-7 * (1 + 1e-9)
    assert of_all_records(msgspec.structs.replace(apart, delta=0.02)).delta == 1.0


@pytest.mark.parametrize(
    ("epsilon", "delta", "periods"), [(4, 1e-6, 2), (0.1, 1e-9, 7), (0.7, 3e-7, 3)]
)
def test_what_plain_charges_fit_is_not_lost_by_rounding(
    epsilon: float, delta: float, periods: int
) -> None:
    """A limit of so many times a charge holds a run of so many periods, or so many questions."""
    run = msgspec.structs.replace(PLAIN, together=1, periods=periods, epsilon=epsilon, delta=delta)
    spend = of_all_records(run)
    assert decimal_value(spend.epsilon) == periods * decimal_value(epsilon)
    assert decimal_value(spend.delta) == periods * decimal_value(delta)
    question = msgspec.structs.replace(PLAIN, identity=ALL.text, epsilon=epsilon, delta=0.0)
    assert decimal_value(cost_to(per(DAY), question).spend.epsilon) == 2 * decimal_value(epsilon)


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
    spend, units = cost_to(per(30 * DAY), endless)
    assert units == 30 and spend.epsilon == pytest.approx(21)


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
    spend = cost_to(month, noisy).spend
    assert spend.rho is not None
    assert spend.rho == pytest.approx(25 * 0.01) and spend.rho >= 0.25 and spend.mu is None
    guarded = msgspec.structs.replace(noisy, threshold_delta=1e-8)
    spend = cost_to(month, guarded).spend
    assert spend.rho is None and spend.epsilon >= 5 * guarded.epsilon
    assert spend.delta >= 5 * guarded.delta
