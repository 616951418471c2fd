"""Growth of the reference's statistics: by their definition, and against a simulated stream."""

import math

import msgspec
import numpy as np
import pytest
from scipy.stats import binom, norm

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.growing import _numbers, published
from dpstream.accounting.tuning.reference import expected_keys
from dpstream.accounting.weights import MILD, SPARED, STEEP, SelectionWeights
from tests.accounting.plans import Make

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
        curve = published(plan, budget, np.array([count]), ONE)
        assert curve.times.tolist() == pytest.approx([1 / 3, 2 / 3, 1])
        assert curve.chances[:, 0] == pytest.approx(np.maximum.accumulate(by_hand))
        assert curve.by(0.3)[0] == 0 and curve.by(0.7)[0] == curve.chances[1, 0]
    long = make_plan(2_000)
    budget = allocate(long)
    assert budget.tau is not None and budget.statistic is not None
    last = norm.cdf((300.0 - budget.tau[-1] / 256) / budget.statistic.sd[-1])
    # The last of many tests is looked at.
    assert published(long, budget, np.array([300.0]), ONE).chances[-1, 0] >= last


def test_growing_tests_stand_where_they_are(make_plan: Make) -> None:
    plan = make_plan(100, weights=MILD, contributions=8)
    curve = published(plan, allocate(plan), ONE, ONE)
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
        assert _numbers(count)[at] == pytest.approx(want / want.sum(), abs=1e-12)


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
    chances = published(plan, budget, units, ONE).chances
    assert chances[-1, 0] == pytest.approx(0.5, abs=0.02)
    early = make_plan(50, **kind, tests=(25, 50))
    budget = allocate(early)
    assert budget.statistic is not None and budget.tau is not None
    by_half = norm.ppf(published(early, budget, units, ONE).chances[0, 0])
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
    kind = {"contributions": 32, "weights": SelectionWeights(1, 1.5), "selection_share": 0.6}
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
