"""Tables of records with budgets for tests: small spaces, records as coordinates, costs."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Space
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate, Axis, Cells, Question
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.session import Noisy, Totals, tallied

RUN = "5a" * 16
sum_of, average = partial(Aggregate, "sum"), partial(Aggregate, "average")
#: Digest of law and name, scale, items.
Draws = list[tuple[bytes, float, Ids]]


def quantiles(column: str, at: Sequence[float], label: str = "") -> Aggregate:
    return Aggregate("quantiles", column, tuple(map(float, at)), label=label)


def median(column: str) -> Aggregate:
    return quantiles(column, (0.5,), f"median_{column}")


def space() -> Space:
    """Ages -3 .. 4 and missing ones, prices -.4 to 1.5, two cities, budgets of both kinds."""
    return Space((
        Integer(name="age", low=-3, high=5, missing="point"),
        Real(name="price", low=-0.4, high=1.6, step=0.5, missing="point"),
        Category(name="city", codes=("A", "B")),
        Budget(name="epsilon", most=0.000002),
        Budget(name="rho", kind="rho", most=0),
    ))  # fmt: skip


class Records(NamedTuple):
    """(n, d) coordinates, and (n,) which of them are usable."""

    at: Int64
    usable: Bool

    def totals(self, of: Space, boxes: Int64, question: Question) -> Totals:
        """What the records in the boxes add up to."""
        columns = {d.name: self.at[:, k] for k, d in enumerate(of.dimensions)}
        needs = question.needs(of, boxes)
        return tallied(of, boxes, question.cells, needs, columns, self.usable)

    def plus(self, point: tuple[int, ...]) -> "Records":
        """And one more."""
        return Records(np.concatenate([self.at, [point]]), np.append(self.usable, True))


def random_records(of: Space, size: int, seed: int = 0) -> Records:
    """Records anywhere, one in ten of them not usable."""
    random = np.random.default_rng(seed)
    return Records(random.integers(0, of.sizes, (size, len(of.sizes))), random.random(size) > 0.1)


def points(of: Space) -> list[tuple[int, ...]]:
    """Every point of a space."""
    return list(itertools.product(*(range(size) for size in of.sizes.tolist())))


CITY, AGE = Axis("city", (0, 1, 2)), Axis("age", (1, 4, 6, 8, 9))
#: Cells and boxes: ranges of columns that differ, missing values, boxes that are not all.
SHAPES: tuple[tuple[Cells, tuple[tuple[str, int, int], ...]], ...] = (
    (Cells(), ()),
    (Cells(), (("age", 5, 8), ("price", 0, 2))),
    (Cells((AGE,)), ()),
    (Cells((CITY, AGE)), (("price", 1, 5),)),
    (Cells((AGE, CITY)), (("age", 2, 9), ("city", 1, 2))),
)
QUESTIONS = (
    (COUNT,),
    (sum_of("age"),),
    (sum_of("price"),),
    (average("age"),),
    (average("price"),),
    (median("age"),),
    (quantiles("price", (0.25, 0.75)),),
    (COUNT, sum_of("age"), average("price"), median("age")),
)


def boxes_of(of: Space, cells: Cells, ranges: tuple[tuple[str, int, int], ...]) -> Int64:
    """(1, d, 2) the box of ranges in coordinates, as a batch asks it."""
    box = of.everything.copy()
    for name, low, high in ranges:
        box[0, of.place(name)] = low, high
    return cells.inside(of, box)


def cost(of: Space, question: Question, boxes: Int64, one: Noisy, other: Noisy) -> Fraction:
    """What telling two exact answers apart costs, of the amount that was paid: exactly.

    Epsilon: the sum of all shifts in scales; rho: half the sum of their squares in sds.
    """
    total = Fraction()
    for measures, first, second in zip(calibrated(of, question, boxes), one, other, strict=True):
        for number, (was, now) in enumerate(zip(first, second, strict=True)):
            moved = np.abs(now - was).reshape(len(was), -1)
            for cell in np.flatnonzero(moved.any(axis=1)):
                scale = Fraction(measures.each[measures.range_numbers[cell]].noises[number].scale)
                shifts = [int(by) for by in moved[cell]]
                if question.kind == "epsilon":
                    total += sum(shifts) / scale
                else:
                    total += sum(by * by for by in shifts) / (2 * scale**2)
    return total / Fraction(question.amount, 10**6)


def without_noise(monkeypatch: pytest.MonkeyPatch) -> Draws:
    """All noise is 0; what was asked for, by law and name."""
    draws: Draws = []

    def silent(law: str) -> Callable[[OneShot, Ids, float], Int64]:
        def draw(self: OneShot, items: Ids, scale: float) -> Int64:
            draws.append((b"".join((law.encode(), *self.parts)), scale, items.copy()))
            return np.zeros(len(items), np.int64)

        return draw

    monkeypatch.setattr(OneShot, "discrete_laplace", silent("discrete Laplace"))
    monkeypatch.setattr(OneShot, "rounded_gaussian", silent(""))
    return draws
