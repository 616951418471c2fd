"""What the account of regions must pass on every ledger.

A scenario is a function of how a ledger is opened (again: as another process would) and of the
account's class, so that sabotaged accounts run through the same ones.
"""

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import Budget, BudgetKind, Category, Integer
from dpstream.accounting.sessions.table import Quotas, Rules, SessionTable, Unlock
from dpstream.state.ledger.balances import region_of, widen, widened
from dpstream.state.ledger.contract import AnswerLog, Decision, Ledger
from dpstream.state.ledger.events import Charge, RegionCharge
from dpstream.state.ledger.orders import Order, SessionRefusedError, Views
from dpstream.state.ledger.regions import RegionAccount
from tests import accounts
from tests.accounting.regions.spaces import amounts_of, members, small, some_boxes
from tests.state.ledger.conformance import Killed, dying, in_process

Open = Callable[[], Ledger]


class Paid(NamedTuple):
    """A charged query."""

    run_id: str
    charged: bool
    region: RegionCharge


class Payer(RegionAccount):
    """An account with all steps of a charge, as `pipelines.session.ask` makes them."""

    def pay(self, request: str, order: Order, fresh: bool = False) -> Paid:
        self.refresh()
        return self._begun(request, lambda run_id: self.decide(order, run_id), fresh)

    def draw(
        self, request: str, allotment: str, kind: BudgetKind, amount: int, analyst: str,
        resolve: Any, fresh: bool = False,
    ) -> Paid:  # fmt: skip
        terms = (allotment, kind, amount, analyst, resolve)
        return self._begun(request, lambda run_id: self.decide_draw(*terms, run_id), fresh)

    def _begun(self, request: str, decide: Callable[[str], Charge], fresh: bool) -> Paid:
        register = AnswerLog(self._ledger, "session")
        begun = register.begin(request, lambda run, _: Decision(decide(run)), fresh)
        self.refresh()
        return Paid(begun.run_id, begun.charged, region_of(begun.charge, self.table))


Make = Callable[..., Payer]
DAY = 86_400_000_000


def table(grid: int = 1, cap: int = 1_000, rho: bool = True) -> SessionTable:
    """7 x 3 x 9 points; with rho x 5."""
    more = (Budget(name="initial rho", kind="rho", most="0.000008", step=2),) * rho
    dimensions: Any = (*small(grid=grid).dimensions, *more)
    return SessionTable(name="people", dimensions=dimensions, cap=cap)


def order(box: Any, amount: int = 1, analyst: str = "ann", **more: Any) -> Order:
    """Of boxes, paid with epsilon."""
    kind: BudgetKind = more.pop("kind", "epsilon")
    return Order(kind, amount, analyst, lambda _: box, **more)


@contextlib.contextmanager
def account(
    open_again: Open, make: Make = Payer, model: SessionTable | None = None, **more: Any
) -> Iterator[Payer]:
    """One process's."""
    with contextlib.closing(open_again()) as ledger:
        yield make(ledger, model or table(), **more)


def initials(model: SessionTable, kind: str) -> Int64:
    """(all points) the initial budget, in millionths."""
    place = model.space.budget_place(kind)
    dimension = model.dimensions[place]
    assert isinstance(dimension, Budget)
    shape = [1] * len(model.dimensions)
    shape[place] = -1
    budget = np.arange(dimension.values).reshape(shape) * dimension.step
    return np.broadcast_to(budget, tuple(model.space.sizes))


class Truth:
    """What every point really pays: the reads of all charges, and the budgets of some records."""

    def __init__(self, model: SessionTable, seed: int) -> None:
        rng, self.model = np.random.default_rng(seed), model
        kinds = [d.kind for d in model.dimensions if isinstance(d, Budget)]
        self.paid: dict[str, Int64] = {
            kind: np.zeros(model.space.sizes, np.int64) for kind in kinds
        }
        own = {"initial": rng.uniform(0, 17e-6, 300), "initial rho": rng.uniform(0, 9e-6, 300)}
        columns = {"age": rng.integers(9, 17, 300), "city": rng.choice(["A", "B", "C"], 300), **own}
        names = [d.name for d in model.dimensions]
        at, usable = model.space.coordinates({name: columns[name] for name in names})
        self.records: dict[str, tuple[Int64, Float64]] = {
            kind: (at[usable], own[model.dimensions[model.space.budget_place(kind)].name][usable])
            for kind in kinds
        }

    def read(self, kind: str, boxes: Int64, amount: int) -> None:
        self.paid[kind][members(boxes, self.model.space.sizes)] += amount

    def check(self, region_account: RegionAccount, exact: bool) -> None:
        for kind, paid in self.paid.items():
            held = amounts_of(region_account.spent(kind))  # type: ignore[arg-type]
            assert (held == paid).all() if exact else (held >= paid).all()
            assert (paid <= initials(self.model, kind)).all()
            at, budgets = self.records[kind]
            for cost, budget in zip(paid[tuple(at.T)].tolist(), budgets.tolist(), strict=True):
                assert cost <= Fraction(budget) * MICRO or cost == 0


