"""Sessions in Python: explore a table in which each record has its own budget.

    with Session(table="rides", analyst="bob") as session:
        night = session.where("pickup_hour >= 22", name="night")
        used = night.max_consumed()
        rich = night.with_budget(0.6)
        if rich.count(0.1).value > 1000:
            allotment = rich.as_pinq(0.5)
            allotment.average("fare", 0.25)
            allotment.median("distance", 0.25)

A question is charged in the account before a record is read, and its answer is committed before it
is shown.
"""

import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, closest
from dpstream.accounting.limits import MAX_CELLS
from dpstream.accounting.regions.amounts import MICRO, Number, charge_of
from dpstream.accounting.regions.space import BudgetKind
from dpstream.accounting.sessions import aggregates as figures
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    Axis,
    Cells,
    Question,
    along,
)
from dpstream.accounting.strength import WeakGuaranteeWarning
from dpstream.pipelines.session import ask as asking
from dpstream.pipelines.session import names
from dpstream.pipelines.session.ask import AllotmentQuestion, SessionRequest
from dpstream.pipelines.session.conditions import nonempty
from dpstream.pipelines.session.config import Config, load_config
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import Answer
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.session.union import Union, assembled
from dpstream.state.connecting import Closing
from dpstream.state.ledger.orders import Order, Planned

if TYPE_CHECKING:
    from dpstream.pipelines.runners.bounded import Runner


class Session(Closing):
    """An open table, and the analyst who asks; a context that closes it.

    Args:
        project: the project file or its folder; ``None``: found from the current folder; or the
            result of `load_config`, which replaces all of ``project``, ``table``,
            ``environment`` and ``settings``.
        table: name of the table in the project file; ``None``: the only one.
        environment: the value of ``--env``.
        settings: the values of ``--set``.
        analyst: the analyst whose quota is charged.
        held: copy the records into memory at the first question, for sessions with many.
        runner: the runner whose workers read and draw, with the same bytes; ``None``: this
            process.
        looking: ask nothing: no file is made or written, and no record is read.

    Attributes:
        names: subspaces by name.

    Raises:
        DpstreamError: the file cannot be used, or the account is another table's.
    """

    def __init__(
        self,
        project: str | Path | Config | None = None,
        table: str | None = None,
        *,
        analyst: str = "analyst",
        environment: str | None = None,
        settings: Sequence[str] = (),
        held: bool = False,
        runner: "Runner | None" = None,
        looking: bool = False,
    ) -> None:
        if not isinstance(project, Config):
            project = load_config(project, table, environment, settings)
        self.open_table = OpenTable(project, analyst, held, runner, looking)
        for weakness in project.table.warnings:
            warnings.warn(weakness, WeakGuaranteeWarning, stacklevel=2)
        self.names: dict[str, Subspace] = {}

    @property
    def table(self) -> "Subspace":
        """The subspace of every point."""
        return Subspace(self, Selection(self.open_table.space))

    def where(self, predicate: str, name: str | None = None) -> "Subspace":
        """Return the points where a predicate is true; see `Subspace.where`."""
        return self.table.where(predicate, name)

    def __getitem__(self, name: str) -> "Subspace":
        """Return a subspace by its name.

        Raises:
            UsageError: there is no such name.
        """
        if name not in self.names:
            fix = f"{closest(name, self.names)}; or name one: where(..., name={name!r})"
            raise UsageError("subspace", f"no subspace {name!r}", fix)
        return self.names[name]

    def allotment(self, run_id: str) -> "Allotment":
        """Return an allotment that was made before, perhaps by another program.

        Args:
            run_id: of the allotment, or its name.

        Raises:
            PolicyError: there is no such allotment.
        """
        run_id = names.allotment(self.open_table.config, run_id)
        for entry, charge in self.open_table.account.history():
            if entry == run_id and charge.allots and charge.budget != "closed":
                selection = Selection(self.open_table.space).cut_to(charge.read)
                return Allotment(self, selection, run_id, charge.budget, charge.amount)
        named = closest(run_id, names.read(self.open_table.config).allotments)
        fix = f"{named}; make one with `dpstream session allot`, or as_pinq in Python"
        raise PolicyError("allotment", f"no allotment {run_id!r} is in the account", fix)

    def close(self) -> None:
        """Close the account and erase the secret from memory."""
        self.open_table.close()


