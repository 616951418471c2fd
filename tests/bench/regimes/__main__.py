"""Our error beside the best rival's in every regime.

    python -m tests.bench.regimes                       # the whole grid
    python -m tests.bench.regimes --kinds "public stream" --triggers 100
    python -m tests.bench.regimes --sample 20 --seed 1

A cell fails where ours is above 1.02 times the best rival's (beyond two standard errors where
either is simulated); the exit code is 1 if one fails.  Rivals are ``tests.oracle.rivals``.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.common import emit, machine
from tests.bench.regimes import grid
from tests.bench.regimes.ours import GENERATORS


def chosen(args: argparse.Namespace) -> list[grid.Cell]:
    """The part of the grid that is asked for."""
    options = {
        name: getattr(args, name) for name in ("contributions", "triggers", "epsilons", "deltas")
    }

    def wanted(cell: grid.Cell) -> bool:
        if "x" in cell.where.split(" ")[-1]:
            return True
        if cell.kind.startswith("private") and cell.where not in args.populations:
            return False
        values = cell.contributions, cell.triggers, cell.epsilon, cell.delta
        return all(value in options[name] for name, value in zip(options, values, strict=True))

    part = [cell for cell in grid.cells() if cell.kind in args.kinds and wanted(cell)]
    if args.sample is not None:
        part = random.Random(args.seed).sample(part, min(args.sample, len(part)))
    return part


def line(row: grid.Row) -> str:
    """A row of the table."""
    cell = row.cell
    regime = f"{cell.kind:<16} {cell.where:<10}"
    if "x" not in cell.where.split(" ")[-1]:
        regime += (
            f" C={cell.contributions:<2} T={cell.triggers:<4} ({cell.epsilon:g}, {cell.delta:g})"
        )
    return (
        f"{'ok  ' if row.holds else 'LOST'} {regime:<52} {row.ours:>12.5g} {row.family:<20} "
        f"{row.best:>12.5g} {row.rival:<38} {row.ratio:.3f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=grid.KINDS, default=grid.KINDS)
    parser.add_argument("--contributions", nargs="+", type=int, default=grid.CONTRIBUTIONS)
    parser.add_argument("--triggers", nargs="+", type=int, default=grid.TRIGGERS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=grid.EPSILONS)
    parser.add_argument("--deltas", nargs="+", type=float, default=grid.DELTAS)
    parser.add_argument("--populations", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--sample", type=int, help="so many cells, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    start, rows = time.process_time(), list[grid.Row]()
    for cell in chosen(args):
        rows.append(grid.row(cell))
        if not args.json:
            print(line(rows[-1]), flush=True)
    lost = [row for row in rows if not row.holds]
    result: dict[str, Any] = {
        "benchmark": "regimes",
        **machine(),
        "cpu_seconds": round(time.process_time() - start, 1),
        "cells": [row.as_json() for row in rows],
    }
    if args.json or args.out is not None:
        emit(result, args.out)
    print(f"{len(rows)} cells, {len(lost)} lost", file=sys.stderr if args.json else sys.stdout)
    raise SystemExit(bool(lost))


if __name__ == "__main__":
    main()
