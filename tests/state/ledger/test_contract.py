"""Rules of every account, and who may name a kind of storage."""

import re
from pathlib import Path

import pytest

from dpstream.accounting.composition import epsilon_spent
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger.contract import Ledger
from tests import accounts
from tests.state.ledger.conformance import charge


def test_spent_fits_and_check(ledger: Ledger) -> None:
    ledger.set_limit(accounts.LIMIT)
    for run in (1, 2):
        ledger.charge(charge(run))
    [piece] = ledger.history().spent.pieces
    assert epsilon_spent(piece.total, 1e-6) == epsilon_spent([charge(1), charge(2)], 1e-6)
    ledger.history().check([charge(3)])
    with pytest.raises(PolicyError, match="2 charges before"):
        ledger.history().check([charge(3, 4.4)])
    with pytest.raises(PolicyError, match="another privacy unit"):
        ledger.history().check([charge(3, unit=UnitIdentity("other", "string").text)])
    assert len(ledger.entries()) == 2


def test_no_caller_names_a_kind_of_ledger() -> None:
    """Another one joins in `state.ledger.open` alone."""
    root = Path(__file__).parents[3]
    inside = root / "state" / "ledger"
    named = re.compile(r"AccountStorage|ledger(?:\.| import )(?:sqlite|spanner|log)\b")
    for package in ("accounting", "state", "dp_transforms", "pipelines"):
        for path in (root / package).rglob("*.py"):
            if path.parent != inside:
                assert not named.search(path.read_text()), path
    assert named.search((inside / "open.py").read_text())
