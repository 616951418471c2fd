"""The account as a SQLite file that the jobs on a data set share.

**The seal** is the sums of all tables (`events.sum_of`) under a digest of its own; every
transaction writes it.

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import (
    InvariantError,
    PolicyError,
    RunError,
    UsageError,
    required,
)
from dpstream.state.durable import PRIVATE, make_folder, sync
from dpstream.state.ledger.contract import Ledger, StoredRequest
from dpstream.state.ledger.events import (
    COLUMNS,
    Created,
    Entry,
    Event,
    Received,
    Sums,
    chained,
    damaged,
    event_of,
    name_of,
    refuse_damage,
    sum_of,
    sum_without,
    text_of,
)
from dpstream.state.ledger.history import History
from dpstream.state.seals import digest as digest_of
from dpstream.state.sqlite.database import Subject, freeze, memory, open_file, refused, sqlite3

#: A program refuses every other version.
SCHEMA_VERSION = 1
DDL = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, name TEXT UNIQUE, entry TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE tokens (
  run_id TEXT NOT NULL, token TEXT NOT NULL, previous TEXT, PRIMARY KEY (run_id, token));
CREATE TABLE requests (
  run_id TEXT PRIMARY KEY, request TEXT NOT NULL, granted BLOB NOT NULL, receipt BLOB,
  digest TEXT, view BLOB, view_digest TEXT);
CREATE INDEX requests_by_request ON requests (request);
CREATE TABLE account_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""
#: Before every entry, whatever its number.
START = -(2**63)
#: Name of the seal in ``account_meta``.
_SEAL = "seal"


def rows_of(db: sqlite3.Connection, table: str) -> Iterable[tuple[object, ...]]:
    """Return all rows of a table."""
    return db.execute(f"SELECT {COLUMNS[table]} FROM {table}")


def put_seal(db: sqlite3.Connection, sums: Sums | None = None) -> None:
    """Write the seal of these sums (default: of the present rows), in the caller's transaction."""
    if sums is None:
        sums = {table: sum_of(table, rows_of(db, table)) for table in COLUMNS}
    text = " ".join(f"{sums[table]:032x}" for table in COLUMNS)
    row = (_SEAL, f"{text} {_digest_of_sums(text)}")
    db.execute("INSERT OR REPLACE INTO account_meta VALUES (?, ?)", row)


def read_seal(db: sqlite3.Connection) -> Sums:
    """Return the sums of the last transaction.

    Raises:
        PolicyError: the seal differs from what was written.
    """
    row = db.execute("SELECT value FROM account_meta WHERE name = ?", (_SEAL,)).fetchone()
    text, _, seal = str(row[0] if row else "").rpartition(" ")
    refuse_damage(seal != _digest_of_sums(text))
    return {table: int(part, 16) for table, part in zip(COLUMNS, text.split(" "), strict=True)}


def _digest_of_sums(text: str) -> str:
    return digest_of("ledger seal", text.encode(errors="surrogateescape")).hex()


#: An entry whose place in the chain was checked, and its row.
Line = tuple[Entry, tuple[object, ...]]


def lines(db: sqlite3.Connection, after: int = START, previous: str = "") -> Iterator[Line]:
    """Yield the entries after the one with a number and a digest, and check the chain.

    Raises:
        PolicyError: the chain is broken, or this program does not know an entry's form.
    """
    query = f"SELECT {COLUMNS['entries']} FROM entries WHERE seq > ? ORDER BY seq"
    for row in db.execute(query, (after,)):
        seq, name, text, digest = row
        # Damage can make a text a blob.
        if not isinstance(text, str) or digest != chained(previous, text):
            raise PolicyError(
                "account.path", "its hash chain is broken", "restore the account from a backup"
            )
        event = event_of(text)
        refuse_damage(name != name_of(event))
        previous = digest
        yield Entry(seq, event, digest), row


def check_all(db: sqlite3.Connection) -> tuple[list[Line], Sums]:
    """Check every row of an account; return its entries and sums.

    Raises:
        PolicyError: the account differs from what was written.
    """
    entries = list(lines(db))
    sums = {table: sum_of(table, rows_of(db, table)) for table in COLUMNS if table != "entries"}
    sums["entries"] = sum_of("entries", (row for _, row in entries))
    refuse_damage(sums != read_seal(db))
    return entries, sums


def create(path: str | Path, created: Created) -> None:
    """Make the file of an account, which appears complete or is refused when it is opened.

    Raises:
        UsageError: the file exists already, or cannot be made.
        RunError: the disk fails.
    """
    path = Path(path)
    try:
        make_folder(path.parent, PRIVATE)
        if path.exists() and path.stat().st_size:
            raise there_already()
        with contextlib.closing(open_file(path, create=True)) as db, db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise there_already()
            for statement in DDL.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO account_meta VALUES ('version', ?)", (str(SCHEMA_VERSION),))
            text = text_of(created)
            row = (1, None, text, chained("", text))
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
            put_seal(db)
        sync(path.absolute().parent)
    except (sqlite3.Error, OSError) as error:
        raise failed(error, path) from None


