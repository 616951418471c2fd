"""Plans: what a question would be told, with nothing spent and no record read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.sessions.aggregates import COUNT, average, median
from dpstream.pipelines.render.question_plan import session_text
from dpstream.pipelines.session import plan as planning
from dpstream.pipelines.session import union as unions
from dpstream.pipelines.session.session import Session
from tests.pipelines.session.small import config_at


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(config_at(tmp_path), analyst="alice") as session:
        yield session


def plan_of(
    session: Session, where: str, amount: float, *figures: Any, union: bool = False, **how: Any
) -> Any:
    request = session.where(where).request(figures or (COUNT,), amount, **how)
    return planning.plan(session.open_table, request, union)


def fields_of(session: Session, plan: Any) -> dict[str, Any]:
    """The plan as values for JSON."""
    return planning.as_builtins(session.open_table.space, plan)


def lines_of(session: Session, plan: Any) -> list[str]:
    """The plan as text."""
    return session_text(fields_of(session, plan)).splitlines()


def test_a_plan_spends_and_reads_nothing(session: Session) -> None:
    def never() -> None:
        raise AssertionError("a record was read")

    session.open_table.scan = never  # type: ignore[assignment,method-assign]
    plan = plan_of(session, "epsilon >= 1", 0.5, COUNT, average("b"), median("b"))
    assert plan.decision.accepted and len(plan.errors) == 3 and plan.answered == ""
    assert (plan.regions, plan.after) == (1, 2) and session.open_table.account.history() == []
    fields = fields_of(session, plan)
    assert fields["errors"][0]["within"] > fields["errors"][0]["sd"] > 0
    text = "\n".join(lines_of(session, plan))
    assert "records of rank" in text and "/ records" in text and "epsilon 0.5" in text


def test_the_error_is_that_of_the_answer(session: Session) -> None:
    plan = plan_of(session, "epsilon >= 1", 0.5)
    answer = session.where("epsilon >= 1").count(0.5)
    assert answer.sd == pytest.approx(plan.errors[0].sd[0])


def test_a_refusal_is_foreseen(session: Session) -> None:
    plan = plan_of(session, "a = 0", 0.5)
    assert not plan.decision.accepted and plan.errors == []
    assert plan.enough == "epsilon >= 0.5" and any(
        plan.enough in line for line in lines_of(session, plan)
    )
    assert plan_of(session, f"a = 0 AND {plan.enough}", 0.5).decision.accepted
    dropped = plan_of(session, "a = 0", 0.5, drop=True)
    assert dropped.decision.accepted and any("Dropped" in s for s in lines_of(session, dropped))


def test_what_is_free_is_said(session: Session) -> None:
    rich = session.where("epsilon >= 1")
    rich.histogram("a", 0.5)
    plan = plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert plan.union is not None and plan.union.parts == 4 and not plan.answered
    rich.count(0.25)
    assert plan_of(session, "epsilon >= 1", 0.25).answered
    text = "\n".join(lines_of(session, plan_of(session, "epsilon >= 1", 0.25, union=True)))
    assert "asking it again is free" in text and "--union" in text


def test_a_plan_decodes_no_answer_unless_a_union_is_asked(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.where("epsilon >= 1").histogram("a", 0.5)
    decoded: list[object] = []
    monkeypatch.setattr(unions, "decoded", lambda *given: decoded.append(given))
    plan = plan_of(session, "epsilon >= 1", 0.25)
    assert plan.decision.accepted and plan.union is None and not plan.searched and not decoded
    assert fields_of(session, plan)["union_searched"] is False
    with pytest.raises(AttributeError):  # the check can fail: this one decodes
        plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert decoded


def test_a_search_without_a_result_says_so(session: Session) -> None:
    session.where("epsilon >= 1 AND a < 2").count(0.25)
    plan = plan_of(session, "epsilon >= 1", 0.25, union=True)
    assert plan.searched and plan.union is None
    assert len(lines_of(session, plan)) == 1 + len(
        lines_of(session, plan_of(session, "epsilon >= 1", 0.25))
    )


def test_what_cover_wastes_is_said(session: Session) -> None:
    plan = plan_of(session, "a = 0 AND epsilon >= 1", 0.5, cover=("a",))
    assert plan.waste == pytest.approx(4)
    assert any("4 times what is asked" in line for line in lines_of(session, plan))