class Asker:
    """The questions that can be asked; a ``Subspace`` or an ``Allotment`` defines who pays.

    Every figure takes its ``budget``, and as keywords ``kind`` (``epsilon`` or ``rho``), ``fresh``
    (ask again, at a new charge, a question that was answered before) and ``as_of`` (a public label
    of the state of the records; the same question with another label is another question).  A
    subspace also takes ``drop`` (leave out points with too little budget instead of refusing) and
    ``cover`` (dimensions that are charged over their whole range).
    """

    session: Session
    selection: Selection

    def count(self, budget: Number, **how: Any) -> Answer:
        """Return the number of records."""
        return self.ask((COUNT,), budget, **how)

    def sum(self, column: str, budget: Number, **how: Any) -> Answer:
        """Return the sum of a column; records without a value add nothing."""
        return self.ask((figures.sum_of(column),), budget, **how)

    def average(self, column: str, budget: Number, **how: Any) -> Answer:
        """Return the average of a column over the records that have a value."""
        return self.ask((figures.average(column),), budget, **how)

    def median(self, column: str, budget: Number, **how: Any) -> Answer:
        """Return the median of a column."""
        return self.ask((figures.median(column),), budget, **how)

    def quantiles(self, column: str, at: Sequence[float], budget: Number, **how: Any) -> Answer:
        """Return several quantiles of a column, all for one budget."""
        return self.ask((figures.quantiles(column, at),), budget, **how)

    def histogram(
        self,
        by: str,
        budget: Number,
        edges: Sequence[Any] | int | None = None,
        figure: Aggregate = COUNT,
        **how: Any,
    ) -> Answer:
        """Return a figure for each range of one dimension; the ranges share no point, so that a
        point pays once.

        Args:
            edges: values between the ranges, a number of equal ranges, or ``None``: a range for
            each
                value.
        """
        return self.ask((figure,), budget, {by: edges}, **how)

    def grid(
        self,
        by: Mapping[str, Sequence[Any] | int | None],
        budget: Number,
        figures: Sequence[Aggregate] = (COUNT,),
        **how: Any,
    ) -> Answer:
        """Return figures for each cell of a grid: one charge and one scan, all or nothing."""
        return self.ask(tuple(figures), budget, by, **how)

    def ask(
        self,
        aggregates: Sequence[Aggregate],
        budget: Number,
        by: Mapping[str, Sequence[Any] | int | None] | None = None,
        kind: BudgetKind | None = None,
        **how: Any,
    ) -> Answer:
        """Return any figures of any cells for one budget.

        Raises:
            SessionRefusedError: points lack budget; ``decision`` lists them.
            DpstreamError: the question has no meaning.
        """
        return asking.ask(
            self.session.open_table, self.request(aggregates, budget, by, kind, **how)
        )

    def request(
        self,
        aggregates: Sequence[Aggregate],
        budget: Number,
        by: Mapping[str, Sequence[Any] | int | None] | None = None,
        kind: BudgetKind | None = None,
        **how: Any,
    ) -> SessionRequest:
        """Return the question without asking it."""
        cells = cells_of(self.session.open_table, self.selection, by) if by else Cells()
        question = Question(
            kind=kind or "epsilon",
            amount=charge_of(budget),
            aggregates=tuple(aggregates),
            cells=cells,
        )
        if isinstance(how.get("cover"), str):
            how["cover"] = (how["cover"],)
        return SessionRequest(question, self.selection, **how)


