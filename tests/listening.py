"""What this process and all that it started listen on, looked at while something runs."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dpstream.pipelines.runners.job_servers import Listener, descendants, listeners


class Heard:
    """The listeners that were seen, by program and address."""

    def __init__(self) -> None:
        self.all: set[Listener] = set()
        self.looks = 0

    def look(self) -> None:
        """Look once."""
        self.all |= set(listeners(descendants(os.getpid())))
        self.looks += 1

    @property
    def beyond(self) -> set[Listener]:
        """Those that other machines can reach."""
        return {listener for listener in self.all if not listener.loopback}

    def check(self, least: int) -> None:
        """Some were seen, and none beyond this machine."""
        assert self.looks >= 3
        assert len(self.all) >= least, self.all
        assert not self.beyond, self.beyond


@contextmanager
def heard(pause: float = 0.05) -> Iterator[Heard]:
    """Look again and again while the block runs."""
    watcher, ended = Heard(), threading.Event()

    def go() -> None:
        while not ended.wait(pause):
            watcher.look()

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        ended.set()
        thread.join()
        watcher.look()
