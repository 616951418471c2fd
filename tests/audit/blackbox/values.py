"""The figures and scores that trials read of a run: published values, and which keys appear.

**Values** are scored by the plan's best statistic and by a fitted one.

**Selection.**  Trials that read only which keys appear, and when, show key selection's part of the
budget.  Others bring each key of a trial to the threshold of its first test; the unit adds one pair
to each.  The score adds up, over the keys, the log-likelihood ratio of the test at which the key
passes, tabulated by simulating the statistic's Gaussian noise from the plan's figures.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.budget.allocation import Budget, plain_count
from dpstream.accounting.errors import required
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from tests.audit.blackbox.run import (
    Released,
    Runner,
    TrialInput,
    released,
    rows_of,
    table_of,
    totals,
)
from tests.audit.evidence.bounds import Parts, Scores, fitted_weights
from tests.audit.evidence.design import TrialDesign, others_needed, prefix_covariance

#: Rows, and released numbers, of one run of the flow; more trials take further runs.
_ROWS = 1_500_000
_NUMBERS = 4_000_000
#: Triggers that the fitted statistic reads.
_FITTED_TRIGGERS = 8
Progress = Callable[[int], None]


class Read(NamedTuple):
    """The scores and features of trials.

    There are (trials, statistics) scores of the plan's own weights, without and with the flooded
    keys, and (trials, d) features for a fitted statistic.
    """

    scores: Float64
    features: Float64


def feeds_of(plan: Plan, design: TrialDesign) -> list[tuple[int, int]]:
    """Return the (window, trigger) pairs at which others come.

    A second window, which no trial's unit touches, is watched where windows do not overlap: noise
    used in both would show there.
    """
    timeline = plan.timeline
    windows = 2 if timeline.windows > 1 and timeline.slide == timeline.window else 1
    return [(window, trigger) for window in range(windows) for trigger in design.feeds]


def chunks(trials: int, rows_each: float, numbers_each: float) -> Iterator[Int64]:
    """Yield the numbers of the trials of each run of the flow."""
    most = max(1, int(min(_ROWS / max(rows_each, 1), _NUMBERS / max(numbers_each, 1))))
    for begin in range(0, trials, most):
        yield np.arange(begin, min(begin + most, trials))


def value_scores(
    runner: Runner, design: TrialDesign, added: Bool, progress: Progress, again: bool = False
) -> tuple[list[Scores], int]:
    """Return (scores by each statistic, rows fed) of trials on both sides.

    Args:
        added: (trials,) which are on side D'.
        progress: called with the number of trials that are done since the last call.
        again: each trial has two runs of the flow with one key and two run ids, the first
            without its unit; noise that both use would show the unit.
    """
    plan, feeds = runner.plan, feeds_of(runner.plan, design)
    width = design.keys + design.extra
    rows_each = width * design.others * len(feeds) + len(design.pattern)
    numbers = width * len(design.at) * (len(feeds) // len(design.feeds)) * (len(design.columns) + 1)
    parts, fed = [], 0
    for trials in chunks(len(added), rows_each, numbers):
        read = []
        for turn in ("before", "now") if again else ("now",):
            here = added[trials] & (turn == "now")
            rows = rows_of(
                plan, trials, here, width, design.pattern, design.when, design.others, feeds
            )
            keys = (trials[:, None] * width + np.arange(width)).ravel()
            table = table_of(plan, rows, design.inputs)
            out = runner.run(TrialInput(table, keys), again=turn == "before")
            read.append(read_trials(plan, design, released(plan, out), trials, width))
            fed += len(rows.unit)
        parts.append(Read(read[-1].scores, np.concatenate([r.features for r in read], axis=1)))
        progress(len(trials))
    scores = np.concatenate([p.scores for p in parts])
    return statistics(scores, np.concatenate([p.features for p in parts]), added), fed


def statistics(scores: Float64, features: Float64, added: Bool) -> list[Scores]:
    """Return the plan's statistics, and one fitted to the first trials of each side."""
    a, b = features[~added], features[added]
    weights = fitted_weights(a[: Parts.of(len(a)).fit], b[: Parts.of(len(b)).fit])
    columns = [*scores.T, features @ weights]
    return [Scores(column[~added], column[added]) for column in columns]


def read_trials(plan: Plan, design: TrialDesign, rows: Released, trials: Int64, width: int) -> Read:
    """Return the scores and features of the trials of one run.

    Args:
        trials: their numbers, consecutive; width: keys of each.
    """
    at, size = design.at, len(trials)
    trial, key = np.divmod(rows.key - trials[0] * width, width)
    column = np.minimum(np.searchsorted(at, rows.trigger), len(at) - 1)
    read = at[column] == rows.trigger
    block = np.where(key == 0, 0, np.where(key < design.keys, 1, 2))
    blocks = 1 if width == 1 else 3
    value = totals(design, rows)
    windows = int(rows.window.max(initial=0)) + 1
    shape = (size, windows, blocks, len(at))
    cell = np.ravel_multi_index((trial, rows.window, block, column), shape)
    tensor = np.stack(
        [_added_up(cell[read], value[read, c], shape) for c in range(value.shape[1])], axis=-1
    )
    heavy, weights = design.weights(plan)
    score = np.einsum("tpc,pc->t", tensor[:, 0, 0], heavy)
    flooded = score
    if blocks > 1:
        score = score + np.einsum("tpc,pc->t", tensor[:, 0, 1], weights)
        flooded = score + np.einsum("tpc,pc->t", tensor[:, 0, 2], weights)
    # How often keys are published, and how often at other triggers than the calendar's.
    present = _added_up(cell[read], np.ones(int(read.sum())), shape).sum(axis=2)
    other = np.bincount(trial[~read], minlength=size)[:, None]
    triggers = np.unique(np.linspace(0, len(at) - 1, _FITTED_TRIGGERS).round().astype(np.int64))
    features = [
        tensor[:, :, :, triggers].reshape(size, -1),
        present[:, :, triggers].reshape(size, -1),
        other,
    ]
    return Read(np.stack([score, flooded], axis=1), np.concatenate(features, axis=1))


