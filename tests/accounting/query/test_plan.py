"""Plans of queries: what is refused, and the digest that names noise.

Parts of columns: bounds, and the effect of one unit as the accounting states it.

Grids follow public parts only, and get coarser where the noise asks for it.
"""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest

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
from dpstream.accounting.query.parts import (
    QueryPart,
    cell_at,
    cells_of,
    centre_of,
    half_of,
    levels_of,
    middle_of,
    parts_by_column,
    parts_of,
    rank_factor,
    tree_of,
    value_at,
    windows_of,
)
from dpstream.accounting.query.plan import QueryColumn, QueryPlan, canonical
from tests.golden.refusals import Refused
from tests.queries import ALL, COUNT, MEAN, QUANTILES, ROW_SUM, ROWS, STDDEV, SUM, UNITS, VAR, query

#: Written down once: noise is named by it.
DIGEST = "e06f7e2395183cc663e0d1238dd859e7"


def test_digest_is_pinned() -> None:
    assert query(*ALL).digest == DIGEST


def test_every_field_changes_the_digest() -> None:
    plan = query(COUNT, QUANTILES)
    other: dict[str, Any] = {
        "epsilon": 2.0, "delta": 1e-7, "groups": 5, "norm": 3.0, "mechanism": "geometric",
        "selects": False, "min_units": 2, "columns": (COUNT,),
        "automatic_groups": True,
    }  # fmt: skip
    assert set(other) == set(QueryPlan.__struct_fields__)
    digests = {msgspec.structs.replace(plan, **{name: v}).digest for name, v in other.items()}
    assert len(digests | {plan.digest}) == len(other) + 1
    column: dict[str, Any] = {
        "name": "z", "kind": "sum", "low": 1.0, "high": 14.0, "per": "group", "rows": 3,
        "grid": 0.5, "at": (0.5,), "share": 2.0, "norm": 2.0,
        "automatic_rows": True, "distinct": True,
    }  # fmt: skip
    assert set(column) == set(QueryColumn.__struct_fields__)
    changed = [
        query(msgspec.structs.replace(QUANTILES, **{name: v})).digest for name, v in column.items()
    ]
    assert len({*changed, query(QUANTILES).digest}) == len(column) + 1


def test_a_whole_number_and_its_float_are_one_plan() -> None:
    one = query(QueryColumn("s", "sum", 0, 5), epsilon=1)
    other = query(QueryColumn("s", "sum", 0.0, 5.0), epsilon=1.0)
    assert canonical(one) == canonical(other) and one.digest == other.digest


def replaced(column: QueryColumn, **fields: Any) -> QueryPlan:
    return query(msgspec.structs.replace(column, **fields))


REFUSED: list[tuple[str, QueryPlan]] = [
    ("epsilon", query(COUNT, epsilon=0.0)),
    ("epsilon", query(COUNT, epsilon=float("nan"))),
    ("epsilon", query(COUNT, epsilon=2_000.0)),
    ("delta", query(COUNT, delta=0.0)),
    ("delta", query(COUNT, delta=1.0)),
    ("delta", query(COUNT, delta=5e-324)),
    ("max_groups_contributed", query(COUNT, groups=None)),
    ("max_groups_contributed", query(COUNT, groups=0)),
    ("max_groups_contributed", query(COUNT, groups=5_000)),
    ("contribution_norm", query(COUNT, groups=None, norm=0.0)),
    ("contribution_norm", query(COUNT, norm=2.0, mechanism="geometric")),
    ("min_privacy_units_per_group", query(COUNT, min_units=0)),
    ("min_privacy_units_per_group", query(COUNT, min_units=2, selects=False)),
    ("columns", query(selects=False)),
    ("contribution_norm", query(norm=2.0)),
    ("max_groups_contributed", query(groups=None)),
    ("columns", query(COUNT, COUNT)),
    ("column[0].name", replaced(COUNT, name="")),
    ("column[0].share", replaced(COUNT, share=0.0)),
    ("column[0].max_rows_contributed", replaced(MEAN, rows=0)),
    ("column[0].grid", replaced(SUM, grid=0.0)),
    ("column[0].grid", replaced(SUM, grid=1e-12)),
    ("column[0].grid", replaced(SUM, grid=100.0)),
    ("column[0].bounds", replaced(SUM, low=5.0)),
    ("column[0].bounds", replaced(SUM, low=None)),
    ("column[0].bounds", replaced(SUM, high=float("inf"))),
    ("column[0].bounds", replaced(SUM, high=1e61)),
    ("column[0].bounds", replaced(SUM, high=1e-61)),
    ("column[0].bounds", replaced(UNITS, low=0.0, high=1.0)),
    ("column[0].bounds", replaced(COUNT, low=-1.0)),
    ("column[0].grid", replaced(MEAN, kind="var", grid=1e-5)),
    ("column[0].at", replaced(MEAN, at=(0.5,))),
    ("column[0].at", replaced(QUANTILES, at=())),
    ("column[0].at", replaced(QUANTILES, at=(1.5,))),
]


