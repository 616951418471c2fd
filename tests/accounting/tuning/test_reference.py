"""The public reference population: standings by their definition, keys to expect by simulation."""

import math

import msgspec
import numpy as np
import pytest
from scipy.stats import binom, norm

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.reference import (
    LARGEST,
    MASS,
    SIZES,
    chances_of_weights,
    expected_keys,
    final_sd,
    harmonic,
    publication_chances,
    reference_figures,
)
from dpstream.accounting.weights import MILD, SPARED, STEEP, SelectionWeights
from tests.accounting.plans import COUNT, MEAN, UNITS, Make

ONE = np.ones(1)


def test_chances_are_those_of_the_easiest_test(make_plan: Make) -> None:
    plan = make_plan(12, select_every=4)
    budget = allocate(plan)
    assert budget.tau is not None and budget.statistic is not None
    for count in (1.0, 40.0, 90.0, 400.0):
        by_hand = [
            norm.cdf((count * (t + 1) / 3 - budget.tau[t] / 256) / budget.statistic.sd[t])
            for t in range(3)
        ]
        curve = publication_chances(plan, budget, np.array([count]), ONE)
        assert curve.times.tolist() == pytest.approx([1 / 3, 2 / 3, 1])
        assert curve.chances[:, 0] == pytest.approx(np.maximum.accumulate(by_hand))
        assert curve.by(0.3)[0] == 0 and curve.by(0.7)[0] == curve.chances[1, 0]
    long = make_plan(2_000)
    budget = allocate(long)
    assert budget.tau is not None and budget.statistic is not None
    last = norm.cdf((300.0 - budget.tau[-1] / 256) / budget.statistic.sd[-1])
    # The last of many tests is looked at.
    assert publication_chances(long, budget, np.array([300.0]), ONE).chances[-1, 0] >= last


def test_growing_tests_stand_where_they_are(make_plan: Make) -> None:
    plan = make_plan(100, weights=MILD, contributions=8)
    curve = publication_chances(plan, allocate(plan), ONE, ONE)
    assert curve.times.tolist() == [t / 100 for t in plan.design.test_triggers]
    assert len(curve.times) == 16


@pytest.mark.parametrize("count", [1, 2, 5, 32])
def test_the_weight_a_record_takes(count: int) -> None:
    """Binomial of the other records of a record's unit, over the units' numbers of records."""
    grid = np.linspace(0, 1, 129) ** 2
    for at in (0, 14, 64, 128):
        want = np.zeros(count)
        for records in range(1, count + 1):
            units = 1 / records - (0 if records == count else 1 / (records + 1))
            want += records * units * binom.pmf(np.arange(count), records - 1, grid[at])
        assert chances_of_weights(count)[at] == pytest.approx(want / want.sum(), abs=1e-12)


@pytest.mark.parametrize("weights", [MILD, STEEP])
def test_without_skipping_a_window_adds_the_mean_weight(
    make_plan: Make, weights: SelectionWeights
) -> None:
    """The i-th record is there with chance 1/i; early ones weigh more."""
    kind = {"weights": weights, "skip": False, "contributions": 16, "strategy": "blt"}
    plan = make_plan(50, **kind, tests=(50,))
    budget = allocate(plan)
    assert budget.statistic is not None and budget.tau is not None
    there = 1 / np.arange(1, 17)
    mean = float(there @ weights.integers(16) / there.sum())
    units = np.array([float(budget.tau[-1] / 256 / mean)])  # an even chance
    chances = publication_chances(plan, budget, units, ONE).chances
    assert chances[-1, 0] == pytest.approx(0.5, abs=0.02)
    early = make_plan(50, **kind, tests=(25, 50))
    budget = allocate(early)
    assert budget.statistic is not None and budget.tau is not None
    by_half = norm.ppf(publication_chances(early, budget, units, ONE).chances[0, 0])
    reached = by_half * budget.statistic.sd[0] + budget.tau[0] / 256
    assert 1.05 < reached / (units[0] * mean / 2) < 1.5


def stream(plan: Plan, budget: Budget, units: int, keys: int, draw: np.random.Generator) -> Float64:
    """(tests,) keys published by each test: one simulated stream, record by record.

    Units have at least i records with chance 1/i, at even times; keys are met by Zipf's law.
    """
    assert budget.statistic is not None and budget.tau is not None and budget.selection is not None
    total = plan.privacy.contributions
    popular = 1 / np.arange(1, keys + 1)
    records = np.minimum((1 / draw.random(units)).astype(np.int64), total)
    unit = np.repeat(np.arange(units), records)
    key = draw.choice(keys, len(unit), p=popular / popular.sum())
    order = np.argsort(draw.random(len(unit)))
    weights = np.ones(total) if budget.weights is None else budget.weights
    decoder = np.linalg.inv(budget.selection.strategy_object.matrix()).cumsum(axis=0)
    nodes = draw.normal(0, budget.selection.sigma, (decoder.shape[1], keys))
    noise = decoder @ nodes
    taken, open_keys = np.zeros(units, int), np.ones(keys, bool)
    count, seen, published_keys, begin = np.zeros(keys), set(), [], 0
    for test, trigger in enumerate(plan.design.test_triggers.tolist()):
        stop = round(len(unit) * trigger / plan.design.triggers)
        for at in order[begin:stop].tolist():
            pair = (int(unit[at]), int(key[at]))
            takes = open_keys[pair[1]] or not plan.design.skips
            if takes and pair not in seen:
                count[pair[1]] += weights[taken[pair[0]]]
            taken[pair[0]] += takes
            seen.add(pair)
        begin = stop
        passed = budget.statistic.weighted * (count + noise[test]) > budget.tau[test] / 256
        open_keys &= ~passed
        published_keys.append(float((~open_keys).sum()))
    return np.array(published_keys)


