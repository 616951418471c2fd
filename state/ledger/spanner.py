"""The account in Cloud Spanner, shared by jobs on many machines.

**How a charge is safe.**  A transaction reads the newest commit, decides by the rows it left, and
commits all changes in one call that inserts the commit of the next number.  That row can be
inserted once.  So no charge is made on what is no longer true: who comes second is told, writes
nothing, and decides again.  A call whose answer is lost is sent again as it is: "exists already"
is then answered by the row, which names its writer, so that nobody takes another's commit for its
own or its own for another's.  A call that arrives late, whatever has happened since, finds its
number taken.  A transaction that changes nothing ends with a look at whether it is still true.

**What is checked, and when.**  Whoever opens the ledger checks every row of it
(`state.ledger.tables`).  From then on this object holds the rows in memory, reads what others
have committed, and checks each commit's seal over all rows; a receipt is read when it is asked
for, and held against the row that was checked.
"""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from google.cloud import spanner

from dpstream.accounting.errors import InvariantError, RunError, required
from dpstream.accounting.limits import COMMIT_BYTES
from dpstream.state.ledger.contract import Ledger, LedgerMovedError, StoredRequest
from dpstream.state.ledger.events import (
    Created,
    Entry,
    Event,
    Received,
    chained,
    damaged,
    name_of,
    refuse_damage,
    text_of,
)
from dpstream.state.ledger.history import History
from dpstream.state.ledger.tables import (
    BLOBS,
    COLUMNS_OF,
    COMMITS,
    ENTRIES,
    GRANT,
    RECEIPT,
    REQUESTS,
    TOKENS,
    VIEW,
    AnswerRow,
    Commit,
    Replica,
    all_rows,
    answers_of,
    catch_up,
    commits_from,
    create_in,
    of_ledger,
    pieces_of,
    sums_of,
)
from dpstream.state.spanner.client import (
    ExistsError,
    NothingThereError,
    administered,
    commit,
    connect,
    read_rows,
)


class _Pending:
    """The changes that an open transaction will write, in order."""

    def __init__(self) -> None:
        self.changes = list[tuple[str, str, Any]]()
        self.tokens, self.answers = dict[str, None](), dict[str, AnswerRow]()

    def fill(self, batch: Any) -> None:
        """Add the changes to a batch."""
        for how, table, row in self.changes:
            if how == "delete":
                batch.delete(table, spanner.KeySet(keys=[row]))
            else:
                getattr(batch, how)(table, COLUMNS_OF[table], [row])


