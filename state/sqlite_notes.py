"""Notes of the embedded store: small public texts in its meta table, changed by comparison."""

import sqlite3

from state.sqlite_file import failed

_NAMED = "note."


def read_note(db: sqlite3.Connection, name: str) -> str | None:
    """The note, ``None`` if there is none."""
    try:
        row = db.execute("SELECT value FROM meta WHERE name = ?", (_NAMED + name,)).fetchone()
    except sqlite3.Error as error:
        raise failed(error) from None
    return None if row is None else str(row[0])


def swap_note(db: sqlite3.Connection, name: str, old: str | None, new: str | None) -> bool:
    """Replace the note durably if it is still ``old``; ``None`` stands for no note."""
    try:
        with db:
            db.execute("BEGIN IMMEDIATE")
            if read_note(db, name) != old:
                return False
            if new is None:
                db.execute("DELETE FROM meta WHERE name = ?", (_NAMED + name,))
            else:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_NAMED + name, new))
            return True
    except sqlite3.Error as error:
        raise failed(error) from None
