"""Exact counts of a shard, dense by group and by cell of any detail."""

from collections import Counter

import numpy as np
import pytest

from dpstream.accounting.tabulation.parameters import TABLES
from tests.dp_transforms.tabulation.measuring import exact_counts
from tests.dp_transforms.tabulation.worlds import exact, world


@pytest.mark.parametrize("program", ["p", "h"])
def test_cells_of_each_detail_are_sums_of_leaves(program: str) -> None:
    w = world(200, 5, program)
    for table in TABLES[program]:
        wanted = exact(w, table)
        total = 0
        for level, counts in exact_counts(w, table):
            m = len(level.iterations)
            groups = np.arange(counts.shard.first, counts.shard.last)[::2]
            for detail in table.details:
                sums = counts.cells(groups, detail)
                assert sums.shape == (len(groups), detail.size)
                for group, row in zip(groups.tolist(), sums.tolist(), strict=True):
                    name = (
                        level.level, level.regions[group // m].as_py(),
                        level.iterations[group % m].as_py(),
                    )  # fmt: skip
                    of = Counter[int]()
                    for leaf, cell in enumerate(detail.cells):
                        of[cell] += wanted[name, leaf]
                    assert row == [of[cell] for cell in range(detail.size)]
                    total += sum(row)
        assert total > 0


def test_groups_without_a_record_are_there() -> None:
    w = world(0)
    [table] = TABLES["p"]
    for _, counts in exact_counts(w, table):
        assert counts.totals.tolist() == [0] * (counts.shard.last - counts.shard.first)
        assert not counts.cells(np.array([counts.shard.first]), table.details[3]).any()
