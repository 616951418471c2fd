"""The amounts that the points of a table have spent after some entries of its account.

Every reader computes the same amounts.

A state is a value; ``after`` computes the next one from entries, whoever wrote them.  No entry is
left out: one of another table, kind or form is refused, because a spent budget that is not counted
could be spent again.

**Snapshots** lie beside the table, so that a process need not replay every entry.  A snapshot is a
convenience, never an authority:

* one that is torn, edited or of another form, table or data set is ignored, and all entries are
  replayed from the first;
* a whole one names the entry it was made behind.  The digest of that entry covers all entries
  before it, so a ledger that holds the same digest under the same name is the one that the
  snapshot was made from, and the rest is replayed from there;
* one whose entry the ledger does not hold is ignored too: what proves that entries are gone is
  the account's head file (`state.ledger.head`), as for every other kind of question.

Its file has digests of its own against damage (`state.seals`), not against somebody who can write
to it: like the ledger, it is the operator's.

**Wider spaces** have new dimensions, wider ranges, or finer steps (``widen``).  Charges of the
earlier space are not written again.  One entry describes how the old space lies in
the wider one (`accounting.regions.embedding`), and every later reader of the account sees each
earlier charge in the wider space (`History`).  So nothing of the history is lost: allotments can be
drawn on, quotas and closed ranges hold.  Tables of the old space are refused from then on, also
in a process that has one open: its next question reads the account first.
"""

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.regions.embedding import embedding
from dpstream.accounting.regions.space import Budget, BudgetKind
from dpstream.accounting.regions.spent import Spent, close, restored, untouched
from dpstream.accounting.regions.spent import charge as charged
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, RegionCharge, Widened
from dpstream.state.npz import DAMAGED
from dpstream.state.seals import digest, sealed_text, unsealed_text

#: (kind of budget, analyst).
Owner = tuple[BudgetKind, str]
#: A program ignores what it does not know.
_VERSION = 2


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
    spent: dict[BudgetKind, Spent] = field(default_factory=dict)
    own: dict[Owner, Spent] = field(default_factory=dict)

    @classmethod
    def first(cls, table: SessionTable) -> "Balances":
        """Return the state before the first charge."""
        kinds = [d.kind for d in table.dimensions if isinstance(d, Budget)]
        return cls(table, spent={kind: untouched(table.space, kind, table.cap) for kind in kinds})

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
        state = untouched(self.table.space, kind, self.table.cap)
        for charge in charges:
            state = moved(state, kind, region_of(charge, self.table), who)
        return replace(self, own={**self.own, owner: state})


def moved(
    spent: Spent, kind: BudgetKind, region: RegionCharge, analyst: str | None = None
) -> Spent:
    """Return the spent state of one kind after an entry; with an analyst, of their own charges.

    Raises:
        PolicyError: the entry's boxes or amount do not fit the table.
    """
    closes = region.budget == "closed"
    if not closes and (region.budget != kind or analyst not in (None, region.analyst)):
        return spent
    try:
        return close(spent, region.boxes) if closes else charged(spent, region.boxes, region.amount)
    except UsageError:
        raise _foreign_charge("holds a charge that does not fit the table's space") from None


def region_of(charge: Charge, table: SessionTable) -> RegionCharge:
    """Return the charge of an entry of the table.

    Raises:
        PolicyError: the entry is not of this table.
    """
    if charge.kind != "session" or not isinstance(charge.regions, RegionCharge):
        raise PolicyError(
            "data_set",
            "its runs protect another privacy unit than one record",
            "give the table an account of its own: `dpstream table init`",
        )
    if charge.plan_hash != table.digest:
        raise _foreign_charge("was charged for another table, or for other dimensions of this one")
    return charge.regions


def migrated() -> PolicyError:
    """Return the error for a table whose account continues in a wider space."""
    return PolicyError(
        "data_set",
        "is the account of a table with wider dimensions since `dpstream table init --migrate`",
        "name the table that it was migrated to",
    )


def _foreign_charge(rule: str) -> PolicyError:
    return PolicyError(
        "data_set",
        rule,
        "use the table's dimensions as they were, or embed what was spent in wider ones: "
        "`dpstream table init NEW --migrate OLD`",
    )


_SNAPSHOT, _HEADER = "session snapshot", "header"


class _Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One account; ``analyst`` is ``None`` for that of all; digests are of its two arrays."""

    kind: BudgetKind
    analyst: str | None
    boxes: str
    amounts: str


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a snapshot."""

    data_set: str
    table: str
    entries: int
    name: str
    digest: str
    at: int
    accounts: tuple[_Account, ...]
    version: int = _VERSION