class SpannerLedger(Ledger):
    """The account of one data set in a database; see the module.

    Args:
        url: ``spanner://PROJECT/INSTANCE/DATABASE``, in which one was made (`create`).

    Raises:
        UsageError: no account was made, or it may not be used.
        PolicyError: it is damaged or of another version.
        RunError: it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._rows: Replica | None = None
        self._last: Commit | None = None
        self._pending: _Pending | None = None
        with of_ledger():
            self._db = connect(url)
        self._refreshed()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """See the contract."""
        if self._pending is not None:
            raise InvariantError("one transaction at a time")
        rows = self._refreshed()
        self._pending = _Pending()
        try:
            yield
            if self._pending.changes:
                self._commit(rows, self._pending)
            else:
                self._unmoved()
            rows.keep()
        except BaseException:
            # Whatever was written, if anything, is read as anybody's.
            rows.take_back()
            raise
        finally:
            self._pending = None

    def _commit(self, rows: Replica, pending: _Pending) -> None:
        last = required(self._last, "rows are those of a commit")
        touched = tuple(pending.tokens), tuple(pending.answers)
        number, mark = last.number + 1, secrets.token_hex(16)
        new = Commit(number, mark, *rows.end, sums_of(rows), *touched)

        def fill(batch: Any) -> None:
            batch.insert(COMMITS, COLUMNS_OF[COMMITS], [new.row])
            pending.fill(batch)

        with of_ledger():
            try:
                commit(self._db, fill)
            except ExistsError:
                stands = read_rows(self._db, COMMITS, ("Writer",), [(number,)])
                writers = [writer for (writer,) in stands]
                if not writers:  # another row was there: none of a commit
                    raise damaged() from None
                if writers != [mark]:
                    raise LedgerMovedError from None
        self._last = new

    def _unmoved(self) -> None:
        """Check that the rows that were read are still the newest."""
        last = required(self._last, "rows are those of a commit")
        with of_ledger():
            if commits_from(self._db, last.number) != [last]:
                raise LedgerMovedError

    def _refreshed(self) -> Replica:
        """Return the present rows; in a transaction, as of its begin and with its changes."""
        if self._pending is None:
            with of_ledger():
                last = self._last
                if last is None or commits_from(self._db, last.number) != [last]:
                    administered(self._read)
        return required(self._rows, "self._rows is there")

    def _read(self) -> None:
        rows, last = self._rows, self._last
        self._rows = self._last = None  # until they are known again
        with self._db.snapshot(multi_use=True) as snapshot:
            if rows is None or last is None:
                rows, last = all_rows(self._db, snapshot)
            else:
                last = catch_up(rows, last, self._db, snapshot)
        self._rows, self._last = rows, last

    # --- rows ------------------------------------------------------------------------------------

    def history(self) -> History:
        """See the contract."""
        return self._refreshed().history

    def append(self, event: Event) -> None:
        """See the contract."""
        pending, rows = self._writing()
        (number, last), text = rows.end, text_of(event)
        row = (number + 1, name_of(event), text, chained(last, text))
        rows.add_entry(*row)
        pending.changes.append(("insert", ENTRIES, row))

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """See the contract."""
        return self._refreshed().tokens(run_id)

    def add_token(self, run_id: str, token: str, previous: str | None) -> None:
        """See the contract."""
        pending, rows = self._writing()
        rows.put_tokens(run_id, {**rows.tokens(run_id), token: previous})
        pending.tokens[run_id] = None
        pending.changes.append(("insert", TOKENS, (run_id, token, previous)))

    def drop_token(self, run_id: str, token: str) -> None:
        """See the contract."""
        pending, rows = self._writing()
        rest = rows.tokens(run_id)
        del rest[token]
        rows.put_tokens(run_id, rest)
        pending.tokens[run_id] = None
        pending.changes.append(("delete", TOKENS, (run_id, token)))

    def request_of(self, run_id: str) -> StoredRequest | None:
        """See the contract."""
        row = self._row(self._refreshed(), run_id)
        return None if row is None else row.stored

    def requests_alike(self, request: str) -> list[StoredRequest]:
        """See the contract."""
        rows = self._refreshed()
        alike = [self._row(rows, run_id) for run_id in rows.alike(request)]
        return [row.stored for row in alike if row is not None]

    def _row(self, rows: Replica, run_id: str) -> AnswerRow | None:
        if not rows.has(run_id):
            return None
        if self._pending is not None and run_id in self._pending.answers:
            return self._pending.answers[run_id]
        last = required(self._last, "rows are those of a commit")
        with of_ledger(), self._db.snapshot(multi_use=True) as snapshot:
            moved = commits_from(self._db, last.number, snapshot) != [last]
            read = [] if moved else list(answers_of(self._db, [run_id], snapshot))
        if moved:  # by another process: begun again, or looked at again
            if self._pending is not None:
                raise LedgerMovedError
            return self._row(self._refreshed(), run_id)
        refuse_damage(len(read) != 1)
        return rows.check_answer(read[0])

    def ask(self, run_id: str, request: str, grant: bytes = b"") -> None:
        """See the contract."""
        _, rows = self._writing()
        row = AnswerRow(run_id, request, grant, None, None, None, None, rows.requests)
        self._put(row, GRANT, grant)

    def unanswered(self) -> list[str]:
        """See the contract."""
        return self._refreshed().unanswered

    def answer(self, run_id: str, receipt: bytes, digest: str) -> None:
        """See the contract.

        Raises:
            RunError: the receipt is more than a commit takes.
        """
        _, rows = self._writing()
        row = self._row(rows, run_id)
        if row is None or row.receipt is not None:
            raise InvariantError("a request without a receipt")
        self._put(row._replace(receipt=receipt, digest=digest), RECEIPT, receipt)
        self.append(Received(run_id, digest))

    def put_view(self, run_id: str, view: bytes, digest: str) -> None:
        """See the contract.

        Raises:
            RunError: the view is more than a commit takes.
        """
        _, rows = self._writing()
        row = self._row(rows, run_id)
        if row is None or row.receipt is None or row.view is not None:
            raise InvariantError("an answered request without a view")
        self._put(row._replace(view=view, view_digest=digest), VIEW, view)

    def _put(self, row: AnswerRow, kind: str, blob: bytes) -> None:
        """Write a request's row and its new blob."""
        pending, rows = self._writing()
        if len(blob) > COMMIT_BYTES:
            raise RunError(
                "account.path",
                f"takes receipts of up to {COMMIT_BYTES >> 20} MiB in a database",
                "ask for fewer rows",
            )
        rows.put_answer(row)
        pending.answers[row.run_id] = row
        stored = (row.run_id, row.request, row.digest, row.view_digest, row.number)
        pending.changes.append(("insert_or_update", REQUESTS, stored))
        pending.changes += [("insert", BLOBS, piece) for piece in pieces_of(row.run_id, kind, blob)]

    def _writing(self) -> tuple[_Pending, Replica]:
        if self._pending is None or self._rows is None:
            raise InvariantError("only in a transaction")
        return self._pending, self._rows


def opened(url: str, _looking: bool = False) -> SpannerLedger:
    """Return an existing account; see `SpannerLedger`."""
    return SpannerLedger(url)


def create(url: str, created: Created) -> None:
    """Make database and tables where they are missing, and an account in them.

    Raises:
        UsageError: there is an account already, no such instance, or no right to create.
        PolicyError: the database belongs to another program.
        RunError: it cannot be reached.
    """
    with of_ledger():
        database = connect(url)
    create_in(database, created, secrets.token_hex(16))


def read_entries(url: str) -> list[Entry]:
    """Return every entry of an account in order, after a check of every row; writes nothing.

    Raises:
        UsageError: there is no account.
        PolicyError: it is damaged.
        RunError: it cannot be reached.
    """

    def look() -> list[Entry]:
        with database.snapshot(multi_use=True) as snapshot:
            return all_rows(database, snapshot)[0].history.entries

    with of_ledger():
        database = connect(url)
        entries: list[Entry] = administered(look)
        return entries


def is_there(url: str) -> bool:
    """Return whether an account was made there.

    Raises:
        RunError: it cannot be reached.
    """
    try:
        with of_ledger():
            return any(read_rows(connect(url), COMMITS, ("Number",), [(0,)]))
    except NothingThereError:
        return False
