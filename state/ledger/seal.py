"""Digests of all rows of an account, by which damage to any row is detected.

Each table has a sum, modulo 2^128, of digests of its rows, each bound to all of its columns: a
row that is changed, lost or added changes the sum, and a transaction updates it from the rows that
it changes alone.  The seal is the sums of all tables under a digest of its own.  Opening an account
adds all rows up and compares the sums with the seal.  The threat is damage, not somebody who can
write to the account, as everywhere in ``state.seals``.
"""

from collections.abc import Iterable

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.state.seals import digest, digest_at, place_of
from dpstream.state.sqlite.database import sqlite3

_NAME = "seal"
#: Columns of each table, as they are added up.
COLUMNS = {
    "entries": "seq, name, entry, digest",
    "tokens": "run_id, token, previous",
    "requests": "run_id, request, granted, receipt, digest, view, view_digest",
}
_PLACES = {table: place_of(f"ledger {table}") for table in COLUMNS}
_MODULUS = 2**128
_ENCODER = msgspec.msgpack.Encoder()

Sums = dict[str, int]


def sum_of(table: str, rows: Iterable[tuple[object, ...]], begin: int = 0) -> int:
    """Return the sum of rows added to one.

    Raises:
        PolicyError: a text is no longer valid.
    """
    place, total = _PLACES[table], begin
    try:
        for row in rows:
            packed = _ENCODER.encode(row)
            total += int.from_bytes(digest_at(place, 0, packed), "big")
    except UnicodeError:
        raise damaged() from None
    return total % _MODULUS


def without(table: str, rows: Iterable[tuple[object, ...]], begin: int) -> int:
    """Return the sum without rows that were in it."""
    return (begin - sum_of(table, rows)) % _MODULUS


def rows_of(db: sqlite3.Connection, table: str) -> Iterable[tuple[object, ...]]:
    """Return all rows of a table."""
    return db.execute(f"SELECT {COLUMNS[table]} FROM {table}")


def put_seal(db: sqlite3.Connection, sums: Sums | None = None) -> None:
    """Write the seal of these sums (default: of the present rows), in the caller's transaction."""
    if sums is None:
        sums = {table: sum_of(table, rows_of(db, table)) for table in COLUMNS}
    text = " ".join(f"{sums[table]:032x}" for table in COLUMNS)
    row = (_NAME, f"{text} {_digest(text)}")
    db.execute("INSERT OR REPLACE INTO account_meta VALUES (?, ?)", row)


def read_seal(db: sqlite3.Connection) -> Sums:
    """Return the sums of the last transaction.

    Raises:
        PolicyError: the seal differs from what was written.
    """
    row = db.execute("SELECT value FROM account_meta WHERE name = ?", (_NAME,)).fetchone()
    text, _, seal = str(row[0] if row else "").rpartition(" ")
    if seal != _digest(text):
        raise damaged()
    return {table: int(part, 16) for table, part in zip(COLUMNS, text.split(" "), strict=True)}


def _digest(text: str) -> str:
    return digest("ledger seal", text.encode(errors="surrogateescape")).hex()


def check_pages(db: sqlite3.Connection) -> None:
    """Check that SQLite can read all of the file.

    Raises:
        PolicyError: it cannot be read.
    """
    if db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        raise damaged()


def damaged() -> PolicyError:
    """Return the error for an account that differs from what was written."""
    return PolicyError("account.path", "is damaged", "restore the account from a backup")
