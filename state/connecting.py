"""Connections to remote services: their clients, the first answer, and errors that may pass.

Clients retry for minutes, which is right during a run.  Before it begins, a wrong address or a
service that is down must be reported soon.  So each client first waits here until the service
answers, shown on a terminal; no data is asked for, and no rights are needed.  Later, stores,
sources and sinks retry the transient errors of Google's services.

Clients of Google's services (`ServiceClient`) are opened where they are used; that one is absent,
or has no credentials, is a coded error.

`Closing` calls an object's own ``close`` at the end of a ``with`` block.
"""

import contextlib
import importlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.extras import require

#: How long a service may take to answer for the first time.
CONNECT_SECONDS = 10.0
#: Environment variables that lead a client to an emulator of a service instead.
EMULATORS = {
    "Cloud Spanner": "SPANNER_EMULATOR_HOST",
    "Pub/Sub": "PUBSUB_EMULATOR_HOST",
    "Secret Manager": "SECRET_MANAGER_EMULATOR_HOST",
}
#: A connection that is there sooner is not worth a line.
_SHOWN_AFTER = 0.5
#: A method without private content that every gRPC server answers, if only by "unimplemented".
_HEALTH = "/grpc.health.v1.Health/Check"
_quiet = threading.Event()
#: Names of gRPC's codes.  After most of them it is unknown whether the call took effect, so what is
#: tried again must be the same when it is done twice.
PASSING = (
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"),
    *("UNAVAILABLE", "UNKNOWN"),
)
#: Looking at the place when a run begins: nothing is lost by giving up early.
LOOK_SECONDS = 15.0


def show_connecting(wanted: bool) -> None:
    """Set whether this command may write a line on a terminal."""
    (_quiet.clear if wanted else _quiet.set)()


@contextlib.contextmanager
def connecting(to: str) -> Iterator[None]:
    """Show one line on a terminal while the block waits for a service.

    Args:
        to: the service's public name.
    """
    if _quiet.is_set() or not sys.stderr.isatty():
        yield
        return
    text = f"Connecting to {to} (up to {CONNECT_SECONDS:.0f} s) ...\n"
    timer = threading.Timer(_SHOWN_AFTER, lambda: (sys.stderr.write(text), sys.stderr.flush()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reach(channel: Any, field: str, to: str) -> None:
    """Wait until the service behind a gRPC channel answers.

    One call is sent that services do not offer or answer at once (gRPC's health check): any reply,
    even a refusal, is an answer.  gRPC's own watch of a channel would leave a thread behind that
    fails when the channel is closed just after.

    Args:
        channel: of the service's client.
        field: the setting that names the service's address.
        to: the service's public name.

    Raises:
        RunError: the service did not answer within `CONNECT_SECONDS`.
    """
    import grpc

    call = channel.unary_unary(_HEALTH)
    try:
        with connecting(to):
            call(b"", timeout=CONNECT_SECONDS, wait_for_ready=True)
            return
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return
    check = "check that this machine reaches Google's services (DNS, proxy, port 443)"
    emulator = EMULATORS.get(to, "")
    if os.environ.get(emulator):
        check = (
            f"check that an emulator runs at the address in {emulator}, or unset {emulator} to "
            "use Google's service"
        )
    raise RunError(
        field,
        f"{to} does not answer within {CONNECT_SECONDS:.0f} s",
        f"{check}; then run again",
    )


def may_pass() -> Any:
    """Return a predicate of transient errors for the clients' `Retry`; imports their library."""
    from google.api_core.exceptions import exception_class_for_grpc_status
    from google.api_core.retry import if_exception_type
    from grpc import StatusCode

    kinds = (exception_class_for_grpc_status(StatusCode[name]) for name in PASSING)
    return if_exception_type(*kinds)  # type: ignore[no-untyped-call]


def imported(kind: str, module: str, field: str = "sink.kind") -> Any:
    """Return a service's client.

    Args:
        kind: of the sink, which is also the name of its extra.
        module: the client's.
        field: the field that names the kind, for the error.

    Raises:
        UsageError: they are not installed.
    """
    require(kind, field)
    return importlib.import_module(module)


def retry(seconds: float) -> Any:
    """Return the policy that retries passing errors for ``seconds``, at most ten seconds apart."""
    from google.api_core.retry import Retry

    return Retry(predicate=may_pass(), initial=0.1, maximum=10.0, multiplier=1.5, timeout=seconds)


class ServiceClient(ABC):
    """A client of a service that is opened where it is used, and never travels.

    Args:
        field: the field that names the place, for errors.
    """

    #: The service's public name.
    service = ""

    def __init__(self, field: str) -> None:
        self.field = field
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @abstractmethod
    def _new_client(self) -> Any:
        """A new client; what its library raises without credentials is told as a coded error."""

    @abstractmethod
    def _end(self, client: Any) -> None:
        """Let go of a client."""

    def _open(self) -> Any:
        if self._client is None:
            try:
                self._client = self._new_client()
            except DpstreamError:
                raise
            except Exception as error:  # no credentials
                raise failed(self.field, error, "cannot be reached") from None
        return self._client

    def _reached(self) -> Any:
        """The client, after its service has answered for the first time: when a run begins.

        Raises:
            UsageError: the client is not installed.
            RunError: the service does not answer.
        """
        client = self._open()
        reach(client.transport.grpc_channel, self.field, self.service)
        return client

    def close(self) -> None:
        """Let go of the client; the next use opens another."""
        client, self._client = self._client, None
        if client is not None:
            self._end(client)


def failed(field: str, error: BaseException | None, rule: str) -> RunError:
    """Return the class of a client's error only: its text can quote a request."""
    fix = "check the place and the account's rights, then run again"
    if field.startswith("sink."):
        fix += ": the store has every release"
    return RunError(field, f"{rule}: {type(error).__name__}", fix)


class Closing(ABC):
    """A context whose end calls ``close``, whether the block succeeds or fails."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
