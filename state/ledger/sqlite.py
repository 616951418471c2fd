"""The account as a SQLite file that the jobs on a data set share.

**What is checked, and when.**  Whoever opens the file checks all of it before the first use: every
page, the chain of the entries, the seal of every row.  From then on this object remembers the
entries that it has checked, and decides by what it remembers; a charge costs the same however
many there are.  What another process has written since is checked from the last checked entry on:
new entries must continue the chain and add up to the seal; a table of tokens or answers whose sum
moved is added up again.  A file that another process changed without moving the seal, as no
program does, is checked as a whole, and refused.  Bits that the disk loses below an open ledger
are noticed by whoever opens it next (`dpstream run`, `choose`, `account show`); they change no
decision of whoever had read them before.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import InvariantError
from dpstream.state.ledger.contract import Ledger, StoredRequest
from dpstream.state.ledger.events import Event, Received, chained, event_of, name_of, text_of
from dpstream.state.ledger.file import Line, check_all, connect, failed, lines, looked_at
from dpstream.state.ledger.history import History
from dpstream.state.ledger.seal import (
    COLUMNS,
    Sums,
    damaged,
    put_seal,
    read_seal,
    rows_of,
    sum_of,
    without,
)
from dpstream.state.sqlite.database import sqlite3


class _Checked(NamedTuple):
    """The part of the file that was checked to be what was written.

    Attributes:
        change: SQLite's number of the last change that another connection made.
        sums: of every table.
    """

    change: int
    sums: Sums


class SqliteLedger(Ledger):
    """The account of one data set in a file; see the module.

    Args:
        path: the file, shared by all jobs on the data set.
        looking: plan only, on a copy in memory: no file is written, and no charge is accepted.

    Raises:
        UsageError: there is no file.
        PolicyError: the file is damaged, another program's, or of another version.
        RunError: it cannot be opened, or another process holds it for very long.
    """

    def __init__(self, path: str | Path, looking: bool = False) -> None:
        self._path = path
        self._checked: _Checked | None = None
        self._history = History()
        try:
            self._db = looked_at(path) if looking else connect(path)
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise failed(error, self._path) from None

    def close(self) -> None:
        """Close the file, and its head file."""
        super().close()
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """See the contract."""
        with self._begun("BEGIN IMMEDIATE"):
            before, entries = self._checked, len(self._history.digests)
            try:
                yield
                if self._checked is None or before is None:
                    raise InvariantError("self._checked is not None and before is not None")
                if self._checked.sums != before.sums:
                    put_seal(self._db, self._checked.sums)
                self._db.execute("COMMIT")
            except BaseException:
                # Interrupted behind the commit, nobody knows what was written: all is read again.
                self._checked = before if self._db.in_transaction else None
                self._history.cut(entries)
                raise

    @contextlib.contextmanager
    def _begun(self, begin: str) -> Iterator[None]:
        """Run a transaction on a checked file, which is rolled back unless it was committed."""
        try:
            try:
                self._db.execute(begin)
                self._check()
                yield
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except (sqlite3.Error, UnicodeError) as error:
            self._checked = None  # what the file holds now is not known
            raise failed(error, self._path) from None

    @contextlib.contextmanager
    def _looking(self) -> Iterator[sqlite3.Connection]:
        """Yield one checked state of the file: the open transaction's, or the last committed."""
        if self._db.in_transaction:
            yield self._db
        else:
            with self._begun("BEGIN"):
                yield self._db

    def _check(self) -> None:
        """Check the part that was not checked before; see the module."""
        (change,) = self._db.execute("PRAGMA data_version").fetchone()
        checked = self._checked
        if checked is not None and checked.change == change:
            return
        self._checked = None  # until it is known again
        if checked is None or (sums := read_seal(self._db)) == checked.sums:
            new, sums = check_all(self._db)
            self._history = History()
        else:
            new = self._check_on(checked, sums)
        for line in new:
            if line.entry.seq != len(self._history.digests) + 1:
                raise damaged()
            self._history.add(line.entry.event, line.entry.digest)
        if not self._history.digests:
            raise damaged()
        self._checked = _Checked(change, sums)

    def _check_on(self, checked: _Checked, sums: Sums) -> list[Line]:
        """Check the entries after the last checked one, and the tables that changed."""
        last, digest = len(self._history.digests), self._history.digests[-1]
        row = self._db.execute("SELECT digest FROM entries WHERE seq = ?", (last,)).fetchone()
        if row != (digest,):
            raise damaged()
        new = list(lines(self._db, last, digest))
        entries = sum_of("entries", (line.row for line in new), checked.sums["entries"])
        for table in COLUMNS:
            if table == "entries":
                right = entries == sums[table]
            else:
                same = sums[table] == checked.sums[table]
                right = same or sums[table] == sum_of(table, rows_of(self._db, table))
            if not right:
                raise damaged()
        return new

    # --- rows ------------------------------------------------------------------------------------

    def history(self) -> History:
        """See the contract."""
        with self._looking():
            return self._history

    def append(self, event: Event) -> None:
        """See the contract."""
        if not self._db.in_transaction:
            raise InvariantError("only in a transaction")
        seq, text = len(self._history.digests) + 1, text_of(event)
        digest = chained(self._history.digests[-1], text)
        self._insert("entries", (seq, name_of(event), text, digest))
        self._history.add(event_of(text), digest)  # as it is written

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """See the contract."""
        return {row[1]: row[2] for row in self._rows("tokens", "run_id = ?", run_id)}

    def add_token(self, run_id: str, token: str, previous: str | None) -> None:
        """See the contract."""
        self._insert("tokens", (run_id, token, previous))

    def drop_token(self, run_id: str, token: str) -> None:
        """See the contract."""
        one = "run_id = ? AND token = ?"
        rest = without("tokens", self._rows("tokens", one, run_id, token), self._sum("tokens"))
        self._db.execute(f"DELETE FROM tokens WHERE {one}", (run_id, token))
        self._moved("tokens", rest)

    def request_of(self, run_id: str) -> StoredRequest | None:
        """See the contract."""
        rows = self._rows("requests", "run_id = ?", run_id)
        return StoredRequest(*rows[0]) if rows else None

    def requests_alike(self, request: str) -> list[StoredRequest]:
        """See the contract."""
        rows = self._rows("requests", "request = ? ORDER BY rowid", request)
        return [StoredRequest(*row) for row in rows]

    def ask(self, run_id: str, request: str, grant: bytes = b"") -> None:
        """See the contract."""
        self._insert("requests", (run_id, request, grant, None, None, None, None))

    def unanswered(self) -> list[str]:
        """See the contract."""
        return [row[0] for row in self._rows("requests", "receipt IS NULL")]

    def answer(self, run_id: str, receipt: bytes, digest: str) -> None:
        """See the contract."""
        self._update(run_id, "receipt IS NULL", receipt=receipt, digest=digest)
        self.append(Received(run_id, digest))

    def put_view(self, run_id: str, view: bytes, digest: str) -> None:
        """See the contract."""
        self._update(run_id, "view IS NULL AND receipt IS NOT NULL", view=view, view_digest=digest)

    def _update(self, run_id: str, where: str, **values: object) -> None:
        """Change the one request of a run for which a condition holds."""
        mine = f"run_id = ? AND {where}"
        (row,) = self._rows("requests", mine, run_id)
        rest = without("requests", [row], self._sum("requests"))
        columns = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE requests SET {columns} WHERE {mine}", (*values.values(), run_id))
        named = dict(zip(COLUMNS["requests"].split(", "), row, strict=True)) | values
        self._moved("requests", sum_of("requests", [tuple(named.values())], rest))

    def _rows(self, table: str, where: str, *values: str) -> list[Any]:
        query = f"SELECT {COLUMNS[table]} FROM {table} WHERE {where}"
        with self._looking() as db:
            return db.execute(query, values).fetchall()

    def _insert(self, table: str, row: tuple[object, ...]) -> None:
        total = sum_of(table, [row], self._sum(table))
        placeholders = ", ".join("?" * len(row))
        self._db.execute(f"INSERT INTO {table} ({COLUMNS[table]}) VALUES ({placeholders})", row)
        self._moved(table, total)

    def _sum(self, table: str) -> int:
        if not (self._checked is not None and self._db.in_transaction):
            raise InvariantError("only in a transaction")
        return self._checked.sums[table]

    def _moved(self, table: str, total: int) -> None:
        if self._checked is None:
            raise InvariantError("self._checked is not None")
        self._checked = self._checked._replace(sums={**self._checked.sums, table: total})
