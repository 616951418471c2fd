"""Draws per second of the rounded Gaussian, named by node, and of one-shot draws, on one core.

    python -m tests.bench.sampler

Baseline in the same run: numpy's float normal, which is neither exact nor keyed.  One-shot draws
have each their own name and sd, from the least of ``--mixed`` to the largest, in CPU time.  The
laws of tables are drawn with one node of each name and with 47, at the scale of a census level.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.mechanisms import laws
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import RoundedGaussian, TableSampler
from tests.bench.common import emit, machine


def bench(sigma: float, rows: int, nodes: int, repeats: int) -> dict[str, Any]:
    """Median rate of drawing ``nodes`` nodes of each of ``rows`` names; the ratio of least CPU
    times too."""
    start = time.perf_counter()
    sampler = RoundedGaussian(sigma)
    table_seconds = time.perf_counter() - start
    prf = KeyRing(bytes(32)).node
    rng = np.random.default_rng(0)
    tweaks = rng.integers(0, 2**63, (rows, 2)).astype(np.uint64)
    first, last = np.zeros(rows, np.int64), np.full(rows, nodes)
    sampler.draw(prf, tweaks[:10], first[:10], last[:10])
    kernels: tuple[Callable[[], object], ...] = (
        lambda: sampler.draw(prf, tweaks, first, last),
        lambda: rng.normal(0.0, sigma, rows * nodes),
    )
    seconds: list[list[float]] = [[], []]
    used: list[list[float]] = [[], []]
    for _ in range(repeats):
        for side, kernel in enumerate(kernels):
            start, begun = time.perf_counter(), time.process_time()
            kernel()
            seconds[side].append(time.perf_counter() - start)
            used[side].append(time.process_time() - begun)
    own, base = (rows * nodes / statistics.median(side) for side in seconds)
    return {
        "sigma": sigma,
        "table_seconds": round(table_seconds, 3),
        "draws_per_second": round(own),
        "numpy_normal_per_second": round(base),
        "ratio": round(own / base, 2),
        "cpu_ratio": round(min(used[1]) / min(used[0]), 3),
    }


#: Laws of tables with the scale of a level of rho or epsilon .5 and s = 9.
_CELLS = {
    "discrete_gaussian": (laws.discrete_gaussian, 3.16227766016838),
    "rounded_gaussian": (laws.rounded_gaussian, 3.16227766016838),
    "discrete_laplace": (laws.discrete_laplace, 20.0),
}


#: Names of one call: their blocks stay in a core's cache.
_NAMES = 1 << 14


def bench_cells(draws: int, nodes: int, repeats: int) -> list[dict[str, Any]]:
    """Median rates of each table's draws, ``nodes`` of each name, by CPU time too."""
    prf, rng = KeyRing(bytes(32)).node, np.random.default_rng(0)
    tweaks = rng.integers(0, 2**63, (_NAMES, 2)).astype(np.uint64)
    first, last = np.zeros(_NAMES, np.int64), np.full(_NAMES, nodes)
    calls, entries = max(1, draws // (nodes * _NAMES)), []
    for law, (make, scale) in _CELLS.items():
        sampler = TableSampler(make(scale))
        sampler.draw(prf, tweaks, first, last)
        seconds, used = [], []
        for _ in range(repeats):
            start, begun = time.perf_counter(), time.process_time()
            for _ in range(calls):
                sampler.draw(prf, tweaks, first, last)
            seconds.append(time.perf_counter() - start)
            used.append(time.process_time() - begun)
        size = calls * nodes * _NAMES
        entries.append({
            "law": law,
            "scale": scale,
            "nodes": nodes,
            "draws_per_second": round(size / statistics.median(seconds)),
            "draws_per_cpu_second": round(size / statistics.median(used)),
        })  # fmt: skip
    return entries


def bench_mixed(least: float, largest: float, draws: int, repeats: int) -> list[dict[str, Any]]:
    """Median rates of each law's one-shot draws, all sds mixed, beside numpy's normal."""
    sds = np.exp(np.random.default_rng(0).uniform(np.log(least), np.log(largest), draws))
    items, rng = numbered(draws), np.random.default_rng(1)
    shot = OneShot(KeyRing(bytes(32)), (b"benchmark",), bytes(16))
    kernels: dict[str, Callable[[], object]] = {
        "numpy_normal": lambda: rng.normal(0.0, sds),
        "rounded_gaussian": lambda: shot.rounded_gaussian(items, sds),
        "discrete_laplace": lambda: shot.discrete_laplace(items, sds),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(repeats):
        for name, kernel in kernels.items():
            start = time.process_time()
            kernel()
            seconds[name].append(time.process_time() - start)
    rates = {name: draws / statistics.median(took) for name, took in seconds.items()}
    base = rates.pop("numpy_normal")
    return [
        {
            "law": name,
            "sds": [least, largest],
            "draws_per_cpu_second": round(rate),
            "numpy_normal_per_cpu_second": round(base),
            "ratio": round(rate / base, 2),
        }
        for name, rate in rates.items()
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[5.0, 50.0, 1_500.0, 50_000.0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--mixed", type=float, nargs=2, default=[0.3, 1e6])
    parser.add_argument("--draws", type=int, default=2_000_000, help="one-shot draws")
    parser.add_argument("--cells", type=int, default=4_000_000, help="draws of tables")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    runs = [bench(sigma, args.rows, args.nodes, args.repeats) for sigma in args.sigmas]
    least, largest = args.mixed
    mixed = bench_mixed(least, largest, args.draws, args.repeats)
    cells = [row for nodes in (1, 47) for row in bench_cells(args.cells, nodes, args.repeats)]
    result = {"runs": runs, "one_shot": mixed, "cells": cells}
    emit({"benchmark": "sampler", **machine(), **result}, args.out)


if __name__ == "__main__":
    main()
