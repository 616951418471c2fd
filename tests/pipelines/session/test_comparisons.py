"""Comparisons against the values that coordinates stand for."""

import operator
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.pipelines.session.comparisons import NEGATED, TURNED, amounts_at, true_at

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


def test_texts_are_compared_by_their_bytes() -> None:
    codes = ("b", "\u00e9", "a", "B", "\U0001f600", "\uffff")
    dimension = Category(name="v", codes=codes, missing="point")
    for sign, compare in SIGNS.items():
        for value in (*codes, *(("", "aa", "zz") if sign not in ("=", "<>") else ())):
            want = [i for i, c in enumerate(codes) if compare(c.encode(), value.encode())]
            assert held(true_at(dimension, sign, value)) == want
    assert held(true_at(dimension, "=", "e\u0301")) == [1]
    with pytest.raises(UsageError, match="has no such code"):
        true_at(dimension, "=", "zz")


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
