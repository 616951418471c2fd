"""The thresholds of all keys of a unit together: in high precision, and enumerated exactly.

The enumeration knows nothing of the product but the thresholds: laws of the noise come from the
nodes as they are drawn, and an adversary that sees what was published chooses what the unit does.
Twins break one thing each that the proof rests on, and are over the bound.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from dpstream.accounting.budget.allocation import allocate, lone_chance
from dpstream.accounting.budget.key_tests import testing_strategy as strategy_of_tests
from dpstream.accounting.budget.thresholds import joint_thresholds, lone_tail, thresholds
from dpstream.accounting.limits import DECODE_BITS, MAX_DENSE_TRIGGERS
from dpstream.accounting.plan.timeline import shares_of_tests
from dpstream.accounting.strategies import TreeStrategy
from dpstream.accounting.weights import MILD, SPARED, STEEP, SelectionWeights
from tests.accounting.plans import Make

SCALE = 1 << DECODE_BITS
SD = np.array([30.0, 41.5, 20.0])
ROUNDING = np.array([0.5, 1.5, 2.5])


def log_tail(z: mpmath.mpf) -> mpmath.mpf:
    return mpmath.log(mpmath.erfc(z / mpmath.sqrt(2)) / 2)


def log_sum(tau: int, base: float, sd: float, adds: np.ndarray) -> mpmath.mpf:
    """Log of the sum of all tails, in 40 digits."""
    with mpmath.workdps(40):
        rest = mpmath.mpf(tau) / SCALE - mpmath.mpf(base)
        tails = [mpmath.exp(log_tail((rest - int(add)) / mpmath.mpf(sd))) for add in adds]
        return mpmath.log(mpmath.fsum(tails))


@pytest.mark.parametrize("total", [0.3, 1e-3, 4e-10, 1e-100, 1e-300])
@pytest.mark.parametrize("mu_count", [0, 3])
@pytest.mark.parametrize("adds", [[7], [200, 40, 11, 11, 5], list(range(60, 0, -2))], ids=str)
def test_the_least_thresholds_on_the_lattice(total: float, mu_count: int, adds: list[int]) -> None:
    """Never too likely, and one step of the lattice lower is."""
    shares = shares_of_tests(3)
    tau = joint_thresholds(total, shares, mu_count, SD, ROUNDING, np.array(adds))
    base = mu_count * max(adds) + ROUNDING
    goals = [mpmath.log(total) + mpmath.log(share) for share in shares]
    for t in range(3):
        real = log_sum(int(tau[t]), base[t], SD[t], np.array(adds))
        assert real <= goals[t]
        lower = log_sum(int(tau[t]) - 1, base[t], SD[t], np.array(adds))
        assert lower > goals[t] - 1e-9 * max(1, abs(goals[t]))


def test_equal_weights_are_the_union_over_keys() -> None:
    shares = shares_of_tests(3)
    joint = joint_thresholds(1e-6, shares, 2, SD, ROUNDING, np.full(8, 5))
    union = thresholds(1e-6 / 8, 2, SD, ROUNDING, 5, 1, shares)
    assert np.abs(joint - union).max() <= 1
    uneven = joint_thresholds(1e-6, shares, 2, SD, ROUNDING, np.array([5] + 7 * [1]))
    assert (uneven < union).all()


def test_shares_of_tests() -> None:
    for tests in (1, 2, 3, 16, 1000):
        shares = shares_of_tests(tests)
        assert len(shares) == tests and math.fsum(shares) <= 1
        assert math.fsum(shares) == pytest.approx(1, abs=1e-9) and (shares > 0).all()
        assert shares[-1] == (1.0 if tests == 1 else 0.5)
        assert len(set(shares[:-1])) <= 1


def test_the_chance_of_one_key() -> None:
    tau = joint_thresholds(1e-6, shares_of_tests(3), 0, SD, ROUNDING, np.array([90, 30, 10]))
    want = norm.sf((tau / SCALE - ROUNDING - 90) / SD).sum()
    assert lone_tail(tau, 0, SD, ROUNDING, 90) == pytest.approx(want, rel=1e-8)
    assert want <= lone_tail(tau, 0, SD, ROUNDING, 90) <= 1e-6
    assert lone_tail(tau - 90 * SCALE, 0, SD, ROUNDING, 90) > 1e-5
    assert lone_tail(np.full(3, -(1 << 40)), 0, SD, ROUNDING, 90) == 1.0


# --- exact enumeration of tiny streams ------------------------------------------------------------

SIGMA, REACH, TESTS = 3.0, 12, 3
ADDS, TOTAL = (14, 2, 2), 0.02
#: Shares of the tests; nearly all for the last one, so that late keys matter.
LATE = np.array([0.02, 0.02, 0.96])


class Law(NamedTuple):
    """(outcomes, tests) 2^D n_t of the tree of three steps, and the chance of each outcome."""

    noise: np.ndarray
    chance: np.ndarray


@functools.cache
def law() -> Law:
    """Every value of the four nodes: leaves 1 to 3, and the block of the first two."""
    values = np.arange(-REACH, REACH + 1)
    chances = norm.sf((values - 0.5) / SIGMA) - norm.sf((values + 0.5) / SIGMA)
    chances[0] = chances[-1] = norm.sf((REACH - 0.5) / SIGMA)
    z1, z2, block, z3 = (n.ravel() for n in np.meshgrid(*[values] * 4, indexing="ij"))
    chance = functools.reduce(np.multiply.outer, [chances] * 4).ravel()
    two = (2 * SCALE * (z1 + z2 + 2 * block) + 3) // 6  # round(2^D I / 3)
    return Law(np.stack([SCALE * z1, two, two + SCALE * z3], axis=1), chance)


@functools.cache
def tau_of(adds: tuple[int, ...] = ADDS) -> np.ndarray:
    strategy = TreeStrategy(TESTS)
    sd = SIGMA * strategy.sd_factors
    return joint_thresholds(TOTAL, LATE, 0, sd, strategy.rounding, np.array(adds))


@functools.cache
def passes(entered: int, add: int) -> float:
    """The chance that a lone key is ever selected that counts ``add`` from test ``entered`` on."""
    noise, chance = law()
    over = noise[:, entered - 1 :] + SCALE * add > tau_of()[entered - 1 :]
    return float(chance[over.any(axis=1)].sum())


@functools.cache
def hazard(count: int) -> list[float]:
    """The chance that a key of others is published by test t, given that it was not before."""
    noise, chance = law()
    over = noise + SCALE * count > tau_of()
    first = np.where(over.any(axis=1), over.argmax(axis=1), TESTS)
    at = np.bincount(first, chance, minlength=TESTS + 1)
    untested_before = np.concatenate([[1.0], 1 - np.cumsum(at)])
    return [float(at[t] / untested_before[t]) for t in range(TESTS)]


class Unit(NamedTuple):
    """What the unit did so far: records, weights taken, and (test, index) of each lone key."""

    records: int = 0
    taken: int = 0
    lone: tuple[tuple[int, int], ...] = ()


def moves(unit: Unit, t: int, published: bool, rule: str) -> Iterator[Unit]:
    """What the unit may do before test t: any records, on the others' key or on new lone ones."""
    for kinds in itertools.chain.from_iterable(
        itertools.product("PL", repeat=n) for n in range(len(ADDS) - unit.records + 1)
    ):
        records, taken, lone = unit
        if rule == "counters begin anew at each test":
            taken = 0
        for kind in kinds:
            records += 1
            if kind == "P" and published:
                continue
            index = 0 if rule == "weights by key" else taken
            taken += 1
            if kind == "L":
                lone += ((t, index),)
        yield Unit(records, taken, lone)


