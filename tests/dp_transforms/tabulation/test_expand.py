"""Each record is in the groups that the definition says, and in no more than s."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.tabulation.parameters import TABLES, Table
from dpstream.dp_transforms.tabulation.domain import domain_of
from dpstream.dp_transforms.tabulation.expand import expand, iterations_of, profiles
from dpstream.dp_transforms.tabulation.pairs import summed
from dpstream.dp_transforms.tabulation.records import Records
from tests.dp_transforms.tabulation.worlds import (
    World,
    exact,
    groups_of,
    parameters,
    public_files,
    records,
    world,
)


def counted(w: World, table: Table, batches: int = 1) -> Counter[Any]:
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
        assert counted(w, table) == exact(w, table)


def test_batches_add_up() -> None:
    w = world(200, 3)
    [table] = TABLES["p"]
    assert counted(w, table, 7) == counted(w, table)


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
    with pytest.raises(PolicyError, match="more groups") as refused:
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
        of = [set(iterations[starts[p] : starts[p + 1]].tolist()) for p in profile_table.of]
        assert of[0] == of[1] and of[2] == of[3]


def test_no_records_are_no_counts() -> None:
    w = world(0)
    assert counted(w, TABLES["p"][0]) == Counter()


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
    for row, p in zip(codes.tolist(), profile_table.of.tolist(), strict=True):
        assert set(profile_table.races[p].tolist()) | {-1} == {*row[:8], -1}
        assert profile_table.ethnicity[p] == row[8]
