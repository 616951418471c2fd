"""Connections to remote services: the first one, and which errors of later calls may pass.

Clients retry for minutes, which is right during a run.  Before it begins, a wrong address or a
service that is down must be reported soon.  So each client first waits here until the service
answers, shown on a terminal; no data is asked for, and no rights are needed.  Later, stores,
sources and sinks retry the transient errors of Google's services.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from dpstream.accounting.errors import RunError

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
