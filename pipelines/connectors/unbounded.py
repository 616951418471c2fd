"""Sources without end: how far a reader is, its tracker, Beam's times, and the pool of readers.

Such a source is one splittable element.  Its restriction says after which position it goes on; the
reader gives the rest back to the runner (`defer_remainder`) many times a second, so that bundles
end and timers fire.  Positions are whatever the source orders its records by.

A worker process keeps readers between bundles (`ReaderPool`): a reader holds a connection, and what
it has fetched ahead.  The runner decides with each bundle where it begins, so one that is not in
use belongs to nobody.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import apache_beam as beam
from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp
from typing_extensions import override

#: A bundle of a source ends after that many rows or seconds.
BUNDLE_ROWS = 40_000
BUNDLE_SECONDS = 0.1
WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())
#: A reader that nobody used for so long is closed: what it read is read elsewhere.
UNUSED_SECONDS = 60.0


class Progress(NamedTuple):
    """The rest of a source.

    Attributes:
        after: the last position that is done; ``None`` before the first.
        begun: wall clock in micros when the source began.
        done: nothing is left of it.
    """

    after: Any
    begun: int
    done: bool = False


class ProgressTracker(RestrictionTracker):  # type: ignore[misc]
    """Claims positions in their order; only the rest as a whole can be split off.

    ``try_claim(position)`` before its records leave; ``try_claim(None)`` at the end of a source
    that has one.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @override
    def current_restriction(self) -> Progress:
        return self._progress

    @override
    def current_progress(self) -> RestrictionProgress:
        done = self._progress.done
        # Beam puts the bytes of its outputs, perhaps NaN, in place of what is completed.
        return RestrictionProgress(
            fraction=1.0 if done else 0.5, completed=1, remaining=0 if done else 1
        )

    @override
    def try_claim(self, position: Any) -> bool:
        if self._progress.done:
            return False
        if position is None:
            self._progress = self._progress._replace(done=True)
        else:
            self._progress = self._progress._replace(after=position)
        return True

    @override
    def try_split(self, fraction_of_remainder: float) -> tuple[Progress, Progress] | None:
        if fraction_of_remainder > 0 or self._progress.done:
            return None
        rest = self._progress
        self._progress = rest._replace(done=True)
        return self._progress, rest

    @override
    def check_done(self) -> None:
        if not self._progress.done:
            raise ValueError("a reader returned without giving back the rest of its source")

    @override
    def is_bounded(self) -> bool:
        return False


class ProgressProvider(beam.transforms.core.RestrictionProvider):  # type: ignore[misc]
    """The restriction of a source of which nothing has been read."""

    @override
    def initial_restriction(self, element: Any) -> Progress:
        return Progress(None, wall_micros())

    @override
    def create_tracker(self, restriction: Progress) -> ProgressTracker:
        return ProgressTracker(restriction)

    @override
    def restriction_size(self, element: Any, restriction: Progress) -> int:
        return 0 if restriction.done else 1

    @override
    def truncate(self, element: Any, restriction: Progress) -> None:
        """Do nothing: a drained pipeline stops reading."""
        return None


#: Default arguments of a source's ``process``.
TRACKER = beam.DoFn.RestrictionParam(ProgressProvider())


def wall_micros() -> int:
    """Return the wall clock in micros since the epoch."""
    return time.time_ns() // 1000


def stands(watermark: ManualWatermarkEstimator) -> Timestamp:
    """Return the watermark; outputs before it are late."""
    return watermark.current_watermark() or MIN_TIMESTAMP


def beam_time(micros: int) -> Timestamp:
    """Return Beam's time at or before an instant: whole milliseconds, within Beam's bounds."""
    floored = micros // 1000 * 1000
    return Timestamp(micros=min(max(floored, MIN_TIMESTAMP.micros), MAX_TIMESTAMP.micros))


def advance(estimator: ManualWatermarkEstimator, micros: int) -> None:
    """Move a watermark on to an instant; never back (a wall clock can be set back)."""
    target, now = beam_time(micros), estimator.current_watermark()
    if now is None or target > now:
        estimator.set_watermark(target)


class Bundle:
    """The limits of a reader's bundle: `BUNDLE_ROWS` or `BUNDLE_SECONDS`."""

    def __init__(self) -> None:
        self._rows, self._until = 0, time.monotonic() + BUNDLE_SECONDS

    def add(self, rows: int) -> bool:
        """Count rows that left; whether the bundle is full."""
        self._rows += rows
        return self._rows >= BUNDLE_ROWS or time.monotonic() >= self._until


class Pooled(Protocol):
    """A reader: its last use (`time.monotonic`), and how to close its connection."""

    used: float

    def close(self) -> None:
        """Let the connection go."""


PooledReader = TypeVar("PooledReader", bound=Pooled)


class ReaderPool(Generic[PooledReader]):
    """The unused readers of this process, by their source.

    Args:
        keep: readers of one thing that are kept; what waits in one that nobody uses is late.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: defaultdict[Hashable, list[PooledReader]] = defaultdict(list)

    @contextlib.contextmanager
    def lend(self, key: Hashable, make: Callable[[], PooledReader]) -> Iterator[PooledReader]:
        """Lend a reader to one caller at a time; one that fails is closed.

        Args:
            key: what it reads.
            make: a new one, where none is free.
        """
        with self._lock:
            reader = self._free[key].pop(0) if self._free[key] else None
        self.close(UNUSED_SECONDS)
        reader = make() if reader is None else reader
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        reader.used = time.monotonic()
        with self._lock:
            readers = [reader, *self._free[key]]
            self._free[key], rest = readers[: self._keep], readers[len(readers[: self._keep]) :]
        self._end(rest)

    def close(self, unused: float = 0.0) -> None:
        """Close those that are not in use, and were not for some seconds."""
        since = time.monotonic() - unused
        with self._lock:
            free = [(key, reader) for key, readers in self._free.items() for reader in readers]
            self._free.clear()
            for key, reader in free:
                if reader.used > since:
                    self._free[key].append(reader)
        self._end([reader for _, reader in free if reader.used <= since])

    @staticmethod
    def _end(readers: list[PooledReader]) -> None:
        for reader in readers:
            reader.close()
