"""Keeps a source from running far ahead of the releases.

Not every runner slows a source down when the stages behind it are busy (Prism does not): all of
a recording, or of a backlog, would then wait in memory, and be looked through at every trigger
time.  The backpressure delays reading and decides nothing.
"""

import time
from typing import Any

from dpstream.dp_transforms.beam.delivery import released_through
from dpstream.dp_transforms.flow import CATCH_UP_LIMIT
from dpstream.dp_transforms.run import Run

#: Rows, about, that may be ahead; and trigger times, however few rows they have.
ROWS_AHEAD = 200_000
TRIGGER_TIMES_AHEAD = 2 * CATCH_UP_LIMIT
#: Time between two questions to the store.
ASK_SECONDS = 0.05
#: How long a source that is held waits.
HELD_SECONDS = 0.02


class Backpressure:
    """Says when a source should wait, from its watermark and what the store has released.

    Args:
        run: the run that the source feeds.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._fresh()

    def _fresh(self) -> None:
        self._done, self._asked = -(1 << 62), 0.0
        self._first: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_run": self._run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._run = state["_run"]
        self._fresh()

    def holds(self, watermark: int, rows: int | None = None) -> bool:
        """Whether to wait a moment.

        A source whose watermark is within a stride of the released trigger times is never held, so
        two partitions cannot wait for each other.

        Args:
            watermark: of the source, in micros.
            rows: rows this worker's source has given, ``None``: not known.
        """
        line = self._run.plan.timeline
        if line.end is not None:
            watermark = min(watermark, line.instant_of(line.last_trigger_time))
        trigger_time = 1 + max(0, watermark - line.start) // line.trigger_every
        self._first = trigger_time if self._first is None else self._first
        passed = 0 if rows is None else trigger_time - self._first
        allowed = max(TRIGGER_TIMES_AHEAD, ROWS_AHEAD * passed // max(1, rows or 0))
        if trigger_time - self._done <= allowed:
            return False
        if time.monotonic() - self._asked >= ASK_SECONDS:
            self._done, self._asked = released_through(self._run), time.monotonic()
        return trigger_time - self._done > allowed
