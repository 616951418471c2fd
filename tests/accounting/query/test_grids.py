"""Grids follow public parts only, and get coarser where the noise asks for it."""

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.grids import (
    ASSUMED,
    BITS,
    LEAST_BITS,
    finest,
    grid_of,
    grids_of,
    regridded,
)
from dpstream.accounting.query.plan import QueryColumn, QueryPlan

SUM = QueryColumn("s", "sum", 0.0, 100.0)
AUTO = QueryColumn("a", "mean", per="group")


def plan(*columns: QueryColumn, epsilon: float = 1.0) -> QueryPlan:
    return QueryPlan(epsilon, 1e-9, 4, None, "gaussian", True, columns=columns)


@pytest.mark.parametrize("bits", [BITS, 16, LEAST_BITS])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.5, 7.0), (1e6, 2e6), (0.0, 2.0**-9)])
def test_a_step_is_the_largest_with_enough_of_them(bits: int, low: float, high: float) -> None:
    step = grid_of(QueryColumn("s", "sum", low, high, rows=1), False, bits)
    assert 2.0 ** (bits - 1) < max(abs(low), abs(high), high - low) / step <= 2.0**bits


def test_whole_numbers_have_whole_steps_in_sums_only() -> None:
    assert grid_of(SUM, True, BITS) == 1.0 and grid_of(SUM, False, BITS) < 1
    assert grid_of(msgspec.structs.replace(SUM, kind="mean"), True, BITS) < 1
    assert grid_of(msgspec.structs.replace(SUM, high=0.5), True, BITS) < 1
    assert grid_of(QueryColumn("n", "count", 0.0, 3.0, per="group"), False, BITS) == 1.0


def test_bounds_that_are_looked_for_have_a_step_too() -> None:
    assert grid_of(AUTO, False, BITS) == 2.0**-8 and grid_of(AUTO, True, BITS) == 1.0
    assert grid_of(QueryColumn("v", "var"), False, BITS) == 2.0**-8


def test_the_finest_grid_is_the_one_whose_noise_can_be_drawn() -> None:
    def made(bits: int, epsilon: float) -> QueryPlan:
        return plan(msgspec.structs.replace(SUM, grid=grid_of(SUM, False, bits)), epsilon=epsilon)

    assert finest(lambda bits: made(bits, 1.0)).bits == BITS
    coarse = finest(lambda bits: made(bits, 1e-4))
    assert coarse.bits < BITS and coarse.budget(coarse.plan).parts[0].scale < 2.0**40
    with pytest.raises(UsageError):
        allocate_query(made(BITS, 1e-4))
    with pytest.raises(UsageError, match="epsilon"):
        finest(lambda bits: made(bits, 1e-12))


def test_sketches_assume_bounds_and_the_rest_stays() -> None:
    gridding = finest(
        lambda bits: plan(msgspec.structs.replace(AUTO, grid=grid_of(AUTO, False, bits)))
    )
    [column] = gridding.sketched().columns
    assert (column.low, column.high) == ASSUMED and column.grid < 2.0**-20
    assert gridding.design is not None and gridding.plan.columns[0].automatic
    chosen = regridded(gridding.plan, {"a": (0.0, 50.0)}, gridding.bits)
    assert grids_of(chosen) == {"a": (chosen.columns[0].grid, 0, 50 / chosen.columns[0].grid)}
    assert grids_of(plan(QueryColumn("u", "units"))) == {}
