"""Noise of measured cells, named by their place in public order.

A name is (run id, digest of all counts, table, level, step, block): the run id is committed with
the charge before the first draw, the digest keeps noise from being added to other counts
(`dp_transforms.noise.inputs`), and a block is ``BLOCK_GROUPS`` groups of the level.  Within a name
a node is the cell's number in public order.  The step says what the cell is measured for:

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

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.mechanisms import laws
from dpstream.accounting.tabulation.parameters import Level
from dpstream.accounting.tabulation.scales import LawName, Noise
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import TableSampler

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
        keys: key ring of the deployment.
        run_id: of the execution, committed.
        inputs: digest of all exact counts of the execution (`dp_transforms.noise.inputs`).
    """

    def __init__(self, keys: KeyRing, run_id: str, inputs: bytes) -> None:
        self._keys, self._run_id, self._inputs = keys, run_id.encode(), inputs

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
        of = (self._run_id, self._inputs, table.encode(), level.name.encode())
        label = (b"table noise", sampler.digest, *of)
        names = np.empty((int(at[-1]) + 1, 2), np.uint64)
        for number in np.unique(at).tolist():
            place = int(number + block[0]).to_bytes(8, "little")
            names[number] = self._keys.name((*label, step.encode(), place))
        first, last = within[begin] * cells, (within[end] + 1) * cells
        drawn, _ = sampler.draw(self._keys.node, names[at], first, last)
        return drawn.astype(np.int64).reshape(-1, cells)
