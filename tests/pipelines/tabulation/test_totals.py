"""Published totals of persons, for households."""

from pathlib import Path

import pytest

from dpstream.pipelines.tabulation.text import Fault
from dpstream.pipelines.tabulation.totals import TOTALS, read_totals
from tests.pipelines.tabulation.office import Office

HEADER = "REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT"


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


def read(
    office: Office, *files: list[str], folder: bool = False
) -> tuple[list[dict[str, object]] | None, list[Fault]]:
    path = office.data / TOTALS
    if folder:
        path.mkdir()
    for number, lines in enumerate(files):
        own = path / f"part-{number}.csv" if folder else path
        own.write_text("\n".join([HEADER, *lines]) + "\n")
    loaded = office.load("p")
    faults = list[Fault]()
    table = read_totals(office.data, loaded.files, loaded.parameters, faults)
    return None if table is None else table.to_pylist(), faults


def test_totals_of_groups(spoilt: Office, rows: list[str]) -> None:
    table, faults = read(spoilt, rows)
    assert faults == [] and table is not None
    code = rows[0].split("|")[2]
    assert [tuple(str(row[name]) for name in HEADER.split("|")) for row in table] == [
        ("1", "USA", code, "120"),
        (rows[1].split("|")[0], "PLACE", code, "-3"),
        (rows[2].split("|")[0], "PR-TRACT", code, "0"),
    ]


def test_a_folder_is_as_one_file(spoilt: Office, rows: list[str], tmp_path: Path) -> None:
    file_totals, _ = read(spoilt, rows)
    (spoilt.data / TOTALS).unlink()
    parts, faults = read(spoilt, rows[:1], rows[1:], folder=True)
    assert parts == file_totals and faults == []


def test_groups_of_no_level_are_skipped(spoilt: Office, made: Office, rows: list[str]) -> None:
    table = made.load("p").files.iterations.to_pylist()
    large = next(r["CODE"] for r in table if r["DETAILED_ONLY"])
    spoilt.configure(run_pr=False)
    counted, faults = read(spoilt, [*rows, f"01|STATE|{large}|5", f"01001|COUNTY|{large}|6"])
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
def test_faults(spoilt: Office, rows: list[str], change: tuple[str, str], column: str, rule: str) \
        -> None:  # fmt: skip
    table, faults = read(spoilt, [rows[0].replace(*change), *rows[1:]])
    assert table is None
    assert [(f.file, f.row, f.column, f.rule) for f in faults] == [(TOTALS, 2, column, rule)]


def test_regions_without_a_block(spoilt: Office, rows: list[str]) -> None:
    """Those of states that run count; other states are skipped, whatever their ids look like."""
    code = rows[0].split("|")[2]
    empty = [f"01999|COUNTY|{code}|7", f"7299999|PR-PLACE|{code}|8"]
    skipped = [f"55|STATE|{code}|1", f"55833|PLACE|{code}|2", f"8888|AIANNH|{code}|3",
               f"01001|PR-COUNTY|{code}|4", f"72001|COUNTY|{code}|5"]  # fmt: skip
    table, faults = read(spoilt, [*rows, *empty, *skipped])
    assert faults == [] and table is not None
    assert [row["COUNT"] for row in table] == [120, -3, 0, 7, 8]
    _, faults = read(spoilt, [*empty, *skipped])
    assert [(fault.row, fault.rule) for fault in faults] == [
        (None, "has no group of a region with a block of the run: its tables would be of nobody")
    ]


def test_unknown_iterations(spoilt: Office, rows: list[str]) -> None:
    _, [fault] = read(spoilt, ["1|USA|9999|1", *rows[1:]])
    assert fault.column == "ITERATION_CODE" and fault.row == 2


def test_a_group_twice_in_two_files(spoilt: Office, rows: list[str]) -> None:
    _, faults = read(spoilt, rows, [rows[1]], folder=True)
    assert [(f.file, f.row, f.rule) for f in faults] == [
        ("part-1.csv", 2, "is a group that is there before")
    ]


def test_no_group_of_the_run_and_no_file(spoilt: Office, rows: list[str]) -> None:
    """It would be charged, and every table be a header."""
    spoilt.configure(run_pr=False)
    for lines in ([], [""], rows[2:]):
        table, [fault] = read(spoilt, lines)
        assert table is None and fault.rule.startswith("has no group of a region with a block")
    (spoilt.data / TOTALS).unlink()
    assert [fault.rule for fault in read(spoilt)[1]] == ["is missing"]
