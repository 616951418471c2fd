"""Allotments: budget that points paid at once, of which questions are answered until it is used up.

Every point of an allotment's boxes pays its whole amount, as for a question; the entry says that it
is one, and is answered never itself.  A draw is an entry of its own behind it, which charges no
point: it names the allotment, the amount that it uses, and the boxes that it may read, inside of
those that the allotment may read.  No draw is made on a question: that would be its amount twice.

**Why draws cost nothing more.**  A draw of amount a is a-DP (a-zCDP) in the records that it reads,
and reads only records at points that paid the allotment.  Draws are decided in the transaction
that appends them, on all entries before, and refused where their amounts would add up to more
than the allotment's A.  So a record pays at most A for all draws together, adaptive ones too, and A
is what its point was charged.  What is not drawn stays spent.

**Killed at any moment.**  A draw's entry is durable before a record is read, like any charge.
"""

from collections.abc import Iterable

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.figures import down
from dpstream.accounting.regions.amounts import MICRO, MOST
from dpstream.accounting.regions.boxes import cut, overlapped, points, taken
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.balances import Balances, region_of
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.region_charge import RegionCharge


def allotted(
    charges: Iterable[Charge], table: SessionTable, run_id: str
) -> tuple[RegionCharge, int]:
    """Return an allotment, and how many of its millionths are used.

    Raises:
        PolicyError: there is no allotment of that run id.
    """
    allotment, used = None, 0
    for charge in charges:
        region = region_of(charge, table)
        if charge.run_id == run_id and region.allots:
            allotment = region
        elif region.draws_on == run_id:
            used += region.amount
    if allotment is None:
        raise PolicyError("allotment", "is not in the account", "name the run id of an allotment")
    return allotment, used


def check_draw(
    state: Balances, allotment: RegionCharge, used: int, wanted: tuple[str, int], read: Int64
) -> None:
    """Refuse a draw that the allotment does not cover.

    Args:
        state: the state after all earlier entries.
        wanted: kind of budget and millionths.
        read: (m, d, 2) disjoint boxes that it would read.

    Raises:
        PolicyError: the allotment is of another kind or has too little left, or a range was
            closed meanwhile.
        UsageError: the draw reads nothing, or boxes outside the allotment.
    """
    kind, amount = wanted
    if kind != allotment.budget:
        raise PolicyError(
            "allotment", f"was paid with {allotment.budget}", "draw with the same kind of budget"
        )
    left = allotment.amount - used
    if amount > left:
        raise PolicyError(
            "allotment", f"has {down(left / MICRO, 10)} left", "ask for less, or make another one"
        )
    if not len(read):
        raise UsageError("where", "is true nowhere in the allotment", "ask a part of it")
    inside = [
        cut(taken(read, at), box) for box in allotment.read if len(at := overlapped(read, box))
    ]
    if sum(points(part) for part in inside) != points(read):
        raise UsageError("where", "reaches out of the allotment", "ask a part of it")
    if state.spent[allotment.budget].most_over(read) >= MOST:
        raise PolicyError(
            "where", "reaches into a range that was closed for ever", "ask a range that is open"
        )
