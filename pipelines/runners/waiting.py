"""Waiting for a pipeline that may never end by itself."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from accounting.errors import DpstreamError
from dp_transforms.delivery import delivered_through
from dp_transforms.run import Run
from dp_transforms.telemetry import deliveries

_LOOK_SECONDS = 0.2
#: Looks between two questions to the store.
_ASK_EVERY = 5
#: A terminal's interrupt ends a runner's processes too, perhaps before this one has heard of it.
_HEAR_SECONDS = 1.0


def wait_or_stop(
    result: Any,
    run: Run,
    bounded: bool,
    stop: threading.Event | None = None,
    cancel: Callable[[], None] | None = None,
) -> bool:
    """Wait until a pipeline ends, is told to stop, or has delivered the plan's last cut.

    A source without end has none of its own: the job's last cut is where such a run is done.

    Args:
        result: what ``pipeline.run()`` gave.
        run: the run.
        bounded: the input ends, and the pipeline with it.
        stop: set to cancel the pipeline.
        cancel: to be called after the runner's own cancel (see `pipelines.runners.table.Engine`).

    Returns:
        Whether it was cancelled.  What the runner raises for other reasons goes through, and so
        does what ``cancel`` raises.
    """
    if bounded and stop is None:
        result.wait_until_finish()
        return False
    watcher = _Watcher(result, run, bounded, stop, cancel)
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
    """Cancels a pipeline that is told to stop, or whose last cut is delivered."""

    def __init__(
        self,
        result: Any,
        run: Run,
        bounded: bool,
        stop: threading.Event | None,
        cancel: Callable[[], None] | None,
    ) -> None:
        super().__init__(daemon=True)
        self._result, self._run, self._bounded = result, run, bounded
        self._stop_event, self._cancel, self._ended = stop, cancel, threading.Event()
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
                through = self._look(not self._bounded and looks % _ASK_EVERY == 0)

    def _look(self, ask: bool) -> bool:
        told = self._stop_event is not None and self._stop_event.is_set()
        if not told and not (ask and _complete(self._run)):
            return False
        self.cancelled = True
        with contextlib.suppress(Exception):  # it may have ended, or its runner gone
            self._result.cancel()
        try:
            if self._cancel is not None:
                self._cancel()
        except DpstreamError as error:
            self.failed = error
        return True

    def end(self) -> None:
        """The pipeline has ended."""
        self._ended.set()
        self.join()


def _complete(run: Run) -> bool:
    line, through = run.plan.timeline, delivered_through(run.open())
    if through:  # known here whatever process the sink's stage runs in
        deliveries.reached(line.cut_time(through))
    return line.end is not None and through >= line.last_cut


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """SIGINT keeps its handler: Beam's would end the job server while its job is being stopped."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
