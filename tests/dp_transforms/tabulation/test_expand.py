"""Each record is in the groups that the definition says, and in no more than s.

A batch of records knows how many it holds.

Pairs of keys and counts add up like a counter.

Exact counts of a shard, dense by group and by cell of any detail.
"""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.tabulation.parameters import PR_LEVELS, TABLES, US_LEVELS, Level, Table
from dpstream.dp_transforms.tabulation.domain import domain_of, published_of, shards_of
from dpstream.dp_transforms.tabulation.expand import (
    NONE,
    Pairs,
    Records,
    counted,
    expand,
    iterations_of,
    profiles,
    summed,
)
from tests.dp_transforms.tabulation.worlds import (
    RACE_CODES,
    World,
    exact,
    exact_counts,
    groups_of,
    parameters,
    public_files,
    records,
    world,
)


def as_counter(pairs: Pairs) -> Counter[int]:
    assert (np.diff(pairs.keys) > 0).all()
    return Counter(dict(zip(pairs.keys.tolist(), pairs.counts.tolist(), strict=True)))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 40, size) for size in (0, 1, 300, 25)]
    wanted = Counter[int]()
    for part in parts:
        wanted.update(part.tolist())
    pairs = [counted(part.copy()) for part in parts]
    total = summed(pairs)
    assert as_counter(total) == wanted
    assert summed([total]) == total and summed([]) is NONE and summed([NONE, NONE]) is NONE
    part_counts = as_counter(total.within(7, 21))
    assert part_counts == {key: count for key, count in wanted.items() if 7 <= key < 21}


def test_two_parts_that_have_counts_add_up() -> None:
    """Neither is taken for the only one, whatever empty parts come with them."""
    one, two = counted(np.array([3, 1, 3])), counted(np.array([9, 3]))
    for parts in ([one, two], [two, NONE, one]):
        total = summed(parts)
        assert total.keys.tolist() == [1, 3, 9] and total.counts.tolist() == [1, 3, 1]
    assert len(NONE.keys) == len(NONE.counts) == 0


def counts_of(w: World, table: Table, batches: int = 1) -> Counter[Any]:
    """What `expand` counts, by the names of groups."""
    out: Counter[Any] = Counter()
    for level in w.domain.levels:
        parts = []
        for rows in np.array_split(np.arange(len(w.records)), batches):
            sample = taken(w.records, rows)
            parts.append(expand(w.domain, level, table, sample, profiles(w.domain, sample)))
        pairs = summed(parts)
        assert (np.diff(pairs.keys) > 0).all() and (pairs.counts > 0).all()
        group, leaf = np.divmod(pairs.keys, table.leaves)
        region, iteration = np.divmod(group, len(level.iterations))
        for r, i, at, count in zip(region, iteration, leaf, pairs.counts, strict=True):
            name = (level.level, level.regions[int(r)].as_py(), level.iterations[int(i)].as_py())
            out[name, int(at)] = int(count)
    return out


def taken(records: Records, rows: Any) -> Records:
    leaf = {name: column[rows] for name, column in records.leaf.items()}
    return Records(records.block[rows], records.codes[rows], leaf)


@pytest.mark.parametrize("program", ["p", "h"])
@pytest.mark.parametrize("races", [1, 2, 8])
def test_groups_are_those_of_the_definition(program: str, races: int) -> None:
    w = world(200, races, program, max_race_codes=races)
    for table in TABLES[program]:
        if table.name == "t3":
            w.records.leaf["t3"][::7] = -1  # not in the table's universe
        assert counts_of(w, table) == counts_of(w, table, 7) == exact(w, table)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_record_is_in_more_groups_than_s(shared: bool, seed: int) -> None:
    files, settings = public_files(seed, shared=shared), parameters(max_race_codes=2 + 3 * seed)
    domain = domain_of(files, settings)
    sample = records(files, 150, seed)
    most = {level.level: level.stability.groups for level in domain.levels}
    for block, codes in zip(sample.block.tolist(), sample.codes.tolist(), strict=True):
        of = Counter(level for level, _, _ in groups_of(files, settings, block, codes))
        assert all(count <= most[level] for level, count in of.items())


def test_one_group_more_than_planned_is_refused() -> None:
    w = world(2_000, 1)
    [table] = TABLES["p"]
    level = w.domain.levels[0]
    profile_table = profiles(w.domain, w.records)
    starts, _ = iterations_of(level, profile_table)
    reached = int(np.diff(starts).max())
    tight = level._replace(stability=level.stability._replace(groups=reached - 1))
    with pytest.raises(PolicyError) as refused:
        expand(w.domain, tight, table, w.records, profile_table)
    assert not any(character.isdigit() for character in str(refused.value).split(":", 1)[1])
    fits = level._replace(stability=level.stability._replace(groups=reached))
    expand(w.domain, fits, table, w.records, profile_table)