def _added_up(cell: Int64, values: npt.NDArray[np.float64], shape: tuple[int, ...]) -> Float64:
    total = np.asarray(np.bincount(cell, values, minlength=int(np.prod(shape))), np.float64)
    return total.reshape(shape)


#: Tests that are told apart; simulated noise paths; rows of all trials together.
_TESTS = 32
_PATHS = 100_000
_SELECTION_ROWS = 5_000_000


class Crossing(NamedTuple):
    """The trigger times at which keys at the threshold pass.

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
    """Return the design of the trials, with as many keys as their rows allow."""
    tau = required(budget.tau, "keys are selected")
    statistic = required(budget.statistic, "keys are selected")
    others = others_needed(plan, budget, 0.0)
    keys = min(
        plan.privacy.contributions, max(1, _SELECTION_ROWS // (2 * trials * (others + 1))), 64
    )
    weights = plan.design.weights
    adds = np.full(keys, statistic.alone, np.float64)
    if weights is not None:
        alone = weights.alone(plan.privacy.contributions, keys)
        adds = (statistic.weighted * alone + statistic.counted).astype(np.float64)
    tests = min(plan.design.tests, _TESTS)
    noise = _noise(plan, budget, tests, np.random.default_rng(seed))
    need = tau[:tests] / (1 << DECODE_BITS) - others * statistic.alone
    return Crossing(
        others,
        keys,
        _chances(noise, need),
        np.stack([_chances(noise, need - more) for more in adds]),
    )


def _noise(plan: Plan, budget: Budget, tests: int, rng: np.random.Generator) -> Float64:
    """(paths, tests) simulated noise of the statistic."""
    selection = required(budget.selection, "keys are selected")
    statistic = required(budget.statistic, "keys are selected")
    step_indices = np.arange(1, tests + 1)
    covariance = prefix_covariance(selection.strategy_object, step_indices)
    covariance = covariance * (statistic.weighted * selection.sigma) ** 2
    plain = plain_count(plan, budget.units, budget.values)
    if plain is not None:
        at = plain.steps_at(plan.design.test_triggers)[:tests]
        own = prefix_covariance(plain.strategy_object, at)
        covariance = covariance + own * (statistic.counted * plain.sigma) ** 2
    root = np.linalg.cholesky(covariance + 1e-9 * np.trace(covariance) * np.eye(tests))
    return np.asarray(rng.standard_normal((_PATHS, tests)) @ root.T)


def _chances(noise: Float64, need: Float64) -> Float64:
    passed = noise > need
    first = np.where(passed.any(axis=1), passed.argmax(axis=1), len(need))
    counts = np.bincount(first, minlength=len(need) + 1) + 0.5
    return np.asarray(counts / counts.sum())


def visible_mu(design: Crossing, seed: int) -> float:
    """Return the largest mu that one cutoff of the trials' score can show, by simulation."""
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
    """Return (scores, rows fed) of trials on both sides."""
    plan, fed = runner.plan, 0
    pattern, first = np.arange(design.keys), np.ones(design.keys, np.int64)
    tests = design.ratios.shape[1] - 1
    scores = []
    for trials in chunks(len(added), design.keys * (design.others + 1), design.keys * tests):
        rows = rows_of(
            plan, trials, added[trials], design.keys, pattern, first, design.others, [(0, 1)]
        )
        out = runner.run(TrialInput(table_of(plan, rows, inputs_of(plan)), np.zeros(0, np.int64)))
        passed = first_tests(plan, released(plan, out), trials, design.keys, tests)
        scores.append(
            np.take_along_axis(design.ratios[None], passed[:, :, None], 2)[:, :, 0].sum(1)
        )
        fed += len(rows.unit)
        progress(len(trials))
    score = np.concatenate(scores)
    return [Scores(score[~added], score[added])], fed


def first_tests(plan: Plan, rows: Released, trials: Int64, width: int, tests: int) -> Int64:
    """Return (trials, width) number of the test at which each key appears, ``tests`` for none."""
    own = rows.window == 0
    first = np.full(len(trials) * width, tests, np.int64)
    number = np.minimum(np.searchsorted(plan.design.test_triggers, rows.trigger[own]), tests)
    np.minimum.at(first, rows.key[own] - trials[0] * width, number)
    return first.reshape(len(trials), width)


def inputs_of(plan: Plan) -> dict[str, tuple[float, float]]:
    """Return, for each input column, the value of the unit and that of the others: 0."""
    return {s.column: (0.0, 0.0) for s in plan.design.streams if s.column}


def alone_released(runner: Runner, keys: int, progress: Progress) -> int:
    """Return how many keys with too few units were ever released.

    Each trial has one key, with the first pair of each of its units.  A first pair counts most,
    so that a unit's further keys need no test.
    """
    plan, hits = runner.plan, 0
    few = plan.privacy.pre_threshold + plan.design.units_alone
    for trials in chunks(keys, few, plan.timeline.triggers):
        none = np.zeros(len(trials), np.bool_)
        nobody = np.zeros(0, np.int64)
        rows = rows_of(plan, trials, none, 1, nobody, nobody, few, [(0, 1)])
        out = runner.run(TrialInput(table_of(plan, rows, inputs_of(plan)), np.zeros(0, np.int64)))
        hits += len(np.unique(released(plan, out).key))
        progress(len(trials))
    return hits
