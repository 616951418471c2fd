"""The private answer: named noise, selection, and the columns of the groups that are released.

A draw's name is (run name, digest of the exact numbers, column, part, group id, node), so the same
run gives the same answer of the same rows again, in whatever order groups come and whatever else is
released, and noise of its own of other rows.  Noise of a column is drawn for
the groups that are released and, of the count that is tested, for those that can be.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import required
from dpstream.accounting.mechanisms.optimum import selection_optimum
from dpstream.accounting.query.calibration import PartNoise, QueryBudget
from dpstream.accounting.query.parts import parts_by_column
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.estimates import Estimate, direct, mean, quantiles, variance
from dpstream.dp_transforms.one_shot.partials import Bounded, Totals, distinct_values

#: Name of the noise of selection; the noise of columns begins with another name.
SELECTION = b"selection of groups"


class QueryAnswer(NamedTuple):
    """The released answer of a query.

    Attributes:
        group: codes of the released groups, in the order of their ids (so that the order says
            nothing); the caller puts the groups' values there and sorts by them.
        columns: estimates by column, a row for each group.
    """

    group: Int64
    columns: dict[str, Estimate]


class Noise:
    """The noise of one answer, part by part.

    Args:
        ring: key ring of the deployment; run_name: run id, committed before the first draw, and
            digest of the question.
        inputs: digest of all exact numbers of the answer (`noise.inputs`).
    """

    def __init__(self, ring: KeyRing, run_name: Sequence[bytes], inputs: bytes) -> None:
        self._ring, self._name, self._inputs = ring, (b"query noise", *run_name), inputs

    def selection(self, items: Ids, sigma: float) -> Int64:
        """Return the noise of the weighted count."""
        return OneShot(self._ring, (*self._name, SELECTION), self._inputs).rounded_gaussian(
            items, sigma
        )

    def least_counts(self, items: Ids, epsilon: float, delta: float) -> Int64:
        """Return (n,) the least number of units with which each group is published, for groups
        alone.
        """
        optimum = required(selection_optimum(epsilon, delta), "its chances were listed before")
        return OneShot(self._ring, (*self._name, SELECTION), self._inputs).least_counts(
            items, optimum
        )

    def sooner(self, noise: PartNoise, items: Ids) -> Int64:
        """Return 1 where the truncated noise of a part has k - 1 in place of k, else 0."""
        if noise.most is None:
            return np.zeros(len(items), np.int64)
        one = self._of(noise)
        return one.truncated_geometric(items, noise.scale, noise.most, noise.sooner)[1]

    def part(self, noise: PartNoise, items: Ids, scale: float | None = None) -> Int64:
        """Return the noise of a part, of its law, named by its column."""
        one = self._of(noise)
        if noise.step is not None:
            sensitivity = noise.part.most * noise.part.unit
            return one.staircase(items, noise.scale, sensitivity, noise.step)
        if noise.most is not None:
            return one.truncated_geometric(items, noise.scale, noise.most, noise.sooner)[0]
        draw = one.rounded_gaussian if noise.law == "gaussian" else one.discrete_laplace
        return draw(items, noise.scale if scale is None else scale)

    def _of(self, noise: PartNoise) -> OneShot:
        part = noise.part
        name = (*self._name, b"column", part.column.encode(), part.what.encode())
        return OneShot(self._ring, name, self._inputs)


def answer(
    plan: QueryPlan,
    budget: QueryBudget,
    totals: Totals,
    shards: Sequence[Bounded],
    group_ids: Ids,
    ring: KeyRing,
    run_name: Sequence[bytes],
) -> QueryAnswer:
    """Draw the noise, select the groups, and estimate the columns.

    Args:
        budget: what was committed for this run.
        totals: of ``aggregated``, over all units.
        shards: of ``bounded``, for columns that have rows (others do not need them).
        group_ids: (groups, 2) keyed ids of all codes, each group's its own.
    """
    at = parts_by_column(plan, [n.part for n in budget.parts])
    for column in plan.columns:
        if column.distinct:
            [index], size = at[column.name], len(group_ids)
            totals.sums[index] = distinct_values(shards, column, size)
    noise = Noise(ring, run_name, inputs_of(totals, shards, group_ids, ring))
    groups = selected(plan, budget, totals, group_ids, noise)
    groups = groups[np.lexsort((group_ids[groups, 0], group_ids[groups, 1]))]
    columns = {}
    for column in plan.columns:
        mine = [budget.parts[i] for i in at[column.name]]
        if column.kind == "quantiles":
            draw = functools.partial(noise.part, mine[0])
            columns[column.name] = quantiles(
                column, mine[0], shards, groups, group_ids, draw, budget.quantile
            )
            continue
        items = group_ids[groups]
        noisy = [
            totals.sums[i][groups] + noise.part(budget.parts[i], items) for i in at[column.name]
        ]
        columns[column.name] = _estimate(column, mine, noisy, budget.quantile)
    return QueryAnswer(groups, columns)


def inputs_of(totals: Totals, shards: Sequence[Bounded], group_ids: Ids, ring: KeyRing) -> bytes:
    """Return a digest of everything that noise is added to, or selected by (`noise.inputs`)."""
    sums = [totals.sums[index] for index in sorted(totals.sums)]
    digest = InputDigest(ring).add("totals", group_ids, totals.units, totals.weighted, *sums)
    for shard in shards:
        for column, (partial, value, weight) in sorted(shard.rows.items()):
            digest.add_rows(column, group_ids[shard.group[partial]], value, weight)
    return digest.value


def selected(
    plan: QueryPlan, budget: QueryBudget, totals: Totals, group_ids: Ids, noise: Noise
) -> Int64:
    """Return codes of the groups to release: exact units >= m and Q > (m - 1) most + tau.

    By the optimum they are those with exact units - (m - 1) >= M: its chance at m - 1 units less.
    """
    chosen = budget.selection
    if chosen is None:
        return np.arange(len(group_ids))
    candidates = np.flatnonzero(totals.units >= plan.min_units)
    items = group_ids[candidates]
    if chosen.optimum:
        counts = totals.units[candidates] - (plan.min_units - 1)
        least = noise.least_counts(items, chosen.optimum, budget.delta_each)
        return np.asarray(candidates[counts >= least])
    statistic = np.zeros(len(candidates), np.int64)
    if chosen.weights:
        weighted = totals.weighted[candidates] + noise.selection(items, chosen.sigma)
        statistic += chosen.weighted * weighted
    if chosen.tested is not None:
        part = budget.parts[chosen.tested]
        exact = totals.sums.get(chosen.tested, totals.units)[candidates]
        noisy = exact + noise.part(part, items) + noise.sooner(part, items)
        statistic += chosen.counted * noisy
    return np.asarray(candidates[statistic > chosen.need(plan.min_units)])


def _estimate(
    column: QueryColumn, noises: list[PartNoise], noisy: list[Int64], quantile: float
) -> Estimate:
    if column.kind == "mean":
        return mean(column, noises, noisy, quantile)
    if column.kind in ("var", "stddev"):
        return variance(column, noises, noisy, quantile)
    return direct(column, noises[0], noisy[0])
