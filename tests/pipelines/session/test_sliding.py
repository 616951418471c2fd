"""SlidingQuestion queries: windows slide when their budget is gone; closed ranges stay closed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import Question
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.sliding import (
    SlidingQuestion,
    _gap,
    arrival_of,
    cells_wide,
    close_before,
    tick,
)
from dpstream.state.ledger.orders import SessionRefusedError
from tests.pipelines.session.small import config_at

QUESTION = Question(kind="epsilon", amount=400_000)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(config_at(tmp_path), analyst="alice") as session:
        yield session


def sliding_question(
    session: Session, where: str = "epsilon >= 1", width: int = 2
) -> SlidingQuestion:
    chosen = Selection(session.open_table.space).where(where)
    return SlidingQuestion(QUESTION, chosen, "b", width)


def windows(session: Session) -> list[list[int]]:
    history = session.open_table.account.history()
    return [charge.read[0, 1].tolist() for _, charge in history if len(charge.read)]


def test_the_window_stays_while_it_has_budget_and_then_slides(session: Session) -> None:
    for number in range(6):
        assert tick(session.open_table, sliding_question(session), 6, f"t{number}").charged
    assert windows(session) == [[0, 2], [0, 2], [2, 4], [2, 4], [4, 6], [4, 6]]
    with pytest.raises(PolicyError, match="no window"):
        tick(session.open_table, sliding_question(session), 6, "t6")
    assert tick(session.open_table, sliding_question(session), 8, "t6").charged  # newer arrivals
    assert windows(session)[-1] == [6, 8]


def test_a_tick_is_answered_once(session: Session) -> None:
    query, wider = (sliding_question(session, "epsilon >= 2", width) for width in (2, 3))
    first = tick(session.open_table, query, 6, "monday")
    again = tick(session.open_table, query, 8, "monday")
    assert first.charged and not again.charged and again.receipt == first.receipt
    assert tick(session.open_table, query, 6, "tuesday").charged
    # A question of that label, and a window of another width, are other questions.
    assert session.where("epsilon >= 2").count("0.4", as_of="monday").charged
    assert tick(session.open_table, wider, 8, "monday").charged


def test_others_spend_budget_too(session: Session) -> None:
    session.where("b = 1 AND epsilon >= 1").count(1)
    tick(session.open_table, sliding_question(session), 10, "a")
    assert windows(session)[-1] == [2, 4]
    session.where("b = 2 AND epsilon >= 2").count(1.5)
    tick(session.open_table, sliding_question(session), 10, "b")
    assert windows(session)[-1] == [3, 5]


def test_gaps() -> None:
    ranges = np.array([[8, 9], [0, 2], [3, 4], [3, 6]])
    assert _gap(ranges, 0, 20, 1, 1) == 2
    assert _gap(ranges, 0, 20, 2, 1) == 6
    assert _gap(ranges, 0, 20, 3, 1) == 9 and _gap(ranges, 0, 11, 3, 1) is None
    assert _gap(ranges, 0, 20, 5, 5) == 10 and _gap(ranges[:0], 0, 5, 5, 5) == 0


def test_a_closed_range_refuses_every_query_for_ever(session: Session) -> None:
    answer = session.where("b < 4 AND epsilon >= 1").count(0.5)
    allotment = session.where("b < 6 AND epsilon >= 1").as_pinq(0.5)
    assert close_before(session.open_table, "b", 4) and not close_before(session.open_table, "b", 4)
    for where in ("b < 4 AND epsilon >= 1", "b = 0 AND epsilon = 2", "b = 3 AND epsilon = 2"):
        with pytest.raises(SessionRefusedError):
            session.where(where).count("0.000001")
    with pytest.raises(PolicyError, match="closed for ever"):
        allotment.count(0.25)
    assert allotment.where("b >= 4").count(0.25).charged
    tick(session.open_table, sliding_question(session), 8, "t")
    assert windows(session)[-1][0] >= 4
    assert session.where("b < 4 AND epsilon >= 1").count(0.5).receipt == answer.receipt
    assert len(session.open_table.account.spent("epsilon").boxes) <= 8


def test_what_is_no_arrival(session: Session) -> None:
    with pytest.raises(UsageError, match="--arrival"):
        arrival_of(session.open_table.space, "epsilon")
    with pytest.raises(UsageError, match="--before"):
        close_before(session.open_table, "b", 0)
    with pytest.raises(UsageError, match="--width"):
        cells_wide(session.open_table.space, "b", 0)


@pytest.mark.parametrize("name", ["", "a\nb", "\udc80", "t" * 201])
def test_a_tick_has_a_printable_name(name: str, session: Session) -> None:
    with pytest.raises(UsageError, match="--tick: must be a short printable name"):
        tick(session.open_table, sliding_question(session), 6, name)