def random_history(
    open_again: Open, make: Make, queries: int, seed: int, model: SessionTable, exact: bool
) -> None:
    """Two processes ask in turn; decisions, charges and reads are those of every point."""
    rng, sizes, truth = np.random.default_rng(seed), model.space.sizes, Truth(model, seed)
    accepted = 0
    with account(open_again, make, model) as one, account(open_again, make, model) as two:
        for number in range(queries):
            asker = (one, two)[int(rng.integers(2))]
            kinds = list(truth.paid)
            kind = kinds[int(rng.integers(len(kinds)))]
            boxes, amount = some_boxes(rng, sizes), int(rng.integers(1, 4))
            # Who has no initial budget at all is not asked.
            inside = members(boxes, sizes) & (initials(model, kind) > 0)
            drop = bool(rng.integers(2))
            enough = inside & (initials(model, kind) - truth.paid[kind] >= amount)
            passes = bool(enough.any() and (drop or enough[inside].all()))
            question = order(boxes, amount, kind=kind, drop=drop)
            if number % 5 == 0:
                assert not exact or asker.plan(question).decision.accepted == passes
            try:
                paid = asker.pay(f"query {number}", question)
            except SessionRefusedError as error:
                assert not (exact and passes) and error.decision.largest < amount
                continue
            accepted += 1
            assert passes or not exact
            read = members(paid.region.read, sizes)
            assert (read == (enough if drop else inside)).all() or not exact
            assert not (read & ~inside).any() and paid.charged
            truth.read(kind, paid.region.read, amount)
            if number % 3 == 0 or queries < 100:
                truth.check(asker, exact)
        truth.check(one, exact)
        truth.check(two, exact)
        assert len(one.history()) == accepted > queries // 8
    with account(open_again, Payer, model) as late:
        truth.check(late, exact)


def exact(open_again: Open, make: Make, queries: int = 60) -> None:
    """Without a grid, under a wide cap: exactly."""
    random_history(open_again, make, queries, 1, table(), True)


def coarse(open_again: Open, make: Make, queries: int = 60) -> None:
    """With a grid and a narrow cap: never less, and no record beyond its budget."""
    random_history(open_again, make, queries, 2, table(grid=4, cap=12, rho=False), False)


def asked_again(open_again: Open, make: Make) -> None:
    """The same request is charged once, until it is asked afresh behind its answer."""
    box = table().space.box(initial=("0.000008", None))
    with account(open_again, make) as one, account(open_again, make) as two:
        first = one.pay("asked", order(box))
        again = two.pay("asked", order(box, 3))
        assert first.charged and not again.charged
        assert (again.run_id, again.region) == (first.run_id, first.region)
        # Nobody has answered it yet: fresh or not, it goes on.
        assert two.pay("asked", order(box), fresh=True).run_id == first.run_id
        register = AnswerLog(two._ledger, "session")
        register.commit(first.run_id, b"42")
        assert register.read(first.run_id).receipt == b"42"  # type: ignore[union-attr]
        assert not one.pay("asked", order(box)).charged
        fresh = one.pay("asked", order(box), fresh=True)
        assert fresh.charged and fresh.run_id != first.run_id
        # What was charged before is found whatever has become of the budget.
        two.close_for_ever(table().space.everything, "steward")
        assert not one.pay("asked", order(box)).charged
        with pytest.raises(SessionRefusedError):
            one.pay("other", order(box))


