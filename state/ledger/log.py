"""The log of an account, and the state that follows from it, for every kind of storage.

**A row is a transaction**: its changes (events of the account, tokens of runs, requests, and their
receipts), as one text.  Row N is inserted by whoever has read row N - 1, and a
number can be inserted once, so what a transaction decided on still holds when it is written.
Nothing is updated or deleted.

**One chain covers every byte.**  A row's digest covers its bytes and the digest of the row before.
Grants and receipts are blobs that are stored under their digests, which the rows name.  Row
0 has the format, and a copy of the last row's digest: a log whose end is lost does not reach it.
Events have a second chain in memory, over their texts alone (`events.chained`): head files, stores
and receipts name its digests, and it stays the same where `recovery` appends the same events in
another row.  The threat is damage, not somebody who can write to the account.

**The state is a fold**: events, tokens and requests as all rows leave them.  Whoever opens an
account reads every row and every blob once; from then on the rows that others have added since.  A
transaction changes the state as it goes, and takes its changes back if it is not written.

**Compression.**  A row is deflated with the texts of the rows before it as dictionary, because
charges of one account are alike, and a receipt with its grant as dictionary.
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

#: What row 0 has as its changes; a program refuses every other format.
FORMAT = b"dpstream account 2"
#: Blobs that are checked together when an account is opened.
_TOGETHER = 100
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
        grant: what may be read, stored with the charge.
        receipt: the receipt, if it was answered.
        digest: binds the receipt to its charge.
    """

    run_id: str
    request: str
    grant: bytes
    receipt: bytes | None
    digest: str | None


class Line(NamedTuple):
    """A row of the log.

    Attributes:
        number: counted from 1; row 0 is apart.
        changes: the deflated texts.
        digest: covers them and the row before.
    """

    number: int
    changes: bytes
    digest: str


class Storage(Protocol):
    """A place where one account is stored."""

    def reading(self, writes: bool) -> contextlib.AbstractContextManager[None]:
        """Read in the block; at its end commit what was inserted in it.

        Args:
            writes: the block decides by what it reads, and may insert a row.

        Raises:
            LedgerMovedError: it decided by rows that were not the last ones at its end; nothing was
                written.
        """

    def changed(self) -> bool:
        """Return whether others have written since the last ``rows`` or ``insert``."""

    def rows(self, after: int) -> Sequence[Line]:
        """Return row 0, and the rows behind a number in order, as of one moment."""

    def blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the blobs of some names, as far as they are there."""

    def insert(self, line: Line, blobs: dict[str, bytes]) -> None:
        """Insert a row with new blobs, and its digest into row 0.

        Raises:
            LedgerMovedError: another process inserted a row of this number; nothing was written.
        """

    def close(self) -> None:
        """Close the storage."""


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """A change that is no event."""


class TokensChanged(_Change, frozen=True, tag="tokens"):
    """The tokens of a run from here on, each with the one that it is to replace."""

    run_id: str
    tokens: dict[str, str | None]


class RequestAdded(_Change, frozen=True, tag="request"):
    """A request of a run that was charged, and the name of the blob of its grant."""

    run_id: str
    request: str
    blob: str


class ReceiptAdded(_Change, frozen=True, tag="answer"):
    """The receipt of a request: the blob, and what binds it to the charge."""

    run_id: str
    blob: str
    digest: str


Change = Event | TokensChanged | RequestAdded | ReceiptAdded
_ROW = msgspec.json.Decoder(list[msgspec.Raw])
_CHANGE = msgspec.json.Decoder(Change)


#: What was added of a request: itself, its receipt.
_Request = tuple[RequestAdded, *tuple[ReceiptAdded, ...]]


class State:
    """The state that follows from the rows that were read, and from the open transaction.

    Attributes:
        number, digest: of the last row.
        history: the events.
        tokens: of each run.
        requests: what was added of each, by the run that was charged.
        alike: runs with a request, in order.
    """

    def __init__(self) -> None:
        self.number, self.digest, self.history = 0, "", History()
        self.tokens = ChainMap[str, dict[str, str | None]]({}, {})
        self.requests = ChainMap[str, _Request]({}, {})
        self.alike = ChainMap[str, list[str]]({}, {})
        self._maps: list[ChainMap[str, Any]] = [self.tokens, self.requests, self.alike]
        self._written, self._window = 0, b""

    def line(self, text: bytes) -> Line:
        """Return the next row, of the text of its changes."""
        changes = deflated(text, self._window)
        return Line(self.number + 1, changes, _digest(self.digest.encode() + changes))

    def read(self, line: Line) -> None:
        """Add the next row, as it was stored.

        Raises:
            PolicyError: it does not continue the log, or this program does not know its form.
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
        self.keep(line, text)

    def add(self, text: str) -> None:
        """Add a change of the open transaction."""
        change = _CHANGE.decode(text)
        match change:
            case TokensChanged(run_id, tokens):
                self.tokens[run_id] = tokens
            case RequestAdded(run_id, request):
                self.requests[run_id] = (change,)
                self.alike[request] = [*self.alike.get(request, ()), run_id]
            case ReceiptAdded(run_id):
                self.requests[run_id] = (*self.requests[run_id], change)
            case _:
                if isinstance(change, Charge) and self.history.find(change.name) is not None:
                    raise InvariantError("a name is charged once")
                digests = self.history.digests
                self.history.add(change, chained(digests[-1] if digests else "", text))

    def keep(self, line: Line, text: bytes) -> None:
        """Keep all changes: the transaction was written as this row."""
        self.number, self.digest = line.number, line.digest
        self._window = (self._window + text)[-_WINDOW:]
        self._written = len(self.history.digests)
        for each in self._maps:
            each.maps[1].update(each.maps[0])
            each.maps[0].clear()

    def back(self) -> None:
        """Take the changes back that were not kept."""
        self.history.cut(self._written)
        for each in self._maps:
            each.maps[0].clear()


