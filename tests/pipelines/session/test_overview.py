"""The overview: what points have spent, at most and at least, and what is closed."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.regions.charging import ask, close
from dpstream.accounting.regions.spent import Spent, untouched
from dpstream.pipelines.session.ask import close_before
from dpstream.pipelines.session.overview import (
    PIXELS,
    heat_map,
    kinds,
    over_time,
    overview,
    transcript,
)
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.events import RegionCharge
from tests.pipelines.session.people import DAY, PEOPLE, START, box
from tests.pipelines.session.small import config_at

QUOTA = "\n[table.small.quota]\nepsilon = 1.5\n"


def test_what_is_left(tmp_path: Path) -> None:
    with Session(config_at(tmp_path, more=QUOTA), analyst="alice") as session:
        session.where("a < 2 AND epsilon >= 1").count(0.5)
        session.where("a = 1 AND epsilon >= 1").count(0.25)
        summary = overview(session.open_table, session.table.selection)
        assert summary["entries"] == 2 and set(summary["budgets"]) == {"epsilon", "rho"}
        part = summary["budgets"]["epsilon"]
        assert (part["most_spent"], part["least_spent"], part["most_initial"]) == (0.75, 0, 2)
        assert part["rows"][0] == {"where": "a = 1 AND epsilon >= 1", "spent": 0.75}
        assert summary["quotas"] == {
            "epsilon": {"analyst": "alice", "quota": 1.5, "most_charged": 0.75}
        }
        part_summary = overview(
            session.open_table, session.where("a = 0 AND epsilon >= 1").selection
        )
        assert part_summary["budgets"]["epsilon"]["least_spent"] == 0.5
        close_before(session.open_table, "b", 3)
        part = overview(session.open_table, session.table.selection)["budgets"]["epsilon"]
        assert part["most_spent"] == 0.75 and part["closed_boxes"] == 1
        assert part["rows"][0] == {"where": "b < 3", "spent": None}
        closed = overview(session.open_table, session.where("b = 0").selection)["budgets"][
            "epsilon"
        ]
        assert closed["most_spent"] == 0 and closed["closed_boxes"] == 1
        with pytest.raises(UsageError, match="true nowhere"):
            overview(session.open_table, session.where("a < 0").selection)


SPACE = PEOPLE.space


def charged() -> tuple[Spent, list[tuple[str, RegionCharge]]]:
    spent, history = untouched(SPACE, "epsilon"), []
    for number, (boxes, amount) in enumerate((
        (box(age=(20, 60)), 300_000),
        (box(age=(30, 50), weight=(50, 100)), 500_000),
        (box(weight=(80, 120)), 1_200_000),
        (box(age=(10, 20), arrived=(START, None)), 2_000_000),
    )):  # fmt: skip
        decision, spent = ask(spent, boxes, amount, drop=True)
        entry = RegionCharge.of(
            "epsilon", amount, decision.charged, decision.charged, "a", START + number
        )
        history.append((f"{number:032x}", entry))
    return spent, history


def most(spent: Spent, frame: np.ndarray) -> int:
    """The most that a point of a box has spent, region by region."""
    return max(
        int(amount) for one, amount in zip(spent.boxes, spent.amounts, strict=True)
        if ((one[:, 0] < frame[:, 1]) & (one[:, 1] > frame[:, 0])).all()
    )  # fmt: skip


@pytest.mark.parametrize("initial", [None, 2_000_000, 300_000])
def test_a_map_is_the_least_over_the_others(initial: int | None) -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "weight", initial)
    at = 4_000_000 if initial is None else initial
    assert heat.left.shape == (PIXELS, 101) and heat.initial == at / 1e6
    rng = np.random.default_rng(3)
    for _ in range(200):
        row, column = rng.integers(heat.left.shape[0]), rng.integers(heat.left.shape[1])
        frame = SPACE.everything[0].copy()
        frame[0], frame[2] = heat.columns[[column, column + 1]], heat.rows[[row, row + 1]]
        frame[4] = at, at + 1
        assert heat.left[row, column] == max(at - most(spent, frame), 0) / 1e6
    assert len(np.unique(heat.left)) > 1


def test_the_initial_budget_as_a_side() -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "epsilon")
    assert heat.initial is None and (heat.left >= 0).all()
    frame = SPACE.everything[0].copy()
    frame[0], frame[4] = (15, 16), heat.rows[[-2, -1]]
    assert heat.left[-1, 15] == (heat.rows[-2] - most(spent, frame)) / 1e6
    turned = heat_map(spent, "epsilon", "age")
    assert np.array_equal(turned.left.T, heat.left)


def test_a_part_of_the_space() -> None:
    spent, _ = charged()
    heat = heat_map(spent, "age", "smoker", within=box(age=(70, 90), weight=(0, 50))[0])
    assert heat.left.shape == (2, 20) and (heat.left == 4).all()


def test_what_is_no_map() -> None:
    spent, _ = charged()
    with pytest.raises(UsageError, match="two dimensions"):
        heat_map(spent, "age", "age")
    with pytest.raises(UsageError, match="no dimension 'nothing'"):
        heat_map(spent, "age", "nothing")
    with pytest.raises(UsageError, match="--epsilon"):
        heat_map(spent, "age", "weight", 5_000_000)


def test_spending_over_time() -> None:
    spent, history = charged()
    moments = over_time(PEOPLE, "epsilon", history)
    assert [moment.at for moment in moments] == [START + n for n in range(4)]
    assert [moment.most for moment in moments] == [0.3, 0.8, 2.0, 3.2]
    assert moments[-1].regions == len(spent.amounts)
    means = [moment.mean for moment in moments]
    assert means == sorted(means) and 0 < means[0] < moments[0].most
    assert over_time(PEOPLE, "rho", history) == [] and kinds(SPACE) == ["epsilon", "rho"]


def test_closed_points_are_left_out() -> None:
    spent, _ = charged()
    shut = close(spent, box(arrived=(START, START + 5 * DAY)))
    for by in (("age", "weight"), ("age", "epsilon")):
        assert np.array_equal(heat_map(shut, *by).left, heat_map(spent, *by).left)
    budget_left = heat_map(shut, "arrived", "age").left
    assert np.isnan(budget_left[:, :5]).all() and not np.isnan(budget_left[:, 5:]).any()


def test_every_entry_is_what_it_is(tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:
        session.where("a = 0 AND epsilon >= 1").histogram("b", 0.5, [0, 5, 10])
        session.open_table.analyst = "bob"
        allotment = session.where("a = 1 AND rho >= 0.5").as_pinq(0.5, "rho")
        allotment.where("b < 5").sum("b", 0.25)
        close_before(session.open_table, "b", 1)

        def gone() -> None:
            raise RunError("table", "is gone", "bring it back")

        session.open_table.scan = gone  # type: ignore[assignment,method-assign]
        with contextlib.suppress(RunError):
            session.where("a = 2 AND b >= 1 AND epsilon >= 1").count(0.25)
        lines = transcript(session.open_table)
    assert [(line.what, line.analyst, line.kind, line.amount) for line in lines] == [
        ("question", "alice", "epsilon", 500_000),
        ("allotment", "bob", "rho", 500_000),
        ("draw", "bob", "rho", 250_000),
        ("closed", "bob", "", 0),
        ("cut off", "bob", "epsilon", 250_000),
    ]
    assert lines[0].question == "count by b (2)" and lines[2].question == "sum(b)"
    assert lines[0].where == ["a = 0 AND b IS NOT NULL AND epsilon >= 1"]
    assert lines[2].where == ["a = 1 AND b < 5 AND rho >= 0.5"] and lines[3].where == ["b = 0"]
    assert lines[2].allotment == lines[1].run_id and lines[0].allotment == ""
    assert bool(lines[0].answered) and not lines[1].answered and not lines[4].answered
    assert lines[0].as_dict()["amount"] == 0.5
