"""An account in memory: its events in order, and the state that follows from them.

The limit is a part of the account, and no charge names one: `History.check` reads the present limit
in the transaction that charges.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dpstream.accounting.composition import NAMES
from dpstream.accounting.composition import Limit as Filters
from dpstream.accounting.errors import PolicyError, required
from dpstream.accounting.figures import exact
from dpstream.accounting.limits import MAX_EPSILON
from dpstream.accounting.periods import Spent, Verdict
from dpstream.accounting.plan.unit import cost_to
from dpstream.accounting.strength import MOST_DELTA
from dpstream.state.ledger.events import (
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

#: Refuses a charge because of the charges before it; called in the transaction that charges,
#: perhaps several times.
Accept = Callable[["History"], None]


class _Charged(NamedTuple):
    charge: Charge
    digest: str


class History:
    """The events of one account; see the module.

    Attributes:
        charges: the charges in order; those of a session's table in its present space.
        tables: ids of the tables of the account.
        closed: run ids that a recovery closed, so that they are never answered.
        receipts: digest of the receipt of each answered run.
        digests: digests of all entries, in order.
    """

    def __init__(self) -> None:
        self.charges = list[Charge]()
        self._spent = list[Spent]()
        self.tables, self.closed, self.digests = set[str](), set[str](), list[str]()
        self.receipts = dict[str, str]()
        self._events = list[Event]()
        self._limits = list[Limit | None]()
        self._names = dict[str, _Charged]()
        self._narrower = list[tuple[Widened, list[Charge]]]()

    # --- reading ---------------------------------------------------------------------------------

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

    @property
    def spent(self) -> Spent:
        """What the charges spend of each period of the account's unit.

        Raises:
            PolicyError: each record has its own budget.
        """
        self.persons_limit()
        return self._spent[-1]

    @property
    def filters(self) -> Filters:
        """The present limit with its filters.

        Raises:
            PolicyError: each record has its own budget.
        """
        return Filters(*self.persons_limit(), required(self.created.parts, "a limit has parts"))

    def persons_limit(self) -> Limit:
        """Return the limit of an account whose unit has one.

        Raises:
            PolicyError: each record has its own budget.
        """
        if self.limit is None:
            raise PolicyError(
                "account.limit",
                "does not exist in the account of a table whose records have budgets of their own",
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

    # --- adding ----------------------------------------------------------------------------------

    def add(self, event: Event, digest: str) -> None:
        """Add the next event.

        Raises:
            PolicyError: the event is not allowed at this place.
        """
        refuse_damage(isinstance(event, Created) != (not self._events))
        if isinstance(event, Received):  # first, because accounts have thousands of these
            self.receipts[event.run_id] = event.digest
        elif isinstance(event, Charge):
            self.charges.append(event)
            if self._spent:
                self._spent.append(self.spent.plus(event, takes=event.takes))
            self._names[event.name] = _Charged(event, digest)
        elif isinstance(event, Created | LimitChanged):
            self._limits.append(event.limit)
            if isinstance(event, Created) and event.parts is not None:
                self._spent.append(Spent.nothing(event.unit, event.parts.order))
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
        del self._spent[len(self.charges) + 1 if self._events else 0 :]

    def _count(self, charges: list[Charge]) -> None:
        """Replace the charges by the same charges in another space."""
        self.charges = charges
        for charge in charges:
            self._names[charge.name] = self._names[charge.name]._replace(charge=charge)

    # --- charging --------------------------------------------------------------------------------

    def check(self, charges: Sequence[Charge]) -> list[Charge]:
        """Refuse charges that the account does not allow, for a run or a plan.

        Args:
            charges: new charges, each of which counts for those after it.

        Returns:
            The charges as they are appended.

        Raises:
            PolicyError: no filter accepts one of them, or it protects another unit.
        """
        accepted = list[Charge]()
        spent = None if self.limit is None else self.spent
        for charge in charges:
            self._check_kind(charge)
            if spent is None:
                accepted.append(charge)
                continue
            verdict = spent.verdict(self.filters, charge)
            if not verdict.accepted:
                raise self._refusal(spent, charge, verdict)
            takes = verdict.reason == "first"
            accepted.append(msgspec.structs.replace(charge, takes=takes))
            spent = spent.plus(charge, takes=takes)
        return accepted

    def _refusal(self, spent: Spent, charge: Charge, verdict: Verdict) -> PolicyError:
        epsilon, delta = self.persons_limit()
        if verdict.reason == "taken":
            return PolicyError(
                "account.limit",
                f"is epsilon {exact(epsilon)} at delta {exact(delta)}, and accepts no charge after "
                "the account's first one: only that charge's own guarantee, and no filter, fits it",
                "continue that run on its own store; other data need an account of their own: "
                "`dpstream account create`",
            )
        over = "more than any part of it"
        if math.isfinite(verdict.used):
            over = f"{100 * verdict.used:.4g}% of it ({NAMES[verdict.part]})"
        times = cost_to(self.created.unit, charge).units
        if times > 1:
            over += f", because it counts {times:,} times: the account's unit is "
            over += self.created.unit.description
        number = len(self.charges)
        before = f"with the {number} charge{'s' * (number != 1)} before, " if number else ""
        return PolicyError(
            "account.limit",
            f"is epsilon {exact(epsilon)} at delta {exact(delta)}, and is too small: {before}this "
            f"would spend {over}",
            f"spend less, continue a run on its own store, or {self._raising(spent, charge)}",
        )

    def raising(self, charges: Sequence[Charge]) -> str:
        """Return the last part of a fix: who can raise the limit for charges that are too large,
        and what they type.

        A limit is never raised automatically, because it is the guarantee of all releases together.
        """
        spent = self.spent
        for charge in charges[:-1]:
            spent = spent.plus(charge)
        return self._raising(spent, charges[-1])

    def _raising(self, spent: Spent, charge: Charge) -> str:
        command, limit = "dpstream account limit", spent.raised_limit(self.filters, charge)
        if limit is None or limit[0] > MAX_EPSILON or limit[1] > MOST_DELTA:
            return f"ask the data steward for a larger limit (`{command}`)"
        command += f" {self.created.data_set} --epsilon {exact(limit[0])}"
        return (
            "ask the data steward to raise the limit, which is the guarantee of all charges "
            f"together: `{command} --delta {exact(limit[1])}`"
        )

    def _check_kind(self, charge: Charge) -> None:
        """Refuse a charge of records in an account of persons, and the reverse.

        Raises:
            PolicyError: the charge protects another unit.
        """
        if self.limit is None:
            if charge.kind != "session":
                raise PolicyError(
                    "data_set",
                    "is the account of a table whose records have budgets of their own: they are "
                    "another privacy unit",
                    "give the persons' data an account of its own: `dpstream account create`",
                )
        elif charge.kind == "session":
            raise PolicyError(
                "data_set",
                f"is an account of the privacy unit {self.created.unit.name}, and the records "
                "of a session table have budgets of their own",
                "give the table an account of its own: `dpstream table init`",
            )
