"""Public files: iterations, codes and their map; blocks and their regions; totals of persons."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.pipelines.tabulation.public_files import (
    CODES,
    ETHNICITY_ITERATIONS,
    GEOGRAPHY,
    MAP,
    RACE_ITERATIONS,
    TOTALS,
    is_in,
    read_geography,
    read_totals,
    texts,
)
from dpstream.pipelines.tabulation.text import Fault, Faults
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
def test_faults_of_race_and_ethnicity(
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


_GEOGRAPHY = "TABBLKST|TABBLKCOU|TABTRACTCE|TABBLK|PLACEFP|AIANNHCE"
_BLOCKS = [
    "02|001|000001|0002|00007|0001",
    "01|001|000001|0001|99999|9999",
    "72|031|050901|2040|10001|0003",
    "04|001|000001|0001|99999|9999",
]


def blocks_of(made: Office, rows: list[str], states: tuple[str, ...] = ("01", "02", "72")) -> tuple[
    list[dict[str, str | None]] | None, list[tuple[int | None, str, str]]
]:  # fmt: skip
    path = made.data / "other.txt"
    path.write_text("\n".join([_GEOGRAPHY, *rows]) + "\n")
    faults = Faults(GEOGRAPHY)
    table = read_geography(path, states, faults)
    fault_rows = [(fault.row, fault.column, fault.rule) for fault in faults.faults]
    return None if table is None else table.to_pylist(), fault_rows


def test_blocks_of_the_run_are_sorted(spoilt: Office) -> None:
    blocks, faults = blocks_of(spoilt, _BLOCKS)
    assert faults == [] and blocks is not None
    assert [row["block"] for row in blocks] == [
        "010010000010001", "020010000010002", "720310509012040"
    ]  # fmt: skip
    assert blocks[1] == {
        "block": "020010000010002", "state": "02", "county": "02001", "tract": "02001000001",
        "place": "0200007", "aiannh": "0001",
    }  # fmt: skip
    assert blocks[0]["place"] is None and blocks[0]["aiannh"] is None
    # Areas are counted outside of Puerto Rico only.
    assert blocks[2]["place"] == "7210001" and blocks[2]["aiannh"] is None


def test_a_block_that_is_there_twice(spoilt: Office) -> None:
    blocks, faults = blocks_of(spoilt, [*_BLOCKS, _BLOCKS[0].replace("00007", "99999")])
    assert blocks is None
    [(row, column, rule)] = faults
    assert (row, column) == (6, "TABBLKST .. TABBLK") and "would count twice" in rule
    assert blocks_of(spoilt, [*_BLOCKS, _BLOCKS[3]])[1] == []  # of a state that does not run


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("1|001|000001|0009|99999|9999", "TABBLKST"),
        ("01|1|000001|0009|99999|9999", "TABBLKCOU"),
        ("01|001|00000x|0009|99999|9999", "TABTRACTCE"),
        ("01|001|000001||99999|9999", "TABBLK"),
        ("01|001|000001|0009|999999|9999", "PLACEFP"),
        ("01|001|000001|0009|99999|-999", "AIANNHCE"),
    ],
)
def test_fields_of_another_form(spoilt: Office, row: str, column: str) -> None:
    _, [(number, where, rule)] = blocks_of(spoilt, [*_BLOCKS, row])
    assert (number, where) == (6, column) and rule.endswith("digits")


def test_states_without_blocks(spoilt: Office) -> None:
    assert blocks_of(spoilt, _BLOCKS, ("01", "05"))[1] == [
        (None, "TABBLKST", "has no block of a state of the run")
    ]
    assert blocks_of(spoilt, [])[1] == [(None, "", "has no rows")]


def test_texts_and_places_in_sorted_numbers() -> None:
    assert texts(np.array([7, 123]), 4).to_pylist() == ["0007", "0123"]
    assert is_in(np.array([1, 2, 9]), np.array([2, 5])).tolist() == [False, True, False]
    assert is_in(np.array([1]), np.array([], np.int64)).tolist() == [False]


_TOTALS = "REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT"


@pytest.fixture
def rows(made: Office) -> list[str]:
    """Groups that are counted: of a race, a place, and Puerto Rico."""
    files = made.load("p").files
    table = files.iterations.to_pylist()
    of_all = next(r["CODE"] for r in table if not (r["DETAILED_ONLY"] or r["COARSE_ONLY"]))
    place = next(p for p in files.geography["place"].to_pylist() if p and p[:2] == "01")
    tract = next(t for t in files.geography["tract"].to_pylist() if t[:2] == "72")
    return [
        f"1|USA|{of_all}|120",
        f"{place}|PLACE|{of_all}|-3",
        f"{tract}|PR-TRACT|{of_all}|000",
    ]


def totals_of(
    office: Office, *files: list[str], folder: bool = False
) -> tuple[list[dict[str, object]] | None, list[Fault]]:
    path = office.data / TOTALS
    if folder:
        path.mkdir()
    for number, lines in enumerate(files):
        own = path / f"part-{number}.csv" if folder else path
        own.write_text("\n".join([_TOTALS, *lines]) + "\n")
    loaded = office.load("p")
    faults = list[Fault]()
    table = read_totals(office.data, loaded.files, loaded.parameters, faults)
    return None if table is None else table.to_pylist(), faults


def test_totals_of_groups(spoilt: Office, rows: list[str]) -> None:
    table, faults = totals_of(spoilt, rows)
    assert faults == [] and table is not None
    code = rows[0].split("|")[2]
    assert [tuple(str(row[name]) for name in _TOTALS.split("|")) for row in table] == [
        ("1", "USA", code, "120"),
        (rows[1].split("|")[0], "PLACE", code, "-3"),
        (rows[2].split("|")[0], "PR-TRACT", code, "0"),
    ]


def test_a_folder_is_as_one_file(spoilt: Office, rows: list[str], tmp_path: Path) -> None:
    file_totals, _ = totals_of(spoilt, rows)
    (spoilt.data / TOTALS).unlink()
    parts, faults = totals_of(spoilt, rows[:1], rows[1:], folder=True)
    assert parts == file_totals and faults == []


def test_groups_of_no_level_are_skipped(spoilt: Office, made: Office, rows: list[str]) -> None:
    table = made.load("p").files.iterations.to_pylist()
    large = next(r["CODE"] for r in table if r["DETAILED_ONLY"])
    spoilt.configure(run_pr=False)
    counted, faults = totals_of(spoilt, [*rows, f"01|STATE|{large}|5", f"01001|COUNTY|{large}|6"])
    assert faults == [] and counted is not None
    assert [row["COUNT"] for row in counted] == [120, -3, 5]


@pytest.mark.parametrize(
    ("change", "column", "rule"),
    [
        (("USA", "WORLD"), "REGION_TYPE", "is no region type"),
        (("1|USA", "2|USA"), "REGION_ID", "is not the id of a region of its type"),
        (("1|USA", "02|COUNTY"), "REGION_ID", "is not the id of a region of its type"),
        (("1|USA", "720011|PR-COUNTY"), "REGION_ID", "is not the id of a region of its type"),
        (("1|USA", "00x1|AIANNH"), "REGION_ID", "is not the id of a region of its type"),
        (("|120", "|12.5"), "COUNT", "is not a whole number"),
        (("|120", "|1" + "0" * 15), "COUNT", "is not a whole number"),
        (("|120", "|"), "COUNT", "is not a whole number"),
        (("|120", "|0x1F"), "COUNT", "is not a whole number"),
        (("|120", "|-9223372036854775808"), "COUNT", "is not a whole number"),
        (("|120", "|+5"), "COUNT", "is not a whole number"),
    ],
)
def test_faults_of_totals(
    spoilt: Office, rows: list[str], change: tuple[str, str], column: str, rule: str
) -> None:
    table, faults = totals_of(spoilt, [rows[0].replace(*change), *rows[1:]])
    assert table is None
    assert [(f.file, f.row, f.column, f.rule) for f in faults] == [(TOTALS, 2, column, rule)]


def test_regions_without_a_block(spoilt: Office, rows: list[str]) -> None:
    """Those of states that run count; other states are skipped, whatever their ids look like."""
    code = rows[0].split("|")[2]
    empty = [f"01999|COUNTY|{code}|7", f"7299999|PR-PLACE|{code}|8"]
    skipped = [f"55|STATE|{code}|1", f"55833|PLACE|{code}|2", f"8888|AIANNH|{code}|3",
               f"01001|PR-COUNTY|{code}|4", f"72001|COUNTY|{code}|5"]  # fmt: skip
    table, faults = totals_of(spoilt, [*rows, *empty, *skipped])
    assert faults == [] and table is not None
    assert [row["COUNT"] for row in table] == [120, -3, 0, 7, 8]
    _, faults = totals_of(spoilt, [*empty, *skipped])
    assert [(fault.row, fault.rule) for fault in faults] == [
        (None, "has no group of a region with a block of the run: its tables would be of nobody")
    ]


def test_unknown_iterations(spoilt: Office, rows: list[str]) -> None:
    _, [fault] = totals_of(spoilt, ["1|USA|9999|1", *rows[1:]])
    assert fault.column == "ITERATION_CODE" and fault.row == 2


def test_a_group_twice_in_two_files(spoilt: Office, rows: list[str]) -> None:
    _, faults = totals_of(spoilt, rows, [rows[1]], folder=True)
    assert [(f.file, f.row, f.rule) for f in faults] == [
        ("part-1.csv", 2, "is a group that is there before")
    ]


def test_no_group_of_the_run_and_no_file(spoilt: Office, rows: list[str]) -> None:
    """It would be charged, and every table be a header."""
    spoilt.configure(run_pr=False)
    for lines in ([], [""], rows[2:]):
        table, [fault] = totals_of(spoilt, lines)
        assert table is None and fault.rule.startswith("has no group of a region with a block")
    (spoilt.data / TOTALS).unlink()
    assert [fault.rule for fault in totals_of(spoilt)[1]] == ["is missing"]
