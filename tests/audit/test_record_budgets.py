"""What all answers of a session tell of a few records, against their initial budgets, exactly.

Tiny databases that differ in some records, which come, go and come again at any time; an analyst
who chooses each query by the answers before it; counts with two-sided geometric noise of the
charged amount.  On a path of answers the account decides the same for both databases, and

    ln p0/p1 = sum over queries of amount (|answer - count1| - |answer - count0|)

is known without a sample.  It must stay within the sum of the differing records' budgets, and come
near it on some path.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.regions import space
from dpstream.accounting.regions import spent as coarsening
from dpstream.accounting.regions import spent as spending
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.sessions.table import Quotas, Rules, SessionTable
from dpstream.state.ledger import balances, orders
from dpstream.state.ledger.orders import Order, SessionRefusedError, Views
from tests import accounts
from tests.state.ledger.region_conformance import Payer

STEP = 500_000
RULES = Rules(quotas=Quotas(epsilon={"bob": 1_500_000}))


def table(grid: int, cap: int) -> SessionTable:
    return SessionTable(
        name="tiny",
        dimensions=(
            Integer(name="x", low=0, high=8, grid=grid),
            Integer(name="y", low=0, high=3),
            Budget(name="initial", most=2.0, step=STEP),
        ),
        cap=cap,
    )


class Records:
    """Some records, half of them the differing ones: when each database holds them."""

    def __init__(self, rng: np.random.Generator, model: SessionTable, steps: int) -> None:
        many = 14
        self.budgets: Float64 = rng.choice([0.3, 0.99, 1.0, 1.49, 1.99, 2.0, 2.3], many)
        columns = {
            "x": rng.integers(0, 8, many), "y": rng.integers(0, 3, many), "initial": self.budgets,
        }  # fmt: skip
        columns["x"][0], self.budgets[0] = 1, rng.choice([1.99, 2.0])
        self.at, _ = model.space.coordinates(columns)
        self.differ = np.arange(many) < int(rng.integers(1, 3))
        held = rng.random((2, steps, many)) < 0.6
        held[1, :, ~self.differ] = held[0, :, ~self.differ]
        for one in np.flatnonzero(self.differ):
            if rng.integers(4):  # always there, or never
                held[:, :, one] = [[True], [False]]
        self.held: Bool = held

    def counts(self, step: int, boxes: Int64) -> list[int]:
        """How many usable records of each database are read."""
        inside = np.zeros(len(self.at), np.bool_)
        for box in boxes:
            inside |= ((self.at >= box[:, 0]) & (self.at < box[:, 1])).all(axis=1)
        return [int((inside & held[step]).sum()) for held in self.held]


def query(rng: np.random.Generator, model: SessionTable, answers: list[int]) -> Order:
    """The next one, by the answers so far."""
    pick = np.random.default_rng([abs(a) * 2 + (a < 0) for a in answers] + [int(rng.integers(9))])
    box = model.space.everything.copy()
    box[0, 0] = pick.integers(0, 4), pick.integers(5, 9)
    box[0, 1, 0] = pick.integers(0, 2)
    amount = int(pick.choice([250_000, 500_000]))
    cover = ("y",) * bool(pick.integers(2))
    kind = int(pick.integers(5))
    if kind < 2:  # a narrow one beside the grid, refused or answered as a whole
        box[0, 0] = 1, 3
        box[0, 2, 0] = 4
        return Order("epsilon", amount, "ann", lambda _: box)
    if kind < 4:
        return Order("epsilon", amount, "ann", lambda _: box, drop=True, cover=cover)

    def left(views: Views) -> Any:
        """Where little was spent so far, by a predicate on consumption."""
        spent = views.spent("epsilon")
        return np.asarray(spent.boxes)[spent.amounts < 600_000]

    return Order("epsilon", amount, "bob", left, drop=True)


def paths(folder: Path, many: int, grid: int = 1, cap: int = 1_000, steps: int = 12) -> list[float]:
    """|ln p0/p1| as a part of the bound, on so many paths of answers."""
    ratios = []
    for number in range(many):
        rng, model = np.random.default_rng(number), table(grid, cap)
        records, answers, loss = Records(rng, model, steps), list[int](), 0.0
        ledger = accounts.unsynced(
            accounts.of_records(folder / f"{grid} {cap} {number}.db", "tiny")
        )
        account, lean = Payer(ledger, model, RULES), int(rng.choice(3, p=[0.4, 0.4, 0.2]))
        for step in range(steps):
            question = query(rng, model, answers)
            try:
                paid = account.pay(f"{step}", question)
            except SessionRefusedError:
                answers.append(0)
                continue
            zero, one = records.counts(step, paid.region.read)
            answers.append((-3, max(zero, one) + 3, int(rng.integers(-3, 9)))[lean])
            loss += question.amount / MICRO * (abs(answers[-1] - one) - abs(answers[-1] - zero))
        ledger.close()
        ratios.append(abs(loss) / float(records.budgets[records.differ].sum()))
    return ratios


def within(folder: Path) -> None:
    """No path tells more, whatever the grid and the cap; some tell nearly all."""
    for grid, cap in ((1, 1_000), (3, 1_000), (1, 5)):
        ratios = paths(folder, 14, grid, cap)
        assert max(ratios) <= 1 + 1e-9 and max(ratios) > 0.8


def test_no_path_of_answers_tells_more_than_the_budgets(tmp_path: Path) -> None:
    within(tmp_path)


@pytest.mark.slow
def test_no_path_of_very_many(tmp_path: Path) -> None:
    for number, (grid, cap) in enumerate(((1, 1_000), (2, 1_000), (2, 6), (3, 9))):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        assert max(paths(folder, 500, grid, cap, 14)) <= 1 + 1e-9


def inward(space: Any, boxes: Int64) -> Int64:
    """Sabotaged: the low edge moves to the grid line inside."""
    snapped_boxes = boxes.copy()
    grid = space.grids[0]
    snapped_boxes[:, 0, 0] = np.minimum(-(-boxes[:, 0, 0] // grid) * grid, boxes[:, 0, 1] - 1)
    return snapped_boxes


def skipping(real: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def moved(spent: Any, *rest: Any) -> Any:
        calls[0] += 1
        return spent if calls[0] % 3 == 0 else real(spent, *rest)

    return moved


@pytest.mark.parametrize(
    ("where", "name", "worse"),
    [
        (spending, "outward", inward),
        (coarsening, "joined", np.minimum),
        (space, "initials_of", lambda v: (np.ceil(v * 2).astype(np.int64) * STEP, v >= 0)),
        (balances, "moved", skipping(balances.moved)),
        (orders, "_common", lambda boxes, _: boxes),
    ],
)
def test_sabotage_tells_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, worse: Any
) -> None:
    monkeypatch.setattr(where, name, worse)
    with pytest.raises(AssertionError):
        within(tmp_path)
