"""The only module of the flow that logs, counts (by an allow-list) or lets errors leave.

Beam puts the text of an exception into logs and job messages, and an exception of a library
can quote a record.  ``guarded`` wraps every DoFn method and the coder: what leaves is the
stage's name and the class of the error, without the error itself as its hidden context.  In the
process that began the run the traceback goes to a private log (`state.private_log`).
"""

import bisect
import contextlib
import copy
import functools
import inspect
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from apache_beam.metrics import Metrics

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.state.private_log import unexpected

#: Counters that anybody may see: functions of the plan, of faults and of the public clock.
PUBLIC_COUNTERS = ("steps_committed", "steps_reemitted", "releases_sealed", "releases_delivered")
#: Exact record counts are for the operator, never for release.
PRIVATE_COUNTERS = (
    "operator_records_in",
    "operator_dead_letters",
    *(f"operator_dead_{reason}" for reason in ("unit", "key", "time", "late", "value")),
    "operator_dead_not_public",
    "operator_dead_record_id",
    "operator_dead_source",
    "operator_pairs_admitted",
    "operator_pairs_rejected",
    "operator_pairs_late",
    "operator_records_undelivered",
    "operator_copies_left_out",
)
#: Counters that may exist.
OPERATOR_COUNTERS = (*PRIVATE_COUNTERS, *PUBLIC_COUNTERS)
#: Upper bounds in seconds of what a latency is counted in.
LATENCY_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
#: Trigger times whose passing is remembered until their releases are delivered.
_TRIGGER_TIMES_KEPT = 1_000


Result = TypeVar("Result")

#: Amounts by the counter's name.
Counts = Counter[str]


class _Apart(threading.local):
    """Counts of a thread that does not count for the runner."""

    counts: Counts | None = None


_apart = _Apart()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter of the pipeline.

    Raises:
        ValueError: it is not on the list ``OPERATOR_COUNTERS``, which is reviewed for privacy.
    """
    if name not in OPERATOR_COUNTERS:
        raise ValueError("counter is not on the allow-list")
    if not amount:
        return
    if _apart.counts is not None:
        _apart.counts[name] += int(amount)
        return
    operator_totals[name] += int(amount)
    Metrics.counter("dpstream", name).inc(int(amount))


@contextlib.contextmanager
def counted_apart() -> Iterator[Counts]:
    """Collect the counts of the block: the runner knows its own threads only.

    See ``add_counts``.
    """
    counts = _apart.counts = Counter()
    try:
        yield counts
    finally:
        _apart.counts = None


def add_counts(counts: Counts) -> None:
    """Count on the runner's thread what another thread has counted."""
    for name, amount in counts.items():
        count(name, amount)


#: Counters of this process, for the operator's summary of an in-process run.
operator_totals: Counter[str] = Counter()

#: Rows that this process has read of files, by partition; as private as the counters.
rows_read: Counter[int] = Counter()

