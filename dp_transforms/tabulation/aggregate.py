"""AGGREGATE: exact counts of a shard's groups.

PRIVATE.  A record is in at most s groups of a level and in one leaf of each (`expand`), so removing
it lowers at most s totals by one, and for whatever partition of the leaves at most s cells by one:
one for each group.
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation.parameters import Detail, Table
from dpstream.dp_transforms.tabulation.domain import Shard
from dpstream.dp_transforms.tabulation.pairs import Pairs


class Counts(NamedTuple):
    """Exact counts of the groups of a shard.

    Attributes:
        shard: which groups; leaves: of each.
        pairs: counts by ``group * leaves + leaf``, of groups in the level.
        totals: (groups of the shard,) records of each group.
    """

    shard: Shard
    leaves: int
    pairs: Pairs
    totals: Int64

    def cells(self, groups: Int64, detail: Detail) -> Int64:
        """Return (n, size) counts of the cells of a detail.

        Args:
            groups: (n,) numbers in the level, without duplicates.
        """
        if detail.size == 1:
            return self.totals[groups - self.shard.first][:, None]
        row = np.full(len(self.totals), -1, np.int64)
        row[groups - self.shard.first] = np.arange(len(groups))
        group, leaf = np.divmod(self.pairs.keys, self.leaves)
        row = row[group - self.shard.first]
        mine = row >= 0
        at = row[mine] * detail.size + np.array(detail.cells)[leaf[mine]]
        # float64 sums of whole numbers are exact below 2^53.
        sums = np.bincount(at, self.pairs.counts[mine], len(groups) * detail.size)
        return sums.astype(np.int64).reshape(len(groups), detail.size)


def aggregated(shard: Shard, table: Table, pairs: Pairs) -> Counts:
    """Return counts of a shard from the counts of all batches in its groups."""
    groups = shard.last - shard.first
    at = pairs.keys // table.leaves - shard.first
    totals = np.bincount(at, pairs.counts, groups).astype(np.int64)
    return Counts(shard, table.leaves, pairs, totals)
