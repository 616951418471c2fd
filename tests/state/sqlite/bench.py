"""A SQLite store for the suites and the tests of its modules."""

from pathlib import Path

import msgspec

from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity, Store
from dpstream.state.transfer import copy_store
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    Bench,
)
from tests.state.life_conformance import LINE, RetentionBench, sample
from tests.state.life_conformance import OLD as OLD_IDENTITY


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


# What a reshard and an expiry leave in a store: rows in every table.


def opened(path: Path) -> SqliteStore:
    """The file as a run opens it."""
    return SqliteStore(path, KEY_SCHEMA, STREAMS)


def resharded(folder: Path) -> SqliteStore:
    """A store after a reshard, a note and an expiry."""
    old, new = folder / "old.db", folder / "new.db"
    create_store(old, OLD_IDENTITY)
    source = opened(old)
    sample(source, uneven=True)
    create_store(new, msgspec.structs.replace(OLD_IDENTITY, shards=3))
    target = opened(new)
    copy_store(source, target, LINE)
    source.close(), target.close()
    target = opened(new)
    target.set_metadata("x", "a")
    for shard in range(3):
        target.forget_positions(shard, 2)
    target.compact()
    return target
