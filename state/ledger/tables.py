"""The tables of a ledger in Cloud Spanner: made, and read.

A row of ``LedgerCommits`` is both fence and seal.  Its number can be inserted once: whoever
commits N has seen N - 1, so what was decided on N - 1 holds, and of two who decided at once one is
told so.  Its text, which has a digest, names the end of the chain, the sums of all tables
(`state.ledger.seal`), and the rows that changed, so that others read these alone.

A receipt lies in pieces, since a cell takes 10 MiB.
"""

import contextlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.limits import CELL_BYTES
from dpstream.state.ledger.charges import Entry
from dpstream.state.ledger.replica import AnswerRow, Replica
from dpstream.state.ledger.seal import COLUMNS, damaged
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
  DataSet STRING(1024) NOT NULL,
  RunId STRING(1024) NOT NULL,
  Entry STRING(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Seq);

CREATE UNIQUE INDEX LedgerEntriesByRun ON LedgerEntries (DataSet, RunId);

CREATE TABLE LedgerTokens (
  RunId STRING(1024) NOT NULL,
  Token STRING(1024) NOT NULL,
  Previous STRING(1024),
) PRIMARY KEY (RunId, Token);

CREATE TABLE LedgerAnswers (
  RunId STRING(1024) NOT NULL,
  DataSet STRING(1024) NOT NULL,
  Request STRING(1024) NOT NULL,
  Digest STRING(32),
  Pieces INT64 NOT NULL,
  Number INT64 NOT NULL,
) PRIMARY KEY (RunId);

