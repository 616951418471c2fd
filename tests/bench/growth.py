"""How cost grows: users, keys, T, C, shards and files doubled alone, through the real pipeline.

    python -m tests.bench.growth

Each run is a child process (``paper.one_run``) on generated data from an empty store; then
another one begins on the finished store, which has nothing to do but to see that it has not.
Rounds of all runs are repeated and the least of each is kept, so that a machine that is slow for
a while does not look like growth.  What a run on almost nothing costs (start-up) is subtracted
from all, or it would hide growth.  For every dimension an exponent is fitted to CPU seconds,
peak memory, state size and CPU seconds of the finished store (least squares on logarithms), with
its standard error.  The claim is
that nothing grows faster than linearly:

* users (and with them records): every record is looked at a bounded number of times.
* keys (counted as those with data): states and node noise are per key that has data.
* T: prediction draws every node of a key's path at most once, 2 T draws a key, in place of one
  test a trigger; and each step of a (shard, trigger) has a fixed cost.
* C: bounds what passes, costs nothing by itself.  * shards: each step has a fixed cost.
* files (from `FILES` on): each is looked at, opened and digested; its rows join others'.
* a finished store: the input is digested, and the sink's releases are.

The exit code is 1 when an exponent exceeds 1.15 by more than two standard errors.
"""

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench import cliffs
from tests.bench.common import emit, machine
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.synth import Synth, generate

LIMIT = 1.15
#: Half of all records are of these keys, so that some are published whatever the number of keys.
BUSY_KEYS = 500
#: Where doubling begins: one file more or less is nothing.
FILES = 1_250
MEASURES = {
    "cpu_seconds": "CPU seconds", "peak_gib": "peak memory, GiB", "state_mib": "state, MiB",
    "again_cpu_seconds": "CPU s, finished store",
}  # fmt: skip


class Size(NamedTuple):
    """One point: everything that is doubled."""

    users: int = 100_000
    keys: int = 25_000
    triggers: int = 100
    contributions: int = 16
    shards: int = 4
    files: int = 1


def sizes(base: Size, doublings: int) -> dict[str, list[Size]]:
    """By dimension: the base and each of its doublings."""
    first = base._replace(files=max(FILES, base.files))._asdict()
    return {
        name: [base._replace(**{name: first[name] << n}) for n in range(doublings + 1)]
        for name in Size._fields
    }


def write_data(size: Size, folder: Path) -> Path:
    """The paper's users and times; half the records on few keys, half uniform over all.

    Under the paper's law of keys more keys to draw from are hardly more keys with data.
    """
    data = folder / f"records-{size.users}-{size.keys}.parquet"
    if not data.exists():
        generate(Synth(users=size.users), data)
        table, rng = pq.read_table(data), np.random.default_rng(0)
        busy = rng.random(len(table)) < 0.5
        code = np.where(
            busy, rng.integers(0, BUSY_KEYS, len(table)), rng.integers(0, size.keys, len(table))
        )
        names = pa.array([f"k{n:07d}" for n in range(max(size.keys, BUSY_KEYS))])
        table = table.set_column(
            table.schema.get_field_index("key"), "key", names.take(pa.array(code))
        )
        pq.write_table(table, data, row_group_size=250_000)
    return data if size.files == 1 else _split(data, size.files)


def _split(data: Path, files: int) -> Path:
    """A folder with the rows of a file in many."""
    folder = data.with_suffix(f".{files}")
    if not folder.exists():
        folder.mkdir()
        table = pq.read_table(data)
        edges = np.linspace(0, len(table), files + 1).astype(int)
        for number, (begin, end) in enumerate(pairwise(edges.tolist())):
            pq.write_table(table.slice(begin, end - begin), folder / f"{number:06d}.parquet")
    return folder


def keys_with_data(size: Size, folder: Path) -> int:
    """Distinct keys of the data."""
    keys = pq.read_table(write_data(size, folder), columns=["key"])["key"]
    return len(keys.unique())


def run(size: Size, folder: Path, mode: str) -> dict[str, Any]:
    """A point's cost."""
    data = write_data(size, folder)
    frame = Frame(data, "int", folder / "runs", 6.0, 1e-9, size.shards)
    job = write_job(frame, Setting(parse_mode(mode), size.triggers, size.contributions))
    return cliffs.measured(job)