@pytest.mark.parametrize(("field", "plan"), REFUSED)
def test_refused(field: str, plan: QueryPlan, refused: Refused) -> None:
    caught = refused(plan.check)
    assert caught.field == field


def test_which_bounds_are_chosen() -> None:
    assert QueryColumn("a", "mean").automatic
    assert QueryColumn("a", "count", per="group").automatic
    assert not QueryColumn("a", "count").automatic
    assert not any(column.automatic for column in ALL)


def columns(count: int) -> tuple[QueryColumn, ...]:
    return tuple(QueryColumn(f"c{i}", "units") for i in range(count))


WIDE = QueryColumn("w", "sum", 0, 1 << 32, per="group")
#: Each at its limit, and what is refused where it is one step further.
LIMITS: list[tuple[QueryPlan, QueryPlan, str]] = [
    (query(COUNT, epsilon=1_000.0), query(COUNT, epsilon=1_000.1), "epsilon"),
    (query(*columns(16)), query(*columns(17)), "columns"),
    (query(COUNT, groups=1), query(COUNT, groups=0), "max_groups_contributed"),
    (query(COUNT, groups=4_096), query(COUNT, groups=4_097), "max_groups_contributed"),
    (query(COUNT, norm=0.5), query(COUNT, norm=float("inf")), "contribution_norm"),
    (query(COUNT, min_units=1 << 22), query(COUNT, min_units=(1 << 22) + 1),
     "min_privacy_units_per_group"),
    (query(COUNT, min_units=1, selects=False), query(COUNT, min_units=2, selects=False),
     "min_privacy_units_per_group"),
    (query(COUNT, mechanism="geometric", selects=False, delta=0.0),
     query(COUNT, mechanism="geometric", delta=0.0), "delta"),
    (query(COUNT, selects=False), query(COUNT, selects=False, delta=0.0), "delta"),
    (query(COUNT, mechanism="geometric", selects=False, delta=0.5),
     query(COUNT, mechanism="geometric", selects=False, delta=1.0), "delta"),
    (replaced(MEAN, rows=1), replaced(MEAN, rows=0), "column[0].max_rows_contributed"),
    (replaced(MEAN, rows=1_024), replaced(MEAN, rows=1_025), "column[0].max_rows_contributed"),
    (replaced(MEAN, share=1e-9), replaced(MEAN, share=float("inf")), "column[0].share"),
    (replaced(SUM, grid=5.0), replaced(SUM, grid=float("inf")), "column[0].grid"),
    (replaced(QUANTILES, at=(0.5,) * 1_000), replaced(QUANTILES, at=(0.5,) * 1_001),
     "column[0].at"),
    (replaced(QUANTILES, at=(1.0,)), replaced(QUANTILES, at=(1.5, 0.5)), "column[0].at"),
    (query(WIDE), replaced(WIDE, high=(1 << 32) + 1.0), "column[0].grid"),
    (replaced(MEAN, kind="var", low=0.0, high=65_536.0, grid=1.0),
     replaced(MEAN, kind="var", low=0.0, high=65_537.0, grid=1.0), "column[0].grid"),
    (replaced(MEAN, kind="var", low=-65_536.0, high=0.0, grid=1.0),
     replaced(MEAN, kind="var", low=-65_537.0, high=0.0, grid=1.0), "column[0].grid"),
    (replaced(QUANTILES, at=(0.0,)), replaced(QUANTILES, at=(-0.5,)), "column[0].at"),
    (replaced(MEAN, low=0.0, high=65_537.0, grid=1.0),
     replaced(MEAN, low=0.2, high=1.2, grid=1.0), "column[0].grid"),
    (replaced(COUNT, low=0.5, high=1.5), replaced(COUNT, low=0.0, high=2.0, grid=0.5),
     "column[0].bounds"),
    (query(COUNT), replaced(COUNT, low=0.2, high=0.8), "column[0].grid"),
    (query(COUNT), replaced(COUNT, low=-0.5, high=0.5), "column[0].grid"),
    (replaced(WIDE, per="row", rows=1), replaced(WIDE, per="row", rows=2), "column[0].grid"),
    (replaced(WIDE, low=-1.0, high=0.0), replaced(WIDE, low=-1.0), "column[0].grid"),
    (replaced(WIDE, low=-(2.0**32), high=-1.0),
     replaced(WIDE, low=-(2.0**32) - 1, high=-(2.0**32)), "column[0].grid"),
    (query(SUM), replaced(SUM, low=float("-inf")), "column[0].bounds"),
    (query(SUM), replaced(SUM, high=None), "column[0].bounds"),
    (query(UNITS), replaced(UNITS, low=1.0), "column[0].bounds"),
    (query(UNITS), replaced(UNITS, high=1.0), "column[0].bounds"),
]  # fmt: skip


