"""Stage 1's rows: each (unit, group) once, in bounds, in order; columns that do not fit.

Exact sums per group, against loops over Python integers.
"""

from collections import Counter

import numpy as np
import pytest

from dpstream.accounting.query.parts import cell_at, centre_of, half_of, parts_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import partials
from dpstream.dp_transforms.one_shot.bounding import bounded
from dpstream.dp_transforms.one_shot.partials import (
    Partials,
    aggregated,
    histograms,
    merged,
    per_group,
    stored_parts,
)
from tests.golden.refusals import Refused
from tests.queries import (
    ALL,
    COUNT,
    MEAN,
    QUANTILES,
    RUN,
    SUM,
    UNITS,
    VAR,
    Raw,
    generated,
    query,
    stage_one,
)

PLAN = query(COUNT, SUM)


def shuffled(partials: Partials, seed: int) -> Partials:
    order = np.random.default_rng(seed).permutation(len(partials.unit))
    return partials._replace(
        unit=partials.unit[order],
        group=partials.group[order],
        sums=tuple(s[order] for s in partials.sums),
    )


def test_any_order_is_sorted() -> None:
    given = stage_one(PLAN, generated(1))
    wanted = merged(PLAN, parts_of(PLAN), given)
    pair = list(zip(wanted.unit.tolist(), wanted.group.tolist(), strict=True))
    assert pair == sorted(set(pair)) and len(pair) == len(given.unit)
    for seed in range(3):
        pairs = merged(PLAN, parts_of(PLAN), shuffled(given, seed))
        for one, other in zip((pairs.unit, *pairs.sums), (wanted.unit, *wanted.sums), strict=True):
            assert (one == other).all()


def test_a_pair_that_is_there_twice_counts_once() -> None:
    given = stage_one(PLAN, generated(1))
    twice = given._replace(
        unit=np.tile(given.unit, 2),
        group=np.tile(given.group, 2),
        sums=tuple(np.tile(s, 2) for s in given.sums),
    )
    pairs = merged(PLAN, parts_of(PLAN), twice)
    assert len(pairs.unit) == len(given.unit)
    for s, part in zip(pairs.sums, parts_of(PLAN), strict=True):
        assert s.min() >= part.low and s.max() <= part.high


def test_partials_are_clamped() -> None:
    given = stage_one(PLAN, generated(1))
    wild = given._replace(sums=tuple(s * 0 + 1_000_000 for s in given.sums))
    pairs = merged(PLAN, parts_of(PLAN), wild)
    assert set(pairs.sums[0]) == {1} and set(pairs.sums[1]) == {10}


def test_centred_sums_lie_where_their_counts_leave_room() -> None:
    """Else a norm of the counts would not bound that of the sums."""
    plan = query(MEAN, VAR)
    parts = parts_of(plan)
    given = stage_one(plan, generated(1))
    for sign in (1, -1):
        wild = given._replace(sums=tuple(s * 0 + sign * 10**9 for s in given.sums))
        few = [1 if parts[i].what == "count" else None for i in stored_parts(plan)]
        wild = wild._replace(
            sums=tuple(s if n is None else s * 0 + n for s, n in zip(wild.sums, few, strict=True))
        )
        pairs = merged(plan, parts, wild)
        for i, s in zip(stored_parts(plan), pairs.sums, strict=True):
            column = next(c for c in plan.columns if c.name == parts[i].column)
            half, centre = half_of(column), centre_of(column)
            room = {"sum": (-half, half), "square": (-centre, half**2 - centre), "count": (1, 1)}
            assert set(s.tolist()) == {room[parts[i].what][sign > 0]}


def test_rows_of_quantiles_have_units_and_groups_that_there_are(refused: Refused) -> None:
    plan = query(QUANTILES)
    given = stage_one(plan, generated(1))
    ((name, rows),) = given.rows.items()
    merged(plan, parts_of(plan), given)
    merged(plan, parts_of(plan), given._replace(rows={name: rows._replace(group=rows.group - 99)}))
    for bad in (
        rows._replace(group=rows.group + len(given.group_ids)),
        rows._replace(unit=rows.unit + len(given.unit_ids)),
        rows._replace(unit=rows.unit - 1),
    ):
        refused(merged, plan, parts_of(plan), given._replace(rows={name: bad}))


def test_groups_that_are_not_public_are_dropped() -> None:
    given = stage_one(PLAN, generated(1))
    masked_pairs = given._replace(group=np.where(given.group > 5, -1, given.group))
    pairs = merged(PLAN, parts_of(PLAN), masked_pairs)
    assert pairs.group.max() <= 5 and len(pairs.unit) == (given.group <= 5).sum()