def cells_of(
    open_table: OpenTable, selection: Selection, by: Mapping[str, Sequence[Any] | int | None]
) -> Cells:
    """Return the cells of a grid by dimension: edges, a number of equal ranges, or every value.

    Without edges the cells lie within the selection, or within the whole dimension if the
    predicate depends on consumption: what the points have spent must not change the question.
    """
    space, axes = open_table.space, list[Axis]()
    boxes = space.everything if selection.moves else nonempty(selection.boxes())
    for name, edges in by.items():
        if edges is not None and not isinstance(edges, int):
            axes.append(along(space, name, edges))
            continue
        place = space.place(name)
        low, high = (int(boxes[:, place, 0].min()), int(boxes[:, place, 1].max()))
        parts = high - low
        if edges is not None:  # equal ranges are of values
            high, parts = min(high, int(space.values[place])), edges
        if not 0 < parts <= high - low:
            raise UsageError(f"cells.{name}", "cannot be cut into so many", "use fewer ranges")
        if parts > MAX_CELLS:
            raise UsageError(f"cells.{name}", "has too many values for a cell each", "give edges")
        axes.append(Axis(name, tuple(low + (high - low) * i // parts for i in range(parts + 1))))
    return Cells(tuple(axes))


class Subspace(Asker):
    """Points of the space; each of them pays for the questions about it.

    Attributes:
        session: the session that asks.
        selection: the points.
    """

    def __init__(self, session: Session, selection: Selection) -> None:
        self.session, self.selection = session, selection

    def where(self, predicate: str, name: str | None = None) -> "Subspace":
        """Return the part where a predicate is true as well: comparisons of dimensions, and of
        ``consumed_epsilon``, ``remaining_epsilon`` and the same of rho.

        Args:
            name: a name by which the session finds the subspace again.

        Raises:
            UsageError: the text is not a predicate.
        """
        subspace = Subspace(self.session, self.selection.where(predicate))
        if name is not None:
            self.session.names[name] = subspace
        return subspace

    def max_consumed(self, kind: BudgetKind = "epsilon") -> float:
        """Return the most that any of the points has spent; free.

        Raises:
            UsageError: the subspace has no point.
        """
        account = self.session.open_table.account
        return account.spent(kind).most_in(self.boxes()) / MICRO

    def with_budget(self, budget: Number, kind: BudgetKind = "epsilon") -> "Subspace":
        """Return the points that have a budget left now; free.  A later charge does not change
        them.

        Raises:
            PolicyError: no point has that much left.
        """
        boxes = self.enough(charge_of(budget), kind)
        if not len(boxes):
            raise PolicyError(
                "budget", "is more than any point of it has left", "ask for less, or elsewhere"
            )
        return Subspace(self.session, self.selection.cut_to(boxes))

    def enough(self, amount: int, kind: BudgetKind) -> Int64:
        """Return (m, d, 2) the boxes of points with at least ``millionths`` left, perhaps none.

        Boxes begin on the grid of initial budgets: a question snaps them to it, and then each has
        enough as a whole.
        """
        open_table = self.session.open_table
        order = Order(kind, amount, open_table.analyst, self.selection.boxes, True)
        boxes = open_table.account.plan(order).read.copy()
        place = open_table.space.budget_place(kind)
        grid = int(open_table.space.grids[place])
        boxes[:, place, 0] = -(-boxes[:, place, 0] // grid) * grid
        return boxes[boxes[:, place, 0] < boxes[:, place, 1]]

    def boxes(self) -> Int64:
        """Return (m, d, 2) the present points; free."""
        return self.selection.boxes(self.session.open_table.account)

    def plan(
        self,
        budget: Number,
        kind: BudgetKind = "epsilon",
        drop: bool = False,
        cover: Sequence[str] = (),
    ) -> Planned:
        """Return the plan of a question, without charging it."""
        request = self.request((COUNT,), budget, None, kind, drop=drop, cover=tuple(cover))
        return self.session.open_table.account.plan(
            asking.order_of(self.session.open_table, request)
        )

    def as_pinq(
        self,
        budget: Number,
        kind: BudgetKind = "epsilon",
        cover: Sequence[str] = (),
        name: str | None = None,
    ) -> "Allotment":
        """Charge a budget now, and ask until it is used up.

        Args:
            name: an allotment with the same name is charged once, also if a program was killed
                before it could store the run id.

        Raises:
            SessionRefusedError: ANY point has less left.
        """
        open_table, amount = self.session.open_table, charge_of(budget)
        order = Order(
            kind, amount, open_table.analyst, self.selection.boxes, False, tuple(cover), True
        )
        question = AllotmentQuestion(
            open_table, order, self.selection, name or secrets.token_hex(16)
        )
        made = asking.committed(open_table, question)
        read = next(
            charge.read for run_id, charge in open_table.account.history() if run_id == made.run_id
        )
        selection = Selection(open_table.space).cut_to(read)
        return Allotment(self.session, selection, made.run_id, kind, amount, made.charged)

    def union(self, figure: Aggregate = COUNT) -> Union:
        """Return a count or sum from earlier answers of disjoint parts; free.

        Raises:
            PolicyError: the answers do not cover the subspace.
        """
        return assembled(self.session.open_table, self.boxes(), figure)


class Allotment(Asker):
    """Points that paid a budget at once, which questions then use up.

    Attributes:
        run_id: its name, in other programs too (`Session.allotment`).
        kind, amount: what was paid, in millionths.
        charged: whether the call that returned it was charged.
    """

    def __init__(
        self,
        session: Session,
        selection: Selection,
        run_id: str,
        kind: BudgetKind,
        amount: int,
        charged: bool = False,
    ) -> None:
        self.session, self.selection, self.charged = session, selection, charged
        self.run_id, self.kind, self.amount = run_id, kind, amount

    @property
    def left(self) -> float:
        """The part of the budget that is not used yet."""
        history = self.session.open_table.account.history()
        used = sum(charge.amount for _, charge in history if charge.draws_on == self.run_id)
        return (self.amount - used) / MICRO

    def where(self, predicate: str) -> "Allotment":
        """Return the part where a predicate is true; it uses the same budget."""
        return Allotment(
            self.session, self.selection.where(predicate), self.run_id, self.kind, self.amount
        )

    def request(
        self,
        aggregates: Sequence[Aggregate],
        budget: Number,
        by: Mapping[str, Sequence[Any] | int | None] | None = None,
        kind: BudgetKind | None = None,
        **how: Any,
    ) -> SessionRequest:
        """Return the question without asking it.

        Raises:
            UsageError: an argument states who pays, although the allotment pays.
        """
        strange = sorted(set(how) - {"fresh", "as_of"})
        if strange or kind not in (None, self.kind):
            raise UsageError(
                "allotment",
                "pays with its own budget, at its own points",
                "ask without kind, drop and cover",
            )
        how |= {"allotment": self.run_id}
        return super().request(aggregates, budget, by, self.kind, **how)
