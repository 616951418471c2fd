"""Mutations of one Spanner commit, counted as Spanner counts them before they are sent."""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.cloud import spanner

from dpstream.accounting.arrays import Int64
from dpstream.accounting.limits import COMMIT_BYTES, COMMIT_MUTATIONS
from dpstream.state.spanner.client import between, prefix


class Mutations:
    """Rows to write, by table and columns; ``fill`` puts them into a client's batch.

    ``writer`` is a random mark of this commit: whoever finds its row knows whose it is.

    A row written counts once for each of its columns (no table has a secondary index), a range
    deleted counts once.
    """

    def __init__(self) -> None:
        self.writer = secrets.token_hex(16)
        self.count = self.bytes = 0
        self._insert: list[tuple[str, Sequence[str], list[Any]]] = []
        self._upsert: list[tuple[str, Sequence[str], list[Any]]] = []
        #: (part, fencing epoch) of the rows that must be there (see ``epochs``).
        self.epochs: set[tuple[int, int]] = set()
        self._ranges: list[tuple[str, spanner.KeyRange]] = []

    def insert(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Rows that must not be there yet."""
        self._insert.append((table, columns, rows))
        self._counted(columns, rows)

    def require(self, part: int, epoch: int) -> None:
        """The commit fails unless the fencing epoch is open."""
        if (part, epoch) not in self.epochs:
            self.epochs.add((part, epoch))
            self.count += 3

    def upsert(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Rows that are written whether they are there or not; other columns stay."""
        if rows:
            self._upsert.append((table, columns, rows))
            self._counted(columns, rows)

    def delete_all(self, table: str, *key: Any) -> None:
        """Delete every row whose key begins so."""
        self._ranges.append((table, prefix(*key)))
        self.count += 1

    def delete_between(self, table: str, first: tuple[Any, ...], last: tuple[Any, ...]) -> None:
        """Delete every row at or behind one key and before another."""
        self._ranges.append((table, between(first, last)))
        self.count += 1

    def fill(self, batch: Any) -> None:
        """Put everything into a batch of the client."""
        for table, columns, rows in self._insert:
            batch.insert(table, columns, rows)
        for table, columns, rows in self._upsert:
            batch.insert_or_update(table, columns, rows)
        for epoch in sorted(self.epochs):
            batch.update("Progress", ("Part", "WindowIndex", "Reached"), [[*epoch, 0]])
        for table, key_range in self._ranges:
            batch.delete(table, spanner.KeySet(ranges=[key_range]))

    def _counted(self, columns: Sequence[str], rows: list[Any]) -> None:
        self.count += len(columns) * len(rows)
        self.bytes += sum(len(v) if isinstance(v, str) else 8 for row in rows for v in row)


def fits(out: Mutations) -> bool:
    """Whether one commit may hold all of it."""
    return out.count <= COMMIT_MUTATIONS and out.bytes <= COMMIT_BYTES


def parts(rows: Int64, mutations: int, sizes: Int64) -> list[Int64]:
    """``rows`` in runs that fit into one commit each, at least one run.

    Args:
        mutations: most that one of them costs; sizes: (n,) bytes of each.
    """
    cost = np.maximum(mutations / COMMIT_MUTATIONS, sizes * (4 / 3) / COMMIT_BYTES)
    # A run may exceed its share by one row, and every commit has rows of its own.
    number = np.floor(np.cumsum(cost) / 0.9).astype(np.int64)
    return np.split(rows, np.flatnonzero(np.diff(number)) + 1)
