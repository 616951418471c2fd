"""What tests of the embedded store's run selected, where later windows remember it.

One row a step that selected any key, written in the step's own transaction.  The table is made by
the first row, so that a store of a run that remembers nothing is as it always was.
"""

from collections.abc import Iterator

from dpstream.state.retention_store import Selection
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import selection_of, selection_row

TABLE = "selections"
SELECTIONS = """
CREATE TABLE IF NOT EXISTS selections (
  shard INTEGER NOT NULL, trigger_time INTEGER NOT NULL, window INTEGER NOT NULL,
  keys BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS selections_by_shard ON selections (shard, trigger_time)
"""


def there(db: sqlite3.Connection) -> bool:
    """Whether anything was ever selected to be remembered."""
    found = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return db.execute(found, (TABLE,)).fetchone() is not None


def add(db: sqlite3.Connection, shard: int, selection: Selection) -> None:
    """Write a row, as a part of the caller's transaction."""
    for statement in SELECTIONS.split(";"):
        db.execute(statement)
    row = selection_row(shard, selection)
    db.execute("INSERT INTO selections VALUES (?, ?, ?, ?)", row)


def read(db: sqlite3.Connection, shard: int, after: int, upto: int | None) -> Iterator[Selection]:
    """Rows of a shard behind a trigger time, in order."""
    if not there(db):
        return
    last = (1 << 62) if upto is None else upto
    rows = (
        "SELECT trigger_time, window, keys FROM selections"
        " WHERE shard = ? AND trigger_time > ? AND trigger_time <= ?"
        " ORDER BY trigger_time, window, rowid"
    )
    for trigger_time, window, blob in db.execute(rows, (shard, after, last)).fetchall():
        yield selection_of(shard, trigger_time, window, blob)


def forget(db: sqlite3.Connection, trigger_time: int) -> None:
    """Delete the rows up to a trigger time."""
    if there(db):
        db.execute("DELETE FROM selections WHERE trigger_time <= ?", (trigger_time,))
