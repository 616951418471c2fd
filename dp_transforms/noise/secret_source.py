"""A reference to a data set's secret, and how a process reads the secret that it names.

This module is apart from ``run``, so that a command that needs the secret but no run imports no
store.

**Google Secret Manager** gives one version of one secret, checked, behind the extra
``gcp-secrets``.  Credentials are the application default ones of the process.  A service on this
machine can stand in for Google's (``SECRET_MANAGER_EMULATOR_HOST=localhost:PORT``, without
credentials or encryption), which is how the tests run; another machine is refused there.

Of a failure only its code is told: texts of libraries and services can quote what was sent.  The
libraries' own copies of the answer are immutable and cannot be overwritten, only dropped.
"""

import dataclasses
import functools
import logging
import os
import re
import shlex
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.places import below
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe
from dpstream.state.connecting import CONNECT_SECONDS, EMULATORS, connecting, reach
from dpstream.state.disk_errors import unreadable
from dpstream.state.repository import refuse_tracked

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.prf import KeyRing


# Where a secret is, in one grammar, and how it is read: the only module that reads one.
#
#     file:PATH                                    64 hex digits in a file of mode 0600
#     env:NAME                                     64 hex digits in an environment variable
#     gcp:projects/P/secrets/S/versions/NUMBER     64 hex digits in Google Secret Manager
#
# A reference is public (it stands in project files and pickles); what it leads to is not: it is
# read into a buffer that is overwritten after its children are derived, and no error quotes it,
# nor is raised while an exception of a library (which might) is handled.  A reference names one
# secret for good: a run must go on with the secret it was begun with, so moving names are refused.

FIELD = "secret"
#: Bytes of a secret's text with the white space around it.
MAX_TEXT = 256
#: Distinct bytes that 32 random ones have but for a chance of 2^-75; a placeholder has fewer.
MIN_DISTINCT = 12
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SECRET = re.compile(r"projects/[a-z0-9.:-]{1,100}/secrets/[A-Za-z0-9_-]{1,255}/versions/(.*)")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_LOCK = threading.Lock()
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


def parse_reference(text: str) -> tuple[str, str]:
    """Return (scheme, place) of a reference; nothing is read.

    Raises:
        UsageError: it is not of the grammar (the text is not repeated, because it may be a secret),
            or names a version that can move (``latest``, an alias).
    """
    scheme, _, place = text.partition(":")
    if scheme == "file" and place and "\0" not in place:
        return scheme, place
    if scheme == "env" and _VARIABLE.fullmatch(place):
        return scheme, place
    secret = _SECRET.fullmatch(place) if scheme == "gcp" else None
    if secret is None:
        raise UsageError(
            FIELD,
            "is not a reference to a secret",
            "write 'file:PATH', 'env:NAME' or 'gcp:projects/P/secrets/S/versions/NUMBER', never "
            "the secret itself",
        )
    if not _VERSION.fullmatch(secret[1]):
        raise UsageError(
            FIELD,
            "must name a version by its number: a run goes on with the secret it was begun with, "
            "and any other name can move to another secret",
            "write '.../versions/NUMBER'",
        )
    return scheme, place


def read_secret(reference: str) -> bytearray:
    """Read the 32 bytes of a reference into a buffer that the caller overwrites (``wipe``).

    Raises:
        UsageError: there is no secret, or something else, or others can read it.
        RunError: the secret manager could not be asked.
    """
    scheme, place = parse_reference(reference)
    if scheme == "file":
        text = _of_file(place)
    elif scheme == "env":
        text = _of_environment(place)
    else:
        text = bytearray(access(place))
    try:
        return _decoded(text, place if scheme == "file" else None)
    finally:
        wipe(text)


def _of_file(path: str) -> bytearray:
    """The text of a file that nobody else can read; permissions of what was opened."""
    refuse_tracked(FIELD, path, "whoever has the repository can subtract the noise")
    text = bytearray(MAX_TEXT)
    problem: DpstreamError | None = None
    try:
        with open(path, "rb", buffering=0) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                problem = UsageError(
                    FIELD,
                    "the secret can be read or changed by other users",
                    f"type `chmod 600 {shlex.quote(str(path))}`",
                )
            else:
                del text[file.readinto(text) or 0 :]
    except (FileNotFoundError, ValueError):
        problem = UsageError(
            FIELD,
            f"there is no file {path}",
            _again(f"make one with `dpstream secret new {shlex.quote(str(path))}`"),
        )
    except OSError as error:
        problem = unreadable(FIELD, error)
    if problem is not None:
        raise problem
    return text


def _of_environment(name: str) -> bytearray:
    """The text of a variable; the process keeps its own copy for as long as it lives."""
    value = os.environ.get(name)
    if not value:
        raise UsageError(
            FIELD,
            "the environment variable it names is not set",
            "set it to 64 hex digits where the job runs, on every worker",
        )
    return bytearray(value.encode("utf-8", "surrogateescape"))


def _again(fix: str) -> str:
    """The fix for a secret that is lost: runs and charges that were made with it need it."""
    return f"restore it from its backup; only if nothing was charged with it, {fix}"


def _decoded(text: bytearray, path: str | None) -> bytearray:
    """The bytes of 64 hex digits with white space around them.

    Args:
        path: the file that has the text, if it is in one.
    """
    fix = _again("make one with `dpstream secret new FILE` and keep its text there")
    if path is not None:
        name = shlex.quote(path)
        fix = _again(f"type `rm {name}`, then `dpstream secret new {name}`")
    digits = re.fullmatch(rb"\s*([0-9a-fA-F]{64})\s*", text) if len(text) < MAX_TEXT else None
    if digits is None:
        raise UsageError(
            FIELD,
            "what it leads to is not 64 hex digits",
            fix,
        )
    begin, secret = digits.start(1), bytearray(KEY_BYTES)
    for index in range(KEY_BYTES):
        at = begin + 2 * index
        secret[index] = int(text[at : at + 2], 16)
    if len(set(secret)) < MIN_DISTINCT:
        wipe(secret)
        raise UsageError(
            FIELD,
            "what it leads to is a placeholder, not a random secret",
            fix,
        )
    return secret


