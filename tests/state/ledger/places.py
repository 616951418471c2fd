"""Places of an account, of both kinds, whose rows a test can read, change and put back."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from google.cloud.spanner import KeySet

from dpstream.state.ledger import spanner, sqlite
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.log import Storage
from dpstream.state.ledger.open import open_path
from dpstream.state.spanner.client import connect
from dpstream.state.sqlite.database import sqlite3
from tests import accounts

#: Columns and rows of each table.
Contents = dict[str, tuple[list[str], list[tuple[Any, ...]]]]


class Place(NamedTuple):
    """An account at a path or a URL.

    Attributes:
        contents: returns its rows; put_back: makes these its rows.
    """

    name: str
    storage: Callable[[], Storage]
    contents: Callable[[], Contents]
    put_back: Callable[[Contents], None]

    def open(self) -> Ledger:
        return open_path(self.name)


def in_file(path: Path) -> Place:
    """An account in a new file."""
    accounts.create(path, "flights")

    def contents() -> Contents:
        with contextlib.closing(sqlite3.connect(path)) as db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
            all_rows: Contents = {}
            for table in tables:
                if not table.startswith("sqlite_"):
                    rows = db.execute(f"SELECT * FROM {table}")
                    all_rows[table] = [column for column, *_ in rows.description], rows.fetchall()
        return all_rows

    def put_back(rows_of: Contents) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("PRAGMA synchronous = OFF")
            for table, (columns, rows) in rows_of.items():
                db.execute(f"DELETE FROM {table}")
                into = f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})"
                db.executemany(into, rows)

    return Place(str(path), lambda: sqlite.AccountStorage(path), contents, put_back)


def in_database(url: str) -> Place:
    """The account of a database."""
    tables = {spanner.LOG: ["Number", "Piece", "Writer", "Changes", "Digest"],
              spanner.BLOBS: ["Name", "Piece", "Content"]}  # fmt: skip

    def contents() -> Contents:
        with connect(url).snapshot(multi_use=True) as snapshot:
            return {
                name: (columns, list(map(tuple, snapshot.read(name, columns, KeySet(all_=True)))))
                for name, columns in tables.items()
            }

    def put_back(rows_of: Contents) -> None:
        with connect(url).batch() as batch:
            for table, (columns, rows) in rows_of.items():
                batch.delete(table, KeySet(all_=True))
                if rows:
                    batch.insert(table, columns, rows)

    return Place(url, lambda: spanner.AccountStorage(url), contents, put_back)
