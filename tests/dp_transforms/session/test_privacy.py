"""Enumerated: all tiny tables, all neighbours, all answers of adaptive analysts.

|ln p0 / p1| of a transcript (answers, refusals, what was dropped) is at most the initial budget of
the record by which two tables differ, with the exact law of the noise on the exact sums that the
program adds it to, and the decisions that the account makes.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.regions.spent import Decision, Own, Spent, charge, decide, untouched
from dpstream.accounting.sessions import calibration
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate, Axis, Cells, Question
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import measured
from tests.fixed import INPUTS
from tests.sessions import RUN, Records, average, points, sum_of, without_noise

#: Values 0 to 2 and missing ones; initial budgets 0, 1/2 and 1.
SPACE = Space((Integer(name="v", low=0, high=3, missing="point"),
               Budget(name="b", most=1, step=500_000)))  # fmt: skip
FULL, UPPER = (0, 4), (1, 3)
WINDOW = (-1, 0, 1, 3)


class Ask(NamedTuple):
    """A query: of which values, for how much, what of it, by which edges."""

    values: tuple[int, int]
    amount: int
    aggregate: Aggregate = COUNT
    drop: bool = False
    edges: tuple[int, ...] = ()
    analyst: str = "anyone"


Transcript = tuple[tuple[int, ...] | None, ...]
Analyst = Callable[[Transcript], Ask | None]


def curious(transcript: Transcript) -> Ask | None:
    """Asks what it was surprised by again."""
    if not transcript:
        return Ask(FULL, 300_000, drop=True)
    last = transcript[-1]
    if len(transcript) == 1:
        if last == (3,):
            return Ask(UPPER, 500_000, sum_of("v"))
        return Ask(FULL, 450_000, COUNT, True, (0, 1, 3))
    return Ask(FULL, 250_000, COUNT, True) if len(transcript) == 2 else None


def greedy(transcript: Transcript) -> Ask | None:
    """Takes all there is, with and without drop; goes on after refusals."""
    wishes = (Ask(FULL, 500_000, drop=True), Ask(FULL, 1), Ask(UPPER, 400_000),
              Ask(FULL, 500_000, average("v"), True))  # fmt: skip
    return wishes[len(transcript)] if len(transcript) < len(wishes) else None


#: The most that an analyst may charge to one point.
QUOTAS = {"alice": 600_000, "bob": 400_000}


def sharing(transcript: Transcript) -> Ask | None:
    """Two analysts with quotas, each of whom sees what the other is told."""
    wishes = (
        Ask(FULL, 350_000, drop=True, analyst="alice"),
        Ask(FULL, 300_000, sum_of("v"), True, analyst="bob"),
        Ask(FULL, 350_000, drop=True, analyst="alice"),  # beyond her quota
        Ask(
            FULL if transcript and transcript[0] == (3,) else UPPER,
            250_000,
            drop=True,
            analyst="alice",
        ),
    )
    return wishes[len(transcript)] if len(transcript) < len(wishes) else None


def halves(transcript: Transcript) -> Ask | None:
    """Asks different points one after the other."""
    wishes = Ask(UPPER, 500_000, drop=True), Ask((0, 1), 500_000, drop=True)
    return wishes[len(transcript)] if len(transcript) < len(wishes) else None


#: The records as they are at each query.
Versions = Callable[[int], Records]


def transcripts(versions: Versions, analyst: Analyst, ring: KeyRing) -> dict[Transcript, float]:
    """ln p of every transcript with answers in the window, but for a constant of the transcript."""
    densities = dict[Transcript, float]()
    cache = dict[tuple[int, Ask, bytes], tuple[Int64, np.ndarray]]()
    none = untouched(SPACE, "epsilon")
    todo: list[tuple[Transcript, float, Spent, dict[str, Spent]]] = [((), 0.0, none, {})]
    while todo:
        transcript, log, spent, own = todo.pop()
        ask = analyst(transcript)
        if ask is None:
            densities[transcript] = log
            continue
        cells = Cells((Axis("v", ask.edges),)) if ask.edges else Cells()
        box = np.array([[ask.values, (0, 3)]], np.int64)
        mine, quota = own.get(ask.analyst, none), QUOTAS.get(ask.analyst)
        limit = None if quota is None else Own(mine, quota)
        made = decide(spent, cells.inside(SPACE, box), ask.amount, ask.drop, own=limit)
        if not made.accepted:
            todo.append(((*transcript, None), log, spent, own))
            continue
        after = charge(spent, made.charged, ask.amount)
        owns = {**own, ask.analyst: charge(mine, made.charged, ask.amount)}
        question = Question(kind="epsilon", amount=ask.amount, aggregates=(ask.aggregate,),
                            cells=cells)  # fmt: skip
        key = len(transcript), ask, made.charged.tobytes()
        if key not in cache:
            cache[key] = sums_of(versions(len(transcript)), question, made.charged, ring)
        exact, scales = cache[key]
        for answer in itertools.product(WINDOW, repeat=len(exact)):
            loss = -float((np.abs(np.array(answer) - exact) / scales).sum())
            todo.append(((*transcript, answer), log + loss, after, owns))
    return densities


def sums_of(
    records: Records, question: Question, boxes: Int64, ring: KeyRing
) -> tuple[Int64, np.ndarray]:
    """The integers that noise is added to, and its scales."""
    totals = records.totals(SPACE, boxes, question)
    parts = measured(SPACE, question, boxes, totals, ring, RUN, INPUTS)[0]
    [measures] = calibrated(SPACE, question, boxes)
    scales = [
        [measures.each[of].noises[n].scale for of in measures.range_numbers]
        for n in range(len(parts))
    ]
    return np.concatenate(parts), np.concatenate(scales)


def table(rows: tuple[tuple[int, ...], ...]) -> Records:
    return Records(np.array(rows, np.int64).reshape(-1, 2), np.ones(len(rows), np.bool_))


def losses(analyst: Analyst, ring: KeyRing, most: int) -> dict[tuple[int, ...], float]:
    """The largest |ln p0 / p1| by the point of the record in question, beside fewer than ``most``
    others."""
    maxima = dict.fromkeys(points(SPACE), 0.0)
    rows = [records for n in range(most) for records in
            itertools.combinations_with_replacement(points(SPACE), n)]  # fmt: skip
    cache = dict[tuple[tuple[int, ...], ...], dict[Transcript, float]]()

    def of(*records: tuple[int, ...]) -> dict[Transcript, float]:
        rows = tuple(sorted(records))
        if rows not in cache:
            cache[rows] = transcripts(lambda _: table(rows), analyst, ring)
        return cache[rows]

    for others in rows:
        without = of(*others)
        for point in maxima:
            more = of(*others, point)
            assert more.keys() == without.keys()  # refusals are the same
            lost = max(abs(log - without[transcript]) for transcript, log in more.items())
            maxima[point] = max(maxima[point], lost)
    return maxima


def budget_of(point: tuple[int, ...]) -> float:
    return point[1] / 2


@pytest.mark.parametrize(("analyst", "most"), [
    (curious, 1), (greedy, 2), (sharing, 1), pytest.param(curious, 2, marks=pytest.mark.slow),
    pytest.param(greedy, 3, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_record_loses_its_initial_budget_at_most(
    analyst: Analyst, most: int, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    maxima = losses(analyst, ring, most)
    assert all(lost <= budget_of(point) + 1e-9 for point, lost in maxima.items())
    assert all(lost == 0 for point, lost in maxima.items() if point[1] == 0)
    assert max(maxima.values()) > 0.85  # what could be lost is lost


def generous(spent: Spent, *arguments: Any, **other: Any) -> Decision:
    """A decision that forgets what was spent."""
    return _decide(dataclasses.replace(spent, amounts=spent.amounts * 0), *arguments, **other)


_decide = decide


def loud(kind: object, part: object, amount: object) -> float:
    return _scale_of(kind, part, amount) / 1.2  # type: ignore[arg-type]


_scale_of = calibration.scale_of


@pytest.mark.parametrize("twin", ["decision", "noise"])
def test_a_sabotaged_twin_loses_more(
    twin: str, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    if twin == "decision":
        monkeypatch.setattr(sys.modules[__name__], "decide", generous)
    else:
        monkeypatch.setattr(calibration, "scale_of", loud)
        monkeypatch.setattr(calibration, "_measure", calibration._measure.__wrapped__)
    maxima = losses(greedy, ring, 1)
    assert any(lost > budget_of(point) + 0.01 for point, lost in maxima.items())


OTHERS = ((1, 2), (3, 1))


@pytest.mark.parametrize(("first", "last"), [(1, 9), (0, 1), (3, 4)])
@pytest.mark.parametrize("analyst", [greedy, sharing])
def test_records_that_come_and_go_lose_no_more(
    analyst: Analyst, first: int, last: int, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is there from one query to before another; what its point spent stays."""
    without_noise(monkeypatch)
    without, most = transcripts(lambda _: table(OTHERS), analyst, ring), 0.0
    for point in points(SPACE):

        def versions(step: int, point: tuple[int, ...] = point) -> Records:
            return table((*OTHERS, point) if first <= step < last else OTHERS)

        more = transcripts(versions, analyst, ring)
        assert more.keys() == without.keys()
        lost = max(abs(log - without[transcript]) for transcript, log in more.items())
        assert lost <= budget_of(point) + 1e-9
        most = max(most, lost)
    assert most > 0


