"""Answers that are joined into unions: counts and sums of disjoint parts, free."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.pipelines.session.union import Part, assembled, joined
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.statements import Session
from tests.sessions import average, sum_of


def test_parts_of_batches_and_questions_are_added_up(session: Session) -> None:
    rich = session.where("epsilon >= 1 AND b IS NOT NULL")
    cells = rich.ask((COUNT, sum_of("b")), 0.25, {"a": None})
    one = rich.where("a = 3").count(0.5)
    entries = len(session.open_table.account.history())
    union = session.where("a >= 1 AND epsilon >= 1 AND b IS NOT NULL").union()
    counts, sds = cells.column("count"), cells.column("count", "sd")
    # The part of the larger budget has less noise.
    assert one.value is not None and one.sd is not None
    assert union.value == pytest.approx(counts[1] + counts[2] + one.value)
    assert union.sd == pytest.approx(np.sqrt(sds[1] ** 2 + sds[2] ** 2 + one.sd**2))
    assert union.low < union.value < union.high and union.parts == 3
    assert len(union.run_ids) == 2 and union.first <= union.last
    total = session.where("epsilon >= 1 AND b IS NOT NULL").union(sum_of("b"))
    assert total.value == pytest.approx(sum(cells.column("sum_b")))
    assert len(session.open_table.account.history()) == entries  # free


def test_only_answers_that_read_some_of_it_are_looked_up(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for a in range(3):
        session.where(f"epsilon >= 1 AND a = {a}").count(0.25)
    looked, read = list[str](), session.open_table.answers.read

    def noting(run_id: str) -> Any:
        looked.append(run_id)
        return read(run_id)

    monkeypatch.setattr(session.open_table.answers, "read", noting)
    union = assembled(
        session.open_table, session.where("epsilon >= 1 AND a >= 1 AND a < 3").boxes(), COUNT
    )
    assert tuple(looked) == union.run_ids and len(looked) == 2


def test_an_allotment_is_no_part_of_it(session: Session, refused: Refused) -> None:
    """Its receipt has no figure: what was drawn on it has."""
    points = session.where("a = 1 AND epsilon >= 1")
    allotment = points.as_pinq(0.5)
    refused(points.union)
    drawn = allotment.count(0.25)
    assert points.union().run_ids == (drawn.header.run_id,)


def test_what_is_not_covered_is_named(session: Session) -> None:
    part = session.where("epsilon >= 1 AND a < 2")
    part.count(0.5)
    calls: dict[str, Callable[[], object]] = {
        "more": lambda: session.where("epsilon >= 1").union(),
        "a part of an answer": lambda: session.where("epsilon >= 1 AND a < 1").union(),
        "another figure": lambda: part.union(sum_of("b")),
        "an average": lambda: part.union(average("b")),
        "nobody": lambda: session.where("a < 0").union(),
        "no budget": lambda: session.where("epsilon < 0.25 AND rho < 0.25").union(),
    }
    check(Path(__file__).with_name("refusals_unions.txt"), of_refusals(calls))


def test_points_without_a_budget_are_not_missed(session: Session, refused: Refused) -> None:
    """No question can ask them, so no answer has them; those with the other budget are asked."""
    poor = session.where("rho < 0.25")
    answer = poor.count(0.25)
    again = poor.union()
    assert (again.value, again.run_ids) == (answer.value, (answer.header.run_id,))
    session.table.count(0.25, drop=True)
    refused(session.table.union)


def test_answers_that_overlap_are_not_added(session: Session, refused: Refused) -> None:
    session.where("epsilon >= 1 AND a < 3").count(0.25)
    session.where("epsilon >= 1 AND a >= 1").count(0.25)
    refused(lambda: session.where("epsilon >= 1").union())
    session.where("epsilon >= 1 AND a = 0").count(0.25)
    assert session.where("epsilon >= 1").union().parts == 2


def test_cells_of_many_answers_one_of_which_fills_the_rest(session: Session) -> None:
    """Answers that overlap each other in all ways: a cover is disjoint, complete and adds up."""
    rich = session.where("epsilon >= 1 AND b IS NOT NULL")
    for low in range(4):
        for high in range(low + 1, 5):
            session.where(f"epsilon >= 1 AND b IS NOT NULL AND a >= {low} AND a < {high}").count(
                round(0.02 + 0.01 * low, 2)
            )
    grid = rich.ask((COUNT,), 0.25, {"a": None})
    union = rich.union()
    assert union.parts == 4 and len(union.run_ids) == 1
    assert union.value == pytest.approx(sum(grid.column("count")))
    assert union.sd == pytest.approx(np.linalg.norm(grid.column("count", "sd")))


def test_with_drop_it_is_what_was_read_that_counts(session: Session, refused: Refused) -> None:
    session.where("a < 2").count(0.5, drop=True)
    refused(lambda: session.where("a < 2").union())
    assert session.where("a < 2 AND epsilon >= 0.5").union().parts == 1


def test_a_question_that_was_answered_for_more_is_free(session: Session) -> None:
    """The same points and figures for no less; what the account decides on is asked anew."""
    text = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {}{}) COUNT(*) AS n FROM {} WHERE {}"
    points, name = "a = 1 AND b IS NOT NULL AND epsilon >= 1", session.name

    def ask(epsilon: float, more: str = "", where: str = points, **how: Any) -> Any:
        return session.ask(text.format(epsilon, more, name, where), **how).answer

    stored, entries = ask(0.1), len(session.open_table.account.history())
    free = ask(0.05)
    assert not free.charged and free.receipt == stored.receipt
    assert not ask(0.1, where="b IS NOT NULL AND epsilon >= 1 AND a BETWEEN 1 AND 1").charged
    assert len(session.open_table.account.history()) == entries
    for charged in (
        ask(0.11),
        ask(0.05, where="a = 2 AND b IS NOT NULL AND epsilon >= 1"),
        ask(0.05, ", drop = TRUE"),
        ask(0.05, fresh=True),
        ask(0.05, as_of="May"),
    ):
        assert charged.charged and charged.receipt != stored.receipt


def test_intervals_of_sums_cover() -> None:
    """Sums of Laplace noise, at least 94.5% of 20,000 (95% less 5 sd of the frequency)."""
    rng = np.random.default_rng(5)
    scales = np.array([1.0, 2.0, 2.0, 5.0, 20.0])
    for chosen in (scales[:1], scales[:3], scales):
        noise = rng.laplace(0, chosen, (20_000, len(chosen)))
        parts = [Part(np.zeros((1, 1, 2), np.int64), 1, 0.0, np.sqrt(2) * s, np.log(20) * s,
                      "2024", "a") for s in chosen]  # fmt: skip
        union = joined(parts)
        share = (np.abs(noise.sum(axis=1)) <= union.high).mean()
        assert share >= 0.95 - 5 * np.sqrt(0.05 * 0.95 / 20_000)
        narrow = np.abs(noise.sum(axis=1)) <= union.high / 2
        assert narrow.mean() < 0.9  # the check can fail
