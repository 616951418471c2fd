"""PERTURB: what is measured of each group, with noise; the only place where exact counts end.

Of a level each record is in at most s groups, and in each it changes every total and one cell of
any detail by one (`expand`, `aggregate`).  A group is measured in one of three ways:

1. Its total alone, with the level's whole budget / s (program p, DETAILED_ONLY).
2. Two steps (program p).  Step 1: the total with gamma of it.  The noisy total, and nothing else,
   chooses the detail by the public thresholds; then the cells of that detail with the rest.  Given
   the outcome of step 1 the cells are a fixed query of sensitivity one, so both steps compose
   adaptively to the budget / s.
3. From a published total (program h): the detail is a function of public figures, and its cells
   have the whole budget / s, whether persons have a step 1 for the group or not (DETAILED_ONLY).
   Groups that the published totals do not hold are left out, whatever the data are.

All groups together: s of them can change, so a level costs at most s times the budget / s.  Detail
that were chosen from the exact total would release which side of a threshold it is on, without
noise.  The noise of steps and groups is independent (`noise`).
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.tabulation.parameters import Table
from dpstream.accounting.tabulation.scales import Draws, Noise
from dpstream.dp_transforms.tabulation.aggregate import Counts
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.dp_transforms.tabulation.noise import FIRST, TOTAL, CellNoise, detail_step
from dpstream.dp_transforms.tabulation.published import Published


class Measured(NamedTuple):
    """Groups of a shard that are measured alike.

    Attributes:
        detail: of the cells.
        noise: of each value; first_noise: of each total of step 1.
        groups: (n,) numbers in the level, increasing.
        values: (n, cells) noisy counts.
        first: (n,) noisy totals of step 1, ``None`` without one.
    """

    detail: int
    noise: Noise
    first_noise: Noise | None
    groups: Int64
    values: Int64
    first: Int64 | None


def perturbed(
    level: LevelDomain,
    table: Table,
    counts: Counts,
    draws: Draws,
    thresholds: tuple[float, ...],
    noise: CellNoise,
    published: Published | None = None,
) -> list[Measured]:
    """What is measured of a shard's groups.

    Args:
        draws: noise of the table at this level.
        thresholds: of the level, one for each detail above 0.
        published: totals that choose the detail, where there is no step 1.
    """
    shard = counts.shard
    groups = np.arange(shard.first, shard.last)
    only: Bool = np.tile(level.total_only, len(groups) // max(1, len(level.total_only)))

    def measure(kind: Noise, step: str, of: Int64, detail: int) -> Int64:
        exact = counts.cells(of, table.details[detail])
        return exact + noise.draw(kind, table.name, level.level, step, of, exact.shape[1])

    out = list[Measured]()
    first: Int64 | None = None
    if draws.first is None:
        totals_of = required(published, "without a step 1 totals are published already")
        groups, totals = totals_of.within(shard.first, shard.last)
        detail = _detail(totals, thresholds)
    else:
        if only.any():
            if draws.total is None:
                raise InvariantError("groups of which the total alone is measured")
            values = measure(draws.total, TOTAL, groups[only], 0)
            out.append(Measured(0, draws.total, None, groups[only], values, None))
        groups = groups[~only]
        first = measure(draws.first, FIRST, groups, 0)[:, 0]
        detail = _detail(first, thresholds)
    if draws.detail is None:
        raise InvariantError("a level that is on measures cells")
    for number in range(len(table.details)):
        mine = detail == number
        if mine.any():
            of = groups[mine]
            values = measure(draws.detail, detail_step(number), of, number)
            step_one = None if first is None else first[mine]
            out.append(Measured(number, draws.detail, draws.first, of, values, step_one))
    return out


def _detail(totals: Int64, thresholds: tuple[float, ...]) -> Int64:
    """The detail of each total: how many thresholds it reaches."""
    return np.searchsorted(np.array(thresholds), totals, side="right").astype(np.int64)
