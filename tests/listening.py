"""What listens on this machine, looked at while something runs, and a relay to a server.

The relay can be taken down and put up again: a service away.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


class Relay:
    """Forwards connections; while it is down none can be made and those that were are cut.

    Args:
        target: ``host:port`` of the server.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._sockets: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port = int(self._listener.getsockname()[1])
        self.host = f"127.0.0.1:{self.port}"

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = listener.accept()
                try:
                    there = socket.create_connection(self._target)
                except OSError:
                    here.close()
                    continue
                self._sockets |= {here, there}
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def down(self) -> None:
        """Cut everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def up(self) -> None:
        """Take connections again, at the same port."""
        self._listener = self._listen(self.port)
