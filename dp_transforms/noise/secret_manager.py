"""Google Secret Manager: one version of one secret, checked, behind the extra ``gcp-secrets``.

Credentials are the application default ones of the process.  A service on this machine can stand
in for Google's (``SECRET_MANAGER_EMULATOR_HOST=localhost:PORT``, without credentials or
encryption), which is how the tests run; another machine is refused there.

Of a failure only its code is told: texts of libraries and services can quote what was sent.  The
libraries' own copies of the answer are immutable and cannot be overwritten, only dropped.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.extras import require
from dpstream.state.connecting import CONNECT_SECONDS, EMULATORS, connecting, reach

FIELD = "secret"
SERVICE = "Secret Manager"
EMULATOR = EMULATORS[SERVICE]
#: An unavailable service is asked again for this long, after waits from the first to the last.
RETRY_SECONDS, FIRST_WAIT, LAST_WAIT = 15.0, 0.25, 4.0
#: One question waits this long for its answer.
CALL_SECONDS = 10.0
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
#: The client's logger of requests and answers: at DEBUG it would write the secret.
_TALKATIVE = "google.cloud.secretmanager_v1.services.secret_manager_service.transports.grpc"
#: What to do about the codes that a person can mend; any other may pass.
_FIXES = {
    "NOT_FOUND": "check project, secret and version",
    "PERMISSION_DENIED": "let the workers' account access the secret (secretAccessor)",
    "UNAUTHENTICATED": "renew the credentials (`gcloud auth application-default login`)",
    "FAILED_PRECONDITION": "enable the version again; a destroyed key cannot be continued with",
    "INVALID_ARGUMENT": "check project, secret and version",
}


def access(name: str) -> bytes:
    """The payload of ``projects/P/secrets/S/versions/NUMBER``, its checksum verified.

    Raises:
        UsageError: the extra is not installed, or no such secret.
        PolicyError: no permission, no credentials, or the stand-in is another machine.
        RunError: not available in time, or damaged on its way.
    """
    require("gcp-secrets", FIELD)
    payload: Any = None
    problem: DpstreamError | None = None
    try:
        payload = _ask(name)
    except DpstreamError as error:
        problem = error
    except Exception as error:
        problem = _coded(error)
    if problem is not None:
        # Outside of the handler: the library's exception must not hang on to this one.
        raise problem
    data = _intact(payload)
    payload = None  # a report of this frame must not show what was damaged only in part
    if data is None:
        raise RunError(FIELD, "the secret was damaged on its way (CRC32C)", "run it again")
    return data


def _ask(name: str) -> Any:
    from google.api_core import exceptions
    from google.api_core.retry import Retry, if_exception_type

    logging.getLogger(_TALKATIVE).disabled = True
    retry = Retry(
        predicate=if_exception_type(
            exceptions.ServiceUnavailable,
            exceptions.DeadlineExceeded,
            exceptions.ResourceExhausted,
        ),
        initial=FIRST_WAIT,
        maximum=LAST_WAIT,
        timeout=RETRY_SECONDS,
    )
    with _client() as client:
        reach(client.transport.grpc_channel, FIELD, SERVICE)
        answer = client.access_secret_version(name=name, retry=retry, timeout=CALL_SECONDS)
        return answer.payload


def _client() -> Any:
    """The client, of Google's service or of the stand-in on this machine."""
    import grpc
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    stand_in = os.environ.get(EMULATOR)
    if not stand_in:
        return SecretManagerServiceClient(credentials=_credentials())
    if stand_in.rpartition(":")[0] not in _THIS_MACHINE:
        raise PolicyError(
            EMULATOR, "must be on this machine: nothing is encrypted", "write 'localhost:PORT'"
        )
    transport = SecretManagerServiceClient.get_transport_class("grpc")
    channel = grpc.insecure_channel(stand_in)
    return SecretManagerServiceClient(transport=transport(channel=channel))


def _credentials() -> Any:
    """Fresh default credentials: inside a call an expired one would look like a lost network."""
    import google.auth
    from google.auth.transport.requests import Request

    credentials, _ = google.auth.default(scopes=[_SCOPE])
    with connecting("Google's credentials"):
        credentials.refresh(functools.partial(Request(), timeout=CONNECT_SECONDS))
    return credentials


def _coded(error: Exception) -> DpstreamError:
    """The error by its code alone."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, TransportError):
        return RunError(FIELD, "the credentials' service cannot be reached", "check the network")
    if isinstance(error, GoogleAuthError):
        return PolicyError(
            FIELD,
            f"there are no usable Google credentials ({type(error).__name__})",
            _FIXES["UNAUTHENTICATED"],
        )
    # A retry that gave up holds the last answer.
    code = getattr(getattr(error, "cause", None) or error, "grpc_status_code", None)
    name = getattr(code, "name", None) or type(error).__name__
    kinds: dict[str, Callable[[str, str, str], DpstreamError]] = {
        "NOT_FOUND": UsageError,
        "INVALID_ARGUMENT": UsageError,
        "PERMISSION_DENIED": PolicyError,
        "UNAUTHENTICATED": PolicyError,
    }
    fix = _FIXES.get(name, "check the network and the service, then run it again")
    return kinds.get(name, RunError)(FIELD, f"Secret Manager answered {name}", fix)


def _intact(payload: Any) -> bytes | None:
    """The payload's data, if its checksum is right; Google sends one with every answer."""
    import google_crc32c

    if "data_crc32c" not in payload or google_crc32c.value(payload.data) != payload.data_crc32c:
        return None
    return bytes(payload.data)
