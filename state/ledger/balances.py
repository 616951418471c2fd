"""What a table's points have spent after some of its account's entries: the same for every reader.

A state is a value; ``after`` computes the next one from entries, whoever wrote them.  No entry is
left out: one of another table, kind or form is refused, because a spent budget that is not counted
could be spent again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.charging import charge as charged
from dpstream.accounting.regions.charging import close
from dpstream.accounting.regions.space import Budget
from dpstream.accounting.regions.spent import Spent, untouched
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.region_charge import RegionCharge

#: (kind of budget, analyst).
Owner = tuple[str, str]


@dataclass(frozen=True)
class Balances:
    """A state of the account.

    Attributes:
        table: the table.
        entries: number of the table's entries in the state.
        name, digest: of the last of them, as the account has them; empty without any.
        at: its instant, microseconds.
        spent: by kind of budget.
        own: by kind and analyst, only of the analysts that were asked for.
    """

    table: SessionTable
    entries: int = 0
    name: str = ""
    digest: str = ""
    at: int = 0
    spent: dict[str, Spent] = field(default_factory=dict)
    own: dict[Owner, Spent] = field(default_factory=dict)

    @classmethod
    def first(cls, table: SessionTable) -> "Balances":
        """Return the state before the first charge."""
        kinds = [d.kind for d in table.dimensions if isinstance(d, Budget)]
        return cls(table, spent={kind: _untouched(table, kind) for kind in kinds})

    def after(self, charges: Sequence[Charge], digest: str) -> "Balances":
        """Return the state after more entries.

        Args:
            digest: of the last entry.

        Raises:
            PolicyError: an entry is of another table, or has a form that this program does not
            know.
        """
        spent, own, at = dict(self.spent), dict(self.own), self.at
        for charge in charges:
            region = region_of(charge, self.table)
            spent = {kind: moved(state, kind, region) for kind, state in spent.items()}
            own = {
                (kind, who): moved(state, kind, region, who) for (kind, who), state in own.items()
            }
            at = max(at, region.at)
        entries, name = self.entries + len(charges), charges[-1].name
        return replace(self, entries=entries, name=name, digest=digest, at=at, spent=spent, own=own)

    def with_own(self, owner: Owner, charges: Iterable[Charge]) -> "Balances":
        """Return the state with an analyst's own charges too, computed from all entries."""
        kind, who = owner
        state = _untouched(self.table, kind)
        for charge in charges:
            state = moved(state, kind, region_of(charge, self.table), who)
        return replace(self, own={**self.own, owner: state})


def moved(spent: Spent, kind: str, region: RegionCharge, analyst: str | None = None) -> Spent:
    """Return what was spent of one kind after an entry; with an analyst, by their own charges.

    Raises:
        PolicyError: the entry's boxes or amount do not fit the table.
    """
    closes = region.budget == "closed"
    if not closes and (region.budget != kind or analyst not in (None, region.analyst)):
        return spent
    try:
        return close(spent, region.boxes) if closes else charged(spent, region.boxes, region.amount)
    except UsageError:
        raise _foreign("holds a charge that does not fit the table's space") from None


def region_of(charge: Charge, table: SessionTable) -> RegionCharge:
    """Return what an entry of the table charges.

    Raises:
        PolicyError: the entry is not of this table.
    """
    if charge.kind != "session" or not isinstance(charge.regions, RegionCharge):
        raise PolicyError(
            "data_set",
            "its runs protect another privacy unit than one record",
            "give the table an account of its own: `dpstream session init`",
        )
    if charge.plan_hash != table.digest:
        raise _foreign("was charged for another table, or for other dimensions of this one")
    return charge.regions


def migrated() -> PolicyError:
    """Return the error for a table whose account continues in a wider space."""
    return PolicyError(
        "data_set",
        "is the account of a table with wider dimensions since `dpstream session migrate`",
        "name the table that it was migrated to",
    )


def _foreign(rule: str) -> PolicyError:
    return PolicyError(
        "data_set",
        rule,
        "use the table's dimensions as they were, or embed what was spent in wider ones: "
        "`dpstream session migrate OLD NEW`",
    )


def _untouched(table: SessionTable, kind: str) -> Spent:
    return untouched(table.space, "epsilon" if kind == "epsilon" else "rho", table.cap)
