"""Digests of everything a store keeps, by which damage is detected when it is read.

A digest covers the bytes and the name of their place (table, row, column): a flipped bit, a lost
piece and a row that stands in another's place are all noticed, up to collisions of 128 bits.  It
is the tag of AES-GMAC under a public key, with a BLAKE2b digest of the name as its nonce.  The
threat is damage, not somebody who can write to the store, so nothing about it is secret.  It
is ten to twenty times as fast as BLAKE2b or SHA-256 over the bytes themselves, which would add a
third to the cost of a commit; AES is what the noise is made with, so it is fast wherever noise is.
"""

import contextlib
import hashlib
from collections.abc import Iterator

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpstream.accounting.errors import NEW_RUN, PolicyError

#: Bytes of a digest.
SIZE = 16
_PLACE = 11
_COLUMNS = [bytes([column]) for column in range(256)]
_MAC = AESGCM(b"dpstream digests")
#: Hex digits and a space stand before a text.
_TEXT = 2 * SIZE + 1


def digest(name: str, data: bytes | memoryview) -> bytes:
    """Return 16 bytes that bind data to the name of its place."""
    return digest_at(place_of(name), 0, data)


def place_of(name: str) -> bytes:
    """Return the prefix that represents a row's name in the digests of its columns."""
    place = hashlib.blake2b(name.encode(), digest_size=_PLACE, person=b"dpstream-place")
    return place.digest()


def digest_at(place: bytes, column: int, data: bytes | memoryview) -> bytes:
    """Return the ``digest`` of one of up to 256 columns of a row."""
    return _MAC.encrypt(place + _COLUMNS[column], b"", data)


def sealed(name: str, data: bytes) -> bytes:
    """Return the data with its digest in front."""
    return digest(name, data) + data


def unsealed(name: str, blob: object) -> memoryview:
    """Return the data of a sealed blob, not copied.

    Raises:
        PolicyError: it differs from what was written there.
    """
    if not isinstance(blob, bytes) or len(blob) < SIZE:
        raise damaged()
    data = memoryview(blob)[SIZE:]
    refuse_damage(digest(name, data) != blob[:SIZE])
    return data


def sealed_text(name: str, text: str) -> str:
    """Return the text with its digest in front, for columns of texts."""
    # What cannot be a text any more is read as one that no digest fits (`sqlite_file.connect`).
    return f"{digest(name, text.encode(errors='surrogateescape')).hex()} {text}"


def unsealed_text(name: str, sealed: object) -> str:
    """Return the text of a sealed one.

    Raises:
        PolicyError: it differs from what was written there.
    """
    if not isinstance(sealed, str) or sealed_text(name, sealed[_TEXT:]) != sealed:
        raise damaged()
    return sealed[_TEXT:]


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Replace libraries' errors about malformed bytes by the one error for damage."""
    try:
        yield
    except Exception as error:
        from pyarrow import ArrowException  # a ledger is read without Arrow

        if isinstance(error, ArrowException | OSError | LookupError | TypeError | ValueError):
            raise damaged() from None
        raise


def damaged() -> PolicyError:
    """Return the error for a store that differs from what was written."""
    return PolicyError(
        "store",
        "is damaged",
        "restore it from a backup: `dpstream state restore JOB BACKUP --replace`; or move its file "
        f"FILE, and each FILE-* beside it, away and {NEW_RUN}",
    )


def refuse_damage(differs: bool) -> None:
    """Refuse a store that differs from what was written.

    Raises:
        PolicyError: the store differs.
    """
    if differs:
        raise damaged()


def other_format(format: str) -> PolicyError:
    """Return the error for a store of a program with another format."""
    return PolicyError(
        "store",
        f"its format is not {format}, the one of this program",
        f"use the program that wrote it, or {NEW_RUN}",
    )