def test_codes_given_twice_or_beyond_the_limit_count_once_or_not() -> None:
    w = world(4, max_race_codes=2)
    codes = np.full((4, 9), -1, np.int16)
    codes[0, :2], codes[1, 0] = 3, 3  # twice the same, once
    codes[2, :3], codes[3, :2] = (3, 4, 12), (3, 4)  # a third one, none
    codes[:, 8] = 15
    same = Records(np.zeros(4, np.int32), codes, w.records.leaf)
    profile_table = profiles(w.domain, same)
    for level in w.domain.levels:
        starts, iterations = iterations_of(level, profile_table)
        of = [
            set(iterations[starts[p] : starts[p + 1]].tolist())
            for p in profile_table.profile_numbers
        ]
        assert of[0] == of[1] and of[2] == of[3]


def test_rows_of_many_codes_are_told_apart() -> None:
    """Rows that differ in one of nine codes of thousands: more than a float or 64 bits hold.

    Two rows under one profile would put a record into the groups of another.
    """
    w, rng, n = world(4), np.random.default_rng(2), 3_000
    codes = rng.integers(0, 4_094, (n, 9)).astype(np.int16)
    codes[rng.random((n, 9)) < 0.1] = -1
    codes[1::2] = codes[::2]
    codes[np.arange(1, n, 2), rng.integers(0, 9, n // 2)] += 1
    codes[0, 0] = 4_094  # 2^12 values a column: of nine, 64 bits would drop the first ones
    profile_table = profiles(w.domain, Records(np.zeros(n, np.int32), codes, {}))
    for row, p in zip(codes.tolist(), profile_table.profile_numbers.tolist(), strict=True):
        assert set(profile_table.races[p].tolist()) | {-1} == {*row[:8], -1}
        assert profile_table.ethnicity[p] == row[8]


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
    assert len(w.records) == 0 and counts_of(w, table) == Counter()
    for _, counts in exact_counts(w, table):
        assert counts.totals.tolist() == [0] * (counts.shard.last - counts.shard.first)
        assert not counts.cells(np.array([counts.shard.first]), table.details[3]).any()


# Regions and iterations of each level, from public files alone.


def test_regions_are_those_of_the_geography_inside_or_outside_of_puerto_rico() -> None:
    files = public_files()
    domain = domain_of(files, parameters())
    rows = files.geography.to_pylist()
    assert [domain_level.level for domain_level in domain.levels] == [*US_LEVELS, *PR_LEVELS]
    for level in domain.levels:
        kind = level.level.region_type
        column = kind.removeprefix("PR-").lower()
        of = [None if (row["state"] == "72") != level.level.puerto_rico
              else "1" if kind == "USA" else row[column] for row in rows]  # fmt: skip
        regions = level.regions.to_pylist()
        assert regions == sorted({region for region in of if region is not None})
        index = domain.regions_of[kind]
        assert [None if i < 0 else regions[i] for i in index.tolist()] == of


def test_iterations_are_those_of_the_size_of_region() -> None:
    files = public_files()
    domain = domain_of(files, parameters())
    rows = files.iterations.to_pylist()
    for level in domain.levels:
        left_out = "COARSE_ONLY" if level.level.detailed else "DETAILED_ONLY"
        mine = {row["CODE"]: row["DETAILED_ONLY"] for row in rows
                if row["LEVEL"] == level.level.iteration_level and not row[left_out]}  # fmt: skip
        assert level.iterations.to_pylist() == sorted(mine)
        assert level.total_only.tolist() == [mine[code] for code in sorted(mine)]
    nation, tracts = domain.of(Level(2, "USA")), domain.of(Level(2, "TRACT"))
    assert nation is not None and tracts is not None
    assert nation.total_only.any() and not tracts.total_only.any()


def test_members_are_found_by_code() -> None:
    files = public_files()
    domain = domain_of(files, parameters())
    rows = files.iterations.to_pylist()
    codes = [row["CODE"] for row in rows]
    for level in domain.levels:
        of = set[tuple[str, int]]()
        for kind in (level.alone, level.combined, level.ethnicity):
            assert len(kind.starts) == len(files.codes) + 1
            for code in range(len(files.codes)):
                here = kind.iterations[kind.starts[code] : kind.starts[code + 1]]
                names = [level.iterations[int(i)].as_py() for i in here]
                ethnic = {rows[codes.index(name)]["ETHNICITY"] for name in names}
                assert ethnic <= {code >= RACE_CODES} and len(names) == len(set(names))
                of |= {(name, code) for name in names}
        wanted = {(codes[row], code) for row, code in files.members.tolist()}
        assert of == {(name, code) for name, code in wanted
                      if name in level.iterations.to_pylist()}  # fmt: skip


@pytest.mark.parametrize(("us", "pr"), [(True, False), (False, True)])
def test_levels_that_are_off_have_no_groups(us: bool, pr: bool) -> None:
    off = Level(1, "USA" if us else "PR-STATE")
    settings = parameters(run_us=us, run_pr=pr)
    settings.budgets["t1t2"][off] = 0.0
    domain = domain_of(public_files(), settings)
    levels = US_LEVELS if us else PR_LEVELS
    assert [domain_level.level for domain_level in domain.levels] == [x for x in levels if x != off]


def test_shards_are_whole_regions_and_hold_every_group_once() -> None:
    domain = domain_of(public_files(), parameters())
    for most in (1, 40, 100, 10**6):
        shards = shards_of(domain.levels, most)
        assert [shard.number for shard in shards] == list(range(len(shards)))
        for number, level in enumerate(domain.levels):
            mine = [shard for shard in shards if shard.level == number]
            edges = [shard.first for shard in mine] + [level.groups]
            assert edges[0] == 0 and [shard.last for shard in mine] == edges[1:]
            assert [shard.part for shard in mine] == list(range(len(mine)))
            m = len(level.iterations)
            assert all(edge % m == 0 for edge in edges)
            assert all(shard.last - shard.first <= max(m, most) for shard in mine)


def test_a_block_without_a_place_is_in_no_region_of_that_kind() -> None:
    files = public_files()
    domain = domain_of(files, parameters())
    none = np.array([row["place"] is None for row in files.geography.to_pylist()])
    us = np.array([row["state"] != "72" for row in files.geography.to_pylist()])
    assert ((domain.regions_of["PLACE"] < 0) == (none | ~us)).all() and none.any()


def test_iterations_are_members_of_their_own_kind() -> None:
    """s and a record's groups are found by kind: one taken for another would void both."""
    files = public_files()
    kind_of = {row["CODE"]: row["ALONE"] for row in files.iterations.to_pylist()}
    for level in domain_of(files, parameters()).levels:
        for kind, members in (
            (True, level.alone),
            (False, level.combined),
            (None, level.ethnicity),
        ):
            names = level.iterations.take(members.iterations).to_pylist()
            assert names and {kind_of[name] for name in names} == {kind}


def test_a_level_runs_if_any_of_its_tables_does() -> None:
    settings, level = parameters("h"), Level(2, "USA")
    settings.budgets["t3"][level] = 0.0
    assert domain_of(public_files(), settings).of(level) is not None
    settings.budgets["t4"][level] = 0.0
    assert domain_of(public_files(), settings).of(level) is None


def table(rows: list[tuple[str, str, str, int]]) -> pa.Table:
    names = ("REGION_TYPE", "REGION_ID", "ITERATION_CODE", "COUNT")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {
        name: pa.array([], pa.int64() if name == "COUNT" else pa.string()) for name in names
    }  # fmt: skip
    arrow_table = pa.table({name: pa.array(column) for name, column in columns.items()})
    for i, name in enumerate(names[:3]):
        arrow_table = arrow_table.set_column(i, name, arrow_table.column(name).dictionary_encode())
    return arrow_table


def test_totals_are_those_of_their_groups_in_any_order() -> None:
    files, settings = public_files(), parameters("h")
    domain = domain_of(files, settings)
    rng = np.random.default_rng(0)
    rows, wanted = [], {}
    for level in domain.levels:
        for r, region in enumerate(level.regions.to_pylist()):
            for i, code in enumerate(level.iterations.to_pylist()):
                if rng.random() < 0.5:
                    count = int(rng.integers(-9, 100))
                    rows.append((level.level.region_type, region, code, count))
                    wanted[level.level, r * len(level.iterations) + i] = count
    rng.shuffle(rows)
    rows = [(kind, region, code, int(count)) for kind, region, code, count in rows]
    by_level = published_of(domain, table(rows))
    seen = dict[Any, int]()
    for key, of in by_level.items():
        assert (np.diff(of.groups) > 0).all()
        seen |= {(key, g): t for g, t in zip(of.groups.tolist(), of.totals.tolist(), strict=True)}
        assert of.within(3, 40).groups.tolist() == [g for g in of.groups.tolist() if 3 <= g < 40]
    assert seen == wanted


def test_groups_of_no_level_are_left_out() -> None:
    files, settings = public_files(), parameters("h", run_pr=False)
    domain = domain_of(files, settings)
    tract = domain.of(Level(1, "TRACT"))
    assert tract is not None
    code, region = tract.iterations[0].as_py(), tract.regions[0].as_py()
    rows = [
        ("TRACT", region, code, 5),
        ("TRACT", region, "nobody", 6),
        ("PR-TRACT", region, code, 7),
        ("TRACT", "nowhere", code, 8),
    ]
    by_level = published_of(domain, table(rows))
    assert {level: of for level, of in by_level.items() if len(of.groups)}.keys() == {
        Level(1, "TRACT")
    }
    assert by_level[Level(1, "TRACT")].totals.tolist() == [5]
    assert not any(len(of.groups) for of in published_of(domain, table([])).values())
