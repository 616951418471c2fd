"""The log of an account, and the state that follows from it, for every kind of storage.

**A row is a transaction**: its changes (events of the account, tokens of runs, requests, and their
receipts), as one text.  A process inserts row N only after it has read row N - 1, and each number
can be inserted once.  So the rows that a transaction decided by are still the last ones when it is
written.  No row except row 0 is updated, and none is deleted.

**One chain covers every byte.**  A row's digest covers its bytes and the digest of the row before.
Receipts are blobs, which are stored under their digests; the rows name these digests.
Row 0 has the format, and a copy of the last row's digest, so that a log whose end is lost is
noticed.  Events have a second chain in memory, over their texts alone (`events.chained`): head
files, stores and receipts name its digests, and it does not change when `recovery` appends the same
events in another row.  The chains protect against damage, not against somebody who can write to
the account.

**The state is computed from the rows**: events, tokens and requests after all changes.  A process
that opens an account reads every row and every blob once, and later only the rows that others have
added.  A transaction changes the state immediately, and undoes its changes if it is not written.

**Compression.**  A row is deflated with the texts of the rows before it as dictionary, because
charges of one account are similar; a blob is deflated on its own.
"""

import contextlib
import hashlib
import zlib
from collections import ChainMap
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.state.ledger.events import (
    Charge,
    Created,
    Event,
    Received,
    chained,
    refuse_damage,
    text_of,
)
from dpstream.state.ledger.history import History

#: Content of row 0; a program refuses every other format.
FORMAT = b"dpstream account 2"
#: Number of blobs that are read and checked at once when an account is opened.
_BLOBS_AT_ONCE = 100
#: Bytes of earlier texts that a row is deflated with.
_WINDOW = 1 << 12
#: Of zlib: no header and no sum, since digests cover the bytes.
_BITS = -15


class LedgerMovedError(Exception):
    """Signals that another process changed the account since the transaction began.

    Nothing was written.
    """


class StoredRequest(NamedTuple):
    """A request and the decision on it.

    Attributes:
        receipt: the receipt; ``None`` if the request was not answered.
        digest: binds the receipt to its charge.
    """

    run_id: str
    request: str
    receipt: bytes | None
    digest: str | None


class Line(NamedTuple):
    """A row of the log.

    Attributes:
        number: counted from 1; row 0 is no transaction.
        changes: the deflated texts of the changes.
        digest: covers the changes and the digest of the row before.
    """

    number: int
    changes: bytes
    digest: str


