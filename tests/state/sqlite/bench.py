"""A SQLite store for the suites and the tests of its modules."""

from pathlib import Path

from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity, Store
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    Bench,
)
from tests.state.life_conformance import RetentionBench


class SqliteBench(Bench):
    """A file; every handle is a connection of its own."""

    def __init__(self, path: Path, identity: RunIdentity = IDENTITY) -> None:
        self.path = path
        create_store(path, identity)
        self._open: list[Store] = []

    def open(self) -> SqliteStore:
        store = SqliteStore(self.path, KEY_SCHEMA, STREAMS)
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(self.path) as db:
            rows = db.execute(query).fetchall()
        db.close()
        return rows


class SqliteRetentionBench(SqliteBench, RetentionBench):
    """New stores are files beside the first."""

    def fresh(self, identity: RunIdentity) -> SqliteStore:
        path = self.path.with_name(f"fresh{len(self._open)}.db")
        create_store(path, identity)
        store = SqliteStore(path, KEY_SCHEMA, STREAMS)
        self._open.append(store)
        return store