@pytest.mark.parametrize(("fine", "wrong", "field"), LIMITS)
def test_limits(fine: QueryPlan, wrong: QueryPlan, field: str, refused: Refused) -> None:
    fine.check()
    caught = refused(wrong.check)
    assert caught.field == field


def test_what_one_unit_may_bring() -> None:
    assert query(COUNT).most_groups == 4 and query(COUNT, groups=None).most_groups == 4_096
    assert SUM.most_rows == 1 and MEAN.most_rows == 3
    assert not QueryColumn("u", "units", per="group").automatic
    half = QueryColumn("a", "mean", low=1.0)
    assert not half.automatic and not QueryColumn("a", "mean", high=1.0).automatic


@pytest.mark.parametrize("cells", [2, 16, 256])
def test_levels_are_the_ones_of_a_column(cells: int) -> None:
    tree = tree_of(cells)
    assert (tree.matrix.sum(axis=0) == tree.levels).all()
    assert (
        tree.levels == levels_of(QueryColumn("q", "quantiles", 0, cells - 1)) == cells.bit_length()
    )


def test_least_squares_gives_exact_prefixes_back() -> None:
    tree = tree_of(64)
    counts = np.random.default_rng(1).integers(0, 50, (10, 64))
    estimates = (counts @ tree.matrix.T) @ tree.prefixes.T
    assert np.allclose(estimates, np.cumsum(counts, axis=1))


def test_covariance_of_prefixes() -> None:
    tree = tree_of(16)
    noise = np.random.default_rng(2).normal(size=(200_000, len(tree.matrix)))
    seen = np.cov((noise @ tree.prefixes.T).T)
    assert np.allclose(seen, tree.factor, atol=0.03)


def test_rank_factor_is_a_sd() -> None:
    column, tree = QueryColumn("q", "quantiles", 0, 15), tree_of(16)
    noise = np.random.default_rng(2).normal(size=(100_000, len(tree.matrix))) @ tree.prefixes.T
    seen = (noise - noise[:, -1:] / 2).std(axis=0).max()
    assert np.isclose(rank_factor(column), seen, rtol=0.01)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_are_means_of_prefixes(size: int) -> None:
    """By their definition, prefix by prefix; and of noise by its own draws."""
    tree, windows = tree_of(16), windows_of(16, size)
    prefix = np.cumsum(np.random.default_rng(3).integers(0, 9, 16)).astype(float)
    ahead, behind = (means @ prefix for means in windows.means)
    for cell in range(16):
        on = [prefix[min(cell + k, 15)] for k in range(size)]
        before = [prefix[cell - 1 - k] if cell > k else 0 for k in range(size)]
        assert np.isclose(ahead[cell], np.mean(on)) and np.isclose(behind[cell], np.mean(before))
    noise = np.random.default_rng(2).normal(size=(200_000, len(tree.matrix))) @ tree.prefixes.T
    for means, variance, total in zip(*windows, strict=True):
        smooth = noise @ means.T
        assert np.allclose(smooth.var(axis=0), variance, atol=0.03)
        assert np.allclose((smooth * noise[:, -1:]).mean(axis=0), total, atol=0.03)


