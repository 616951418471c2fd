"""Databases a world can run on; a new store is one more entry."""

from collections.abc import Callable

import pyarrow as pa

from state.sqlite import SqliteStore
from state.sqlite_file import create_store
from state.store import RunIdentity, Store
from tests.simulation.limited import Database
from tests.state.conformance import Bench

#: (identity, key schema, sums, folder, seed) -> a new database for this run.
Make = Callable[[RunIdentity, pa.Schema, int, str, int], Bench]


class SqliteFile(Bench):
    """The embedded store: each handle as of a process of its own."""

    def __init__(self, identity: RunIdentity, schema: pa.Schema, streams: int, path: str) -> None:
        self._path, self._schema, self._streams = path, schema, streams
        create_store(path, identity)

    def open(self) -> Store:
        return SqliteStore(self._path, self._schema, self._streams)

    def close(self) -> None:
        """Every handle is closed by its process."""


def sqlite(identity: RunIdentity, schema: pa.Schema, streams: int, folder: str, seed: int) -> Bench:
    """A new file in a folder of its own."""
    return SqliteFile(identity, schema, streams, f"{folder}/world{seed}.db")


def limited(
    identity: RunIdentity, schema: pa.Schema, streams: int, folder: str, seed: int
) -> Bench:
    """The model, with room for few rows in a commit."""
    rows = (1, 2, 3, 7, 1 << 30)[seed // 2 % 5]
    return Database(identity, schema, streams, rows, seed)


MAKERS: dict[str, Make] = {"sqlite": sqlite, "limited": limited}
