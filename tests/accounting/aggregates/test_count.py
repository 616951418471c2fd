"""COUNT: the running count as it is, whatever other sums there are."""

import numpy as np
import pytest

from dpstream.accounting.aggregates.base import COUNT, Exact, Prefix, Prefixes
from dpstream.accounting.aggregates.count import Count
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate

COLUMN = Aggregate("n", "count")
VALUES, OTHER = np.array([3.0, -1.5]), np.array([70.0, 80.0])


def test_it_is_the_shared_count() -> None:
    prefixes = Prefixes(
        {"n": Prefix(None, OTHER, OTHER), COUNT: Prefix(None, VALUES, np.array(2.0))},
        Prefix(None, OTHER, OTHER),
    )
    values, sd = Count().release(COLUMN, prefixes)
    assert values.tolist() == [3.0, -1.5] and sd.tolist() == [2.0, 2.0]
    by_trigger = Prefixes({COUNT: Prefix(None, VALUES, np.array([1.0, 4.0]))}, None)
    sds, words = Count().expected_sd(COLUMN, by_trigger)
    assert sds.tolist() == [1.0, 4.0] and words == ""


def test_it_keeps_no_sum_of_its_own() -> None:
    assert Count().own_stream(COLUMN) is None
    assert Count.uses_count and not Count.counts_units and not Count.divides


def test_exactly_it_is_the_number_of_records() -> None:
    assert Count().exact(None, Exact(VALUES, OTHER, OTHER)) is VALUES


def test_it_takes_no_column() -> None:
    with pytest.raises(UsageError, match="no column") as caught:
        Count().check(Aggregate("n", "count", "x"), "aggregate[2]")
    assert caught.value.field == "aggregate[2]"
