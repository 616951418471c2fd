"""The database is away for a while in the middle of a stream: it waits, and all is delivered.

The longer run, a minute each: ``pytest -m slow tests/faults/test_store_away.py``.
"""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dpstream.state.sqlite.database import sqlite3
from tests import emulator
from tests.faults.live_jobs import LATENESS, WINDOW, Growing, Live
from tests.faults.places import places
from tests.relay import Relay
from tests.runners.prism import wait_for

SECONDS = 24
#: Triggers of all windows, times two shards.
STEPS = SECONDS // WINDOW * (WINDOW + LATENESS) * 2
MINUTE = [3, pytest.param(65, marks=pytest.mark.slow)]


def through(live: Live, away: Callable[[], None]) -> None:
    """The job lives through what happens after its first releases."""
    feeder, process = live.feeding(), live.run()
    wait_for(lambda: live.seen() > 1 or process.poll() is not None, 180)
    away()
    assert process.poll() is None, live.log_tail()
    live.finish("live", process)
    feeder.join()
    live.check()


@pytest.mark.parametrize("seconds", MINUTE)
def test_another_process_has_locked_the_file(seconds: float, tmp_path: Path) -> None:
    live = Growing(tmp_path / "job", SECONDS)

    def away() -> None:
        with closing(sqlite3.connect(live.folder / "s.db", isolation_level=None, timeout=60)) as db:
            db.execute("BEGIN IMMEDIATE")
            (steps,) = db.execute("SELECT count(*) FROM steps").fetchone()
            assert steps < STEPS, "the job was through before it could be disturbed"
            time.sleep(seconds)
            db.execute("ROLLBACK")

    through(live, away)


@pytest.mark.parametrize("seconds", MINUTE)
def test_spanner_cannot_be_reached(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with places("spanner", tmp_path) as fresh:
        url, relay = fresh(), Relay(os.environ[emulator.HOST])
        live = Growing(tmp_path / "job", SECONDS, store=url)
        with monkeypatch.context() as patch:
            patch.setenv(emulator.HOST, relay.host)

            def away() -> None:
                relay.down()
                try:
                    assert live.seen() < STEPS // 2
                    time.sleep(seconds)
                finally:
                    relay.up()

            through(live, away)
        relay.down()
