"""``dpstream report --serve``: the page of a run while it runs, for this machine's user alone.

What is served is the page that could be published: project file and releases are read again when a
release was written, nothing else is opened and nothing is ever written.  The server listens on
127.0.0.1.  A site that a browser on this machine visits could ask it too, so a request is answered
only if it

* names this server (``Host``), which a name that is bound to 127.0.0.1 later (DNS rebinding) does
  not;
* knows the token in the address, which is drawn anew at every start and printed once;
* does not come from another site (``Origin``, ``Sec-Fetch-Site``), where the browser says so;
* is a GET or HEAD of one of two addresses.

Everybody else gets the same 404.  Other users of the machine do not know the token.
"""

import hashlib
import hmac
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import msgspec
from typing_extensions import override

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.formats.encodings import release_files
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.page import document
from dpstream.pipelines.render.page import policy as policy_of
from dpstream.pipelines.report.data import inventory
from dpstream.pipelines.report.report import build
from dpstream.pipelines.report.view import render
from dpstream.state.disk_errors import file_errors

LOCAL = "127.0.0.1"
#: Seconds between two questions of the page, at least; a page that is slow to make waits longer.
LOOK_SECONDS = 2.0
#: So many times as long as a page took to make, it is not made again: at most a fifth of a core.
PAUSE = 4.0
#: Seconds that a client may take for its request.
_PATIENCE = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Live:
    """A job's page, made again when its releases have changed; threads may share it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._version, self._page = "", b""
        self._seconds = 0.0
        self._until = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that the page should wait until it asks again."""
        return max(LOOK_SECONDS, PAUSE * self._seconds)

    def version(self) -> str:
        """Return the state of the releases; while a page was just made, the state that it shows."""
        if self._page and time.monotonic() < self._until:
            return self._version
        return _state(self._job)

    def page(self) -> bytes:
        """Return the page of the present state."""
        with self._lock:
            version = self.version()
            if version != self._version:
                begun = time.monotonic()
                self._page, self._version = self._rendered(version), version
                self._seconds = time.monotonic() - begun
                self._until = time.monotonic() + PAUSE * self._seconds
            return self._page

    def _rendered(self, version: str) -> bytes:
        try:
            return render(build(self._job), live=version).encode()
        except DpstreamError as error:  # its text holds no value of data
            name = "waiting.html.j2"
            page = document(name, "report", script=True, live=version, text=str(error))
            return page.encode()


def _state(job: Job) -> str:
    """A digest of which releases there are and when they were written."""
    digest = hashlib.sha256(job.plan.hash.encode())
    folder = job.sink.folder
    for path in release_files(folder) if folder is not None else ():
        try:
            status = path.stat()
        except OSError:  # replaced in this moment: the next look sees it
            continue
        digest.update(
            f"{path.parent.name}/{path.name} {status.st_mtime_ns} {status.st_size};".encode()
        )
    return digest.hexdigest()[:32]


class _Handler(BaseHTTPRequestHandler):
    """Answers two addresses; see the module."""

    timeout = _PATIENCE
    server: "Server"

    def do_GET(self) -> None:
        """Answer a question; of HEAD without the body (see `_send`)."""
        live, root = self.server.live, f"/{self.server.token}/"
        if not self._from_own_page():
            self._send(404, b"not found\n", "text/plain; charset=utf-8")
        elif hmac.compare_digest(self.path.encode(), root.encode()):
            self._send(200, live.page(), "text/html; charset=utf-8")
        elif hmac.compare_digest(self.path.encode(), f"{root}state".encode()):
            state = {"version": live.version(), "seconds": live.seconds}
            self._send(200, msgspec.json.encode(state), "application/json")
        else:
            self._send(404, b"not found\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815

    def _from_own_page(self) -> bool:
        host = f"{LOCAL}:{self.server.server_port}"
        origin = self.headers.get("Origin", f"http://{host}")
        site = self.headers.get("Sec-Fetch-Site", "none")
        return (
            self.headers.get_all("Host") == [host]
            and origin == f"http://{host}"
            and site in ("none", "same-origin")
        )

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        policy = policy_of(script=True, live=True) + "; frame-ancestors 'none'"
        headers = {**_HEADERS, "Content-Security-Policy": policy, "Content-Type": kind}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @override
    def version_string(self) -> str:
        return "dpstream"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an address holds the token."""


class Server(ThreadingHTTPServer):
    """Serves one job's page on 127.0.0.1.

    Raises:
        UsageError: the job's releases are no files.
        RunError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, job: Job, port: int = 0) -> None:
        if job.sink.folder is None:
            inventory(job)  # says how to make files of them
        self.live, self.token = Live(job), secrets.token_urlsafe(24)
        with file_errors("--port", "cannot be listened on"):
            super().__init__((LOCAL, port), _Handler)

    @override
    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the network for this machine's name
        self.server_name, self.server_port = LOCAL, int(self.server_address[1])

    @property
    def address(self) -> str:
        """The page's address: whoever knows it may read it."""
        return f"http://{LOCAL}:{self.server_port}/{self.token}/"

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that went away is no error of ours."""
