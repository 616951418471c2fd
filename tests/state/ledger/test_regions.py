"""The account of regions on SQLite and Spanner: every scenario, many processes, sabotaged twins.

Allotments: draws never add up to more than was paid, and nothing else can be drawn on.

What an order may do: its reads lie in what it pays for, and orders that are none.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.regions import space
from dpstream.accounting.regions import spent as coarsening
from dpstream.accounting.regions import spent as spending
from dpstream.accounting.regions.amounts import MOST
from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.regions.spent import charge
from dpstream.accounting.sessions.table import Quotas, Rules, SessionTable
from dpstream.state.ledger import balances, orders
from dpstream.state.ledger.balances import Balances
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import RegionCharge
from dpstream.state.ledger.open import open_path
from dpstream.state.ledger.orders import (
    Order,
    Planned,
    SessionRefusedError,
    Views,
    check_analyst,
    planned,
)
from dpstream.state.ledger.regions import allotted
from tests import accounts, emulator
from tests.accounting.regions.spaces import amounts_of, members, some_boxes
from tests.accounting.regions.test_spent import inward
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import PEOPLE, box
from tests.state.ledger import region_conformance as suite
from tests.state.ledger.conformance import in_a_fork
from tests.state.ledger.region_conformance import (
    SCENARIOS,
    Open,
    Paid,
    Payer,
    account,
    initials,
    order,
    table,
)

Scenario = Callable[[Open, Any], None]


@pytest.fixture
def url(running: None) -> Iterator[str]:
    """An account of records in a database of its own."""
    made = emulator.fresh_url()
    accounts.of_records(made).close()
    yield made
    emulator.drop(made)


@pytest.fixture
def again(tmp_path: Path) -> Open:
    def opened() -> Ledger:
        return accounts.unsynced(accounts.of_records(tmp_path / "ledger.db"))

    return opened


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_sqlite(again: Open, scenario: Scenario) -> None:
    scenario(again, Payer)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_spanner(url: str, scenario: Scenario) -> None:
    scenario(lambda: open_path(url), Payer)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [suite.exact, suite.coarse])
def test_ten_thousand_random_queries(tmp_path: Path, scenario: Any) -> None:
    for number in range(100):  # budgets of a table are soon gone
        path = tmp_path / f"{number}.db"

        def opened(path: Path = path) -> Ledger:
            return accounts.unsynced(accounts.of_records(path))

        scenario(opened, Payer, 100)


def test_killed_as_by_a_signal(again: Open) -> None:
    suite.killed(again, Payer, in_a_fork)


def test_decided_again_when_overtaken(url: str, refused: Refused) -> None:
    """On Spanner nobody is kept out: what is no longer true is resolved and decided again."""
    model, seen = table(), list[int]()
    box = model.space.box(initial=("0.000008", None))
    with account(lambda: open_path(url)) as one:

        def resolve(views: Views) -> Any:
            seen.append(int(views.spent("epsilon").amounts.max()))
            if len(seen) == 1:
                with account(lambda: open_path(url)) as two:
                    two.pay("between", order(box, 6))
            return box

        refused(lambda: one.pay("asked", Order("epsilon", 6, "ann", resolve)))
        assert seen == [0, 6] and len(one.history()) == 1
        assert one.pay("asked", Order("epsilon", 2, "ann", resolve)).charged


# --- many processes ------------------------------------------------------------------------------


def worker(path: str, number: int, queries: int) -> int:
    rng, model, done = np.random.default_rng(number), table(), 0
    with account(lambda: accounts.of_records(path), model=model) as mine:
        for query in range(queries):
            boxes = some_boxes(rng, model.space.sizes)
            question = order(
                boxes, int(rng.integers(2, 6)), f"{number}", drop=bool(rng.integers(2))
            )
            with contextlib.suppress(SessionRefusedError):
                done += mine.pay(f"{number // 2} {query}", question).charged
    return done


def at_once(path: str, processes: int, queries: int, method: str = "forkserver") -> None:
    """Each request is asked by two of them."""
    context: Any = multiprocessing.get_context(method)
    with context.Pool(processes) as pool:
        jobs = [(path, number, queries) for number in range(processes)]
        done = pool.starmap(worker, jobs, chunksize=1)
    with account(lambda: accounts.of_records(path)) as region_account:
        model, history = table(), region_account.history()
        paid = np.zeros(model.space.sizes, np.int64)
        for _, region in history:
            paid[members(region.boxes, model.space.sizes)] += region.amount
        assert len(history) == sum(done) and min(done) >= 0
        assert (paid <= initials(model, "epsilon")).all() and paid.max() > 8
        assert (amounts_of(region_account.spent("epsilon")) == paid).all()


@pytest.mark.parametrize(
    ("processes", "queries"), [(3, 12), pytest.param(8, 60, marks=pytest.mark.slow)]
)
def test_processes_never_overspend_a_point(tmp_path: Path, processes: int, queries: int) -> None:
    accounts.of_records(tmp_path / "ledger.db").close()
    at_once(str(tmp_path / "ledger.db"), processes, queries)


@pytest.mark.slow
def test_processes_never_overspend_a_point_on_spanner(url: str) -> None:
    at_once(url, 8, 12, "spawn")  # a server of forks may be older than the emulator


# --- sabotaged twins -----------------------------------------------------------------------------


class Stale(Payer):
    """Decides on what it saw before the transaction."""

    def _prepared(self, order: Order) -> Balances:
        return self._state

    def _refreshed(self) -> Balances:
        return self._state if self._ledger.history().charges else super()._refreshed()


class Early(Payer):
    """Resolves predicates before the transaction; ``before``: what others do in between."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.before = list[Callable[[], None]]()

    def pay(self, request: str, order: Order, fresh: bool = False) -> Paid:
        boxes = order.resolve(Views(self._refreshed(), 1))
        for act in self.before:
            act()
        return super().pay(request, order._replace(resolve=lambda _: boxes), fresh)


