"""The limit and charges of an account, which the choice between families of noise uses."""

from collections.abc import Sequence

from dpstream.accounting.composition import Limit
from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History


def limit_of(account: History, more: Sequence[Charge] = ()) -> Limit | None:
    """Return the limit of an account, and what its charges cost together; both are public.

    Args:
        more: charges of the account's unit that come before the one that is decided.

    Returns:
        ``None`` without a limit, or if costs cannot be composed (`History.check` then refuses).
    """
    if account.limit is None:
        return None
    try:
        total = account.account.total()
    except PolicyError:
        return None
    for charge in more:
        total = total.plus(charge)
    return Limit(total, *account.limit)