def test_a_record_that_changes_loses_both_budgets_at_most(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one that goes and one that comes: each point pays for its own time."""
    without_noise(monkeypatch)
    without, beyond = transcripts(lambda _: table(OTHERS), halves, ring), 0
    for before, after in itertools.product([p for p in points(SPACE) if p[1] < 2], repeat=2):

        def versions(
            step: int, pair: tuple[tuple[int, ...], tuple[int, ...]] = (before, after)
        ) -> Records:
            return table((*OTHERS, pair[step > 0]))

        more = transcripts(versions, halves, ring)
        lost = max(abs(log - without[transcript]) for transcript, log in more.items())
        assert lost <= budget_of(before) + budget_of(after) + 1e-9
        beyond += lost > max(budget_of(before), budget_of(after)) + 1e-9
    assert beyond  # one of the two budgets would not be a bound


def test_the_law_that_was_enumerated_is_the_one_that_is_drawn(ring: KeyRing) -> None:
    """-|k| / scale is ln P[Z = k] but for a constant (test_measuring has the draws)."""
    question = Question(kind="epsilon", amount=500_000)
    [measures] = calibrated(SPACE, question, SPACE.everything)
    assert measures.each[0].noises[0].law == "geometric"
    assert math.isclose(measures.each[0].noises[0].scale, 2)
