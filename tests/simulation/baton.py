"""Workers that take turns: threads of which exactly one runs, by order of the world."""

import threading
from collections.abc import Callable


class Died(BaseException):
    """The worker is gone: nothing that it does from here on has an effect."""


class Fiber:
    """A piece of work that runs when it is told to, up to its next ``pause``."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = False
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    def resume(self) -> None:
        """Run the work until it pauses or ends; called by the world."""
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()

    def pause(self) -> None:
        """Give the turn back; called by the work."""
        self._back.release()
        self._go.acquire()
