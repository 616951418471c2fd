"""Regions and iterations of each level, from public files alone."""

import numpy as np
import pytest

from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Level
from dpstream.dp_transforms.tabulation.domain import domain_of, shards_of
from tests.dp_transforms.tabulation.worlds import RACE_CODES, parameters, public_files


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
