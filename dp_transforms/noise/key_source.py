"""Where a process finds the noise key: a reference that it follows for itself, and what it opened.

Apart from ``run``: a command that needs the key but takes part in no run loads no store.
"""

import threading
import weakref

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.references import FIELD, parse_reference, read_key
from dpstream.dp_transforms.noise.secret import wipe

#: Rings of this process that are in use, by the run they were made for.
_LIVE: dict[str, weakref.WeakSet[KeyRing]] = {}
_LOCK = threading.Lock()


class KeySource:
    """Where a worker finds the noise key: a reference, or an insecure test key.

    Pickles hold the reference (``file:PATH``, ``env:NAME``, ``gcp:...``; see
    `dp_transforms.noise.references`), never the key: each worker reads it for itself.

    Args:
        reference: of the grammar above; it is not followed here.
        insecure_test_key: 64 hex digits, for tests.

    Raises:
        UsageError, PolicyError: not a reference, or one that can move.
    """

    def __init__(self, reference: str | None, insecure_test_key: str | None = None) -> None:
        if reference is not None:
            parse_reference(reference)
        self.reference, self.insecure_test_key = reference, insecure_test_key
        self._run_id: str | None = None
        self._fingerprint: str | None = None

    @property
    def kind(self) -> str:
        """``file``, ``env`` or ``gcp``; else ``insecure_test_key``."""
        return parse_reference(self.reference)[0] if self.reference else "insecure_test_key"

    def of_run(self, run_id: str, fingerprint: str) -> "KeySource":
        """The same place for the workers of a run: no other key than the run's is taken there."""
        bound = KeySource(self.reference, self.insecure_test_key)
        bound._run_id, bound._fingerprint = run_id, fingerprint
        return bound

    def ring(self) -> KeyRing:
        """A new key ring; the caller, or the end of its run, destroys it.

        Raises:
            UsageError, PolicyError, RunError: no key can be had, or it is not the run's.
        """
        secret = self._secret()
        try:
            ring = KeyRing(secret)
        finally:
            wipe(secret)
        if self._fingerprint not in (None, ring.fingerprint):
            ring.destroy()
            raise PolicyError(
                FIELD,
                "is not the key this run was begun with",
                "give every worker the run's own key; to change keys, begin a new run",
            )
        if self._run_id is not None:
            with _LOCK:
                _LIVE.setdefault(self._run_id, weakref.WeakSet()).add(ring)
        return ring

    def _secret(self) -> bytearray:
        if self.insecure_test_key is not None:
            return bytearray.fromhex(self.insecure_test_key)
        if self.reference is None:
            raise UsageError(FIELD, "is required to run", "make one with `dpstream key new FILE`")
        return read_key(self.reference)


def destroy_keys(run_id: str) -> None:
    """Destroy every key ring that workers of this process have made for a run."""
    with _LOCK:
        rings = list(_LIVE.pop(run_id, ()))
    for ring in rings:
        ring.destroy()
