"""What a choice may look at of an account."""

import contextlib
import functools
from pathlib import Path

from dpstream.accounting.query.calibration import Cost
from dpstream.pipelines.ask.limit import limit_of
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import read_history
from tests import accounts


def charge(name: str, mu: float | None, epsilon: float = 1.0) -> Charge:
    return Charge(32 * name, "p", accounts.USER, epsilon, 1e-9, mu, 0.0, kind="frame")


def test_the_limit_and_all_charges(tmp_path: Path) -> None:
    path, spent = tmp_path / "ledger.db", [charge("a", 0.5), charge("b", None)]
    place = accounts.create(path, "visits", (8.0, 1e-5))
    with contextlib.closing(accounts.opened(path)) as ledger:
        for one in spent:
            ledger.transact(functools.partial(ledger.append, one))
    limit = limit_of(read_history(place))
    assert limit is not None and limit[1:] == (8.0, 1e-5)
    assert limit.total.spends == 2 and limit.total.plain == 1 and limit.total.gauss == 0.25
    more = limit_of(read_history(place), [charge("c", None, 2.5)])
    assert more is not None and more.total.plain == 3.5
    plain = Cost(1.0, 0.0, None, 0.0)
    assert limit.holds(plain) - more.holds(plain) in (2, 3)


def test_without_a_limit_there_is_none() -> None:
    assert limit_of(History()) is None
