"""Regions and iterations of each level, from public files alone.

Published totals find their groups by the names of regions and iterations.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Level
from dpstream.dp_transforms.tabulation.domain import domain_of, published_of, shards_of
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