@pytest.mark.parametrize(
    ("weights", "skip"),
    [(None, False), (MILD, False), (MILD, True), (STEEP, False), (SPARED, False), (SPARED, True)],
)
def test_keys_to_expect_are_those_of_a_stream(
    make_plan: Make, weights: SelectionWeights | None, skip: bool
) -> None:
    """With a few tests; with many the easiest one is a lower bound that lies lower."""
    units, keys = 4_000, 400
    plan = make_plan(
        20,
        strategy="blt",
        contributions=8,
        weights=weights,
        epsilon=2.0,
        delta=1e-6,
        tests=5,
        skip=skip,
    )
    budget = allocate(plan)
    draw = np.random.default_rng(5)
    seen = np.mean([stream(plan, budget, units, keys, draw)[-1] for _ in range(6)])
    key_count = expected_keys(plan, budget, units, keys)
    assert 20 < key_count < keys / 2
    assert key_count == pytest.approx(seen, rel=0.08)


def test_a_stream_that_skips_publishes_more_and_the_model_says_so(make_plan: Make) -> None:
    """The power of the test above: the model of one is not that of the other."""
    kind = {"contributions": 32, "weights": SelectionWeights(1, 1.5)}
    plan = make_plan(40, **kind, strategy="blt", tests=8, epsilon=4.0, delta=1e-6)
    other = msgspec.structs.replace(plan, privacy=msgspec.structs.replace(plan.privacy, skip=False))
    units, keys, draw = 6_000, 400, np.random.default_rng(7)
    figures = {}
    for name, of in (("skips", plan), ("not", other)):
        assert of.design.skips == (name == "skips")
        budget = allocate(of)
        seen = np.mean([stream(of, budget, units, keys, draw)[-1] for _ in range(4)])
        figures[name] = seen, expected_keys(of, budget, units, keys)
    seen = figures["skips"][0] / figures["not"][0]
    predicted = figures["skips"][1] / figures["not"][1]
    assert seen > 1.15 and math.isclose(predicted, seen, rel_tol=0.1)


def test_a_plan_against_itself_and_half_the_budget(make_plan: Make) -> None:
    plan, poor = make_plan(aggregates=(COUNT, MEAN)), make_plan(aggregates=(COUNT, MEAN), epsilon=3)
    own, other = reference_figures(plan, allocate(plan)), reference_figures(poor, allocate(poor))
    assert own.keys_against(own) == own.noise_against(own) == 1
    assert other.keys_against(own) < 0.7 and other.noise_against(own) > 1.5
    sds = [math.sqrt((of.sd[-1] ** 2 + (of.sd**2).mean()) / 2) for of in allocate(plan).values]
    assert list(own.noise.values()) == pytest.approx(sds) and set(own.noise) == {"count", "level"}
    half = {name: sd / 2 for name, sd in own.noise.items()}
    half["count"] *= 8
    mixed = type(own)(own.keys, own.units, half)
    assert mixed.noise_against(own) == pytest.approx(math.sqrt((16 + 1 / 4) / 2))


def mean_weights(plan: Plan, triggers: int) -> list[float]:
    """What a record weighs on average up to each of T triggers, records in the order of time."""
    if plan.privacy.weights is None:
        return [1.0] * triggers
    total = plan.privacy.contributions
    weighs, fine = plan.privacy.weights.integers(total), 40
    times = (np.arange(triggers * fine) + 0.5) / (triggers * fine)
    at, unit_total = np.zeros(len(times)), 0.0
    for records in range(1, total + 1):
        # At least i records with chance 1/i; others of the unit are earlier with chance s each.
        units = records * (1 / records - (0 if records == total else 1 / (records + 1)))
        earlier = binom.pmf(np.arange(records)[:, None], records - 1, times)
        at, unit_total = at + units * (weighs[:records] @ earlier), unit_total + units
    return list((np.cumsum(at / unit_total) / np.arange(1, len(at) + 1))[fine - 1 :: fine])


