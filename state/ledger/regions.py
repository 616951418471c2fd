"""The budgets of a table's points, in the account of the table's data set.

A query is decided and charged in ONE transaction of the account (`state.ledger.contract`), durable
before a row of data is read; `pipelines.ask.sequence` describes the order of all steps.

**No budget is spent twice.**  In the transaction the account first reads every entry that others
have committed, then resolves what the query asks (predicates may depend on what points have spent),
decides it, and appends the charge.  The storage excludes others until then (SQLite), or reports at
the end that they came in between, and everything is repeated (Spanner).  So each charge is decided
on the state that all entries before it made, as if the queries came one after the other; then the
induction of mechanism.md section 14 holds: no point pays more than its initial budget, whatever
records there are.

**Killed at any moment.**  Before the transaction's end nothing was charged and nothing was read;
after it the entry is there, with the boxes that may be read, and the same request continues under
its run id, with its boxes and its noise, at no charge.  What was charged and never answered stays
spent.  A state in memory has committed entries alone.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.accounting.figures import down
from dpstream.accounting.regions.amounts import CLOSED, MICRO, check_amount
from dpstream.accounting.regions.boxes import checked, cut, overlapped, points, taken
from dpstream.accounting.regions.space import BudgetKind
from dpstream.accounting.regions.spent import Spent, closable
from dpstream.accounting.sessions.table import Rules, SessionTable
from dpstream.state.ledger.balances import (
    Balances,
    migrated,
    read_snapshot,
    region_of,
    write_snapshot,
)
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, RegionCharge, RegionKind, new_run_id, now_micros
from dpstream.state.ledger.history import History
from dpstream.state.ledger.orders import (
    Order,
    Planned,
    Views,
    check_analyst,
    planned,
    refusal_of,
)

# Allotments: budget that points paid at once, of which questions are answered until it is used up.
#
# Every point of an allotment's boxes pays its whole amount, as for a question; the entry says that
# it is one, and is answered never itself.  A draw is an entry of its own behind it, which charges
# no point: it names the allotment, the amount that it uses, and the boxes that it may read, inside
# of those that the allotment may read.  No draw is made on a question: that would be its amount
# twice.
#
# **Why draws cost nothing more.**  A draw of amount a is a-DP (a-zCDP) in the records that it
# reads, and reads only records at points that paid the allotment.  Draws are decided in the
# transaction that appends them, on all entries before, and refused where their amounts would add
# up to more than the allotment's A.  So a record pays at most A for all draws together, adaptive
# ones too, and A is what its point was charged.  What is not drawn stays spent.
#
# **Killed at any moment.**  A draw's entry is durable before a record is read, like any charge.


def allotted(
    charges: Iterable[Charge], table: SessionTable, run_id: str
) -> tuple[RegionCharge, int]:
    """Return an allotment, and how many of its millionths are used.

    Raises:
        PolicyError: there is none of that run id.
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
    state: Balances,
    allotment: RegionCharge,
    used: int,
    wanted: tuple[BudgetKind, int],
    read: Int64,
) -> None:
    """Refuse a draw that the allotment does not cover.

    Args:
        state: of all entries before; wanted: kind and millionths; read: (m, d, 2) disjoint boxes
            that it would read.

    Raises:
        PolicyError: it is of another kind, too little is left, or a range was closed meanwhile.
        UsageError: it reads nothing, or beside the allotment.
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
    if state.spent[kind].most_over(read) >= CLOSED:
        raise PolicyError(
            "where", "reaches into a range that was closed for ever", "ask a range that is open"
        )


#: Entries from one snapshot to the next, while a table is open and when it is closed: they are
#: replayed in seconds at most.
_EVERY, _EVERY_TIME = 100, 10
#: Of the plain (epsilon, delta) that an entry of zCDP states beside its rho.
_DELTA = 1e-9
#: Relative error allowed for a sum, a product and a root.
_UP = 1 + 1e-12


class RegionAccount:
    """The account of one table; see the module.

    Args:
        ledger: the account of the table's data set, which has no other table.
        table: the public model.
        rules: the data steward's present rules.
        snapshot: file beside the table that saves a replay; ``None``: none is written.
        clock: returns microseconds since 1970.
        looking: the snapshot is read and never written.

    Raises:
        PolicyError: the account holds other runs or another table.
    """

    def __init__(
        self,
        ledger: Ledger,
        table: SessionTable,
        rules: Rules | None = None,
        snapshot: Path | None = None,
        clock: Callable[[], int] = now_micros,
        looking: bool = False,
    ) -> None:
        self.table, self.rules = table, rules or Rules()
        self._ledger, self._snapshot, self._clock = ledger, snapshot, clock
        self._looking = looking
        balances = read_snapshot(snapshot, table, ledger) if snapshot is not None else None
        self._state = balances or Balances.first(table)
        self._saved = self._state.entries
        self._history: History | None = None  # the ledger's, by which the state was made
        self._refreshed()
        self.save(_EVERY)

    # --- what stands -----------------------------------------------------------------------------

    def spent(self, kind: BudgetKind) -> Spent:
        """Return the spent budget of a kind at every point until now.

        Raises:
            UsageError: records have no budget of that kind.
            PolicyError: the account is damaged.
        """
        return Views(self._refreshed(), MICRO).spent(kind)

    def analyst_spent(self, kind: BudgetKind, analyst: str) -> Spent:
        """Return the charges of one analyst at every point until now; raises like ``spent``."""
        self.table.space.budget_place(kind)
        return self._with_own(kind, analyst).own[kind, analyst]

    def usable(self) -> int:
        """Return the millionths of every initial budget that may be used now."""
        return self.rules.usable(self._instant())

    def history(self) -> list[tuple[str, RegionCharge]]:
        """Return run id and charge of every entry of the table, in order."""
        charges = list(self._ledger.history().charges)
        return [(charge.run_id, region_of(charge, self.table)) for charge in charges]

    # --- what is charged -------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was committed; write a snapshot from time to time."""
        self._refreshed()
        self.save(_EVERY)

    def decide(self, order: Order, run_id: str) -> Charge:
        """Return the charge of an order, in the transaction that appends it.

        Args:
            order: what it costs, and which points it is about.

        Raises:
            SessionRefusedError: points lack budget, or the analyst's quota is used up.
            UsageError: the order cannot be used.
        """
        state, at = self._prepared(order), self._instant()
        decision, read = planned(order, state, self.rules, at)
        refusal = refusal_of(self.table.space, order.kind, decision, order.amount * order.allot)
        if refusal is not None:
            raise refusal
        given = order.kind, order.amount, decision.charged, read, order.analyst, at
        region = RegionCharge.of(*given)
        if order.allot:
            region = msgspec.structs.replace(region, allotment="")
        return self._charge(region, run_id)

    def decide_draw(
        self,
        allotment: str,
        kind: BudgetKind,
        amount: int,
        analyst: str,
        resolve: Callable[[Views, Int64], Any],
        run_id: str,
    ) -> Charge:
        """Return the charge of a draw on an allotment, which charges no point again.

        Called in the transaction that appends it.  See this module.

        Args:
            allotment: run id of a charge that was made for draws.
            kind, amount: of what is drawn, in millionths; the allotment paid the same kind.
            resolve: returns (m, d, 2) the boxes that it reads, of those that the allotment may
            read.

        Raises:
            PolicyError: there is no such allotment, or it has too little left.
            UsageError: the boxes or the amount cannot be used.
        """
        check_analyst(analyst)
        allotted_charge, read, _ = self.plan_draw(allotment, kind, amount, resolve)
        given = allotted_charge.budget, amount, read[:0], read, analyst, self._instant()
        region = msgspec.structs.replace(RegionCharge.of(*given), allotment=allotment)
        return self._charge(region, run_id)

    def plan_draw(
        self, allotment: str, kind: BudgetKind, amount: int, resolve: Callable[[Views, Int64], Any]
    ) -> tuple[RegionCharge, Int64, int]:
        """Decide a draw as ``decide_draw`` would now; charges nothing, and raises as that does.

        Returns:
            The allotment, the boxes that it would read, and the millionths left before it.
        """
        check_amount(amount, "amount")
        state = self._refreshed()
        allotted_charge, used = allotted(self._ledger.history().charges, self.table, allotment)
        usable = self.rules.usable(self._instant())
        read = checked(self.table.space, resolve(Views(state, usable), allotted_charge.read))
        check_draw(state, allotted_charge, used, (kind, amount), read)
        return allotted_charge, read, allotted_charge.amount - used

    def left_of(self, allotment: str) -> int:
        """Return the millionths that are left of an allotment; raises as `allotted` does."""
        paid, used = allotted(self._ledger.history().charges, self.table, allotment)
        return paid.amount - used

    def plan(self, order: Order) -> Planned:
        """Decide an order as ``decide`` would now; charges nothing.

        Raises:
            UsageError: the order cannot be used.
        """
        return planned(order, self._prepared(order), self.rules, self._instant())

    def close_for_ever(self, boxes: Any, analyst: str) -> bool:
        """Close boxes to every query, by an entry of its own.

        Args:
            boxes: (m, d, 2), disjoint, whole cells of the grid.
            analyst: name of the analyst who closes the boxes.

        Returns:
            False if they were closed before.

        Raises:
            UsageError: for boxes that cannot be closed.
        """
        closing_boxes = closable(self.table.space, boxes)
        check_analyst(analyst)

        def shut() -> bool:
            state = self._refreshed()
            if all(spent.least_over(closing_boxes) >= CLOSED for spent in state.spent.values()):
                return False
            region = RegionCharge.of(
                "closed", 0, closing_boxes, closing_boxes, analyst, self._instant()
            )
            self._ledger.append(self._charge(region, new_run_id()))
            return True

        closed = self._ledger.transact(shut)
        self._refreshed()
        self.save(_EVERY)
        return closed

    def _charge(self, region: RegionCharge, run_id: str) -> Charge:
        unit, epsilon, delta, rho = self.table.identity, 0.0, 0.0, None
        if not region.draws_on:  # its allotment states what it costs
            epsilon, delta, rho = stated_cost(region.budget, region.amount)
        return Charge(
            run_id,
            self.table.digest,
            unit.text,
            epsilon,
            delta,
            None,
            0.0,
            "session",
            rho=rho,
            regions=region,
        )

    def _instant(self) -> int:
        """Return the present instant, never before the last entry, whatever the clock shows."""
        return max(self._clock(), self._state.at)

    # --- the state -------------------------------------------------------------------------------

    def _prepared(self, order: Order) -> Balances:
        """Return the state that an order is decided on."""
        check_amount(order.amount, "amount")
        check_analyst(order.analyst)
        self.table.space.budget_place(order.kind)
        if self.rules.quotas.of(order.kind, order.analyst) is None:
            return self._refreshed()
        return self._with_own(order.kind, order.analyst)

    def _refreshed(self) -> Balances:
        """Return the state after all entries of the account."""
        state, account = self._state, self._ledger.history()
        if account.widened not in (None, self.table.digest):
            raise migrated()
        new = account.charges[state.entries :]
        held = state.entries <= len(account.charges)
        if (
            account is not self._history and state.entries
        ):  # read from the start: is it what it was?
            held = held and account.digest_of(state.name) == state.digest
        if not held:
            raise PolicyError(
                "account.path",
                "is an older or replaced account: charges that this process has seen are gone",
                "run the same command again, which says how to go on",
            )
        if new:
            digest = account.digest_of(new[-1].name)
            self._state = state.after(new, required(digest, "digest is there"))
        self._history = account
        return self._state

    def _with_own(self, kind: BudgetKind, analyst: str) -> Balances:
        state = self._refreshed()
        if (kind, analyst) not in state.own:
            charges = self._ledger.history().charges[: state.entries]
            self._state = state.with_own((kind, analyst), charges)
        return self._state

    def save(self, every: int = _EVERY_TIME) -> None:
        """Write a snapshot if the last one is this many entries old; never in a transaction."""
        old = self._state.entries >= self._saved + every
        if self._snapshot is not None and old and not self._looking:
            write_snapshot(self._snapshot, self._ledger.data_set, self._state)
            self._saved = self._state.entries


def stated_cost(kind: RegionKind, amount: int) -> tuple[float, float, float | None]:
    """Return (epsilon, delta, rho) of an entry.

    A millionth's decimal is the float beside it, which every figure of an account is read as
    (`accounting.composition`).  Of rho the plain pair is that of Bun and Steinke (2016,
    proposition 1.3), epsilon = rho + 2 sqrt(rho ln(1 / delta)), rounded up.
    """
    if kind != "rho":
        return amount / MICRO, 0.0, None
    rho = amount / MICRO
    return (rho + 2 * math.sqrt(rho * math.log(1 / _DELTA))) * _UP, _DELTA, rho
