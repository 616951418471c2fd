"""The Spanner store's tables, its row of identity, and its notes.

Where they differ from the paper's two tables (units; keys with a secondary index on the due
trigger), and why:

* ``Part`` is ``generation * 2^15 + shard``.  A restore or a reshard writes a new generation
  beside the old one and then switches ``Meta``: it happens at once, and a worker that was asleep
  writes where nobody reads.
* ``KeysByDue`` is the secondary index on the due trigger, kept as lists: one row per (step, due
  trigger) with the ids of all its keys.  A key costs no index entry to delete and insert at each
  step, so a commit holds twice the keys.  (The emulator updates 170 indexed rows a second in
  commits of 8,000, and 18,000 without the index.)  A key that is found early is looked at early.
* The users of a round stand in the key's row, beyond ``limits.INLINE_PAIRS`` in ``KeyUnits``.
* Applied positions stand in the unit's row: a unit's state IS its admitted records.
* ``Steps`` is the outbox and the fence: a row of it can be inserted only once.  Decisions of BOUND
  and what tests selected have rows there, too, at a ``WindowIndex`` of their own.

No table has a column per aggregate, so one schema serves every plan.

**Notes** are small public texts in the table Meta, changed by comparison.

**Commits.** Mutations are counted as Spanner counts them before they are sent, so that a commit
stays within its limits.

**Fencing epochs** keep a worker that was asleep from a step whose own fence is gone.  A step's row
in ``Steps`` can be inserted only once, and so can that of a decision of BOUND.  A stream of years
cannot keep all of them.  So windows, and the trigger times that decisions follow, are counted in
fencing epochs of ``EPOCH_LENGTH``; every commit of a step or a decision touches the row of its
fencing epoch in ``Progress``, which must be there.  Rows of a closed fencing epoch go together with
the epoch's own; who finds it missing opens it, in a transaction that asks whether it was closed:

* windows: those before ``RetainedWindows.dropped`` are, and take no more steps;
* decisions: those that followed a trigger time of a fencing epoch before the one of the last
  decision are: whoever would follow them was overtaken.
"""

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from google.api_core import exceptions
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.limits import CELL_CHARACTERS, COMMIT_BYTES, COMMIT_MUTATIONS
from dpstream.state.retention_store import RETAINED_WINDOWS, RetainedWindows
from dpstream.state.seals import other_format, reading
from dpstream.state.spanner.client import (
    GENERATION,
    ExistsError,
    NothingThereError,
    administered,
    between,
    change_everywhere,
    commit,
    prefix,
    read_rows,
    transact,
)
from dpstream.state.store import Calibrate, RunIdentity

FORMAT = "2"
#: ``WindowIndex`` of BOUND's progress and decisions; of the trigger time up to which positions are
#: forgotten; of the trigger time that a decision cut short may have reached.
BOUND, FORGOTTEN, REACH = -1, -2, -3
#: ``WindowIndex`` of what tests selected, in ``Steps`` by trigger time: `state.spanner.shards`.
SELECTED = -4
#: Row of ``Meta``: the last generation that anybody has begun to fill.
_CLAIMED = "claimed"
#: ``deploy/spanner/schema.sql`` is a copy (a test compares them).
DDL = """
CREATE TABLE Meta (
  Name STRING(64) NOT NULL,
  Value STRING(MAX) NOT NULL,
) PRIMARY KEY (Name);

CREATE TABLE Progress (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Reached INT64 NOT NULL,
) PRIMARY KEY (Part, WindowIndex);

CREATE TABLE Steps (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Step INT64 NOT NULL,
  Piece INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Releases BYTES(MAX),
) PRIMARY KEY (Part, WindowIndex, Step, Piece);

CREATE TABLE Keys (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  KeyId BYTES(16) NOT NULL,
  Columns BYTES(MAX),
  State BYTES(MAX),
  UnitIds BYTES(MAX),
) PRIMARY KEY (Part, WindowIndex, KeyId);

CREATE TABLE KeyUnits (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  KeyId BYTES(16) NOT NULL,
  Chunk INT64 NOT NULL,
  UnitIds BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, WindowIndex, KeyId, Chunk),
  INTERLEAVE IN PARENT Keys ON DELETE CASCADE;

CREATE TABLE KeysByDue (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Due INT64 NOT NULL,
  Step INT64 NOT NULL,
  Piece INT64 NOT NULL,
  KeyIds BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, WindowIndex, Due, Step, Piece);

CREATE TABLE Units (
  Part INT64 NOT NULL,
  UnitId BYTES(16) NOT NULL,
  Records BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, UnitId);
"""


