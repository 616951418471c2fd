"""STUB (signatures only)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.regions.decision import Decision
from dpstream.accounting.regions.spent import Spent
from dpstream.accounting.sessions.rules import Rules
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.region_charge import RegionCharge

Kind = Literal["epsilon", "rho"]


class Views:
    """What a predicate on consumption sees, as of the transaction that charges."""

    def spent(self, kind: Kind) -> Spent:
        """What every point has spent."""
        raise NotImplementedError


class Order(NamedTuple):
    """What a query wants.

    Attributes:
        kind: of the budget it pays with; amount: in millionths; analyst: who asks.
        resolve: (m, d, 2) the boxes that it asks, disjoint, not snapped.
        drop: leave out points with too little; cover: dimensions charged over their whole range.
    """

    kind: Kind
    amount: int
    analyst: str
    resolve: Callable[[Views], Any]
    drop: bool = False
    cover: tuple[str, ...] = ()


class Paid(NamedTuple):
    """A charged query.

    Attributes:
        run_id: of its charge; charged: by this very call.
        region: what was charged and may be read.
        decision: ``None`` where it was charged before.
    """

    run_id: str
    charged: bool
    region: RegionCharge
    decision: Decision | None


class Planned(NamedTuple):
    """What a query would do now; read: (m, d, 2) the boxes it would read."""

    decision: Decision
    read: Int64


class SessionRefusedError(PolicyError):
    """A query that points lack budget for; ``decision`` says which and how much; public."""

    decision: Decision


class RegionAccount:
    """The budgets of a table's points in a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        table: SessionTable,
        rules: Rules | None = None,
        snapshot: Path | None = None,
    ) -> None:
        raise NotImplementedError

    def spent(self, kind: Kind) -> Spent:
        """What every point has spent, as of now."""
        raise NotImplementedError

    def analyst_spent(self, kind: Kind, analyst: str) -> Spent:
        """What an analyst with a quota has charged to every point."""
        raise NotImplementedError

    def pay(self, request: str, order: Order, fresh: bool = False) -> Paid:
        """Charge a request in one transaction, unless it was charged before."""
        raise NotImplementedError

    def plan(self, order: Order) -> Planned:
        """Decide without charging."""
        raise NotImplementedError

    def close_for_ever(self, boxes: Any, analyst: str) -> bool:
        """Close boxes (aligned to the grid) to every query; False if they were closed."""
        raise NotImplementedError

    def history(self) -> list[tuple[str, RegionCharge]]:
        """(run id, charge) of the table, in order."""
        raise NotImplementedError
