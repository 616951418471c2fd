"""Where an execution is charged and its receipt committed: in the ledger, or beside its output.

In the ledger the run id is committed with the charge, and the receipt with the entry.  Without one,
which is for data that no ledger is kept of, the draft is what is kept: its ``run.json`` names the
run before the first draw, its manifest is the receipt.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.jobs.tables import LedgerConfig
from dpstream.pipelines.tabulation.draft import Begun, Draft, Manifest, decoded, of_run
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.contract import Limit
from dpstream.state.ledger.open import open_ledger

#: A charge of a run id.
Charged = Callable[[str], Charge]


class Book(Protocol):
    """What an execution needs of either."""

    def known(self, request: str) -> tuple[str, Manifest | None] | None:
        """Run id and receipt of a request, ``None``: nobody has asked it."""
        ...

    def begin(self, request: str, run_id: str, fresh: bool) -> tuple[str, bool]:
        """Charge a request, unless it was: the run id to go on with, and whether it is new."""
        ...

    def commit(self, run_id: str, receipt: bytes) -> None:
        """Commit a receipt; the first one stays."""
        ...


class InLedger:
    """In the ledger of the data set."""

    def __init__(self, register: Register, charge: Charged, limit: Limit) -> None:
        self._register, self._charge, self._limit = register, charge, limit

    def known(self, request: str) -> tuple[str, Manifest | None] | None:
        """As `Book` says."""
        run_id = self._register.find(request)
        if run_id is None:
            return None
        answer = self._register.read(run_id)
        return run_id, None if answer is None else decoded(answer.receipt)

    def begin(self, request: str, run_id: str, fresh: bool) -> tuple[str, bool]:
        """As `Book` says."""
        return self._register.begin(self._charge(run_id), request, self._limit, fresh)

    def commit(self, run_id: str, receipt: bytes) -> None:
        """As `Book` says."""
        self._register.commit(run_id, receipt)


class InDraft:
    """Beside the output, without a ledger."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def known(self, request: str) -> tuple[str, Manifest | None] | None:
        """As `Book` says."""
        manifest, begun = self._draft.manifest, self._draft.begun
        if manifest is not None and manifest.answers(request):
            return manifest.run_id, manifest
        if begun is not None and begun.answers(request):
            return begun.run_id, None
        return None

    def begin(self, request: str, run_id: str, fresh: bool) -> tuple[str, bool]:
        """As `Book` says: what is not charged is new if its run id is."""
        found = self.known(request)
        if found is not None and not (fresh and found[1] is not None):
            return found[0], False
        self._draft.begin(Begun(run_id, of_run(request, run_id)))
        return run_id, True

    def commit(self, run_id: str, receipt: bytes) -> None:
        """As `Book` says: `Draft.publish` writes it."""


@contextlib.contextmanager
def opened(place: LedgerConfig | None, draft: Draft, charge: Charged) -> Iterator[Book]:
    """The book of an execution.

    Raises:
        PolicyError: the ledger is damaged or another program's.
    """
    if place is None:
        yield InDraft(draft)
        return
    with contextlib.closing(open_ledger(place.path, place.data_set)) as ledger:
        yield InLedger(Register(ledger, "table"), charge, place.limit.pair)


def of_another_input() -> PolicyError:
    """What is raised where a draft is of other input."""
    return PolicyError(
        "OUT",
        "was begun with other input, parameters or key, and that execution was cut off",
        "put back what it was begun with, which costs nothing more; or --fresh: a new charge",
    )
