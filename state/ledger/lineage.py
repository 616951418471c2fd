"""A random token that tells which copy of a store may continue; each begin renews it in the ledger.

A store's token names its present; the ledger keeps, for each run, the tokens it would accept,
each with the token it was to replace.  To begin on a store:

1. *announce* (ledger transaction): read the store's token ``old``; refuse unless it is accepted;
   charge the run unless it was; add a new random token ``new`` that is to replace ``old``.
2. *swap* (store): replace ``old`` by ``new`` if it is still there; otherwise start again at 1.
3. *settle* (ledger transaction): read the store's token again; refuse unless it is accepted.

Steps 1 and 3 drop every token but the one they read and those announced to replace it.  Nothing
is drawn before 3 is done.  Tokens are never used twice, so a token that is neither the store's
nor announced to replace the store's can never become it, and dropping it harms no starter.

Why the genuine store is accepted at every crash point.  Before 1 and after 3 nothing is under
way.  Between 1 and 2 it holds ``old``, which 1 kept.  Between 2 and 3 it holds ``new``, which 1
announced; others that began meanwhile read ``old`` before the swap, or ``new`` after it, and
keep ``new`` in both cases.  Starters that share the store serialise at the swap: who loses it
reads the winner's token, which is accepted, and replaces it in turn.

Why nobody else is, once a begin has settled with token ``c``.  What the ledger accepts is then
``c`` and tokens announced to replace ``c``; only a store that held ``c`` can get one of these, and
``c`` came into being in the swap.  So a copy taken before the swap, whatever it holds, is
refused at 1, or at 3 if it had passed 1 before (of two copies that begin at once, one settles).
A copy that is taken later holds ``c`` too: of the two, the first to begin again is the run from
then on and the other is refused.  A run renews its token once more when it ends (``leave``), so
this concerns only copies of a run that has not ended.

The tokens are kept by run id alone: a copy is recognised under another data set's name, and a
restored store, of whatever epoch, replaces the whole set (``RESTORE``).
"""

import secrets
from collections.abc import Callable

import msgspec

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, Head
from dpstream.state.ledger.history import Accept
from dpstream.state.retention_store import ANEW, BEGIN, REPLAY, RESTORE
from dpstream.state.store import Store

#: Note of a store: the end of the ledger as this store last saw it.
LEDGER = "ledger"
#: Starters of one store that overtake each other this often do not end by themselves.
_ATTEMPTS = 50


def restored(store: Store, caught_up: bool) -> None:
    """Record that a restored store has begun: from here on its token decides.

    Once it has committed all that its sink has, it is a store like any other.
    """
    _set_metadata(store, RESTORE, lambda _: None if caught_up else REPLAY)


def enter(ledger: Ledger, store: Store, charge: Charge, accept: Accept | None = None) -> bool:
    """Charge the run and make this store the one that continues it; before any draw.

    Args:
        ledger: the data set's account.
        store: the run's store.
        charge: what the run spends.
        accept: called in the transaction, before a new charge.

    Returns:
        Whether the run was charged now (False: it was before).

    Raises:
        PolicyError: the charge exceeds the limit; the account is older or was replaced; or the
            store is older or a copy.
    """

    def pay() -> bool:
        fresh = ledger.charge_within(charge, accept)
        promised, epoch = _promised(charge.run_id), str(charge.epoch)
        if epoch in ledger.tokens(promised):
            ledger.drop_token(promised, epoch)
        return fresh

    return _renew(ledger, store, charge.run_id, pay)


def promise(ledger: Ledger, charge: Charge) -> None:
    """Charge a further epoch of a run before its store exists.

    Until the first begin the epoch counts as not begun: an attempt that was interrupted is repeated
    without another charge.

    Raises:
        PolicyError: the charge exceeds the limit.
    """

    def pay() -> None:
        if ledger.charge_within(charge):
            ledger.add_token(_promised(charge.run_id), str(charge.epoch), None)

    ledger.transact(pay, [_promised(charge.run_id)])


