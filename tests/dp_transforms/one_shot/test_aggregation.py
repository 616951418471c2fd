"""Exact sums per group, against loops over Python integers."""

from collections import Counter

import numpy as np

from dpstream.accounting.query.parts import cell_at
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.aggregation import aggregated, histograms, per_group
from dpstream.dp_transforms.one_shot.bounding import bounded
from tests.queries import ALL, QUANTILES, RUN, Raw, generated, query, stage_one


def test_sums_are_exact_beyond_floats() -> None:
    group = np.array([0, 1, 0, 2, 0, 2])
    values = np.array([1 << 60, 5, 1, -(1 << 60), 1, 3])
    assert per_group(group, values, 4).tolist() == [(1 << 60) + 2, 5, 3 - (1 << 60), 0]
    assert per_group(group[:0], values[:0], 2).tolist() == [0, 0]


def test_totals(ring: KeyRing) -> None:
    plan = query(*ALL)
    rows = bounded(plan, stage_one(plan, generated(2)), ring, RUN)
    weights = (100, 70, 50, 10)
    totals = aggregated(rows, 64, weights)
    units, weighted = Counter[int](), Counter[int]()
    for group, n in zip(rows.group.tolist(), rows.in_groups.tolist(), strict=True):
        units[group] += 1
        weighted[group] += weights[n - 1]
    assert [units[g] for g in range(64)] == totals.units.tolist()
    assert [weighted[g] for g in range(64)] == totals.weighted.tolist()
    for index, values in rows.sums.items():
        total = Counter[int]()
        for group, value in zip(rows.group.tolist(), values.tolist(), strict=True):
            total[group] += value
        assert [total[g] for g in range(64)] == totals.sums[index].tolist()


def test_histograms_of_some_groups(ring: KeyRing) -> None:
    plan = query(QUANTILES)
    rows = bounded(plan, stage_one(plan, generated(2)), ring, RUN)
    at, value, weight = rows.rows["q"]
    groups = np.array([7, 1, 3, 60])
    counts = histograms([rows], QUANTILES, groups, 64)
    assert counts.shape == (4, 16)
    for row, group in zip(counts, groups.tolist(), strict=True):
        mine = rows.group[at] == group
        cells = np.repeat(cell_at(QUANTILES, value[mine]), weight[mine])
        assert np.bincount(cells, minlength=16).tolist() == row.tolist()


def test_shards_of_units_add_up(ring: KeyRing) -> None:
    """1, 4 and 16 shards, each with the groups that it knows by then, give the same totals."""
    plan, weights, groups = query(*ALL), (9, 7, 5, 3), np.arange(64)
    table = generated(5, units=60, groups=20, rows=900)
    all_units = bounded(plan, stage_one(plan, table), ring, RUN)
    wanted = aggregated(all_units, 64, weights)
    for count in (4, 16):
        shards = []
        for shard in range(count):
            mine = Raw(*(part[table.unit % count == shard] for part in table))
            shards.append(bounded(plan, stage_one(plan, mine), ring, RUN))
        totals = aggregated(shards[0], int(shards[0].group.max()) + 1, weights)
        for rows in shards[1:]:
            totals = totals.plus(aggregated(rows, int(rows.group.max()) + 1, weights))
        length = len(totals.units)
        assert (totals.units == wanted.units[:length]).all() and not wanted.units[length:].any()
        assert (totals.weighted == wanted.weighted[:length]).all()
        for index, s in wanted.sums.items():
            assert (totals.sums[index] == s[:length]).all()
        one, other = (histograms(x, QUANTILES, groups, 64) for x in ([all_units], shards))
        assert (one == other).all() and one.any()


def test_sums_just_beyond_whole_floats_are_exact() -> None:
    values = np.full(3, (1 << 52) + 1)
    for sign in (1, -1):
        assert per_group(np.zeros(3, np.int64), sign * values, 1)[0] == sign * 3 * ((1 << 52) + 1)
