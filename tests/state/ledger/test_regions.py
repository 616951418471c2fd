"""The account of regions on SQLite and Spanner: every scenario, many processes, sabotaged twins."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.regions import charging as coarsening
from dpstream.accounting.regions import space
from dpstream.accounting.regions import spent as spending
from dpstream.state.ledger import balances
from dpstream.state.ledger.balances import Balances
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import open_path
from dpstream.state.ledger.orders import Order, SessionRefusedError, Views
from tests import accounts, emulator
from tests.accounting.regions.spaces import amounts_of, members, some_boxes
from tests.accounting.regions.test_spent import inward
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


def test_decided_again_when_overtaken(url: str) -> None:
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

        with pytest.raises(SessionRefusedError):
            one.pay("asked", Order("epsilon", 6, "ann", resolve))
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
