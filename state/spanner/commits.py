"""Commits to Spanner: mutations counted before they are sent, and the fencing epochs they need.

Mutations are counted as Spanner counts them, so that a commit stays within its limits.

Fencing epochs keep a worker that was asleep from a step whose own fence is gone.  A step's row in
``Steps`` can be inserted only once, and so can that of a decision of BOUND.  A stream of years
cannot keep all of them.  So windows, and the trigger times that decisions follow, are counted in
fencing epochs of ``EPOCH_LENGTH``; every commit of a step or a decision touches the row of its
fencing epoch in ``Progress``, which must be there.  Rows of a closed fencing epoch go together with
the epoch's own; who finds it missing opens it, in a transaction that asks whether it was closed:

* windows: those before ``RetainedWindows.dropped`` are, and take no more steps;
* decisions: those that followed a trigger time of a fencing epoch before the one of the last
  decision are: whoever would follow them was overtaken.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.arrays import Int64
from dpstream.accounting.limits import COMMIT_BYTES, COMMIT_MUTATIONS
from dpstream.state.retention_store import RETAINED_WINDOWS, RetainedWindows
from dpstream.state.spanner.client import between, commit, prefix, transact
from dpstream.state.spanner.schema import BOUND, named

#: Windows, or trigger times, of a fencing epoch.
EPOCH_LENGTH = 64
_WINDOWS, _DECISIONS = -(1 << 20), -(1 << 40)


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
        #: (part, fencing epoch) of the rows that must be there (see the module).
        self.epochs: set[tuple[int, int]] = set()
        self._ranges: list[tuple[str, spanner.KeyRange]] = []

    def insert(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Insert rows that must not be there yet; else the commit fails with ``ExistsError``."""
        self._insert.append((table, columns, rows))
        self._counted(columns, rows)

    def require(self, part: int, epoch: int) -> None:
        """Let the commit fail with ``MissingError`` unless a fencing epoch is open."""
        if (part, epoch) not in self.epochs:
            self.epochs.add((part, epoch))
            self.count += 3

    def upsert(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Write rows whether they are there or not; columns that are not named stay."""
        if rows:
            self._upsert.append((table, columns, rows))
            self._counted(columns, rows)

    def delete_all(self, table: str, *key: Any) -> None:
        """Delete every row of a table whose key begins with these values."""
        self._ranges.append((table, prefix(*key)))
        self.count += 1

    def delete_between(self, table: str, first: tuple[Any, ...], last: tuple[Any, ...]) -> None:
        """Delete every row of a table whose key is at or behind ``first`` and before ``last``."""
        self._ranges.append((table, between(first, last)))
        self.count += 1

    def fill(self, batch: Any) -> None:
        """Put everything into a batch of the client, which commits it in one call."""
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
    """Return whether one commit may hold all of it, by Spanner's limits on mutations and bytes."""
    return out.count <= COMMIT_MUTATIONS and out.bytes <= COMMIT_BYTES


def parts(rows: Int64, mutations: int, sizes: Int64) -> list[Int64]:
    """Split ``rows`` into runs that fit into one commit each, at least one run.

    Args:
        mutations: most that one of them costs; sizes: (n,) bytes of each.
    """
    cost = np.maximum(mutations / COMMIT_MUTATIONS, sizes * (4 / 3) / COMMIT_BYTES)
    # A run may exceed its share by one row, and every commit has rows of its own.
    number = np.floor(np.cumsum(cost) / 0.9).astype(np.int64)
    return np.split(rows, np.flatnonzero(np.diff(number)) + 1)


def of_window(window: int) -> int:
    """Return the ``WindowIndex`` of the row that stands for a window's fencing epoch."""
    return _WINDOWS - window // EPOCH_LENGTH


def of_decision(trigger_time: int) -> int:
    """Return the ``WindowIndex`` of the row for a decision's fencing epoch.

    Args:
        trigger_time: the one that the decision follows, which names its fencing epoch.
    """
    return _DECISIONS - trigger_time // EPOCH_LENGTH


def open_fencing_epoch(database: Database, generation: int, part: int, epoch: int) -> bool:
    """Open a fencing epoch that is not there, in one transaction that asks whether it was closed.

    Args:
        epoch: ``WindowIndex`` of its row (``of_window``, ``of_decision``).

    Returns:
        Whether it is open now; False: it is closed for good, and whoever needs it was overtaken.
    """

    def work(transaction: Any) -> bool:
        if epoch > _DECISIONS:
            name = spanner.KeySet(keys=[[named(generation, RETAINED_WINDOWS)]])
            texts = [text for (text,) in transaction.read("Meta", ("Value",), name)]
            retained = (
                msgspec.json.decode(texts[0], type=RetainedWindows) if texts else RetainedWindows()
            )
            number, past = _WINDOWS - epoch, retained.dropped
        else:
            row = spanner.KeySet(keys=[[part, BOUND]])
            decided = [
                trigger_time for (trigger_time,) in transaction.read("Progress", ("Reached",), row)
            ]
            number, past = _DECISIONS - epoch, decided[0] if decided else 0
        if (number + 1) * EPOCH_LENGTH <= past:
            return False
        columns = ("Part", "WindowIndex", "Reached")
        transaction.insert_or_update("Progress", columns, [[part, epoch, 0]])
        return True

    return bool(transact(database, work))


def close_decisions(database: Database, part: int, decided: int) -> None:
    """Close the fencing epochs of decisions before a committed one, and drop their rows.

    Args:
        decided: the trigger time up to which the part has decided.
    """
    number, out = decided // EPOCH_LENGTH, Mutations()
    out.delete_between("Progress", (part, _DECISIONS - number + 1), (part, _DECISIONS + 1))
    out.delete_between("Steps", (part, BOUND, 0), (part, BOUND, number * EPOCH_LENGTH))
    commit(database, out.fill)


def close_windows(database: Database, part: int, dropped: int) -> None:
    """Close the fencing epochs whose windows all lie before ``RetainedWindows.dropped``."""
    number, out = dropped // EPOCH_LENGTH, Mutations()
    out.delete_between("Progress", (part, _WINDOWS - number + 1), (part, _WINDOWS + 1))
    commit(database, out.fill)
