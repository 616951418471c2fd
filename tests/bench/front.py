"""The front of keys against L1 over skipping, tests, weights, shares and kinds, by simulation.

    python -m tests.bench.front --users 10000000 --triggers 100 --picture front.svg

Every point is a whole plan at the same (epsilon, delta) = (6, 1e-9), C = 32, with the product's
exact accounting; its mechanism is simulated directly (``tests.oracle.sweep``: the simulation that
agrees with the pipeline within 3%, at the tests alone).  ``same`` points count every record;
``per key`` points count one record per (user, key).  ``undominated`` marks points that no other of
their kind beats in both.  The one-shot mechanism, which publishes keys once, at the end of the
day, is drawn as lines: what continual release is held against.

Nothing here reads private data: the records are generated (mechanism.md section 1).
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.budget.shares import COMBINED
from dpstream.accounting.errors import UsageError
from dpstream.accounting.weights import MILD, SPARED, SelectionWeights
from tests.accounting.plans import allocate_sharing
from tests.bench.common import emit, machine
from tests.oracle.simulation import Design, table1_plan, table1_records
from tests.oracle.sweep import Sorted, sweep

#: A count of each record with the weights of selection; (offset, power).
SAME = tuple(itertools.product((1.0, 3.0), (0.25, 0.35, 0.5, 0.75, 1.0)))
#: One record per user and key.
PER_KEY = ((3.0, 0.75), (3.0, 1.0), (3.0, 1.5), (1.0, 1.5), (1.5, 2.0), (0.0, 2.0))
#: Tests of a window where published keys are skipped, beside the usual number.
TESTS = (3, 6, 10, 32, 100)
_COMBINED: dict[str, Any] = {"per_key_bound": 1, "combine": True}
#: One test, at the end; no published key to skip.
ONE_SHOT: dict[str, Any] = {
    **_COMBINED,
    "weights": SelectionWeights(2.0, 1.0),
    "selection_share": 0.65,
    "skip": False,
}


def settings() -> Iterator[dict[str, Any]]:
    """Settings of the mechanism of every point; what is not said is the product's default."""
    yield {}
    yield {"fused": True}
    for share in (0.5, 0.65, 0.8):
        yield {"per_key_bound": 1, "selection_share": share}
    for skip, weights, share in itertools.product((True, False), SAME, (0.6, 0.85, 0.95)):
        yield {"skip": skip, "weights": SelectionWeights(*weights), "selection_share": share}
    for skip, weights, share in itertools.product((True, False), PER_KEY, (0.5, COMBINED, 0.8)):
        kind = {**_COMBINED, "weights": SelectionWeights(*weights), "selection_share": share}
        yield {"skip": skip, **kind}
    for tests in TESTS:
        yield {"skip": True, "weights": MILD, "tests": tests}
        yield {"skip": True, "weights": SPARED, "tests": tests, **_COMBINED}


def default_of(setting: dict[str, Any]) -> bool:
    """Whether it is what a job gets that says nothing but its kind."""
    if not setting.get("skip") or "tests" in setting:
        return False
    usual, share = (SPARED, COMBINED) if setting.get("combine") else (MILD, 0.85)
    return bool(setting["weights"] == usual and setting["selection_share"] == share)


def point(setting: dict[str, Any], triggers: int, records: Sorted) -> dict[str, Any]:
    """Keys and errors of one setting at the last trigger, or why it is refused."""
    words = {k: str(v) for k, v in setting.items()}
    kind = "per key" if setting.get("per_key_bound") or setting.get("fused") else "same"
    named = {"settings": words, "kind": kind, "skips": bool(setting.get("skip"))}
    try:
        given = {"strategy": "blt", **setting}
        share = given.pop("selection_share", None)
        plan = table1_plan(triggers, **given)
        design = Design.of(plan, allocate_sharing(plan, share))
    except UsageError as error:
        return {**named, "refused": error.rule}
    averages = sweep(design, records, seed=2)
    figures = {"keys": averages.published[-1], "l1": round(averages.l1), "l2": round(averages.l2)}
    early = {"by_tenth": averages.by(triggers / 10), "by_half": averages.by(triggers / 2)}
    return {**named, "default": default_of(setting), **figures, **early}


def one_shot(triggers: int, records: Sorted) -> dict[str, Any]:
    """Keys and error with one test, at the last trigger, and the values' noise as elsewhere."""
    return point({**ONE_SHOT, "tests": (triggers,)}, triggers, records)


def mark(points: list[dict[str, Any]]) -> None:
    """Mark the points that no other of their kind beats in keys and L1."""
    for kind in ("same", "per key"):
        here = [p for p in points if p["kind"] == kind and "keys" in p]
        for p in here:
            better = [q for q in here if q["keys"] > p["keys"] and q["l1"] < p["l1"]]
            p["undominated"] = not better


def draw(points: list[dict[str, Any]], reference: dict[str, Any], path: Path) -> None:
    """Keys against L1: full where published keys are skipped; undominated points joined."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "dpstream"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained", facecolor="#fbfbfd")
    axis = figure.subplots()
    axis.set_facecolor("#fbfbfd")
    colours = {"same": "#1f5fa8", "per key": "#c2571a"}
    labels = {"same": "every record counts", "per key": "one record per user and key"}
    for kind, colour in colours.items():
        here = [p for p in points if p["kind"] == kind and "keys" in p]
        for skips in (False, True):
            series = [p for p in here if p["skips"] == skips]
            keys, wrong = (np.array([p[name] for p in series], float) for name in ("keys", "l1"))
            face = colour if skips else "none"
            axis.scatter(wrong / 1e6, keys, s=16, facecolors=face, edgecolors=colour, lw=0.9,
                         alpha=0.6)  # fmt: skip
        best = sorted((p["l1"] / 1e6, p["keys"]) for p in here if p["undominated"])
        axis.plot(*zip(*best, strict=True), color=colour, lw=1.5, label=labels[kind])
        for p in (p for p in here if p.get("default")):
            axis.scatter(p["l1"] / 1e6, p["keys"], s=130, marker="*", color=colour, zorder=4,
                         edgecolors="white", lw=0.8)  # fmt: skip
    axis.axhline(reference["keys"], color="#777", lw=1, ls="--")
    axis.axvline(reference["l1"] / 1e6, color="#777", lw=1, ls="--",
                 label="one-shot: keys published once, at the end")  # fmt: skip
    axis.scatter([], [], s=130, marker="*", color="#555", label="default")
    for face, label in (("#555", "published keys are skipped"), ("none", "they are not")):
        axis.scatter([], [], s=16, facecolors=face, edgecolors="#555", label=label)
    axis.set_xlabel("L1 error at the last trigger, millions (left is better)")
    axis.set_ylabel("keys published (up is better)")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    # Shares that leave nothing for values lie far to the right.
    axis.set_xlim(right=1.6 * max(p["l1"] for p in points if p.get("default")) / 1e6)
    axis.grid(color="#e4e6ea", lw=0.6, zorder=0)
    axis.legend(frameon=False, loc="lower right", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


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
    records = Sorted.of(table1_records(args.users, args.keys, args.seed), args.keys, 32)
    points = [point(setting, args.triggers, records) for setting in settings()]
    mark(points)
    reference = one_shot(args.triggers, records)
    if args.picture is not None:
        draw(points, reference, args.picture)
    sizes = {"users": args.users, "triggers": args.triggers, "seed": args.seed}
    result = {"benchmark": "front", **sizes, **machine(), "one_shot": reference, "points": points}
    emit(json.loads(json.dumps(result)), args.out)


if __name__ == "__main__":
    main()
