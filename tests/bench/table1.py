"""Table 1 of the paper at any scale, through the real pipeline.

    python -m tests.bench.table1 --users 1000000 --triggers 100 1000 --modes sticky rounds paper

Generates the data of the paper (1M keys, C = 32, epsilon 6, delta 1e-9), runs the job with the
embedded store and durable commits, and reports keys, L1, L2, Linf at the last trigger against
the RAW histogram, the L1 averaged over triggers, records/s by stage, peak memory and state
size; in the same run a non-private pipeline of the same shape.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.sinks import read_releases
from pipelines.synth import Synth, generate
from tests.bench.common import emit, in_child, machine, write_job


class Truth:
    """Raw counts of every key by trigger."""

    def __init__(self, path: Path, triggers: int) -> None:
        keys, cuts = [], []
        start, step = Synth().start, 86_400_000_000 // triggers
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["key", "time"])
            keys.append(table["key"].cast(pa.dictionary(pa.int32(), pa.string())))
            cuts.append((table["time"].cast(pa.int64()).to_numpy() - start) // step)
        chunks = pa.chunked_array([c for k in keys for c in k.chunks]).unify_dictionaries()
        self.names = chunks.chunk(0).dictionary
        codes = np.concatenate([c.indices.to_numpy() for c in chunks.chunks])
        cut = np.concatenate(cuts)
        order = np.argsort(cut, kind="stable")
        self._codes = codes[order]
        self._bounds = np.searchsorted(cut[order], np.arange(triggers + 1))
        self.triggers = triggers

    def added(self, trigger: int) -> np.ndarray:
        """Codes of the records of one trigger."""
        return self._codes[self._bounds[trigger - 1] : self._bounds[trigger]]

    def codes_of(self, keys: pa.ChunkedArray) -> np.ndarray:
        """Codes of released keys."""
        return pc.index_in(keys, value_set=self.names).to_numpy()


def errors(truth: Truth, releases: pa.Table) -> dict[str, float]:
    """Keys and error norms of what is known to the public after each trigger."""
    size = len(truth.names)
    exact, shown = np.zeros(size), np.zeros(size)
    released = np.zeros(size, np.bool_)
    code = truth.codes_of(releases["key"])
    trigger = releases["trigger"].to_numpy()
    value = releases["count"].to_numpy()
    order = np.argsort(trigger, kind="stable")
    code, value = code[order], value[order]
    bounds = np.searchsorted(trigger[order], np.arange(1, truth.triggers + 2))
    total = 0.0
    for t in range(1, truth.triggers + 1):
        exact += np.bincount(truth.added(t), minlength=size)
        rows = slice(bounds[t - 1], bounds[t])
        shown[code[rows]], released[code[rows]] = value[rows], True
        total += float(np.abs(shown - exact).sum())
    distance = np.abs(shown - exact)
    return {
        "keys": int(released.sum()),
        "l1": float(distance.sum()),
        "l2": float(np.sqrt((distance**2).sum())),
        "linf": float(distance.max()),
        "l1_average": total / truth.triggers,
        "updates": releases.num_rows,
    }


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs on one data set."""
    data = folder / f"records-{args.users}-{args.seed}.parquet"
    if not data.exists():
        generate(Synth(users=args.users, keys=args.keys, seed=args.seed), data)
    runs = []
    for triggers in args.triggers:
        truth = Truth(data, triggers)
        for mode in args.modes:
            name, _, option = mode.partition("+")
            label = f"{mode}-{triggers}"
            flush = "true" if option == "flush" else "false"
            job = write_job(
                folder, label, triggers, data=data.name, mode=name, flush=flush, shards=args.shards
            )
            result = in_child("tests.bench.one_run", str(job))
            result |= errors(truth, read_releases(folder / label / "releases"))
            runs.append({"mode": mode, "triggers": triggers, **result})
        plain = in_child("tests.bench.one_run", str(job), "--plain")
        runs.append({"mode": "non-private", "triggers": triggers, **plain})
    return {
        "benchmark": "table1",
        "users": args.users,
        "keys": args.keys,
        "seed": args.seed,
        **machine(),
        "runs": runs,
    }


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
        args.folder.mkdir(parents=True, exist_ok=True)
        emit(bench(args, args.folder), args.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        emit(bench(args, Path(scratch)), args.out)


if __name__ == "__main__":
    main()
