"""P4 through the whole flow: thresholds, the shape of released noise, and a black-box audit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from scipy.stats import chi2, kstest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import step
from tests.budgets import budgeted
from tests.statistical.trials import least_mu, lower, released, smaller_noise, upper
from tests.streams import COUNT, UNITS, make_plan

#: A check fails an honest product with about this chance; draws are fixed, so never by chance.
TAIL = 1e-6
SINGLES = 20_000
SIDE = 10_000


def large_delta(triggers: int, pre_threshold: int = 0, **options: Any) -> Plan:
    """Noise far above the rounding bound D_t, and chances that 20,000 trials can see."""
    settings: dict[str, Any] = {"epsilon": 0.02, "delta": 0.05, "contributions": 1, **options}
    return make_plan(triggers=triggers, windows=1, pre_threshold=pre_threshold, **settings)


@contextlib.contextmanager
def tau_less_one_sd() -> Iterator[None]:
    def less(plan: Plan) -> Any:
        budget = allocate(plan)
        assert budget.statistic is not None and budget.tau is not None
        sd = (budget.statistic.sd * (1 << DECODE_BITS)).astype(np.int64)
        return msgspec.structs.replace(budget, tau=budget.tau - sd)

    with mock.patch.object(step, "calibrated", budgeted(less)):
        yield


def ever_released(plan: Plan, folder: Path) -> int:
    """Keys that only pre_threshold + 1 units touch and that are released at some trigger."""
    counts = np.full(SINGLES // (1 + plan.privacy.pre_threshold), plan.privacy.pre_threshold + 1)
    seen = ~np.isnan(released(plan, counts, folder))
    return int(seen.any(axis=1).sum())


#: A unit's first pair, which weighs most, is what each trial's key gets.
WEIGHTS: dict[str, Any] = {"weights": SelectionWeights(3.0, 1.0), "contributions": 2}
COMBINED: dict[str, Any] = {**WEIGHTS, "per_key_bound": 1, "combine": True}
BLT: dict[str, Any] = {"strategy": "blt"}
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 0, {}),
    (2, 0, {}),
    (8, 0, {}),
    (2, 2, {}),
    (8, 0, BLT),
    (8, 0, WEIGHTS),
    (1, 0, {**WEIGHTS, **BLT}),
    (4, 1, COMBINED),
    (8, 0, {**COMBINED, **BLT}),
    (4, 0, {**COMBINED, **BLT, "aggregates": (COUNT, UNITS)}),
]


@pytest.mark.parametrize(("triggers", "pre_threshold", "options"), CASES)
def test_a_single_unit_is_released_at_most_with_its_chance(
    tmp_path: Path, triggers: int, pre_threshold: int, options: dict[str, Any]
) -> None:
    plan = large_delta(triggers, pre_threshold, **options)
    trials, chance = SINGLES // (1 + pre_threshold), allocate(plan).b
    hits = ever_released(plan, tmp_path)
    assert lower(hits, trials, TAIL) <= chance
    # One trigger alone uses its whole share b / T (less the rounding bound): tau is not slack.
    assert upper(hits, trials, TAIL) >= 0.8 * chance / triggers
    with tau_less_one_sd():
        assert lower(ever_released(plan, tmp_path), trials, TAIL) > chance


def test_too_few_units_are_never_tested(tmp_path: Path) -> None:
    plan = large_delta(4, pre_threshold=3)
    with tau_less_one_sd():
        assert np.isnan(released(plan, np.full(5000, 3), tmp_path)).all()


def normal_shape(noise: np.ndarray, sd: float, lattice: float) -> tuple[float, float]:
    """p-values of the variance (two-sided) and of the shape against Normal(0, sd^2).

    Args:
        lattice: distance of possible values, over which each is spread to test the shape.
    """
    spread = np.random.default_rng(3).uniform(-lattice / 2, lattice / 2, len(noise))
    total = float(((noise / sd) ** 2).sum())
    variance = 2 * min(chi2.sf(total, len(noise)), chi2.cdf(total, len(noise)))
    return variance, float(kstest((noise + spread) / sd, "norm").pvalue)


#: Distance of the values that a release at T = 1 can take.
LATTICE = {"tree": 1.0, "blt": 2.0**-DECODE_BITS}


@pytest.mark.parametrize("strategy", LATTICE)
@pytest.mark.parametrize("triggers", [1, 7, 8])
def test_final_counts_are_gaussian(tmp_path: Path, triggers: int, strategy: str) -> None:
    """Keys far above the threshold: what is released at close is count + Normal(0, sd_T^2)."""
    plan = make_plan(
        triggers=triggers, windows=1, epsilon=1.0, delta=1e-3, contributions=1, strategy=strategy
    )
    noise = allocate(plan).values[0]
    units = 150
    for factor, honest in ((1.0, True), (1.25, False)):
        with smaller_noise(factor):
            final = released(plan, np.full(1500, units), tmp_path)[:, -1]
        assert not np.isnan(final).any()
        variance, shape = normal_shape(
            final - units,
            float(noise.sd[-1]),
            LATTICE[strategy] if triggers == 1 else 2.0**-DECODE_BITS,
        )
        assert (variance > TAIL) == honest
        assert shape > TAIL or not honest


def score(outputs: np.ndarray, without: np.ndarray) -> np.ndarray:
    """The best linear test for one more record at the first trigger: every prefix moves by 1."""
    covariance = np.atleast_2d(np.cov(without, rowvar=False))
    weights = np.linalg.solve(covariance, np.ones(outputs.shape[1]))
    return np.asarray(outputs @ weights)


@pytest.mark.parametrize(
    ("triggers", "epsilon", "side", "strategy"),
    [
        (1, 1.0, SIDE, "tree"),
        (1, 6.0, SIDE, "tree"),
        (4, 1.0, 4 * SIDE, "tree"),
        (4, 1.0, 4 * SIDE, "blt"),
    ],
)
def test_audit_of_published_counts(
    tmp_path: Path, triggers: int, epsilon: float, side: int, strategy: str
) -> None:
    """Keys without and with one unit, public: the whole budget is in the count."""
    plan = make_plan(
        triggers=triggers, windows=1, epsilon=epsilon, delta=0.05, contributions=1,
        public="f" * 32, strategy=strategy,
    )  # fmt: skip
    budget = allocate(plan)
    mu_by_factor = {}
    for factor in (1.0, 1.25):
        with smaller_noise(factor):
            outputs = released(plan, np.repeat([0, 1], side), tmp_path)
        a, b = outputs[:side], outputs[side:]
        mu_by_factor[factor] = least_mu(score(a, a), score(b, a))
    assert 0.6 * budget.mu <= mu_by_factor[1.0] <= budget.mu
    assert epsilon_of(mu_by_factor[1.0], plan.privacy.delta) <= plan.privacy.epsilon
    assert mu_by_factor[1.25] > budget.mu, "noise / 1.25 must be noticed"


@pytest.mark.parametrize("weights", [None, SelectionWeights(3.0, 1.0)])
def test_audit_of_selection(tmp_path: Path, weights: SelectionWeights | None) -> None:
    """Keys whose neighbours have one unit more: how often they are selected at one trigger."""
    plan = make_plan(
        triggers=1, windows=1, epsilon=1.0, delta=0.2, contributions=1 if weights is None else 2,
        aggregates=(COUNT,), weights=weights,
    )  # fmt: skip
    budget = allocate(plan)
    assert budget.selection is not None and budget.tau is not None
    assert budget.statistic is not None
    # One more unit adds its first pair, the most that one can add.
    mu = budget.statistic.alone / budget.selection.sigma
    assert mu <= budget.mu
    middle = int(budget.tau[0]) / (1 << DECODE_BITS) / budget.statistic.alone
    mu_by_factor = {}
    for factor in (1.0, 1.25):
        with smaller_noise(factor):
            counts = np.repeat([int(middle), int(middle) + 1], SIDE)
            seen = ~np.isnan(released(plan, counts, tmp_path)[:, 0])
        mu_by_factor[factor] = least_mu(seen[:SIDE].astype(float), seen[SIDE:].astype(float))
    assert 0.6 * mu <= mu_by_factor[1.0] <= mu
    assert mu_by_factor[1.25] > mu, "noise / 1.25 must be noticed"