class Storage(Protocol):
    """A place where one account is stored."""

    def reading(self, writes: bool) -> contextlib.AbstractContextManager[None]:
        """Run a block that reads; at its end, commit the row that the block inserted.

        Args:
            writes: whether the block decides by the rows that it reads, and may insert a row.

        Raises:
            LedgerMovedError: the rows that the block decided by were no longer the last ones at its
                end; nothing was written.
        """

    def changed(self) -> bool:
        """Return whether others have written since the last ``rows`` or ``insert``."""

    def rows(self, after: int) -> Sequence[Line]:
        """Return row 0 and the rows after a number, in order, as of one moment."""

    def blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the blobs of some names; a name without a blob is left out."""

    def insert(self, line: Line, blobs: dict[str, bytes]) -> None:
        """Insert a row with new blobs, and write its digest into row 0.

        Raises:
            LedgerMovedError: another process inserted a row of this number; nothing was written.
        """

    def close(self) -> None:
        """Close the storage."""


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """A change that is not an event."""


class TokensChanged(_Change, frozen=True, tag="tokens"):
    """All tokens of a run after this change, each with the token that it replaces."""

    run_id: str
    tokens: dict[str, str | None]


class RequestAdded(_Change, frozen=True, tag="request"):
    """The request of a run that was charged, and the name of an empty blob that the format has.

    ``alike`` are keyed digests of what it shares with other questions (`ask.question.Covering`).
    """

    run_id: str
    request: str
    blob: str
    alike: tuple[str, ...] = ()


class ReceiptAdded(_Change, frozen=True, tag="answer"):
    """The receipt of a request: its blob, and the digest that binds it to the charge."""

    run_id: str
    blob: str
    digest: str


Change = Event | TokensChanged | RequestAdded | ReceiptAdded
_ROW = msgspec.json.Decoder(list[msgspec.Raw])
_CHANGE = msgspec.json.Decoder(Change)


#: A request, and its receipt if it was answered.
_Request = tuple[RequestAdded, ReceiptAdded | None]


class State:
    """The state that follows from the rows that were read, and from the open transaction.

    Attributes:
        number, digest: number and digest of the last row.
        history: the events.
        tokens: the tokens of each run.
        requests: each request and its receipt, by the run that was charged.
        runs: the runs of each request, and of what requests share, in order.
    """

    def __init__(self) -> None:
        self.number, self.digest, self.history = 0, "", History()
        self.tokens = ChainMap[str, dict[str, str | None]]({}, {})
        self.requests = ChainMap[str, _Request]({}, {})
        self.runs = ChainMap[str, list[str]]({}, {})
        self._maps: list[ChainMap[str, Any]] = [self.tokens, self.requests, self.runs]
        self._written, self._window = 0, b""

    def line(self, text: bytes) -> Line:
        """Return the next row, which has the changes of a text."""
        changes = deflated(text, self._window)
        return Line(self.number + 1, changes, _digest(self.digest.encode() + changes))

    def read(self, line: Line) -> None:
        """Add the next row, as it was stored.

        Raises:
            PolicyError: it does not continue the log, or this program cannot read its format.
        """
        number, changes, digest = line
        refuse_damage(number != self.number + 1 or not isinstance(changes, bytes))
        refuse_damage(digest != _digest(self.digest.encode() + changes))
        try:
            text = inflated(changes, self._window)
            for change in _ROW.decode(text):
                self.add(bytes(change).decode())
        except (zlib.error, msgspec.MsgspecError, UnicodeError):
            raise other_format() from None
        self.commit(line, text)

    def add(self, text: str) -> None:
        """Add a change of the open transaction."""
        change = _CHANGE.decode(text)
        match change:
            case TokensChanged(run_id, tokens):
                self.tokens[run_id] = tokens
            case RequestAdded(run_id, request, _, alike):
                self.requests[run_id] = (change, None)
                for name in (request, *alike):
                    self.runs[name] = [*self.runs.get(name, ()), run_id]
            case ReceiptAdded(run_id):
                self.requests[run_id] = (self.requests[run_id][0], change)
            case _:
                if isinstance(change, Charge) and self.history.find(change.name) is not None:
                    raise InvariantError("a name can be charged only once")
                digests = self.history.digests
                self.history.add(change, chained(digests[-1] if digests else "", text))

    def commit(self, line: Line, text: bytes) -> None:
        """Make the changes of the open transaction final: it was written as this row."""
        self.number, self.digest = line.number, line.digest
        self._window = (self._window + text)[-_WINDOW:]
        self._written = len(self.history.digests)
        for each in self._maps:
            each.maps[1].update(each.maps[0])
            each.maps[0].clear()

    def roll_back(self) -> None:
        """Undo the changes of the open transaction."""
        self.history.cut(self._written)
        for each in self._maps:
            each.maps[0].clear()


class Log:
    """An account on a storage; see the module.

    The changes of a ``transaction`` are atomic, isolated in the account, and durable when it ends.
    Bytes that differ from what was written are refused as damaged, never returned.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self._state = storage, State()
        self._is_current = False  # whether the state is that of the rows at the last reading
        self._texts: list[str] | None = None  # changes of the open transaction
        self._new = dict[str, bytes]()  # blobs of the open transaction
        self._holds = False  # whether what is read is of one moment

    def close(self) -> None:
        """Close the storage."""
        self.storage.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run one atomic, durable and isolated change; an error in the block changes nothing.

        Raises:
            LedgerMovedError: another process inserted a row first; only at the end, and only in a
                storage that detects changes of other processes instead of preventing them.
            PolicyError: the account is damaged.
        """
        if self._texts is not None:
            raise InvariantError("only one transaction may be open at a time")
        try:
            with self.storage.reading(writes=True):
                self._refresh()
                self._texts, self._new = [], {}
                yield
                if text := f"[{','.join(self._texts)}]".encode() if self._texts else b"":
                    line = self._state.line(text)
                    self._is_current = False  # if this is interrupted, the row may be there or not
                    self.storage.insert(line, self._new)
            if text:
                self._state.commit(line, text)
                self._is_current = True
        except BaseException:
            self._state.roll_back()
            raise
        finally:
            self._texts, self._new = None, {}

    @contextlib.contextmanager
    def _present(self) -> Iterator[State]:
        """Yield the state of the open transaction, or the last state that was written."""
        if self._texts is not None or self._holds:
            yield self._state
            return
        with self.storage.reading(writes=False):
            self._refresh()
            yield self._state

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        """Let all that a block reads be of one moment; it writes nothing, and is short."""
        with self._present():
            held, self._holds = self._holds, self._texts is None
            try:
                yield
            finally:
                self._holds = held

    def _refresh(self) -> None:
        """Read the rows that others have added; all rows at first, and if old rows changed."""
        if self._is_current and not self.storage.changed():
            return
        self._is_current = False
        rows = self.storage.rows(self._state.number)
        if len(rows) == 1 and rows[0].digest == self._state.digest:
            self._state = State()
            rows = self.storage.rows(0)
        first = not self._state.number
        try:
            refuse_damage(not rows or rows[0].number != 0)
            if rows[0].changes != FORMAT:
                raise other_format()
            for line in rows[1:]:
                self._state.read(line)
            refuse_damage(self._state.digest != rows[0].digest)
            requests = self._state.requests.values() if first else ()
            names = list(dict.fromkeys(part.blob for pair in requests for part in pair if part))
            for start in range(0, len(names), _BLOBS_AT_ONCE):
                self._blobs(names[start : start + _BLOBS_AT_ONCE])
        except BaseException:
            self._state = State()
            raise
        self._is_current = True

    def _write(self, text: str) -> None:
        if self._texts is None:
            raise InvariantError("changes need an open transaction")
        self._state.add(text)
        self._texts.append(text)

    def _change(self, change: Change) -> None:
        self._write(msgspec.json.encode(change).decode())

    def _add_blob(self, content: bytes) -> str:
        """Add a blob to the open transaction; return its name."""
        blob = deflated(content)
        name = _digest(blob)
        self._new[name] = blob
        return name

    def _blobs(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return blobs after a check that each has the digest that is its name."""
        blobs = self.storage.blobs([name for name in names if name not in self._new]) | self._new
        for name in names:
            blob = blobs.get(name)
            refuse_damage(not isinstance(blob, bytes) or _digest(blob) != name)
        return blobs

    def _stored(self, request: RequestAdded, answer: ReceiptAdded | None) -> StoredRequest:
        if answer is None:
            return StoredRequest(request.run_id, request.request, None, None)
        receipt = inflated(self._blobs([answer.blob])[answer.blob])
        return StoredRequest(request.run_id, request.request, receipt, answer.digest)

    # --- reading and adding ----------------------------------------------------------------------

    def history(self) -> History:
        """Return the checked events as of now; the caller must not change them."""
        with self._present() as state:
            return state.history

    def append(self, event: Event) -> None:
        """Add an event to the end of the chain, in a transaction."""
        self._write(text_of(event))

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """Return the tokens of a run, each with the token that it replaces."""
        with self._present() as state:
            return dict(state.tokens.get(run_id, {}))

    def add_token(self, run_id: str, token: str, previous: str | None) -> None:
        """Add a token, in a transaction."""
        self._change(TokensChanged(run_id, {**self.tokens(run_id), token: previous}))

    def drop_token(self, run_id: str, token: str) -> None:
        """Remove an existing token, in a transaction."""
        tokens = self.tokens(run_id)
        del tokens[token]
        self._change(TokensChanged(run_id, tokens))

    def request_of(self, run_id: str) -> StoredRequest | None:
        """Return the request that a run was charged for."""
        with self._present() as state:
            return self._stored(*state.requests[run_id]) if run_id in state.requests else None

    def requests_alike(self, request: str) -> dict[str, bool]:
        """Return the runs of a request, or of what requests share, in the order of their charges,
        and whether each has a receipt; no receipt is read.
        """
        with self._present() as state:
            runs = state.runs.get(request, ())
            return {run: state.requests[run][1] is not None for run in runs}

    def add_request(self, run_id: str, request: str, alike: Sequence[str] = ()) -> None:
        """Add a request without a receipt, in a transaction."""
        self._change(RequestAdded(run_id, request, self._add_blob(b""), tuple(alike)))

    def unanswered(self) -> list[str]:
        """Return the runs whose request has no receipt, including closed ones."""
        with self._present() as state:
            return [run_id for run_id, (_, answer) in state.requests.items() if answer is None]

    def add_receipt(self, run_id: str, receipt: bytes, digest: str) -> None:
        """Store the receipt of a request that has none, and append the receipt's entry, in a
        transaction.
        """
        if run_id not in self._state.requests or self._state.requests[run_id][1] is not None:
            raise InvariantError("a request gets one receipt")
        self._change(ReceiptAdded(run_id, self._add_blob(receipt), digest))
        self.append(Received(run_id, digest))


def first_line(created: Created) -> Line:
    """Return the first row of an account."""
    return State().line(f"[{text_of(created)}]".encode())


def deflated(content: bytes, dictionary: bytes = b"") -> bytes:
    """Return compressed content; ``dictionary``: similar content, which ``inflated`` needs too."""
    deflate = zlib.compressobj(wbits=_BITS, zdict=dictionary)
    return deflate.compress(content) + deflate.flush()


def inflated(blob: bytes, dictionary: bytes = b"") -> bytes:
    """Return the content of deflated bytes."""
    return zlib.decompressobj(wbits=_BITS, zdict=dictionary).decompress(blob)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16, person=b"dpstream-log").hexdigest()


def other_format() -> PolicyError:
    """Return the error for an account of another version of the program."""
    return PolicyError(
        "account.path",
        "was written by another version of dpstream, in a format that this version does not read",
        "use the version that wrote it: a new account would not have the charges that were made",
    )