class Late(Early):
    """The true one, with the same others in between."""

    def pay(self, request: str, order: Order, fresh: bool = False) -> Paid:
        for act in self.before:
            act()
        return Payer.pay(self, request, order, fresh)


class TwoTransactions(Payer):
    """Charges, and notes the request in another transaction."""

    def pay(self, request: str, order: Order, fresh: bool = False) -> Paid:
        noted = list[str]()
        real, self._ledger.add_request = self._ledger.add_request, lambda run, *_: noted.append(run)  # type: ignore
        try:
            paid = super().pay(request, order, fresh)
        finally:
            self._ledger.add_request = real  # type: ignore[method-assign]
        for run in noted:
            self._ledger.transact(lambda run=run: self._ledger.add_request(run, request))  # type: ignore
        return paid


def test_predicates_are_resolved_in_the_transaction(again: Open) -> None:
    suite.predicates(again, Late)


@pytest.mark.parametrize(
    ("make", "scenario"),
    [
        (Stale, suite.meets_another),
        (Stale, suite.exact),
        (Early, suite.predicates),
        (TwoTransactions, suite.killed),
    ],
)
def test_sabotaged_accounts_fail(again: Open, make: Any, scenario: Scenario) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario(again, make)


def skipping(real: Any) -> Any:
    calls = [0]

    def moved(spent: Any, *rest: Any) -> Any:
        calls[0] += 1
        return spent if calls[0] % 8 == 0 else real(spent, *rest)

    return moved


@pytest.mark.parametrize(
    ("where", "name", "worse", "scenario"),
    [
        (coarsening, "joined", np.minimum, suite.coarse),
        (spending, "outward", inward, suite.coarse),
        (
            space, "initials_of",
            lambda values: (np.ceil(values * 1e6).astype(np.int64), values >= 0), suite.exact,
        ),
        (balances, "moved", skipping(balances.moved), suite.exact),
    ],
)  # fmt: skip
def test_sabotaged_arithmetic_fails(
    again: Open, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, worse: Any, scenario: Any
) -> None:
    monkeypatch.setattr(where, name, worse)
    with pytest.raises(AssertionError):
        scenario(again, Payer)


# --- what decisions depend on ---------------------------------------------------------------------


