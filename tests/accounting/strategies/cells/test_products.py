"""Products of optima, and unions that take turns.

p-identities: gradient, sensitivity, lattice and published figures.

Stored plans are read as written, or not at all.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.linalg

from dpstream.accounting.arrays import kron
from dpstream.accounting.strategies.cells import products as module
from dpstream.accounting.strategies.cells import strategy as strategies
from dpstream.accounting.strategies.cells.auto import Plan, auto
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import (
    SUMMED,
    PureStrategy,
    alternating,
    floor_of,
    p_identity,
    product_optimum,
    pure,
    tridiagonal_floor,
    tridiagonal_optimum,
    value_and_gradient,
)
from dpstream.accounting.strategies.cells.residual import residual
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
    tree,
    wavelet,
)
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import marginals, of_matrix, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small
from tests.golden.refusals import Refused


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize("size", [5, 37, 1300])
def test_the_same_optimum(kind: str, size: int) -> None:
    workload = over([size], [kind])
    solution = tridiagonal_optimum(interval(kind, size))
    gram = solution.strategy.gram
    assert isinstance(gram, Blocks)
    matrix = gram.dense()
    assert np.array_equal(matrix, matrix.T)
    np.testing.assert_allclose(np.diag(matrix), 1, rtol=1e-9)
    assert solution.strategy.error(workload) == pytest.approx(solution.error, rel=1e-6)
    assert solution.floor <= solution.error <= solution.floor * (1 + 1e-3)
    assert solution.error == pytest.approx(optimum(workload, 1e-4).error, rel=1.1e-3)
    factor = np.linalg.cholesky(interval(kind, size).gram())
    queries = np.asarray(factor.T, np.float64)  # the same Gram matrix
    assert solution.floor <= floor(queries, solution.certificate[0]) * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["range", "prefix"])
def test_spreads_are_those_of_the_matrix(kind: str) -> None:
    """Of running sums of eigenvectors, as of the inverse; other factors are left out."""
    size = 61
    each = [interval(other, size, 7 if other == "width" else 0) for other in SUMMED]
    left_out = [interval("prefix", size, relative=True), explicit(np.eye(size), size)]
    gram = tridiagonal_optimum(interval(kind, size), others=[*each, *left_out]).strategy.gram
    assert isinstance(gram, Blocks)
    assert set(gram.spread_of) == {factor.canonical() for factor in each}
    inverted = replace(gram, spread_of={})
    for factor in each:
        workload = workload_of([of_size("a", size)], [(1.0, {0: factor})])
        [spread], [exact] = gram.spreads(workload), inverted.spreads(workload)
        assert spread.mean == pytest.approx(exact.mean, rel=1e-9)
        assert gram.trace(workload) == pytest.approx(inverted.trace(workload), rel=1e-9)
        if factor.kind != "range":  # too many to be listed
            assert spread[1:] == pytest.approx(exact[1:], rel=1e-9)
    # Whatever else is asked is inverted.
    queries = of_matrix(np.eye(size)[:3])
    assert gram.trace(queries) == pytest.approx(inverted.trace(queries))


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize("size", [5, 37, 300, 1300])
def test_the_floor_alone(kind: str, size: int) -> None:
    factor = interval(kind, size)
    best = optimum(over([size], [kind]), 1e-4)
    assert best.floor * (1 - 2e-3) <= tridiagonal_floor(factor) <= best.error


def test_the_last_decomposition_is_used_again() -> None:
    factor = interval("range", 40)
    made = scipy.linalg.eigh_tridiagonal
    with mock.patch.object(scipy.linalg, "eigh_tridiagonal", side_effect=made) as solved:
        solution = tridiagonal_optimum(factor)
    assert solved.call_count == solution.steps
    # A point before the last one may be the best: then its own is made again.
    worse = tridiagonal_optimum(factor, tolerance=0.0, most=6)
    assert worse.error <= solution.error
    assert worse.strategy.error(over([40], ["range"])) == pytest.approx(worse.error, rel=1e-9)


@pytest.mark.parametrize("name", ["a product", "with a total"])
def test_the_product_of_optima_is_the_optimum(name: str) -> None:
    workload = small()[name]
    solved, reference = product_optimum(workload, 1e-4), optimum(workload, 1e-4)
    assert solved.error == pytest.approx(reference.error, rel=2e-4)
    assert solved.strategy.error(workload) == pytest.approx(solved.error, rel=1e-6)
    certificate = kron(list(solved.certificate))
    assert solved.floor <= floor(rows(workload), certificate) * (1 + 1e-9)


def test_a_weight_multiplies_the_error() -> None:
    factors = {0: interval("range", 4), 1: interval("range", 3)}
    one, five = (product_optimum(workload_of(attributes(4, 3), [(w, factors)])) for w in (1, 5))
    assert (five.error, five.floor) == pytest.approx((5 * one.error, 5 * one.floor))


@pytest.mark.parametrize(("sizes", "most"), [([100] * 3, 1.0314), ([64] * 4, 1.0446)])
def test_figures_of_large_products(sizes: list[int], most: float) -> None:
    workload = over(sizes, ["range"] * len(sizes))
    solved = product_optimum(workload, 2e-4)
    bound = math.prod(spectrum(part).bound for part in workload.axes(workload.products[0]))
    assert solved.gap <= 2e-4
    assert 1 <= math.sqrt(solved.error / bound) <= most


def test_unions_take_turns() -> None:
    workload = marginals(attributes(3, 4, 5), [1, 2], "range")
    strategy, reference = alternating(workload), optimum(workload)
    assert reference.floor <= strategy.error(workload) <= 1.5 * reference.error
    assert strategy.error(workload) <= residual(workload)[1] * 1.2
    assert floor_of(workload) <= reference.error
    assert floor_of(small()["a product"]) == pytest.approx(
        product_optimum(small()["a product"], 1e-5).floor, rel=2e-2
    )
    # A single product is solved as well as by itself.
    one = small()["a product"]
    assert alternating(one).error(one) == pytest.approx(product_optimum(one).error, rel=2e-3)


def test_an_axis_beyond_the_limit(refused: Refused) -> None:
    refused(lambda: product_optimum(over([8193], ["range"])))
    refused(lambda: floor_of(marginals(attributes(8193, 2), [1], "range")))


def test_the_gradient_is_that_of_the_value() -> None:
    gram, flat = over([6], ["range"]).gram(), np.random.default_rng(0).random(12)
    _, slope = value_and_gradient(flat, gram, 2)
    for k in (0, 7, 11):
        step = np.eye(12)[k] * 1e-6
        rise = (
            value_and_gradient(flat + step, gram, 2)[0]
            - value_and_gradient(flat - step, gram, 2)[0]
        ) / 2e-6
        assert rise == pytest.approx(slope[k], rel=1e-6)


def test_p_identities_have_norm_one_and_the_error_of_the_formula() -> None:
    workload = over([64], ["range"])
    matrix = p_identity(workload.gram(), 4)
    np.testing.assert_allclose(np.abs(matrix).sum(0), 1.0)
    queries = rows(workload)
    inverse = np.linalg.inv(matrix.T @ matrix)
    strategy = PureStrategy("x", (matrix,))
    assert strategy.error(workload) == pytest.approx(np.trace(queries @ inverse @ queries.T))
    assert strategy.error(workload) < PureStrategy("x", (np.eye(64),)).error(workload)


def test_sensitivity_is_the_largest_column_over_all_axes() -> None:
    strategy = PureStrategy("x", (np.array([[1.0, -2.0]]), np.array([[1.0], [3.0]])))
    matrix = np.kron(*strategy.factors)
    assert np.abs(matrix).sum(0).max() <= strategy.sensitivity1 <= 8 * (1 + 1e-9)


@pytest.mark.parametrize("size", [40, 64])
def test_a_lattice_measures_every_cell(size: int) -> None:
    workload = of_matrix(np.ones((1, size)))
    lattice = pure(workload).lattice()
    assert np.linalg.matrix_rank(lattice.factors[0].astype(float)) == size
    assert math.isfinite(lattice.floats().error(workload))


def test_the_lattice_is_whole_and_its_sensitivity_exact() -> None:
    workload = over([64, 8], ["range", "prefix"])
    strategy = pure(workload)
    assert strategy.name == "product" and len(strategy.factors[0]) > 64
    lattice = strategy.lattice()
    matrix = np.kron(*lattice.factors)
    assert matrix.dtype == np.int64 and lattice.sensitivity1 == np.abs(matrix).sum(0).max()
    assert lattice.floats().error(workload) == pytest.approx(strategy.error(workload), rel=5e-3)


@pytest.mark.parametrize("bits", [4, 12])
def test_the_choice_is_by_what_is_left_after_rounding(bits: int) -> None:
    """Nearly rank one: the best real strategy hardly measures cells, and rounds to far too much."""
    rows = np.concatenate([np.ones((1, 64)), 1e-4 * np.eye(64)])
    workload = of_matrix(rows)
    errors = [
        pure(workload, given).lattice(bits).floats().error(workload) for given in (bits, None)
    ]
    others = [
        PureStrategy("x", (made,)).lattice(bits).floats().error(workload)
        for made in (np.eye(64), tree(64), wavelet(64))
    ]
    assert errors[0] <= min(errors[1], *others) * (1 + 1e-12)
    assert errors[0] < 0.9 * errors[1] or bits == 12


def test_refusals(refused: Refused) -> None:
    refused(lambda: pure(small()["range marginals"]))
    refused(lambda: pure(over([1025], ["range"])))
    assert pure(marginals(attributes(8), [0, 1], "range")).sensitivity1 == pytest.approx(
        1, rel=1e-9
    )


def test_an_attribute_of_the_most_cells_is_answered(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(module, "MAX_PURE_CELLS", 9)
    assert pure(over([9], ["range"])).factors[0].shape[1] == 9
    refused(lambda: pure(over([10], ["range"])))


@pytest.mark.slow
def test_figures_of_hdmm() -> None:
    for sizes, most in (([256], 5.74), ([256, 256], 32.7)):
        workload = over(sizes, ["range"] * len(sizes))
        strategy = pure(workload)
        assert math.sqrt(strategy.error(workload) / workload.queries) <= most
        lattice = strategy.lattice().floats()
        assert math.sqrt(lattice.error(workload) / workload.queries) <= most


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
def test_damage_is_seen(broken: str, refused: Refused) -> None:
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
    refused(lambda: from_arrays(arrays, workload.structure))


def test_whole_numbers_are_stored_too(refused: Refused) -> None:
    workload = over([6, 3], ["range", "total"])
    lattice = pure(workload).lattice(8)
    arrays = through_a_file(lattice_arrays("p-identity", lattice, workload.structure))
    name, read = lattice_of_arrays(arrays, workload.structure)
    assert name == "p-identity" and read.sensitivity1 == lattice.sensitivity1
    for a, b in zip(read.factors, lattice.factors, strict=True):
        assert a.dtype == np.int64 and (a == b).all()
    refused(lambda: lattice_of_arrays(arrays, over([6], ["range"]).structure))
    arrays["factor0"] = arrays["factor0"] + 1
    refused(lambda: lattice_of_arrays(arrays, workload.structure))


def test_another_workloads_strategy_is_refused(refused: Refused) -> None:
    arrays = to_arrays(auto(over([4], ["range"])), over([4], ["range"]).structure)
    refused(lambda: from_arrays(arrays, over([4], ["prefix"]).structure))


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
