"""The log of an account in a SQLite file, which the jobs on a data set share.

A process checks the complete file when it opens it: every page, every row, every blob.  After that
the time of a charge does not depend on the number of charges: only rows that another process has
added are read and checked.  If the file was changed without a new row, which no program does, it is
checked completely, and refused.  If the disk damages the file while it is open, the process that
opens it next notices; the damage changes no decision of a process that has read the file before.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.durable import PRIVATE, make_folder, sync
from dpstream.state.ledger.events import Created, damaged
from dpstream.state.ledger.log import FORMAT, Line, first_line, other_format
from dpstream.state.sqlite.database import (
    Subject,
    check_pages,
    freeze,
    memory,
    open_file,
    refused,
    sqlite3,
)

DDL = """
CREATE TABLE log (number INTEGER PRIMARY KEY, changes BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE blobs (name BLOB PRIMARY KEY, content BLOB NOT NULL)
"""
#: A table that every account of an earlier format has.
_FORMER = "account_meta"
#: The fix for an account that is absent or empty: only a restored one can be recovered.
_LOST = (
    "bring the account back, e.g. from a backup, to which `dpstream account recover` adds what was "
    "charged since; only if nothing was charged on these data yet, make one with `dpstream account "
    "create` and name its id"
)
_ACCOUNT = Subject("account.path", "account", damaged)


def create(path: str | Path, created: Created) -> None:
    """Make the file of an account, in one transaction.

    Raises:
        UsageError: there is a file already, or it cannot be made.
        RunError: the disk fails.
    """
    path = Path(path)
    try:
        make_folder(path.parent, PRIVATE)
        if is_there(path):
            raise there_already()
        with contextlib.closing(open_file(path, create=True)) as db, db:
            db.execute("BEGIN IMMEDIATE")
            if _tables(db):
                raise there_already()
            for statement in DDL.split(";"):
                db.execute(statement)
            _insert(db, first_line(created), {})
        sync(path.absolute().parent)
    except (sqlite3.Error, OSError) as error:
        raise failed(error, path) from None


def is_there(path: str | Path) -> bool:
    """Return whether an account's file exists; an empty one of an interrupted creation does not
    count.
    """
    if not Path(path).exists():
        return False
    try:
        with contextlib.closing(open_file(path)) as db:
            return bool(_tables(db))
    except (sqlite3.Error, OSError):  # the error appears when the file is opened
        return True


def absent() -> UsageError:
    """Return the error for an account that does not exist, in a command that makes none."""
    return UsageError(
        "account.path",
        "has no account",
        _LOST,
    )


def there_already() -> UsageError:
    """Return the error for an account that would replace another file."""
    return UsageError("account.path", "already exists", "choose another path for a new account")


def failed(error: Exception, path: str | Path) -> RunError | UsageError | PolicyError:
    """Return the coded error for SQLite's, or the system's, error on an account.

    See ``refused``.
    """
    return refused(_ACCOUNT, error, path)


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master")}


def _insert(db: sqlite3.Connection, line: Line, blobs: dict[str, bytes]) -> None:
    digest = bytes.fromhex(line.digest)
    db.execute("INSERT INTO log VALUES (?, ?, ?)", (line.number, line.changes, digest))
    db.execute("INSERT OR REPLACE INTO log VALUES (0, ?, ?)", (FORMAT, digest))
    rows = [(bytes.fromhex(name), blob) for name, blob in blobs.items()]
    db.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?)", rows)


def _check(db: sqlite3.Connection) -> None:
    """Refuse a file that SQLite cannot read to its end, or that is no account of this format.

    Raises:
        PolicyError: it is damaged, empty, another program's, or of another version.
    """
    check_pages(db)
    tables = _tables(db)
    if not tables:
        raise PolicyError("account.path", "is an empty file", _LOST)
    if _FORMER in tables:
        raise other_format()
    if not {"log", "blobs"} <= tables:
        raise PolicyError(
            "account.path", "the file is another program's database", "choose another path"
        )


class AccountStorage:
    """The file of one account; see `log.Storage`.

    Args:
        path: the file, shared by all jobs on the data set.
        looking: whether the account is only read for a plan, from a copy in memory: no file is
            written, and no charge is accepted.

    Raises:
        UsageError: there is no file.
        PolicyError: the file is damaged, another program's, or of another version.
        RunError: it cannot be opened, or another process holds it for very long.
    """

    def __init__(self, path: str | Path, looking: bool = False) -> None:
        self._path, self._version = path, (0,)
        if not Path(path).exists():
            raise absent()
        try:
            self.db = open_file(path)
            with contextlib.ExitStack() as failing:
                failing.callback(self.close)
                if looking:
                    with contextlib.closing(self.db) as file:
                        self.db = memory()
                        self.db.isolation_level = None
                        self.db.text_factory = file.text_factory
                        file.execute("BEGIN")
                        _tables(file)  # waits for the lock; a backup would, without end
                        file.backup(self.db)
                    freeze(self.db)
                _check(self.db)
                failing.pop_all()
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise failed(error, path) from None

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    @contextlib.contextmanager
    def reading(self, writes: bool) -> Iterator[None]:
        """See `log.Storage`."""
        try:
            try:
                self.db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                yield
                self.db.execute("COMMIT")
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
        except (sqlite3.Error, UnicodeError) as error:
            raise failed(error, self._path) from None

    def changed(self) -> bool:
        """See `log.Storage`."""
        return bool(self.db.execute("PRAGMA data_version").fetchone() != self._version)

    def rows(self, after: int) -> Sequence[Line]:
        """See `log.Storage`."""
        self._version = self.db.execute("PRAGMA data_version").fetchone()
        query = "SELECT number, changes, lower(hex(digest)) FROM log WHERE number"
        end = self.db.execute(f"{query} = 0")
        return [Line(*row) for row in (*end, *self.db.execute(f"{query} > ? ORDER BY 1", (after,)))]

    def blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """See `log.Storage`."""
        query = "SELECT content FROM blobs WHERE name = ?"
        rows = {name: self.db.execute(query, (bytes.fromhex(name),)).fetchone() for name in names}
        return {name: row[0] for name, row in rows.items() if row is not None}

    def insert(self, line: Line, blobs: dict[str, bytes]) -> None:
        """See `log.Storage`; no other process can be first."""
        _insert(self.db, line, blobs)
