"""Saying that nothing moves, where an engine would wait for ever without a word."""

import sys
import time
from collections.abc import Callable

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.timeline import Timeline

#: Seconds without a step after which it is said, at least.
QUIET_SECONDS = 120.0
#: Told what is to be said.
Warn = Callable[[DpstreamError | str], None]


def say(warning: DpstreamError | str) -> None:
    """One plain line on stderr."""
    print(f"warning: {warning}", file=sys.stderr, flush=True)


def quiet_seconds(line: Timeline, speed: float | None, live: bool) -> float:
    """How long a stream may be without a step before that is worth a word: two triggers.

    Args:
        line: the public time axis.
        speed: seconds of stream a second, of a recording; ``None``: as fast as it can be read.
        live: its time is that of the clock.
    """
    if not live and speed is None:
        return QUIET_SECONDS
    return max(QUIET_SECONDS, 2 * line.trigger_every / MICROS_PER_SECOND / (speed or 1.0))


class Stillness:
    """Looks at a public sign of progress, and says that it has not changed for long.

    It is said again when it has lasted twice as long, four times as long, and so on.

    Args:
        quiet: seconds that are nothing special.
        warn: told of longer ones.
        clock: seconds that only grow.
    """

    def __init__(
        self, quiet: float, warn: Warn = say, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet, self._warn, self._clock = quiet, warn, clock
        self._sign: object = None
        self._since, self._next = clock(), quiet

    def look(self, sign: object) -> None:
        """The sign now; any change is progress."""
        now = self._clock()
        if sign != self._sign:
            self._sign, self._since, self._next = sign, now, self._quiet
        elif now - self._since >= self._next:
            self._next *= 2
            self._warn(
                RunError(
                    "runner",
                    f"has not done a step for {now - self._since:.0f} seconds",
                    "wait if the input is still being read; else see that the workers, their pool"
                    " and the cluster run and that the source answers",
                )
            )
