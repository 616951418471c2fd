"""Iterations, codes and their map."""

from collections.abc import Callable
from typing import Any

import pytest

from dpstream.pipelines.tabulation.characteristics import (
    CODES,
    ETHNICITY_ITERATIONS,
    MAP,
    RACE_ITERATIONS,
)
from tests.pipelines.tabulation.office import Office

Change = Callable[[list[str]], Any]


def test_what_is_counted(made: Office) -> None:
    files = made.load().files
    table = files.iterations
    assert sorted(set(table["LEVEL"].to_pylist())) == [1, 2]
    listed = [line.split("|") for line in made.path(RACE_ITERATIONS).read_text().splitlines()[1:]]
    race = [row for row in listed if row[2] != "0"]
    assert table["CODE"].to_pylist()[: len(race)] == [row[0] for row in race]
    assert table["ALONE"].to_pylist()[: len(race)] == [row[3] == "True" for row in race]
    assert set(table["ALONE"].to_pylist()[len(race) :]) == {None}
    assert table["ETHNICITY"].to_pylist() == [False] * len(race) + [True] * (
        table.num_rows - len(race)
    )
    codes = files.codes.to_pylist()
    assert codes == sorted(line[:4] for line in made.path(CODES).read_text().splitlines()[1:])
    pairs = {tuple(line.split("|")) for line in made.path(MAP).read_text().splitlines()[1:]}
    counted = set(table["CODE"].to_pylist())
    counted_pairs = {
        (table["CODE"][row].as_py(), codes[code]) for row, code in files.members.tolist()
    }
    assert counted_pairs == {pair for pair in pairs if pair[0] in counted}


def test_the_order_of_lines_does_not_matter_for_codes(made: Office, spoilt: Office) -> None:
    spoilt.spoil(CODES, lambda lines: [lines[0], *reversed(lines[1:])])
    spoilt.spoil(MAP, lambda lines: [lines[0], *reversed(lines[1:])])
    first, second = made.load().files, spoilt.load().files
    assert first.codes == second.codes
    assert first.members.tolist() == second.members.tolist()


def field(row: int, place: int, value: str) -> Change:
    """Set a field of a line; the header is 0."""

    def change(lines: list[str]) -> None:
        fields = lines[row].split("|")
        fields[place] = value
        lines[row] = "|".join(fields)

    return change


def twice(lines: list[str]) -> None:
    lines.append(lines[1])


@pytest.mark.parametrize(
    ("name", "change", "row", "column", "rule"),
    [
        (RACE_ITERATIONS, field(5, 0, "12"), 6, "ITERATION_CODE", "is not four digits"),
        (RACE_ITERATIONS, twice, 28, "ITERATION_CODE", "is there before"),
        (RACE_ITERATIONS, field(5, 2, "3"), 6, "LEVEL", "is not 0, 1 or 2"),
        (RACE_ITERATIONS, field(5, 3, "true"), 6, "ALONE", "is not True or False"),
        (RACE_ITERATIONS, field(5, 4, "yes"), 6, "DETAILED_ONLY", "is not True, False or Null"),
        (RACE_ITERATIONS, field(5, 5, "Null"), 6, "COARSE_ONLY", "is Null where LEVEL is not 0"),
        (RACE_ITERATIONS, field(1, 5, "False"), 2, "COARSE_ONLY", "is Null where LEVEL is not 0"),
        (ETHNICITY_ITERATIONS, field(2, 0, "0003"), 3, "ITERATION_CODE", "is an iteration of race"),
        (CODES, field(2, 0, "0999"), 3, "RACE_ETH_CODE", "is not four digits, the first not 0"),
        (CODES, twice, 29, "RACE_ETH_CODE", "is there before"),
        (MAP, lambda lines: [*lines, "9999|1000"], 107, "ITERATION_CODE", "is no iteration of"),
        (MAP, lambda lines: [*lines, "0003|9998"], 107, "RACE_ETH_CODE", "is not in the list"),
        (MAP, twice, 107, "", "is there before"),
    ],
)
def test_faults(
    spoilt: Office, name: str, change: Change, row: int, column: str, rule: str
) -> None:
    spoilt.spoil(name, change)
    file_faults = [fault for fault in spoilt.faults() if fault.file == name]
    assert any(f.row == row and f.column == column and rule in f.rule for f in file_faults), (
        file_faults
    )


def test_a_code_may_belong_to_no_iteration(spoilt: Office) -> None:
    spoilt.spoil(CODES, lambda lines: [*lines, "9998|Nobody"])
    assert spoilt.faults() == []
    files = spoilt.load().files
    assert files.codes.to_pylist().index("9998") not in files.members[:, 1]


def test_an_iteration_of_neither_large_nor_small_regions(spoilt: Office) -> None:
    def change(lines: list[str]) -> None:
        fields = lines[-1].split("|")
        lines[-1] = "|".join([*fields[:4], "True", "True"])

    spoilt.spoil(RACE_ITERATIONS, change)
    assert any("DETAILED_ONLY too" in fault.rule for fault in spoilt.faults())


def members(office: Office, level: str, alone: str) -> list[tuple[str, str]]:
    """(iteration, code) of race, of one level and kind."""
    listed = [line.split("|") for line in office.path(RACE_ITERATIONS).read_text().splitlines()]
    of = {row[0] for row in listed if row[2:6] == [level, alone, "False", "False"]}
    rows = [line.split("|") for line in office.path(MAP).read_text().splitlines()]
    return [(row[0], row[1]) for row in rows if row[0] in of]


@pytest.mark.parametrize("alone", ["True", "False"])
@pytest.mark.parametrize("level", ["1", "2"])
def test_a_second_iteration_of_a_kind(spoilt: Office, level: str, alone: str) -> None:
    pairs = members(spoilt, level, alone)
    other = next(pair for pair in pairs if pair[0] != pairs[0][0])
    spoilt.spoil(MAP, lambda lines: [*lines, f"{other[0]}|{pairs[0][1]}"])
    map_faults = [fault for fault in spoilt.faults() if fault.file == MAP]
    assert {fault.row for fault in map_faults} == {107} and len(map_faults) == 2
    assert all("second iteration" in fault.rule for fault in map_faults)


@pytest.mark.parametrize(
    ("flags", "regions"),
    [(["True", "False"], "nation and states"), (["False", "True"], "small regions")],
)
def test_a_second_iteration_where_only_some_regions_take_it(
    spoilt: Office, flags: list[str], regions: str
) -> None:
    listed = [line.split("|") for line in spoilt.path(RACE_ITERATIONS).read_text().splitlines()]
    narrow = next(row[0] for row in listed if row[2:6] == ["2", "True", *flags])
    code = members(spoilt, "2", "True")[0][1]
    spoilt.spoil(MAP, lambda lines: [*lines, f"{narrow}|{code}"])
    [fault] = spoilt.faults()
    assert fault.row == 107 and fault.rule.endswith(f"counted for {regions}")


def test_of_two_granularities_a_code_may_have_one_each(made: Office) -> None:
    """The merged iteration of small regions has codes of iterations of large ones."""
    files = made.load().files
    coarse = [row for row, flag in enumerate(files.iterations["COARSE_ONLY"].to_pylist()) if flag]
    large = {row for row, flag in enumerate(files.iterations["DETAILED_ONLY"].to_pylist()) if flag}
    of = {code for row, code in files.members.tolist() if row in coarse}
    assert of and of <= {code for row, code in files.members.tolist() if row in large}
