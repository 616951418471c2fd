"""The operator's report, and the look at the records before the charge."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.metrics import DUE_METRICS, METRICS
from dpstream.pipelines.operate.operator_report import Reporter
from dpstream.state import open as stores
from dpstream.state.ledger.open import read_history
from tests import accounts
from tests.folders import MakeFolderJob, make_folder_job
from tests.golden.refusals import Refused
from tests.growing import place
from tests.pipelines.cli.called import call, printed
from tests.pipelines.stream.test_completeness import DAYS, WEEK, week, write

__all__ = ["make_folder_job"]
HEADER = "user,page,at,amount\n"
USABLE = "1,p,2024-01-01 00:00:00Z,1\n"
UNUSABLE = "x,p,now,\n"
#: Neighbours in pairs: each differs from the next by records of one unit.
INPUTS = [USABLE * 3, USABLE * 3 + UNUSABLE, UNUSABLE, ""]


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def job_of(folder: Path, rows: str) -> Path:
    """A job with an account, on one file with these rows."""
    text = (place(folder, kind="csv") / "dpstream.toml").read_text()
    account = 'account = { path = "l.db", limit = { epsilon = 900.0, delta = 0.1 } }\n'
    head = "[data_set.shop]\n"
    accounts.write(folder / "dpstream.toml", text.replace(head, head + account))
    (folder / "in" / "a.csv").write_text(HEADER + rows)
    return folder


def charges(folder: Path) -> int:
    account = load_job(folder).ledger
    assert account is not None
    return len(read_history(account).charges)


def report_of(path: Path) -> dict[str, Any]:
    assert path.stat().st_mode & 0o777 == 0o600
    fields = printed(path.read_text())
    assert fields.pop("file") == "dpstream operator report"
    return fields


def run(folder: Path, *flags: str | Path) -> tuple[int, str]:
    """Exit code, and what is printed before the run id."""
    result = call("run", "--project", folder, "--quiet", *flags)
    stores.close_all()
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr.partition("Costs ")[0].partition("WARNING")[0]


@pytest.mark.parametrize("flags", [(), ("--through", "2024-01-02")])
def test_a_record_decides_before_the_charge_only_where_the_operator_asks_for_it(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    def outcomes(*more: str) -> list[tuple[int, str, int]]:
        folders = [tmp_path / f"{len(more)}-{number}" for number in range(len(INPUTS))]
        ends = [run(job_of(*each), *flags, *more) for each in zip(folders, INPUTS, strict=True)]
        return [
            (code, text.replace(str(folder), ""), charges(folder))
            for folder, (code, text) in zip(folders, ends, strict=True)
        ]

    [(code, _, charged)] = {*outcomes()}
    assert (code, charged) == (0, 1)
    looked = outcomes("--check")
    assert [(code, charged) for code, _, charged in looked] == [(0, 1), (0, 1), (2, 0), (2, 0)]
    assert looked[0] == looked[1] and looked[2] == looked[3]


def test_a_run_that_is_stopped_leaves_its_reasons_and_nothing_else(tmp_path: Path) -> None:
    folder, report = job_of(tmp_path / "job", UNUSABLE * 7), tmp_path / "job" / "private" / "r.json"
    before = {*folder.rglob("*")}
    result = call("run", "--project", folder, "--check", "--operator-report", report, "--json")
    assert result.exit_code == 2 and printed(result.stderr)["field"] == "--check"
    assert {*folder.rglob("*")} - before == {report, report.parent} and charges(folder) == 0
    fields = report_of(report)
    assert fields["run_id"] is None and fields["error"]["exit_code"] == 2
    assert [(each["reason"], each["records"]) for each in fields["check"]["unusable"]] == [
        ("unit", 7)
    ]
    fix = call(*printed(result.stderr)["fix"].split("`")[1].split()[1:], "--project", folder)
    assert fix.exit_code == 2 and "7 with the reason unit" in fix.stdout


def test_a_run_that_is_charged_is_not_looked_at_again(tmp_path: Path) -> None:
    folder = job_of(tmp_path, USABLE)
    assert run(folder, "--check")[0] == 0
    (folder / "in" / "a.csv").write_text(HEADER + UNUSABLE)
    assert run(folder, "--check")[0] == 0 and charges(folder) == 1
    assert run(folder, "--check", "--fresh")[0] == 2 and charges(folder) == 1


def test_the_counts_of_a_run(tmp_path: Path) -> None:
    folder, report = job_of(tmp_path, USABLE * 12 + UNUSABLE * 2), tmp_path / "r.json"
    words = ("run", "--project", folder, "--operator", "--json", "--operator-report", report)
    result = call(*words, "--fail-if-empty")
    assert result.exit_code == 4
    operator_only, fields = printed(result.stdout)["operator_only"], report_of(report)
    counted = {name: n for name, n in operator_only.items() if name.startswith("operator_")}
    assert fields["counts"] == {n.removeprefix("operator_"): v for n, v in counted.items()}
    assert (fields["counts"]["dead_unit"], fields["records"]["read"]) == (2, 14)
    assert fields["records"] == operator_only["records"] and fields["error"]["exit_code"] == 4
    assert call(*words).exit_code == 0 and report_of(report)["error"] is None
    text = call(*words[:3], "--operator-report", report)
    assert str(report) in text.stdout and re.search(r"(?<![\d:.])14(?![\d:.])", text.stdout) is None


def test_where_no_report_is_written(tmp_path: Path, refused: Refused) -> None:
    job = load_job(job_of(tmp_path, USABLE))
    releases = tmp_path / "out"
    releases.mkdir()
    (tmp_path / "link").symlink_to(releases)
    for path in (releases / "a" / "r.json", tmp_path / "link" / "r.json", tmp_path / "l.db",
                 tmp_path / "in", tmp_path.parent / "none" / "none" / "r.json"):  # fmt: skip
        refused(Reporter, job, path)
    (tmp_path / "r.json").write_text(json.dumps({"file": "dpstream operator report"}))
    refused(Reporter, job, tmp_path / "r.json")  # another program's: ours has no spaces
    for words in (("init", "-q"), ("add", "r.json")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    refused(Reporter, job, tmp_path / "r.json")


def test_a_stream_may_begin_before_its_first_file(
    make_folder_job: MakeFolderJob, tmp_path: Path, refused: Refused
) -> None:
    reporter = Reporter(make_folder_job("csv", "closed"), None)
    reporter.look(False, "dpstream check daily", lambda *_: None)
    file = tmp_path / "in" / "a.csv"
    file.write_text("user,key,time,value\nu,k,noon,1\n")
    os.utime(file, (1_704_067_250, 1_704_067_250))
    refused(reporter.look, False, "dpstream check daily", lambda *_: None)


def test_a_report_of_a_pass_has_rows_by_file_and_what_was_not_expected(tmp_path: Path) -> None:
    folder, report = week(tmp_path / "job"), tmp_path / "report.json"
    write(folder, "2024-01-02", rows=7, part=1)
    write(folder, "2023-12-31", rows=5)
    flags = ("--project", folder, "--through", WEEK, "--operator-report")
    assert call("run", *flags, report).exit_code == 0
    fields = report_of(report)
    names = {f"date={day}/part-0.csv.gz": 60 for day in DAYS}
    more = {"date=2024-01-02/part-1.csv.gz": 7, "date=2023-12-31/part-0.csv.gz": 5}
    assert fields["rows_by_file"] == names | more
    assert fields["unexpected"] == ["date=2023-12-31/part-0.csv.gz"]
    by_period = {f"raw/date={day}/*.csv.gz": 1 for day in DAYS}
    assert fields["files_by_period"] == by_period | {"raw/date=2024-01-02/*.csv.gz": 2}
    counts = fields["counts"]
    assert counts["dead_time"] == 5 and sum(fields["rows_by_file"].values()) == 432
    cut, admitted = counts["pairs_rejected"], counts["pairs_admitted"]
    assert fields["cut_share"] == cut / (cut + admitted) > 0
    stores.close_all()
    file = tmp_path / "operator.prom"
    write(folder, "2024-01-08", rows=9)
    for day in range(9, 15):
        write(folder, f"2024-01-{day:02d}", rows=0)
    again = ("--project", folder, "--through", "2024-01-15", "--operator-report", file)
    assert call("run", *again).exit_code == 0 and file.stat().st_mode & 0o777 == 0o600
    samples = [s for f in text_string_to_metric_families(file.read_text()) for s in f.samples]
    values = {sample.name: sample.value for sample in samples}
    assert values["dpstream_operator_records_in"] == 9
    names_of_all = {name.name for name in (*METRICS, *DUE_METRICS)}
    assert not names_of_all & values.keys()