def note_name(generation: int, name: str) -> str:
    """Return the name of a note's row; each generation of the state has notes of its own."""
    return f"note.{generation}.{name}" if generation else f"note.{name}"


def read_metadata(database: Database, name: str) -> str | None:
    """Return the text of a row of ``Meta``, ``None`` if there is none."""
    rows = read_rows(database, "Meta", ("Value",), [(name,)])
    return next((str(value) for (value,) in rows), None)


def swap_metadata(database: Database, name: str, old: str | None, new: str | None) -> bool:
    """Replace a row's text durably if it is still ``old``; ``None`` stands for no row.

    Returns:
        Whether it was.  False as well when the answer of the commit that replaced it was lost
        and it is tried again: whoever cares reads the note (``state.ledger.lineage`` does).
    """
    key = spanner.KeySet(keys=[[name]])

    def swap(transaction: Any) -> bool:
        stored = [str(value) for (value,) in transaction.read("Meta", ("Value",), key)]
        if stored != ([] if old is None else [old]):
            return False
        if new is None:
            transaction.delete("Meta", key)
        else:
            transaction.insert_or_update("Meta", ("Name", "Value"), [[name, new]])
        return True

    return bool(transact(database, swap))


def create_tables(database: Database) -> bool:
    """Create database and tables where they are missing; whether anything was.

    Raises:
        UsageError: no such instance, or no right to create; RunError: unreachable.
    """
    return make_tables(database, DDL, "the store")


def make_tables(database: Database, ddl: str, owner: str) -> bool:
    """Create any tables as ``create_tables`` does; a creation that was interrupted goes on.

    Args:
        ddl: DDL statements of the tables; owner: words for what has them, for errors.

    Raises:
        PolicyError: some tables are missing where other tables are.
    """
    wanted = [s.strip() for s in ddl.split(";") if s.strip()]
    if not administered(database.exists):
        database._ddl_statements = tuple(wanted)
        administered(lambda: _create(database))
        return True
    administered(database.reload)
    there = {d.split()[2] for d in database.ddl_statements if d.startswith("CREATE TABLE")}
    missing = [s for s in wanted if s.split()[2] not in there]
    if missing and there - {s.split()[2] for s in wanted}:
        raise PolicyError(
            "store", "the database holds other tables", f"give {owner} a database of its own"
        )
    if missing:
        administered(lambda: database.update_ddl(missing).result(300))
    return bool(missing)


def _create(database: Database) -> None:
    # It is there when the answer of an earlier attempt was lost, or another process was faster.
    with contextlib.suppress(exceptions.AlreadyExists):
        database.create().result(300)


def create_identity(
    database: Database, identity: RunIdentity, calibrate: Calibrate | None = None
) -> RunIdentity:
    """Write the identity, or return the one that is there.

    Args:
        calibrate: makes the run's calibration; called only if none is stored.
    """
    if calibrate is not None:
        begun = begun_identity(database)
        if begun is not None:
            return begun
        identity = msgspec.structs.replace(identity, calibration=calibrate())
    rows = [("format", FORMAT), ("generation", "0"), *_pieces(identity)]
    # A row that is there may be an earlier attempt's, or another process's: the same run.
    with contextlib.suppress(ExistsError):
        commit(database, lambda batch: batch.insert("Meta", ("Name", "Value"), rows))
    return read_identity(database)[0]


def has_identity(database: Database) -> bool:
    """Return whether a run was begun on the database; False as well where there are no tables."""
    try:
        return "identity" in _meta(database)
    except NothingThereError:
        return False


