"""Allotments: draws never add up to more than was paid, and nothing else can be drawn on."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.amounts import MOST
from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.events import RegionCharge
from dpstream.state.ledger.orders import Order, SessionRefusedError
from dpstream.state.ledger.regions import allotted
from tests import accounts
from tests.accounting.regions.spaces import amounts_of
from tests.pipelines.session.people import PEOPLE, box
from tests.state.ledger.region_conformance import Payer

YOUNG = box(age=(0, 50), epsilon=(1.0, None))


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Payer]:
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        yield Payer(ledger, PEOPLE)


def allot(account: Payer, amount: int = 500_000, request: str = "a") -> str:
    order = Order("epsilon", amount, "alice", lambda _: YOUNG, allot=True)
    return account.pay(request, order).run_id


def test_an_entry_of_a_session_has_one_date(account: Payer, tmp_path: Path) -> None:
    run_id = allot(account)
    account.draw("d", run_id, "epsilon", 200_000, "alice", lambda _, of: of)
    charges = accounts.charges(tmp_path / "ledger.db")
    assert len(charges) == 2
    for charge in charges:
        assert isinstance(charge.regions, RegionCharge)
        assert charge.at is msgspec.UNSET and charge.instant == charge.regions.at


def test_draws_use_it_up_and_charge_no_point(account: Payer) -> None:
    run_id = allot(account)
    spent = account.spent("epsilon")
    for number, amount in enumerate((200_000, 300_000)):
        paid = account.draw(f"d{number}", run_id, "epsilon", amount, "alice", lambda _, of: of)
        assert paid.charged and paid.region.draws_on == run_id
        assert np.array_equal(paid.region.read, YOUNG) and not len(paid.region.boxes)
    assert np.array_equal(account.spent("epsilon").boxes, spent.boxes)
    assert np.array_equal(account.spent("epsilon").amounts, spent.amounts)
    with pytest.raises(PolicyError, match="has 0 left"):
        account.draw("d2", run_id, "epsilon", 1, "alice", lambda _, of: of)
    # The same request is the same draw, free; and so it stays for another reader.
    assert not account.draw("d0", run_id, "epsilon", 200_000, "bob", lambda _, of: of).charged
    other = Payer(account._ledger, PEOPLE)
    charges = account._ledger.history().charges
    assert allotted(charges, PEOPLE, run_id)[1] == 500_000
    assert np.array_equal(other.spent("epsilon").amounts, spent.amounts)
    # What a draw states beside its allotment is nothing: the allotment stated all of it.
    assert [c.epsilon for c in charges] == [0.5, 0.0, 0.0]


def test_nothing_is_drawn_on_a_question(account: Payer) -> None:
    order = Order("epsilon", 500_000, "alice", lambda _: YOUNG)
    question_id = account.pay("q", order).run_id
    for run_id in (question_id, "0" * 32):
        with pytest.raises(PolicyError, match="not in the account"):
            account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: of)
    drawn = account.draw("d", allot(account), "epsilon", 100_000, "alice", lambda _, of: of).run_id
    with pytest.raises(PolicyError, match="not in the account"):
        account.draw("e", drawn, "epsilon", 1, "alice", lambda _, of: of)


def test_epsilon_pays_for_no_gaussian_noise(account: Payer) -> None:
    with pytest.raises(PolicyError, match="paid with epsilon"):
        account.draw("d", allot(account), "rho", 1, "alice", lambda _, of: of)


def test_a_draw_reads_within_its_allotment(account: Payer) -> None:
    run_id = allot(account)
    outside = box(age=(40, 60), epsilon=(1.0, None))
    with pytest.raises(UsageError, match="reaches out"):
        account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: outside)
    with pytest.raises(UsageError, match="true nowhere"):
        account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: of[:0])
    inside = box(age=(40, 50), epsilon=(1.0, None))
    assert account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: inside).charged


def test_a_closed_range_is_closed_to_draws(account: Payer) -> None:
    run_id = allot(account)
    account.close_for_ever(box(age=(0, 10)), "steward")
    with pytest.raises(PolicyError, match="closed for ever"):
        account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: of)
    still = box(age=(10, 50), epsilon=(1.0, None))
    assert account.draw("d", run_id, "epsilon", 1, "alice", lambda _, of: still).charged


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
        account = Payer(ledger, table)
        spent, closed = np.zeros((8, 5), np.int64), np.zeros(8, np.bool_)
        paid: list[tuple[str, slice]] = []
        for turn in range(40):
            low = int(rng.integers(0, 7))
            ages = slice(low, int(rng.integers(low + 1, 9)))
            if rng.random() < 0.05:
                account.close_for_ever(table.space.box(age=(ages.start, ages.stop)), "steward")
                closed[ages] = True
            else:
                read = table.space.box(age=(ages.start, ages.stop), epsilon=(1_000, None))
                amount = MOST // 4 * int(rng.integers(1, 5))
                order = Order("epsilon", amount, "ann", lambda _: read, allot=True)  # noqa: B023
                enough = (MOST - spent[ages, 4] >= amount).all() and not closed[ages].any()
                try:
                    run_id = account.pay(f"a{turn}", order).run_id
                except SessionRefusedError:
                    assert not enough
                else:
                    assert enough
                    spent[ages, 4] += amount
                    paid.append((run_id, ages))
            assert (amounts_of(account.spent("epsilon"))[~closed] == spent[~closed]).all()
            for number, (run_id, ages) in enumerate(paid):
                at_most += int((spent[ages, 4] == MOST).any() and not closed[ages].any())
                try:
                    account.draw(f"{turn} {number}", run_id, "epsilon", 1, "ann", lambda _, of: of)
                    assert not closed[ages].any()
                except PolicyError:
                    assert closed[ages].any()
    assert at_most > 0


def _drawing(folder: Path, run_id: str, number: int) -> int:
    """How many of 12 draws of 50,000 one process gets."""
    got = 0
    with contextlib.closing(accounts.of_records(folder / "ledger.db")) as ledger:
        account = Payer(ledger, PEOPLE)
        for turn in range(12):
            with contextlib.suppress(PolicyError):
                request = f"{number}-{turn}"
                account.draw(request, run_id, "epsilon", 50_000, "a", lambda _, of: of)
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