_HEX = re.compile("[0-9a-f]{64}")
#: Rings of this process that are in use, by the run they were made for.
_LIVE: dict[str, "weakref.WeakSet[KeyRing]"] = {}


@dataclasses.dataclass(frozen=True)
class SecretSource:
    """The place of a worker's secret: a reference, or an insecure test secret.

    Pickles hold the reference (``file:PATH``, ``env:NAME``, ``gcp:...``; see
    `dp_transforms.noise.secret_source`), never the secret: each worker reads it for itself.

    Attributes:
        reference: of the grammar above; it is not followed here.
        insecure_test_secret: 64 hex digits, for tests.
        run_id: the run whose end destroys the rings that are made here, if any.
        fingerprint: of the only secret that is taken here, if it is fixed.

    Raises:
        UsageError: both are given, or the reference is none, or one that can move.
    """

    reference: str | None = None
    insecure_test_secret: str | None = dataclasses.field(default=None, repr=False)
    run_id: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        fixed = self.insecure_test_secret
        if self.reference is not None:
            if fixed is not None:
                raise UsageError(
                    FIELD, "is given twice", "keep one of secret and insecure_test_secret"
                )
            if not isinstance(self.reference, str):
                raise UsageError(FIELD, "is not a reference to a secret", "write 'file:PATH'")
            parse_reference(self.reference)
        if fixed is not None and not _HEX.fullmatch(fixed):
            raise UsageError("insecure_test_secret", "must be 64 hex digits", "correct it")

    @property
    def given(self) -> bool:
        """Return whether it names a secret at all; commands that draw no noise need none."""
        return self.reference is not None or self.insecure_test_secret is not None

    @classmethod
    def of(cls, given: "str | SecretSource | None") -> "SecretSource":
        """Return the source of a reference, or of none; a source is returned as it is."""
        return given if isinstance(given, SecretSource) else cls(given)

    def required(self, field: str, rule: str) -> "SecretSource":
        """Return this source, or raise an error that says how to make a secret.

        Args:
            field: the field that would name the secret; rule: what needs it.

        Raises:
            UsageError: there is no secret.
        """
        if not self.given:
            raise UsageError(
                field,
                rule,
                "make one with `dpstream secret new noise.secret` beside the project file, and "
                'write secret = "file:noise.secret" into its data set',
            )
        return self

    @property
    def kind(self) -> str:
        """The kind of place: ``file``, ``env`` or ``gcp``; else ``insecure_test_secret``."""
        return parse_reference(self.reference)[0] if self.reference else "insecure_test_secret"

    @property
    def file(self) -> str | None:
        """The path of the secret's file as in the reference, ``None`` if it is in no file."""
        if self.reference is None or self.kind != "file":
            return None
        return parse_reference(self.reference)[1]

    def below(self, folder: Path) -> "SecretSource":
        """Return the same source with a file's absolute path.

        Args:
            folder: the folder that a relative path starts from.

        Raises:
            UsageError: the path is no path.
        """
        if self.file is None:
            return self
        return dataclasses.replace(self, reference=f"file:{below(folder, self.file, FIELD)}")

    def of_run(self, run_id: str, fingerprint: str) -> "SecretSource":
        """Return the same place for the workers of a run, where only the run's own secret is taken.

        ``ring`` then refuses another secret, by its fingerprint, and ``destroy_keys`` of the run
        ends the ring.
        """
        return dataclasses.replace(self, run_id=run_id, fingerprint=fingerprint)

    def ring(self) -> "KeyRing":
        """Return a new key ring; the caller, or the end of its run, destroys it.

        Raises:
            UsageError, PolicyError, RunError: the secret cannot be read, or it is not the run's.
        """
        from dpstream.dp_transforms.noise.prf import KeyRing  # loads cryptography

        secret = self._secret()
        try:
            ring = KeyRing(secret)
        finally:
            wipe(secret)
        if self.fingerprint not in (None, ring.fingerprint):
            ring.destroy()
            raise PolicyError(
                FIELD,
                "is not the one this run was begun with",
                "give every worker the run's own secret; to change it, begin a new run",
            )
        if self.run_id is not None:
            with _LOCK:
                _LIVE.setdefault(self.run_id, weakref.WeakSet()).add(ring)
        return ring

    def check_readable(self) -> None:
        """Read the secret and overwrite it; raises as ``ring`` does, but for a run's own secret."""
        wipe(self._secret())

    def _secret(self) -> bytearray:
        if self.insecure_test_secret is not None:
            return bytearray.fromhex(self.insecure_test_secret)
        if self.reference is None:
            raise UsageError(
                FIELD, "is required to run", "make one with `dpstream secret new FILE`"
            )
        return read_secret(self.reference)


def destroy_keys(run_id: str) -> None:
    """Destroy every key ring that workers of this process have made for a run; others stay."""
    with _LOCK:
        rings = list(_LIVE.pop(run_id, ()))
    for ring in rings:
        ring.destroy()


def access(name: str) -> bytes:
    """Return the payload of ``projects/P/secrets/S/versions/NUMBER``, its checksum verified.

    Raises:
        UsageError: the extra is not installed, no such secret, no credentials, or the stand-in is
            another machine.
        PolicyError: no permission.
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
        raise UsageError(
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
        return UsageError(
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
