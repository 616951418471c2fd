"""The log of an account in Cloud Spanner, shared by jobs on many machines.

A transaction reads the new rows, decides, and inserts row N + 1 in one commit.  A process that
commits second gets an error, writes nothing, and decides again, so no charge is decided by outdated
rows.  A call whose answer is lost is sent again unchanged.  If the row then exists, its writer's id
shows whether this process or another one inserted it.  A call that arrives late fails, because its
number exists.  A transaction that changes nothing checks at its end that its rows are still the
last ones.  No snapshot is needed: one read returns the rows, and the blobs that they name were
committed with them and never change.

A cell holds at most 10 MiB, so rows and blobs are stored in pieces.
"""

import contextlib
import itertools
import secrets
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from google.cloud.spanner_v1.database import Database

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.limits import CELL_BYTES, COMMIT_BYTES
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.log import FORMAT, LedgerMovedError, Line, first_line, other_format
from dpstream.state.ledger.sqlite import absent, there_already
from dpstream.state.spanner.client import (
    ExistsError,
    NothingThereError,
    administered,
    commit,
    connect,
    from_on,
    prefix,
    read_rows,
)
from dpstream.state.spanner.schema import make_tables

#: ``deploy/spanner/ledger.sql`` is a copy (a test compares them).
DDL = """
CREATE TABLE LedgerLog (
  Number INT64 NOT NULL,
  Piece INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Changes BYTES(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Number, Piece);

CREATE TABLE LedgerBlobs (
  Name STRING(32) NOT NULL,
  Piece INT64 NOT NULL,
  Content BYTES(MAX) NOT NULL,
) PRIMARY KEY (Name, Piece);
"""
LOG, BLOBS = "LedgerLog", "LedgerBlobs"
_LOG = ("Number", "Piece", "Writer", "Changes", "Digest")
_BLOBS = ("Name", "Piece", "Content")
#: A table that every account of an earlier format has.
_FORMER = "LedgerCommits"


@contextlib.contextmanager
def of_ledger() -> Iterator[None]:
    """Let errors of the database name the account instead of a store."""
    try:
        yield
    except DpstreamError as error:
        if error.field != "store":
            raise
        fix = error.fix.replace("state init", "account create")
        raised = type(error)("account.path", error.rule, fix)
    else:
        return
    raise raised from None


def _pieces(content: bytes) -> list[str]:
    """Return cells that hold a content: at least one."""
    starts = range(0, max(len(content), 1), CELL_BYTES)
    return [b64encode(content[start : start + CELL_BYTES]).decode() for start in starts]


def _content(cells: Sequence[bytes]) -> bytes:
    return b"".join(b64decode(cell) for cell in cells)


def _refuse_former(database: Database) -> None:
    """Refuse the account of an older program.

    Raises:
        PolicyError: there is one.
    """
    if administered(database.exists):
        administered(database.reload)
        if any(_FORMER in statement for statement in database.ddl_statements):
            raise other_format()


class AccountStorage:
    """The database of one account; see `log.Storage`.

    Args:
        url: ``spanner://PROJECT/INSTANCE/DATABASE``, in which one was made (`create`).

    Raises:
        RunError: it cannot be reached.
    """

    def __init__(self, url: str, _looking: bool = False) -> None:
        with of_ledger():
            self.db = connect(url)
        self._last = ""  # digest of the last row
        self._decides = False  # whether a transaction is open that has not inserted a row yet

    def close(self) -> None:
        """Do nothing: the client is shared."""

    @contextlib.contextmanager
    def reading(self, writes: bool) -> Iterator[None]:
        """See `log.Storage`."""
        self._decides = writes
        yield
        if self._decides and self.changed():
            raise LedgerMovedError

    @of_ledger()
    def changed(self) -> bool:
        """See `log.Storage`."""
        return list(read_rows(self.db, LOG, ("Digest",), [(0, 0)])) != [[self._last]]

    @of_ledger()
    def rows(self, after: int) -> Sequence[Line]:
        """See `log.Storage`.

        Raises:
            UsageError: no account was made, or it may not be used.
            PolicyError: it is of another version.
        """
        lines = list[Line]()
        try:
            read = list(read_rows(self.db, LOG, _LOG, [(0, 0)], [from_on(after + 1)]))
        except NothingThereError:
            _refuse_former(self.db)
            raise
        for number, rows in itertools.groupby(read, key=lambda row: row[0]):
            *_, cells, digests = zip(*rows, strict=True)
            lines.append(Line(number, _content(cells), digests[-1]))
        if not lines and not after:  # its creation was interrupted
            raise absent()
        self._last = lines[0].digest if lines else ""
        return lines

    @of_ledger()
    def blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """See `log.Storage`."""
        if not names:
            return {}
        cells, where = dict[str, list[bytes]](), [prefix(name) for name in names]
        for name, _, cell in read_rows(self.db, BLOBS, _BLOBS, ranges=where):
            cells.setdefault(name, []).append(cell)
        return {name: _content(each) for name, each in cells.items()}

    @of_ledger()
    def insert(self, line: Line, blobs: dict[str, bytes]) -> None:
        """See `log.Storage`.

        Raises:
            RunError: it is larger than a commit may be.
        """
        number, changes, digest = line
        if len(changes) + sum(map(len, blobs.values())) > COMMIT_BYTES:
            raise RunError(
                "account.path",
                f"accepts receipts of at most {COMMIT_BYTES >> 20} MiB in a database",
                "ask for fewer rows",
            )
        writer = secrets.token_hex(16)

        def fill(batch: Any) -> None:
            rows = [(number, n, writer, cell, digest) for n, cell in enumerate(_pieces(changes))]
            batch.insert(LOG, _LOG, rows)
            batch.insert_or_update(LOG, _LOG, [(0, 0, "", *_pieces(FORMAT), digest)])
            for name, blob in blobs.items():
                cells = [(name, *cell) for cell in enumerate(_pieces(blob))]
                batch.insert_or_update(BLOBS, _BLOBS, cells)

        self._decides = False
        try:
            commit(self.db, fill)
        except ExistsError:
            if list(read_rows(self.db, LOG, ("Writer",), [(number, 0)])) != [[writer]]:
                raise LedgerMovedError from None
        self._last = digest


@of_ledger()
def create(url: str, created: Created) -> None:
    """Make database and tables where they are missing, and an account in them.

    Raises:
        UsageError: there is an account already, no such instance, or no right to create.
        PolicyError: the database belongs to another program, or the account to another version.
        RunError: it cannot be reached.
    """
    storage = AccountStorage(url)
    _refuse_former(storage.db)
    make_tables(storage.db, DDL, "the account")
    try:
        storage.insert(first_line(created), {})
    except LedgerMovedError:
        raise there_already() from None


@of_ledger()
def is_there(url: str) -> bool:
    """Return whether an account was made there.

    Raises:
        RunError: it cannot be reached.
    """
    try:
        return any(read_rows(connect(url), LOG, ("Number",), [(1, 0)]))
    except NothingThereError:
        return False
