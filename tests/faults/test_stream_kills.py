"""kill -9 of a whole streaming job on Prism, started again on its store until it is done.

The longer run: ``pytest -m slow -s tests/faults/test_stream_kills.py``.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.live_jobs import Growing, Live, Recorded, Topic, disturbed
from tests.kafka_broker import Broker
from tests.runners.prism import wait_for

#: Of each source: runs of the longer test, kills in each, seconds of stream.
RUNS, KILLS, SECONDS = 6, 7, 32
KINDS = ("replay", "folder", "kafka")


def make(
    kind: str,
    folder: Path,
    request: pytest.FixtureRequest,
    seconds: int = 8,
    skips: bool = False,
) -> Live:
    if kind == "kafka":
        broker: Broker = request.getfixturevalue("kafka")
        return Topic(broker, folder, seconds, skips)
    return (Recorded if kind == "replay" else Growing)(folder, seconds, skips=skips)


@pytest.mark.parametrize("skips", [False, True], ids=["listed", "skip"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_started_again(
    kind: str, skips: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    live = make(kind, tmp_path / "job", request, skips=skips)
    feeder = live.feeding()
    if kind == "replay":
        feeder.join()
    assert disturbed(live, 2, 7) > 0
    feeder.join()
    live.check()


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["listed", "skip"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_many_times(
    kind: str, skips: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    between = kills = 0
    for run in range(RUNS):
        live = make(kind, tmp_path / f"job{run}", request, SECONDS, skips)
        feeder = live.feeding()
        if kind == "replay":
            feeder.join()
        between += disturbed(live, KILLS, run)
        kills += KILLS
        feeder.join()
        live.check()
    print(
        f"\nF3 {kind} on Prism: {kills} kills over {RUNS} runs ({between} after the first release):"
        " every row counted, all files as undisturbed"
    )


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Ctrl-C"])
def test_a_signal_stops_it(how: str, tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to the runner's processes, too."""
    live = Growing(tmp_path / "job")
    feeder, process = live.feeding(), live.run()
    wait_for(lambda: live.seen() > 1, 120)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    assert process.wait(60) == 0, live.log_tail()
    assert "stopped; run it again to go on" in (live.folder / "live.out").read_text()
    assert "all triggers done" in live.finish()
    feeder.join()
    live.check()
