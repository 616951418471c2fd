"""The front of keys against L1 over strategies, weights, shares and kinds, by simulation.

    python -m tests.bench.front --users 1000000 --triggers 100 --picture front.png

Every point is a whole plan at the same (epsilon, delta) = (6, 1e-9), C = 32, with the product's
exact accounting; its mechanism is simulated directly (``tests.oracle.simulation``, which agrees
with the pipeline within 3%).  ``same`` points count every record; ``per key`` points count one
record per (user, key).  ``undominated`` marks points that no other of their kind beats in both.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.weights import SelectionWeights
from tests.bench.common import emit, machine
from tests.oracle.simulation import (
    Design,
    Records,
    admit,
    ranked,
    simulate,
    table1_plan,
    table1_records,
)

POWERS = (0.25, 0.35, 0.5, 0.75, 1.0, 1.5)
OFFSETS = (1.0, 3.0, 6.0)


def settings() -> Iterator[dict[str, Any]]:
    """Settings of ``[privacy]`` of every point."""
    for strategy in ("tree", "toeplitz", "blt"):
        yield {"strategy": strategy}
        yield {"strategy": strategy, "fused": True}
        for share in (0.5, 0.65, 0.8, 0.9):
            yield {"strategy": strategy, "per_key_bound": 1, "selection_share": share}
    for power, offset in itertools.product(POWERS, OFFSETS):
        weights = {"strategy": "blt", "weights": SelectionWeights(offset, power)}
        for share in (0.8, 0.9, 0.97):
            yield {**weights, "selection_share": share}
        for share in (0.5, 0.65, 0.8):
            combined = {"per_key_bound": 1, "combine": True, "selection_share": share}
            yield {**weights, **combined}


def point(setting: dict[str, Any], triggers: int, bounded: Records, raw: Records) -> dict[str, Any]:
    """Keys and errors of one setting at the last trigger, or why it is refused."""
    words = {k: str(v) for k, v in setting.items()}
    kind = "per key" if setting.get("per_key_bound") or setting.get("fused") else "same"
    try:
        plan = table1_plan(triggers, **setting)
        design = Design.of(plan, allocate(plan))
    except UsageError as error:
        return {"settings": words, "kind": kind, "refused": error.rule}
    found = simulate(design, bounded, raw, int(raw.key.max()) + 1, seed=2)
    figures = {"keys": found.keys, "l1": round(found.l1), "l1_average": round(found.mean_l1)}
    return {"settings": words, "kind": kind, **figures}


def mark(points: list[dict[str, Any]]) -> None:
    """Mark the points that no other of their kind beats in keys and L1."""
    for kind in ("same", "per key"):
        here = [p for p in points if p["kind"] == kind and "keys" in p]
        for p in here:
            better = [q for q in here if q["keys"] > p["keys"] and q["l1"] < p["l1"]]
            p["undominated"] = not better


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Keys against L1; undominated points joined."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axis = figure.subplots()
    colours = {"same": "#1f5fa8", "per key": "#c2571a"}
    labels = {"same": "every record counts", "per key": "one record per user and key"}
    for kind, colour in colours.items():
        here = [p for p in points if p["kind"] == kind and "keys" in p]
        keys, wrong = (np.array([p[name] for p in here], float) for name in ("keys", "l1"))
        axis.scatter(wrong / 1e6, keys, s=14, color=colour, alpha=0.45, lw=0)
        best = sorted((p["l1"] / 1e6, p["keys"]) for p in here if p["undominated"])
        axis.plot(*zip(*best, strict=True), color=colour, lw=1.5, label=labels[kind])
    axis.set_xlabel("L1 error at the last trigger, millions")
    axis.set_ylabel("keys published")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--triggers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="PNG or SVG")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    raw = table1_records(args.users, args.keys, args.seed)
    bounded = admit(ranked(raw), 32)
    points = [point(setting, args.triggers, bounded, raw) for setting in settings()]
    mark(points)
    if args.picture is not None:
        draw(points, args.picture)
    sizes = {"users": args.users, "triggers": args.triggers, "seed": args.seed}
    result = {"benchmark": "front", **sizes, **machine(), "points": points}
    emit(json.loads(json.dumps(result)), args.out)


if __name__ == "__main__":
    main()