class Log:
    """An account on a storage; see the module.

    What a ``transaction`` changes is atomic, durable when it ends, and isolated in the account.
    Nothing else than what was written is ever returned: the rest is refused as damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self._state = storage, State()
        self._newest = False  # whether the state is that of the rows when they were last read
        self._texts: list[str] | None = None  # of the open transaction
        self._new = dict[str, bytes]()  # its blobs

    def close(self) -> None:
        """Close the storage."""
        self.storage.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run one atomic, durable and isolated change; an error in the block changes nothing.

        Raises:
            LedgerMovedError: at its end, in a storage that detects other processes' changes instead
                of preventing them.
            PolicyError: the account is damaged.
        """
        if self._texts is not None:
            raise InvariantError("one transaction at a time")
        try:
            with self.storage.reading(writes=True):
                self._refresh()
                self._texts, self._new = [], {}
                yield
                if text := f"[{','.join(self._texts)}]".encode() if self._texts else b"":
                    line = self._state.line(text)
                    self._newest = False  # interrupted here, nobody knows what was written
                    self.storage.insert(line, self._new)
            if text:
                self._state.keep(line, text)
                self._newest = True
        except BaseException:
            self._state.back()
            raise
        finally:
            self._texts, self._new = None, {}

    @contextlib.contextmanager
    def _looking(self) -> Iterator[State]:
        """Yield the present state: the open transaction's, or the last one that was written."""
        if self._texts is not None:
            yield self._state
            return
        with self.storage.reading(writes=False):
            self._refresh()
            yield self._state

    def _refresh(self) -> None:
        """Read what others have added; all rows at first, and if others have changed some."""
        if self._newest and not self.storage.changed():
            return
        self._newest = False
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
            names = list(dict.fromkeys(part.blob for parts in requests for part in parts))
            for at in range(0, len(names), _TOGETHER):
                self._blobs(names[at : at + _TOGETHER])
        except BaseException:
            self._state = State()
            raise
        self._newest = True

    def _write(self, text: str) -> None:
        if self._texts is None:
            raise InvariantError("only in a transaction")
        self._state.add(text)
        self._texts.append(text)

    def _change(self, change: Change) -> None:
        self._write(msgspec.json.encode(change).decode())

    def _keep(self, content: bytes, before: bytes = b"") -> str:
        """Keep a blob of the open transaction; return its name."""
        blob = deflated(content, before)
        name = _digest(blob)
        self._new[name] = blob
        return name

    def _blobs(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return blobs, each checked by its name."""
        blobs = self.storage.blobs([name for name in names if name not in self._new]) | self._new
        for name in names:
            blob = blobs.get(name)
            refuse_damage(not isinstance(blob, bytes) or _digest(blob) != name)
        return blobs

    def _contents(self, parts: _Request) -> list[bytes]:
        """Return grant and receipt of a request, as far as they are there."""
        names, contents = [part.blob for part in parts], [b""]
        blobs = self._blobs(names)
        for name in names:
            contents.append(inflated(blobs[name], contents[-1]))
        return contents[1:]

    def _stored(self, parts: _Request) -> StoredRequest:
        request, *answered = parts
        grant, receipt, *_ = [*self._contents(parts), None]
        digest = answered[0].digest if answered else None
        return StoredRequest(request.run_id, request.request, grant or b"", receipt, digest)

    # --- what is there, and what is added ---------------------------------------------------------

    def history(self) -> History:
        """Return the checked events as of now; the caller must not change them."""
        with self._looking() as state:
            return state.history

    def append(self, event: Event) -> None:
        """Add an event to the end of the chain, in a transaction."""
        self._write(text_of(event))

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """Return the tokens of a run, of whatever data set, each with the one it was to replace."""
        with self._looking() as state:
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
        with self._looking() as state:
            parts = state.requests.get(run_id)
            return None if parts is None else self._stored(parts)

    def requests_alike(self, request: str) -> list[StoredRequest]:
        """Return all requests of a fingerprint, in the order of their charges."""
        with self._looking() as state:
            return [self._stored(state.requests[run]) for run in state.alike.get(request, ())]

    def ask(self, run_id: str, request: str, grant: bytes = b"") -> None:
        """Add a request without a receipt, in a transaction."""
        self._change(RequestAdded(run_id, request, self._keep(grant)))

    def unanswered(self) -> list[str]:
        """Return the runs whose request has no receipt, including closed ones."""
        with self._looking() as state:
            return [run_id for run_id, parts in state.requests.items() if len(parts) == 1]

    def answer(self, run_id: str, receipt: bytes, digest: str) -> None:
        """Store the receipt of a request that has none, and append the receipt's entry, in a
        transaction.
        """
        parts = self._state.requests.get(run_id)
        if parts is None or len(parts) != 1:
            raise InvariantError("a request gets one receipt")
        self._change(ReceiptAdded(run_id, self._keep(receipt, self._contents(parts)[-1]), digest))
        self.append(Received(run_id, digest))


def first_line(created: Created) -> Line:
    """Return the first row of an account."""
    return State().line(f"[{text_of(created)}]".encode())


def deflated(content: bytes, dictionary: bytes = b"") -> bytes:
    """Return content in fewer bytes; ``dictionary``: similar content, which a reader needs."""
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
        "use the version that wrote it: a new account would not know what was spent",
    )