def transcript(again: Open, answers: list[float]) -> list[Any]:
    """What an analyst who follows the answers is told by the account, and its states."""
    model, lines = table(grid=2), list[Any]()
    rng = np.random.default_rng(5)
    with account(again, model=model, clock=lambda: 0) as one:
        for number, answer in enumerate(answers):
            boxes = some_boxes(rng, model.space.sizes)
            amount = 1 + int(answer) % 4
            try:
                paid = one.pay(f"{number}", order(boxes, amount, drop=answer > 2))
                lines.append(paid.region)
            except SessionRefusedError as error:
                lines.append((str(error), error.decision.lacking.tolist(), error.decision.largest))
        lines += [one.spent(kind).boxes.tobytes() for kind in ("epsilon", "rho")]
    return lines


def test_the_same_answers_are_the_same_transcript(tmp_path: Path) -> None:
    """Nothing but the answers moves it: no clock, chance, run id or name of a file."""
    answers = np.random.default_rng(6).uniform(0, 8, 40).tolist()

    def opened(name: str) -> Open:
        return lambda: accounts.of_records(tmp_path / f"{name}.db")

    transcripts = [transcript(opened(name), answers) for name in ("one", "two")]
    assert transcripts[0] == transcripts[1] and any(
        isinstance(line, tuple) for line in transcripts[0]
    )
    assert transcript(opened("three"), [answers[0] + 1, *answers[1:]]) != transcripts[0]


YOUNG = box(age=(0, 50), epsilon=(1.0, None))


@pytest.fixture
def payer(tmp_path: Path) -> Iterator[Payer]:
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        yield Payer(ledger, PEOPLE)


def allot(account: Payer, amount: int = 500_000, request: str = "a") -> str:
    order = Order("epsilon", amount, "alice", lambda _: YOUNG, allot=True)
    return account.pay(request, order).run_id


def test_an_entry_of_a_session_has_one_date(payer: Payer, tmp_path: Path) -> None:
    run_id = allot(payer)
    payer.draw("d", run_id, "epsilon", 200_000, "alice", lambda _, of: of)
    charges = accounts.charges(tmp_path / "ledger.db")
    assert len(charges) == 2
    for paid in charges:
        assert isinstance(paid.regions, RegionCharge)
        assert paid.at is msgspec.UNSET and paid.instant == paid.regions.at


def test_draws_use_it_up_and_charge_no_point(payer: Payer, refused: Refused) -> None:
    run_id = allot(payer)
    spent = payer.spent("epsilon")
    for number, amount in enumerate((200_000, 300_000)):
        paid = payer.draw(f"d{number}", run_id, "epsilon", amount, "alice", lambda _, of: of)
        assert paid.charged and paid.region.draws_on == run_id
        assert np.array_equal(paid.region.read, YOUNG) and not len(paid.region.boxes)
    assert np.array_equal(payer.spent("epsilon").boxes, spent.boxes)
    assert np.array_equal(payer.spent("epsilon").amounts, spent.amounts)
    refused(lambda: payer.draw("d2", run_id, "epsilon", 1, "alice", lambda _, of: of))
    # The same request is the same draw, free; and so it stays for another reader.
    assert not payer.draw("d0", run_id, "epsilon", 200_000, "bob", lambda _, of: of).charged
    other = Payer(payer._ledger, PEOPLE)
    charges = payer._ledger.history().charges
    assert allotted(charges, PEOPLE, run_id)[1] == 500_000
    assert np.array_equal(other.spent("epsilon").amounts, spent.amounts)
    # What a draw states beside its allotment is nothing: the allotment stated all of it.
    assert [c.epsilon for c in charges] == [0.5, 0.0, 0.0]


def test_nothing_is_drawn_on_a_question(payer: Payer, refused: Refused) -> None:
    order = Order("epsilon", 500_000, "alice", lambda _: YOUNG)
    question_id = payer.pay("q", order).run_id
    for run_id in (question_id, "0" * 32):
        refused(payer.draw, "d", run_id, "epsilon", 1, "alice", lambda _, of: of)
    drawn = payer.draw("d", allot(payer), "epsilon", 100_000, "alice", lambda _, of: of).run_id
    refused(lambda: payer.draw("e", drawn, "epsilon", 1, "alice", lambda _, of: of))


