"""Trials that read published values, scored by the plan's best statistic and by a fitted one."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.evidence.bounds import Parts, Scores, fitted_weights
from dpstream.accounting.evidence.design import TrialDesign
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.audit.rows import Released, released, rows_of, table_of, totals
from dpstream.pipelines.audit.run import Runner, TrialInput

#: Rows, and released numbers, of one run of the flow; more trials take further runs.
_ROWS = 1_500_000
_NUMBERS = 4_000_000
#: Triggers that the fitted statistic reads.
_FITTED_TRIGGERS = 8
Progress = Callable[[int], None]


class Read(NamedTuple):
    """What is kept of trials: (trials, statistics) scores of the plan's own weights, without and
    with the flooded keys, and (trials, d) features for a fitted statistic."""

    scores: Float64
    features: Float64


def feeds_of(plan: Plan, design: TrialDesign) -> list[tuple[int, int]]:
    """(window, trigger) at which others come; a second window, which no trial's unit touches, is
    watched where windows do not overlap: noise used in both would show there."""
    line = plan.timeline
    windows = 2 if line.windows > 1 and line.slide == line.window else 1
    return [(window, trigger) for window in range(windows) for trigger in design.feeds]


def chunks(trials: int, rows_each: float, numbers_each: float) -> Iterator[Int64]:
    """Numbers of the trials of each run of the flow."""
    most = max(1, int(min(_ROWS / max(rows_each, 1), _NUMBERS / max(numbers_each, 1))))
    for begin in range(0, trials, most):
        yield np.arange(begin, min(begin + most, trials))


def value_scores(
    runner: Runner, design: TrialDesign, added: Bool, progress: Progress, again: bool = False
) -> tuple[list[Scores], int]:
    """(scores by each statistic, rows fed) of trials on both sides.

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
    """The plan's statistics, and one fitted to the first trials of each side."""
    a, b = features[~added], features[added]
    weights = fitted_weights(a[: Parts.of(len(a)).fit], b[: Parts.of(len(b)).fit])
    columns = [*scores.T, features @ weights]
    return [Scores(column[~added], column[added]) for column in columns]


def read_trials(plan: Plan, design: TrialDesign, rows: Released, trials: Int64, width: int) -> Read:
    """Scores and features of the trials of one run.

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
