"""Coordinates as numbers of a lattice, exactly."""

from fractions import Fraction

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.dimensions import Category, Integer, Real
from dpstream.accounting.sessions.lines import line_of


@pytest.mark.parametrize(("dimension", "unit"), [
    (Integer(name="x", low=-3, high=5), Fraction(1)),
    (Real(name="x", low=-0.4, high=1.6, step=0.5), Fraction(1, 10)),
    (Real(name="x", low=0, high=100, step=0.25), Fraction(1, 4)),
    (Real(name="x", low=-74.05, high=-73.75, step=0.001), Fraction(1, 1000)),
    (Real(name="x", low=0, high=3_000, step=30), Fraction(30)),
])  # fmt: skip
def test_coordinates_as_numbers(dimension: Integer | Real, unit: Fraction) -> None:
    line = line_of(dimension)
    assert line.unit == unit
    for at in range(min(dimension.values, 20)):
        value = line.unit * line.at(at)
        assert dimension.edge(value) == at
        assert float(value) == pytest.approx(line.low + at * line.step, abs=1e-12)


def test_columns_without_numbers_or_of_too_many() -> None:
    with pytest.raises(UsageError, match="cannot be aggregated"):
        line_of(Category(name="x", codes=("A",)))
    line_of(Integer(name="x", low=0, high=1 << 31))
    for low, high in ((0, 1 << 40), (0, (1 << 31) + 1), (1 << 33, (1 << 33) + 5)):
        with pytest.raises(UsageError, match="too many steps"):
            line_of(Integer(name="x", low=low, high=high))
