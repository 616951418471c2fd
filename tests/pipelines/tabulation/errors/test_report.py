"""Reports on outputs: production's two files, by its own example and by plain counts."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.tabulation.parameters import AGE_BINS
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import inputs_of, lists_digest, prepared_of
from tests.pipelines.tabulation.errors.figures import Errors, interval
from tests.pipelines.tabulation.errors.report import (
    STAMP,
    WORKLOADS,
    exact_tally,
    report,
    write_runs,
)
from tests.pipelines.tabulation.executing import executed
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


PERSONS = Choice("p")


def test_figures_without_noise_have_no_error(spoilt: Office, tmp_path: Path) -> None:
    """Budgets whose noise is 0 but once in 10^12 draws: what is published is the report's truth."""
    budgets = {
        name: 1000.0
        for name in json.loads(spoilt.path("config.json").read_text())
        if "_level_" in name
    }
    spoilt.configure(**budgets, privacy_budget_p_stage_1_fraction=0.5)
    executed(spoilt, tmp_path / "p")
    errors = report(spoilt.parameters, spoilt.data, PERSONS, [tmp_path / "p"], tmp_path / "out")
    assert len(errors["margins"]) > 60
    assert all(
        (row["rmse"], row["within"], row["target"]) == (0, 1, 0) for row in errors["margins"]
    )
    totals = spoilt.data / "pop-group-totals.txt"
    totals.mkdir()
    for path in (tmp_path / "p" / "t1").glob("*.csv"):
        (totals / path.name).write_bytes(path.read_bytes())
    households = Choice("h")
    executed(spoilt, tmp_path / "h", households)
    errors = report(spoilt.parameters, spoilt.data, households, [tmp_path / "h"], tmp_path / "hh")
    assert {row["table"] for row in errors["margins"]} == {"t3", "t4"}
    assert all((row["rmse"], row["within"]) == (0, 1) for row in errors["margins"])


def test_margins_hold_over_runs(reported: tuple[dict[str, Any], Path]) -> None:
    """Of all figures of a kind together; and of each kind not much less than said."""
    error_report, _ = reported
    cells = [row for row in error_report["margins"] if row["table"] == "t2"]
    figures = sum(row["figures"] for row in cells)
    within = sum(row["within"] * row["figures"] for row in cells) / figures
    assert figures > 10_000 and 0.945 < within < 0.975
    many = [row for row in cells if row["figures"] > 300]
    assert all(row["measured"] > row["target"] * 3 / 4 for row in many) and len(many) > 5
    assert [run["insecure"] for run in error_report["runs"]] == [True, True]
    assert error_report["cells"] and error_report["totals"]


def test_what_is_written(
    lively: Office, runs: tuple[Path, Path], reported: tuple[dict[str, Any], Path]
) -> None:
    figures, out = reported
    # An older report is replaced, by the same.
    assert report(lively.parameters, lively.data, PERSONS, runs, out) == figures
    written = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert sorted(written) == [
        "NOT-PRIVATE.txt", "multi_run_error_report.csv", "run-1/error_report.csv",
        "run-2/error_report.csv",
    ]  # fmt: skip
    assert STAMP in written["NOT-PRIVATE.txt"].read_text()
    one, two = (written[f"run-{n}/error_report.csv"].read_text() for n in (1, 2))
    assert one != two


def test_what_is_refused(lively: Office, runs: tuple[Path, Path], tmp_path: Path) -> None:
    def tried(choice: Choice, folders: list[Path], out: Path) -> None:
        report(lively.parameters, lively.data, choice, folders, out)

    with pytest.raises(UsageError, match="another plan"):
        tried(Choice("p", estimates="combined"), [runs[0]], tmp_path / "out")
    with pytest.raises(UsageError, match="'nowhere' is no output folder"):
        tried(PERSONS, [tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(UsageError, match="--run"):
        tried(PERSONS, [], tmp_path / "out")


def test_the_truth_is_exact(lively: Office) -> None:
    """Everybody of the run's states is in one region of each state, once in each detail's total."""
    inputs = inputs_of(lively.parameters, lively.data, PERSONS)
    prepared = prepared_of(lively.load(), lists_digest(inputs.paths[:-1]))
    tally = exact_tally(prepared, inputs)
    assert sum(int(tally.of(0, n).counts.sum()) for n in range(len(prepared.domain.levels))) > 300
