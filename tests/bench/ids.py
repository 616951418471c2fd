"""Rows per second that get canonical keyed ids, by kind and beside strings, on one core.

    python -m tests.bench.ids

Each kind is timed from its Arrow column to its ids; the ratio is to strings of the same run.

``carried`` asks whether an admitted row should carry its key's id from the split to the step,
which computes it again: CPU seconds of that second time, against those of one more column of 16
bytes through the split, the buffer and the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.dp_transforms.batches import concat, ids_of, split_by_shard
from dpstream.dp_transforms.ingest.columns import identity
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.state.arrow import id_array
from dpstream.state.idtable import shard_of
from tests.bench.common import emit, machine


def columns(rows: int) -> dict[str, tuple[str, pa.Array]]:
    """Kinds and columns; strings are of 8 to 12 bytes."""
    numbers = np.random.default_rng(0).integers(0, 10**9, rows)
    integers = pa.array(numbers)
    text = pa.array([f"key{n}" for n in numbers.tolist()])
    absent = pa.array(numbers % 10 == 0)
    none = pa.scalar(None, pa.string())
    return {
        "string": ("string", text),
        "string, a tenth null": ("string", pc.if_else(absent, none, text)),
        "int": ("int", integers),
        "date": ("date", pa.array((numbers % 40_000).astype(np.int32)).view(pa.date32())),
        "timestamp[us]": ("timestamp", integers.view(pa.timestamp("us"))),
        "timestamp[ns]": ("timestamp", integers.view(pa.timestamp("ns", "UTC"))),
        "decimal128(21, 2)": ("decimal", integers.cast(pa.decimal128(19, 0)).cast(DECIMAL)),
        "decimal256(76, 30)": ("decimal", integers.cast(pa.decimal256(76, 30))),
    }


DECIMAL = pa.decimal128(21, 2)
#: Rows of one piece in the buffer.
AT_ONCE = 20_000


def bench(rows: int, repeats: int) -> dict[str, Any]:
    """Median rates in CPU time, all kinds in turn within each repeat."""
    prf, every = KeyRing(bytes(32)).key, columns(rows)
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for repeat in range(repeats + 1):
        for name, (kind, column) in every.items():
            start = time.process_time()
            typed_ids(prf, [(kind, identity(column, kind, nulls=True)[0])])
            if repeat:  # the first compiles
                seconds[name].append(time.process_time() - start)
    rates = {name: rows / statistics.median(took) for name, took in seconds.items()}
    return {
        name: {"rows_per_second": round(rate), "ratio": round(rate / rates["string"], 2)}
        for name, rate in rates.items()
    }


def carried(rows: int, repeats: int, shards: int = 4) -> dict[str, Any]:
    """CPU seconds of computing ids again, and of carrying them."""
    prf, text = KeyRing(bytes(32)).key, columns(rows)["string"][1]
    ids = typed_ids(prf, [("string", text)])
    integers = pa.array(np.arange(rows))
    plain = pa.RecordBatch.from_arrays(
        [id_array(ids[::-1]), text, integers, integers], list("ukwv")
    )
    wide = plain.append_column("id", id_array(ids))
    shard = shard_of(ids, shards)

    def moved(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Split, gathered from pieces as in the buffer, and handed on."""
        return [
            concat([part.slice(n, AT_ONCE) for n in range(0, part.num_rows, AT_ONCE)], part.schema)
            for _, part in split_by_shard(batch, shard, shards)
        ]

    kernels: dict[str, Callable[[], object]] = {
        "again": lambda: typed_ids(prf, [("string", text)]),
        "plain": lambda: moved(plain),
        "wide": lambda: [np.array(ids_of(part.column("id"))) for part in moved(wide)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(repeats):
        for name, kernel in kernels.items():
            start = time.process_time()
            kernel()
            seconds[name].append(time.process_time() - start)
    took = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "hashed_again_seconds": round(took["again"], 4),
        "carried_seconds": round(took["wide"] - took["plain"], 4),
        "carried_bytes": 16 * rows,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    runs = bench(args.rows, args.repeats)
    keys = carried(args.rows, args.repeats)
    result = {"rows": args.rows, "kinds": runs, "carried": keys}
    emit({"benchmark": "ids", **machine(), **result}, args.out)


if __name__ == "__main__":
    main()
