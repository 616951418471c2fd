"""P7: every channel is searched, and a product that leaks into one is caught in that one."""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from apache_beam.metrics import Metrics

from dpstream.accounting import guarantee
from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import flow, step, telemetry
from dpstream.dp_transforms.beam.split import SplitByShard
from dpstream.pipelines.connectors.files import sink as sink_files
from dpstream.state import open as stores
from tests.audit.channels import leaks, observe, opened
from tests.audit.leaks import KEY, UNIT, VALUE, make_job
from tests.audit.test_leaks import ERRORS, PLACES, Forced
from tests.written import read_dead_letters

Leak = contextlib.AbstractContextManager[Any]


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield
    stores.close_all()
    logging.disable(logging.NOTSET)


def _first(owner: Any, name: str, leak: Callable[[], Any]) -> Leak:
    """The function leaks before it does its work."""
    real = getattr(owner, name)

    def patch(*args: Any, **options: Any) -> Any:
        leak()
        return real(*args, **options)

    return mock.patch.object(owner, name, patch)


def _write(name: str, content: str) -> None:
    (Path(tempfile.gettempdir()) / name).write_text(content)


@contextlib.contextmanager
def _texts_in_errors() -> Iterator[None]:
    """A stage fails, and the door lets the text of the error out."""

    def outgoing(stage: str, error: Exception) -> RunError:
        return RunError(f"stage.{stage}", f"failed with {error}", "ask")

    with (
        mock.patch.object(telemetry, "_outgoing", outgoing),
        mock.patch.object(step, "aggregate", Forced(ERRORS[1])),
    ):
        yield


def _pickled_hint() -> Leak:
    """A function of the pipeline keeps what it should not."""
    real = SplitByShard.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._hint = f"{UNIT} is on many keys, {VALUE}"

    return mock.patch.object(SplitByShard, "__init__", init)


def _letters_with_values(real: Any) -> Leak:
    """Reasons that quote what was refused."""

    def read(folder: Any) -> pa.Table:
        table = real(folder)
        return table.append_column("text", pa.array([VALUE] * table.num_rows))

    return mock.patch("tests.audit.channels.read_dead_letters", read)


def _named_release() -> Leak:
    return mock.patch.object(
        sink_files, "release_path",
        lambda window, trigger, kind: Path(f"window-{window:06d}/{KEY}-{trigger:06d}.{kind}"),
    )  # fmt: skip


#: What leaks, and the channel that must show it.
LEAKY: dict[str, tuple[Callable[[], Leak], str]] = {
    "a stage logs a unit": (
        lambda: _first(
            flow, "decide_records", lambda: logging.getLogger("beam").info("unit %s", UNIT)
        ),
        "logs",
    ),
    "a stage logs a value": (
        lambda: _first(step, "publish", lambda: logging.getLogger("x").warning(VALUE)), "logs",
    ),
    "a print": (lambda: _first(step, "aggregate", lambda: print(KEY)), "stdout"),
    "a print to stderr": (
        lambda: _first(step, "aggregate", lambda: print(KEY, file=sys.stderr)), "stderr",
    ),
    "errors with their text": (_texts_in_errors, "exceptions"),
    "a counter named by a key": (
        lambda: _first(
            flow, "seal", lambda: Metrics.counter("dpstream", f"records of {KEY}").inc()
        ),
        "metrics",
    ),
    "an operator's counter named by a unit": (
        lambda: _first(flow, "seal", lambda: telemetry.operator_totals.update({UNIT: 3})),
        "metrics",
    ),
    "display data": (
        lambda: mock.patch.object(
            SplitByShard, "display_data", lambda self: {"busiest": KEY}, create=True
        ),
        "display data",
    ),
    "a pickled function": (_pickled_hint, "pipeline"),
    "a plan that looked at data": (
        lambda: mock.patch.object(guarantee, "_unit", lambda plan: f"like {UNIT}"), "plan",
    ),
    "a result": (
        lambda: _first(flow, "seal", lambda: telemetry.operator_totals.update({KEY: 3})), "result",
    ),
    "dead letters that quote": (
        lambda: _letters_with_values(read_dead_letters), "dead letters",
    ),
    "a release named by a key": (_named_release, "files"),
    "a temporary file": (
        lambda: _first(step, "aggregate", lambda: _write("part", VALUE)), "temporary files",
    ),
    "the name of a temporary file": (
        lambda: _first(step, "aggregate", lambda: _write(KEY, "")), "temporary files",
    ),
}  # fmt: skip


def test_a_good_run_leaks_nowhere(tmp_path: Path) -> None:
    channels = observe(make_job(tmp_path / "job"), tmp_path / "tmp")
    assert leaks(channels) == set()
    # The channels were there to be searched.
    for name in ("metrics", "display data", "pipeline", "plan", "dead letters"):
        assert len(channels[name]) > 10, name
    # A run that ends within the first interval reports once: at its end.
    progress = channels["progress"]
    assert isinstance(progress, str) and progress.splitlines()[-1] == "(8, 8)"
    packed = channels["pipeline"]
    assert isinstance(packed, bytes) and b"SplitByShard" in packed and b"_schema" in packed


@pytest.mark.parametrize("name", LEAKY)
def test_a_leak_is_caught(tmp_path: Path, name: str) -> None:
    patch, channel = LEAKY[name]
    job = make_job(tmp_path / "job")
    with patch():
        channels = observe(job, tmp_path / "tmp")
    assert channel in leaks(channels)


@pytest.mark.parametrize("number", range(0, len(PLACES), 4))
def test_failed_runs_leak_nowhere(tmp_path: Path, number: int) -> None:
    """All channels of runs that fail (test_leaks searches the streams of every place)."""
    forced = Forced(ERRORS[number % len(ERRORS)])
    job = make_job(tmp_path / "job")
    with mock.patch.object(*PLACES[number], forced):
        channels = observe(job, tmp_path / "tmp")
    assert forced.calls and channels["exceptions"]
    assert leaks(channels) == set()


def test_packed_bytes_are_opened() -> None:
    import base64
    import bz2

    packed = base64.b64encode(bz2.compress(f"a rather long text on {UNIT}".encode() * 3))
    assert UNIT.encode() in opened(b"\x00\x01" + packed + b"\x02")