def killed(
    open_again: Open, make: Make, dies: Callable[[Callable[[], object]], None] = in_process
) -> None:
    """Killed at any point: charged in whole or not at all, and the same request goes on."""
    box = table().space.box(initial=("0.000008", None))
    for number, point in enumerate(("append", "add_request", "begun")):

        def first(point: str = point) -> None:
            with account(open_again, make) as mine, dying(mine, point):  # type: ignore[arg-type]
                mine.pay(f"asked {point}", order(box))

        dies(first)
        with account(open_again, make) as region_account:
            before = region_account.history()
            assert len(before) == number + (point == "begun")
            assert (amounts_of(region_account.spent("epsilon")).max() == len(before)) or not before
            paid = region_account.pay(f"asked {point}", order(box, drop=True))
            assert paid.charged == (point != "begun")
            assert [run for run, _ in region_account.history()].count(paid.run_id) == 1
            assert len(region_account.history()) == number + 1


def interrupted(open_again: Open, make: Make) -> None:
    """A process that lives on behind a transaction that did not end counts what stands."""
    box = table().space.box(initial=("0.000008", None))
    with account(open_again, make) as one, account(open_again, make) as two:
        for point in ("append", "add_request"):
            with pytest.raises(Killed), dying(one, point):  # type: ignore[arg-type]
                one.pay("asked", order(box, 2))
            assert amounts_of(one.spent("epsilon")).max() == 0 and one.history() == []
        two.pay("other", order(box, 3))
        assert one.pay("asked", order(box, 2)).charged
        for region_account in (one, two):
            assert amounts_of(region_account.spent("epsilon")).max() == 5


def meets_another(open_again: Open, make: Make) -> None:
    """What was left when one looked is not left when it pays."""
    box = table().space.box(initial=("0.000008", None))
    with account(open_again, make) as one, account(open_again) as two:
        assert one.plan(order(box, 6)).decision.accepted
        two.pay("first", order(box, 6))
        with pytest.raises(SessionRefusedError) as caught:
            one.pay("second", order(box, 6))
        assert caught.value.decision.largest == 2


def predicates(open_again: Open, make: Make) -> None:
    """A predicate on consumption holds as of the charge, not as of when it was asked."""
    model, boxes = table(), list[Int64]()

    def fresh_points(views: Views) -> Int64:
        """Where nothing was spent, of those with an initial budget of 8 or more."""
        spent = views.spent("epsilon")
        free_boxes = np.asarray(spent.boxes)[spent.amounts == 0].copy()
        free_boxes[:, 2, 0] = np.maximum(free_boxes[:, 2, 0], 4)
        return free_boxes[free_boxes[:, 2, 0] < free_boxes[:, 2, 1]]

    def meddle() -> None:
        if not boxes:
            box = model.space.box(age=(11, 13), initial=("0.000008", None))
            two.pay("between", order(box))
            boxes.append(box)

    with account(open_again, make, model) as one, account(open_again, model=model) as two:
        before = getattr(one, "before", None)
        if before is None:
            meddle()
        else:
            before.append(meddle)
        paid = one.pay("asked", Order("epsilon", 1, "ann", fresh_points))
        met = members(boxes[0], model.space.sizes) & members(paid.region.read, model.space.sizes)
        assert not met.any()
        for _ in range(2):  # nothing is fresh any more
            with pytest.raises(SessionRefusedError, match="no point") as caught:
                one.pay("again", Order("epsilon", 1, "ann", fresh_points))
            assert not len(caught.value.decision.boxes)


def quotas(open_again: Open, make: Make) -> None:
    """One analyst spends no more than the quota at ANY point; others are not held to it."""
    model = table()
    rules = Rules(quotas=Quotas(epsilon={"ann": 3}, default_rho=1))
    box, other = (model.space.box(age=ages, initial=("0.000008", None)) for ages in
                   ((10, 13), (12, 15)))  # fmt: skip
    with account(open_again, make, model, rules=rules) as one:
        one.pay("1", order(box, 2))
        with pytest.raises(SessionRefusedError) as caught:
            one.pay("2", order(other, 2))
        decision = caught.value.decision
        assert decision.largest == 1 and decision.left.tolist() == [1]
        assert decision.lacking[:, 0].tolist() == [[2, 3]]
        paid = one.pay("2", order(other, 2, drop=True))
        assert paid.region.read[:, 0].tolist() == [[3, 5]]
        assert one.pay("3", order(other, 2, "bob")).charged
        assert one.pay("4", order(other, 1)).charged
        assert one.analyst_spent("epsilon", "ann").amounts.max() == 3
        assert one.analyst_spent("epsilon", "bob").amounts.max() == 2
        rich = model.space.box(**{"initial rho": ("0.000004", None)})
        one.pay("5", order(rich, 1, kind="rho"))
        with pytest.raises(SessionRefusedError):
            one.pay("6", order(rich, 1, kind="rho"))
    # A quota that comes later counts what was charged before it.
    late = Rules(quotas=Quotas(default_epsilon=2))
    with account(open_again, make, model, rules=late) as two:
        with pytest.raises(SessionRefusedError):
            two.pay("7", order(other, 1, "bob"))
        assert two.pay("7", order(box, 1, "cyd")).charged


