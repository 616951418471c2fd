"""Transient errors of Google's services, which stores, sources and sinks retry."""

from typing import Any

#: Names of gRPC's codes.  After most of them it is unknown whether the call took effect, so what is
#: tried again must be the same when it is done twice.
PASSING = (
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"),
    *("UNAVAILABLE", "UNKNOWN"),
)


def may_pass() -> Any:
    """Return a predicate of transient errors for the clients' `Retry`; imports their library."""
    from google.api_core.exceptions import exception_class_for_grpc_status
    from google.api_core.retry import if_exception_type
    from grpc import StatusCode

    kinds = (exception_class_for_grpc_status(StatusCode[name]) for name in PASSING)
    return if_exception_type(*kinds)  # type: ignore[no-untyped-call]
