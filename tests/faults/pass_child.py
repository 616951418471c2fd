"""One pass of a job in a process of its own, which is killed with -9 at a point.

``python -m tests.faults.pass_child FOLDER THROUGH POINT``; a point is ``before`` or ``after``, a
function of `POINTS`, and which call of it.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream import passes
from dpstream.pipelines.stream.run import run_job
from dpstream.state.sqlite.store import SqliteStore
from tests.fixed_runs import fix_run_id

POINTS: dict[str, Any] = {
    "commit": passes,
    "end": passes,
    "commit_units": SqliteStore,
    "commit_step": SqliteStore,
    "write": FileSink,
}


def die_at(point: str) -> None:
    """Let the process kill itself there."""
    when, name, nth = point.split()
    owner, calls = POINTS[name], 0
    real = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if when == "before" and calls == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **named)
        if when == "after" and calls == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


if __name__ == "__main__":
    folder, through, point = sys.argv[1:]
    if point:
        die_at(point)
    fix_run_id(Path(folder))
    run_job(load_job(Path(folder) / "dpstream.toml"), through=through)
