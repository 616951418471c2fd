"""The table of rates and prices: what a person gives replaces it, and says so."""

import math

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.scale import rates


def test_a_given_price_replaces_the_lists() -> None:
    prices = rates.with_prices({"vcpu_hour": 0.5})
    assert prices["vcpu_hour"].value == 0.5
    assert prices["vcpu_hour"].kind == "given"
    assert {**prices, "vcpu_hour": rates.PRICES["vcpu_hour"]} == rates.PRICES


@pytest.mark.parametrize(
    ("name", "value"),
    [("beer", 1.0), ("vcpu_hour", -1.0), ("vcpu_hour", math.inf), ("vcpu_hour", math.nan)],
)
def test_what_is_no_price_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError) as error:
        rates.with_prices({name: value})
    assert error.value.field == "--price"


def test_this_machines_rates_are_the_tables_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "records_per_core_second", lambda: rates.REFERENCE / 2)
    figures = rates.measured_rates()
    for name, figure in rates.RATES.items():
        of_time = figure.unit.endswith("core-second")
        assert figures[name].value == (round(figure.value / 2) if of_time else figure.value)
        assert ("this machine" in figures[name].source) is of_time
