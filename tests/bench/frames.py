"""Private figures of a table of 1M rows in memory, beside the same figures without privacy.

    python -m tests.bench.frames

Of each library and function: the first call of a process (kernels, sampler tables), the median of
the next ones, and in the same run the library's own exact answer, grouped and counted by unit.
Imports are measured in processes of their own: CPU seconds until the functions can be called with
all that they need, less those of an empty interpreter; and which large libraries came along.
Ends with 1 if a warm histogram takes longer than ``--limit`` seconds or the import longer than
``--import-limit`` CPU seconds.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

import dpstream
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts
from tests.bench.common import child_seconds, emit, machine

IMPORT = """
import sys, dpstream
dpstream.histogram, dpstream.count, dpstream.sum, dpstream.mean, dpstream.account
from dpstream.pipelines.frames import answer, question
print(*(n for n in ("apache_beam", "pandas", "polars", "duckdb", "sqlglot") if n in sys.modules))
"""
NAME = "import dpstream; dpstream.histogram"


def table(rows: int, users: int, keys: int) -> pa.Table:
    """A uniform user, a Zipf key and a value below 100."""
    draw = np.random.default_rng(0)
    return pa.table({
        "user": draw.integers(0, users, rows),
        "key": pa.array(np.char.add("key", (draw.zipf(1.3, rows) % keys).astype(str))),
        "value": draw.integers(0, 100, rows).astype(np.float64),
    })  # fmt: skip


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of each call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def exact(data: Any) -> Callable[[], Any]:
    """The library's own histogram of units."""
    if isinstance(data, pd.DataFrame):
        return data.groupby("key", observed=True)["user"].nunique
    if isinstance(data, pl.DataFrame):
        return lambda: data.group_by("key").agg(pl.col("user").n_unique())
    return lambda: data.group_by("key").aggregate([("user", "count_distinct")])


def cpu(program: str, repeats: int) -> float:
    """Least CPU seconds of a process that runs a program, less those of an empty one."""
    times = []
    for text in (program, ""):
        tries = []
        for _ in range(repeats):
            before = child_seconds()
            subprocess.run([sys.executable, "-c", text], check=True, stdout=subprocess.DEVNULL)
            tries.append(child_seconds() - before)
        times.append(min(tries))
    return times[0] - times[1]


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    arrow = table(args.rows, args.users, args.keys)
    frames = {"pandas": arrow.to_pandas(), "polars": pl.from_arrow(arrow), "arrow": arrow}
    both: dict[str, Any] = {"unit": "user", "key": "key", "epsilon": 1.0}
    value: dict[str, Any] = {"value": "value", "bounds": (0, 100)}
    calls = {"histogram": {}, "count": {}, "sum": value, "mean": value}
    timings: dict[str, Any] = {"first_call": seconds(
        lambda: dpstream.histogram(arrow.slice(0, 1_000), **both), 1)[0]}  # fmt: skip
    for name, data in frames.items():
        plain = exact(data)
        plain()
        baseline = statistics.median(seconds(plain, args.repeats))
        timings[name] = {"exact_histogram": baseline}
        for called, more in calls.items():
            ask = getattr(dpstream, called)
            runs = seconds(functools.partial(ask, data, **both, **more),
                           args.repeats)  # fmt: skip
            timings[name][called] = statistics.median(runs)
        timings[name]["times_exact"] = timings[name]["histogram"] / baseline
    new_secret(folder / "noise.secret")
    place = accounts.create(folder / "ledger.db", "bench", (100.0, 1e-6))
    secret = f"file:{folder / 'noise.secret'}"
    account = dpstream.account(place.path, "bench", id=place.id, secret=secret)
    paid: dict[str, Any] = {**both, "account": account}
    timings["charged_histogram"] = seconds(lambda: dpstream.histogram(arrow, **paid), 1)[0]
    timings["asked_again"] = seconds(lambda: dpstream.histogram(arrow, **paid), 1)[0]
    loaded = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True)
    return {
        "benchmark": "frames",
        "rows": args.rows,
        "users": args.users,
        **machine(),
        "seconds": timings,
        "import_cpu_seconds": {
            "name": cpu(NAME, args.repeats), "all": cpu(IMPORT, args.repeats),
            "numpy_pyarrow": cpu("import numpy, pyarrow", args.repeats),
        },
        "loaded": loaded.stdout.decode().split(),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--import-limit", type=float, default=0.6)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = bench(args, Path(scratch))
    emit(result, args.out)
    warm = max(result["seconds"][name]["histogram"] for name in ("pandas", "polars", "arrow"))
    late = result["import_cpu_seconds"]["all"] > args.import_limit
    sys.exit(int(warm > args.limit or late or bool(result["loaded"])))


if __name__ == "__main__":
    main()
