"""Draws per second of the rounded Gaussian, named by node, on one core.

    python -m tests.bench.sampler

Baseline in the same run: numpy's float normal, which is neither exact nor keyed.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from tests.bench.common import emit, machine


def bench(sigma: float, rows: int, nodes: int, repeats: int) -> dict[str, Any]:
    """Median rate of drawing ``nodes`` nodes of each of ``rows`` names."""
    start = time.perf_counter()
    sampler = RoundedGaussian(sigma)
    table_seconds = time.perf_counter() - start
    prf = KeyRing(bytes(32)).node
    rng = np.random.default_rng(0)
    tweaks = rng.integers(0, 2**63, (rows, 2)).astype(np.uint64)
    first, last = np.zeros(rows, np.int64), np.full(rows, nodes)
    sampler.draw(prf, tweaks[:10], first[:10], last[:10])
    rates, baseline = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        sampler.draw(prf, tweaks, first, last)
        rates.append(rows * nodes / (time.perf_counter() - start))
        start = time.perf_counter()
        rng.normal(0.0, sigma, rows * nodes)
        baseline.append(rows * nodes / (time.perf_counter() - start))
    return {
        "sigma": sigma,
        "table_seconds": round(table_seconds, 3),
        "draws_per_second": round(statistics.median(rates)),
        "numpy_normal_per_second": round(statistics.median(baseline)),
        "ratio": round(statistics.median(rates) / statistics.median(baseline), 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[5.0, 50.0, 1_500.0, 50_000.0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    runs = [bench(sigma, args.rows, args.nodes, args.repeats) for sigma in args.sigmas]
    emit({"benchmark": "sampler", **machine(), "runs": runs}, args.out)


if __name__ == "__main__":
    main()
