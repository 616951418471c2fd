"""Parts of a run that grow with its keys and shards, each by itself.

    python -m tests.bench.size release 1000000 40000000     # rows of one release
    python -m tests.bench.size published 1000000 10000000   # published keys
    python -m tests.bench.size split 4 64 1000              # shards, batches of 20,000 rows

One process makes the store that other stages would have committed, another one does the part and
is measured: CPU seconds, seconds, and its peak memory, of which the libraries are some 200 MiB.
"""

import argparse
import json
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms.batches import shard_release_schema, split_by_shard
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.run_manifest import publish_committed
from dpstream.state.arrow import id_array
from dpstream.state.idtable import shard_of
from tests.bench.common import emit, machine
from tests.bench.paper.one_run import in_child
from tests.streams import KEYS, make_plan

SHARDS, THREADS, BATCH, BATCHES = 64, 2, 20_000, 50


def run_in(folder: Path, part: str) -> Run:
    """The run whose store is in a folder."""
    skipping: dict[str, Any] = {"skip": True, "weights": SelectionWeights(1, 2), "tests": (1, 12)}
    plan = make_plan(windows=1, contributions=5, **(skipping if part == "published" else {}))
    return begin_run(plan, KEYS, f"sqlite:{folder}/state", SHARDS)[0]


def ids_of(number: Int64) -> Ids:
    """Ids of keys, whose shard is their number's."""
    ids = np.empty((len(number), 2), np.uint64)
    ids[:, 0] = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ids[:, 1] = (number % SHARDS).astype(np.uint64) << np.uint64(32)
    return ids


def commit(run: Run, rows: int) -> None:
    """The first step of all shards, with that many rows together."""
    store, schema = run.open(), shard_release_schema(run.plan)
    with store.filling():
        for shard in range(SHARDS):
            rng = np.random.default_rng(shard)
            number = rng.permutation(np.arange(shard, rows, SHARDS))
            text = pa.array(np.char.mod("key-%09d", number), pa.string())
            value = pa.array(rng.normal(100, 10, len(text)))
            columns = [text, id_array(ids_of(number)), value, value]
            store.put_step(0, shard, 1, pa.RecordBatch.from_arrays(columns, schema=schema))


def release(rows: int, folder: Path) -> None:
    """One release, from the store to files."""
    publish_committed(run_in(folder, "release"), FileSink(folder / "out", "parquet"))


def published(keys: int, folder: Path) -> None:
    """Threads that bound unit shards: are the keys of a million records published?"""
    run = run_in(folder, "published")

    def ask(thread: int) -> None:
        of_run, rng = PublishedKeys.of_process(run.plan, run.open()), np.random.default_rng(thread)
        zeros = np.zeros(1_000_000 // SHARDS, np.int64)
        for _ in range(thread, SHARDS, THREADS):  # its unit shards
            ids = ids_of(rng.integers(0, keys, len(zeros)))
            assert of_run.of_keys(ids, zeros, zeros + 1, 1, 2).all()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))


def split(shards: int, folder: Path) -> None:
    """Rows by shard."""
    ids = np.random.default_rng(0).integers(0, 1 << 63, (BATCH, 2)).astype(np.uint64)
    columns = [id_array(ids), *[pa.array(np.arange(BATCH))] * 4]
    batch = pa.RecordBatch.from_arrays(columns, names=list("abcde"))
    for _ in range(BATCHES):
        for _ in split_by_shard(batch, shard_of(ids, shards), shards):
            pass


PARTS = {"release": release, "published": published, "split": split}


def child(part: str, size: int, folder: Path, prepare: bool) -> dict[str, Any]:
    """What this process does: it prepares a part, or does it and is measured."""
    if prepare:
        if part != "split":
            commit(run_in(folder, part), size)
        return {}
    began, used = time.perf_counter(), time.process_time()
    PARTS[part](size, folder)
    return {
        "part": part, "size": size,
        "cpu_seconds": time.process_time() - used, "seconds": time.perf_counter() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "files_mib": sum(p.stat().st_size for p in (folder / "out").rglob("*.*")) >> 20,
    }  # fmt: skip


def main() -> None:
    """Measure each size in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        print(json.dumps(child(args.part, args.sizes[0], args.folder, args.prepare)))
        return
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            names = [args.part, str(size), "--folder", folder]
            in_child(__spec__.name, *names, "--prepare")
            emit(in_child(__spec__.name, *names) | machine(), args.out)


if __name__ == "__main__":
    main()
