"""Reports on outputs: figures read again, production's two files, and plain counts."""

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.tabulation.parameters import AGE_BINS
from dpstream.accounting.tabulation.parameters import PERSONS as TABLE
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import (
    Prepared,
    inputs_of,
    lists_digest,
    prepared,
    prepared_of,
)
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.tabulation.errors.figures import Errors, interval, released_figures, size_of
from tests.pipelines.tabulation.errors.report import (
    STAMP,
    WORKLOADS,
    exact_tally,
    report,
    write_runs,
)
from tests.pipelines.tabulation.office import Office, executed

Group = tuple[str, ...]


def prepared_for(lively: Office) -> Prepared:
    return prepared(inputs_of(lively.parameters, lively.data, Choice("p")))


def plainly(folder: Path, width: int) -> dict[Group, dict[Group, int]]:
    """Counts by group and label, of all files."""
    out: dict[Group, dict[Group, int]] = {}
    for path in folder.glob("*.csv"):
        with open(path, newline="") as file:
            for row in list(csv.reader(file, delimiter="|"))[1:]:
                out.setdefault(tuple(row[:3]), {})[tuple(row[3 : 3 + width])] = int(row[-1])
    return out


def test_every_figure_is_read(lively: Office, runs: tuple[Path, Path]) -> None:
    prepared_run = prepared_for(lively)
    totals, ages = plainly(runs[0] / "t1", 0), plainly(runs[0] / "t2", 3)
    details = set()
    for level in prepared_run.domain.levels:
        for figures in released_figures(runs[0], TABLE, level):
            details.add((figures.output.folder, figures.detail))
            mine = totals if figures.output.folder == "t1" else ages
            for group, values in zip(figures.groups.tolist(), figures.values, strict=True):
                region, iteration = divmod(group, len(level.iterations))
                name = (level.regions[region].as_py(), level.level.region_type,
                        level.iterations[iteration].as_py())  # fmt: skip
                rows = {row.labels: int(v) for row, v in zip(figures.rows, values, strict=True)}
                assert mine.pop(name) == rows
    assert not totals and not ages
    assert details == {*(("t1", d) for d in range(4)), *(("t2", d) for d in (1, 2, 3))}


def swap(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("t2", lambda lines: lines[:-1]),
        ("t2", swap),
        ("t2", lambda lines: [lines[0].replace("SEX", "GENDER"), *lines[1:]]),
        ("t1", lambda lines: [lines[0], lines[1].replace("1|", "9|", 1), *lines[2:]]),
        ("t1", lambda lines: [*lines, "1|USA|0004"]),
    ],
    ids=["row missing", "rows swapped", "header", "region", "cut off"],
)  # fmt: skip
def test_an_output_that_was_changed_is_refused(
    lively: Office, runs: tuple[Path, Path], tmp_path: Path, folder: str,
    change: Callable[[list[str]], list[str]], refused: Refused,
) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(runs[0], copy)
    path = copy / folder / "usa-1-000.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    level = prepared_for(lively).domain.levels[0]
    refused(released_figures, copy, TABLE, level)


def test_a_file_that_is_gone_is_missed(
    lively: Office, runs: tuple[Path, Path], tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(runs[0], tmp_path / "copy")
    (tmp_path / "copy" / "t1" / "usa-1-000.csv").unlink()
    refused(
        lambda: released_figures(tmp_path / "copy", TABLE, prepared_for(lively).domain.levels[0])
    )


def test_errors_of_many_parts_are_those_of_all() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(-spread, spread + 1, (n, 3)) for spread, n in ((5, 7), (90, 40), (0, 1))]
    errors = Errors()
    for part in parts:
        errors.add(part, len(part))
    every = np.concatenate([part.reshape(-1) for part in parts])
    assert (errors.figures, errors.groups) == (len(every), 48)
    assert errors.bias == pytest.approx(every.mean())
    assert errors.rmse == pytest.approx(np.sqrt((every**2).mean()))
    for chance in (0.0, 0.3, 0.95, 1.0):
        assert errors.quantile(chance) == pytest.approx(np.quantile(np.abs(every), chance))
    for margin in (0, 5, 1000):
        assert errors.within(margin) == pytest.approx((np.abs(every) <= margin).mean())


def test_sizes() -> None:
    sizes = size_of(np.array([0, 1, 2, 10, 11, 100, 101, 331_000_000]))
    assert sizes.tolist() == [0, 0, 1, 1, 2, 2, 3, 9]
    assert [interval(power) for power in (0, 1, 3)] == [
        "[0.0, 1.0]", "(1.0, 10.0]", "(100.0, 1000.0]",
    ]  # fmt: skip


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
    tried = partial(report, *lively)
    other, out = Choice("p", estimates="combined"), tmp_path / "out"
    calls: dict[str, Callable[[], object]] = {
        "another plan": lambda: tried(other, [runs[0]], out),
        "no output": lambda: tried(PERSONS, [tmp_path / "nowhere"], out),
        "nothing": lambda: tried(PERSONS, [], out),
    }
    check(Path(__file__).with_name("refusals.txt"), of_refusals(calls))


def test_the_truth_is_exact(lively: Office) -> None:
    """Everybody of the run's states is in one region of each state, once in each detail's total."""
    inputs = inputs_of(lively.parameters, lively.data, PERSONS)
    prepared = prepared_of(lively.load(), lists_digest(inputs.paths[:-1]))
    tally = exact_tally(prepared, inputs)
    assert sum(int(tally.of(0, n).counts.sum()) for n in range(len(prepared.domain.levels))) > 300
