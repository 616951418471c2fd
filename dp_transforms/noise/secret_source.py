"""A reference to a data set's secret, and how a process reads the secret that it names.

This module is apart from ``run``, so that a command that needs the secret but no run imports no
store.
"""

import dataclasses
import os
import re
import stat
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.places import below
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe

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


def parse_reference(text: str) -> tuple[str, str]:
    """(scheme, place) of a reference; nothing is read.

    Raises:
        UsageError: not of the grammar; the text is not repeated, because it may be a secret.
        PolicyError: a version of a secret by a name that can move (``latest``, an alias).
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
        raise PolicyError(
            FIELD,
            "must name a version by its number: a run goes on with the secret it was begun with, "
            "and any other name can move to another secret",
            "write '.../versions/NUMBER'",
        )
    return scheme, place


def read_secret(reference: str) -> bytearray:
    """The 32 bytes a reference leads to, in a buffer that the caller overwrites (``wipe``).

    Raises:
        UsageError: there is no secret, or something else; PolicyError: others can read it.
        RunError: the secret manager could not be asked.
    """
    scheme, place = parse_reference(reference)
    if scheme == "file":
        text = _of_file(place)
    elif scheme == "env":
        text = _of_environment(place)
    else:
        from dpstream.dp_transforms.noise.secret_manager import (
            access,  # an extra, and slow to import
        )

        text = bytearray(access(place))
    try:
        return _decoded(text)
    finally:
        wipe(text)


def _of_file(path: str) -> bytearray:
    """The text of a file that nobody else can read; permissions of what was opened."""
    text = bytearray(MAX_TEXT)
    problem: DpstreamError | None = None
    try:
        with open(path, "rb", buffering=0) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                problem = PolicyError(
                    FIELD,
                    "the secret can be read or changed by other users",
                    "run chmod 600 on the file",
                )
            else:
                del text[file.readinto(text) or 0 :]
    except PermissionError:
        problem = UsageError(
            FIELD, "the secret file may not be read", "check its owner and its folder"
        )
    except (OSError, ValueError):
        problem = UsageError(
            FIELD,
            "the secret file is missing or no file",
            "restore it, or create one for a new run with `dpstream secret new FILE`",
        )
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


def _decoded(text: bytearray) -> bytearray:
    """The bytes of 64 hex digits with white space around them."""
    digits = re.fullmatch(rb"\s*([0-9a-fA-F]{64})\s*", text) if len(text) < MAX_TEXT else None
    if digits is None:
        raise UsageError(
            FIELD,
            "what it leads to is not 64 hex digits",
            "make a secret with `dpstream secret new FILE` and keep its text there",
        )
    begin, secret = digits.start(1), bytearray(KEY_BYTES)
    for index in range(KEY_BYTES):
        at = begin + 2 * index
        secret[index] = int(text[at : at + 2], 16)
    if len(set(secret)) < MIN_DISTINCT:
        wipe(secret)
        raise PolicyError(
            FIELD,
            "what it leads to is a placeholder, not a random secret",
            "make a secret with `dpstream secret new FILE`",
        )
    return secret


_HEX = re.compile("[0-9a-f]{64}")
#: Rings of this process that are in use, by the run they were made for.
_LIVE: dict[str, "weakref.WeakSet[KeyRing]"] = {}
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class SecretSource:
    """Where a worker finds the secret: a reference, or an insecure test secret.

    Pickles hold the reference (``file:PATH``, ``env:NAME``, ``gcp:...``; see
    `dp_transforms.noise.secret_source`), never the secret: each worker reads it for itself.

    Attributes:
        reference: of the grammar above; it is not followed here.
        insecure_test_secret: 64 hex digits, for tests.
        run_id: the run whose end destroys the rings that are made here, if any.
        fingerprint: of the only secret that is taken here, if it is fixed.

    Raises:
        UsageError, PolicyError: both are given, or the reference is none, or one that can move.
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
        """Whether there is a secret to read at all."""
        return self.reference is not None or self.insecure_test_secret is not None

    @classmethod
    def of(cls, given: "str | SecretSource | None") -> "SecretSource":
        """Return the source of a reference; a source is returned as it is."""
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
        """``file``, ``env`` or ``gcp``; else ``insecure_test_secret``."""
        return parse_reference(self.reference)[0] if self.reference else "insecure_test_secret"

    @property
    def file(self) -> str | None:
        """The path of the secret's file, if it is in one."""
        if self.reference is None or self.kind != "file":
            return None
        return parse_reference(self.reference)[1]

    def below(self, folder: Path) -> "SecretSource":
        """The same with a file's absolute path.

        Args:
            folder: from which a path starts.

        Raises:
            UsageError: the path is no path.
        """
        if self.file is None:
            return self
        return dataclasses.replace(self, reference=f"file:{below(folder, self.file, FIELD)}")

    def of_run(self, run_id: str, fingerprint: str) -> "SecretSource":
        """The same place for the workers of a run: only the run's own secret is taken there."""
        return dataclasses.replace(self, run_id=run_id, fingerprint=fingerprint)

    def ring(self) -> "KeyRing":
        """A new key ring; the caller, or the end of its run, destroys it.

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

    def _secret(self) -> bytearray:
        if self.insecure_test_secret is not None:
            return bytearray.fromhex(self.insecure_test_secret)
        if self.reference is None:
            raise UsageError(
                FIELD, "is required to run", "make one with `dpstream secret new FILE`"
            )
        return read_secret(self.reference)


def destroy_keys(run_id: str) -> None:
    """Destroy every key ring that workers of this process have made for a run."""
    with _LOCK:
        rings = list(_LIVE.pop(run_id, ()))
    for ring in rings:
        ring.destroy()