#: Seconds this process spent in each stage, of all its threads together; for the operator and the
#: benchmarks.
stage_seconds: defaultdict[str, float] = defaultdict(float)
#: The same in seconds of CPU.
stage_cpu_seconds: defaultdict[str, float] = defaultdict(float)
_lock = threading.Lock()


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Add the block's time to ``stage_seconds`` and its thread's to ``stage_cpu_seconds``."""
    start, cpu = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        with _lock:
            stage_seconds[stage] += time.perf_counter() - start
            stage_cpu_seconds[stage] += time.thread_time() - cpu


def timed_each(stage: str, results: Iterator[Result]) -> Iterator[Result]:
    """Yield the results; the time to compute each is counted as by ``timed``, its use is not."""
    while True:
        with timed(stage):
            result = next(results, None)
        if result is None:
            return
        yield result


class Latency:
    """Latency in seconds, by bucket; everybody who watches the sink sees when a release appears.

    Attributes:
        counts: one for each of ``LATENCY_SECONDS``, and one for what is longer.
        total: the sum; of a public one each is rounded up to a whole second first, since a fine
            sum would tell of the records' number what a look at the sink does not.
    """

    def __init__(self, name: str, public: bool) -> None:
        self.name, self.counts, self.total = name, [0] * (len(LATENCY_SECONDS) + 1), 0.0
        self._public = public

    def add(self, seconds: float) -> None:
        """Add one release."""
        self.counts[bisect.bisect_left(LATENCY_SECONDS, seconds)] += 1
        self.total += math.ceil(seconds) if self._public else seconds
        Metrics.distribution("dpstream", f"{self.name}_ms").update(round(1000 * seconds))


class Deliveries:
    """The public clock of this process: trigger times that passed, releases in the sink.

    Attributes:
        last_instant: the last trigger time (micros) that a release was delivered for, ``None``
            before.
        since_trigger_time: from a trigger time on the wall clock until a release of it was
            delivered; only of trigger times after ``live_from``, which is what makes them live.
        since_passed: from when the watermark had passed the trigger time.
    """

    def __init__(self) -> None:
        self.last_instant: int | None = None
        self.since_trigger_time = Latency("release_latency", True)
        self.since_passed = Latency("operator_after_watermark", False)
        self._live_from: int | None = None
        self._passed: dict[int, float] = {}
        self._lock = threading.Lock()

    def live_from(self, now: int) -> None:
        """Set the wall clock (micros) of the stream's start; only the first call has an effect."""
        with self._lock:
            self._live_from = now if self._live_from is None else self._live_from

    def passed(self, instants: Iterable[int]) -> None:
        """Record that the watermark has passed these trigger times (micros): their steps may run.

        A timer that was set for the last of several reports all of them when it fires: for a stream
        that is behind, only the latency since the trigger time shows by how much.
        """
        now = time.perf_counter()
        with self._lock:
            for instant in instants:
                self._passed.setdefault(instant, now)
            while len(self._passed) > _TRIGGER_TIMES_KEPT:
                del self._passed[next(iter(self._passed))]

    def reached(self, instant: int) -> None:
        """Record that every release up to a trigger time (micros) is in the sink."""
        with self._lock:
            self.last_instant = max(instant, self.last_instant or instant)

    def delivered(self, instant: int, now: int) -> None:
        """Record that a release of a trigger time (micros) is in the sink; ``now``: wall clock."""
        count("releases_delivered")
        self.reached(instant)
        with self._lock:
            if instant in self._passed:
                self.since_passed.add(time.perf_counter() - self._passed[instant])
            if self._live_from is not None and self._live_from <= instant <= now:
                self.since_trigger_time.add((now - instant) / MICROS_PER_SECOND)


#: Of this process.
deliveries = Deliveries()

_steps_done = 0
_step_is_done = threading.Condition()


def step_done() -> None:
    """Count one step of this process that is committed or read back (a public number)."""
    global _steps_done
    with _step_is_done:
        _steps_done += 1
        _step_is_done.notify_all()


def steps_done() -> int:
    """Return the steps of this process so far (a public number)."""
    return _steps_done


def wait_for_step(seen: int, seconds: float) -> None:
    """Wait until more than ``seen`` steps of this process are done, at most for some seconds."""
    with _step_is_done:
        _step_is_done.wait_for(lambda: _steps_done > seen, seconds)


@contextlib.contextmanager
def watch_steps(
    progress: Callable[[int, int], None] | None, total: int, every_seconds: float = 0.2
) -> Iterator[None]:
    """Report (steps done, steps in all) of this process while the block runs."""
    start = _steps_done
    if progress is None:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(every_seconds):
            progress(_steps_done - start, total)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress(_steps_done - start, total)


def _outgoing(stage: str, error: Exception) -> DpstreamError:
    """Return a coded error that may be shown, without the one that caused it."""
    coded: DpstreamError
    coded = error if isinstance(error, DpstreamError) else unexpected(f"stage.{stage}", error)
    coded.__cause__ = coded.__context__ = None
    _remember(coded)
    return coded


_first_error: DpstreamError | None = None


def _remember(error: DpstreamError) -> None:
    """Store the first error, or the first refusal: later ones only follow from it."""
    global _first_error
    if _first_error is None or (
        isinstance(_first_error, RunError) and not isinstance(error, RunError)
    ):
        _first_error = copy.copy(error)  # without its traceback, whose frames hold records


def forget_error() -> None:
    """Forget the stored error of this process."""
    global _first_error
    _first_error = None


def first_error() -> DpstreamError | None:
    """Return the error that a stage of this process raised since ``forget_error``.

    Some runners return their workers' errors as a text only (Prism, Flink); if the workers are
    threads of this process, this is the error itself.
    """
    return _first_error


def guarded(stage: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let only coded errors, and the class of others, leave a DoFn method."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(method):

            @functools.wraps(method)
            def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
                failed = None
                try:
                    yield from method(*args, **kwargs)
                except Exception as error:
                    failed = _outgoing(stage, error)
                if failed is not None:
                    raise failed

            return generator

        @functools.wraps(method)
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                failed = _outgoing(stage, error)
            raise failed

        return function

    return wrap