def test_cells_follow_the_width_of_the_range_wherever_it_lies() -> None:
    for low in (-1_000_000, -8, 0, 500):
        for width, cells in ((2, 2), (16, 16), (27, 32), (129, 256), (5_000, 256)):
            column = QueryColumn("q", "quantiles", low, low + width - 1)
            assert cells_of(column) == cells == 1 << (levels_of(column) - 1)
            steps = np.arange(width)
            wanted = steps * cells // max(width, cells)
            assert cell_at(column, low + steps).tolist() == wanted.tolist()
            assert cell_at(column, low + steps).dtype == np.int64
        column = QueryColumn("q", "quantiles", low, low + 15)
        assert (cell_at(column, low + np.arange(16)) == np.arange(16)).all()
        assert (
            value_at(column, np.arange(16, dtype=np.float64) + 0.5) == low + np.arange(16)
        ).all()


def test_rank_factor_is_of_the_rows_of_the_inverse() -> None:
    for cells in (2, 16, 256):
        prefixes = tree_of(cells).prefixes
        wanted = np.linalg.norm(prefixes - prefixes[-1] / 2, axis=1).max()
        factor = rank_factor(QueryColumn("q", "quantiles", 0, cells - 1))
        assert np.isclose(factor, wanted, rtol=1e-9)


def ranges(*columns: QueryColumn) -> list[tuple[str, int, int, int]]:
    return [(p.what, p.low, p.high, p.nodes) for p in parts_of(query(*columns))]


def test_ranges() -> None:
    assert ranges(COUNT) == ranges(UNITS) == [("count", 0, 1, 1)]
    assert ranges(ROWS) == [("count", 0, 3, 1)]
    assert ranges(SUM) == [("sum", -4, 10, 1)]
    assert ranges(ROW_SUM) == [("sum", 0, 12, 1)]
    assert ranges(MEAN) == [("sum", -60, 60, 1), ("count", 0, 3, 1)]
    assert ranges(VAR) == [("sum", -8, 10, 1), ("square", -24, 26, 1), ("count", 0, 2, 1)]
    assert ranges(QUANTILES) == [("tree", 0, 2, 5)]


@pytest.mark.parametrize("column", [MEAN, VAR, STDDEV])
def test_ranges_hold_every_table_of_rows(column: QueryColumn) -> None:
    lo, hi = column.grid_bounds()
    total = next(p for p in parts_of(query(column)) if p.what == "sum")
    middle, most = middle_of(column), 0
    for values in itertools.combinations_with_replacement({lo, lo + 1, middle, hi - 1, hi}, 2):
        centred = [v - middle for v in values]
        most = max(most, *map(abs, centred))
        assert total.low <= sum(centred) <= total.high
        if column.kind != "mean":
            square = next(p for p in parts_of(query(column)) if p.what == "square")
            assert square.low <= sum(v * v - centre_of(column) for v in centred) <= square.high
    assert most == half_of(column) <= math.ceil((hi - lo) / 2)


def test_effects_of_a_unit() -> None:
    total, count = parts_of(query(MEAN))
    assert [total.l2_squared(n) for n in (1, 4)] == [3600, 4 * 3600]
    assert [count.l2_squared(n) for n in (1, 4)] == [9, 36]
    [tree] = parts_of(query(QUANTILES))
    assert tree.l2_squared(3) == 3 * 2**2 * 5
    total, count = parts_of(query(MEAN, groups=None, norm=4.0))
    assert [count.l2_squared(n) for n in (1, 2, 9)] == [9, 16, 16]
    assert total.l2_squared(100) == (4 * 20) ** 2
    assert count.alone == 3 * count.unit and total.unit == 1 << 16


def test_norms_are_of_what_one_row_adds() -> None:
    """R' = R times the most of one row, or of one unit of value: in grid units of the part."""
    fine = QueryColumn("f", "sum", -3, 1, rows=2, grid=0.25)
    wanted = {
        (COUNT, "count"): 1, (ROWS, "count"): 1, (UNITS, "count"): 1, (QUANTILES, "tree"): 1,
        (SUM, "sum"): 2, (fine, "sum"): 4, (MEAN, "sum"): 20, (MEAN, "count"): 1,
        (VAR, "sum"): 5, (VAR, "square"): 13, (STDDEV, "square"): 41,
    }  # fmt: skip
    for (column, what), row in wanted.items():
        parts = parts_of(query(column, groups=None, norm=1.5))
        [norm] = [part.norm for part in parts if part.what == what]
        assert norm == 1.5 * row, (column, what)
        assert all(part.norm is None for part in parts_of(query(column)))


