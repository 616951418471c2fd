"""Where a process finds the secret: a reference that it follows for itself, and what it opened.

Apart from ``run``: a command that needs the secret but takes part in no run loads no store.  What
reads no secret, as a plan, does not load ciphers either.
"""

import dataclasses
import re
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.places import below
from dpstream.dp_transforms.noise.references import FIELD, parse_reference, read_secret
from dpstream.dp_transforms.noise.secret import wipe

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.prf import KeyRing

_HEX = re.compile("[0-9a-f]{64}")
#: Rings of this process that are in use, by the run they were made for.
_LIVE: dict[str, "weakref.WeakSet[KeyRing]"] = {}
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class SecretSource:
    """Where a worker finds the secret: a reference, or an insecure test secret.

    Pickles hold the reference (``file:PATH``, ``env:NAME``, ``gcp:...``; see
    `dp_transforms.noise.references`), never the secret: each worker reads it for itself.

    Attributes:
        reference: of the grammar above; it is not followed here.
        insecure_test_secret: 64 hex digits, for tests.
        run_id: the run whose end destroys the rings that are made here, if any.
        fingerprint: of the only secret that is taken here, if it is fixed.

    Raises:
        UsageError, PolicyError: both are given, or the reference is none, or one that can move.
    """

    reference: str | None = None
    insecure_test_secret: str | None = None
    run_id: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        fixed = self.insecure_test_secret
        if self.reference is not None:
            if fixed is not None:
                raise UsageError(
                    FIELD, "is given twice", "keep one of secret and insecure_test_secret"
                )
            parse_reference(self.reference)
        if fixed is not None and not _HEX.fullmatch(fixed):
            raise UsageError("insecure_test_secret", "must be 64 hex digits", "correct it")

    @property
    def given(self) -> bool:
        """Whether there is a secret to read at all."""
        return self.reference is not None or self.insecure_test_secret is not None

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
