"""Readers that a worker process keeps between bundles, of whatever system they read.

A reader holds a connection, and what it has fetched ahead; the runner decides with each bundle
where it begins, so one that is not in use belongs to nobody.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

#: A reader that nobody used for so long is closed: what it read is read elsewhere.
UNUSED_SECONDS = 60.0


class Pooled(Protocol):
    """A reader: when it was used last (`time.monotonic`), and how to let its connection go."""

    used: float

    def close(self) -> None:
        """Let the connection go."""


Kind = TypeVar("Kind", bound=Pooled)


class ReaderPool(Generic[Kind]):
    """The readers of this process that are not in use, by what they read.

    Args:
        keep: readers of one thing that are kept; what waits in one that nobody uses is late.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: defaultdict[Hashable, list[Kind]] = defaultdict(list)

    @contextlib.contextmanager
    def lend(self, key: Hashable, make: Callable[[], Kind]) -> Iterator[Kind]:
        """A reader for one caller at a time; one that fails is closed.

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
            kept = [reader, *self._free[key]]
            self._free[key], rest = kept[: self._keep], kept[len(kept[: self._keep]) :]
        self._end(rest)

    def close(self, unused: float = 0.0) -> None:
        """Close those that are not in use, and were not for some seconds."""
        since = time.monotonic() - unused
        with self._lock:
            free = [(key, reader) for key, kept in self._free.items() for reader in kept]
            self._free.clear()
            for key, reader in free:
                if reader.used > since:
                    self._free[key].append(reader)
        self._end([reader for _, reader in free if reader.used <= since])

    @staticmethod
    def _end(readers: list[Kind]) -> None:
        for reader in readers:
            reader.close()