def unlocks(open_again: Open, make: Make) -> None:
    """Of a budget only its share is usable, by the day; a clock set back takes nothing back."""
    model, now = table(), [10 * DAY - 1]
    rules = Rules(unlock=Unlock(start=10 * DAY, share="0.25"))
    box = model.space.box(initial=("0.000008", None))
    more = {"rules": rules, "clock": lambda: now[0]}
    with account(open_again, make, model, **more) as one:
        with pytest.raises(SessionRefusedError) as caught:
            one.pay("1", order(box))
        assert caught.value.decision.largest == 0 and one.usable() == 0
        now[0] += 1
        assert one.usable() == 250_000
        with pytest.raises(SessionRefusedError) as caught:
            one.pay("1", order(box, 3))
        assert caught.value.decision.largest == 2
        assert one.pay("1", order(box, 2)).region.at == 10 * DAY
        dropped = one.plan(order(box, 1, drop=True))
        assert dropped.read[:, 2].tolist() == [[6, 9]]  # floor(12 / 4) - 2 = 1
        now[0] = 11 * DAY
        assert one.pay("2", order(box, 2)).charged
        now[0] = 9 * DAY
        assert one.usable() == 500_000
        now[0] = 50 * DAY
        assert one.pay("3", order(box, 4)).charged and one.usable() == MICRO


def closes(open_again: Open, make: Make) -> None:
    """A closed range is refused for ever, to whoever asks and with whatever budget."""
    model = table(grid=4)
    old, new = (model.space.box(age=ages, initial=("0.000008", None)) for ages in
                ((10, 14), (14, 16)))  # fmt: skip
    with account(open_again, make, model) as one, account(open_again, make, model) as two:
        one.pay("1", order(old))
        range_ = model.space.box(age=(10, 14))
        assert two.close_for_ever(range_, "steward") and not one.close_for_ever(range_, "steward")
        assert [region.budget for _, region in one.history()] == ["epsilon", "closed"]
        for region_account, kind in ((one, "epsilon"), (two, "rho")):
            with pytest.raises(SessionRefusedError) as caught:
                region_account.pay("2", order(old, kind=kind))
            assert caught.value.decision.largest == 0
        full_box = model.space.box(initial=("0.000008", None))
        assert one.pay("3", order(full_box, drop=True)).region.read[:, 0, 0].min() == 4
        assert one.pay("4", order(new)).charged
        with account(open_again, make, model) as late:
            assert amounts_of(late.spent("epsilon"))[5, 0, 8, 0] == 2


def covers(open_again: Open, make: Make) -> None:
    """A covered dimension is charged over its whole range, and read where it was asked."""
    model = table()
    with account(open_again, make, model) as one:
        for age in range(10, 14):
            box = model.space.box(age=(age, age + 1), city=("A", "B"), initial=("0.000008", None))
            paid = one.pay(f"{age}", order(box, cover=("age", "city")))
            assert paid.region.read[0, :2].tolist() == [[age - 10, age - 9], [0, 1]]
            assert paid.region.boxes[0, :2].tolist() == [[0, 7], [0, 3]]
        assert len(one.spent("epsilon").boxes) == 2
        bars = np.concatenate(
            [model.space.box(age=(age, age + 1), initial=("0.000008", None)) for age in (10, 12)]
        )
        paid = one.pay("bars", order(bars, 4, cover=("age",)))
        assert len(paid.region.boxes) == 1 and len(paid.region.read) == 2
        assert one.spent("epsilon").amounts.max() == 8


