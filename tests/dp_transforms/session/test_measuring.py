"""Noise of cells: what one record costs, exactly; the law of what is drawn; names."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.mechanisms.laws import DiscreteLaplaceLaw, RoundedGaussianLaw
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.sessions import calibration
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    Aggregate,
    Axis,
    Cells,
    Kind,
    Question,
    Ranges,
    sum_of,
)
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.session import Totals, measured, nothing, totals
from tests.dp_transforms.laws import LEAST_P, masses, shape_p
from tests.fixed import INPUTS
from tests.sessions import (
    QUESTIONS,
    RUN,
    SHAPES,
    Draws,
    boxes_of,
    cost,
    points,
    random_records,
    space,
    without_noise,
)  # fmt: skip

SPACE = space()
LAWS = {"geometric": DiscreteLaplaceLaw, "gaussian": RoundedGaussianLaw}


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> Draws:
    return without_noise(monkeypatch)


def worst(kind: Kind, aggregates: tuple[Aggregate, ...], ring: KeyRing, seed: int) -> Fraction:
    """The most that one record more costs at any point, of the amount; 0 where it is not read."""
    most = Fraction()
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind=kind, amount=123_457, aggregates=aggregates, cells=cells)
        records = random_records(SPACE, 9, seed)
        without = measured(
            SPACE, question, boxes, records.totals(SPACE, boxes, question), ring, RUN, INPUTS
        )
        for point in points(SPACE):
            if point[3] or (point[2] and (point[0] + point[1]) % 2):
                continue  # initial budgets change no answer; half of one city's points suffice
            more = records.plus(point).totals(SPACE, boxes, question)
            loss = cost(
                SPACE,
                question,
                boxes,
                without,
                measured(SPACE, question, boxes, more, ring, RUN, INPUTS),
            )
            place = np.array(point)
            read = ((boxes[:, :, 0] <= place) & (place < boxes[:, :, 1])).all(axis=1).any()
            assert read or loss == 0
            most = max(most, loss)
    return most


@pytest.mark.parametrize("kind", ["epsilon", "rho"])
@pytest.mark.parametrize("aggregates", QUESTIONS, ids=lambda a: "-".join(of.name for of in a))
def test_one_record_costs_the_amount_and_no_more(
    kind: Kind, aggregates: tuple[Aggregate, ...], ring: KeyRing, no_noise: Draws
) -> None:
    assert Fraction(95, 100) < worst(kind, aggregates, ring, 1) <= 1


def narrow(self: Cells, space: Any, boxes: Int64, name: str) -> Ranges:
    ranges = _ranges(self, space, boxes, name)
    bounds = ranges.bounds.copy()
    bounds[:, 1] = np.maximum(bounds[:, 1] - 1, bounds[:, 0] + 1)
    return ranges._replace(bounds=bounds)


def shifted(cells: Cells, coordinates: Any, size: int) -> Int64:
    moved = {axis.name: coordinates[axis.name] - 1 for axis in cells.axes}
    return _numbers(cells, moved, size)


def undivided(kind: Kind, part: Any, amount: Fraction) -> float:
    return _scale_of(kind, part, amount * 2)


def one_node(kind: Kind, part: Any, amount: Fraction) -> float:
    import msgspec

    return _scale_of(kind, msgspec.structs.replace(part, nodes=1), amount)


def everywhere(space: Any, name: str, coordinates: Int64) -> Any:
    return coordinates, np.ones(len(coordinates), np.bool_)


_ranges, _numbers, _scale_of = Cells.ranges, totals.numbers, calibration.scale_of
SABOTAGE: list[tuple[Any, str, Any, int]] = [
    (Cells, "ranges", narrow, 1),  # a range that is not all that is read
    (totals, "numbers", shifted, 1),  # records in a cell beside theirs
    (calibration, "scale_of", undivided, 0),  # noise for twice the amount
    (calibration, "scale_of", one_node, 5),  # one node of a tree instead of all levels
    (totals, "_values", everywhere, 1),  # missing values are summed
]


@pytest.mark.parametrize(("where", "name", "other", "amount"), SABOTAGE,
                         ids=lambda a: getattr(a, "__name__", ""))  # fmt: skip
def test_sabotage_is_seen(
    where: Any, name: str, other: Any, amount: int, ring: KeyRing, no_noise: Draws,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(where, name, other)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for kind in ("epsilon", "rho"):
            assert worst(kind, QUESTIONS[amount], ring, 1) <= 1


def test_noise_is_drawn_once_for_each_cell_and_node(ring: KeyRing, no_noise: Draws) -> None:
    """Of the scale that was calibrated, under a name that no other draw of the answer has."""
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="epsilon", amount=10**6, aggregates=QUESTIONS[-1], cells=cells)
        zeros = nothing(cells.count, question.needs(SPACE, boxes))
        no_noise.clear()
        noisy = measured(SPACE, question, boxes, zeros, ring, RUN, INPUTS)
        names = [(name, *item) for name, _, items in no_noise for item in items.tolist()]
        assert len(set(names)) == len(names) == sum(part.size for of in noisy for part in of)
        scales = {scale for _, scale, _ in no_noise}
        each = calibrated(SPACE, question, boxes)
        assert scales == {n.scale for of in each for m in of.each for n in m.noises}


def drawn(ring: KeyRing, cells: Cells, run: str = RUN, **other: Any) -> tuple[Question, Int64]:
    usual: dict[str, Any] = {"kind": "epsilon", "amount": 400_000, "cells": cells}
    question = Question(**(usual | other))
    boxes = boxes_of(SPACE, cells, ())
    totals_ = nothing(cells.count, question.needs(SPACE, boxes))
    return question, measured(SPACE, question, boxes, totals_, ring, run, INPUTS)[0][0]


def test_the_law_of_the_noise(ring: KeyRing) -> None:
    wide = Space((Integer(name="x", low=0, high=20_000), Integer(name="y", low=-1, high=7),
                  Budget(name="e", most=1), Budget(name="r", kind="rho", most=1)))  # fmt: skip
    cells = Cells((Axis("x", tuple(range(20_001))),))
    for kind in ("epsilon", "rho"):
        aggregates = COUNT, sum_of("y")
        question = Question(kind=kind, amount=900_000, aggregates=aggregates, cells=cells)
        none = nothing(cells.count, question.needs(wide, wide.everything))
        noisy = measured(wide, question, wide.everything, none, ring, RUN, INPUTS)
        for measures, [noise] in zip(
            calibrated(wide, question, wide.everything), noisy, strict=True
        ):
            [part] = measures.each[0].noises
            law = LAWS[part.law]
            assert shape_p(noise, masses(law, part.scale)) > LEAST_P
            assert shape_p(noise, masses(law, part.scale * 1.1)) < LEAST_P  # others are seen


def test_names_are_the_run_the_question_and_the_boxes(ring: KeyRing) -> None:
    wide = Cells((Axis("age", tuple(range(9))), Axis("price", (0, 1, 2, 3))))
    _, first = drawn(ring, wide)
    assert (drawn(ring, wide)[1] == first).all()
    others = [drawn(ring, wide, "6b" * 16)[1], drawn(ring, wide, amount=400_001)[1]]
    others.append(drawn(ring, Cells((wide.axes[0], Axis("price", (1, 2, 3, 4)))))[1])
    question = Question(kind="epsilon", amount=400_000, cells=wide)
    half = boxes_of(SPACE, wide, (("city", 0, 1),))  # the same cells, of other boxes
    none = nothing(wide.count, question.needs(SPACE, half))
    others.append(measured(SPACE, question, half, none, ring, RUN, INPUTS)[0][0])
    assert all((other != first).mean() > 0.5 for other in others)


def test_cells_alone_have_the_noise_that_they_have_among_others(ring: KeyRing) -> None:
    for cells, ranges in SHAPES:
        boxes = boxes_of(SPACE, cells, ranges)
        question = Question(kind="rho", amount=10**5, aggregates=QUESTIONS[-1], cells=cells)
        totals_ = random_records(SPACE, 60).totals(SPACE, boxes, question)
        all_cells = measured(SPACE, question, boxes, totals_, ring, RUN, INPUTS)
        for at in range(cells.count):
            one = Totals(
                totals_.records[at : at + 1],
                {k: type(v)(*(p[at : at + 1] for p in v)) for k, v in totals_.columns.items()},
                {k: v[at : at + 1] for k, v in totals_.leaves.items()},
            )
            alone = measured(SPACE, question, boxes, one, ring, RUN, INPUTS, at)
            for mine, all_ in zip(alone, all_cells, strict=True):
                for part, of in zip(mine, all_, strict=True):
                    assert (part[0] == of[at]).all()
