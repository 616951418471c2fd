"""A runner's exception becomes a coded error that shows nothing of its text."""

import errno
import json
from pathlib import Path
from unittest import mock

import apache_beam as beam
import duckdb
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.telemetry import first_error
from dpstream.pipelines.runners import errors
from dpstream.pipelines.runners.errors import coded, say
from tests.growing import arrive, place
from tests.pipelines.cli.called import call

CANARY = "CANARY7741"


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


class _Interrupted(beam.DoFn):
    """What Ctrl-C does while a stage waits."""

    def process(self, element: int) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_is_none_of_the_runners_failures() -> None:
    """Beam wraps it in an error of its own, as it does every exception of a stage."""
    with pytest.raises(RuntimeError) as wrapped, beam.Pipeline("FnApiRunner") as pipeline:
        pipeline | beam.Create([1]) | beam.ParDo(_Interrupted())
    with pytest.raises(KeyboardInterrupt):
        coded(wrapped.value)


def test_a_workers_error_comes_first_where_the_exception_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_error = RunError("state", "rule", "fix")
    monkeypatch.setattr(errors, "first_error", lambda: worker_error)
    assert coded(RuntimeError("anything")) is worker_error


def test_of_text_the_class_alone_is_shown() -> None:
    refusal = coded(KeyError("SECRET-USER"))
    assert (type(refusal), refusal.field) == (RunError, "runner")
    assert "SECRET" not in str(refusal) and "KeyError" in str(refusal)
    text = "dpstream.accounting.errors.PolicyError: user.SECRET: no field of a stage"
    assert coded(RuntimeError(text)).field == "runner"


class _OfAModule(RunError):
    """A class that is defined elsewhere."""


def test_an_error_of_a_remote_worker_is_one_that_is_known_word_for_word() -> None:
    samples = [RunError("table visits", "has no row", "add one"), _OfAModule("x", "is y", "do z")]
    for one in samples:
        text = (
            f"java.lang.Error: ...\ndpstream.some.where.{type(one).__name__}: {one} [while running"
        )
        assert coded(RuntimeError(text), samples) is one
    for text in ("dpstream.RunError: table SECRET: has no row. Fix: add one.",
                 "dpstream.RunError: table visits: has no SECRET. Fix: add one.",
                 "dpstream.PolicyError: table visits: has no row. Fix: add one."):  # fmt: skip
        refusal = coded(RuntimeError(text), samples)
        assert refusal.field == "runner" and "SECRET" not in str(refusal)
    text = "dpstream.accounting.errors.PolicyError: secret: is not the key. Fix: no."
    assert coded(RuntimeError(text)).field == "secret"


LIMITS = (
    MemoryError(CANARY), pa.ArrowMemoryError(CANARY), duckdb.OutOfMemoryException(CANARY),
    RuntimeError("can't start new thread"), OSError(errno.ENOMEM, CANARY),
)  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: type(limit).__name__)
def test_a_memory_limit_in_a_stage_is_named_whatever_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: Exception
) -> None:
    monkeypatch.setattr(errors, "first_error", first_error)
    arrive(place(tmp_path), 9)
    with mock.patch.object(flow, "seal", side_effect=limit):
        done = call("run", "--project", tmp_path, "--json")
    assert done.exit_code == 4
    refusal = json.loads(done.stderr.strip().splitlines()[-1])
    assert refusal["field"] == "memory" and "stage." in refusal["rule"]
    assert "threads = 1" in refusal["fix"]
    assert CANARY not in done.output and type(limit).__name__ not in done.output


@pytest.mark.parametrize(
    "text",
    [
        "Traceback: x\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate",
        "dpstream.accounting.errors.RunError: memory: there is not enough for stage.bound. Fix",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "RuntimeError: can't start new thread",
    ],
)
def test_a_memory_limit_of_a_worker_elsewhere_is_told_by_its_text(text: str) -> None:
    for error in (RuntimeError(text + CANARY), MemoryError(CANARY)):
        refusal = coded(error)
        assert (type(refusal), refusal.field) == (RunError, "memory")
        assert CANARY not in str(refusal) and "Error" not in str(refusal)


@pytest.mark.parametrize("field", ["public_keys", "account.limit", "table", "records", "shards"])
def test_the_field_of_a_worker_elsewhere_is_told(field: str) -> None:
    refusal = coded(RuntimeError(f"x dpstream.accounting.errors.PolicyError: {field}: no. Fix: y."))
    assert (type(refusal), refusal.field) == (PolicyError, field)


def test_a_warning_is_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("plain words")
    assert capsys.readouterr() == ("", "Warning: plain words\n")
