"""CPU seconds of planning linear workloads and of answering them, one thread of the matrix library.

    python -m tests.bench.workloads
    python -m tests.bench.workloads --only optimum --large

Errors are RMSE over the singular value bound where that is computed.

Asked queries that are boxes of cells: their answers and variances by differences of running
sums.
"""

import argparse
import functools
import io
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.eigen import Vectors, spectrum, weigh
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import product_optimum, pure
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.stored import from_arrays, to_arrays
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over
from tests.bench.common import emit, machine
from tests.bench.paper.fewer_weights import Columns, Sines, squares

Result = dict[str, Any]


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its CPU seconds."""
    start = time.process_time()
    output = make()
    return output, round(time.process_time() - start, 3)


def sizes(*each: int) -> list[Any]:
    """Attributes of these sizes."""
    return [of_size(str(axis), size) for axis, size in enumerate(each)]


def program_1(large: bool) -> Iterator[Result]:
    """Weights of eigenvectors to a gap of 1e-3, beyond the eigenbasis."""
    prefixes = spectrum(over([2048], ["prefix"]))
    basis = Vectors(prefixes.folding, prefixes.vectors)
    sines = Sines(8192)
    cases = [("CDF 2048", basis, prefixes.values), ("1D range 8192", sines, sines.eigenvalues())]
    if large:
        written = Columns(squares(sines))
        cases.append(("1D range 8192, basis written out", written, sines.eigenvalues()))
    for name, design, c in cases:
        weights, seconds = timed(functools.partial(weigh, design, c))
        yield {"name": name, "seconds": seconds, "gap": weights.gap, "steps": weights.steps}


def optima(large: bool) -> Iterator[Result]:
    """Optima with their certificates."""
    rng = np.random.default_rng(0)
    cases: dict[str, Workload] = {
        "1D range 2048": over([2048], ["range"]),
        "CDF 2048": over([2048], ["prefix"]),
        "3D range 8x16x16": over([8, 16, 16], ["range"] * 3),
        "2-way range marginals 8x16x16": marginals(sizes(8, 16, 16), [2], "range"),
        "predicates 2048": of_matrix(rng.integers(0, 2, (2048, 2048))),
    }
    if large:
        cases["1D range 8192"] = over([8192], ["range"])
    for name, workload in cases.items():
        solved, seconds = timed(functools.partial(optimum, workload))
        yield {"name": name, "seconds": seconds, "gap": solved.gap, "steps": solved.steps}


def products(large: bool) -> Iterator[Result]:
    """Products axis by axis."""
    for each in ([100] * 3, [64] * 4, [1024] * 2):
        workload = over(each, ["range"] * len(each))
        solved, seconds = timed(functools.partial(product_optimum, workload))
        parts = workload.axes(workload.products[0])
        ratio = math.sqrt(solved.error / math.prod(spectrum(part).bound for part in parts))
        yield {"name": each, "seconds": seconds, "gap": solved.gap, "ratio": ratio}


def tables(large: bool) -> Iterator[Result]:
    """All 3-way tables of 100 attributes of 10 values, and the plan read back."""

    def plan() -> Any:
        workload = marginals(sizes(*[10] * 100), [3])
        return workload, auto(workload)

    (workload, strategy), seconds = timed(plan)
    yield {
        "name": "161,700 tables",
        "seconds": seconds,
        "rmse": math.sqrt(strategy.error / workload.weight),
    }
    yield reading("161,700 tables", workload, strategy)
    ranges = over([100] * 3, ["range"] * 3)
    yield reading("100^3", ranges, auto(ranges))


def reading(name: str, workload: Workload, plan: Any) -> Result:
    """A plan from a file."""
    file = io.BytesIO()
    np.savez(file, **to_arrays(plan, workload.structure))

    def read() -> Any:
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return from_arrays(arrays, workload.structure)

    _, seconds = timed(read)
    return {"name": f"{name} read back", "seconds": seconds, "bytes": file.tell()}


def unions(large: bool) -> Iterator[Result]:
    """All 2-way ranges and prefixes of large domains: RMSE, floor, and the plan read back."""
    cases = [([10] * 20, "range", [2]), ([10] * 20, "prefix", [2]), ([100] * 3, "range", [2]),
             ([100] * 5, "range", [2]), ([100] * 5, "prefix", [2])]  # fmt: skip
    if large:
        cases += [([8192, 3], kind, ways) for kind in ("range", "prefix") for ways in ([2], [1, 2])]
    for each, kind, ways in cases:

        def plan(each: list[int] = each, kind: str = kind, ways: list[int] = ways) -> Any:
            workload = marginals(sizes(*each), ways, kind)
            return workload, auto(workload)

        (workload, strategy), seconds = timed(plan)
        share = workload.weight
        name = f"{kind} {each[0]}" + (f" x {len(each)}" if each[0] == each[-1] else f" x {each[1]}")
        name += "" if ways == [2] else ", 1-way too"
        yield {
            "name": name,
            "seconds": seconds,
            "rmse": math.sqrt(strategy.error / share),
            "floor": math.sqrt(strategy.floor / share),
            "even": math.sqrt(residual(workload)[1] / share),
        }
        yield reading(name, workload, strategy)


def answers(large: bool) -> Iterator[Result]:
    """Noise of one trigger over 1e6 cells, and 100,000 asked boxes with their sds."""
    workload = over([100] * 3, ["range"] * 3)
    mix, seconds = timed(lambda: mixed(auto(workload).strategy, workload.sizes))
    yield {"name": "mix of 100^3", "seconds": seconds, "inverse_norm2": mix.inverse_norm2}
    rng = np.random.default_rng(0)
    lo, hi = np.sort(rng.integers(0, 100, (2, 100_000, 3)), axis=0)
    x = rng.integers(0, 50, (100,) * 3)

    def trigger() -> Any:
        noise = rng.normal(size=x.shape)
        for axis, factor in enumerate(mix.factors):
            noise = np.moveaxis(np.tensordot(factor, noise, (1, axis)), 0, axis)
        covariances = [factor @ factor.T for factor in mix.factors]
        return box_sums(x + noise, lo, hi), np.sqrt(box_variances(covariances, lo, hi))

    _, seconds = timed(trigger)
    yield {"name": "a trigger and 100,000 boxes", "seconds": seconds}
    ranges = over([2048], ["range"])
    strategy = auto(ranges).strategy
    mix, seconds = timed(lambda: mixed(strategy, ranges.sizes))
    yield {"name": "mix of 1D range 2048", "seconds": seconds, "inverse_norm2": mix.inverse_norm2}


def pure_epsilon(large: bool) -> Iterator[Result]:
    """p-identities, at Laplace variance 1."""
    for each in ([256], [256, 256]):
        workload = over(each, ["range"] * len(each))
        strategy, seconds = timed(functools.partial(pure, workload))
        rmse = math.sqrt(strategy.error(workload) / workload.queries)
        yield {"name": each, "seconds": seconds, "rmse": rmse}


PARTS = {
    "program_1": program_1,
    "optimum": optima,
    "products": products,
    "tables": tables,
    "unions": unions,
    "answers": answers,
    "pure": pure_epsilon,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--large", action="store_true", help="8,192 cells too: minutes, 3 GiB")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    with one_thread():
        runs = {name: list(PARTS[name](args.large)) for name in args.only}
    emit({"benchmark": "workloads", **machine(), "runs": runs}, args.out)


def box_sums(x: npt.NDArray[Any], lo: Int64, hi: Int64) -> npt.NDArray[Any]:
    """(k,) sums over boxes of cells; exact in integers.

    Args:
        x: cells, one axis for each attribute.
        lo: (k, axes) first and ``hi`` last cell on each axis.
    """
    sums = np.zeros([n + 1 for n in x.shape], np.result_type(x.dtype, np.int64))
    inner = sums[(slice(1, None),) * x.ndim]
    inner[...] = x
    for axis in range(x.ndim):
        np.cumsum(inner, axis=axis, out=inner)
    flat, strides = sums.ravel(), [math.prod(sums.shape[k + 1 :]) for k in range(x.ndim)]
    totals = np.zeros(len(lo), sums.dtype)
    for corner in itertools.product((0, 1), repeat=x.ndim):
        at = sum((hi[:, k] + 1 if high else lo[:, k]) * strides[k] for k, high in enumerate(corner))
        sign = 1 if (x.ndim - sum(corner)) % 2 == 0 else -1
        totals += sign * flat[at]
    return totals


def box_variances(covariances: Sequence[Float64], lo: Int64, hi: Int64) -> Float64:
    """(k,) variances of boxes where the covariance of the cells is a Kronecker product.

    Args:
        covariances: (n, n) for each axis.
        lo: (k, axes) first and ``hi`` last cell on each axis.
    """
    variances = np.ones(len(lo))
    for axis, covariance in enumerate(covariances):
        sums = np.zeros((len(covariance) + 1,) * 2)
        sums[1:, 1:] = covariance.cumsum(0).cumsum(1)
        a, b = lo[:, axis], hi[:, axis] + 1
        variances *= sums[b, b] - sums[a, b] - sums[b, a] + sums[a, a]
    return variances


if __name__ == "__main__":
    main()
