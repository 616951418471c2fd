"""Table 1 of the paper at any scale, through the real pipeline, with its speed.

    python -m tests.bench.table1 --users 1000000 --triggers 100 1000 --modes sticky rounds paper

``tests.bench.paper table1`` on the same code (1M keys, C = 32, epsilon 6, delta 1e-9), and in
the same run a non-private pipeline of the same shape: records/s by stage, peak memory, size of
the state, and keys, L1, L2, Linf at the last trigger against the RAW histogram.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.common import emit, machine
from tests.bench.paper.jobs import Setting, write_job
from tests.bench.paper.modes import parse_mode
from tests.bench.paper.one_run import in_child
from tests.bench.paper.studies import Study, table1


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs on one data set."""
    study = Study(
        folder,
        args.users,
        tuple(args.modes),
        tuple(args.triggers),
        baselines=(),
        keys=args.keys,
        seed=args.seed,
        shards=args.shards,
    )
    result, _ = table1(study, lambda _: None)
    frame = study.contest(next(folder.glob(f"zipf-{args.users}-*.parquet")), "int").frame
    for triggers in args.triggers:
        job = write_job(frame, Setting(parse_mode("sticky"), triggers, 32))
        plain = in_child("tests.bench.one_run", str(job))
        result["runs"].append({"method": "non-private", "triggers": triggers, **plain})
    return {"benchmark": "table1", **result, **machine()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--triggers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument(
        "--modes", nargs="+", default=["sticky"], help="sticky, rounds, rounds+flush, paper"
    )
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep data and runs here")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    if args.folder is not None:
        emit(bench(args, args.folder), args.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        emit(bench(args, Path(scratch)), args.out)


if __name__ == "__main__":
    main()
