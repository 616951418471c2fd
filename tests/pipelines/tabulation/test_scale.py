"""What a load needs."""

import itertools

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.public_plan import plan
from dpstream.pipelines.tabulation.scale import MOST, estimate, text
from tests.pipelines.tabulation.office import Office


def test_more_records_need_more_until_all_cells_are_full(made: Office) -> None:
    prepared = plan(*made, Choice("p")).prepared
    estimates = [estimate(prepared, 10**power) for power in (2, 4, 6, 10)]
    for less, more in itertools.pairwise(estimates):
        assert less["cpu_seconds"] <= more["cpu_seconds"] and less["pairs"] <= more["pairs"]
    assert estimates[-1]["pairs"] == estimates[-1]["most_cells"] == 593 * 46
    assert estimates[-1]["cpu_seconds"] > 1_000
    assert "h of one core" in text(estimates[-1]) and "s of one core" in text(estimates[0])


def test_households_have_two_tables(made: Office) -> None:
    persons, homes = (plan(*made, Choice(p)).prepared for p in ("p", "h"))  # type: ignore[arg-type]
    assert estimate(homes, 10**6)["groups"] == 2 * estimate(persons, 10**6)["groups"]
    assert estimate(homes, 10**6)["cpu_seconds"] > estimate(persons, 10**6)["cpu_seconds"]


@pytest.mark.parametrize("units", [0, -1, MOST + 1])
def test_loads_that_are_none(made: Office, units: int) -> None:
    with pytest.raises(UsageError, match="--scale"):
        estimate(plan(*made, Choice("p")).prepared, units)
