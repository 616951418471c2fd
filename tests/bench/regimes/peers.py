"""PipelineDP's and OpenDP's selection by their own packages, beside the rivals' formulas.

    python -m tests.bench.regimes.peers           # compare; exit code 1 beyond 2%
    python -m tests.bench.regimes.peers --record  # and write what the packages say

The packages run in an environment of their own (`tests/bench/environments`), which the command
makes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import environments
from tests.oracle.rivals import keys

RECORDED = Path(__file__).with_name("peers.json")
CASES = ((0.5, 1e-6, 1), (1.0, 1e-6, 4), (1.0, 1e-9, 2), (6.0, 1e-9, 8), (6.0, 1e-6, 32))
STRATEGIES = ("truncated_geometric", "laplace", "gaussian")
SIZES = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200)
#: How far a formula may be from the package.
ALLOWED = 0.02


def measured() -> dict[str, Any]:
    """What the packages say: PipelineDP's chances of selection, OpenDP's least thresholds."""
    import opendp.prelude as dp
    from pydp.algorithms import partition_selection  # type: ignore[import-not-found]

    dp.enable_features("contrib")
    chances = {}
    for epsilon, delta, count in CASES:
        for name in STRATEGIES:
            chosen = partition_selection.create_partition_strategy(name, epsilon, delta, count)
            keep_chances = [chosen.probability_of_keep(size) for size in SIZES]
            chances[f"{name} {epsilon:g} {delta:g} {count}"] = keep_chances
    space = (
        dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T=int)),
        dp.l01inf_distance(dp.absolute_distance(T=int)),
    )
    thresholds = {}
    for epsilon, delta, count in CASES:
        scale, limit = count / epsilon, (count, count, 1)

        def enough(
            at: int, scale: float = scale, limit: tuple[int, int, int] = limit,
            most: tuple[float, float] = (epsilon, delta),
        ) -> bool:  # fmt: skip
            chosen: Any = dp.m.make_laplace_threshold(*space, scale=scale, threshold=at)
            spent = chosen.map(limit)
            return bool(spent[0] <= most[0] * (1 + 1e-9) and spent[1] <= most[1])

        low, high = 1, 2
        while not enough(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        thresholds[f"{epsilon:g} {delta:g} {count}"] = high
    return {"chances": chances, "thresholds": thresholds}


def worst(record: dict[str, Any]) -> float:
    """The largest relative difference of a formula from a package."""
    off = [0.0]
    for epsilon, delta, count in CASES:
        case = f"{epsilon:g} {delta:g} {count}"
        for name in STRATEGIES:
            ours = keys.pipelinedp_keep(name, epsilon, delta, count, np.array(SIZES))
            theirs = np.array(record["chances"][f"{name} {case}"])
            off.append(float(np.abs(ours / theirs - 1).max()))
        at = record["thresholds"][case]
        off.append(abs(keys.opendp_threshold(epsilon, delta, count) / at - 1))
    return max(off)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    if not environments.inside("peers"):
        sys.exit(environments.run_inside("peers", "tests.bench.regimes.peers", sys.argv[1:]))
    record = measured()
    if args.record:
        RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    off = worst(record)
    print(json.dumps({"benchmark": "regimes.peers", "largest_difference": off}))
    raise SystemExit(off > ALLOWED)


if __name__ == "__main__":
    main()
