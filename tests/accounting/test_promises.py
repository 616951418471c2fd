"""Both promises of both families: 91 months of (2, 1e-7)."""

import itertools
import math
from fractions import Fraction

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import delta_of, epsilon_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import several_mu, together
from dpstream.accounting.promises import (
    delta_of_losses,
    epsilon_of_responses,
    losses_of,
    promises,
)
from dpstream.accounting.strength import STATED_DELTA
from dpstream.pipelines.render.job_plan import promise_lines
from tests.accounting.plans import SECOND, build


def delta_of_responses(epsilon: float, each: float, count: int) -> float:
    """Delta of ``count`` mechanisms of plain epsilon ``each``, rounded up."""
    return delta_of_losses(epsilon, *losses_of(each, count))


def enumerated(epsilon: float, each: float, count: int) -> float:
    """Delta of so many responses, over all 2^count outcomes."""
    keep = math.exp(each) / (1 + math.exp(each))
    total = 0.0
    for flips in itertools.product((0, 1), repeat=count):
        own = math.prod(1 - keep if flip else keep for flip in flips)
        other = math.prod(keep if flip else 1 - keep for flip in flips)
        total += max(0.0, own - math.exp(epsilon) * other)
    return total


@pytest.mark.parametrize("each", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_delta_is_that_of_all_outcomes(each: float, count: int) -> None:
    for part in (0.0, 0.3, 0.7, 0.99):
        exact = enumerated(part * count * each, each, count)
        bound = delta_of_responses(part * count * each, each, count)
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-8) + 1e-15


def test_epsilon_at_a_delta() -> None:
    assert epsilon_of_responses(0.0, 2.0, 91) == 182
    for delta in (1e-9, 1e-6):
        for each, count in ((2.0, 91), (1.0, 182), (0.1, 1000)):
            epsilon = epsilon_of_responses(delta, each, count)
            assert delta_of_responses(epsilon, each, count) <= delta < 1
            assert delta_of_responses(epsilon * (1 - 1e-9), each, count) > delta
    # 91 months of epsilon 2: one record a month, and two on two keys, each of which pays 1.
    assert epsilon_of_responses(4e-6, 2.0, 91) == pytest.approx(181, abs=0.6)
    assert epsilon_of_responses(4e-6, 1.0, 182) == pytest.approx(133, abs=0.6)
    assert epsilon_of_responses(1.0, 1.0, 3) == 0


def months(contributions: int = 1, **settings: object) -> Plan:
    fixed = {"public_keys": "list", "strategy": "auto", "epsilon": 2.0, "delta": 1e-7}
    fixed |= {"windows": 91, "period": SECOND, "contributions": contributions}
    return build(1, **(fixed | settings))  # type: ignore[arg-type]


def without_end(plan: Plan) -> Plan:
    timeline = msgspec.structs.replace(plan.timeline, end=None)
    return msgspec.structs.replace(plan, timeline=timeline)


def test_ninety_one_months() -> None:
    plan = months(2, per_key_bound=1)
    geometric, gaussian = promises(plan, allocate(plan))
    assert (geometric.family, geometric.chosen) == ("geometric", True)
    assert (geometric.epsilon, geometric.delta) == (2, 0)
    assert (gaussian.epsilon, gaussian.delta, gaussian.chosen) == (2, 1e-7, False)
    assert geometric.periods == gaussian.periods == 91
    assert geometric.lifetime == (182, 0)
    assert gaussian.lifetime[0] == pytest.approx(24, abs=0.5)
    mu = allocate(msgspec.structs.replace(plan, privacy=gaussian_of(plan))).mu
    assert gaussian.lifetime[0] == pytest.approx(epsilon_of(91**0.5 * mu, 91e-7), rel=1e-6)
    assert geometric.fixed is not None and gaussian.fixed is None
    assert geometric.fixed == (
        epsilon_of_responses(geometric.fixed[1], 1.0, 182),
        geometric.fixed[1],
    )
    alone = promises(months(), allocate(months()))[0].fixed
    assert alone is not None and geometric.fixed[0] < alone[0] < 182
    assert geometric.sd < gaussian.sd


def gaussian_of(plan: Plan) -> object:
    return msgspec.structs.replace(plan.privacy, strategy="blt")


def test_auto_can_go_by_the_lifetime() -> None:
    by_period, by_lifetime = months(), months(optimise="lifetime")
    assert allocate(by_period).strategy == "geometric"
    assert allocate(by_lifetime).strategy == "blt"
    assert by_period.hash != by_lifetime.hash
    once = build(1, public_keys="list", strategy="auto", contributions=1, optimise="lifetime")
    assert allocate(once).strategy == "geometric"
    with pytest.raises(UsageError, match="optimise"):
        build(1, public_keys="list", strategy="blt", optimise="lifetime").check()


@pytest.mark.parametrize("public", ["list", None])
@pytest.mark.parametrize("periods", [2, 7, 91])
def test_a_gaussian_lifetime_is_spent_by_noise_and_thresholds(
    public: str | None, periods: int
) -> None:
    """At its epsilon the Gaussian noise of k periods and k times the thresholds cost its delta."""
    plan = months(2, public_keys=public, strategy="blt", windows=periods)
    budget = allocate(plan)
    assert (budget.theta > 0) == (public is None)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert Fraction(delta) >= periods * Fraction(1e-7) * (1 - Fraction(1, 10**15))
    assert delta == pytest.approx(periods * 1e-7, rel=1e-13)
    assert Fraction(delta) >= periods * Fraction(budget.delta)
    mu, thresholds = periods**0.5 * budget.mu, periods * budget.theta * budget.delta
    assert delta_of(epsilon, mu * (1 - 1e-12)) + thresholds <= delta
    assert delta_of(epsilon * (1 - 1e-6), mu) + thresholds > delta


