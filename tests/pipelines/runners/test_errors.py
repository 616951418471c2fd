"""A runner's exception becomes a coded error that shows nothing of its text."""

import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.runners import errors
from dpstream.pipelines.runners.errors import coded, say


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "first_error", lambda: None)


def test_a_coded_cause_is_found_however_deep() -> None:
    cause = PolicyError("sink.kind", "rule", "fix")
    middle = ValueError("of Beam")
    middle.__context__ = cause
    outer = RuntimeError("of a runner")
    outer.__cause__ = middle
    assert coded(outer) is cause


def test_a_workers_error_comes_first_where_the_exception_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = RunError("state", "rule", "fix")
    monkeypatch.setattr(errors, "first_error", lambda: told)
    assert coded(RuntimeError("anything")) is told


def test_of_text_the_class_alone_is_shown() -> None:
    found = coded(KeyError("SECRET-USER"))
    assert (type(found), found.field) == (RunError, "runner")
    assert "SECRET" not in str(found) and "KeyError" in str(found)
    text = "dpstream.accounting.errors.PolicyError: user.SECRET: no field of a stage"
    assert coded(RuntimeError(text)).field == "runner"


def test_a_warning_is_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("plain words")
    assert capsys.readouterr() == ("", "warning: plain words\n")
