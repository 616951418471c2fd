"""Invented records: right ones, of heavy-tailed groups."""

import numpy as np
import pytest

from dpstream.pipelines.tabulation.invented import people
from dpstream.pipelines.tabulation.invented.groups import SMALL, Groups, invent
from dpstream.pipelines.tabulation.invented.people import households, persons
from dpstream.pipelines.tabulation.invented.regions import Regions
from dpstream.pipelines.tabulation.invented.regions import invent as regions_of

GROUPS = invent(SMALL, 0)
REGIONS = regions_of(("01", "02"), 8, 4, 2, 0)


def columns(lines: bytes) -> list[list[str]]:
    rows = [line.split("|") for line in lines.decode().splitlines()]
    assert lines.endswith(b"\n") and len({len(row) for row in rows}) == 1
    return [list(column) for column in zip(*rows, strict=True)]


def test_persons() -> None:
    person_columns = columns(b"".join(persons(20_000, GROUPS, REGIONS, 1)))
    assert len(person_columns) == 17 and len(person_columns[0]) == 20_000
    ages = np.array(person_columns[0], int)
    assert ages.min() == 0 and 100 < ages.max() <= 115 and set(map(len, person_columns[0])) == {3}
    assert set(person_columns[1]) == {"1", "2"} and set(person_columns[2]) == {"True", "False"}
    assert 0.35 < np.mean([flag == "True" for flag in person_columns[2]]) < 0.45
    assert all("01" <= group <= "63" for group in set(person_columns[7]))
    codes = np.array(person_columns[8:16])
    assert set(np.unique(codes)) == {*map(str, GROUPS.race.tolist()), "Null"}
    null = codes == "Null"
    assert not null[0].any() and (np.diff(null.astype(int), axis=0) >= 0).all()
    assert 0.09 < 1 - null[1].mean() < 0.15
    for person in codes[:, ~null[1]].T[:500]:
        given = [code for code in person if code != "Null"]
        assert len(set(given)) == len(given)
    assert 0.78 < np.mean([code == str(GROUPS.ethnicity[-1]) for code in person_columns[16]]) < 0.86


def test_sizes_of_groups_are_heavy_tailed() -> None:
    person_columns = columns(b"".join(persons(20_000, GROUPS, REGIONS, 1)))
    counts = np.sort(np.unique(person_columns[8], return_counts=True)[1])[::-1]
    assert counts[0] > 5 * counts[-1]


def test_households() -> None:
    household_columns = columns(b"".join(households(5_000, GROUPS, REGIONS, 1)))
    assert len(household_columns) == 16
    assert set(household_columns[14]) == set("12345") and set(household_columns[15]) == set("1234")
    blocks = {"".join(parts) for parts in zip(*household_columns[:4], strict=True)}
    assert blocks <= {f"{block:015d}" for block in REGIONS.block.tolist()}


@pytest.mark.parametrize("make", [persons, households])
def test_chunks(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "CHUNK", 100)

    def parts(count: int, groups: Groups = GROUPS, regions: Regions = REGIONS) -> list[bytes]:
        return list(make(count, groups, regions, 5))  # type: ignore[operator]

    assert [part.count(b"\n") for part in parts(250)] == [100, 100, 50]
    assert parts(250)[:2] == parts(200) and len(set(parts(250))) == 3