def others(open_again: Open, make: Make) -> None:
    """A data set holds one table of record budgets and nothing else, whoever comes second."""
    mu = mu_of(1.0, 1e-7)
    run = Charge("1" * 32, "plan", accounts.USER, 1.0, 1e-7, mu, 0.0, "sql")
    alike = Charge("2" * 32, "plan", table().identity.text, 1.0, 1e-7, mu, 0.0, "stream")
    box = table().space.box(initial=("0.000008", None))
    with account(open_again, make) as one:
        one.pay("1", order(box))
        for charge in (run, alike):  # even of a unit that is called the same
            with pytest.raises(PolicyError, match="privacy unit"):
                one._ledger.charge(charge)
        with pytest.raises(PolicyError, match="another table"):
            make(one._ledger, table(grid=2))
        one._ledger.transact(lambda: one._ledger.append(run))  # as no program does
        with pytest.raises(PolicyError, match="another privacy unit"):
            one.pay("2", order(box))
        with pytest.raises(PolicyError, match="another privacy unit"):
            make(one._ledger, table())


#: `table` with more ages, a code, a higher and finer budget, and a dimension of its own.
WIDER: tuple[Any, ...] = (
    Integer(name="age", low=8, high=18, missing="point"),
    Category(name="member", codes=("no", "yes")),
    Category(name="city", codes=("A", "D", "B", "C")),
    Budget(name="initial rho", kind="rho", most="0.000008", step=2),
    Budget(name="initial", most="0.000020", step=1),
)


def points_before(at: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where a point of `WIDER` was in `table`; ``None``: its records were refused."""
    age, _, city, rho, initial = at
    before = age + 8 - 10
    if city == 1:  # D
        return None
    return before if 0 <= before < 6 else 6, (0, -1, 1, 2)[city], min(initial // 2, 8), rho


def widens(open_again: Open, make: Make) -> None:
    """Every point has spent what its records had spent, and the history goes on from there."""
    model, wider = table(), SessionTable(name="people", dimensions=WIDER)
    rules = Rules(quotas=Quotas(epsilon={"ann": 5}))
    rich = model.space.box(age=(10, 13), initial=("0.000012", None))
    with account(open_again, make, model, rules=rules) as one:
        one.pay("a", order(rich, 3))
        everybody = model.space.box(initial=("0.000004", None))
        one.pay("b", order(everybody, 2, "bob"))
        one.pay("c", order(model.space.box(**{"initial rho": ("0.000004", None)}), kind="rho"))
        allotment = one.pay("d", order(rich, 4, "bob", allot=True)).run_id
        one.draw("e", allotment, "epsilon", 1, "bob", lambda _, of: of)
        one.close_for_ever(model.space.box(city=("C", None)), "steward")
        spent = {kind: amounts_of(one.spent(kind)) for kind in ("epsilon", "rho")}  # type: ignore[arg-type]
        with contextlib.closing(open_again()) as ledger:
            with pytest.raises(RuntimeError), ledger.transaction():
                ledger.append(widened(model, wider))
                raise RuntimeError  # nothing of it stays
            assert ledger.history().widened is None
            assert {charge.plan_hash for charge in ledger.history().charges} == {model.digest}
            assert widen(ledger, model, wider) == 6 and widen(ledger, model, wider) is None
        for _ in range(2):  # also who had it open
            with pytest.raises(PolicyError) as caught:
                one.pay("f", order(rich, 1))
            assert caught.value.field == "data_set"
    with pytest.raises(PolicyError), account(open_again, make, model):
        pass
    with account(open_again, make, wider, rules=rules) as two:
        for kind, before in spent.items():
            now = amounts_of(two.spent(kind))  # type: ignore[arg-type]
            for at in np.ndindex(*wider.space.sizes.tolist()):
                was = points_before(at)
                assert now[at] == (0 if was is None else before[was]), (kind, at, was)
        point = wider.space.box(age=(12, 13), city=("A", "D"), initial=("0.000016", None))
        with pytest.raises(SessionRefusedError):  # 16 of which 9 were spent
            two.pay("g", order(point, 8, "bob"))
        with pytest.raises(SessionRefusedError):  # of ann's quota of 5 she has spent 3
            two.pay("g", order(point, 3))
        assert two.pay("g", order(point, 2)).charged
        assert two.draw("h", allotment, "epsilon", 3, "bob", lambda _, of: point).charged
        with pytest.raises(PolicyError):
            two.draw("i", allotment, "epsilon", 1, "bob", lambda _, of: point)
        assert len(two.history()) == 8


SCENARIOS = (
    exact, coarse, asked_again, killed, interrupted, meets_another, predicates, quotas, unlocks,
    closes, covers, others, widens,
)  # fmt: skip
