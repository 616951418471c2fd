"""Periods of an account: against a model that keeps a list of charges for each period."""

import math
from collections import defaultdict

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import Limit, Total, default_parts
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.periods import Spent
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger.events import Charge

WEEK = UnitIdentity("user", "string", "time", 10, 3)
DAY = UnitIdentity("user", "string", "time", 5, 3)
PERSON = UnitIdentity("user", "string")
LIMIT = Limit(4.0, 1e-6, default_parts(4.0, 1e-6))
#: Times that the model looks at: whole periods of every span that is drawn.
TIMES = range(-7, 60)


def charge(
    unit: UnitIdentity, span: tuple[int, int | None] | None = None, mu: float = 0.3
) -> Charge:
    return Charge(
        "r", "p", unit.text, 1.0, 1e-7, mu, 1e-8, periods=None, together=1, span=span
    )  # fmt: skip


spans = st.one_of(
    st.none(),
    st.tuples(st.integers(-5, 40), st.one_of(st.none(), st.integers(1, 20))).map(
        lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
    ),
)
charges = st.builds(charge, st.sampled_from([WEEK, DAY, PERSON]), spans, st.floats(0.02, 0.7))


class Model:
    """Every charge of every period: two data sets that differ in a unit of a period have the same
    law of every answer whose span has no record of that period.
    """

    def __init__(self) -> None:
        self.charges = defaultdict[int, list[Charge]](list)
        self.taken = set[int]()

    def periods(self, charge: Charge) -> list[int]:
        if charge.span is None:
            return sorted({(t - 3) // 10 for t in TIMES})
        begin, end = charge.span
        inside = (t for t in TIMES if begin <= t and (end is None or t < end))
        return sorted({(t - 3) // 10 for t in inside})

    def cost(self, charge: Charge) -> float:
        """mu of one week: its own, that of two days, or that of a replacement."""
        unit = UnitIdentity.read(charge.identity)
        factor = {WEEK: 1.0, DAY: math.sqrt(2), PERSON: 2.0}[unit]
        return factor * (charge.mu or 0.0)

    def accepts(self, charge: Charge) -> str:
        """``yes``, ``first`` or ``no``; empty where rounding decides."""
        verdicts = []
        for period in self.periods(charge):
            before = [self.cost(other) for other in self.charges[period]]
            mu = math.hypot(*before, self.cost(charge))
            most = mu_of(4.0, 0.3e-6)
            if abs(mu - most) < 1e-9:
                return ""
            verdicts.append(mu <= most and len(before) < 15)
        if any(period in self.taken for period in self.periods(charge)):
            return "no"
        if all(verdicts):
            return "yes"
        alone = not any(self.charges[period] for period in self.periods(charge))
        return "first" if alone and charge.identity == WEEK.text else "no"

    def add(self, charge: Charge, takes: bool) -> None:
        for period in self.periods(charge):
            self.charges[period].append(charge)
            self.taken |= {period} if takes else set()


@settings(max_examples=150, deadline=None)
@given(st.lists(charges, max_size=10))
def test_every_period_is_kept_by_itself(runs: list[Charge]) -> None:
    spent, model = Spent.nothing(WEEK, LIMIT.parts.order), Model()
    for run in runs:
        expected, verdict = model.accepts(run), spent.verdict(LIMIT, run)
        if not expected:
            return
        actual = "no" if not verdict.accepted else "first" if verdict.reason == "first" else "yes"
        assert actual == expected
        # The one of two days and the one of a person have no pair of their own for a week.
        if verdict.accepted:
            spent = spent.plus(run, takes=actual == "first")
            model.add(run, actual == "first")
    for period in {(t - 3) // 10 for t in TIMES}:
        spends = [other for other in model.charges[period]]
        [*_, piece] = spent.pieces_of(charge(WEEK, (period * 10 + 3, period * 10 + 13)))
        assert piece.total.spends == len(spends)
        assert math.isclose(
            math.sqrt(float(piece.total.gauss)),
            math.hypot(0.0, *map(model.cost, spends)),
            abs_tol=1e-9,
        )
        assert piece.taken == (period in model.taken)


def test_disjoint_jobs_do_not_add_up() -> None:
    """One from week 0 to 5 and one from week 6 to 11: nobody's week is in both."""
    large = msgspec.structs.replace(charge(WEEK, (3, 63), mu_of(4.0, 0.3e-6)), threshold_delta=4e-7)
    spent = Spent.nothing(WEEK, LIMIT.parts.order).plus(large)
    later = msgspec.structs.replace(large, span=(63, 123))
    verdict = spent.verdict(LIMIT, later)
    assert (
        verdict.accepted
        and verdict.reason == "gaussian"
        and spent.further_charges(LIMIT, later) == 1
    )
    overlapping = msgspec.structs.replace(large, span=(62, 123))
    assert not spent.verdict(LIMIT, overlapping).accepted and not spent.further_charges(
        LIMIT, overlapping
    )
    question = charge(PERSON, None, 0.01)
    assert not spent.verdict(LIMIT, question).accepted
    assert spent.plus(later).fullest(LIMIT, spent.plus(later).pieces_of(question)).total.gauss > 0
    # Of an account without a period all charges add up, whatever their spans are.
    person = Spent.nothing(PERSON, LIMIT.parts.order)
    weekly = msgspec.structs.replace(large, periods=6)
    assert person.plus(weekly).borders == () and len(person.plus(weekly).pieces) == 1


def test_a_first_charge_takes_its_periods_for_good() -> None:
    own = msgspec.structs.replace(
        charge(WEEK, (3, 23), mu_of(4.0, 1e-6)), epsilon=4.0, delta=1e-6, threshold_delta=3e-7
    )
    spent = Spent.nothing(WEEK, LIMIT.parts.order)
    verdict = spent.verdict(LIMIT, own)
    assert verdict.accepted and verdict.reason == "first" and spent.further_charges(LIMIT, own) == 1
    spent = spent.plus(own, takes=True)
    little, raised = charge(WEEK, (13, 23), 1e-6), LIMIT._replace(epsilon=100.0, delta=1e-3)
    assert spent.verdict(LIMIT, little).reason == spent.verdict(raised, little).reason == "taken"
    assert spent.verdict(LIMIT, charge(WEEK, (23, 33), 1e-6)).accepted
    # One that is not first is not accepted by its own pair.
    other = Spent.nothing(WEEK, LIMIT.parts.order).plus(little)
    assert other.verdict(LIMIT, own).reason == "room"
    # A recovery brings charges back without asking: over, and everything is refused.
    over = spent.plus(little)
    assert [piece.over(LIMIT) for piece in over.pieces].count(True) == 1
    assert not any(piece.over(LIMIT) for piece in spent.pieces)
    much = Spent.nothing(WEEK, LIMIT.parts.order).plus(charge(WEEK, None, 2.0))
    assert [piece.over(LIMIT) for piece in much.pieces] == [True]
    assert not much.verdict(LIMIT, charge(WEEK, None, 1e-9)).accepted


@settings(max_examples=40, deadline=None)
@given(st.lists(charges, max_size=5), charges, st.sampled_from([1.0, 30.0]))
def test_a_proposed_limit_has_room_and_a_smaller_one_has_not(
    runs: list[Charge], more: Charge, factor: float
) -> None:
    spent = Spent.nothing(WEEK, LIMIT.parts.order)
    for run in runs:
        spent = spent.plus(run)
    more = msgspec.structs.replace(more, threshold_delta=more.threshold_delta * factor)
    proposed = spent.raised_limit(LIMIT, more)
    assert proposed is not None
    raised = LIMIT._replace(epsilon=proposed[0], delta=proposed[1])
    assert spent.verdict(raised, more).accepted
    if proposed[0] > LIMIT.epsilon:  # four digits, rounded up
        assert not spent.verdict(raised._replace(epsilon=proposed[0] * 0.998), more).accepted
    if proposed[1] > LIMIT.delta:
        assert not spent.verdict(raised._replace(epsilon=1e9, delta=LIMIT.delta), more).accepted


def test_sums_do_not_depend_on_the_order_of_charges() -> None:
    runs = [charge(WEEK, (3, 33)), charge(PERSON), charge(WEEK, (13, None)), charge(DAY, (8, 18))]
    one = other = Spent.nothing(WEEK, 3.0)
    for run in runs:
        one = one.plus(run)
    for run in reversed(runs):
        other = other.plus(run)
    assert one.borders == other.borders
    assert [piece.total for piece in one.pieces] == [piece.total for piece in other.pieces]
    assert one.pieces[0].total.spends == 1 and Total(order=3.0).spends == 0
