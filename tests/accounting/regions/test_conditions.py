"""Boxes of conditions against every point of a small space."""

import itertools
import operator
import random
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions import conditions
from dpstream.accounting.regions.boxes import disjoint
from dpstream.accounting.regions.conditions import (
    NEGATED,
    TURNED,
    AllOf,
    AnyOf,
    Condition,
    Level,
    Ranges,
    Within,
    amounts_at,
    apart,
    boxes_where,
    joined,
    kinds_in,
    shared,
    true_at,
)
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Space, Timestamp
from dpstream.accounting.regions.spent import Spent, charge, untouched
from tests.golden.refusals import Refused

SPACE = Space(
    (
        Integer(name="a", low=0, high=5),
        Integer(name="b", low=0, high=4, missing="point"),
        Budget(name="eps", most=0.000012, step=3),
    )
)
POINTS = np.array(list(itertools.product(*map(range, SPACE.sizes.tolist()))))


class Spending:
    def __init__(self) -> None:
        spent, rng = untouched(SPACE, "epsilon"), np.random.default_rng(0)
        for _ in range(6):
            box = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in SPACE.sizes]
            spent = charge(spent, np.array(box)[None], int(rng.integers(1, 6)))
        self.epsilon = spent

    def spent(self, kind: str) -> Spent:
        assert kind == "epsilon"
        return self.epsilon


VIEWS = Spending()


def amounts() -> np.ndarray:
    spent = np.zeros(len(POINTS), np.int64)
    for box, amount in zip(VIEWS.epsilon.boxes, VIEWS.epsilon.amounts, strict=True):
        spent[((box[:, 0] <= POINTS) & (box[:, 1] > POINTS)).all(axis=1)] = amount
    return spent


def inside(numbers: np.ndarray, ranges: Ranges) -> np.ndarray:
    mask = np.zeros(len(numbers), np.bool_)
    for low, high in ranges:
        mask |= (numbers >= low) & (numbers < high)
    return mask


def truth(condition: Condition) -> np.ndarray:
    """By the meaning of each, at every point."""
    match condition:
        case Within(place=place, ranges=ranges):
            return inside(POINTS[:, place], ranges)
        case Level(remaining=remaining, ranges=ranges):
            spent = amounts()
            return inside(np.maximum(POINTS[:, 2] * 3 - spent, 0) if remaining else spent, ranges)
        case AllOf(parts=parts):
            return np.logical_and.reduce([np.ones(len(POINTS), bool), *map(truth, parts)])
        case AnyOf(parts=parts):
            return np.logical_or.reduce([np.zeros(len(POINTS), bool), *map(truth, parts)])


def grown(rng: random.Random, depth: int) -> Condition:
    if depth == 0 or rng.random() < 0.2:
        kind = rng.randrange(4)
        edges = sorted(rng.sample(range(-3, 14), 4))
        ranges = ((edges[0], edges[1]), (edges[2], edges[3]))
        return Level("epsilon", kind == 1, ranges) if kind < 2 else Within(rng.randrange(3), ranges)
    parts = tuple(grown(rng, depth - 1) for _ in range(rng.randrange(4)))
    return (AllOf if rng.random() < 0.5 else AnyOf)(parts)


def test_boxes_are_disjoint_and_hold_the_points_where_it_is_true() -> None:
    rng, sizes = random.Random(5), set()
    for _ in range(300):
        condition = grown(rng, 3)
        boxes = boxes_where(condition, SPACE, VIEWS)
        coverage = np.zeros(len(POINTS), int)
        for box in boxes:
            coverage += ((box[:, 0] <= POINTS) & (box[:, 1] > POINTS)).all(axis=1)
        assert disjoint(boxes) and (coverage == truth(condition)).all()
        sizes.add(int(coverage.sum()))
    assert len(sizes) > 30


def test_initial_budgets_are_cut_by_what_is_left() -> None:
    """Some points are overdrawn: nothing is left there, and not less."""
    assert (POINTS[:, 2] * 3 < amounts()).any()
    none = boxes_where(Level("epsilon", True, ((0, 1),)), SPACE, VIEWS)
    assert len(none)
    assert not len(boxes_where(Level("epsilon", True, ((-50, 0),)), SPACE, VIEWS))


def test_ranges_of_numbers() -> None:
    assert joined([((3, 5), (0, 1)), ((1, 2), (4, 9), (7, 7))]) == ((0, 2), (3, 9))
    assert apart(((2, 3), (5, 9)), 0, 7) == ((0, 2), (3, 5))
    assert apart(((-5, 1),), 0, 4) == ((1, 4),)
    assert shared([((0, 5), (7, 9)), ((3, 8),)]) == ((3, 5), (7, 8))
    assert shared([((0, 2),), ((2, 3),)]) == ()


