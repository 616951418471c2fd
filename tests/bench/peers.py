"""One-shot DP sum and count against the peers: the same file, budget and C, in one run.

    python -m tests.bench.peers

The command runs in an environment of its own (`tests/bench/environments`), which it makes: the
peers' pins and those of the tests do not agree.

dpstream runs first and last, so that a machine that changes its speed shows; ratios are against
the mean of both.  Every peer has a process of its own, which first runs on a small file; then
the median of ``--repeats`` runs counts, from reading the file to the written result.  A peer
that would take more than ``--most-seconds`` runs on a tenth of the users, and its rate is
labelled as extrapolated.  CPU seconds are steadier than seconds on a shared machine.

"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench import environments
from tests.bench.common import emit, machine
from tests.bench.oneshot import write_records
from tests.bench.paper.one_run import in_child
from tests.bench.peer_runs import DELTA, EPSILON, HOW, PEERS, C

#: A tenth of the users first: whether the whole file fits into the time.
PART = 10


def measure(name: str, folder: Path, repeats: int, part: bool = False) -> dict[str, Any]:
    """One peer in its own process on the whole file or on a part of its users."""
    data = folder / ("part.parquet" if part else "records.parquet")
    out = folder / f"{name}.parquet"
    result = in_child(
        "tests.bench.peer_runs",
        name,
        *(str(p) for p in (data, folder / "small.parquet", out)),
        f"--repeats={repeats}",
    )
    seconds, cpu = (statistics.median(result.pop(key)) for key in ("seconds", "cpu"))
    records = pq.ParquetFile(data).metadata.num_rows
    return {
        "peer": name,
        "how": HOW[name],
        "records": records,
        "extrapolated": part,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "records_per_second": round(records / seconds),
        **result,
    }


def measure_within(name: str, folder: Path, repeats: int, most_seconds: float) -> dict[str, Any]:
    """``measure`` on the whole file if that takes no longer than allowed, else on a part."""
    if name.startswith("pipeline-dp"):
        part = measure(name, folder, 1, part=True)
        if PART * part["seconds"] > most_seconds:
            return part
        repeats = 1 if PART * part["seconds"] > most_seconds / 6 else repeats
    return measure(name, folder, repeats)


def times(run: dict[str, Any], ours: list[dict[str, Any]], measured: str) -> float:
    """How many times our time a peer takes for a record."""
    mine = np.mean([own[measured] / own["records"] for own in ours])
    return round(float(run[measured] / run["records"] / mine), 2)


def write_files(folder: Path, args: argparse.Namespace) -> None:
    """The records, a tenth of their users, and a small file for start-up."""
    write_records(folder / "small.parquet", 10_000, 1_000, args.keys)
    write_records(folder / "records.parquet", args.records, args.users, args.keys)
    table = pq.read_table(folder / "records.parquet")
    few = pa.array(table["user"].to_numpy() < max(1, args.users // PART))
    pq.write_table(table.filter(few), folder / "part.parquet", row_group_size=250_000)


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All peers on one file."""
    write_files(folder, args)
    ours = [measure("dpstream", folder, args.repeats)]
    others = [
        measure_within(name, folder, args.repeats, args.most_seconds)
        for name in args.peers
        if name != "dpstream"
    ]
    ours.append(measure("dpstream", folder, args.repeats))
    for run in others:
        run["times_our_seconds"] = times(run, ours, "seconds")
        run["times_our_cpu_seconds"] = times(run, ours, "cpu_seconds")
    return {
        "benchmark": "peers",
        "epsilon": EPSILON,
        "delta": DELTA,
        "contributions": C,
        "users": args.users,
        **machine(),
        "runs": ours + others,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    if not environments.inside("peers"):
        sys.exit(environments.run_inside("peers", "tests.bench.peers", sys.argv[1:]))
    with tempfile.TemporaryDirectory() as scratch:
        result = json.loads(json.dumps(bench(args, Path(scratch))))
    emit(result, args.out)


if __name__ == "__main__":
    main()