def test_ranges_of_either_sign() -> None:
    assert ranges(QueryColumn("m", "mean", 10, 20, per="group")) == [
        ("sum", -5, 5, 1), ("count", 0, 1, 1),
    ]  # fmt: skip
    assert ranges(QueryColumn("n", "count", 2, 9, per="group")) == [("count", 0, 9, 1)]
    assert ranges(QueryColumn("s", "sum", -4, -1, rows=3)) == [("sum", -12, 0, 1)]
    low = parts_of(query(QueryColumn("s", "sum", -9, 2, per="group")))[0]
    assert low.most == 9 and low.l2_squared(2) == 2 * 81 and low.alone == 9


@pytest.mark.parametrize(("low", "high"), [(50, 150), (-150, -50), (-150, 50), (0, 150)])
def test_a_unit_that_comes_or_goes_moves_a_sum_by_its_farther_bound(low: int, high: int) -> None:
    """Absent (0) or in the bounds: never by the width of the bounds alone."""
    part = parts_of(query(QueryColumn("s", "sum", low, high, per="group")))[0]
    assert (part.low, part.high) == (min(low, 0), max(high, 0))
    assert part.most == 150 and part.l2_squared(3) == 3 * 150**2 and part.alone == 150


def test_every_part_can_be_absent() -> None:
    low = QueryColumn("l", "mean", 50, 150, per="group")
    for part in parts_of(query(*ALL, low, QueryColumn("c", "count", 3, 9, per="group"))):
        assert part.low <= 0 <= part.high


def test_scaled_vectors_of_coarse_grids_are_refined() -> None:
    def refined(low: int, high: int) -> int:
        column = QueryColumn("s", "sum", low, high, per="group")
        return parts_of(query(column, groups=None, norm=2.0))[0].refine

    assert refined(0, (1 << 16) - 1) == refined(1 - (1 << 16), 0) == 16
    assert refined(0, 1 << 16) == refined(-(1 << 16), 0) == refined(-(1 << 17), 1) == 0
    assert parts_of(query(SUM))[0].refine == 0


def test_parts_by_column() -> None:
    plan = query(MEAN, QUANTILES, UNITS)
    lone = QueryPart("", "count", 0, 1, 1, None, 0, 1.0)
    part_indices = parts_by_column(plan, (*parts_of(plan), lone))
    assert part_indices == {"m": [0, 1], "q": [2], "u": [3]}


GRID_SUM = QueryColumn("s", "sum", 0.0, 100.0)
AUTO = QueryColumn("a", "mean", per="group")


def plan(*columns: QueryColumn, epsilon: float = 1.0) -> QueryPlan:
    return QueryPlan(epsilon, 1e-9, 4, None, "gaussian", True, columns=columns)


@pytest.mark.parametrize("bits", [BITS, 16, LEAST_BITS])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.5, 7.0), (1e6, 2e6), (0.0, 2.0**-9)])
def test_a_step_is_the_largest_with_enough_of_them(bits: int, low: float, high: float) -> None:
    step = grid_of(QueryColumn("s", "sum", low, high, rows=1), False, bits)
    assert 2.0 ** (bits - 1) < max(abs(low), abs(high), high - low) / step <= 2.0**bits


def test_the_finest_grid_is_the_one_whose_noise_can_be_drawn(refused: Refused) -> None:
    def made(bits: int, epsilon: float) -> QueryPlan:
        return plan(
            msgspec.structs.replace(GRID_SUM, grid=grid_of(GRID_SUM, False, bits)),
            epsilon=epsilon,
        )

    assert finest(lambda bits: made(bits, 1.0)).bits == BITS
    coarse = finest(lambda bits: made(bits, 1e-4))
    assert coarse.bits < BITS and coarse.budget(coarse.plan).parts[0].scale < 2.0**40
    refused(lambda: allocate_query(made(BITS, 1e-4)))
    refused(lambda: finest(lambda bits: made(bits, 1e-12)))


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
