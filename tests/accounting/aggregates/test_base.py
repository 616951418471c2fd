"""What kinds share: bounds on the grid, the sensitivity of a clamp, refusals by field."""

import numpy as np
import pytest

from dpstream.accounting.aggregates.base import (
    Prefix,
    Prefixes,
    bounded_stream,
    needs_bounds,
    own,
    takes_no_column,
)
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.limits import MAX_GRID_VALUE
from tests.accounting.plans import Make


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_the_larger_end_of_a_clamp_is_its_sensitivity(make_plan: Make, kind: str) -> None:
    """Also where it is the lower one: a sum clamped to [-9, 3] moves by 9."""
    for bounds in ((-9.0, 3.0), (-9.0, -1.0), (-3.0, 9.0), (1.0, 9.0), (-5.0, 0.0), (-8.0, 3.0)):
        aggregate = Aggregate("v", kind, "x", bounds)  # type: ignore[arg-type]
        stream = make_plan(aggregates=(aggregate,)).design.streams[-1]
        values = range(int(bounds[0]), int(bounds[1]) + 1)
        assert stream.sensitivity == max(abs(value - stream.mid) for value in values)
        if kind == "sum":
            assert stream.mid == 0 and stream.sensitivity == max(map(abs, bounds))


@pytest.mark.parametrize(
    ("field", "column"),
    [
        ("here", {"column": None}),
        ("here", {"bounds": None}),
        ("here", {"bounds": (0.0, float("nan"))}),
        ("here", {"bounds": (float("-inf"), 1.0)}),
        ("here", {"grid": -1.0}),
        ("here", {"grid": float("inf")}),
        ("here.bounds", {"bounds": (3.0, 2.0)}),
        ("here.bounds", {"bounds": (0.0, 0.0)}),
        ("here.bounds", {"bounds": (1.2, 1.8)}),
        ("here.grid", {"bounds": (0.0, MAX_GRID_VALUE + 1.0)}),
        ("here.grid", {"bounds": (-MAX_GRID_VALUE - 1.0, 0.0)}),
    ],
)
def test_a_sum_without_public_bounds_has_no_sensitivity(
    field: str, column: dict[str, object]
) -> None:
    settings: dict[str, object] = {"column": "x", "bounds": (-3.0, 9.0), "grid": 1.0, **column}
    with pytest.raises(UsageError) as caught:
        needs_bounds(Aggregate("v", "sum", **settings), "here")  # type: ignore[arg-type]
    assert caught.value.field == field
    needs_bounds(Aggregate("v", "sum", "x", (-float(MAX_GRID_VALUE), 0.0)), "here")


@pytest.mark.parametrize("column", [{"column": "x"}, {"bounds": (0.0, 1.0)}])
def test_a_kind_that_counts_takes_no_column(column: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="'units' takes no column") as caught:
        takes_no_column(Aggregate("n", "units", **column), "here")  # type: ignore[arg-type]
    assert caught.value.field == "here"
    takes_no_column(Aggregate("n", "units"), "here")


def test_a_running_sum_moves_by_the_farther_bound_of_what_is_left() -> None:
    column = Aggregate("v", "mean", "x", (-1.0, 4.5), 0.5, share=2.0)
    stream = bounded_stream(column, 3)
    assert (stream.name, stream.column, stream.lo, stream.hi, stream.mid) == ("v", "x", -2, 9, 3)
    assert (stream.sensitivity, stream.grid, stream.share) == (6, 0.5, 2.0)
    constant = bounded_stream(Aggregate("v", "mean", "x", (4.0, 4.0)), 4)
    assert constant.sensitivity == 1 and constant.share == 1.0  # noise of sd 0 is none


def test_a_column_finds_its_own_sum() -> None:
    column = Aggregate("v", "sum", "x", (0.0, 2.0))
    stream, one = bounded_stream(column, 0), np.ones(1)
    prefix = Prefix(stream, one, one)
    assert own(column, Prefixes({"v": prefix, "w": prefix._replace(sd=2 * one)}, None)) == (
        stream,
        prefix,
    )
    with pytest.raises(ValueError, match="has a stream"):
        own(column, Prefixes({"v": Prefix(None, one, one)}, None))
