"""Binary tree with bottom-up Honaker estimation, in exact integers (mechanism.md section 3).

Leaf t of the tree completes the nodes of levels 0 .. tz(t) (tz = trailing zero bits), so the
nodes in order of completion are numbered 0, 1, 2, ... and ``2t - popcount(t)`` of them are
complete after leaf t.  A complete node of level l with true sum S has the integer statistic

    I_l = 2^l * (S + z) + I_left + I_right = (2^(l+1) - 1) * S + N_l,

N_l a fixed integer combination of the node noises below it.  ``I_l / (2^(l+1) - 1)`` is
Honaker's minimum-variance bottom-up estimate.  Rounding it to the lattice of 2^-DECODE_BITS
commutes with S (S is a whole number of lattice points), so the released prefix is

    q_t = sum over set bits l of t of round(2^D I_l / (2^(l+1)-1)) / 2^D = prefix_t + n_t,

a function of noisy integers only, and n_t can be computed from the noise alone.

Sensitivity: one unit of input at leaf t is added to one node of each level, and with T leaves
only the levels 0 .. floor(log2 T) ever hold a complete node, so col2 = floor(log2 T) + 1.
"""

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.base import Ranges, Strategy


class TreeStrategy(Strategy):
    """The binary tree with Honaker's bottom-up estimate, for any T."""

    name = "tree"

    @property
    def levels(self) -> int:
        """Levels that can hold a complete node: floor(log2 T) + 1."""
        return self.triggers.bit_length()

    @property
    @override
    def col2(self) -> float:
        return float(self.levels)

    @property
    @override
    def reach(self) -> float:
        # A block's weights sum to at most (levels) and a prefix has at most that many blocks.
        return float(self.levels**2)

    @property
    @override
    def state_columns(self) -> int:
        return self.levels

    def _per_set_bit(self, block: Float64) -> Float64:
        """(T,) sum over the set bits l of t of ``block[l]``."""
        leaves = np.arange(1, self.triggers + 1)
        bits = (leaves[:, None] >> np.arange(self.levels)) & 1
        total: Float64 = bits @ block
        return total

    @property
    @override
    def sd_factors(self) -> Float64:
        # Var(I_l / (2^(l+1)-1)) = 1 / (2 (1 - 2^-(l+1))): equation (1) of the paper.
        level = np.arange(self.levels, dtype=np.float64)
        variance = self._per_set_bit(0.5 / (1.0 - 2.0 ** -(level + 1.0)))
        return np.asarray(np.sqrt(variance) * (1 + 1e-15), dtype=np.float64)

    @property
    @override
    def rounding(self) -> Float64:
        # A node's noise is within 1/2 of its Gaussian; level j of a block has 2^(l-j) nodes
        # of weight 2^j / (2^(l+1)-1) each, l+1 levels: (l+1) 2^l / (2^(l+1)-1) halves.
        # Decoding rounds each block once more by at most half a lattice step (level 0: exact).
        level = np.arange(self.levels, dtype=np.float64)
        nodes = 0.5 * (level + 1) * 2.0**level / (2.0 ** (level + 1) - 1)
        decode = np.where(level == 0, 0.0, 2.0 ** -(DECODE_BITS + 1))
        return self._per_set_bit((nodes + decode) * (1 + 1e-15))

    @override
    def matrix(self) -> Int64:
        rows = []
        for leaf in range(1, self.triggers + 1):
            level = 0
            while leaf % (1 << level) == 0:
                row = np.zeros(self.triggers, np.int64)
                row[leaf - (1 << level) : leaf] = 1
                rows.append(row)
                level += 1
        return np.array(rows)

    @override
    def nodes_through(self, leaf: int | Int64) -> Int64:
        leaf = np.asarray(leaf, np.int64)
        return np.asarray(2 * leaf - np.bitwise_count(leaf), np.int64)

    @override
    def fold(self, ranges: Ranges) -> None:
        """See base; the state is N_l of the complete blocks, one per set bit of the leaf."""
        from dpstream.accounting.strategies.kernels import fold_tree

        fold_tree(*ranges.arrays)
