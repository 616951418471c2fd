"""A table's account in a wider space: new dimensions, wider ranges, finer steps.

Charges of the earlier space are not written again.  One entry describes how the old space lies in
the wider one (`accounting.regions.embedding`), and every later reader of the account sees each
earlier charge in the wider space (`History`).  So nothing of the history is lost: allotments can be
drawn on, quotas and closed ranges hold.  Tables of the old space are refused from then on, also
in a process that has one open: its next question reads the account first.
"""

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.embedding import embedding
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.balances import Balances, region_of
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Widened


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