def begun_epoch(ledger: Ledger, run_id: str) -> int:
    """Return the last epoch of a run that was charged and may have drawn; -1: none."""

    def begun() -> set[int]:
        promised = {int(epoch) for epoch in ledger.tokens(_promised(run_id))}
        return {e.epoch for e in ledger.entries() if e.run_id == run_id} - promised

    return max(ledger.transact(begun), default=-1)


def _promised(run_id: str) -> str:
    return f"{run_id}/promised"


def leave(ledger: Ledger, store: Store) -> None:
    """Renew the token of a run that has ended, so that copies taken while it ran are refused.

    Raises:
        PolicyError: another copy of the store has continued meanwhile.
    """
    _renew(ledger, store, store.identity.run_id, lambda: False)


def remembered(store: Store) -> Head | None:
    """Return the end of the account as the store last saw it; ``None`` if it was never charged."""
    return head_of(store.metadata(LEDGER))


def head_of(text: str | None) -> Head | None:
    """Decode the note ``LEDGER`` of a store."""
    return None if text is None else msgspec.json.decode(text, type=Head)


def _renew(ledger: Ledger, store: Store, run_id: str, pay: Callable[[], bool]) -> bool:
    """Do the three steps; return whether ``pay`` has charged in any attempt.

    ``pay`` is called in the first step, once the store is accepted, and returns whether it has
    charged.
    """
    restored, paid = store.metadata(RESTORE) in (BEGIN, ANEW), False
    runs = (run_id, _promised(run_id))
    for _ in range(_ATTEMPTS):
        seen, new = remembered(store), secrets.token_hex(16)

        def announce(seen: Head | None = seen, new: str = new) -> tuple[str, bool, Head]:
            if seen is not None:
                ledger.refuse_older(seen)
            old = store.token()  # read once: another starter may replace it at any time
            if ledger.head_file is not None:
                ledger.head_file.check_tokens(run_id, ledger.tokens(run_id))
            _accept(ledger, run_id, old, restored)
            fresh = pay()
            _announce(ledger, run_id, old, new)
            return old, fresh, ledger.head()

        old, fresh, head = ledger.transact(announce, runs)
        paid |= fresh
        _remember(store, head)
        if store.renew_token(old, new):
            break
    else:
        raise RunError("store", "too many processes begin on it at once", "begin one by one")
    ledger.transact(lambda: _accept(ledger, run_id, store.token(), False), [run_id])
    return paid


def _accept(ledger: Ledger, run_id: str, token: str, restored: bool) -> None:
    """Keep this token and those that are to replace it; refuse one that the account lacks.

    A run without any known token begins for the first time; a restored store starts the set anew.
    """
    tokens = ledger.tokens(run_id)
    if tokens and token not in tokens and not restored:
        raise PolicyError(
            "store",
            "is an older or forked copy: another copy of this run's store has gone on since",
            "go on with the newest store and the newest account, or restore this store with "
            "`dpstream state restore`",
        )
    for other, previous in tokens.items():
        if token not in (other, previous):
            ledger.drop_token(run_id, other)
    if token not in tokens:
        ledger.add_token(run_id, token, None)


def _announce(ledger: Ledger, run_id: str, old: str, new: str) -> None:
    ledger.add_token(run_id, new, old)


def _remember(store: Store, head: Head) -> None:
    """Note in the store that it has seen the account up to here; a note of a later end stays."""

    def later(text: str | None) -> str:
        stored_head = head_of(text)
        newest = head if stored_head is None or stored_head.seq < head.seq else stored_head
        return msgspec.json.encode(newest).decode()

    _set_metadata(store, LEDGER, later)


def _set_metadata(store: Store, name: str, change: Callable[[str | None], str | None]) -> None:
    while True:
        old = store.metadata(name)
        new = change(old)
        if old == new or store.swap_metadata(name, old, new):
            return
