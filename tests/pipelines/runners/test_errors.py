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


class _OfAModule(RunError):
    """A class that is defined elsewhere."""


def test_an_error_of_a_remote_worker_is_one_that_is_known_word_for_word() -> None:
    known = [RunError("table visits", "has no row", "add one"), _OfAModule("x", "is y", "do z")]
    for one in known:
        text = (
            f"java.lang.Error: ...\ndpstream.some.where.{type(one).__name__}: {one} [while running"
        )
        assert coded(RuntimeError(text), known) is one
    for text in ("dpstream.RunError: table SECRET: has no row. Fix: add one.",
                 "dpstream.RunError: table visits: has no SECRET. Fix: add one.",
                 "dpstream.PolicyError: table visits: has no row. Fix: add one."):  # fmt: skip
        found = coded(RuntimeError(text), known)
        assert found.field == "runner" and "SECRET" not in str(found)
    text = "dpstream.accounting.errors.PolicyError: privacy.key_file: is not the key. Fix: no."
    assert coded(RuntimeError(text)).field == "privacy.key_file"


def test_a_warning_is_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("plain words")
    assert capsys.readouterr() == ("", "warning: plain words\n")
