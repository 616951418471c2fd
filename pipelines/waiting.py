"""Waiting for a pipeline that may never end by itself."""

import contextlib
import threading
from typing import Any

from dp_transforms.delivery import delivered_through
from dp_transforms.run import Run
from dp_transforms.telemetry import deliveries

_LOOK_SECONDS = 0.2
#: Looks between two questions to the store.
_ASK_EVERY = 5


def wait_or_stop(result: Any, run: Run, bounded: bool, stop: threading.Event | None = None) -> bool:
    """Wait until a pipeline ends, is told to stop, or has delivered the plan's last cut.

    A source without end has none of its own: the job's last cut is where such a run is done.

    Args:
        result: what ``pipeline.run()`` gave.
        run: the run.
        bounded: the input ends, and the pipeline with it.
        stop: set to cancel the pipeline.

    Returns:
        Whether it was cancelled.  What the runner raises for other reasons goes through.
    """
    if bounded and stop is None:
        result.wait_until_finish()
        return False
    ended, cancelled = threading.Event(), threading.Event()

    def look(ask: bool) -> bool:
        done = ask and _complete(run)
        if done or (stop is not None and stop.is_set()):
            cancelled.set()
            result.cancel()
            return True
        return False

    def watch() -> None:
        looks, through = 0, False
        while not through and not ended.wait(_LOOK_SECONDS):
            looks += 1
            # A store or an engine that does not answer now is asked again: a watcher that died
            # of it would never see the stop.
            with contextlib.suppress(Exception):
                through = look(not bounded and looks % _ASK_EVERY == 0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result.wait_until_finish()
    except Exception:
        if not cancelled.is_set():  # a runner reports a cancelled pipeline as a failed one
            raise
    finally:
        ended.set()
        watcher.join()
    return cancelled.is_set()


def _complete(run: Run) -> bool:
    line, through = run.plan.timeline, delivered_through(run.open())
    if through:  # known here whatever process the sink's stage runs in
        deliveries.reached(line.cut_time(through))
    return line.end is not None and through >= line.last_cut
