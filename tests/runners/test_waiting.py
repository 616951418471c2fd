"""A launcher waits, stops, and says when nothing moves, in one plain line, ever more rarely."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.runners import waiting
from dpstream.pipelines.runners.errors import say
from dpstream.pipelines.runners.waiting import QUIET_SECONDS, Stillness, quiet_seconds
from dpstream.state import open as stores
from tests.runners.engines import launched
from tests.runners.prism import binary
from tests.runners.spike import Shape
from tests.streams import begin, make_plan


@pytest.mark.parametrize("away", [0, 2])
def test_a_stop_is_seen_whatever_the_store_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    run, calls, stop = begin(make_plan(), tmp_path / "a.db"), list[None](), threading.Event()

    def through(store: object) -> int:
        calls.append(None)
        if len(calls) <= away:
            raise RunError("store", "did not answer", "wait")
        stop.set()
        return 0

    monkeypatch.setattr(waiting, "delivered_through", through)
    flags = [f"--prism_location={binary()}"]
    with launched("PrismRunner", flags, Shape(endless=True), tmp_path) as (result, engine):
        stuck = threading.Timer(30, result.cancel)
        stuck.start()
        try:
            assert waiting.wait_or_stop(result, run, False, stop, engine)
        finally:
            stuck.cancel()
    assert len(calls) == away + 1
    stores.close_all()


def test_the_last_trigger_time_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Run = begin(make_plan(), tmp_path / "a.db")
    last = run.plan.timeline.last_trigger_time
    trigger_times = iter([0, last - 1, last])
    monkeypatch.setattr(waiting, "delivered_through", lambda store: next(trigger_times))
    flags = [f"--prism_location={binary()}"]
    with launched("PrismRunner", flags, Shape(endless=True), tmp_path) as (result, engine):
        assert waiting.wait_or_stop(result, run, False, None, engine)
    assert next(trigger_times, None) is None
    stores.close_all()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seconds_of(warnings: list[Any]) -> list[int]:
    return [int(re.findall(r"for (\d+) seconds", error.rule)[0]) for error in warnings]


def test_said_rarely_and_after_progress_anew() -> None:
    warnings: list[Any] = []
    clock = Clock()
    still = Stillness(100.0, warnings.append, clock)
    for second in range(0, 2_000, 5):
        clock.now = 1000.0 + second
        still.look((second // 1_500, 7))  # moves once, at 1,500
    assert seconds_of(warnings) == [100, 200, 400, 800, 100, 200, 400]
    assert {(error.field, error.kind) for error in warnings} == {("runner", "failed")}


def test_what_moves_is_not_still() -> None:
    warnings: list[Any] = []
    clock = Clock()
    still = Stillness(100.0, warnings.append, clock)
    for second in range(0, 5_000, 90):
        clock.now = 1000.0 + second
        still.look(second)
    assert warnings == []


def test_two_triggers_are_nothing_special() -> None:
    timeline = make_plan().timeline
    hours = timeline.trigger_every / 3_600e6
    assert quiet_seconds(timeline, live=False) == QUIET_SECONDS
    assert quiet_seconds(timeline, live=True) == max(QUIET_SECONDS, 7_200 * hours)


def test_a_stream_that_hangs_is_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline that runs and delivers nothing: said while it is waited for, on stderr."""
    run, stop, warnings = begin(make_plan(), tmp_path / "a.db"), threading.Event(), list[str]()

    def warn(error: DpstreamError | str) -> None:
        say(error)
        warnings.append(str(error))
        stop.set()

    flags = [f"--prism_location={binary()}"]
    with launched("PrismRunner", flags, Shape(endless=True), tmp_path) as (result, engine):
        stuck = threading.Timer(60, stop.set)
        stuck.start()
        try:
            assert waiting.wait_or_stop(result, run, False, stop, engine, Stillness(1.0, warn))
        finally:
            stuck.cancel()
    assert len(warnings) == 1 and "has not done a step" in warnings[0]
    assert f"Warning: {warnings[0]}\n" in capfd.readouterr().err
    stores.close_all()
