"""Estimates of quotients: NULL, bounds, first-order errors."""

import numpy as np

from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.one_shot.estimates import Estimate, direct, mean, variance
from tests.queries import MEAN, STDDEV, SUM, VAR, query

Z = 1.96


def parts(column: QueryColumn) -> list:  # type: ignore[type-arg]
    return list(allocate_query(query(column)).parts)


def whole(*values: int) -> list:  # type: ignore[type-arg]
    return [np.array([value]) for value in values]


def test_no_count_is_null() -> None:
    for count in (0, -4):
        assert np.isnan(mean(MEAN, parts(MEAN), whole(3, count), Z)).all()
        assert np.isnan(variance(VAR, parts(VAR), whole(3, 5, count), Z)).all()
    assert not np.isnan(mean(MEAN, parts(MEAN), whole(3, 1), Z)).any()


def test_everything_stays_in_its_range() -> None:
    far = mean(MEAN, parts(MEAN), whole(10**9, 5), Z)
    assert far.value[0] == far.high[0] == 20 and far.low[0] >= 10
    for column, most in ((VAR, 25.0), (STDDEV, 5.0)):
        for square in (10**9, -(10**9)):
            found = variance(column, parts(column), whole(0, square, 9), Z)
            assert all(0 <= part[0] <= most for part in (found.value, found.low, found.high))
            assert found.sd[0] >= 0 and np.isfinite(found.sd[0])


def test_first_order_errors() -> None:
    """Against small differences of the estimate itself."""

    def value(made: Estimate) -> float:
        return float(made.value[0])

    for column, at in ((MEAN, (7_000, 3_000)), (VAR, (-2_000, 9_000, 5_000)),
                       (STDDEV, (-2_000, 9_000, 5_000))):  # fmt: skip
        noises, make = parts(column), mean if column is MEAN else variance
        base = make(column, noises, whole(*at), Z)
        total = 0.0
        for index, noise in enumerate(noises):
            moved = list(at)
            moved[index] += 20
            slope = (value(make(column, noises, whole(*moved), Z)) - value(base)) / 20
            total += (slope * noise.sd) ** 2
        assert abs(total**0.5 / float(base.sd[0]) - 1) < 0.02


def test_a_sum_in_its_own_units() -> None:
    [noise] = parts(SUM)
    found = direct(SUM, noise, np.array([7]))
    assert found.value[0] == 3.5 and found.high[0] - 3.5 == noise.margin * 0.5
