"""What a table's points have spent after some of its ledger's entries: the same for every reader.

A state is a value; ``after`` makes the next one of an entry, whoever wrote it.  No entry is left
out: one of another table, kind or form is refused, because budget that was spent and is not
counted is budget given back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.charging import charge as charged
from dpstream.accounting.regions.closing import close
from dpstream.accounting.regions.dimensions import Budget
from dpstream.accounting.regions.spent import Spent, untouched
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.region_charge import RegionCharge

#: (kind of budget, analyst).
Owner = tuple[str, str]


@dataclass(frozen=True)
class Balances:
    """A state.

    Attributes:
        table: of which table; entries: how many of its entries it holds.
        name, digest: of the last of them, as the ledger has them; empty without any.
        at: its instant, microseconds.
        spent: by kind of budget; own: by kind and analyst, only of those that were asked for.
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
        """Nothing charged yet."""
        kinds = [d.kind for d in table.dimensions if isinstance(d, Budget)]
        return cls(table, spent={kind: _untouched(table, kind) for kind in kinds})

    def after(self, charges: Sequence[Charge], digest: str) -> "Balances":
        """The state after more entries, the last of a digest.

        Raises:
            PolicyError: one is not of this table, or of no form that this program knows.
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
        """The state with an analyst's account too, of all its entries, which are given."""
        kind, who = owner
        state = _untouched(self.table, kind)
        for charge in charges:
            state = moved(state, kind, region_of(charge, self.table), who)
        return replace(self, own={**self.own, owner: state})


def moved(spent: Spent, kind: str, region: RegionCharge, analyst: str | None = None) -> Spent:
    """One kind's account after an entry; with an analyst, that of their own charges.

    Raises:
        PolicyError: the entry's boxes or amount are none of the table's.
    """
    closes = region.budget == "closed"
    if not closes and (region.budget != kind or analyst not in (None, region.analyst)):
        return spent
    try:
        return close(spent, region.boxes) if closes else charged(spent, region.boxes, region.amount)
    except UsageError:
        raise _foreign("holds a charge that does not fit the table's space") from None


def region_of(charge: Charge, table: SessionTable) -> RegionCharge:
    """What an entry of the table charges.

    Raises:
        PolicyError: it is none of this table.
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
    """A table whose account goes on in a wider space."""
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
