"""AES-256 as a pseudo-random function over columns: bulk blocks and a vectorised CBC-MAC.

The guarantee of the whole product is computational in this function: child keys are HKDF
(SHA-256) children of the deployment's secret key, each with one purpose, so that no two uses
ever share a key.  The secret never leaves ``KeyRing``; it has no repr, pickle or hash.

``destroy`` ends a ring: nothing can be drawn with it or with its children afterwards.  What the
program holds itself (buffers of K and its children) is overwritten at once; the AES schedules
are in OpenSSL's memory, which OpenSSL clears when a cipher is freed.  Not in its power: copies
the interpreter made before K came here (the text of an environment variable, the message of a
secret manager), moved or swapped pages, and a core dump taken while the run was going on.
"""

import hashlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError, RunError, UsageError
from dpstream.dp_transforms.noise.secret import KEY_BYTES, Secret, wipe

#: What K has children for; every use has its own.
PURPOSES = (
    *("node noise", "node name tweak", "unit id", "key id", "release id", "sampling"),
    *("record id", "name prefix", "source fingerprint", "fingerprint", "input digest"),
)


def destroyed() -> RunError:
    """Return the error that every use of keys raises after their ring was destroyed."""
    return RunError(
        "secret",
        "the keys of this run were destroyed at its end",
        "begin or resume the run again",
    )


class Prf:
    """A pseudo-random function, AES-256 under one key: of 16-byte blocks, and of rows of blocks.

    ``blocks`` encrypts many distinct blocks at once, ``mac`` digests rows of any length.  An
    instance is safe for several threads, and is never pickled.
    """

    def __init__(self, key: Secret) -> None:
        # ECB over inputs that are distinct by construction is a PRF, not an encryption mode.
        # OpenSSL keeps its own schedule: the caller may overwrite ``key`` from here on.
        self._encryptor: CipherContext | None = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def destroy(self) -> None:
        """Free the cipher; every later use of this object raises ``RunError``."""
        self._encryptor = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are never pickled")

    def blocks(self, blocks: Ids) -> Ids:
        """Return the AES-256 encryptions, (n, 2) uint64, of n blocks of 16 bytes, (n, 2) uint64.

        Equal blocks have equal encryptions, so that whoever names noise by blocks keeps them
        distinct.

        Raises:
            RunError: the keys were destroyed.
        """
        encryptor = self._encryptor
        if encryptor is None:
            raise destroyed()
        blocks = np.ascontiguousarray(blocks)
        out = np.empty(2 * len(blocks) + 2, np.uint64)
        raw, view = blocks.view(np.uint8).reshape(-1), out.view(np.uint8)
        if len(blocks):
            encryptor.update_into(raw.data, view.data[: 16 * len(blocks) + 15])
        return out[: 2 * len(blocks)].reshape(-1, 2)

    def mac(self, message: Ids, lengths: Int64) -> Ids:
        """Return the CBC-MAC of ragged rows of blocks.

        Args:
            message: (sum(lengths), 2) uint64 blocks of all rows; the first block of a row must
                hold its length (prefix-free, so CBC-MAC is a PRF).
            lengths: (n,) blocks of each row, >= 1.

        Returns:
            (n, 2) uint64 keyed ids.
        """
        if len(lengths) and (lengths == lengths[0]).all():
            # Equal lengths (most key columns): block k of all rows is a plain stride.
            rows = message.reshape(len(lengths), int(lengths[0]), 2)
            state = self.blocks(rows[:, 0])
            for block in range(1, rows.shape[1]):
                state ^= rows[:, block]
                state = self.blocks(state)
            return state
        starts = np.cumsum(lengths) - lengths
        state = self.blocks(message[starts])
        active = np.arange(len(lengths))
        for block in range(1, int(lengths.max(initial=1))):
            active = active[lengths[active] > block]
            state[active] = self.blocks(state[active] ^ message[starts[active] + block])
        return state


class KeyRing:
    """Children of the secret key K, one per purpose; a context that destroys them at its end.

    Args:
        secret: K; only read here, its owner overwrites it (see ``wipe``).
    """

    def __init__(self, secret: Secret) -> None:
        if len(secret) != KEY_BYTES:
            raise UsageError("secret", "must be 64 hex digits", "run `dpstream secret new`")
        self._alive = True
        self.node = _prf(secret, "node noise")
        self.tweak = _prf(secret, "node name tweak")
        self.unit = _prf(secret, "unit id")
        self.key = _prf(secret, "key id")
        self.release = _prf(secret, "release id")
        self.sample = _prf(secret, "sampling")
        self.record = _prf(secret, "record id")
        self.inputs = _prf(secret, "input digest")
        self._name = _child(secret, "name prefix")
        self._source = _child(secret, "source fingerprint")
        printed = _child(secret, "fingerprint")
        #: hex digest that tells keys apart and nothing else about them
        self.fingerprint = hashlib.blake2b(b"fingerprint", key=printed, digest_size=16).hexdigest()
        wipe(printed)
        # Also a ring that is only dropped, or alive at exit, leaves no buffer behind.  Its ciphers
        # may outlive it (a stream of noise holds its own); they clear themselves.
        weakref.finalize(self, wipe, self._name, self._source)

    def destroy(self) -> None:
        """Overwrite and free all children; every later use of them raises ``RunError``.

        Also for whoever got a child (``ring.node``) from here.  Calling it again is harmless.
        """
        self._alive = False
        named = (self.node, self.tweak, self.unit, self.key, self.release, self.sample)
        for prf in (*named, self.record, self.inputs):
            prf.destroy()
        wipe(self._name, self._source)

    def __enter__(self) -> "KeyRing":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are never pickled")

    def name(self, parts: Sequence[bytes]) -> Ids:
        """Return (2,) uint64, the name of nodes of noise: keyed BLAKE2b-128 of its parts.

        Parts are prefixed with their lengths, so that no two lists of parts run together into one
        name.
        """
        return self._digest(self._name, parts)

    def source_fingerprint(self, parts: Sequence[bytes]) -> str:
        """Return a keyed digest, 32 hex digits, of the parts that identify the input.

        It is keyed because an unkeyed one could be guessed; it is only compared, never published.
        """
        return self._digest(self._source, parts).tobytes().hex()

    def _digest(self, key: bytearray, parts: Sequence[bytes]) -> Ids:
        digest = hashlib.blake2b(key=key, digest_size=16)
        # Asked after the key was read: another thread may destroy it meanwhile.
        if not self._alive:
            raise destroyed()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return np.frombuffer(digest.digest(), np.uint64)


def _child(secret: Secret, purpose: str) -> bytearray:
    """K's child for a purpose, in a buffer of the caller's."""
    if purpose not in PURPOSES:
        raise InvariantError("a key has one of the known purposes")
    child = bytearray(KEY_BYTES)
    info = b"dpstream/1/" + purpose.encode()
    HKDFExpand(hashes.SHA256(), KEY_BYTES, info).derive_into(secret, child)
    return child


def _prf(secret: Secret, purpose: str) -> Prf:
    child = _child(secret, purpose)
    try:
        return Prf(child)
    finally:
        wipe(child)
