"""A ledger's rows in memory, as its last known commit left them, and what a transaction adds.

For a ledger whose rows are far away: whoever holds a replica decides by it and reads only what
others have committed since.  Every row goes through here, read or written, so that chain and sums
are those of what was seen.  What was added since the last ``keep`` can be taken back.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.charges import Book, Charge, Entry, chained
from dpstream.state.ledger.contract import Asked
from dpstream.state.ledger.seal import COLUMNS, Sums, damaged, sum_of, without


class AnswerRow(NamedTuple):
    """A request, and its receipt once it was answered; ``number`` counts the requests."""

    run_id: str
    data_set: str
    request: str
    receipt: bytes | None
    digest: str | None
    number: int


class _Known(NamedTuple):
    """A request without its receipt, and what its row adds to the sum."""

    data_set: str
    request: str
    digest: str | None
    number: int
    part: int


class Replica:
    """The rows of a ledger.

    Args:
        data_set: the one whose charges are composed; other rows are checked all the same.

    Attributes:
        book: charges of the data set; digests: of all entries, in order; sums: of every table.
    """

    def __init__(self, data_set: str) -> None:
        self.book, self.digests = Book(), list[str]()
        self.sums: Sums = dict.fromkeys(COLUMNS, 0)
        self._data_set = data_set
        self._by_name = dict[str, str]()
        self._tokens = dict[str, dict[str, str | None]]()
        self._answers = dict[str, _Known]()
        self._alike = dict[str, list[str]]()
        self._undo = list[Callable[[], object]]()

    # --- what is there ---------------------------------------------------------------------------

    def digest_of(self, name: str) -> str | None:
        """Digest of the entry of a charge of the data set."""
        return self._by_name.get(name)

    def tokens(self, run_id: str) -> dict[str, str | None]:
        """A copy of a run's tokens."""
        return dict(self._tokens.get(run_id, {}))

    def answer_row(self, run_id: str) -> tuple[str, str | None, int] | None:
        """(request, digest of its receipt, number) of a run of the data set."""
        known = self._answers.get(run_id)
        if known is None or known.data_set != self._data_set:
            return None
        return known.request, known.digest, known.number

    def alike(self, request: str) -> list[str]:
        """Runs of the data set with a request, in order."""
        return list(self._alike.get(request, ()))

    @property
    def requests(self) -> int:
        """How many requests there are, of all data sets."""
        return len(self._answers)

    def check_answer(self, row: AnswerRow) -> Asked:
        """A row that was read alone.

        Raises:
            PolicyError: it is not the one that was added up.
        """
        known = self._answers.get(row.run_id)
        if known is None or sum_of("choices", [row]) != known.part:
            raise damaged()
        return Asked(row.run_id, row.request, row.receipt, row.digest)

    # --- what comes ------------------------------------------------------------------------------

    def add_entry(self, seq: int, data_set: str, name: str, text: str, digest: str) -> Entry:
        """The next entry of the chain.

        Raises:
            PolicyError: it does not continue the chain, or this program does not know its form.
        """
        last = self.digests[-1] if self.digests else ""
        if seq != len(self.digests) + 1 or digest != chained(last, data_set, text):
            raise PolicyError(
                "ledger.path", "its hash chain is broken", "restore the ledger from a backup"
            )
        charge = Charge.read(text)
        self._add_up("entries", [(seq, data_set, name, text, digest)])
        self.digests.append(digest)
        self._undo.append(self.digests.pop)
        if data_set == self._data_set:
            charges = len(self.book.charges)
            self.book.add(charge)
            self._by_name[name] = digest
            self._undo += [lambda: self.book.cut(charges), lambda: self._by_name.pop(name)]
        return Entry(seq, data_set, charge, digest)

    def put_tokens(self, run_id: str, tokens: dict[str, str | None]) -> None:
        """Make these the tokens of a run."""
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
        """Add a request, or give one its receipt.

        Raises:
            PolicyError: it is another request, or its receipt changes.
        """
        known = self._answers.get(row.run_id)
        new = _Known(row.data_set, row.request, row.digest, row.number, sum_of("choices", [row]))
        if known == new:
            return
        if known is None:
            if row.number != len(self._answers):
                raise damaged()
            self._undo.append(lambda: self._answers.pop(row.run_id))
            if row.data_set == self._data_set:
                self._alike.setdefault(row.request, []).append(row.run_id)
                self._undo.append(self._alike[row.request].pop)
        else:
            if known.digest is not None or new[:2] != known[:2] or new.number != known.number:
                raise damaged()
            self._take_off("choices", [row._replace(receipt=None, digest=None)])
            self._undo.append(lambda: self._answers.__setitem__(row.run_id, known))
        self._add_up("choices", [row])
        self._answers[row.run_id] = new

    def keep(self) -> None:
        """All that came is known."""
        self._undo.clear()

    def take_back(self) -> None:
        """Be as at the last ``keep``."""
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
