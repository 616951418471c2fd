"""What helps most by ``dpstream plan`` against the best of a grid, on data it has never seen.

    python -m tests.bench.starred

Three shapes of data: the demo's flights (units are aircraft and weeks), and two that are generated
with 1,000 and 100,000 units.  Of those a unit has a Pareto number of records (exponent 1.3, median
2, up to 5,000), half of which return to a key that the unit had before; the others follow Zipf's
law of exponent 1.1.  For every C the job is the one that a project file gives; the plan stars one
way to noise it by its public reference population alone, and here that way and a grid of shares,
weights and strategies are held against the data itself: expected published keys at the windows'
close (a key's chance is that of its easiest test), and sd of the count (`typical_sd`).  The grid is
that of settings a job can have; a larger one has shares of the budget for selection as well, which
no job can set: what they would add is a figure of its own.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow.compute as pc
from scipy.special import ndtr

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.tuning import starred as tuning
from dpstream.accounting.tuning.reference import typical_sd
from dpstream.accounting.weights import EVEN, MILD, STEEP, SelectionWeights, usual_weights
from dpstream.pipelines.demo import read_flights
from dpstream.pipelines.jobs.job import load_job
from tests.accounting.plans import COUNT, MEAN, allocate_sharing, build
from tests.bench.common import emit, machine

BOUNDS = (5, 10, 20, 30)
SHAPES = ("flights", "1,000 units", "100,000 units")
KEYS_KEPT, KEYS_OF_SHARES, ERROR_ABOVE = 0.96, 0.87, 1.1
_WEIGHTS = (None, MILD, EVEN, SelectionWeights(3, 0.75), SelectionWeights(3, 1), STEEP,
            SelectionWeights(6, 1.5), SelectionWeights(0, 0.5))  # fmt: skip
_SHARES = (None, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99)
_STRATEGIES = ("blt", "dense", "tree")
#: Keys of fewer units are published by nobody here.
_LEAST = 5


class Shape(NamedTuple):
    """Data as selection sees it.

    Attributes:
        plan: of its job, whatever C.
        firsts: (keys of windows, triggers, C) units whose first record in a key comes at a trigger
            and is their i-th of all.
    """

    plan: Plan
    firsts: Float64


class Ratios(NamedTuple):
    """The starred way on data: its keys over the most of the grid, and of the grid with shares;
    its sd over the grid's least with as many keys; and keys and sd over the job's own."""

    keys: float
    keys_of_shares: float
    error: float
    keys_of_job: float
    error_of_job: float
    settings: dict[str, object]


@functools.cache
def shape(name: str) -> Shape:
    """One of ``SHAPES``."""
    if name == "flights":
        return _flights()
    units = int(name.partition(" ")[0].replace(",", ""))
    epsilon, delta = (4.0, 1e-6) if units < 10_000 else (2.0, 1e-8)
    plan = build(13, aggregates=(COUNT, MEAN), strategy="blt", epsilon=epsilon, delta=delta)
    return Shape(plan, _generated(units, 2_000 if units < 10_000 else 50_000, 13))


def starred(name: str, contributions: int, **privacy: object) -> Ratios:
    """The starred way against the grid."""
    of = shape(name)
    weights = usual_weights(
        contributions, combine=bool(privacy.get("combine")), selects=True, fused=False
    )
    # Here selection is not simulated record by record, so nothing is skipped.
    job = with_privacy(of.plan, skip=False, contributions=contributions, weights=weights, **privacy)
    settings = tuning.starred(job).settings
    keys, sd = _on(of, with_privacy(job, **settings))
    grid = {point: _on(of, *point) for point in _grid(job)}
    plain = [figures for (_, share), figures in grid.items() if share is None]
    most, most_of_shares = (max(n for n, _ in of) for of in (plain, grid.values()))
    least = min((error for key_count, error in plain if key_count >= keys), default=sd)
    own_keys, own_sd = _on(of, job)
    ratios = keys / most, keys / most_of_shares, sd / least, keys / own_keys, sd / own_sd
    return Ratios(*ratios, settings)


def _grid(job: Plan) -> Iterator[tuple[Plan, float | None]]:
    for strategy, weights, share in itertools.product(_STRATEGIES, _WEIGHTS, _SHARES):
        yield with_privacy(job, strategy=strategy, weights=weights), share


def _on(of: Shape, plan: Plan, share: float | None = None) -> tuple[float, float]:
    """(expected published keys, sd of the count); nothing where the plan is refused."""
    try:
        budget = allocate_sharing(plan, share)
    except DpstreamError:
        return 0.0, np.inf
    return _keys(of, plan, budget), typical_sd(budget.values[0].sd)


def _keys(of: Shape, plan: Plan, budget: Budget) -> float:
    assert budget.statistic is not None and budget.tau is not None
    weights = budget.weights
    adds = np.ones(plan.privacy.contributions) if weights is None else weights.astype(np.float64)
    adds = budget.statistic.weighted * adds + budget.statistic.counted
    passed = np.cumsum(of.firsts[:, :, : len(adds)] @ adds, axis=1)
    tests = np.arange(1, plan.design.tests + 1) * plan.design.select_every
    at = np.minimum(tests, plan.design.triggers) - 1
    reached = (passed[:, at] - budget.tau / 2.0**DECODE_BITS) / budget.statistic.sd
    return float(ndtr(reached.max(axis=1)).sum())


def _firsts(unit: Int64, key: Int64, trigger: Int64, triggers: int) -> Float64:
    """``Shape.firsts`` of records in the order of their time."""
    order = np.argsort(unit, kind="stable")
    start = np.flatnonzero(np.diff(unit[order], prepend=-1))
    number = np.empty(len(unit), np.int64)
    number[order] = np.arange(len(unit)) - np.repeat(start, np.diff(start, append=len(unit)))
    counted = number < max(BOUNDS)
    unit, key, trigger, number = (of[counted] for of in (unit, key, trigger, number))
    _, first = np.unique(unit * (1 + key.max()) + key, return_index=True)
    key, trigger, number = key[first], trigger[first], number[first]
    large = np.flatnonzero(np.bincount(key) >= _LEAST)
    place = np.full(1 + key.max(), -1)
    place[large] = np.arange(len(large))
    selected = place[key] >= 0
    counts = np.zeros((len(large), triggers, max(BOUNDS)))
    np.add.at(counts, (place[key[selected]], trigger[selected], number[selected]), 1)
    return counts


def _flights() -> Shape:
    job = Path(str(resources.files("dpstream.pipelines") / "examples/flights.toml"))
    plan = load_job(job).plan
    timeline, table = plan.timeline, read_flights()
    table = table.filter(pc.and_(pc.is_valid(table["tailnum"]), pc.is_valid(table["dep_delay"])))
    table = table.sort_by("time_hour")
    at = table["time_hour"].cast("int64").to_numpy() - timeline.start
    window, within = np.divmod(at, timeline.window)

    def code(name: str) -> Int64:
        column = table[name].combine_chunks().dictionary_encode()
        return np.asarray(column.indices.to_numpy(), np.int64)

    windows = int(window.max()) + 1
    key = (code("origin") * 100 + code("carrier")) * windows + window
    key = np.unique(key, return_inverse=True)[1]
    unit = code("tailnum") * windows + window
    return Shape(plan, _firsts(unit, key, within // timeline.trigger_every, timeline.triggers))


def _generated(units: int, keys: int, triggers: int) -> Float64:
    draw = np.random.default_rng(0)
    records = np.minimum((1 + 2 * draw.pareto(1.3, units)).astype(np.int64), 5_000)
    unit, number = np.repeat(np.arange(units), records), np.arange(records.sum())
    begin = np.repeat(np.cumsum(records) - records, records)
    popular = np.cumsum(np.arange(1, keys + 1) ** -1.1)
    key = np.searchsorted(popular / popular[-1], draw.random(len(unit)))
    again = (draw.random(len(unit)) < 0.5) & (number > begin)
    earlier = begin + (draw.random(len(unit)) * (number - begin)).astype(np.int64)
    source = np.where(again, earlier, number)
    while not np.array_equal(source[source], source):
        source = source[source]
    trigger = np.sort(unit * triggers + draw.integers(0, triggers, len(unit))) % triggers
    order = np.argsort(trigger, kind="stable")
    return _firsts(unit[order], key[source][order], trigger[order], triggers)


def main() -> None:
    """Measure all shapes and bounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    for name, count in itertools.product(SHAPES, BOUNDS):
        comparison = msgspec.to_builtins(starred(name, count))
        emit({"bench": "starred", "shape": name, "C": count, "found": comparison} | machine(), out)


if __name__ == "__main__":
    main()
