"""Figures of a tuning with which the job can be run: its noise for each C, bounds, bound per key.

All of it is public, a function of the job's plan and of the noisy counts.
"""

import math

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.answer import ChosenBounds, Figures, NoiseOf, read_off
from dpstream.accounting.tuning.reference import final_sd
from dpstream.accounting.tuning.starred import usual, with_privacy
from dpstream.pipelines.tuning import file as tuning_file
from dpstream.pipelines.tuning.ask import CheckedRequest


def read_off_runnable(tuning: CheckedRequest, nodes: list[Int64]) -> Figures:
    """Return figures of the noisy nodes with which the job can be run."""
    bound = tuning.job.plan.privacy.per_key_bound

    def noise_with(clamps: ChosenBounds) -> NoiseOf:
        plan = with_bounds(tuning, clamps)
        return lambda contributions, per_key: _noise(plan, contributions, per_key)

    return _runnable(tuning, read_off(tuning.question, tuning.design, nodes, noise_with, bound))


def _runnable(tuning: CheckedRequest, figures: Figures) -> Figures:
    """Return the figures with the largest C, at most the tuned one, whose noise can be drawn."""
    if figures.unanswered is not None or _allowed(tuning, figures, figures.contributions):
        return figures
    low, high = 1, figures.contributions  # low can be run: see ``ask``
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _allowed(tuning, figures, middle) else (low, middle)
    note = "a smaller C is taken, because the noise of the chosen one exceeds the sampler's range"
    notes = (*figures.notes, note)
    return msgspec.structs.replace(figures, contributions=low, notes=notes, cut=None, sd=None)


def _noise(plan: Plan, contributions: int, per_key: int | None) -> float:
    """Return the sd of the first column at a window's end, in records at the bound; public.

    It is for that C and bound per key; infinite if the job cannot be run with them.
    """
    other = with_privacy(plan, contributions=contributions, per_key_bound=per_key)
    try:
        other = with_privacy(other, weights=plan.privacy.weights or usual(other))
        return final_sd(other, allocate(other))
    except (UsageError, PolicyError):
        return math.inf


def _allowed(tuning: CheckedRequest, figures: Figures, contributions: int) -> bool:
    try:
        allocate(with_privacy(with_bounds(tuning, figures.bounds), contributions=contributions))
    except UsageError:
        return False
    return True


def with_bounds(tuning: CheckedRequest, chosen: ChosenBounds) -> Plan:
    """Return the job's plan with these bounds."""
    clamps, plan = bounds_of(tuning, chosen), tuning.job.plan
    aggregates = tuple(
        msgspec.structs.replace(a, bounds=clamps.get(a.name, a.bounds)) for a in plan.aggregates
    )
    return msgspec.structs.replace(plan, aggregates=aggregates)


def bounds_of(tuning: CheckedRequest, chosen: ChosenBounds) -> dict[str, tuple[float, float]]:
    """Return tuned bounds in the columns' units, by aggregate."""
    grids = {a.name: a.grid for a in tuning.job.plan.aggregates}
    return {name: tuning_file.in_column_units(low, high, grids[name]) for name, low, high in chosen}
