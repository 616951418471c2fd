"""One `dpstream workload answer` through the register, in a process that may be killed anywhere.

What was drawn before the kill is noted beside the job, as somebody who watched the memory could:
the answer that comes in the end must be made of it.
"""

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpstream.pipelines.ask import folder as folders
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.workload import registered, release
from dpstream.pipelines.workload.estimate import Estimate, TableEstimate
from dpstream.state.ledger.answers import AnswerLog

#: Where a process can be told to die, in the order in which it passes them.
POINTS = (
    "before begin", "after begin", "before bounded", "after bounded", "after draw",
    "before commit", "after commit", "before publish_folder", "after publish_folder",
)  # fmt: skip
#: From here on the charge is made, and from here on something was drawn.
CHARGED, DRAWN = POINTS.index("after begin"), POINTS.index("after draw")
NOTES = "drawn.txt"


def answer(folder: Path, option: str, point: str | None) -> None:
    """Type the command; die at a point."""
    flags = [option, "--out", "out", "--cache", "cache", "--json"]
    with inside(folder), faulty(folder, point):
        cli(["workload", "answer", "asked.json", *flags], standalone_mode=False)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Files are named from here."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def digest(estimate: Estimate | TableEstimate) -> str:
    """Names what was drawn."""
    parts = [estimate.cells] if isinstance(estimate, Estimate) else estimate.measured
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()


@contextlib.contextmanager
def faulty(folder: Path, point: str | None) -> Iterator[None]:
    """Note what is drawn, and die where told to."""

    def at(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            at(f"before {name}")
            result = real(*args, **options)
            at(f"after {name}")
            return result

        return mock.patch.object(owner, name, called)

    def write_estimate(into: Path, estimate: Any) -> None:
        """Called behind a draw alone: later the estimate comes from the archive."""
        with open(folder / NOTES, "a") as file:
            file.write(digest(estimate) + "\n")
        at("after draw")
        release.write_estimate(into, estimate)

    with contextlib.ExitStack() as stack:
        for owner, name in ((AnswerLog, "begin"), (registered, "bounded"), (AnswerLog, "commit"),
                            (folders, "publish_folder")):  # fmt: skip
            stack.enter_context(around(owner, name))
        stack.enter_context(mock.patch.object(registered, "write_estimate", write_estimate))
        yield
