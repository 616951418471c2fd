"""What one charge costs in an account of so many entries.

    python -m tests.bench.ledger

What the disk needs to make one small change durable is reported apart.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpstream.state.ledger.events import Charge
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.bench.common import emit, machine

LIMIT = (400.0, 1e-3)


def charge(run: int, zcdp: bool = False) -> Charge:
    """Mostly Gaussian queries of a session; one in ten is plain, and with ``zcdp`` as many zCDP."""
    noise: dict[str, Any] = {"mu": 0.01}
    if run % 10 == 0:
        noise = {"mu": None}
    if zcdp and run % 10 == 1:
        noise = {"mu": None, "rho": 1e-5}
    return Charge(
        run_id=f"{run:032x}", plan_hash="5e" * 16, identity=accounts.USER, epsilon=0.01, delta=0.0,
        threshold_delta=0.0, kind="sql", **noise,
    )  # fmt: skip


def least(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Least milliseconds of several, of CPU and of the clock."""
    cpu, wall = [], []
    for _ in range(repeats):
        begun = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    return {"cpu_ms": round(1e3 * min(cpu), 3), "wall_ms": round(1e3 * min(wall), 3)}


def bench(folder: Path, entries: int, repeats: int, zcdp: bool) -> dict[str, Any]:
    """One size of a ledger."""
    path = folder / f"{entries}-{zcdp}.db"
    with (
        contextlib.closing(accounts.opened(path, "rides", limit=LIMIT)) as ledger,
        ledger.transaction(),
    ):
        for run in range(entries):
            ledger.append(charge(run, zcdp))
    names = iter(range(entries, entries + 10_000))

    def opened() -> None:
        with contextlib.closing(accounts.opened(path, "rides")) as other:
            other.history()

    timings: dict[str, Any] = {"entries": entries, "zcdp": zcdp, "open": least(opened, 3)}
    with contextlib.closing(accounts.opened(path, "rides")) as ledger:
        ledger.charge(charge(next(names), zcdp))  # composes what is there, once
        timings["charge"] = least(lambda: ledger.charge(charge(next(names), zcdp)), repeats)
        with contextlib.closing(accounts.opened(path, "rides")) as other:
            other.charge(charge(next(names), zcdp))

            def in_turn() -> None:  # each finds an entry of the other's
                other.charge(charge(next(names), zcdp))
                ledger.charge(charge(next(names), zcdp))

            two = least(in_turn, repeats)
            timings["charge_of_two_in_turn"] = {name: ms / 2 for name, ms in two.items()}
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        number = iter(range(1_000_000))

        def durable() -> None:
            db.execute("BEGIN IMMEDIATE")
            row = (b"bench", str(next(number)).encode())
            db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", row)
            db.execute("COMMIT")

        timings["durable_row"] = least(durable, repeats)
    return timings


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, nargs="+", default=[1_213, 10_000])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where ledgers are written (default: /tmp)")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs = [
            bench(Path(folder), entries, args.repeats, zcdp)
            for entries in args.entries
            for zcdp in (False, True)
        ]
    emit({"benchmark": "ledger", **machine(), "runs": runs}, args.out)


if __name__ == "__main__":
    main()
