"""Trials that read only which keys appear, and when: key selection's part of the budget.

Others bring each key of a trial to the threshold of its first test; the unit adds one pair to
each.  The score adds up, over the keys, the log-likelihood ratio of the test at which the key
passes, tabulated by simulating the statistic's Gaussian noise from the plan's figures.
"""

from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.budget.allocation import Budget, plain_count
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.evidence.bounds import Scores
from dpstream.accounting.evidence.design import others_needed, prefix_covariance
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.audit.rows import Released, released, rows_of, table_of
from dpstream.pipelines.audit.run import Runner, TrialInput
from dpstream.pipelines.audit.values import Progress, chunks

#: Tests that are told apart; simulated noise paths; rows of all trials together.
_TESTS = 32
_PATHS = 100_000
_ROWS = 5_000_000


class Crossing(NamedTuple):
    """When keys at the threshold pass.

    Attributes:
        others: units on each key without the trial's unit; keys: of a trial.
        without: (tests + 1,) chances that a key passes first at each test, last: at none.
        added: (keys, tests + 1) the same with the unit's i-th pair.
    """

    others: int
    keys: int
    without: Float64
    added: Float64

    @property
    def ratios(self) -> Float64:
        """(keys, tests + 1) log-likelihood ratios."""
        return np.log(self.added) - np.log(self.without)


def crossing(plan: Plan, budget: Budget, trials: int, seed: int) -> Crossing:
    """The design of the trials, with as many keys as their rows allow."""
    if budget.tau is None or budget.statistic is None:
        raise InvariantError("budget.tau is not None and budget.statistic is not None")
    others = others_needed(plan, budget, 0.0)
    keys = min(plan.privacy.contributions, max(1, _ROWS // (2 * trials * (others + 1))), 64)
    statistic, weights = budget.statistic, plan.design.weights
    adds = np.full(keys, statistic.alone, np.float64)
    if weights is not None:
        alone = weights.alone(plan.privacy.contributions, keys)
        adds = (statistic.weighted * alone + statistic.counted).astype(np.float64)
    tests = min(plan.design.tests, _TESTS)
    noise = _noise(plan, budget, tests, np.random.default_rng(seed))
    need = budget.tau[:tests] / (1 << DECODE_BITS) - others * statistic.alone
    return Crossing(
        others,
        keys,
        _chances(noise, need),
        np.stack([_chances(noise, need - more) for more in adds]),
    )


def _noise(plan: Plan, budget: Budget, tests: int, rng: np.random.Generator) -> Float64:
    """(paths, tests) simulated noise of the statistic."""
    if budget.selection is None or budget.statistic is None:
        raise InvariantError("budget.selection is not None and budget.statistic is not None")
    step_indices = np.arange(1, tests + 1)
    covariance = prefix_covariance(budget.selection.strategy_object, step_indices)
    covariance = covariance * (budget.statistic.weighted * budget.selection.sigma) ** 2
    plain = plain_count(plan, budget.units, budget.values)
    if plain is not None:
        at = plain.steps_at(plan.design.test_triggers)[:tests]
        own = prefix_covariance(plain.strategy_object, at)
        covariance = covariance + own * (budget.statistic.counted * plain.sigma) ** 2
    root = np.linalg.cholesky(covariance + 1e-9 * np.trace(covariance) * np.eye(tests))
    return np.asarray(rng.standard_normal((_PATHS, tests)) @ root.T)


def _chances(noise: Float64, need: Float64) -> Float64:
    passed = noise > need
    first = np.where(passed.any(axis=1), passed.argmax(axis=1), len(need))
    counts = np.bincount(first, minlength=len(need) + 1) + 0.5
    return np.asarray(counts / counts.sum())


def visible_mu(design: Crossing, seed: int) -> float:
    """mu of the best cutoff of the score, by simulation."""
    rng = np.random.default_rng([seed, 1])
    ratios = design.ratios
    totals = np.zeros((2, _PATHS))
    for key, row in enumerate(ratios):
        for side, chances in enumerate((design.without, design.added[key])):
            totals[side] += rng.choice(row, _PATHS, p=chances)
    cutoffs = np.quantile(totals, np.linspace(0.02, 0.98, 97))
    positive = np.array([(totals[0] > cutoff).mean() for cutoff in cutoffs])
    negative = np.array([(totals[1] <= cutoff).mean() for cutoff in cutoffs])
    inside = (np.minimum(positive, negative) > 0.01) & (np.maximum(positive, negative) < 0.99)
    gaps = norm.isf(positive[inside]) - norm.ppf(negative[inside])
    return max(0.0, float(gaps.max(initial=0.0)))


def selection_scores(
    runner: Runner, design: Crossing, added: Bool, progress: Progress
) -> tuple[list[Scores], int]:
    """(scores, rows fed) of trials on both sides."""
    plan, fed = runner.plan, 0
    pattern, first = np.arange(design.keys), np.ones(design.keys, np.int64)
    tests = design.ratios.shape[1] - 1
    scores = []
    for trials in chunks(len(added), design.keys * (design.others + 1), design.keys * tests):
        rows = rows_of(
            plan, trials, added[trials], design.keys, pattern, first, design.others, [(0, 1)]
        )
        out = runner.run(TrialInput(table_of(plan, rows, _inputs(plan)), np.zeros(0, np.int64)))
        passed = first_tests(plan, released(plan, out), trials, design.keys, tests)
        scores.append(
            np.take_along_axis(design.ratios[None], passed[:, :, None], 2)[:, :, 0].sum(1)
        )
        fed += len(rows.unit)
        progress(len(trials))
    score = np.concatenate(scores)
    return [Scores(score[~added], score[added])], fed


def first_tests(plan: Plan, rows: Released, trials: Int64, width: int, tests: int) -> Int64:
    """(trials, width) number of the test at which each key appears, ``tests`` for none."""
    own = rows.window == 0
    first = np.full(len(trials) * width, tests, np.int64)
    number = np.minimum(np.searchsorted(plan.design.test_triggers, rows.trigger[own]), tests)
    np.minimum.at(first, rows.key[own] - trials[0] * width, number)
    return first.reshape(len(trials), width)


def _inputs(plan: Plan) -> dict[str, tuple[float, float]]:
    return {s.column: (0.0, 0.0) for s in plan.design.streams if s.column}


def alone_released(runner: Runner, keys: int, progress: Progress) -> tuple[int, int]:
    """(keys ever released, rows fed) of so many keys that too few units have: one person's more
    than are never tested, each with its first pair, which counts most."""
    plan, hits, fed = runner.plan, 0, 0
    few = plan.privacy.pre_threshold + plan.design.units_alone
    for trials in chunks(keys, few, plan.timeline.triggers):
        none = np.zeros(len(trials), np.bool_)
        nobody = np.zeros(0, np.int64)
        rows = rows_of(plan, trials, none, 1, nobody, nobody, few, [(0, 1)])
        out = runner.run(TrialInput(table_of(plan, rows, _inputs(plan)), np.zeros(0, np.int64)))
        hits += len(np.unique(released(plan, out).key))
        fed += len(rows.unit)
        progress(len(trials))
    return hits, fed