@pytest.mark.parametrize("count", [10, 20, 25])
def test_every_adaptive_unit_is_within_the_bound(count: int) -> None:
    """The worst of all units that follow what is published, on others' keys of several sizes."""

    @functools.cache
    def worst(t: int, published: bool, unit: Unit, rule: str) -> float:
        """The best chance from test t on of an adversary that has one of its keys published."""
        if t > TESTS:
            return 1 - math.prod(1 - passes(at, ADDS[index]) for at, index in unit.lone)
        chance = 0.0 if published else hazard(count)[t - 1]
        return max(
            chance * worst(t + 1, True, more, rule)
            + (1 - chance) * worst(t + 1, published, more, rule)
            for more in set(moves(unit, t, published, rule))
        )

    assert 0.3 * TOTAL < worst(1, False, Unit(), "honest") <= TOTAL
    for rule in ("counters begin anew at each test", "weights by key"):
        assert worst(1, False, Unit(), rule) > TOTAL


def test_two_units_of_one_person_need_the_other_rule() -> None:
    """Both have a record on one key, of the largest weight each."""
    assert passes(1, 2 * ADDS[0]) > TOTAL
    strategy = TreeStrategy(TESTS)
    sd = SIGMA * strategy.sd_factors
    tau = thresholds(TOTAL / 3, 0, sd, strategy.rounding, ADDS[0], 2, LATE)
    noise, chance = law()
    both = float(chance[(noise + 2 * SCALE * ADDS[0] > tau).any(axis=1)].sum())
    assert 3 * both <= TOTAL


def test_an_index_by_the_keys_own_noise_is_over_the_bound() -> None:
    """Of lone keys the one nearest to its threshold takes the largest weight: as likely as if all
    had it."""
    noise, chance = law()

    def chance_above(add: int) -> float:
        return float(chance[noise[:, 2] + SCALE * add > tau_of()[2]].sum())

    assert sum(map(chance_above, ADDS)) <= TOTAL
    assert 1 - (1 - chance_above(max(ADDS))) ** len(ADDS) > TOTAL


