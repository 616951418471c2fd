"""The ledger as a SQLite file that the jobs on a data set share.

**What is checked, and when.**  Whoever opens the file checks all of it before the first use: every
page, the chain of the entries, the seal of every row.  From then on this object remembers the
entries that it has checked, and decides by what it remembers; a charge costs the same however
many there are.  What another process has written since is checked from the last checked entry on:
new entries must continue the chain and add up to the seal; a table of tokens or answers whose sum
moved is added up again.  A file that another process changed without moving the seal, as no
program does, is checked as a whole, and refused.  Bits that the disk loses below an open ledger
are noticed by whoever opens it next (`dpstream run`, `choose`, `ledger show`); they change no
decision of whoever had read them before.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import InvariantError
from dpstream.state.ledger.charges import Book, Charge, Head, chained
from dpstream.state.ledger.contract import Asked, Ledger
from dpstream.state.ledger.file import START, Line, check_all, connect, failed, lines, looked_at
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
    """Up to where the file is known to be what was written.

    Attributes:
        change: SQLite's number of the last change that another connection made.
        seq, digest: the last entry; sums: of every table.
    """

    change: int
    seq: int
    digest: str
    sums: Sums


class SqliteLedger(Ledger):
    """The ledger of one data set in a file; see the module.

    Args:
        path: the file, shared by all jobs on the data set.
        data_set: name of the data set.
        looking: plan only, on a copy in memory: no file is made or written, and no charge is taken.

    Raises:
        PolicyError: the file is damaged, another program's, or of a newer version.
        RunError: it cannot be opened, or another process holds it for very long.
    """

    def __init__(self, path: str | Path, data_set: str, looking: bool = False) -> None:
        self.data_set, self._path = data_set, path
        self._checked: _Checked | None = None
        self._book = Book()
        try:
            self._db = looked_at(path) if looking else connect(path)
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise failed(error, self._path) from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """See the contract."""
        with self._begun("BEGIN IMMEDIATE"):
            before, charges = self._checked, len(self._book.charges)
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
                self._book.cut(charges)
                raise

    @contextlib.contextmanager
    def _begun(self, begin: str) -> Iterator[None]:
        """A transaction on a checked file, rolled back unless it was committed."""
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
        """One checked state of the file: the open transaction's, or the last committed."""
        if self._db.in_transaction:
            yield self._db
        else:
            with self._begun("BEGIN"):
                yield self._db

    def _check(self) -> None:
        """Check what is not known to be what was written; see the module."""
        (change,) = self._db.execute("PRAGMA data_version").fetchone()
        known = self._checked
        if known is not None and known.change == change:
            return
        self._checked = None  # until it is known again
        if known is None or (sums := read_seal(self._db)) == known.sums:
            found, sums = check_all(self._db)
            self._book, seq, digest = Book(), 0, ""
        else:
            found, seq, digest = self._check_on(known, sums), known.seq, known.digest
        for line in found:
            if line.entry.data_set == self.data_set:
                self._book.add(line.entry.charge)
        if found:
            seq, digest = found[-1].entry.seq, found[-1].digest
        self._checked = _Checked(change, seq, digest, sums)

    def _check_on(self, known: _Checked, sums: Sums) -> list[Line]:
        """Check the entries from the last checked one on, and the tables that changed."""
        if known.seq and self._digest_at(known.seq) != known.digest:
            raise damaged()
        found = list(lines(self._db, known.seq or START, known.digest))
        entries = sum_of("entries", (line.row for line in found), known.sums["entries"])
        for table in COLUMNS:
            if table == "entries":
                right = entries == sums[table]
            else:
                same = sums[table] == known.sums[table]
                right = same or sums[table] == sum_of(table, rows_of(self._db, table))
            if not right:
                raise damaged()
        return found

    # --- rows ------------------------------------------------------------------------------------

    def book(self) -> Book:
        """See the contract."""
        with self._looking():
            return self._book

    def append(self, charge: Charge) -> None:
        """See the contract."""
        if self._checked is None:
            raise InvariantError("only in a transaction")
        seq, text = self._checked.seq + 1, charge.text
        digest = chained(self._checked.digest, self.data_set, text)
        self._insert("entries", (seq, self.data_set, charge.name, text, digest))
        self._checked = self._checked._replace(seq=seq, digest=digest)
        self._book.add(Charge.read(text))  # as it is written

    def head(self) -> Head:
        """See the contract."""
        with self._looking():
            if self._checked is None:
                raise InvariantError("self._checked is not None")
            return Head(self.data_set, self._checked.seq, self._checked.digest)

    def digest_at(self, seq: int) -> str | None:
        """See the contract."""
        with self._looking():
            return self._digest_at(seq)

    def _digest_at(self, seq: int) -> str | None:
        row = self._db.execute("SELECT digest FROM entries WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else str(row[0])

    def digest_of(self, name: str) -> str | None:
        """See the contract."""
        found = self._rows("entries", "data_set = ? AND run_id = ?", self.data_set, name)
        return str(found[0][4]) if found else None

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

    def asked(self, run_id: str) -> Asked | None:
        """See the contract."""
        found = self._rows("choices", "data_set = ? AND run_id = ?", self.data_set, run_id)
        return _asked(found[0]) if found else None

    def asked_alike(self, request: str) -> list[Asked]:
        """See the contract."""
        alike = "data_set = ? AND request = ? ORDER BY rowid"
        return [_asked(row) for row in self._rows("choices", alike, self.data_set, request)]

    def ask(self, run_id: str, request: str) -> None:
        """See the contract."""
        self._insert("choices", (run_id, self.data_set, request, None, None))

    def answer(self, run_id: str, receipt: bytes, digest: str) -> None:
        """See the contract."""
        mine = "data_set = ? AND run_id = ? AND receipt IS NULL"
        (row,) = self._rows("choices", mine, self.data_set, run_id)
        rest = without("choices", [row], self._sum("choices"))
        self._db.execute(
            f"UPDATE choices SET receipt = ?, digest = ? WHERE {mine}",
            (receipt, digest, self.data_set, run_id),
        )
        self._moved("choices", sum_of("choices", [(*row[:3], receipt, digest)], rest))

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


def _asked(row: tuple[str, str, str, str | bytes | None, str | None]) -> Asked:
    """A row of the answers; older programs wrote receipts as texts."""
    run_id, _, request, receipt, digest = row
    if isinstance(receipt, str):
        receipt = receipt.encode(errors="surrogateescape")
    return Asked(run_id, request, receipt, digest)
