"""A table's account in a wider space: new dimensions, wider ranges, finer steps.

Charges of the space before are not written again.  One entry says how the old space lies in the
wider one (`accounting.regions.embedding`), and whoever reads the account from then on sees every
charge before it in the wider space (`Book`).  So nothing of the history is lost: allotments are
drawn on, quotas and closed ranges hold.  Tables of the old space are refused from then on, also
by a process that holds one open: its next question looks at the account first.
"""

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.embedding import embedding
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.balances import Balances, region_of
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Widened


def widened(old: SessionTable, new: SessionTable) -> Widened:
    """The entry that embeds a table's space in a wider one.

    Raises:
        UsageError: it has another name, or a space in which the old one has no place.
    """
    if old.name != new.name:
        raise UsageError("table.name", "is another one", "keep it: charges are of records by name")
    if old.digest == new.digest:
        raise UsageError("dimension", "are the same as before", "name the wider table second")
    return Widened(old.digest, new.digest, embedding(old.space, new.space))


def widen(ledger: Ledger, old: SessionTable, new: SessionTable) -> int | None:
    """Embed all charges of a table's account in a wider space, by one entry.

    Returns:
        How many charges there are, ``None`` if it was done before.

    Raises:
        UsageError: the old space has no place in the new one, or charges have too many boxes there.
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
