"""The parts of a plan that name columns: bounds on a grid, and no word that nobody reads."""

import math
from fractions import Fraction

import msgspec
import pytest

from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan


def test_grid_bounds_snap_inward_exactly() -> None:
    assert Aggregate("s", "sum", "x", (0.1, 0.7), 0.1).grid_bounds() == (1, 7)
    assert Aggregate("s", "sum", "x", (-0.25, 0.99), 0.5).grid_bounds() == (0, 1)
    assert Aggregate("s", "sum", "x", (-1e-3, 1e3), 1e-3).grid_bounds() == (-1, 10**6)
    with pytest.raises(ValueError, match="bounds"):
        Aggregate("n", "count").grid_bounds()


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 1.1, 2.2, 1e-3])
def test_a_bound_on_the_grid_is_kept_whatever_floats_make_of_it(bound: float) -> None:
    """In floats 0.7 / 0.1 and 0.3 / 0.1 lie below the whole numbers they are."""
    for size in (1, 3, 7, 1000):
        column = Aggregate("s", "sum", "x", (-bound, float(f"{bound * size:.9g}")), bound)
        assert column.grid_bounds() == (-1, size)


@pytest.mark.parametrize("grid", [2.0**-bits for bits in range(-3, 60)])
def test_floats_on_a_grid_of_a_power_of_two_are_that_many_steps(grid: float) -> None:
    """The decimal of 2^-24 has 18 digits, of which a float shows 16: a number above it."""
    for low, high in ((0, 1 << 24), (-3, 7), (-(1 << 31) + 1, 2**32 - 5)):
        assert Aggregate("s", "sum", "x", (low * grid, high * grid), grid).grid_bounds() == (
            low,
            high,
        )
        column = QueryColumn("c", "sum", low * grid, high * grid, grid=grid)
        assert grids_of(QueryPlan(1.0, 0.0, 1, None, "auto", False, columns=(column,))) == {
            "c": (grid, low, high)
        }


def test_bounds_beside_the_lines_of_a_power_of_two_snap_inward() -> None:
    for grid in (0.5, 2.0**-24):
        for low, high in ((-0.4, 0.7), (0.1, 0.30000000000000004)):
            steps = (
                math.ceil(Fraction(low) / Fraction(grid)),
                math.floor(Fraction(high) / Fraction(grid)),
            )
            assert Aggregate("s", "sum", "x", (low, high), grid).grid_bounds() == steps


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Field, '{"column": "user", "typ": "int"}'),
        (Field, '{"column": "user", "type": "float"}'),
        (Aggregate, '{"name": "n", "kind": "count", "clamps": [0, 1]}'),
        (Aggregate, '{"name": "n", "kind": "median"}'),
    ],
)
def test_a_word_that_nobody_reads_is_refused(kind: type, text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=kind)
    assert msgspec.json.decode('{"column": "user"}', type=Field) == Field("user", "string")