def expected(plan: Plan) -> tuple[float, float]:
    """(keys, units of an even chance) on the reference population, size by size."""
    budget = allocate(plan)
    statistic, tau = budget.statistic, budget.tau
    assert statistic is not None and tau is not None
    triggers = len(tau)
    adds = [statistic.weighted * of + statistic.counted for of in mean_weights(plan, triggers)]
    sizes, keys, even = np.geomspace(1, 1e6, 400), [], math.nan
    for n in sizes:
        best = max(
            (n * adds[t - 1] * t / triggers - tau[t - 1] / 256) / statistic.sd[t - 1]
            for t in range(1, triggers + 1)
        )
        chance = norm.cdf(best)
        even = n if chance < 0.5 else even
        keys.append(n**-1.7 * chance)
    return np.trapezoid(keys, sizes), even


@pytest.mark.parametrize("strategy", ["tree", "blt"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"select_every": 5, "refresh_every": 5},
        {"aggregates": (Aggregate("total", "sum", "v", (-1.0, 7.0), 0.5),)},
        {"weights": MILD},
        {"per_key_bound": 1},
        {"per_key_bound": 1, "weights": STEEP, "combine": True},
    ],
)
def test_standings_by_their_definition(
    make_plan: Make, strategy: str, options: dict[str, object]
) -> None:
    plan = make_plan(20, strategy=strategy, skip=False, **options)
    keys, even = expected(plan)
    own = reference_figures(plan, allocate(plan))
    assert own.keys == pytest.approx(keys, rel=1e-3)
    assert even <= own.units <= even * 1.04
    sd = allocate(plan).values[0].sd[-1]
    assert final_sd(plan, allocate(plan)) == sd / plan.design.streams[0].sensitivity


def test_the_last_sd_of_a_count_of_units(make_plan: Make) -> None:
    plan = make_plan(24, aggregates=(Aggregate("people", "units"),), strategy="tree")
    units = allocate(plan).units
    assert units is not None and len(set(units.sd[-3:].tolist())) > 1
    assert final_sd(plan, allocate(plan)) == units.sd[-1]


def test_only_columns_that_both_have_are_compared(make_plan: Make) -> None:
    both, one = make_plan(aggregates=(COUNT, UNITS)), make_plan(aggregates=(UNITS,))
    first, second = reference_figures(both, allocate(both)), reference_figures(one, allocate(one))
    assert set(second.noise) == {"units"}
    assert second.noise_against(first) == second.noise["units"] / first.noise["units"]
    assert math.isnan(second.noise_against(type(second)(1.0, 1.0, {"other": 1.0})))


def test_public_keys_are_all_there(make_plan: Make) -> None:
    plan, other = make_plan(public_keys="list"), make_plan()
    own = reference_figures(plan, allocate(plan))
    assert own.keys_against(reference_figures(other, allocate(other))) == math.inf
    assert expected_keys(plan, allocate(plan), 7, 41) == 41


def test_records_fall_on_keys_as_they_are_met() -> None:
    """What decides how much skipping saves: the integral of n n^-1.7 up to the largest key."""
    assert MASS[SIZES > LARGEST].sum() == 0 and MASS.sum() == pytest.approx(1)
    for size in (12, 100, 3_000):
        above = (LARGEST**0.3 - size**0.3) / (LARGEST**0.3 - 1)
        assert MASS[size < SIZES].sum() == pytest.approx(above, abs=0.02)


def test_skipping_gives_more_keys(make_plan: Make) -> None:
    """As simulated at full scale (docs/benchmarks.md), within a tenth."""
    kind = {"strategy": "blt", "weights": MILD}
    plans = {
        "skips": make_plan(**kind), "not": make_plan(**kind, skip=False),
        "combined": make_plan(**{**kind, "weights": SPARED}, skip=True, per_key_bound=1,
                              combine=True),
    }  # fmt: skip
    own = {name: reference_figures(plan, allocate(plan)) for name, plan in plans.items()}
    late = own["skips"].keys_against(own["not"]), own["combined"].keys_against(own["not"])
    assert late == pytest.approx((81_938 / 65_893, 140_843 / 65_893), rel=0.1)


def test_more_units_publish_more_keys(make_plan: Make) -> None:
    plan = make_plan(24, contributions=100_000, epsilon=1.0, strategy="blt")
    budget = allocate(plan)
    key_counts = [expected_keys(plan, budget, n, 10**6) for n in (1, 10**4, 10**6, 10**8)]
    assert key_counts == sorted(key_counts) and key_counts[0] < 1e-3 and key_counts[-1] < 10**6
    assert expected_keys(plan, budget, 10**12, 3) == pytest.approx(3)


def test_keys_beyond_memory(make_plan: Make) -> None:
    """Numbers that a person types, up to the most that a command takes: no array of all keys."""
    for count in (100_001, 1_000_000):
        exact = math.fsum(1 / k for k in range(1, count + 1))
        assert harmonic(count) == pytest.approx(exact, rel=1e-15)
    plan = make_plan()
    few = expected_keys(plan, allocate(plan), 10**6, 10**6)
    many = expected_keys(plan, allocate(plan), 10**6, 10**15)
    assert 0 <= many < few
    assert math.isfinite(expected_keys(plan, allocate(plan), 10**15, 10**15))