def begun_identity(database: Database) -> RunIdentity | None:
    """Return the run that was begun on the database; ``None`` also where there are no tables.

    Raises:
        PolicyError: another format, or damaged.
    """
    try:
        meta = _meta(database)
    except NothingThereError:
        return None
    if "identity" not in meta:
        return None
    with reading():
        return _identity_of(meta)


def generation_of(database: Database) -> int | None:
    """Return the generation of the state that is in force, ``None`` if no run was begun."""
    meta = _meta(database)
    return int(meta["generation"]) if "identity" in meta else None


def claim(database: Database) -> int:
    """Return the number of a new generation that only the caller fills.

    The caller may ``switch`` to it as long as no other was claimed since.  It is never 0, which is
    that of a run that begins.
    """
    while True:
        last = read_metadata(database, _CLAIMED)
        new = 1 + max(int(last or 0), generation_of(database) or 0)
        if swap_metadata(database, _CLAIMED, last, str(new)):
            return new


def switch(database: Database, old: int | None, new: int, identity: RunIdentity) -> None:
    """Make a generation that was filled the one in force, if ``old`` still is.

    Raises:
        RunError: another generation is, or one was claimed since.
    """
    pieces = _pieces(identity)

    def work(transaction: Any) -> bool:
        keys = [["generation"], [_CLAIMED], *([name] for name, _ in pieces)]
        meta = dict(transaction.read("Meta", ("Name", "Value"), spanner.KeySet(keys=keys)))
        claimed = meta.pop(_CLAIMED, None)
        if meta == {"generation": str(new), **dict(pieces)}:
            return True  # an earlier attempt whose answer was lost
        before = None if old is None else str(old)
        if (meta.get("generation"), claimed) != (before, str(new)):
            return False
        rows = [("generation", str(new)), ("format", FORMAT), *pieces]
        transaction.insert_or_update("Meta", ("Name", "Value"), rows)
        return True

    if not transact(database, work):
        raise RunError("store", "was changed by another command", "run this one again")


def clear(database: Database, generation: int) -> None:
    """Delete all rows of a generation, of which an earlier attempt may have left a part."""
    first = generation * GENERATION
    values = {"first": first, "last": first + GENERATION - 1}
    for table in ("KeyUnits", "Keys", "KeysByDue", "Units", "Steps", "Progress"):
        statement = f"DELETE FROM {table} WHERE Part BETWEEN @first AND @last"
        change_everywhere(database, statement, values)
    stale = f"DELETE FROM Meta WHERE STARTS_WITH(Name, 'note.{generation}.')"
    change_everywhere(database, stale, {})


def read_identity(database: Database) -> tuple[RunIdentity, int]:
    """Return (identity, generation).

    Raises:
        UsageError: no tables; PolicyError: another format, or damaged.
    """
    meta = _meta(database)
    if "identity" not in meta:
        raise UsageError("store", "holds no run yet", "run `dpstream state init`")
    with reading():
        return _identity_of(meta), int(meta["generation"])


def _pieces(identity: RunIdentity) -> list[tuple[str, str]]:
    """Rows of ``Meta`` for the identity: a long window's numbers are more than one cell takes."""
    text = msgspec.json.encode(identity).decode()
    starts = range(CELL_CHARACTERS, len(text), CELL_CHARACTERS)
    more = [(f"identity.{start}", text[start : start + CELL_CHARACTERS]) for start in starts]
    return [("identity", text[:CELL_CHARACTERS]), *more]


def _identity_of(meta: dict[str, str]) -> RunIdentity:
    text = meta["identity"]
    while len(text) % CELL_CHARACTERS == 0 and f"identity.{len(text)}" in meta:
        text += meta[f"identity.{len(text)}"]
    return msgspec.json.decode(text, type=RunIdentity)


def _meta(database: Database) -> dict[str, str]:
    """All rows, none where no run was begun.

    Raises:
        PolicyError: they are of another format, or damaged.
    """
    meta = dict(read_rows(database, "Meta", ("Name", "Value")))
    if "identity" in meta and meta.get("format") != FORMAT:
        raise other_format(FORMAT)
    return meta


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
            name = spanner.KeySet(keys=[[note_name(generation, RETAINED_WINDOWS)]])
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
