"""A digest of all that a ledger holds, so that damage to any row of it is noticed.

The chain of the entries notices one that was edited or taken out; the digest covers the tokens and
the choices as well, and the end of the chain.  A transaction checks it first and writes it last.
"""

import json
import sqlite3
from collections.abc import Callable

from dpstream.accounting.errors import PolicyError
from dpstream.state.seals import digest

_NAME = "seal"
#: Tables by what their rows are ordered by.
_TABLES = {"entries": "seq", "tokens": "run_id, token", "choices": "run_id"}


def put_seal(db: sqlite3.Connection) -> None:
    """Write the digest, as a part of the caller's transaction."""
    db.execute("INSERT OR REPLACE INTO ledger_meta VALUES (?, ?)", (_NAME, _seal(db)))


def check_seal(db: sqlite3.Connection, chained: Callable[[sqlite3.Connection], object]) -> None:
    """Check the digest.

    Args:
        chained: checks the chain of the entries, and says so if that is what does not hold.

    Raises:
        PolicyError: the ledger is not what was written.
    """
    row = db.execute("SELECT value FROM ledger_meta WHERE name = ?", (_NAME,)).fetchone()
    if row is None or row[0] != _seal(db):
        chained(db)
        raise damaged()


def check_pages(db: sqlite3.Connection) -> None:
    """Check that SQLite can read all of the file.

    Raises:
        PolicyError: it cannot.
    """
    if db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        raise damaged()


def _seal(db: sqlite3.Connection) -> str:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    rows = {
        table: db.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall()
        for table, order in _TABLES.items()
        if table in there
    }
    # A table without a row is as one that is not there: the last is made by the first choice.
    kept = {table: found for table, found in rows.items() if found}
    return digest("ledger", json.dumps(kept, default=repr).encode()).hex()


def damaged() -> PolicyError:
    """The ledger is not what was written."""
    return PolicyError("ledger.path", "is damaged", "restore the ledger from a backup")
