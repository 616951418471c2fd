"""How a workload is answered is decided from its structure, before a charge."""

from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.workload import Workload, marginals, over
from dpstream.pipelines.workload import ways
from dpstream.pipelines.workload.ways import way_of
from tests.bench.paper.cell_baselines import haar


def tables(size: int, attributes: int, kind: str = "range") -> Workload:
    return marginals([of_size(str(k), size) for k in range(attributes)], [2], kind)


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        (over([100] * 3, ["range"] * 3), "cells"),
        (tables(100, 3), "tables"),
        (tables(10, 20), "tables"),
        (tables(100, 5), "tables"),
        (tables(10, 4, "identity"), "tables"),
        (tables(5, 3, "identity"), "cells"),
        (over([300, 300], ["identity"] * 2), "cells"),
    ],
)  # fmt: skip
def test_what_is_chosen_can_be_answered(workload: Workload, way: str) -> None:
    assert way_of(workload, auto(workload).strategy) == way


def test_what_cannot_be_answered_is_refused() -> None:
    product = over([100] * 5, ["range"] * 5)
    with pytest.raises(PolicyError):
        way_of(product, auto(product).strategy)
    large = tables(60, 3)
    with mock.patch.object(ways, "MAX_PUBLISHED", 3), pytest.raises(PolicyError):
        way_of(large, residual(large)[0])
    with pytest.raises(PolicyError):
        way_of(over([9000, 2], ["identity"] * 2), identity(large))
    with pytest.raises(PolicyError):  # a product answers nothing of 10^20 cells
        way_of(tables(10, 20), haar(tables(10, 20)))