def least(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The least of each measure over repeated runs."""
    wanted = ("records", "seconds", *MEASURES)
    return {name: min(run[name] for run in runs) for name in wanted}


def beyond(cost: dict[str, float], start_up: dict[str, float]) -> dict[str, float]:
    """A run's cost beyond start-up, at least a tenth of it: less cannot be told from noise."""
    return {m: max(cost[m] - start_up[m], cost[m] / 10) for m in ("seconds", *MEASURES)}


def exponent(sizes: list[int], values: list[float]) -> dict[str, float]:
    """Slope on logarithms with its standard error, and the slope of the last doubling."""
    x, y = np.log2(sizes), np.log2(np.maximum(values, 1e-9))
    slope, level = (float(v) for v in np.polyfit(x, y, 1))
    left = y - (slope * x + level)
    freedom = max(1, len(x) - 2)
    error = np.sqrt((left**2).sum() / freedom / ((x - x.mean()) ** 2).sum())
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return {"fit": round(slope, 3), "error": round(float(error), 3), "last": round(float(last), 3)}


def too_steep(fitted: dict[str, float]) -> bool:
    """Whether growth is worse than linear beyond noise."""
    return fitted["fit"] - 2 * fitted["error"] > LIMIT


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs, their least values and the exponents."""
    base = Size(args.users, args.keys, args.triggers, args.contributions, args.shards)
    plan = {name: sizes(base, args.doublings)[name] for name in args.dimensions}
    points = list(dict.fromkeys(size for sizes in plan.values() for size in sizes))
    runs: dict[Size, list[dict[str, Any]]] = {size: [] for size in points}
    run(base, folder, args.mode)  # compiled kernels, file cache
    nothing = Size(100, 100, 1, base.contributions, base.shards)
    start_up = least([run(nothing, folder, args.mode) for _ in range(3)])
    for _ in range(args.repeats):
        for size in points:
            runs[size].append(run(size, folder, args.mode))
    best = {size: least(repeats) for size, repeats in runs.items()}
    growth: dict[str, dict[str, Any]] = {}
    for name, series in plan.items():
        at = [getattr(size, name) for size in series]
        if name == "keys":
            at = [keys_with_data(size, folder) for size in series]
        costs = [beyond(best[size], start_up) for size in series]
        values = {m: [round(cost[m], 3) for cost in costs] for m in costs[0]}
        exponents = {m: exponent(at, values[m]) for m in MEASURES}
        growth[name] = {"at": at, **values, "exponents": exponents}
    growth |= far_out(args, folder, start_up)
    steep = [
        f"{name}: {measure}"
        for name, data in growth.items()
        for measure, fitted in data["exponents"].items()
        if too_steep(fitted)
    ]
    return {
        "benchmark": "growth",
        "mode": args.mode,
        "base": base._asdict(),
        "base_records": int(best[base]["records"]),
        "repeats": args.repeats,
        **machine(),
        "start_up": start_up,
        "growth": growth,
        "worse_than_linear": steep,
        "statement": f"{' and '.join(steep)} grow faster than linearly"
        if steep
        else "nothing grows faster than linearly",
    }


def far_out(
    args: argparse.Namespace, folder: Path, start_up: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Exponents of the shapes of `tests.bench.cliffs`, measured as the others are."""
    measures: dict[str, dict[str, Any]] = {}
    for name in args.cliffs:
        series = cliffs.shapes(name, args.doublings)
        runs = [[cliffs.run(s, folder, args.mode) for s in series] for _ in range(args.repeats)]
        costs = [beyond(least(list(same)), start_up) for same in zip(*runs, strict=True)]
        at = [getattr(shape, cliffs.CLIFFS[name][0]) for shape in series]
        values = {m: [round(cost[m], 3) for cost in costs] for m in costs[0]}
        exponents = {m: exponent(at, values[m]) for m in MEASURES}
        measures[name] = {"at": at, **values, "exponents": exponents}
    return measures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help="base")
    parser.add_argument("--dimensions", nargs="+", choices=Size._fields, default=Size._fields)
    parser.add_argument("--cliffs", nargs="*", choices=cliffs.CLIFFS, default=list(cliffs.CLIFFS))
    parser.add_argument("--doublings", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--mode", default="sticky")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = json.loads(json.dumps(bench(args, Path(scratch))))
    emit(result, args.out)
    sys.exit(bool(result["worse_than_linear"]))


if __name__ == "__main__":
    main()
