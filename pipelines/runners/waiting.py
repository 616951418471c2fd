"""Waiting for a pipeline that may never end by itself, and the report that it does not advance."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.beam.delivery import delivered_through
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import deliveries, steps_done
from dpstream.pipelines.runners.errors import Warn, say
from dpstream.pipelines.runners.table import Engine

#: Seconds without a step after which it is said, at least.
QUIET_SECONDS = 120.0
_LOOK_SECONDS = 0.2
#: Looks between two questions to the store.
_ASK_EVERY = 5
#: Looks between two at the engine's ports.
_CHECK_EVERY = 10
#: A terminal's interrupt ends a runner's processes too, perhaps before this one has heard of it.
_HEAR_SECONDS = 1.0


def quiet_seconds(timeline: Timeline, live: bool) -> float:
    """Return the seconds without a step after which a stream is reported: two triggers.

    Args:
        timeline: the public time axis.
        live: whether event time is the time of the clock; else input is read as fast as it can be.
    """
    triggers = 2 * timeline.trigger_every / MICROS_PER_SECOND if live else 0.0
    return max(QUIET_SECONDS, triggers)


class Stillness:
    """Compares a public sign of progress, and reports that it has not changed for long.

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
        """Compare the sign with the last one: a change is progress."""
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


def wait_or_stop(
    result: Any,
    run: Run,
    bounded: bool,
    stop: threading.Event | None = None,
    engine: Engine | None = None,
    stillness: Stillness | None = None,
) -> bool:
    """Wait until a pipeline ends, is told to stop, or has delivered the plan's last trigger time.

    A source without end has none of its own: the job's last trigger time is where such a run is
    done.

    Args:
        result: what ``pipeline.run()`` gave.
        run: the run.
        bounded: the input ends, and the pipeline with it.
        stop: set to cancel the pipeline.
        engine: what runs it: drained before a cancel, refused if other machines reach it.
        stillness: is shown what has been done.

    Returns:
        Whether it was cancelled.  What the runner raises for other reasons goes through, and so
        does what the engine's own ``cancel`` and ``check`` raise.
    """
    watcher = _Watcher(result, run, bounded, stop, engine, stillness)
    watcher.start()
    try:
        result.wait_until_finish()
    except Exception:
        # A runner reports a cancelled pipeline as a failed one.
        if not (watcher.cancelled or (stop is not None and stop.wait(_HEAR_SECONDS))):
            raise
        watcher.cancelled = True
    finally:
        watcher.end()
    if watcher.failed is not None:
        raise watcher.failed
    return watcher.cancelled


class _Watcher(threading.Thread):
    """Cancels a pipeline that is told to stop, or whose last trigger time is delivered."""

    def __init__(
        self,
        result: Any,
        run: Run,
        bounded: bool,
        stop: threading.Event | None,
        engine: Engine | None,
        stillness: Stillness | None,
    ) -> None:
        super().__init__(daemon=True)
        self._result, self._run, self._bounded = result, run, bounded
        self._stop_event, self._engine, self._still = stop, engine, stillness
        self._ended = threading.Event()
        self.cancelled = False
        self.failed: DpstreamError | None = None

    def run(self) -> None:
        """Look again and again until the pipeline has ended or is cancelled."""
        looks, through = 0, False
        while not through and not self._ended.wait(_LOOK_SECONDS):
            looks += 1
            # A store that does not answer now is asked again: a watcher that died of it would
            # never see the stop.
            with contextlib.suppress(Exception):
                through = self._look(looks)

    def _look(self, looks: int) -> bool:
        delivered = None
        if not self._bounded and looks % _ASK_EVERY == 0:
            delivered = _delivered(self._run)
        stop_requested = self._stop_event is not None and self._stop_event.is_set()
        done = delivered is not None and _complete(self._run, delivered)
        if self._engine is not None and looks % _CHECK_EVERY == 0:
            try:  # it may have opened a port to other machines since it began
                self._engine.check()
            except DpstreamError as error:
                self.failed = error
        if not stop_requested and not done and self.failed is None:
            if self._still is not None and (self._bounded or delivered is not None):
                self._still.look((steps_done(), delivered))
            return False
        self.cancelled = True
        if self._engine is not None and self.failed is None:
            self._engine.drain()
        with contextlib.suppress(Exception):  # it may have ended, or its runner gone
            self._result.cancel()
        try:
            if self._engine is not None and self._engine.cancel is not None:
                self._engine.cancel()
        except DpstreamError as error:
            self.failed = error
        return True

    def end(self) -> None:
        """The pipeline has ended."""
        self._ended.set()
        self.join()


def _delivered(run: Run) -> int:
    """Last trigger time that is delivered, as the store knows."""
    timeline, through = run.plan.timeline, delivered_through(run.open())
    if through:  # known here whatever process the sink's stage runs in
        deliveries.reached(timeline.instant_of(through))
    return through


def _complete(run: Run, through: int) -> bool:
    timeline = run.plan.timeline
    return timeline.end is not None and through >= timeline.last_trigger_time
