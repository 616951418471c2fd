"""Production's two files: its own example, and every group of a run by a plain count."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.tabulation.parameters import AGE_BINS
from dpstream.pipelines.tabulation.error_report.errors import Errors, interval
from dpstream.pipelines.tabulation.error_report.files import WORKLOADS, write_runs
from tests.pipelines.tabulation.office import Office


def cell(only: bool, power: int, detail: int, groups: int, errors: list[int]) -> dict[str, Any]:
    sums = Errors()
    sums.add(np.array(errors), groups)
    return {
        "table": "t1t2", "region_type": "B" if only else "A", "iteration_level": 1 + only,
        "detailed_only": only, "size": interval(power), "power": power, "detail": detail,
        "groups": groups, "target": 9, "measured": sums.quantile(),
    }  # fmt: skip


def rows_of(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_the_example_of_production(tmp_path: Path) -> None:
    """Two runs: a group of 4 once by sex and age(4) and once as a total; two groups as totals."""
    cells = [
        cell(False, 0, 0, 2, [3, 4]),
        cell(False, 1, 0, 1, [5]),
        cell(False, 1, 1, 1, [1, 2, 3, 4, 6, 7, 8, 9]),
        cell(True, 0, 0, 2, [1, 2]),
    ]
    write_runs(tmp_path, "p", cells, 2)
    rows = rows_of(tmp_path / "multi_run_error_report.csv")
    assert rows[0][:6] == [
        "REGION_TYPE", "ITERATION_LEVEL", "DETAILED_ONLY", "Population group size",
        "Average proportion of pop groups with workload = Total", "MOE of Total",
    ]  # fmt: skip
    none = ["0.00", "nan"]
    assert rows[1:] == [
        ["A", "1", "False", "[0.0, 1.0]", "1.00", "3.95", *none, *none, *none],
        ["A", "1", "False", "(1.0, 10.0]", "0.50", "5.00", "0.50", "8.65", *none, *none],
        ["B", "2", "True", "[0.0, 1.0]", "1.00", "1.95", *none, *none, *none],
    ]


def test_households_have_their_expected_margin(tmp_path: Path) -> None:
    cells = [
        cell(False, 1, 2, 3, [0, 0]) | {"table": "t4"},
        cell(False, 1, 0, 3, [7]) | {"table": "t3"},
    ]
    write_runs(tmp_path, "h", cells, 2)
    assert rows_of(tmp_path / "multi_run_error_report.csv") == [
        ["Table", "REGION_TYPE", "ITERATION_LEVEL", "Population group size", "STAT_LEVEL",
         "Number of pop groups", "Expected MOE", "MOE"],
        ["t3", "A", "1", "(1.0, 10.0]", "0", "1.5", "9", "7.00"],
        ["t4", "A", "1", "(1.0, 10.0]", "2", "1.5", "9", "0.00"],
    ]  # fmt: skip


def test_a_row_for_each_group(
    lively: Office, runs: tuple[Path, Path], reported: tuple[dict[str, Any], Path]
) -> None:
    rows = rows_of(reported[1] / "run-1" / "error_report.csv")
    assert ",".join(rows[0]) == (
        "REGION_ID,REGION_TYPE,ITERATION_CODE,DETAILED_ONLY,COARSE_ONLY,Population group size,"
        "Workload selected,Total absolute error,Total squared error"
    )
    published = [
        tuple(line.split("|")[:3])
        for path in (runs[0] / "t1").glob("*.csv")
        for line in path.read_text().splitlines()[1:]
    ]
    assert sorted(tuple(row[:3]) for row in rows[1:]) == sorted(published)
    assert {row[6] for row in rows[1:]} == set(WORKLOADS)
    marked = {row[0]: row for name in ("race", "ethnicity") for row in (
        line.split("|")
        for line in lively.path(f"{name}-characteristic-iterations.txt").read_text().splitlines()
    )}  # fmt: skip
    for row in rows[1:]:
        assert row[3:5] == marked[row[2]][-2:]
        absolute, squared = int(row[7]), int(row[8])
        assert absolute <= squared <= absolute**2


@pytest.mark.parametrize("detail", [1, 2, 3])
def test_groups_by_hand(
    lively: Office, runs: tuple[Path, Path], reported: tuple[dict[str, Any], Path], detail: int
) -> None:
    """Size and errors of some groups, from the text of records and published files alone."""
    files = lively.load().files
    bins = [4, 9, 23][detail - 1]
    rows = rows_of(reported[1] / "run-1" / "error_report.csv")[1:]
    mine = [row for row in rows if row[6] == WORKLOADS[detail] and row[1] in ("USA", "STATE")]
    assert mine and bins == len(AGE_BINS[bins]) + 1
    codes, members = files.codes.to_pylist(), files.members
    iterations = {code: n for n, code in enumerate(files.iterations["CODE"].to_pylist())}
    for row in mine[:3]:
        number = iterations[row[2]]
        inside = {codes[c] for i, c in members.tolist() if i == number}
        alone = files.iterations["ALONE"][number].as_py()
        counts: Counter[tuple[str, str]] = Counter()
        for line in lively.path("person-records.txt").read_text().splitlines()[1:]:
            fields = line.split("|")
            race = [code for code in fields[8:16] if code != "Null"]
            state = fields[3]
            if (state == "72") or (row[1] == "STATE" and state != row[0]):
                continue
            held = {True: set(race) <= inside, False: bool(set(race) & inside),
                    None: fields[16] in inside}[alone]  # fmt: skip
            if held:
                edge = max([0, *(e for e in AGE_BINS[bins] if e <= int(fields[0]))])
                counts[str(edge), fields[1]] += 1
        total = squares = 0
        for path in (runs[0] / "t2").glob(f"{row[1].lower()}-*.csv"):
            for line in path.read_text().splitlines()[1:]:
                fields = line.split("|")
                if fields[:3] == row[:3] and fields[3] != "*":
                    error = abs(int(fields[6]) - counts[fields[3], fields[5]])
                    total, squares = total + error, squares + error**2
        assert (sum(counts.values()), total, squares) == (int(row[5]), int(row[7]), int(row[8]))