def test_no_weight_for_hopeless_keys_is_over_the_bound() -> None:
    """A unit visits lone keys before the last test; those whose noise was low at the test before
    take no weight, and leave it to the ones that are about to pass."""
    noise, chance = law()
    adds = (14, *7 * (2,))

    def figures(cutoff: float) -> float:
        near, tau = noise[:, 1] > cutoff, tau_of(adds)[2]
        share = float(chance[near].sum())
        first, other = (
            float(chance[near & (noise[:, 2] + SCALE * add > tau)].sum()) for add in adds[:2]
        )
        earlier = (1 - share) ** np.arange(len(adds))  # no key before was near
        return float(1 - np.prod(1 - earlier * first - (1 - earlier) * other))

    assert figures(-math.inf) <= TOTAL  # all take their weights, in order
    assert max(figures(SCALE * cutoff) for cutoff in range(10)) > 1.5 * TOTAL


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [MILD, SPARED, STEEP], ids=str)
@pytest.mark.parametrize("combine", [False, True])
def test_the_rule_holds_in_plans(make_plan: Make, weights: SelectionWeights, combine: bool) -> None:
    """By another library's tails, on the numbers as they are allocated."""
    options: dict[str, object] = {"per_key_bound": 1, "combine": True} if combine else {}
    plan = make_plan(
        100,
        weights=weights,
        strategy="blt",
        pre_threshold=2,
        contributions=32,
        skip=True,
        **options,
    )
    budget = allocate(plan)
    of, total = budget.statistic, 32 * budget.b
    assert of is not None and budget.tau is not None and budget.weights is not None
    adds = of.weighted * budget.weights + of.counted
    need = budget.tau / SCALE - of.rounding - 2 * adds[0]
    tails = norm.sf((need[:, None] - adds) / of.sd[:, None])
    parts = tails.sum(axis=1) / total
    assert (parts <= shares_of_tests(plan.design.tests)).all()
    assert parts == pytest.approx(shares_of_tests(plan.design.tests), rel=1e-3)
    lone = lone_chance(plan, budget)
    assert budget.b <= lone <= total and lone == pytest.approx(tails[:, 0].sum(), rel=1e-6)


def test_what_hopeless_keys_would_cost_a_plan(make_plan: Make) -> None:
    """32 lone keys before the last test: several times what the last test has of delta."""
    plan = make_plan(
        100, weights=SPARED, strategy="blt", contributions=32, per_key_bound=1,
        combine=True, skip=True,
    )  # fmt: skip
    budget = allocate(plan)
    of, noise, count = budget.statistic, budget.selection, budget.values[0]
    assert of is not None and budget.tau is not None and noise is not None
    assert budget.weights is not None

    def rows(stream: object, at: list[int]) -> np.ndarray:
        strategy = stream.strategy_object  # type: ignore[attr-defined]
        decoder = np.linalg.inv(strategy.matrix()).cumsum(axis=0)
        return np.asarray(decoder[np.array(at) - 1] * stream.sigma)  # type: ignore[attr-defined]

    tests = plan.design.test_triggers.tolist()
    selection = of.weighted * rows(noise, [len(tests) - 1, len(tests)])
    published = of.counted * rows(count, tests[-2:])
    covariance = selection @ selection.T + published @ published.T
    sd = np.sqrt(covariance.diagonal())
    correlation = covariance[0, 1] / sd.prod()
    z = budget.tau[-1] / SCALE - of.rounding[-1] - of.weighted * budget.weights - of.counted
    z = z / sd[1]
    grid = np.linspace(0, 8, 4_001)
    spent = []
    for cutoff in np.linspace(-6, 6, 49):
        near = norm.sf(cutoff)
        at = z[:, None] + grid
        still = norm.sf((cutoff - correlation * at) / math.sqrt(1 - correlation**2))
        passing = np.trapezoid(norm.pdf(at) * still, grid, axis=1)
        # The number of near keys before the k-th one is binomial, whatever its own noise is.
        index = np.zeros(32)
        index[0], total = 1.0, 0.0
        for _ in range(32):
            total += float(index @ passing)
            index = index * (1 - near) + np.append(0.0, index[:-1]) * near
        spent.append(total / (32 * budget.b / 2))
    assert spent[0] <= 1.0001  # nearly all keys are near: in order, as the rule has it
    assert max(spent) > 4


@pytest.mark.parametrize(
    ("name", "tests", "encoder"),
    [
        ("blt", 8, "dense"), ("dense", 8, "dense"), ("tree", 8, "tree"),
        ("blt", 1, "blt"), ("dense", 1, "dense"),
        ("blt", MAX_DENSE_TRIGGERS + 1, "blt"),
    ],
)  # fmt: skip
def test_encoders_of_tests(name: str, tests: int, encoder: str) -> None:
    """Strategies of rounded nodes keep theirs, and so do streams of one test or too many; of the
    others late tests have less noise than with an encoder of equal prefixes."""
    strategy = strategy_of_tests(name, tests, 3.5)
    assert (strategy.name, strategy.triggers) == (encoder, tests)
    if encoder == "dense" and tests > 1:
        even = strategy_of_tests(name, tests, 1.0)
        sds = [each.sd_factors * math.sqrt(each.col2) for each in (strategy, even)]
        assert sds[0][-1] < sds[1][-1] and sds[0][0] > sds[1][0]
