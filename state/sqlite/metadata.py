"""Notes of the embedded store: small public texts in its meta table, changed by comparison."""

from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import failed
from dpstream.state.sqlite.tables import NOTE, put_meta, read_meta


def read_metadata(db: sqlite3.Connection, name: str) -> str | None:
    """The note, ``None`` if there is none."""
    try:
        return read_meta(db, NOTE + name)
    except sqlite3.Error as error:
        raise failed(error) from None


def swap_metadata(db: sqlite3.Connection, name: str, old: str | None, new: str | None) -> bool:
    """Replace the note durably if it is still ``old``; ``None`` stands for no note."""
    try:
        with db:
            db.execute("BEGIN IMMEDIATE")
            if read_metadata(db, name) != old:
                return False
            if new is None:
                db.execute("DELETE FROM meta WHERE name = ?", (NOTE + name,))
            else:
                put_meta(db, NOTE + name, new)
            return True
    except sqlite3.Error as error:
        raise failed(error) from None
