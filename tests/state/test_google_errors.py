"""What of Google's services is tried again: one list for stores, sources and sinks."""

from google.api_core import exceptions

from dpstream.pipelines.connectors.google_client import retry
from dpstream.state.google_errors import may_pass

PASSING = (
    exceptions.Aborted, exceptions.Cancelled, exceptions.DeadlineExceeded,
    exceptions.InternalServerError, exceptions.ResourceExhausted,
    exceptions.ServiceUnavailable, exceptions.Unknown,
)  # fmt: skip
LASTING = (
    exceptions.NotFound, exceptions.PermissionDenied, exceptions.InvalidArgument,
    exceptions.AlreadyExists, exceptions.FailedPrecondition, ValueError,
)  # fmt: skip


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    passes = may_pass()
    assert all(passes(kind("x")) for kind in PASSING)
    assert not any(passes(kind("x")) for kind in LASTING)


def test_clients_retry_by_that_list() -> None:
    calls = []

    def fails_once() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise exceptions.Unknown("x")
        return "done"

    assert retry(10.0)(fails_once)() == "done" and len(calls) == 2
