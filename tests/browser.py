"""A real Chromium, driven over a pair of pipes (the DevTools protocol), for tests of pages.

It is looked for as ``CHROMIUM``, then on the path.  With CI=true a missing browser fails the
tests; elsewhere they are skipped, loudly.  Nothing of it listens on a port.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Seconds that the browser may take for one answer, on a busy machine.
_PATIENCE = 120.0
#: Width, height and kind of the screens that pages are looked at on.
DESKTOP, PHONE = (1280, 900, False), (390, 844, True)


def program() -> str | None:
    """The browser, if there is one."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


def missing(text: str) -> None:
    """A failure where what is missing must be there, a loud skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


class Browser:
    """A browser without windows; pages are opened in it one at a time."""

    def __init__(self, folder: Path) -> None:
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        read_end, self._tell = os.pipe()
        self._hear, heard = os.pipe()
        executable = program()
        assert executable is not None
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)]
        # Lifted first, so that neither end lies where the other has to go.
        high = [_lifted(end) for end in (read_end, heard)]
        pipes = [(os.POSIX_SPAWN_DUP2, end, n) for end, n in zip(high, (3, 4), strict=True)]
        self._pid = os.posix_spawn(
            executable, [executable, *flags], os.environ, file_actions=[*quiet, *pipes], setpgroup=0
        )
        for end in (read_end, heard, *high):
            os.close(end)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session = self._target = ""

    def close(self) -> None:
        """End the browser and all that it started."""
        os.close(self._tell)
        os.close(self._hear)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what happens meanwhile is kept in ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._tell, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _PATIENCE
        while True:
            reply = self._next(until)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return dict(reply["result"])
            self._keep(reply)

    def wait(self, method: str) -> dict[str, Any]:
        """The next event of a name, of those that happened too."""
        until = time.monotonic() + _PATIENCE
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.get("method") == method:
                    self.events.remove(event)
                    return dict(event["params"])
            seen = len(self.events)
            self._keep(self._next(until))

    def _keep(self, event: dict[str, Any]) -> None:
        """Of the page that is open; one that was left may still say something."""
        if event.get("sessionId") == self._session:
            self.events.append(event)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._hear], [], [], until - time.monotonic())[0], "no answer"
            chunk = os.read(self._hear, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, address: str, screen: tuple[int, int, bool]) -> "Tab":
        """A page on a screen, loaded."""
        self._session = ""
        if self._target:
            self.ask("Target.closeTarget", targetId=self._target)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        reply = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session, self.events = reply["sessionId"], []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        width, height, mobile = screen
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip
        tab = Tab(self, address, screen)
        self.ask("Page.navigate", url=address)
        self.wait("Page.loadEventFired")
        return tab


class Tab:
    """A page that was opened."""

    def __init__(self, browser: Browser, address: str, screen: tuple[int, int, bool]) -> None:
        self._browser, self._address, self.screen = browser, address, screen
        self._log: list[dict[str, Any]] = []

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        reply = self._browser.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true; a page that is loading has none."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            reply = self._browser.ask("Runtime.evaluate", expression=script, returnByValue=True)
            if value := reply["result"].get("value"):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    @property
    def width(self) -> int:
        """Of everything on the page, in CSS pixels."""
        return int(self.run("document.documentElement.scrollWidth"))

    def picture(self) -> bytes:
        """The whole page as PNG."""
        width, height = self.screen[0], self.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        reply = self._browser.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        return base64.b64decode(reply["data"])

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.run("0")  # what happened before has come
        self._log += self._browser.events
        self._browser.events = []
        return [event["params"] for event in self._log if event.get("method") == method]

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, exceptions, and what a policy refused."""
        messages = [str(event["entry"]) for event in self._events("Log.entryAdded")]
        messages += [str(event) for event in self._events("Runtime.exceptionThrown")]
        calls = self._events("Runtime.consoleAPICalled")
        return messages + [str(call) for call in calls if call["type"] in ("error", "warning")]

    def requests(self) -> set[str]:
        """Addresses that were asked for, the page's own and what it holds itself left out."""
        urls = {event["request"]["url"] for event in self._events("Network.requestWillBeSent")}
        return {
            url for url in urls if url != self._address and not url.startswith(("data:", "blob:"))
        }


def _lifted(end: int) -> int:
    """A copy of a descriptor above those that the browser is given."""
    return fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A running browser on a folder of its own."""
    if program() is None:
        missing("Chromium is missing: install it, or name it in CHROMIUM")
    running = Browser(folder)
    try:
        yield running
    finally:
        running.close()