@pytest.mark.parametrize(("low", "high"), [(50, 150), (-150, -50)])
def test_an_absent_partial_stays_0_whatever_the_bounds(low: int, high: int, ring: KeyRing) -> None:
    columns = [QueryColumn("s", "sum", low, high, per="group"),
               QueryColumn("c", "count", 3, 9, per="group"),
               QueryColumn("a", "mean", low, high, per="group"), VAR]  # fmt: skip
    plan = query(*columns)
    given = stage_one(plan, generated(1))
    nothing = given._replace(sums=tuple(s * 0 for s in given.sums))
    assert not any(s.any() for s in merged(plan, parts_of(plan), nothing).sums)
    assert not any(s.any() for s in bounded(plan, nothing, ring, RUN).sums.values())


def test_an_empty_table_of_partials() -> None:
    empty = np.zeros(0, np.int64)
    given = stage_one(PLAN, generated(1))._replace(unit=empty, group=empty, sums=(empty, empty))
    assert len(merged(PLAN, parts_of(PLAN), given).unit) == 0


def test_what_a_partial_holds() -> None:
    plan = query(*ALL)
    kinds = [(parts_of(plan)[i].column, parts_of(plan)[i].what) for i in stored_parts(plan)]
    assert ("u", "count") not in kinds and ("q", "tree") not in kinds
    assert kinds[:3] == [("n", "count"), ("rows", "count"), ("s", "sum")] and len(kinds) == 12


def test_columns_that_do_not_fit(refused: Refused) -> None:
    given = stage_one(PLAN, generated(1))
    short = given.sums[0][:-1]
    for bad in (
        given._replace(sums=given.sums[:1]),
        given._replace(sums=(given.sums[0], short)),
        given._replace(group=given.group + 64),
        given._replace(unit=given.unit - 10),
        given._replace(rows={"q": None}),  # type: ignore[dict-item]
    ):
        refused(merged, PLAN, parts_of(PLAN), bad)
    refused(lambda: merged(query(UNITS, QUANTILES), parts_of(query(UNITS, QUANTILES)), given))


@pytest.mark.parametrize(("name", "value"), [("group", 64), ("unit", 64), ("unit", -1)])
def test_one_row_that_does_not_fit_is_enough(name: str, value: int, refused: Refused) -> None:
    plan = query(COUNT, QUANTILES)
    given = stage_one(plan, generated(1))
    rows = given.rows["q"]
    merged(plan, parts_of(plan), given)
    pair, row = getattr(given, name).copy(), getattr(rows, name).copy()
    pair[3] = row[3] = value
    table = {"q": rows._replace(**{name: row})}
    for bad in (given._replace(**{name: pair}), given._replace(rows=table)):
        refused(merged, plan, parts_of(plan), bad)


def test_sums_are_held_to_their_counts_in_every_column() -> None:
    plan = query(SUM, UNITS, MEAN)
    given = stage_one(plan, generated(1))
    wild = given._replace(
        sums=tuple(s * 0 + n for s, n in zip(given.sums, (9, 99, 1), strict=True))
    )
    assert set(merged(plan, parts_of(plan), wild).sums[1].tolist()) == {half_of(MEAN)}


def test_pairs_beyond_64_bits_and_too_many_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    given = stage_one(PLAN, generated(1))
    few, many = (np.broadcast_to(np.uint64(0), (size, 2)) for size in ((1 << 31) - 1, 1 << 31))
    merged(PLAN, parts_of(PLAN), given._replace(unit_ids=few, group_ids=many))
    refused(lambda: merged(PLAN, parts_of(PLAN), given._replace(unit_ids=many, group_ids=many)))
    monkeypatch.setattr(partials, "MAX_PARTIALS", len(given.unit))
    merged(PLAN, parts_of(PLAN), given)
    monkeypatch.setattr(partials, "MAX_PARTIALS", len(given.unit) - 1)
    refused(lambda: merged(PLAN, parts_of(PLAN), given))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_out_of_order_keep_the_first_pair(first: int) -> None:
    group = np.array([5, first, 5])
    zero = np.zeros(3, np.int64)
    given = Partials(zero, group, np.zeros((1, 2), np.uint64), np.zeros((9, 2), np.uint64),
                     (zero + 1, np.array([1, 2, 3])))  # fmt: skip
    pairs = merged(PLAN, parts_of(PLAN), given)
    assert pairs.group.tolist() == [first, 5] and pairs.sums[1].tolist() == [2, 4]


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
