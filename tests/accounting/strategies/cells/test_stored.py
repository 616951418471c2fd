"""Stored plans are read as written, or not at all."""

import io
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells import strategy as strategies
from dpstream.accounting.strategies.cells.auto import Plan, auto
from dpstream.accounting.strategies.cells.products import tridiagonal_optimum
from dpstream.accounting.strategies.cells.pure import pure
from dpstream.accounting.strategies.cells.stored import (
    from_arrays,
    lattice_arrays,
    lattice_of_arrays,
    to_arrays,
)
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Kron,
    dense_gram,
    identity,
    pseudo_inverse,
)
from dpstream.accounting.workloads.attributes import interval
from dpstream.accounting.workloads.workload import over
from tests.accounting.strategies.cells.shapes import small


def through_a_file(arrays: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    with np.load(file, allow_pickle=False) as read:
        return dict(read)


@pytest.mark.parametrize("name", small())
def test_what_is_read_is_what_was_written(name: str) -> None:
    workload = small()[name]
    plan = auto(workload)
    read = from_arrays(through_a_file(to_arrays(plan, workload.structure)), workload.structure)
    assert read[1:4] == plan[1:4] and read.note == plan.note
    assert read.strategy.name == plan.strategy.name
    assert read.strategy.error(workload) == plan.strategy.error(workload)
    for a, b in zip(read.certificate, plan.certificate, strict=True):
        assert (a == b).all()


def test_identity_is_stored_too() -> None:
    workload = over([3], ["identity"])
    arrays = to_arrays(Plan(identity(workload), "total", 3.0, 3.0), workload.structure)
    assert from_arrays(arrays, workload.structure).strategy.error(workload) == 3


@pytest.mark.parametrize("broken", ["digest", "block0.0", "numbers", "version", "text", "more"])
def test_damage_is_seen(broken: str) -> None:
    workload = over([4], ["range"])
    arrays = to_arrays(auto(workload), workload.structure)
    if broken == "digest":
        del arrays[broken]
    elif broken == "more":
        arrays[broken] = np.zeros(1)
    elif broken == "text":
        arrays[broken] = np.array(["", "", "", ""])
    else:
        arrays[broken] = (
            arrays[broken] * (1 + 1e-15) + 1e-15 if broken != "version" else np.array(2)
        )
    with pytest.raises(UsageError, match="remove it"):
        from_arrays(arrays, workload.structure)


def test_whole_numbers_are_stored_too() -> None:
    workload = over([6, 3], ["range", "total"])
    lattice = pure(workload).lattice(8)
    arrays = through_a_file(lattice_arrays("p-identity", lattice, workload.structure))
    name, read = lattice_of_arrays(arrays, workload.structure)
    assert name == "p-identity" and read.sensitivity1 == lattice.sensitivity1
    for a, b in zip(read.factors, lattice.factors, strict=True):
        assert a.dtype == np.int64 and (a == b).all()
    with pytest.raises(UsageError, match="another workload"):
        lattice_of_arrays(arrays, over([6], ["range"]).structure)
    arrays["factor0"] = arrays["factor0"] + 1
    with pytest.raises(UsageError, match="damaged"):
        lattice_of_arrays(arrays, workload.structure)


def test_another_workloads_strategy_is_refused() -> None:
    arrays = to_arrays(auto(over([4], ["range"])), over([4], ["range"]).structure)
    with pytest.raises(UsageError, match="another workload"):
        from_arrays(arrays, over([4], ["prefix"]).structure)


def test_spreads_are_stored_with_a_long_attribute() -> None:
    factor = interval("range", 30)
    others = [interval("prefix", 30), interval("total", 30)]
    gram = tridiagonal_optimum(factor, others=others).strategy.gram
    workload = over([30, 2], ["range", "identity"])
    assert isinstance(gram, Blocks)
    strategy = CellStrategy("optimum", Kron((gram, dense_gram(np.eye(2)))))
    arrays = to_arrays(Plan(strategy, "total", 1.0, 1.0), workload.structure)
    read = from_arrays(through_a_file(arrays), workload.structure).strategy.gram
    assert isinstance(read, Kron)
    assert read.factors[0].spread_of == gram.spread_of and len(gram.spread_of) == 3
    assert read.factors[1].spread_of == {}
    with mock.patch.object(strategies, "pseudo_inverse", wraps=pseudo_inverse) as inverted:
        assert read.spreads(workload) == strategy.gram.spreads(workload)
    assert {len(call.args[0]) for call in inverted.call_args_list} == {2}