CREATE TABLE LedgerReceipts (
  RunId STRING(1024) NOT NULL,
  Piece INT64 NOT NULL,
  Bytes BYTES(MAX) NOT NULL,
) PRIMARY KEY (RunId, Piece);
"""
COMMITS, ENTRIES, TOKENS = "LedgerCommits", "LedgerEntries", "LedgerTokens"
ANSWERS, RECEIPTS = "LedgerAnswers", "LedgerReceipts"
COLUMNS_OF = {
    COMMITS: ("Number", "Writer", "Sealed"),
    ENTRIES: ("Seq", "DataSet", "RunId", "Entry", "Digest"),
    TOKENS: ("RunId", "Token", "Previous"),
    ANSWERS: ("RunId", "DataSet", "Request", "Digest", "Pieces", "Number"),
    RECEIPTS: ("RunId", "Piece", "Bytes"),
}
#: Version of the tables and of the seal; a program refuses what it does not know.
SCHEMA_VERSION = 1


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit.

    Attributes:
        number: counted from 0, which `init` writes; writer: a random mark of its one writer.
        seq, digest: the end of the chain behind it; sums: of the tables, hexadecimal.
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
        """What the ledger keeps of it."""
        text = msgspec.json.encode(self, order="sorted").decode()
        return self.number, self.writer, sealed_text(f"ledger commit {self.number}", text)

    def seals(self, rows: Replica) -> None:
        """Check that it left these rows.

        Raises:
            PolicyError: the ledger is not what was written.
        """
        end = rows.digests[-1] if rows.digests else ""
        if (self.seq, self.digest, self.sums) != (len(rows.digests), end, sums_of(rows)):
            raise damaged()


def sums_of(rows: Replica) -> tuple[str, ...]:
    """The sums of all tables as a commit tells them."""
    return tuple(f"{rows.sums[table]:032x}" for table in COLUMNS)


def create(database: Database, writer: str) -> bool:
    """Make database, tables and the first commit where they are missing; whether anything was.

    Args:
        writer: a random mark of the caller.

    Raises:
        UsageError: no such instance, or no right to create; RunError: unreachable.
        PolicyError: the database is another one's.
    """
    with of_ledger():
        statements = [s.strip() for s in DDL.split(";") if s.strip()]
        fresh = make_tables(database, statements, "the ledger")
        first = Commit(0, writer, 0, "", sums_of(Replica("")))
        with contextlib.suppress(ExistsError):
            commit(database, lambda batch: batch.insert(COMMITS, COLUMNS_OF[COMMITS], [first.row]))
    return fresh


def commits_from(database: Database, number: int, snapshot: Any = None) -> list[Commit]:
    """All commits from one on, checked; none if it is not there.

    Raises:
        PolicyError: one is damaged or missing, or of a newer program.
    """
    where = [from_on(number)]
    rows = read_rows(database, COMMITS, COLUMNS_OF[COMMITS], ranges=where, snapshot=snapshot)
    found = [_commit_of(*row) for row in rows]
    if [each.number for each in found] != list(range(number, number + len(found))):
        raise damaged()
    return found


def _commit_of(number: int, writer: str, sealed: str) -> Commit:
    try:
        text = unsealed_text(f"ledger commit {number}", sealed)
    except PolicyError:
        raise damaged() from None
    version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
    if version != SCHEMA_VERSION:
        raise PolicyError(
            "ledger.path",
            f"its schema version is beyond {SCHEMA_VERSION}, the one of this program",
            "use the newer program that wrote it",
        )
    found = msgspec.json.decode(text, type=Commit)
    if (found.number, found.writer) != (number, writer):
        raise damaged()
    return found


def whole(database: Database, data_set: str, snapshot: Any) -> tuple[Replica, Commit, list[Entry]]:
    """All rows of a ledger at one time, and its last commit, all checked.

    Raises:
        UsageError: it was not initialised; PolicyError: it is not what was written.
    """
    rows = Replica(data_set)
    commits = commits_from(database, 0, snapshot)
    entries = _add_entries(rows, database, snapshot)
    _put_tokens(rows, database, None, snapshot)
    _put_answers(rows, database, None, snapshot)
    if not commits:
        if any(rows.sums.values()):
            raise damaged()
        raise UsageError("ledger.path", "is no ledger yet", "run `dpstream ledger init`")
    commits[-1].seals(rows)
    rows.keep()
    return rows, commits[-1], entries


def catch_up(rows: Replica, last: Commit, database: Database, snapshot: Any) -> Commit:
    """Bring rows from one commit to the newest, which is checked.

    Raises:
        PolicyError: the ledger is not what was written.
    """
    commits = commits_from(database, last.number, snapshot)
    if commits[:1] != [last]:
        raise damaged()
    del commits[0]
    _add_entries(rows, database, snapshot)
    _put_tokens(rows, database, list(dict.fromkeys(r for c in commits for r in c.tokens)), snapshot)
    runs = list(dict.fromkeys(run for each in commits for run in each.answers))
    _put_answers(rows, database, runs, snapshot)
    newest = commits[-1] if commits else last
    newest.seals(rows)
    rows.keep()
    return newest


def _add_entries(rows: Replica, database: Database, snapshot: Any) -> list[Entry]:
    where = [from_on(len(rows.digests) + 1)] if rows.digests else ()
    found = read_rows(database, ENTRIES, COLUMNS_OF[ENTRIES], ranges=where, snapshot=snapshot)
    return [rows.add_entry(*row) for row in found]


def _some(database: Database, table: str, runs: Sequence[str] | None, snapshot: Any) -> Any:
    """Rows of some runs, or all of them (``None``)."""
    if runs is not None and not runs:
        return ()
    where = [prefix(run) for run in runs or ()]
    return read_rows(database, table, COLUMNS_OF[table], ranges=where, snapshot=snapshot)


def _put_tokens(
    rows: Replica, database: Database, runs: Sequence[str] | None, snapshot: Any
) -> None:
    found: dict[str, dict[str, str | None]] = {run: {} for run in runs or ()}
    for run_id, token, previous in _some(database, TOKENS, runs, snapshot):
        found.setdefault(run_id, {})[token] = previous
    for run_id, tokens in found.items():
        rows.put_tokens(run_id, tokens)


def _put_answers(
    rows: Replica, database: Database, runs: Sequence[str] | None, snapshot: Any
) -> None:
    for row in sorted(answers_of(database, runs, snapshot), key=lambda row: row.number):
        rows.put_answer(row)


def answers_of(
    database: Database, runs: Sequence[str] | None, snapshot: Any = None
) -> Iterator[AnswerRow]:
    """Requests of some runs, or all (``None``), with their receipts.

    Raises:
        PolicyError: pieces of a receipt are missing.
    """
    pieces = dict[str, list[bytes]]()
    for run_id, piece, data in _some(database, RECEIPTS, runs, snapshot):
        mine = pieces.setdefault(run_id, [])
        with _readable():
            mine.append(b64decode(data))
        if piece != len(mine) - 1:
            raise damaged()
    for run_id, data_set, request, digest, many, number in _some(database, ANSWERS, runs, snapshot):
        mine = pieces.pop(run_id, [])
        if len(mine) != many or (digest is None) != (not mine):
            raise damaged()
        receipt = b"".join(mine) if mine else None
        yield AnswerRow(run_id, data_set, request, receipt, digest, number)
    if pieces:
        raise damaged()


def pieces_of(run_id: str, receipt: bytes) -> list[tuple[str, int, str]]:
    """Rows of a receipt: at least one."""
    starts = range(0, max(len(receipt), 1), CELL_BYTES)
    parts = [receipt[start : start + CELL_BYTES] for start in starts]
    return [(run_id, piece, b64encode(part).decode()) for piece, part in enumerate(parts)]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        with reading():
            yield
    except PolicyError:
        raise damaged() from None


@contextlib.contextmanager
def of_ledger() -> Iterator[None]:
    """Errors of the database name the ledger, not a store."""
    try:
        yield
    except DpstreamError as error:
        if error.field != "state.store":
            raise
        fix = error.fix.replace("state init", "ledger init")
        raised = type(error)("ledger.path", error.rule, fix)
    else:
        return
    raise raised from None
