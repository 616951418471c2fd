"""An account in memory: its events in order, and the state that follows from them.

The limit is a part of the account.  A charge does not name one: `History.check` reads the limit
of the last entry about it, in the transaction that charges.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import exact
from dpstream.accounting.plan.unit import Account, UnitIdentity
from dpstream.state.ledger.events import (
    RECORD,
    Charge,
    Closed,
    Created,
    Entry,
    Event,
    Limit,
    LimitChanged,
    Received,
    TableNamed,
    Widened,
    damaged,
    refuse_damage,
)

#: Refuses a charge by all charges before it; called in the transaction that charges, perhaps
#: several times.
Accept = Callable[["History"], None]


class _Charged(NamedTuple):
    charge: Charge
    digest: str


class History:
    """The events of one account; see the module.

    Attributes:
        charges: in order; those of a session's table in its present space.
        account: what they cost together.
        tables: ids of the tables of the account.
        closed: run ids that are never answered.
        receipts: digest of the receipt of each answered run.
        digests: digests of all entries, in order.
    """

    def __init__(self) -> None:
        self.charges = list[Charge]()
        self.account = Account()
        self.tables, self.closed, self.digests = set[str](), set[str](), list[str]()
        self.receipts = dict[str, str]()
        self._events = list[Event]()
        self._limits = list[Limit | None]()
        self._names = dict[str, _Charged]()
        self._narrower = list[tuple[Widened, list[Charge]]]()

    # --- what it is of ---------------------------------------------------------------------------

    @property
    def created(self) -> Created:
        """The first event.

        Raises:
            PolicyError: there is none.
        """
        if not self._events or not isinstance(self._events[0], Created):
            raise damaged()
        return self._events[0]

    @property
    def limit(self) -> Limit | None:
        """The present limit; ``None``: each record has its own budget."""
        return self._limits[-1] if self._limits else None

    def persons_limit(self) -> Limit:
        """Return the limit of an account whose unit has one.

        Raises:
            PolicyError: each record has its own budget.
        """
        if self.limit is None:
            raise PolicyError(
                "account.limit",
                "is none in the account of a table whose records have budgets of their own",
                "set the records' budgets, or a quota, in the project file",
            )
        return self.limit

    @property
    def widened(self) -> str | None:
        """The digest of the table's model since its space was widened; ``None``: it never was."""
        return self._narrower[-1][0].new if self._narrower else None

    @property
    def entries(self) -> list[Entry]:
        """Return all entries."""
        pairs = enumerate(zip(self._events, self.digests, strict=True), 1)
        return [Entry(seq, event, digest) for seq, (event, digest) in pairs]

    def events(self, after: int) -> list[Event]:
        """Return the events after a number of them."""
        return self._events[after:]

    def find(self, name: str) -> Charge | None:
        """Return the charge of a name; ``None`` if there is none."""
        charged = self._names.get(name)
        return None if charged is None else charged.charge

    def digest_at(self, seq: int) -> str | None:
        """Return the digest of the entry with a number."""
        return self.digests[seq - 1] if 0 < seq <= len(self.digests) else None

    def digest_of(self, name: str) -> str | None:
        """Return the digest of the entry of a charge, by the charge's name."""
        charged = self._names.get(name)
        return None if charged is None else charged.digest

    # --- what comes ------------------------------------------------------------------------------

    def add(self, event: Event, digest: str) -> None:
        """Add the next event.

        Raises:
            PolicyError: the event is not allowed at this place.
        """
        refuse_damage(isinstance(event, Created) != (not self._events))
        if isinstance(event, Received):  # first what accounts have thousands of
            self.receipts[event.run_id] = event.digest
        elif isinstance(event, Charge):
            self.charges.append(event)
            self.account.add(event)
            self._names[event.name] = _Charged(event, digest)
        elif isinstance(event, Created | LimitChanged):
            self._limits.append(event.limit)
        elif isinstance(event, Closed):
            self.closed.update(event.run_ids)
        elif isinstance(event, TableNamed):
            self.tables.add(event.id)
        elif isinstance(event, Widened):
            self._narrower.append((event, self.charges))
            self._count(event.charges(self.charges))
        self._events.append(event)
        self.digests.append(digest)

    def cut(self, entries: int) -> None:
        """Remove all events except the first ``entries``."""
        for event in reversed(self._events[entries:]):
            if isinstance(event, Created | LimitChanged):
                self._limits.pop()
            elif isinstance(event, Charge):
                self.charges.pop()
                del self._names[event.name]
            elif isinstance(event, Closed):
                self.closed.difference_update(event.run_ids)
            elif isinstance(event, TableNamed):
                self.tables.discard(event.id)
            elif isinstance(event, Widened):
                self._count(self._narrower.pop()[1])
            else:
                del self.receipts[event.run_id]
        del self._events[entries:], self.digests[entries:]
        self.account.cut(len(self.charges))

    def _count(self, charges: list[Charge]) -> None:
        """Replace the charges by the same charges in another space."""
        self.charges = charges
        for charge in charges:
            self._names[charge.name] = self._names[charge.name]._replace(charge=charge)

    # --- what may be charged ---------------------------------------------------------------------

    def check(self, more: Sequence[Charge]) -> None:
        """Refuse charges that the account does not allow, for a run or a plan.

        Raises:
            PolicyError: they would exceed the limit, or protect another unit.
        """
        for charge in more:
            self.check_unit(charge)
        if self.limit is not None and not self.within(more):
            (epsilon, delta), number = self.limit, len(self.charges)
            short, cost = self.account.shortage(more, delta)
            raise PolicyError(
                "account.limit",
                f"is epsilon {exact(epsilon)} at delta {exact(delta)}, and its {short} is too "
                f"small: with the {number} charge{'s' * (number != 1)} before, this would spend "
                f"{cost}",
                f"spend less, continue a run on its own store, or {self.raising(more)}",
            )

    def raising(self, more: Sequence[Charge]) -> str:
        """Return the last part of a fix: who can raise the limit, and what they type.

        A limit is never raised unasked: it is what all releases together promise.
        """
        command, needed = "dpstream account limit", None
        if self.limit is not None:
            needed = self.account.limit_for(more, *self.limit)
        if needed is None:
            return f"ask the data steward for a larger limit (`{command}`)"
        command += f" {self.created.data_set} --epsilon {exact(needed[0])}"
        return (
            "ask the data steward to raise the limit, which is all that the charges together "
            f"promise: `{command} --delta {exact(needed[1])}`"
        )

    def within(self, more: Sequence[Charge]) -> bool:
        """Return whether all charges and some more together are within the limit.

        Raises:
            PolicyError: their costs cannot be composed.
        """
        # A run per user is no mu-GDP run per (user, period): refused, or counted as several.
        return self.limit is None or self.account.within(more, *self.limit)

    def check_unit(self, charge: Charge) -> None:
        """Refuse a charge for another unit than the account's.

        Raises:
            PolicyError: the charge protects another unit.
        """
        own = self.created
        if own.unit == RECORD and own.limit is None:
            if charge.kind != "session":
                raise PolicyError(
                    "data_set",
                    "is the account of a table whose records have budgets of their own: they are "
                    "another privacy unit",
                    "give the persons' data an account of its own: `dpstream account create`",
                )
            return
        if charge.kind == "session":
            raise PolicyError(
                "data_set",
                f"is an account of the privacy unit {own.unit}, and the records of a session table "
                "have budgets of their own",
                "give the table an account of its own: `dpstream session init`",
            )
        unit = UnitIdentity.read(charge.identity)
        if (unit.name, unit.type) != (own.unit, own.type):
            raise PolicyError(
                "unit.name",
                f"protects another privacy unit than the account, whose unit is {own.unit} "
                f"({own.type})",
                "name that unit's column; if it has another name here, rename it, or write "
                'unit_column = "COLUMN" in a table of a data set whose unit.name is the '
                "account's unit",
            )
