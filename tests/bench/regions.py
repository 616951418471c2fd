"""Budgets per record: seconds of a decision and a charge, and boxes that follow no grid.

    python -m tests.bench.regions [--unaligned N] [--cap N] [--out FILE]

CPU milliseconds, which other work on the machine disturbs least.  ``decide`` and ``charge`` at
10,000 and 100,000 regions of 8 dimensions: a grid of cells that have all spent something else, so
that nothing can be joined.  Queries are of three shapes, equally
often: one cell, a range in every dimension, everything.  Medians of all of them, the 99th
percentile, and the median by shape.  ``whole`` is a charge from the request to the committed entry
of a SQLite account (`state.ledger.regions`) and of its head file: CPU milliseconds, and those of
the clock with its flushes to the disk, beside the clock's of two flushes alone; the CPU
milliseconds of the same charges of an account without a head file, taken in turn; and the seconds
of a snapshot written and read.  Then N boxes of 6 dimensions without a common edge, one after
the other under a cap: most regions at any time, seconds of a charge, and how much more the points
are charged than they paid; and the same with a public grid of 4 cells a dimension.

The exit code is 1 when a limit is exceeded.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.regions.spent import Spent, charge, decide, restored, untouched
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger import balances
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import AccountPlace, open_ledger, open_path
from dpstream.state.ledger.orders import Order
from tests import accounts
from tests.accounting.regions.spaces import ask
from tests.bench.common import emit, machine
from tests.state.ledger.region_conformance import Payer

#: Milliseconds of a median decision, by regions; and of a charge, without the disk.
LIMITS = {10_000: 0.5, 100_000: 3.0}
CHARGE = {10_000: 5.0}
SHAPES = ("cell", "range", "all")
SIZE, CELLS = 1_000, 10
#: In millionths: cells have spent less, queries are of records with more.
LEAST = 500_000_000


def space_of(dimensions: int, grid: int = 1) -> Space:
    """Integers and an initial budget."""
    axes = [Integer(name=f"x{k}", low=0, high=SIZE, grid=grid) for k in range(dimensions - 1)]
    return Space((*axes, Budget(name="initial", most=1_000.0)))


def filled(regions: int) -> Spent:
    """A state of so many cells (a power of 10), each with an amount of its own."""
    space, width = space_of(8), SIZE // CELLS
    axes = len(str(regions)) - 1
    at = np.array(list(itertools.product(range(CELLS), repeat=axes))) * width
    boxes = np.repeat(space.everything, regions, axis=0)
    boxes[:, :axes, 0], boxes[:, :axes, 1] = at, at + width
    amounts = np.random.default_rng(0).permutation(regions) + 1
    return restored(space, "epsilon", boxes, amounts, 100_000)


def query(rng: np.random.Generator, shape: str, sizes: Int64) -> Int64:
    """One box; its records have enough."""
    box = np.stack([np.zeros_like(sizes), sizes], axis=1)
    if shape == "cell":
        box[:-1, 0] = rng.integers(0, CELLS, len(sizes) - 1) * (SIZE // CELLS)
        box[:-1, 1] = box[:-1, 0] + SIZE // CELLS
    elif shape == "range":
        box[:-1] = np.sort(rng.integers(0, SIZE, (len(sizes) - 1, 2)), axis=1)
        box[:-1, 1] += 1
    box[-1, 0] = LEAST
    return box[None]


def speed(regions: int, repeats: int) -> dict[str, Any]:
    """Milliseconds at so many regions; the state stays as it is."""
    spent, rng = filled(regions), np.random.default_rng(1)
    seconds: dict[str, dict[str, list[float]]] = {
        what: {shape: [] for shape in SHAPES} for what in ("decide", "charge")
    }
    for number in range(repeats):
        shape = SHAPES[number % len(SHAPES)]
        box = query(rng, shape, spent.space.sizes)
        start = time.thread_time()
        decision = decide(spent, box, 1_000)
        seconds["decide"][shape].append(time.thread_time() - start)
        assert decision.accepted
        start = time.thread_time()
        charge(spent, decision.charged, 1_000)
        seconds["charge"][shape].append(time.thread_time() - start)
    figures: dict[str, Any] = {"what": "regions", "regions": len(spent.boxes)}
    for what, by in seconds.items():
        every = np.concatenate([by[shape] for shape in SHAPES]) * 1e3
        figures |= {f"{what}_ms": np.median(every), f"{what}_p99_ms": np.percentile(every, 99)}
        figures |= {f"{what}_{shape}_ms": np.median(by[shape]) * 1e3 for shape in SHAPES}
    return {name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}


def charge_cost(regions: int, repeats: int) -> dict[str, Any]:
    """Charges in two accounts that hold so many regions, one of them with a head file."""
    spent, rng = filled(regions), np.random.default_rng(1)
    table = SessionTable(name="bench", dimensions=spent.space.dimensions)  # type: ignore[arg-type]
    cpu: dict[bool, list[float]] = {True: [], False: []}
    clock, flushes = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        ledgers = {headed: account(Path(folder), headed) for headed in cpu}
        for ledger in ledgers.values():
            closing.enter_context(contextlib.closing(ledger))
        payers = {headed: Payer(ledger, table) for headed, ledger in ledgers.items()}
        for number in range(repeats):
            box = query(rng, SHAPES[number % len(SHAPES)], spent.space.sizes)
            order = Order("epsilon", 1_000, "bench", lambda _, box=box: box)  # type: ignore[misc]
            # In turn first: what comes first finds colder caches.
            for headed in (True, False) if number % 2 else (False, True):
                payer = payers[headed]
                payer._state = replace(payer._state, spent={"epsilon": spent})
                start, begun = time.thread_time(), time.perf_counter()
                payer.pay(f"request {number}", order)
                ledgers[headed].keep_head()  # as whoever shows the answer
                cpu[headed].append(time.thread_time() - start)
                if headed:
                    clock.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with open(Path(folder) / "flushed", "ab") as out:
                for _ in range(2):
                    out.write(bytes(4_096))
                    out.flush()
                    os.fsync(out.fileno())
            flushes.append(time.perf_counter() - begun)
        start, file = time.thread_time(), Path(folder) / "account.npz"
        balances.write_snapshot(file, "bench", payers[True]._state)
        written = time.thread_time()
        assert balances.read_snapshot(file, table, ledgers[True]) is not None
        taken = time.thread_time() - written
    ms = {"cpu_ms": cpu[True], "without_head_ms": cpu[False], "clock_ms": clock,
          "two_flushes_ms": flushes}  # fmt: skip
    return {"what": "whole", "regions": regions} | {
        name: round(float(np.median(values)) * 1e3, 3) for name, values in ms.items()
    } | {"snapshot_s": round(written - start, 3), "restored_s": round(taken, 3)}  # fmt: skip


def account(folder: Path, headed: bool) -> Ledger:
    """An open account of its own, with or without a head file."""
    path = folder / str(headed) / "ledger.db"
    accounts.of_records(path, "bench").close()
    if not headed:
        return open_path(path)
    return open_ledger(AccountPlace(str(path), "bench", accounts.ID))


def unaligned(queries: int, cap: int, grid: int) -> dict[str, Any]:
    """Boxes of random edges in 6 dimensions, one after the other."""
    space, rng = space_of(6, grid), np.random.default_rng(2)
    spent, most = untouched(space, "epsilon", cap), 0
    probes = rng.integers(0, space.sizes, (500, 6))
    probes[:, -1] = space.sizes[-1] - 1
    paid, seconds = np.zeros(len(probes), np.int64), list[float]()
    for _ in range(queries):
        box = query(rng, "range", space.sizes)
        start = time.thread_time()
        decision, spent = ask(spent, box, 10)
        seconds.append(time.thread_time() - start)
        most = max(most, len(spent.boxes))
        inside = ((probes >= box[0, :, 0]) & (probes < box[0, :, 1])).all(axis=1)
        paid += 10 * (inside & decision.accepted)
    held = [spent.most_in(np.stack([p, p + 1], axis=1)[None]) for p in probes]
    assert (np.array(held) >= paid).all()
    return {
        "what": "unaligned", "queries": queries, "cap": cap, "grid": grid, "most_regions": most,
        "ask_ms": round(float(np.median(seconds)) * 1e3, 3), "seconds": round(sum(seconds), 2),
        "paid": float(paid.mean()), "charged": float(np.mean(held)),
    }  # fmt: skip


def within(figures: dict[str, Any]) -> bool:
    """Whether a measurement keeps the limits."""
    if figures["what"] == "unaligned":
        return bool(figures["most_regions"] <= figures["cap"])
    regions = figures["regions"]
    if figures["what"] == "whole":
        return bool(figures["cpu_ms"] <= CHARGE.get(regions, float("inf")))
    slow = figures["charge_ms"] > CHARGE.get(regions, float("inf"))
    return bool(figures["decide_ms"] <= LIMITS[regions] and not slow)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--unaligned", type=int, default=10_000)
    parser.add_argument("--cap", type=int, default=1_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    checks = []
    for regions in LIMITS:
        for measure in (speed, charge_cost):
            figures = measure(regions, given.repeats)
            emit(figures | machine(), given.out)
            checks.append(within(figures))
    for grid in (1, SIZE // 4):
        figures = unaligned(given.unaligned, given.cap, grid)
        emit(figures | machine(), given.out)
        checks.append(within(figures))
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
