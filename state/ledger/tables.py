"""The tables of an account in Cloud Spanner: how they are made and read, and a replica of them.

A row of ``LedgerCommits`` is both fence and seal.  Its number can be inserted once: a process that
commits N has seen N - 1, so what was decided on N - 1 holds, and of two that decided at once one is
refused.  Its text, which has a digest, names the end of the chain, the sums of all tables
(`events.sum_of`), and the rows that changed, so that others read these alone.

A receipt, a grant or a view is stored in pieces, since a cell takes 10 MiB.

Rows are far away, so a process decides by its ``Replica``: the rows in memory as the last known
commit left them, and what a transaction adds.  It reads only what others have committed since.
Every row that is read or written passes through it, so that chain and sums cover what was seen.
What was added since the last ``keep`` can be removed again.
"""

import contextlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.limits import CELL_BYTES
from dpstream.state.ledger.contract import StoredRequest
from dpstream.state.ledger.events import (
    COLUMNS,
    Created,
    Entry,
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
from dpstream.state.ledger.sqlite import absent, other_version, there_already
from dpstream.state.seals import reading, sealed_text, unsealed_text
from dpstream.state.spanner.client import ExistsError, commit, from_on, prefix, read_rows
from dpstream.state.spanner.schema import make_tables

#: ``deploy/spanner/ledger.sql`` is a copy (a test compares them).
DDL = """
CREATE TABLE LedgerCommits (
  Number INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Sealed STRING(MAX) NOT NULL,
) PRIMARY KEY (Number);

CREATE TABLE LedgerEntries (
  Seq INT64 NOT NULL,
  Name STRING(1024),
  Entry STRING(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Seq);

CREATE UNIQUE NULL_FILTERED INDEX LedgerEntriesByName ON LedgerEntries (Name);

CREATE TABLE LedgerTokens (
  RunId STRING(1024) NOT NULL,
  Token STRING(1024) NOT NULL,
  Previous STRING(1024),
) PRIMARY KEY (RunId, Token);

CREATE TABLE LedgerRequests (
  RunId STRING(1024) NOT NULL,
  Request STRING(1024) NOT NULL,
  Digest STRING(32),
  ViewDigest STRING(32),
  Number INT64 NOT NULL,
) PRIMARY KEY (RunId);

CREATE TABLE LedgerBlobs (
  RunId STRING(1024) NOT NULL,
  Kind STRING(16) NOT NULL,
  Piece INT64 NOT NULL,
  Bytes BYTES(MAX) NOT NULL,
) PRIMARY KEY (RunId, Kind, Piece);
"""
COMMITS, ENTRIES, TOKENS = "LedgerCommits", "LedgerEntries", "LedgerTokens"
REQUESTS, BLOBS = "LedgerRequests", "LedgerBlobs"
COLUMNS_OF = {
    COMMITS: ("Number", "Writer", "Sealed"),
    ENTRIES: ("Seq", "Name", "Entry", "Digest"),
    TOKENS: ("RunId", "Token", "Previous"),
    REQUESTS: ("RunId", "Request", "Digest", "ViewDigest", "Number"),
    BLOBS: ("RunId", "Kind", "Piece", "Bytes"),
}
#: Kinds of blobs of a request.
GRANT, RECEIPT, VIEW = "grant", "receipt", "view"
#: Version of the tables and of the seal; a program refuses what it does not know.
SCHEMA_VERSION = 1


class AnswerRow(NamedTuple):
    """A request with its three blobs (``contract.Asked``); ``number`` counts the requests."""

    run_id: str
    request: str
    grant: bytes
    receipt: bytes | None
    digest: str | None
    view: bytes | None
    view_digest: str | None
    number: int

    @property
    def stored(self) -> StoredRequest:
        """Return the row in the form of the contract."""
        return StoredRequest(*self[:-1])


class _RequestRow(NamedTuple):
    """A request without its blobs, and what its row adds to the sum."""

    request: str
    digest: str | None
    view_digest: str | None
    number: int
    part: int


class Replica:
    """The rows of an account.

    Attributes:
        history: the account's events.
        sums: sum of the rows of every table (`events.sum_of`).
    """

    def __init__(self) -> None:
        self.history = History()
        self.sums: Sums = dict.fromkeys(COLUMNS, 0)
        self._tokens = dict[str, dict[str, str | None]]()
        self._answers = dict[str, _RequestRow]()
        self._alike = dict[str, list[str]]()
        self._undo = list[Callable[[], object]]()

    # --- what is there ---------------------------------------------------------------------------

    @property
    def end(self) -> tuple[int, str]:
        """Return number and digest of the last entry."""
        digests = self.history.digests
        return len(digests), digests[-1] if digests else ""

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """Return a copy of a run's tokens."""
        return dict(self._tokens.get(run_id, {}))

    def has(self, run_id: str) -> bool:
        """Return whether a run has a request."""
        return run_id in self._answers

    def alike(self, request: str) -> list[str]:
        """Return the runs with a request, in order."""
        return list(self._alike.get(request, ()))

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return len(self._answers)

    @property
    def unanswered(self) -> list[str]:
        """Return the runs whose request has no receipt."""
        return [run_id for run_id, entry in self._answers.items() if entry.digest is None]

    def check_answer(self, row: AnswerRow) -> AnswerRow:
        """Check a row that was read alone; return it.

        Raises:
            PolicyError: the row is not the one in the sum.
        """
        entry = self._answers.get(row.run_id)
        refuse_damage(entry is None or sum_of("requests", [row]) != entry.part)
        return row

    # --- what comes ------------------------------------------------------------------------------

    def add_entry(self, seq: int, name: str | None, text: str, digest: str) -> Entry:
        """Add the next entry of the chain.

        Raises:
            PolicyError: it does not continue the chain, or this program does not know its form.
        """
        number, last = self.end
        if seq != number + 1 or digest != chained(last, text):
            raise PolicyError(
                "account.path", "its hash chain is broken", "restore the account from a backup"
            )
        event = event_of(text)
        refuse_damage(name != name_of(event))
        self._add_up("entries", [(seq, name, text, digest)])
        self.history.add(event, digest)
        self._undo.append(lambda: self.history.cut(number))
        return Entry(seq, event, digest)

    def put_tokens(self, run_id: str, tokens: dict[str, str | None]) -> None:
        """Replace the tokens of a run."""
        old = self._tokens.get(run_id, {})
        if tokens == old:
            return
        gone = [(run_id, *pair) for pair in old.items() if pair not in tokens.items()]
        come = [(run_id, *pair) for pair in tokens.items() if pair not in old.items()]
        self._take_off("tokens", gone)
        self._add_up("tokens", come)
        self._tokens[run_id] = tokens
        self._undo.append(lambda: self._tokens.__setitem__(run_id, old))

    def put_answer(self, row: AnswerRow) -> None:
        """Add a request, or give one its receipt or its view.

        Raises:
            PolicyError: it is another request, or changes a stored part.
        """
        entry = self._answers.get(row.run_id)
        part = sum_of("requests", [row])
        new = _RequestRow(row.request, row.digest, row.view_digest, row.number, part)
        if entry == new:
            return
        if entry is None:
            refuse_damage(row.number != len(self._answers))
            self._undo.append(lambda: self._answers.pop(row.run_id))
            self._alike.setdefault(row.request, []).append(row.run_id)
            self._undo.append(self._alike[row.request].pop)
        else:
            less = _without_later_blobs(row, entry)
            stays = (new.request, new.number) == (entry.request, entry.number)
            refuse_damage(not stays or sum_of("requests", [less]) != entry.part)
            self._take_off("requests", [less])
            self._undo.append(lambda: self._answers.__setitem__(row.run_id, entry))
        self._add_up("requests", [row])
        self._answers[row.run_id] = new

    def keep(self) -> None:
        """Accept all changes since the last ``keep``."""
        self._undo.clear()

    def take_back(self) -> None:
        """Undo all changes since the last ``keep``."""
        while self._undo:
            self._undo.pop()()

    def _add_up(self, table: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._move(table, sum_of(table, rows, self.sums[table]))

    def _take_off(self, table: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._move(table, sum_without(table, rows, self.sums[table]))

    def _move(self, table: str, total: int) -> None:
        old = self.sums[table]
        self.sums[table] = total
        self._undo.append(lambda: self.sums.__setitem__(table, old))


def _without_later_blobs(row: AnswerRow, entry: _RequestRow) -> AnswerRow:
    """Return a row without the blobs that were added after ``entry`` was read."""
    if entry.digest is None:
        return row._replace(receipt=None, digest=None, view=None, view_digest=None)
    if entry.view_digest is None:
        return row._replace(view=None, view_digest=None)
    return row


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit.

    Attributes:
        number: counted from 0, which `init` writes.
        writer: a random mark of its one writer.
        seq, digest: the end of the chain after it.
        sums: of the tables, hexadecimal.
        tokens, answers: runs whose tokens, or whose requests, it changed.
    """

    number: int
    writer: str
    seq: int
    digest: str
    sums: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    version: int = SCHEMA_VERSION

    @property
    def row(self) -> tuple[int, str, str]:
        """Return the row that the account stores of it."""
        text = msgspec.json.encode(self, order="sorted").decode()
        return self.number, self.writer, sealed_text(f"ledger commit {self.number}", text)

    def seals(self, rows: Replica) -> None:
        """Check that the commit left these rows.

        Raises:
            PolicyError: the account differs from what was written.
        """
        refuse_damage(((self.seq, self.digest), self.sums) != (rows.end, sums_of(rows)))


def sums_of(rows: Replica) -> tuple[str, ...]:
    """Return the sums of all tables in the form of a commit."""
    return tuple(f"{rows.sums[table]:032x}" for table in COLUMNS)


def create_in(database: Database, created: Created, writer: str) -> None:
    """Make database and tables where they are missing, and the account's first entry.

    Args:
        writer: a random mark of the caller.

    Raises:
        UsageError: there is an account already, no such instance, or no right to create.
        PolicyError: the database belongs to another program.
        RunError: it cannot be reached.
    """
    with of_ledger():
        make_tables(database, DDL, "the account")
        rows, text = Replica(), text_of(created)
        entry = (1, None, text, chained("", text))
        rows.add_entry(*entry)
        first = Commit(0, writer, *rows.end, sums_of(rows))

        def fill(batch: Any) -> None:
            batch.insert(COMMITS, COLUMNS_OF[COMMITS], [first.row])
            batch.insert(ENTRIES, COLUMNS_OF[ENTRIES], [entry])

        try:
            commit(database, fill)
        except ExistsError:
            writers = [by for (by,) in read_rows(database, COMMITS, ("Writer",), [(0,)])]
            if writers != [writer]:  # not this call's own, sent twice
                raise there_already() from None


def commits_from(database: Database, number: int, snapshot: Any = None) -> list[Commit]:
    """Return all commits from one on, checked; none if it does not exist.

    Raises:
        PolicyError: one is damaged or missing, or of a newer program.
    """
    where = [from_on(number)]
    rows = read_rows(database, COMMITS, COLUMNS_OF[COMMITS], ranges=where, snapshot=snapshot)
    commits = [_commit_of(*row) for row in rows]
    refuse_damage([each.number for each in commits] != list(range(number, number + len(commits))))
    return commits


def _commit_of(number: int, writer: str, sealed: str) -> Commit:
    try:
        text = unsealed_text(f"ledger commit {number}", sealed)
    except PolicyError:
        raise damaged() from None
    if msgspec.json.decode(text, type=dict[str, Any]).get("version") != SCHEMA_VERSION:
        raise other_version()
    record = msgspec.json.decode(text, type=Commit)
    refuse_damage((record.number, record.writer) != (number, writer))
    return record


def all_rows(database: Database, snapshot: Any) -> tuple[Replica, Commit]:
    """Return all rows of an account at one time, and its last commit, all checked.

    Raises:
        UsageError: the account was not made.
        PolicyError: it differs from what was written.
    """
    rows = Replica()
    commits = commits_from(database, 0, snapshot)
    _add_new(rows, database, None, None, snapshot)
    if not commits:
        refuse_damage(any(rows.sums.values()))
        raise absent()
    commits[-1].seals(rows)
    refuse_damage(not rows.history.digests)
    rows.keep()
    return rows, commits[-1]


def catch_up(rows: Replica, last: Commit, database: Database, snapshot: Any) -> Commit:
    """Bring rows from one commit to the newest, which is checked.

    Raises:
        PolicyError: the account differs from what was written.
    """
    commits = commits_from(database, last.number, snapshot)
    refuse_damage(commits[:1] != [last])
    del commits[0]
    token_runs, answer_runs = (
        list(dict.fromkeys(run for each in commits for run in getattr(each, kind)))
        for kind in ("tokens", "answers")
    )
    _add_new(rows, database, token_runs, answer_runs, snapshot)
    newest = commits[-1] if commits else last
    newest.seals(rows)
    rows.keep()
    return newest


def _add_new(
    rows: Replica,
    database: Database,
    token_runs: Sequence[str] | None,
    answer_runs: Sequence[str] | None,
    snapshot: Any,
) -> None:
    """Add the entries behind the last one, the tokens of runs and the requests of others, or of
    all (``None``)."""
    last, _ = rows.end
    where = [from_on(last + 1)] if last else ()
    new = read_rows(database, ENTRIES, COLUMNS_OF[ENTRIES], ranges=where, snapshot=snapshot)
    for row in new:
        rows.add_entry(*row)
    by_run: dict[str, dict[str, str | None]] = {run: {} for run in token_runs or ()}
    for run_id, token, previous in _rows_of(database, TOKENS, token_runs, snapshot):
        by_run.setdefault(run_id, {})[token] = previous
    for run_id, tokens in by_run.items():
        rows.put_tokens(run_id, tokens)
    for answer in sorted(answers_of(database, answer_runs, snapshot), key=lambda row: row.number):
        rows.put_answer(answer)


def _rows_of(database: Database, table: str, runs: Sequence[str] | None, snapshot: Any) -> Any:
    """Return rows of some runs, or all of them (``None``)."""
    if runs is not None and not runs:
        return ()
    where = [prefix(run) for run in runs or ()]
    return read_rows(database, table, COLUMNS_OF[table], ranges=where, snapshot=snapshot)


def answers_of(
    database: Database, runs: Sequence[str] | None, snapshot: Any = None
) -> Iterator[AnswerRow]:
    """Yield requests of some runs, or all (``None``), with their blobs.

    Raises:
        PolicyError: pieces of a blob are missing.
    """
    blobs = dict[str, dict[str, list[bytes]]]()
    for run_id, kind, piece, data in _rows_of(database, BLOBS, runs, snapshot):
        mine = blobs.setdefault(run_id, {}).setdefault(kind, [])
        with _readable():
            mine.append(b64decode(data))
        refuse_damage(piece != len(mine) - 1)
    rows = _rows_of(database, REQUESTS, runs, snapshot)
    for run_id, request, digest, view_digest, number in rows:
        mine_all = {kind: b"".join(parts) for kind, parts in blobs.pop(run_id, {}).items()}
        grant = mine_all.pop(GRANT, None)
        receipt, view = mine_all.pop(RECEIPT, None), mine_all.pop(VIEW, None)
        pairs = ((receipt, digest), (view, view_digest))
        if grant is None or mine_all or any((a is None) != (b is None) for a, b in pairs):
            raise damaged()
        yield AnswerRow(run_id, request, grant, receipt, digest, view, view_digest, number)
    refuse_damage(bool(blobs))


def pieces_of(run_id: str, kind: str, blob: bytes) -> list[tuple[str, str, int, str]]:
    """Return the rows of a blob: at least one."""
    starts = range(0, max(len(blob), 1), CELL_BYTES)
    parts = [blob[start : start + CELL_BYTES] for start in starts]
    return [(run_id, kind, piece, b64encode(part).decode()) for piece, part in enumerate(parts)]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        with reading():
            yield
    except PolicyError:
        raise damaged() from None


@contextlib.contextmanager
def of_ledger() -> Iterator[None]:
    """Make errors of the database name the account, not a store."""
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