def test_thresholds_of_one_test_are_part_of_a_lifetime() -> None:
    """One window of four periods that is tested once: its rule fits noise and thresholds into the
    delta of one period together, which does not hold for four at four times their mu."""
    plan = build(
        4, strategy="blt", epsilon=2.0, delta=1e-7, period=SECOND, tests=1,
        contributions=2, periods_share_windows=True,
    ).check()  # fmt: skip
    budget = allocate(plan)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert row.periods == 4 and budget.theta == 0
    mu = several_mu(budget.mu, 4, together(plan)) * (1 - 1e-12)
    noise, thresholds = delta_of(epsilon, mu), 4 * 2 * budget.b
    assert noise == pytest.approx(4e-7, rel=1e-6)
    assert noise + thresholds <= delta <= (noise + thresholds) * (1 + 1e-6)
    assert noise + thresholds > 1.5 * 4e-7


@pytest.mark.parametrize("tests", [None, 1])
def test_a_delta_of_many_periods_is_at_most_one(tests: int | None) -> None:
    """(epsilon, 1) holds for anything: a sum of deltas beyond it says no more.  Epsilon is that of
    the Gaussian noise at a delta below 1 all the same."""
    if tests is None:
        plan = months(public_keys=None, strategy="blt", delta=0.3)
    else:  # the rule of one test, whose thresholds come on top
        plan = build(
            40, strategy="blt", epsilon=2.0, delta=0.3, period=SECOND, tests=tests,
            contributions=2, periods_share_windows=True,
        )  # fmt: skip
    budget = allocate(plan)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert row.periods > 3 and row.periods * budget.delta > 1 and delta == 1
    mu = several_mu(budget.mu, row.periods, together(plan))
    assert budget.epsilon < epsilon < math.inf
    assert 0.1 < delta_of(epsilon, mu) < 1


@pytest.mark.parametrize("each", [0.1, 0.3, 2.0])
def test_a_plain_lifetime_is_no_less_than_the_sum(each: float) -> None:
    """In decimals, as the plan states it, and at most one float above the sum."""
    for periods in (3, 7, 91):
        plan = months(strategy="geometric", epsilon=each, windows=periods)
        [row, *_] = promises(plan, allocate(plan))
        exact = periods * Fraction(repr(each))
        assert exact <= Fraction(row.lifetime[0]) <= exact * (1 + Fraction(1, 2**51))
        assert row.lifetime[1] == 0


@pytest.mark.parametrize("contributions", [1, 2])
def test_a_fixed_schedule_pays_thresholds_and_composition(contributions: int) -> None:
    """Its delta is that of 91 periods of thresholds and that at which epsilons compose; sabotage:
    what remains of 91 times delta beside thresholds that use all of it is nothing."""
    kind: dict[str, object] = {"strategy": "geometric", "per_key_bound": 1}
    public, selected = months(contributions, **kind), months(
        contributions, public_keys=None, **kind
    )  # fmt: skip
    for plan in (public, selected):
        budget = allocate(plan)
        fixed = promises(plan, budget)[0].fixed
        assert fixed is not None
        each, count = 2.0 / contributions, 91 * contributions
        composed = delta_of_responses(fixed[0], each, count)
        thresholds = Fraction(91 * contributions) * Fraction(budget.b)
        assert Fraction(composed) + thresholds <= Fraction(fixed[1])
        assert composed == pytest.approx(91e-7, rel=1e-6)
        assert fixed[1] == pytest.approx(91e-7 * (2 if plan.design.selects else 1), rel=1e-9)
        assert (composed + float(thresholds) > 1.5 * 91e-7) == plan.design.selects


def test_pure_noise_states_a_delta_for_a_fixed_schedule_alone() -> None:
    plan = months(strategy="geometric", delta=0.0)
    [row] = promises(plan, allocate(plan))
    assert row.delta == 0 and row.lifetime == (182, 0)
    assert row.fixed == (epsilon_of_responses(STATED_DELTA, 2.0, 91), STATED_DELTA)


def test_a_stream_without_end_shows_a_few_periods_and_says_so() -> None:
    plan = without_end(months())
    rows = promises(plan, allocate(plan))
    assert [row.periods for row in rows] == [4, 4] and rows[0].lifetime == (8, 0)
    lifetime = promise_lines(plan, allocate(plan))[-1]
    assert "a person of 4 periods:" in lifetime and "no end" in lifetime
    ended = promise_lines(months(), allocate(months()))[-1]
    assert "all 91 periods" in ended and "no end" not in ended


def test_budgets_that_guarantee_nothing_are_of_one_family_and_period() -> None:
    budget = msgspec.structs.replace(allocate(months()), sound=False)
    [row] = promises(months(), budget)
    assert row.chosen and row.periods == 1 and row.lifetime == (budget.epsilon, budget.delta)
    assert promise_lines(months(), budget) == []
