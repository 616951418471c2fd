"""What tests of the embedded store's run selected, where later windows remember it.

One row a step that selected any key, written in the step's own transaction.
"""

from collections.abc import Iterator

from dpstream.state.retention_store import Selection
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import selection_of, selection_row


def add(db: sqlite3.Connection, shard: int, selection: Selection) -> None:
    """Write a row, as a part of the caller's transaction."""
    row = selection_row(shard, selection)
    db.execute("INSERT INTO selections VALUES (?, ?, ?, ?)", row)


def read(db: sqlite3.Connection, shard: int, after: int, upto: int | None) -> Iterator[Selection]:
    """Rows of a shard behind a trigger time, in order."""
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
    db.execute("DELETE FROM selections WHERE trigger_time <= ?", (trigger_time,))
