"""Invented geography, iterations, codes and records."""

import numpy as np
import pytest

from dpstream.pipelines.tabulation import invented
from dpstream.pipelines.tabulation.invented import (
    BLOCKS_PER_TRACT,
    PRODUCTION_SHAPE,
    SMALL_SHAPE,
    Groups,
    Regions,
    households,
    invent_groups,
    invent_regions,
    persons,
    zipf,
)
from dpstream.pipelines.tabulation.public_files import (
    CODES,
    MAP,
    NO_AREA,
    NO_PLACE,
    RACE_ITERATIONS,
)


@pytest.mark.parametrize("seed", range(5))
def test_every_region_is_there(seed: int) -> None:
    made = invent_regions(("01", "04", "72"), 20, 41, 17, seed)
    assert len(made.block) == 20 * BLOCKS_PER_TRACT and (np.diff(made.block) > 0).all()
    state = made.block // 10**13
    assert len(np.unique(made.block // 10_000)) == 20
    inside = made.place != NO_PLACE
    assert len(np.unique(np.stack([state, made.place])[:, inside], axis=1).T) == 41
    assert len(np.unique(made.area[made.area != NO_AREA])) == 17
    assert (made.area[state == 72] == NO_AREA).all()
    assert 0.5 < inside.mean() < 0.8 and np.isclose(made.weights.sum(), 1.0)


def test_a_place_is_blocks_in_a_row() -> None:
    made = invent_regions(("01",), 30, 50, 0, 0)
    change = np.flatnonzero(np.diff(made.place)) + 1
    runs = made.place[np.append(0, change)]
    assert len(runs[runs != NO_PLACE]) == 50


def test_nothing_is_as_good_as_something() -> None:
    made = invent_regions(("72",), 2, 1, 0, 0)
    assert (made.area == NO_AREA).all() and len(np.unique(made.place)) <= 2


def test_very_many_tracts_of_one_state() -> None:
    made = invent_regions(("48",), 20_000, 5, 0, 0)
    assert (np.diff(made.block) > 0).all() and (made.block // 10**13 == 48).all()
    assert len(np.unique(made.block // 10**10)) <= 499


def test_weights_fall_slowly() -> None:
    weights = zipf(1_000)
    assert np.isclose(weights.sum(), 1.0) and (np.diff(weights) < 0).all()
    assert weights[0] > 0.1 and weights[100:].sum() > 0.2


def test_every_group_has_a_code_and_every_code_a_group() -> None:
    for shape in (SMALL_SHAPE, PRODUCTION_SHAPE):
        made = invent_groups(shape, 3)
        assert len(made.race) == shape.race_codes and np.isclose(made.race_weights.sum(), 1.0)
        assert len(made.ethnicity) == shape.ethnic_codes + 1
        assert np.isclose(made.ethnicity_weights.sum(), 1.0)
        codes = {code for code, _ in made.files[CODES]}
        assert codes == {str(code) for code in [*made.race, *made.ethnicity]}
        mapped = {code for _, code in made.files[MAP]}
        assert mapped == codes
        assert {code for code, *_ in made.files[RACE_ITERATIONS]} <= {
            iteration for iteration, _ in made.files[MAP]
        }


def test_names_and_codes_are_there_once() -> None:
    made = invent_groups(PRODUCTION_SHAPE, 0)
    for rows in (made.files[RACE_ITERATIONS], made.files[CODES]):
        assert len({row[0] for row in rows}) == len({row[1] for row in rows}) == len(rows)


def test_alone_and_in_combination_have_the_same_codes() -> None:
    made = invent_groups(PRODUCTION_SHAPE, 1)
    codes = dict[str, set[str]]()
    for iteration, code in made.files[MAP]:
        codes.setdefault(iteration, set()).add(code)
    of_name = dict[str, list[set[str]]]()
    for code, name, level, *_ in made.files[RACE_ITERATIONS]:
        if level != "0":
            of_name.setdefault(name.partition(" alone")[0], []).append(codes[code])
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in of_name.values())


GROUPS = invent_groups(SMALL_SHAPE, 0)
REGIONS = invent_regions(("01", "02"), 8, 4, 2, 0)


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
    monkeypatch.setattr(invented, "CHUNK", 100)

    def parts(count: int, groups: Groups = GROUPS, regions: Regions = REGIONS) -> list[bytes]:
        return list(make(count, groups, regions, 5))  # type: ignore[operator]

    assert [part.count(b"\n") for part in parts(250)] == [100, 100, 50]
    assert parts(250)[:2] == parts(200) and len(set(parts(250))) == 3