def test_kinds() -> None:
    one, other = Level("epsilon", True, ()), Level("rho", False, ())
    assert kinds_in(AllOf((AnyOf((one,)), Within(0, ())))) == {"epsilon"}
    assert kinds_in(AllOf((AnyOf((one,)), other))) == {"epsilon", "rho"}


def test_what_is_made_of_too_many_boxes(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    odd = tuple((i, i + 1) for i in range(0, 5, 2))
    both = AllOf((Within(0, odd), Within(1, odd)))
    assert len(boxes_where(both, SPACE, None)) == 9
    monkeypatch.setattr(conditions, "MAX_PARTS", 8)
    refused(boxes_where, both, SPACE, None)
    monkeypatch.setattr(conditions, "MAX_SIDE", 2)
    refused(lambda: boxes_where(AnyOf((Within(0, odd), Within(1, odd))), SPACE, None))


SIGNS = {"=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le,
         ">": operator.gt, ">=": operator.ge}  # fmt: skip


def held(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [at for low, high in ranges for at in range(low, high)]


@pytest.mark.parametrize("sign", SIGNS)
def test_exact_dimensions(sign: str) -> None:
    integer = Integer(name="a", low=-2, high=3, missing="point")
    budget = Budget(name="e", most=2.0, step=500_000)
    instant = Timestamp(name="t", low=10, high=14, step=1)
    for value in [Fraction(n, 4) for n in range(-16, 80)]:
        for dimension, line in ((integer, lambda c: c - 2), (budget, lambda c: Fraction(c, 2)),
                                (instant, lambda c: c + 10)):  # fmt: skip
            if dimension is instant and value.denominator > 1:
                continue
            want = [c for c in range(dimension.values) if SIGNS[sign](line(c), value)]
            assert held(true_at(dimension, sign, value)) == want


@pytest.mark.parametrize("sign", SIGNS)
def test_steps_divide_records_as_they_divide_coordinates_or_are_refused(sign: str) -> None:
    real = Real(name="x", low=-0.3, high=0.6, step=0.3)
    instant = Timestamp(name="t", low=0, high=8, step=3)
    for value in [Fraction(n, 20) for n in range(-12, 20)] + list(range(-2, 12)):
        for dimension in (real, instant):
            if dimension is instant and Fraction(value).denominator > 1:
                continue
            records = (np.arange(-6, 12) / 20 if dimension is real else np.arange(8)).tolist()
            at = dimension.coordinates(np.array(records)).at.tolist()
            true = [bool(SIGNS[sign](Fraction(str(r)), value)) for r in records]
            divided = {c for c, yes in zip(at, true, strict=True) if yes} & {
                c for c, yes in zip(at, true, strict=True) if not yes
            }
            try:
                coordinates = held(true_at(dimension, sign, value))
            except UsageError:
                coordinates = None
            if coordinates is not None:
                assert [c in coordinates for c in at] == true
            elif not divided:  # refused though these records could be told: others could not be
                assert sign not in ("<", ">=")


def test_texts_are_compared_by_their_bytes(refused: Refused) -> None:
    codes = ("b", "\u00e9", "a", "B", "\U0001f600", "\uffff")
    dimension = Category(name="v", codes=codes, missing="point")
    for sign, compare in SIGNS.items():
        for value in (*codes, *(("", "aa", "zz") if sign not in ("=", "<>") else ())):
            want = [i for i, c in enumerate(codes) if compare(c.encode(), value.encode())]
            assert held(true_at(dimension, sign, value)) == want
    assert held(true_at(dimension, "=", "e\u0301")) == [1]
    refused(true_at, dimension, "=", "zz")


@pytest.mark.parametrize("sign", SIGNS)
def test_amounts_in_millionths(sign: str) -> None:
    for value in (Fraction(0), Fraction(3, 10**6), Fraction(5, 2 * 10**6), Fraction(10**40)):
        ranges = amounts_at(sign, value)
        for amount in range(6):
            inside = any(low <= amount < high for low, high in ranges)
            assert inside == SIGNS[sign](Fraction(amount, 10**6), value)


def test_signs_are_negated_and_turned() -> None:
    for sign, compare in SIGNS.items():
        for one in range(3):
            for other in range(3):
                assert SIGNS[NEGATED[sign]](one, other) == (not compare(one, other))
                assert SIGNS[TURNED[sign]](other, one) == compare(one, other)
