"""Bring an account that was restored from a backup up to what its head file proves.

The head file has a copy of the chain (`state.ledger.head`).  Where the account is a part of it, the
rest is appended as it was, so that the chain is the one that stores of streams have seen.  Where
the account has gone on by itself, all that was spent is appended behind its end: the charges that
it lacks, tables, and what was closed; of limits only one that is not above the account's own.

**Wider tables** (`state.ledger.balances`).  Where both have made the account's table wider, the
account's table of now stays.  A charge of another table counts in it where entries of either chain
embed the one in the other, and a wider table of the head file takes its place where it was made of
it.  Else recovery is refused, and changes nothing: what was spent in dimensions that the account's
table does not have cannot be charged to its points.

Receipts and requests are not in the chain.  So a charge is closed where the account has its request
and no receipt, and where the chain has its receipt and the account no request: its answer may have
been shown, and whoever asks the question again is charged again.  Where somebody without this head
file has got another answer for it meanwhile, two were shown, and it is charged a second time.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import (
    Charge,
    Closed,
    Event,
    LimitChanged,
    Received,
    TableNamed,
    Widened,
)
from dpstream.state.ledger.head import Chain, is_older
from dpstream.state.ledger.history import History


class Recovered(NamedTuple):
    """The result of a recovery.

    Attributes:
        entries: number of entries that were appended from the head file.
        charges: number of charges among these.
        closed: run ids of charges that are never answered now.
    """

    entries: int
    charges: int
    closed: tuple[str, ...]


def recover(ledger: Ledger) -> Recovered:
    """Append what the head file proves and the account lacks, and close charges without a receipt.

    An account that lacks nothing is left as it is.  One without a head file only has its charges
    without a receipt closed.

    Raises:
        PolicyError: account or head file is damaged.
        RunError: one cannot be written.
    """
    head_file = ledger.head_file
    head = None if head_file is None else head_file.head()
    chain = Chain([], [], {}) if head_file is None else head_file.chain()

    def append() -> tuple[Recovered, int]:
        account = ledger.history()
        common = _common(account.digests, chain.digests)
        tokens = [
            run
            for run, history in chain.tokens.items()
            if not (now := ledger.tokens(run)) or is_older(now, history)
        ]
        if head is not None and common == len(chain.digests) and not tokens:
            return Recovered(0, 0, ()), common
        missing = chain.events[common:]
        if common < len(account.digests):
            missing = list(_merged(missing, account, common))
        for event in missing:
            ledger.append(event)
        for run_id in tokens:
            for token in ledger.tokens(run_id):
                ledger.drop_token(run_id, token)
            for token, previous in chain.tokens[run_id][-1].items():
                ledger.add_token(run_id, token, previous)
        unanswered = [*ledger.unanswered(), *_lost_requests(missing, ledger)]
        closed = tuple(run_id for run_id in unanswered if run_id not in account.closed)
        if closed:
            ledger.append(Closed(closed))
        charges = sum(isinstance(event, Charge) for event in missing)
        return Recovered(len(missing), charges, closed), common

    ledger.head_file = None  # which the account need not have yet
    try:
        done, common = ledger.transact(append)
    finally:
        ledger.head_file = head_file
    at = ledger.history().digest_at
    if head is not None and head_file is not None and at(head.seq) != head.digest:
        head_file.advance(lambda: (ledger.history(), {}), common)
    else:
        ledger.keep_head()
    return done


def _lost_requests(missing: Sequence[Event], ledger: Ledger) -> Iterator[str]:
    """Yield the run ids of answered questions whose request went with the answer.

    An allotment has an empty receipt, and is drawn on by its run id as before.
    """
    for event in missing:
        if not isinstance(event, Received) or ledger.request_of(event.run_id) is not None:
            continue
        charge = ledger.history().find(event.run_id)
        if charge is not None and not (charge.regions and charge.regions.allots):
            yield event.run_id


def _answered_twice(events: Sequence[Event], account: History) -> Iterator[Charge]:
    """Yield charges for the second answer of those that have another receipt in the account.

    Their run ids follow from the lost receipts, so that an interrupted recovery can be repeated.
    """
    for event in events:
        if not isinstance(event, Received):
            continue
        charge, digest = account.find(event.run_id), account.receipts.get(event.run_id)
        if charge is None or digest in (None, event.digest):
            continue
        lost = f"{event.run_id} {event.digest}".encode()
        run_id = hashlib.blake2b(lost, digest_size=16, person=b"dpstream-twice").hexdigest()
        if account.find(run_id) is None:
            yield msgspec.structs.replace(charge, run_id=run_id)


def _common(one: list[str], other: list[str]) -> int:
    """Return how many entries two chains share; a digest covers all before it."""
    shorter = range(min(len(one), len(other)))
    return bisect.bisect_left(shorter, True, key=lambda entry: one[entry] != other[entry])


def _merged(missing: Sequence[Event], account: History, common: int) -> Iterator[Event]:
    """Yield what an account lacks that has continued after entry ``common``, as it counts there.

    Raises:
        PolicyError: a charge is of a table that cannot be embedded in the account's.
    """
    own = [event for event in account.events(common) if isinstance(event, Widened)]
    others = [event for event in missing if isinstance(event, Widened)]
    table = own[-1].new if own else None
    for event in (*missing, *_answered_twice(missing, account)):
        if isinstance(event, Widened):
            if table not in (None, event.old):
                continue
            table = event.new
        if not _still_holds(event, account):
            continue
        if isinstance(event, Charge) and table is not None:
            yield _counted(event, table, (*own, *others, *own))
        else:
            yield event


def _counted(charge: Charge, table: str, wider: Sequence[Widened]) -> Charge:
    """Return a charge as it counts in a wider table."""
    for each in wider:
        if charge.plan_hash == each.old != table:
            [charge] = each.charges([charge])
    if charge.plan_hash != table:
        raise PolicyError(
            "account.path",
            "was migrated to other dimensions than its head file, in which more was charged",
            "bring back the newest account of the data set: these charges fit into no other",
        )
    return charge


def _still_holds(event: Event, account: History) -> bool:
    """Return whether an entry must be added to an account that has continued without it."""
    match event:
        case Charge():
            return account.find(event.name) is None
        case LimitChanged():
            now = account.limit
            return now is not None and event.limit[0] <= now[0] and event.limit[1] <= now[1]
        case TableNamed():
            return event.id not in account.tables
        case Closed() | Widened():
            return True
        case Received():  # of a receipt that the account has not
            return False
    raise InvariantError("an account is created once")
