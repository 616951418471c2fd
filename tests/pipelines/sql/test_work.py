"""The work of a shard: every unit is in one turn, and its text does not depend on literals.

Sums go through a file as they are, and meet others' by the value of their group.
"""

import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Bounded, Totals
from dpstream.dp_transforms.one_shot.partials import Groups
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.work import (
    Work,
    place_of,
    read_counts,
    read_sums,
    write_counts,
    write_sums,
)
from tests.pipelines.sql.asking import KEY
from tests.pipelines.sql.rows import database, of_units, ugly_rows
from tests.pipelines.sql.shop import shop

_TEXT = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
    "max_groups_contributed = 4) page, COUNT(*) AS n, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 9)) AS m FROM visits "
    "WHERE page <> ' GROUP BY \"unit\"' GROUP BY page"
)


def test_turns_of_units_are_all_rows_once() -> None:
    question = question_of(_TEXT, shop())
    work = Work.of(question.per_column, shop(), question.plan, (b"run", b"question"), wide=True)
    connection = database(shop(), ugly_rows(3))
    all_rows = connection.sql(work.stage_one()).fetchall()
    turns = [connection.sql(work.stage_one(3, i)).fetchall() for i in range(3)]
    assert sorted(map(str, all_rows)) == sorted(str(row) for rows in turns for row in rows)
    units = [{row[0] for row in rows} for rows in turns]
    assert len(all_rows) > 10 and all(units) and sum(map(len, units)) == len(set.union(*units))
    subset_rows = database(shop(), of_units(ugly_rows(3), {1, 2})).sql(work.stage_one()).fetchall()
    assert sorted(map(str, subset_rows)) == sorted(str(row) for row in all_rows if row[0] in (1, 2))


NONE = np.zeros(0, np.int64)


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(bytearray.fromhex(KEY))


def groups(ring: KeyRing, *names: str | None) -> Groups:
    page_groups = Groups(["page"], ["string"], ring.key)
    if names:
        page_groups.codes([pa.chunked_array([pa.array(names, pa.string())])])
    return page_groups


def sums(*units: int) -> Totals:
    unit_counts = np.array(units, np.int64)
    return Totals(unit_counts, 7 * unit_counts, {0: -unit_counts, 3: unit_counts << 40})


def rows(group: int, value: int) -> Bounded:
    one = np.array([0]), np.array([value]), np.array([5])
    return Bounded(NONE, np.array([group]), NONE, {}, {"m": one})


def test_shards_meet_by_group(tmp_path: Path, ring: KeyRing) -> None:
    write_sums(place_of(tmp_path, 0), groups(ring, "b", None), sums(3, 4), rows(1, 9))
    write_sums(place_of(tmp_path, 1), groups(ring, None, "a", "b"), sums(10, 20, 30), rows(2, 8))
    write_sums(place_of(tmp_path, 2), groups(ring), sums(), rows(0, 0)._replace(
        rows={"m": (NONE, NONE, NONE)}))  # fmt: skip
    assert stat.S_IMODE(place_of(tmp_path, 0).stat().st_mode) == 0o600
    page_groups = groups(ring)
    shards = list(read_sums(tmp_path, 3, page_groups, ["m"]))
    total = shards[0][0].plus(shards[1][0]).plus(shards[2][0])
    assert page_groups.values is not None and page_groups.values["page"].to_pylist() == [
        "b",
        None,
        "a",
    ]
    assert total.units.tolist() == [33, 14, 20] and total.weighted.tolist() == [231, 98, 140]
    assert total.sums[0].tolist() == [-33, -14, -20] and total.sums[3][0] == 33 << 40
    at, value, weight = shards[1][1].rows["m"]
    assert shards[1][1].group[at].tolist() == [0] and (value[0], weight[0]) == (8, 5)


def test_without_groups_there_is_one(tmp_path: Path, ring: KeyRing) -> None:
    none = Groups([], [], ring.key)
    write_sums(place_of(tmp_path, 0), none, sums(3), rows(0, 1)._replace(rows={}))
    [(total, _)] = read_sums(tmp_path, 1, none, [])
    assert total.units.tolist() == [3]


def test_histograms_add_up(tmp_path: Path) -> None:
    for shard in range(3):
        write_counts(place_of(tmp_path, shard), {"a": np.arange(4) * shard, "b": np.ones(2, int)})
    histograms = read_counts(tmp_path, 3, ["a", "b"])
    assert histograms["a"].tolist() == [0, 3, 6, 9] and histograms["b"].tolist() == [3, 3]


@pytest.mark.parametrize("what", ["missing", "cut", "empty"])
def test_what_is_not_there_is_an_error(what: str, tmp_path: Path, ring: KeyRing) -> None:
    path = place_of(tmp_path, 0)
    write_sums(path, groups(ring, "b"), sums(3), rows(0, 9))
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if what == "cut" else 0])
    with pytest.raises(RunError, match="handed over"):
        list(read_sums(tmp_path, 1, groups(ring), ["m"]))
