"""Recorded files in place of a live stream: ``dpstream`` with its files read at a speed.

    python -m tests.paced 60 run daily --runner=PrismRunner     # an hour of stream in a minute

Only the time changes at which rows leave: not their order, their positions or a released byte.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from unittest import mock

from typing_extensions import override

from dpstream.pipelines.cli.main import main
from dpstream.pipelines.connectors.files.stream import (
    OpenPieces,
    Recording,
    Slice,
    StreamFiles,
    StreamReader,
)
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.stream import run
from tests.fixed_runs import fix_run_id

#: Rows that leave together, so that many parts are due one after the other.
PART_ROWS = 64
#: Wait before the reader is asked again.
WAIT_SECONDS = 0.02


class PacedPieces(OpenPieces):
    """Parts leave when the stream's time has reached them.

    The time is that of the first part asked for, and goes on from there; so a worker that takes
    over goes on where the other one stopped.
    """

    def __init__(self, recording: Recording, speed: float) -> None:
        super().__init__(recording)
        self._speed, self._begun = speed, time.monotonic()
        self._origin: int | None = None

    @override
    def slices(self, first: int) -> Iterator[Slice]:
        due = self.index.due[first:].tolist()
        if self._origin is None and due:
            self._origin, self._begun = due[0], time.monotonic()
        for number, instant in enumerate(due, first):
            passed = (time.monotonic() - self._begun) * self._speed
            if instant > (self._origin or 0) + passed * 1e6:
                time.sleep(WAIT_SECONDS)
                return
            yield from islice(super().slices(number), 1)


class PacedReader(StreamReader):
    """The reader of such parts."""

    def __init__(self, recording: Recording, speed: float) -> None:
        super().__init__(recording._replace(batch_rows=min(PART_ROWS, recording.batch_rows)))
        self._speed = speed

    @override
    def open(self) -> OpenPieces:
        return PacedPieces(self.recording, self._speed)


class Paced(StreamFiles):
    """A job's files as a stream of ``speed`` seconds a second."""

    speed = 1.0

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.reader = PacedReader(self.reader.recording, self.speed)


@contextmanager
def paced(speed: float) -> Iterator[None]:
    """Read the files of runs on streaming runners at a speed."""
    with (
        mock.patch.object(Paced, "speed", speed),
        mock.patch.object(run, "StreamFiles", Paced),
    ):
        yield


if __name__ == "__main__":
    with paced(float(sys.argv.pop(1))):
        fix_run_id(Path.cwd())
        main()
