"""Parts of columns: bounds, and the effect of one unit as the accounting states it."""

import itertools
import math

import pytest

from dpstream.accounting.query.parts import centre_of, half_of, middle_of, parts_of
from dpstream.accounting.query.plan import QueryColumn
from tests.queries import ALL, COUNT, MEAN, QUANTILES, ROW_SUM, ROWS, STDDEV, SUM, UNITS, VAR, query


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


def test_shares_add_up() -> None:
    assert math.isclose(sum(p.share for p in parts_of(query(*ALL))), 1)
    twice = parts_of(query(COUNT, QueryColumn("t", "sum", 0, 1, share=3.0)))
    assert [p.share for p in twice] == [0.25, 0.75]


def test_effects_of_a_unit() -> None:
    total, count = parts_of(query(MEAN))
    assert [total.squared(n) for n in (1, 4)] == [3600, 4 * 3600]
    assert [count.squared(n) for n in (1, 4)] == [9, 36]
    [tree] = parts_of(query(QUANTILES))
    assert tree.squared(3) == 3 * 2**2 * 5
    total, count = parts_of(query(MEAN, groups=None, norm=4.0))
    assert [count.squared(n) for n in (1, 2, 9)] == [9, 16, 16]
    assert total.squared(100) == (4 * 20) ** 2
    assert count.alone == 3 * count.unit and total.unit == 1 << 16