def write_snapshot(path: Path, data_set: str, state: Balances) -> None:
    """Write a snapshot atomically, readable by its owner alone; a failure is ignored.

    Args:
        path: the file, which is replaced.
        state: the state of committed entries.
    """
    arrays, accounts = dict[str, Any](), list[_Account]()
    every = [(kind, None, spent) for kind, spent in state.spent.items()]
    every += [(kind, who, spent) for (kind, who), spent in state.own.items()]  # type: ignore[misc]
    for number, (kind, who, spent) in enumerate(every):
        boxes = np.ascontiguousarray(spent.boxes.transpose(1, 2, 0))
        amounts = np.ascontiguousarray(spent.amounts)
        arrays |= {f"boxes{number}": boxes, f"amounts{number}": amounts}
        accounts.append(_Account(kind, who, _digest(boxes), _digest(amounts)))
    header = _Header(
        data_set,
        state.table.digest,
        state.entries,
        state.name,
        state.digest,
        state.at,
        tuple(accounts),
    )
    text = sealed_text(_SNAPSHOT, msgspec.json.encode(header).decode())
    arrays[_HEADER] = np.frombuffer(text.encode(), np.uint8)
    # Without it everything is replayed.
    with contextlib.suppress(OSError), replacing(path, PRIVATE) as draft, open(draft, "wb") as out:
        np.savez(out, **arrays)


def read_snapshot(path: Path, table: SessionTable, ledger: Ledger) -> Balances | None:
    """Return the state of a snapshot; ``None``: replay from the first entry."""
    state = _read_snapshot(path, table, ledger.data_set)
    if state is None or not state.entries:
        return None
    account, charges = ledger.history(), ledger.history().charges
    held = state.entries <= len(charges) and charges[state.entries - 1].name == state.name
    return state if held and account.digest_of(state.name) == state.digest else None


def _read_snapshot(path: Path, table: SessionTable, data_set: str) -> Balances | None:
    """Return a complete snapshot of this table and data set."""
    try:
        data = io.BytesIO(path.read_bytes())
        with np.load(data, allow_pickle=False) as file:
            text = unsealed_text(_SNAPSHOT, file[_HEADER].tobytes().decode())
            header = msgspec.json.decode(text, type=_Header)
            if (header.data_set, header.table, header.version) != (
                data_set,
                table.digest,
                _VERSION,
            ):
                return None
            state = Balances(table, header.entries, header.name, header.digest, header.at)
            for number, account in enumerate(header.accounts):
                spent = _spent_of(table, account, file[f"boxes{number}"], file[f"amounts{number}"])
                if account.analyst is None:
                    state.spent[account.kind] = spent
                else:
                    state.own[account.kind, account.analyst] = spent
    except (*DAMAGED, AttributeError, ArithmeticError, DpstreamError, msgspec.MsgspecError):
        return None
    return state if state.spent.keys() == Balances.first(table).spent.keys() else None


def _spent_of(table: SessionTable, account: _Account, boxes: Any, amounts: Any) -> Spent:
    if (_digest(boxes), _digest(amounts)) != (account.boxes, account.amounts):
        raise ValueError
    return restored(table.space, account.kind, boxes.transpose(2, 0, 1), amounts, table.cap)


def _digest(array: Any) -> str:
    shape = ",".join(map(str, array.shape))
    return digest(f"{_SNAPSHOT} {array.dtype} {shape}", memoryview(array).cast("B")).hex()


def widened(old: SessionTable, new: SessionTable) -> Widened:
    """Return the entry that embeds a table's space in a wider one.

    Raises:
        UsageError: it has another name, or a space into which the old one does not fit.
    """
    if old.name != new.name:
        raise UsageError("table.name", "is another one", "keep it: charges are of records by name")
    if old.digest == new.digest:
        raise UsageError("dimension", "are the same as before", "name the wider table second")
    return Widened(old.digest, new.digest, embedding(old.space, new.space))


def widen(ledger: Ledger, old: SessionTable, new: SessionTable) -> int | None:
    """Embed all charges of a table's account in a wider space, by one entry.

    Returns:
        The number of charges; ``None`` if it was done before.

    Raises:
        UsageError: the old space does not fit into the new one, or charges have too many boxes
            there.
        PolicyError: the account is of another table.
    """
    event = widened(old, new)

    def append() -> int | None:
        account = ledger.history()
        if account.widened == new.digest:
            return None
        for charge in account.charges:
            region_of(charge, old)
        if account.charges:  # what no reader could take in is refused before it is written
            Balances.first(new).after(event.charges(account.charges), "")
        ledger.append(event)
        return len(account.charges)

    return ledger.transact(append)
