"""Reports against exact counts, margins that are too small, and what a report refuses."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.error_report import report as report_module
from dpstream.pipelines.tabulation.error_report.report import STAMP, report
from dpstream.pipelines.tabulation.inputs import inputs_of, prepared_of
from tests.pipelines.tabulation.executing import executed
from tests.pipelines.tabulation.office import Office

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
        "NOT-PRIVATE.txt", "multi_run_error_report.csv", "report.html", "run-1/error_report.csv",
        "run-2/error_report.csv",
    ]  # fmt: skip
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written.values())
    assert STAMP in written["NOT-PRIVATE.txt"].read_text()
    one, two = (written[f"run-{n}/error_report.csv"].read_text() for n in (1, 2))
    assert one != two


def test_what_is_refused(lively: Office, runs: tuple[Path, Path], tmp_path: Path) -> None:
    def tried(choice: Choice, folders: list[Path], out: Path) -> None:
        report(lively.parameters, lively.data, choice, folders, out)

    with pytest.raises(UsageError, match="another plan"):
        tried(Choice("p", estimates="combined"), [runs[0]], tmp_path / "out")
    with pytest.raises(UsageError, match="no output"):
        tried(PERSONS, [tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(UsageError, match="--run"):
        tried(PERSONS, [], tmp_path / "out")
    for inside in (runs[0] / "report", lively.data / "report"):
        with pytest.raises(PolicyError, match="keep what is not private elsewhere"):
            tried(PERSONS, [runs[0]], inside)
        assert not inside.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="holds no report"):
        tried(PERSONS, [runs[0]], tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_the_truth_is_exact(lively: Office) -> None:
    """Everybody of the run's states is in one region of each state, once in each detail's total."""
    inputs = inputs_of(lively.parameters, lively.data, PERSONS)
    prepared = prepared_of(lively.load(), inputs.digest)
    tally = report_module.truth(prepared, inputs)
    assert sum(int(tally.of(0, n).counts.sum()) for n in range(len(prepared.domain.levels))) > 300
