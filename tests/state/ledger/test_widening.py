"""An account in a wider space: what is refused; the rest is a scenario of every kind of account
(`region_conformance.widens`)."""

import contextlib
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.space import Budget, Category
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.widening import widen, widened
from tests import accounts
from tests.state.ledger.region_conformance import WIDER, Payer, order, table


def test_tables_that_do_not_fit() -> None:
    wider = SessionTable(name="people", dimensions=WIDER)
    for old, new in ((table(), SessionTable(name="others", dimensions=WIDER)), (table(), table()),
                     (wider, table())):  # fmt: skip
        with pytest.raises(UsageError):
            widened(old, new)
    assert widened(table(), wider).new == wider.digest


def test_the_account_of_another_table(tmp_path: Path) -> None:
    wider = SessionTable(name="people", dimensions=WIDER)
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        other = table(grid=2)
        Payer(ledger, other).pay("a", order(other.space.box(initial=("0.000008", None))))
        before = ledger.head()
        with pytest.raises(PolicyError):
            widen(ledger, table(), wider)
        assert ledger.head() == before
        assert widen(ledger, other, wider) == 1
        with pytest.raises(PolicyError):  # it is the other's no more
            widen(ledger, other, SessionTable(name="people", dimensions=(*WIDER, MORE)))


MORE = Category(name="more", codes=("x",))


def test_a_charge_that_would_have_too_many_boxes_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    codes = tuple(f"{n:02d}" for n in range(60))
    apart = tuple(part for code in codes for part in (code, f"new {code}"))
    budget = Budget(name="initial", most=1.0)

    def model(of: tuple[str, ...]) -> SessionTable:
        sides = [Category(name=name, codes=of) for name in ("c", "d", "e")]
        return SessionTable(name="people", dimensions=(*sides, budget))

    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        old = model(codes)
        Payer(ledger, old).pay("a", order(old.space.box(initial=(0.5, None))))
        before = ledger.head()
        with pytest.raises(UsageError):
            widen(ledger, old, model(apart))
        assert ledger.head() == before