def is_there(path: str | Path) -> bool:
    """Return whether a file exists that is more than the remains of an interrupted creation."""
    if not Path(path).exists():
        return False
    with contextlib.suppress(sqlite3.Error, OSError):  # whoever opens it says what it is
        with contextlib.closing(open_file(path)) as db:
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return bool(tables != (0,))
    return True


def absent() -> UsageError:
    """Return the error for an account that does not exist, in a command that makes none."""
    return UsageError(
        "account.path",
        "no account is there",
        "bring it back; only if nothing was charged on these data yet, make one with "
        "`dpstream account create` and name its id",
    )


def there_already() -> UsageError:
    """Return the error for an account that would replace another file."""
    return UsageError("account.path", "is there already", "choose another path for a new account")


def connect(path: str | Path) -> sqlite3.Connection:
    """Open the file of an existing account, for durable changes.

    Raises:
        sqlite3.Error, OSError: it cannot be opened; see ``failed``.
        PolicyError: it is damaged, another program's, or of another version.
    """
    db = open_file(path)
    try:
        check_file(db)
    except BaseException:
        db.close()
        raise
    return db


def looked_at(path: str | Path) -> sqlite3.Connection:
    """Return a read-only copy in memory, for plans.

    Raises:
        As `connect`.
    """
    db = memory()
    try:
        db.isolation_level = None
        with contextlib.closing(open_file(path)) as file:
            db.text_factory = file.text_factory
            file.backup(db)
        check_file(db)
        freeze(db)
    except BaseException:
        db.close()
        raise
    return db


def read_entries(path: str | Path) -> list[Entry]:
    """Return every entry of an account's file in order, after a check of every row; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: the file is absent, is damaged, or cannot be read.
    """
    if not Path(path).exists():
        raise absent()
    try:
        with contextlib.closing(open_file(path)) as db:
            db.execute("BEGIN")  # one state of it
            check_file(db)
            return [entry for entry, _ in check_all(db)[0]]
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise failed(error, path) from None


def check_file(db: sqlite3.Connection) -> None:
    """Refuse a file that SQLite cannot read to its end, or that is not an account of this version.

    Raises:
        PolicyError: it is damaged, empty, another program's, or of another version.
    """
    refuse_damage(db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",))
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables:
        raise PolicyError("account.path", "is an empty file", "name the account's file")
    if not {"account_meta", "entries"} <= tables:
        raise PolicyError(
            "account.path", "the file is another program's database", "choose another path"
        )
    row = db.execute("SELECT value FROM account_meta WHERE name = 'version'").fetchone()
    if row != (str(SCHEMA_VERSION),):
        raise other_version()


def other_version() -> PolicyError:
    """Return the error for the account of another version of the program."""
    return PolicyError(
        "account.path",
        f"its version is not {SCHEMA_VERSION}, the one of this program",
        "use the program that wrote it",
    )


_ACCOUNT = Subject("account.path", "account", damaged)


def failed(error: Exception, path: str | Path | None = None) -> RunError | UsageError | PolicyError:
    """Return the coded error for SQLite's, or the system's, error on an account.

    See ``refused``.
    """
    return refused(_ACCOUNT, error, path)


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
                sums = required(self._checked, "a transaction has read the sums").sums
                if sums != required(before, "a transaction begins at checked sums").sums:
                    put_seal(self._db, sums)
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
        for entry, _ in new:
            refuse_damage(entry.seq != len(self._history.digests) + 1)
            self._history.add(entry.event, entry.digest)
        refuse_damage(not self._history.digests)
        self._checked = _Checked(change, sums)

    def _check_on(self, checked: _Checked, sums: Sums) -> list[Line]:
        """Check the entries after the last checked one, and the tables that changed."""
        last, digest = len(self._history.digests), self._history.digests[-1]
        row = self._db.execute("SELECT digest FROM entries WHERE seq = ?", (last,)).fetchone()
        refuse_damage(row != (digest,))
        new = list(lines(self._db, last, digest))
        right = {
            table: total
            if total == checked.sums[table]
            else sum_of(table, rows_of(self._db, table))
            for table, total in sums.items()
            if table != "entries"
        }
        right["entries"] = sum_of("entries", (row for _, row in new), checked.sums["entries"])
        refuse_damage(right != sums)
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
        rest = sum_without("tokens", self._rows("tokens", one, run_id, token), self._sum("tokens"))
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
        rest = sum_without("requests", [row], self._sum("requests"))
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
        checked = required(self._checked, "a transaction has read the sums")
        self._checked = checked._replace(sums={**checked.sums, table: total})


def opened(path: str | Path, looking: bool = False) -> SqliteLedger:
    """Return an existing account; see `SqliteLedger`."""
    if not Path(path).exists():
        raise absent()
    return SqliteLedger(path, looking)
