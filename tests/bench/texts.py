"""Text sinks and sources beside Parquet, in process: rates, memory, and encoders alone.

    python -m tests.bench.texts
    python -m tests.bench.texts --users 170000 --repeats 1

The same recorded Zipf day (100,000 keys, T = 100, 4 shards, SQLite) from and into every kind of
file, each run in a process of its own, in turns.  ``rate`` is records a CPU second without imports,
by the least CPU seconds of the repeats, and ``of_parquet`` its ratio to the run with Parquet on
both sides.  ``encoders``: CPU microseconds for a row of the releases of the last trigger times, by
kind, beside one Python dict for each row.
"""

import argparse
import functools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import tomlkit

from dpstream.accounting.places import RELEASE_KINDS
from dpstream.pipelines.formats.encodings import as_hex, encode, release_files
from dpstream.pipelines.jobs.job import load_job
from tests.bench.common import emit, machine
from tests.bench.paper.one_run import in_child, peak_gib
from tests.bench.paper.synth import Synth, generate
from tests.bench.stream import job_of

#: (kind of the source, kind of the sink): one text side at a time.
SIDES = [(kind, "parquet") for kind in RELEASE_KINDS]
SIDES += [("parquet", kind) for kind in RELEASE_KINDS[1:]]
#: Releases that the encoders are measured on.
RELEASES = 10


def write_day(users: int, folder: Path) -> int:
    """The same records in a folder for each kind; returns their number."""
    for kind in RELEASE_KINDS:
        (folder / kind).mkdir()
    day = folder / "parquet" / "day.parquet"
    rows = generate(Synth(users=users, keys=100_000, row_group_rows=20_000), day)
    for kind in RELEASE_KINDS[1:]:
        with open(folder / kind / f"day.{kind}", "wb") as file:
            for number, batch in enumerate(pq.ParquetFile(day).iter_batches(1 << 20)):
                text = encode(batch, kind, guard=False)
                header = kind == "csv" and number > 0
                file.write(text.partition(b"\n")[2] if header else text)
    return rows


def write_job(folder: Path, data: Path, sides: tuple[str, str], triggers: int) -> Path:
    """The project file of one run, in a folder that holds nothing else."""
    job_of(folder, data, 4, triggers)
    path, (source, sink) = folder / "dpstream.toml", sides
    sections: Any = tomlkit.parse(path.read_text())
    sections["table"]["records"]["path"] = f"data/*.{source}"
    sections["job"]["counts"]["sink"]["kind"] = sink
    path.write_text(tomlkit.dumps(sections))
    return path


def run(path: Path) -> dict[str, float]:
    """CPU seconds and peak memory of a job in this process, imports not counted."""
    from dpstream.pipelines.stream.run import run_job

    job, begin = load_job(path), time.process_time()
    run_job(job)
    return {"cpu_seconds": time.process_time() - begin, "peak_gib": peak_gib()}


def encoders(folder: Path, repeats: int) -> dict[str, float]:
    """CPU microseconds of a released row by kind, and with a dict for each row."""
    files = list(release_files(folder))[-RELEASES:]
    tables = [pq.read_table(file).combine_chunks() for file in files]
    batches = [batch for table in tables for batch in table.to_batches()]
    rows = max(1, sum(batch.num_rows for batch in batches))

    def with_dicts(batch: pa.RecordBatch) -> bytes:
        table = as_hex(pa.Table.from_batches([batch]))
        return msgspec.json.Encoder().encode_lines(table.to_pylist())

    def micros(work: Callable[[pa.RecordBatch], bytes]) -> float:
        used = []
        for _ in range(repeats):
            begin = time.process_time()
            for batch in batches:
                work(batch)
            used.append(time.process_time() - begin)
        return round(1e6 * min(used) / rows, 3)

    by_kind: dict[str, float] = {
        kind: micros(functools.partial(encode, kind=kind)) for kind in RELEASE_KINDS
    }
    return {**by_kind, "jsonl by dicts": micros(with_dicts)}


def bench(users: int, triggers: int, repeats: int, folder: Path) -> dict[str, Any]:
    """All runs on one data set; the first one, which compiles kernels, is not counted."""
    records = write_day(users, folder)
    runs = dict[tuple[str, str], list[dict[str, float]]]()
    for sides in [SIDES[0], *SIDES * repeats]:
        job = write_job(folder / "job", folder / sides[0], sides, triggers)
        runs.setdefault(sides, []).append(in_child("tests.bench.texts", "--job", str(job)))
    runs[SIDES[0]] = runs[SIDES[0]][1:]
    least = {sides: min(run["cpu_seconds"] for run in of_one) for sides, of_one in runs.items()}
    rows = [
        {
            "source": source,
            "sink": sink,
            "rate": round(records / least[source, sink]),
            "of_parquet": round(least[SIDES[0]] / least[source, sink], 3),
            "peak_gib": round(max(run["peak_gib"] for run in runs[source, sink]), 2),
        }
        for source, sink in SIDES
    ]
    write = write_job(folder / "job", folder / "parquet", SIDES[0], triggers)
    in_child("tests.bench.texts", "--job", str(write))
    sizes = {"records": records, "triggers": triggers, "repeats": repeats}
    return {**sizes, "runs": rows, "encoders": encoders(write.parent / "releases", repeats)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=510_000, help="5.9 records each")
    parser.add_argument("--triggers", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", type=Path, help="run this job and print what it took")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if args.job is not None:
        print(json.dumps(run(args.job)))
        return
    with tempfile.TemporaryDirectory(prefix="dpstream-bench-") as scratch:
        result = bench(args.users, args.triggers, args.repeats, Path(scratch))
    emit({"benchmark": "texts", **machine(), **result}, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
