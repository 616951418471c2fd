"""SUM: grid units become the column's own, and a record moves it by the larger bound."""

import numpy as np
import pytest

from dpstream.accounting.aggregates.base import Exact, Prefix, Prefixes
from dpstream.accounting.aggregates.sum import Sum
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate

COLUMN = Aggregate("total", "sum", "x", (-3.0, 7.0), 0.5)
VALUES = np.array([10.0, -4.0])


def test_it_is_published_in_the_columns_own_units() -> None:
    stream = Sum().own_stream(COLUMN)
    assert stream is not None and (stream.sensitivity, stream.mid) == (14, 0)
    prefixes = Prefixes({"total": Prefix(stream, VALUES, np.array(6.0))}, None)
    values, sd = Sum().release(COLUMN, prefixes)
    assert values.tolist() == [5.0, -2.0] and sd.tolist() == [3.0, 3.0]
    by_trigger = Prefixes({"total": Prefix(stream, VALUES, np.array([1.0, 4.0]))}, None)
    assert Sum().expected_sd(COLUMN, by_trigger)[0].tolist() == [0.5, 2.0]
    assert Sum().exact(stream, Exact(VALUES, None, VALUES)).tolist() == [5.0, -2.0]


def test_the_lower_bound_counts_where_it_is_the_larger() -> None:
    stream = Sum().own_stream(Aggregate("low", "sum", "x", (-9.0, 3.0)))
    assert stream is not None and stream.sensitivity == 9


def test_an_exact_sum_needs_one() -> None:
    stream = Sum().own_stream(COLUMN)
    for given, total in ((None, VALUES), (stream, None)):
        with pytest.raises(ValueError, match="no exact sum"):
            Sum().exact(given, Exact(VALUES, None, total))


def test_it_needs_bounds() -> None:
    Sum().check(COLUMN, "aggregate[1]")
    with pytest.raises(UsageError, match="public bounds") as caught:
        Sum().check(Aggregate("total", "sum", "x"), "aggregate[1]")
    assert caught.value.field == "aggregate[1]"
    assert not (Sum.uses_count or Sum.counts_units or Sum.divides)
