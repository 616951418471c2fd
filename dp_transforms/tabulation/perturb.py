"""PERTURB: the measured, noisy counts of each group; the only place where exact counts end.

Of a level each record is in at most s groups, and in each it changes every total and one cell of
any detail by one (`expand`).  A group is measured in one of three ways:

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
noise.  The noise of steps and groups is independent, as follows.

**Noise** of measured cells is named by their place in public order.  A name is (run id, digest of
all counts, table, level, step, block): the run id is committed with the charge before the first
draw, the digest keeps noise from being added to other counts (`dp_transforms.noise.inputs`), and a
block is ``BLOCK_GROUPS`` groups of the level.  Within a name a node is the cell's number in public
order.  The step says what the cell is measured for:

* ``total``: of a group of which the total alone is measured;
* ``step 1``: which chooses the detail;
* ``detail d``: the cells of detail d.

So no two measured counts share a draw: groups differ in block or node, steps in their names.  Noise
of step 1 that were used again for the detail would be known to whoever sees which detail was
chosen.  Of the details of one group only one is measured, because step 1 chooses it.

What is drawn depends on the name and node alone: neither on who draws it, nor on shards, nor on how
often.  A killed execution that is run again under its run id draws the same.
"""

import functools
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.mechanisms import laws
from dpstream.accounting.tabulation.parameters import Draws, LawName, Level, Noise, Table
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import TableSampler
from dpstream.dp_transforms.tabulation.domain import LevelDomain, Published
from dpstream.dp_transforms.tabulation.expand import Counts

#: Groups of one name; to name each would cost more than its noise.
BLOCK_GROUPS = 1 << 20
TOTAL, FIRST = "total", "step 1"
_TABLES = {
    "discrete gauss": laws.discrete_gaussian,
    "rounded gauss": laws.rounded_gaussian,
    "discrete laplace": laws.discrete_laplace,
}


def detail_step(detail: int) -> str:
    """Return the step of the cells of a detail."""
    return f"detail {detail}"


@functools.lru_cache(maxsize=128)
def _sampler(law: LawName, scale: float) -> TableSampler:
    return TableSampler(_TABLES[law](scale))


class CellNoise:
    """The noise of an execution.

    Args:
        ring: key ring of the deployment.
        run_id: of the execution, committed.
        inputs: digest of all exact counts of the execution (`dp_transforms.noise.inputs`).
    """

    def __init__(self, ring: KeyRing, run_id: str, inputs: bytes) -> None:
        self._ring, self._run_id, self._inputs = ring, run_id.encode(), inputs

    def draw(
        self, noise: Noise, table: str, level: Level, step: str, groups: Int64, cells: int
    ) -> Int64:
        """Draw the noise of all cells of some groups.

        Args:
            noise: law and scale; of scale 0 there is none.
            groups: (n,) numbers of the groups in the level, increasing.
            cells: number of cells of each group.

        Returns:
            (n, cells) draws.
        """
        if noise.scale == 0 or not len(groups):
            return np.zeros((len(groups), cells), np.int64)
        sampler = _sampler(noise.law, noise.scale)
        block, within = np.divmod(groups, BLOCK_GROUPS)
        # Groups that follow each other in a block are one row of nodes.
        new = np.empty(len(groups), np.bool_)
        new[0] = True
        new[1:] = (np.diff(groups) != 1) | (np.diff(block) != 0)
        begin = np.flatnonzero(new)
        end = np.append(begin[1:], len(groups)) - 1
        at = block[begin] - block[0]
        parts = (self._run_id, self._inputs, table.encode(), level.name.encode())
        label = (b"table noise", sampler.digest, *parts)
        names = np.empty((int(at[-1]) + 1, 2), np.uint64)
        for number in np.unique(at).tolist():
            place = int(number + block[0]).to_bytes(8, "little")
            names[number] = self._ring.name((*label, step.encode(), place))
        first, last = within[begin] * cells, (within[end] + 1) * cells
        drawn, _ = sampler.draw(self._ring.node, names[at], first, last)
        return drawn.astype(np.int64).reshape(-1, cells)


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
    """Return the measured counts of a shard's groups.

    Args:
        draws: noise of the table at this level.
        thresholds: of the level, one for each detail above 0.
        published: totals that choose the detail, where there is no step 1.
    """
    shard = counts.shard
    groups = np.arange(shard.first, shard.last)
    only: Bool = np.tile(level.total_only, len(groups) // max(1, len(level.total_only)))

    def measure(kind: Noise, step: str, group_numbers: Int64, detail: int) -> Int64:
        exact = counts.cells(group_numbers, table.details[detail])
        return exact + noise.draw(
            kind, table.name, level.level, step, group_numbers, exact.shape[1]
        )

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
            group_numbers = groups[mine]
            values = measure(draws.detail, detail_step(number), group_numbers, number)
            step_one = None if first is None else first[mine]
            out.append(Measured(number, draws.detail, draws.first, group_numbers, values, step_one))
    return out


def _detail(totals: Int64, thresholds: tuple[float, ...]) -> Int64:
    """The detail of each total: how many thresholds it reaches."""
    return np.searchsorted(np.array(thresholds), totals, side="right").astype(np.int64)
