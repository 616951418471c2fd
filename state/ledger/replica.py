"""An account's rows in memory, as its last known commit left them, and what a transaction adds.

It is for an account whose rows are far away: a process decides by its replica and reads only what
others have committed since.  Every row that is read or written passes through it, so that chain and
sums cover what was seen.  What was added since the last ``keep`` can be removed again.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.contract import StoredRequest
from dpstream.state.ledger.events import Entry, chained, event_of, name_of
from dpstream.state.ledger.history import History
from dpstream.state.ledger.seal import COLUMNS, Sums, damaged, sum_of, without


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
        history: its events.
        sums: of every table.
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
        if entry is None or sum_of("requests", [row]) != entry.part:
            raise damaged()
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
        if name != name_of(event):
            raise damaged()
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
            if row.number != len(self._answers):
                raise damaged()
            self._undo.append(lambda: self._answers.pop(row.run_id))
            self._alike.setdefault(row.request, []).append(row.run_id)
            self._undo.append(self._alike[row.request].pop)
        else:
            less = _less(row, entry)
            stays = (new.request, new.number) == (entry.request, entry.number)
            if not stays or sum_of("requests", [less]) != entry.part:
                raise damaged()
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
        self._move(table, without(table, rows, self.sums[table]))

    def _move(self, table: str, total: int) -> None:
        old = self.sums[table]
        self.sums[table] = total
        self._undo.append(lambda: self.sums.__setitem__(table, old))


def _less(row: AnswerRow, entry: _RequestRow) -> AnswerRow:
    """Return a row without the blobs that it did not have when it was known."""
    if entry.digest is None:
        return row._replace(receipt=None, digest=None, view=None, view_digest=None)
    if entry.view_digest is None:
        return row._replace(view=None, view_digest=None)
    return row
