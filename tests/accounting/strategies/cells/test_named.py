"""Strategies by name, and the largest variance of a query."""

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.fixed import identity
from dpstream.accounting.strategies.cells.named import STRATEGIES, largest, named
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.workloads.workload import marginals, over
from tests.accounting.strategies.cells.shapes import attributes, small


@pytest.mark.parametrize("name", STRATEGIES[1:])
def test_every_strategy_of_a_small_domain(name: str) -> None:
    workload = small()["ranges"]
    strategy = named(workload, name)
    assert strategy.name == name
    assert largest(workload, strategy) == pytest.approx(
        max(variances.max() for variances in strategy.variances(workload))
    )


def test_a_strategy_is_refused_where_it_cannot_be_made() -> None:
    workload = marginals(attributes(*[10] * 20), [2], "range")
    for name in ("optimum", "eigen"):
        with pytest.raises(PolicyError):
            named(workload, name)
    assert named(over([100] * 3, ["range"] * 3), "optimum").sensitivity2 > 0


def test_the_largest_variance_without_a_list_of_queries() -> None:
    workload = over([100] * 3, ["range"] * 3)  # 128,787,625,000 queries
    assert largest(workload, identity(workload)) == pytest.approx(100.0**3)
    with pytest.raises(PolicyError):
        largest(workload, residual(workload)[0])
