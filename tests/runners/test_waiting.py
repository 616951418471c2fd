"""A launcher waits, stops, and says when nothing moves, in one plain line, ever more rarely."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.runners import waiting
from dpstream.pipelines.runners.errors import say
from dpstream.pipelines.runners.job_servers import descendants
from dpstream.pipelines.runners.waiting import QUIET_SECONDS, Stillness, quiet_seconds
from dpstream.state import open as stores
from tests.faults.live_jobs import Growing, Live
from tests.runners.engines import ROOT, launched, need_flink
from tests.runners.golden import golden_job, write_stream
from tests.runners.prism import binary, wait_for
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


# A streaming run that succeeds ends without a traceback, whoever ends it.


#: Runs a job as the command does, with all that is logged, and Python's own hook for threads.
LOUD = """\
import logging, sys
logging.basicConfig(level=logging.WARNING)
from pathlib import Path
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.cli.parts import stop_signals
from dpstream.pipelines.stream.run import run_job
with stop_signals(True) as stop:
    run_job(load_job(Path(sys.argv[1]), sys.argv[2]), sys.argv[3], sys.argv[4:], stop=stop)
print("done")
"""
#: What a thread, a bundle or a closed connection leaves on stderr.
NOISE = ("Traceback", "Exception in thread", "ERROR", "were destroyed", "failed with")
#: Prism's word for a bundle that it had asked for when its job was cancelled.
TRUE = "ERROR:PrismRunner:Bundle Failed. (error='pipeline canceled')\n"


def flags_of(runner: str) -> list[str]:
    if runner == "FlinkRunner":
        need_flink()
        return ["--parallelism=2"]
    return [f"--prism_location={binary()}"]


def loud(folder: Path, job: str, runner: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOUD, str(folder), job, runner, *flags_of(runner)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "err").open("w") as err:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True,
                                env=environment)  # fmt: skip


def check(run: subprocess.Popen[str], folder: Path) -> None:
    out, _ = run.communicate(timeout=600)
    err = (folder / "err").read_text().replace(TRUE, "")
    assert (out, run.returncode) == ("done\n", 0), err
    assert not any(word in err for word in NOISE), err


@pytest.mark.parametrize("runner", ["PrismRunner", "FlinkRunner"])
def test_a_recording_to_its_end(runner: str, tmp_path: Path) -> None:
    (tmp_path / "stream").mkdir()
    write_stream(tmp_path / "stream", users=300)
    golden_job("plain", tmp_path / "stream", tmp_path / "job")
    check(loud(tmp_path / "job", "golden", runner), tmp_path / "job")


@pytest.mark.parametrize("how", ["its last trigger time", "SIGTERM"])
def test_a_growing_folder(how: str, tmp_path: Path) -> None:
    """Its pipeline is cancelled, by the launcher or by a person, in the middle of its bundles."""
    live: Live = Growing(tmp_path / "job")
    feeder = live.feeding()
    for _ in range(2 if how == "SIGTERM" else 1):
        run = loud(tmp_path / "job", "live", "PrismRunner")
        if how == "SIGTERM" and not live.seen():
            wait_for(lambda: live.seen() > 1)
            run.send_signal(signal.SIGTERM)
        check(run, tmp_path / "job")
    feeder.join()
    assert time.time() > live.end


def test_the_command_says_nothing_more(tmp_path: Path) -> None:
    live = Growing(tmp_path / "job")
    feeder = live.feeding()
    live.finish()
    feeder.join()
    error_text = (tmp_path / "job" / "live.errors").read_text()
    assert not any(word in error_text for word in (*NOISE, "warning:")), error_text


def test_an_engine_that_is_killed(tmp_path: Path) -> None:
    """Its end is said in one line, and the same command goes on."""
    live = Growing(tmp_path / "job")
    feeder, run = live.feeding(), live.run()
    wait_for(lambda: live.seen() > 1)
    [engine] = [
        pid for pid in descendants(run.pid) if Path(f"/proc/{pid}/comm").read_text() == "prism\n"
    ]
    os.kill(engine, signal.SIGKILL)
    assert run.wait(timeout=120) == 4
    errors = [line for line in live.log_tail().splitlines() if line.startswith("failed")]
    assert len(errors) == 1 and "lost its connection" in errors[0], errors
    assert "Rendezvous" not in live.log_tail() and "Rpc" not in live.log_tail()
    live.finish()
    feeder.join()
    live.check()


def test_the_command_tells_of_a_thread_that_fails() -> None:
    """By its class: the text may hold data.  So silence above is not a hook that says nothing."""
    program = (
        "import threading; from dpstream.pipelines.cli import main\n"
        "main.cli = lambda **_: None\n"
        "main.main()\n"
        "def fails(): raise KeyError('CANARY')\n"
        "t = threading.Thread(target=fails, name='x'); t.start(); t.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr.strip().startswith("failed: thread x: failed with KeyError. Fix: ")
    assert "CANARY" not in done.stderr
