"""UNITS: read from the count of units, wherever that gets its noise, and never from records."""

import numpy as np
import pytest

from dpstream.accounting.aggregates.base import COUNT, Exact, Prefix, Prefixes
from dpstream.accounting.aggregates.units import Units
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate

COLUMN = Aggregate("people", "units")
VALUES, RECORDS = np.array([3.0, 5.0]), np.array([70.0, 80.0])


def test_it_is_the_count_of_units() -> None:
    records = {COUNT: Prefix(None, RECORDS, RECORDS)}
    values, sd = Units().release(COLUMN, Prefixes(records, Prefix(None, VALUES, np.array(2.5))))
    assert values.tolist() == [3.0, 5.0] and sd.tolist() == [2.5, 2.5]
    by_trigger = Prefixes(records, Prefix(None, VALUES, np.array([1.0, 4.0])))
    assert Units().expected_sd(COLUMN, by_trigger)[0].tolist() == [1.0, 4.0]
    assert Units().exact(None, Exact(RECORDS, VALUES, None)) is VALUES


def test_without_a_count_of_units_there_is_nothing_to_say() -> None:
    none = Prefixes({COUNT: Prefix(None, RECORDS, RECORDS)}, None)
    for read in (Units().release, Units().expected_sd):
        with pytest.raises(ValueError, match="no count of units"):
            read(COLUMN, none)
    with pytest.raises(ValueError, match="no exact count"):
        Units().exact(None, Exact(RECORDS, None, None))


def test_it_keeps_no_sum_of_records() -> None:
    assert Units().own_stream(COLUMN) is None
    assert Units.counts_units and not Units.uses_count and not Units.divides


def test_it_takes_no_column() -> None:
    with pytest.raises(UsageError, match="no column") as caught:
        Units().check(Aggregate("people", "units", bounds=(0.0, 1.0)), "aggregate[0]")
    assert caught.value.field == "aggregate[0]"
