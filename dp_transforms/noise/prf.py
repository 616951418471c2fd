"""AES-256 as a pseudo-random function over columns: bulk blocks and a vectorised CBC-MAC.

The guarantee of the whole product is computational in this function: child keys are HKDF
(SHA-256) children of the deployment's secret key, each with one purpose, so that no two uses
ever share a key.  The secret never leaves ``KeyRing``; it has no repr, pickle or hash.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numba import njit

from accounting.errors import PolicyError, UsageError

Ids = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
KEY_BYTES = 32


class Prf:
    """AES-256 on many 16-byte blocks at once, and a MAC of variable-length rows."""

    def __init__(self, key: bytes) -> None:
        # ECB over inputs that are distinct by construction is a PRF, not an encryption mode.
        self._encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are never pickled")

    def blocks(self, blocks: Ids) -> Ids:
        """(n, 2) uint64 -> (n, 2) uint64 under AES-256."""
        blocks = np.ascontiguousarray(blocks)
        out = np.empty(2 * len(blocks) + 2, np.uint64)
        raw, view = blocks.view(np.uint8).reshape(-1), out.view(np.uint8)
        if len(blocks):
            self._encryptor.update_into(raw.data, view.data[: 16 * len(blocks) + 15])
        return out[: 2 * len(blocks)].reshape(-1, 2)

    def mac(self, message: Ids, lengths: Int64) -> Ids:
        """CBC-MAC of ragged rows of blocks.

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
    """Children of the secret key K, one per purpose."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise UsageError(
                "privacy.key_file", "must hold 64 hex digits", "run `dpstream key new`"
            )

        def child(purpose: str) -> bytes:
            info = b"dpstream/1/" + purpose.encode()
            return HKDFExpand(hashes.SHA256(), 32, info).derive(secret)

        self.node = Prf(child("node noise"))
        self.tweak = Prf(child("node name tweak"))
        self.unit = Prf(child("unit id"))
        self.key = Prf(child("key id"))
        self.release = Prf(child("release id"))
        self.sample = Prf(child("sampling"))
        self._name = child("name prefix")
        self._source = child("source fingerprint")
        self.fingerprint = hashlib.blake2b(
            b"fingerprint", key=child("fingerprint"), digest_size=16
        ).hexdigest()

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are never pickled")

    def name(self, parts: Sequence[bytes]) -> Ids:
        """(2,) uint64: keyed BLAKE2b-128 of the length-prefixed parts of a node name."""
        return self._digest(self._name, parts)

    def source_fingerprint(self, parts: Sequence[bytes]) -> str:
        """Keyed digest of the input's identity (never published unkeyed: it could be guessed)."""
        return self._digest(self._source, parts).tobytes().hex()

    @staticmethod
    def _digest(key: bytes, parts: Sequence[bytes]) -> Ids:
        digest = hashlib.blake2b(key=key, digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return np.frombuffer(digest.digest(), np.uint64)


def load_key(path: str | Path) -> KeyRing:
    """The key ring of a key file (64 hex digits), refused when others can read it."""
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text(encoding="ascii").strip()
        secret = bytes.fromhex(text)
    except (OSError, ValueError):
        raise UsageError(
            "privacy.key_file",
            "the noise key file is missing or not 64 hex digits",
            "create one with `dpstream key new FILE`",
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise PolicyError(
            "privacy.key_file",
            "the noise key can be read by other users",
            "run chmod 600 on the file",
        )
    return KeyRing(secret)


@njit(cache=True, nogil=True)
def _copy_component(
    out: Bytes, cursor: Int64, tag: int, data: Bytes, offsets: Int64
) -> None:  # pragma: no cover - compiled
    for i in range(cursor.size):
        length = offsets[i + 1] - offsets[i]
        at = cursor[i]
        out[at] = tag
        for byte in range(4):
            out[at + 1 + byte] = (length >> (8 * byte)) & 255
        for k in range(length):
            out[at + 5 + k] = data[offsets[i] + k]
        cursor[i] = at + 5 + length


def frame(context: Int64, components: Sequence[tuple[int, Bytes, Int64]]) -> tuple[Ids, Int64]:
    """Length-prefixed, typed rows as blocks for ``Prf.mac``.

    Args:
        context: (n,) int64 mixed into the first block (a privacy period, or 0).
        components: for each column (type tag, data bytes, (n+1,) offsets).

    Returns:
        (blocks, lengths): the first block of a row is (total bytes, context).
    """
    size = np.zeros(len(context), np.int64)
    for _, _, offsets in components:
        size += 5 + np.diff(offsets)
    lengths = 1 + (size + 15) // 16
    starts = np.cumsum(lengths) - lengths
    message = np.zeros((int(lengths.sum()), 2), np.uint64)
    message[starts, 0] = size
    message[starts, 1] = context.view(np.uint64)
    out = message.view(np.uint8).reshape(-1)
    cursor = 16 * (starts + 1)
    for tag, data, offsets in components:
        _copy_component(out, cursor, tag, data, offsets)
    return message, lengths