def test_epsilon_pays_for_no_gaussian_noise(payer: Payer, refused: Refused) -> None:
    refused(lambda: payer.draw("d", allot(payer), "rho", 1, "alice", lambda _, of: of))


def test_a_draw_reads_within_its_allotment(payer: Payer, refused: Refused) -> None:
    run_id = allot(payer)
    outside = box(age=(40, 60), epsilon=(1.0, None))
    refused(lambda: payer.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: outside))
    refused(lambda: payer.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: of[:0]))
    inside = box(age=(40, 50), epsilon=(1.0, None))
    assert payer.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: inside).charged


def test_a_closed_range_is_closed_to_draws(payer: Payer, refused: Refused) -> None:
    run_id = allot(payer)
    payer.close_for_ever(box(age=(0, 10)), "steward")
    refused(lambda: payer.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: of))
    still = box(age=(10, 50), epsilon=(1.0, None))
    assert payer.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: still).charged


def rich() -> SessionTable:
    """Of records that may have the largest of all budgets."""
    budget = Budget(name="epsilon", most=1_000.0, step=MOST // 4)
    return SessionTable(name="rich", dimensions=(Integer(name="age", low=0, high=8), budget))


@pytest.mark.parametrize("seed", range(8))
def test_what_was_paid_can_be_drawn_until_the_range_is_closed(tmp_path: Path, seed: int) -> None:
    """Against a model of every point, some of which have spent the largest budget."""
    rng, table = np.random.default_rng(seed), rich()
    at_most = 0
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db", "rich")) as ledger:
        payer = Payer(ledger, table)
        spent, closed = np.zeros((8, 5), np.int64), np.zeros(8, np.bool_)
        paid: list[tuple[str, slice]] = []
        for turn in range(40):
            low = int(rng.integers(0, 7))
            ages = slice(low, int(rng.integers(low + 1, 9)))
            if rng.random() < 0.05:
                payer.close_for_ever(table.space.box(age=(ages.start, ages.stop)), "steward")
                closed[ages] = True
            else:
                read = table.space.box(age=(ages.start, ages.stop), epsilon=(1_000, None))
                amount = MOST // 4 * int(rng.integers(1, 5))
                order = Order("epsilon", amount, "ann", lambda _: read, allot=True)  # noqa: B023
                enough = (MOST - spent[ages, 4] >= amount).all() and not closed[ages].any()
                try:
                    run_id = payer.pay(f"a{turn}", order).run_id
                except SessionRefusedError:
                    assert not enough
                else:
                    assert enough
                    spent[ages, 4] += amount
                    paid.append((run_id, ages))
            assert (amounts_of(payer.spent("epsilon"))[~closed] == spent[~closed]).all()
            for number, (run_id, ages) in enumerate(paid):
                at_most += int((spent[ages, 4] == MOST).any() and not closed[ages].any())
                try:
                    payer.draw(f"{turn} {number}", run_id, "epsilon", 1, "ann", lambda _, of: of)
                    assert not closed[ages].any()
                except PolicyError:
                    assert closed[ages].any()
    assert at_most > 0


def _drawing(folder: Path, run_id: str, number: int) -> int:
    """How many of 12 draws of 50,000 one process gets."""
    got = 0
    with contextlib.closing(accounts.of_records(folder / "ledger.db")) as ledger:
        payer = Payer(ledger, PEOPLE)
        for turn in range(12):
            with contextlib.suppress(PolicyError):
                request = f"{number}-{turn}"
                payer.draw(request, run_id, "epsilon", 50_000, "a", lambda _, of: of)
                got += 1
    return got


@pytest.mark.slow
def test_processes_never_draw_more_than_was_paid(tmp_path: Path) -> None:
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        run_id = allot(Payer(ledger, PEOPLE))
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        got = pool.starmap(_drawing, [(tmp_path, run_id, n) for n in range(8)])
    assert sum(got) == 10
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        assert allotted(ledger.history().charges, PEOPLE, run_id)[1] == 500_000


def reads(orders_: int, grid: int) -> None:
    """Every read point is asked, is charged, and had enough."""
    rng, model = np.random.default_rng(0), table(grid=grid)
    sizes, seen = model.space.sizes, 0
    for number in range(orders_):
        if number % 15 == 0:
            state = Balances.first(model)
        boxes, amount = some_boxes(rng, sizes), int(rng.integers(1, 4))
        cover = ("city", "age")[: int(rng.integers(3))]
        question = order(boxes, amount, drop=True, cover=cover)
        decision, read = planned(question, state, Rules(), 0)
        inside, paid = members(boxes, sizes), members(decision.charged, sizes)
        enough = initials(model, "epsilon") - amounts_of(state.spent["epsilon"]) >= amount
        assert (members(read, sizes) == (inside & paid)).all() and (enough | ~paid).all()
        assert decision.accepted == bool(len(read)) and (decision.accepted or not paid.any())
        if decision.accepted:
            seen += 1
            spent = charge(state.spent["epsilon"], decision.charged, amount)
            state = Balances(model, spent={**state.spent, "epsilon": spent})
    assert seen > orders_ // 3


@pytest.mark.parametrize("grid", [1, 4])
def test_reads_are_asked_and_paid(grid: int) -> None:
    reads(60, grid)


def test_reading_all_that_was_asked_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_common", lambda boxes, _: boxes)
    with pytest.raises(AssertionError):
        reads(60, 1)


def test_reading_all_that_is_charged_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_common", lambda _, others: others)
    with pytest.raises(AssertionError):
        reads(60, 4)


def test_only_points_beside_the_asked_ones_have_enough() -> None:
    """Then nothing is charged, with drop too."""
    model = table()
    box = model.space.box(city=("A", "B"), initial=("0.000008", None))
    state = Balances.first(model)
    spent = charge(state.spent["epsilon"], box, 16)
    state = Balances(model, spent={**state.spent, "epsilon": spent})
    plan = planned(order(box, 1, drop=True, cover=("city",)), state, Rules(), 0)
    assert not plan.decision.accepted and not len(plan.read) and not len(plan.decision.charged)


@pytest.mark.parametrize(
    ("boxes", "more"),
    [
        (table().space.everything * 2, {}),
        (table().space.everything.astype(float), {}),
        (np.repeat(table().space.everything, 2, axis=0), {}),
        (table().space.everything, {"cover": ("none",)}),
        (table().space.everything, {"amount": 0}),
        ([[[0, float("nan")]] * 4], {}),
    ],
)
def test_orders_that_are_none(boxes: Any, more: dict[str, Any], refused: Refused) -> None:
    refused(lambda: planned(order(boxes, **more), Balances.first(table()), Rules(), 0))


def test_no_boxes_are_refused_without_a_charge() -> None:
    plan = planned(order(table().space.everything[:0]), Balances.first(table()), Rules(), 0)
    assert not plan.decision.accepted and plan.decision.largest == 0


def test_too_many_boxes_are_left(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr(orders, "MAX_QUERY_BOXES", 2)
    model = table()
    state = Balances.first(model)
    spent = charge(state.spent["epsilon"], model.space.box(age=(12, 13), city=("B", "C")), 16)
    state = Balances(model, spent={**state.spent, "epsilon": spent})
    refused(lambda: planned(order(model.space.everything, drop=True), state, Rules(), 0))


def test_views_tell_of_kinds_that_records_have(refused: Refused) -> None:
    views = Views(Balances.first(table(rho=False)), 7)
    assert views.usable == 7 and not views.spent("epsilon").amounts.any()
    refused(lambda: views.spent("rho"))


def test_a_refusal_says_what_would_pass() -> None:
    model = table()
    box = model.space.box(initial=("0.000008", None))
    plan: Planned = planned(order(box, 9), Balances.first(model), Rules(), 0)
    error = SessionRefusedError(plan.decision)
    assert "at most 8e-06" in error.fix and "in 1 box" in error.rule and error.exit_code == 3
    make, given = error.__reduce__()  # as it comes back from another process
    assert make(*given).args == error.args and make(*given).decision.largest == 8
    rules = Rules(quotas=Quotas(epsilon={"ann": 5}))
    own = Balances.first(model).with_own(("epsilon", "ann"), [])
    assert planned(order(box, 9), own, rules, 0).decision.largest == 5


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_of_analysts(name: str, refused: Refused) -> None:
    check_analyst("ann " + "x" * 190)
    refused(lambda: check_analyst(name))
