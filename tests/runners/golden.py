"""Jobs over one recorded Zipf stream, whose releases are the same bytes on every runner.

Noise is on, under the test key and a fixed run id; `digest` is what a run has published.  The
numbers of each job (what its defaults and its calibration came to) are recorded as well, and its
runs begin with them: other defaults and other processors change none of its bytes.

    python -m tests.runners.golden FOLDER NAME ...

runs some of them below a folder and prints their digests.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tomlkit
from pyarrow import csv as pacsv

from dpstream.dp_transforms import run
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from tests.bench.paper.synth import Synth, batches
from tests.fixed_runs import fix_run_id
from tests.golden.pinned import LINES

GOLDEN = Path(__file__).parents[1] / "golden"
#: Name.txt -> digest of all published bytes and the first rows; name -> committed numbers.
STREAMS, NUMBERS = GOLDEN / "streams", GOLDEN / "calibrations.json"
START = "2024-01-01T00:00:00Z"
DAY = {"start": START, "end": "2024-01-02T00:00:00Z", "window": "1d", "release_every": "1h"}
COUNT = {"n": {"kind": "count"}}
SUM = {"total": {"kind": "sum", "column": "value", "bounds": [-3, 7], "grid": 0.5}}
MEAN = {"level": {"kind": "mean", "column": "value", "bounds": [-2, 6], "grid": 0.25}}
PEOPLE = {"people": {"kind": "units"}}
#: Beside MEAN it is made from its sums.
TWIN = {"levels": {"kind": "sum", "column": "value", "bounds": [-2, 6], "grid": 0.25}}
SLIDING = {"window": "6h", "slide": "2h", "release_every": "30m"}

#: Name -> what differs from the plain job, which has every default: fields of the job, of its
#: mechanism and of its table, what its budget covers, and the kind of its files.
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Most keys are silent in most of the steps, and are released in all of them.
    "silent": {"job": {"release_every": "10m", "contributions": 3}},
    "tree": {"mechanism": {"strategy": "tree"}, "aggregate": COUNT | SUM},
    "blt": {"mechanism": {"strategy": "blt"}, "aggregate": COUNT | SUM | PEOPLE},
    "dense": {"mechanism": {"strategy": "dense"}, "aggregate": COUNT | SUM},
    "threshold": {"mechanism": {"pre_threshold": 1}},
    "sliding": {"job": SLIDING},
    "periods": {
        "job": {"window": "2h", "release_every": "20m", "contributions": 3},
        "covers": "2h",
        "kind": "jsonl",
    },
    "late": {
        "job": {"window": "4h", "allowed_lateness": "1h", "max_skew": "1m"},
        "table": {"stamp": "arrived"},
    },
    "fused": {"job": {"per_key_bound": 1}, "aggregate": PEOPLE},
    "combined": {"job": {"per_key_bound": 1, "contributions": 8}, "mechanism": {"combine": True}},
    "shared": {"job": {"contributions": 8}, "aggregate": COUNT | MEAN},
    "repeats": {
        "job": {**SLIDING, "per_key_bound": 2, "contributions": 12},
        "aggregate": COUNT | PEOPLE | SUM,
    },
    "no_skip": {
        "job": {"contributions": 8}, "mechanism": {"skip": False}, "aggregate": COUNT | SUM,
    },
    "weights": {
        "job": {"contributions": 8},
        "mechanism": {"skip": True, "weights": {"offset": 1, "power": 2}},
    },
    # Keys that one window selects are published in the later ones.
    "remembered": {
        "job": {
            "window": "4h", "release_every": "20m", "allowed_lateness": "1h", "contributions": 8,
        },
        "table": {"stamp": "arrived"},
        "aggregate": COUNT | SUM,
    },
    "remembered_a_while": {
        "job": {**SLIDING, "remember_keys": "5h"},
        "mechanism": {"weights": "uniform"},
        "aggregate": COUNT | PEOPLE,
    },
    "derived": {"aggregate": TWIN | MEAN | COUNT, "kind": "csv"},
    "public": {
        "job": {"public_keys": "stream/keys/public.csv"}, "aggregate": COUNT | SUM, "sink": "csv",
    },
}  # fmt: skip


def write_stream(folder: Path, users: int = 2_500) -> None:
    """The recorded stream as three files of each kind, in time order, with arrival times."""
    params = Synth(users=users, keys=120, seed=6, row_group_rows=2_000, user_type="string")
    table = pa.Table.from_batches(list(batches(params)), schema=params.schema)
    rng = np.random.default_rng(6)
    micros = table.column("time").cast(pa.int64()).to_numpy()
    # Delays that no file boundary hides: files are in order of arrival.
    arrived = micros + rng.integers(0, 30_000_000, len(micros))
    instant = pa.timestamp("us", "UTC")
    table = table.append_column("arrived", pa.array(arrived).cast(instant))
    table = table.append_column("value", pa.array(np.round(rng.normal(2, 3, len(micros)), 2)))
    table = table.take(pa.array(np.argsort(arrived, kind="stable")))
    third = -(-table.num_rows // 3)
    for number in range(3):
        part = table.slice(number * third, third)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=2_000)
        text = part
        for name in ("time", "arrived"):
            iso_times = pc.strftime(part.column(name), format="%Y-%m-%dT%H:%M:%SZ")
            text = text.set_column(text.schema.get_field_index(name), name, iso_times)
        pacsv.write_csv(text, folder / f"{number}.csv")
        lines = msgspec.json.Encoder().encode_lines(text.to_pylist())
        (folder / f"{number}.jsonl").write_bytes(lines)
    (folder / "keys").mkdir()
    pacsv.write_csv(
        pa.table({"key": [f"k{n:07d}" for n in range(1, 40)]}), folder / "keys" / "public.csv"
    )


def golden_job(name: str, stream: Path, folder: Path) -> Job:
    """Write and load the project file of a golden job.

    Args:
        stream: where `write_stream` wrote; folder: for the file, its state and releases.
    """
    own = JOBS[name]
    table = {
        "path": f"stream/*.{own.get('kind', 'parquet')}",
        "unit_column": "user",
        "time_column": "time",
        **own.get("table", {}),
    }
    job = {
        "table": "records",
        "key": ["key"],
        "aggregate": own.get("aggregate", COUNT),
        **DAY,
        "budget": {"epsilon": 6.0, "delta": 1e-6, "covers": own.get("covers", "lifetime")},
        "contributions": 6,
        "shards": 3,
        "sink": {"kind": own.get("sink", "jsonl"), "path": "releases"},
        "mechanism": own.get("mechanism", {}),
        **own.get("job", {}),
    }
    data_set = {"unit": {"name": "user"}, "insecure_test_secret": "0f" * 32}
    sections = {
        "version": 1, "data_set": {"recorded": data_set}, "table": {"records": table},
        "job": {"golden": job},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream").symlink_to(stream)  # the path in the plan is part of what is hashed
    (folder / "dpstream.toml").write_text(tomlkit.dumps(sections))
    fix_run_id(folder)
    return load_job(folder)


def published(job: Job) -> dict[str, bytes]:
    """Name -> bytes of the manifest and every release below the sink's folder."""
    root = Path(job.sink.path)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and (path.name == "run.json" or path.parent != root)
    }


def digest(files: dict[str, bytes]) -> str:
    """One digest of all published bytes."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, data in sorted(files.items()):
        hasher.update(f"{name}\0{len(data)}\0".encode() + data)
    return hasher.hexdigest()


def listing(files: dict[str, bytes]) -> str:
    """What a golden file holds of a run: a digest of all its files, and the first rows of the last
    that has some."""
    name = max(name for name, data in files.items() if data.count(b"\n") > 1)
    rows = files[name].decode().splitlines()
    size = sum(map(len, files.values()))
    head = f"{digest(files)} {len(files)} files, {size} bytes\n-- {name}: {len(rows)} lines\n"
    return head + "".join(f"{row}\n" for row in rows[:LINES])


def recorded_digest(name: str) -> str:
    """The digest of all that a golden job published."""
    return (STREAMS / f"{name}.txt").read_text().split(" ", 1)[0]


def recorded_numbers_of_all() -> dict[str, str]:
    """The recorded numbers by job."""
    numbers: dict[str, str] = json.loads(NUMBERS.read_text())
    return numbers


@contextlib.contextmanager
def recorded_numbers(name: str) -> Iterator[None]:
    """Runs begin with the numbers recorded for a golden job."""
    numbers = recorded_numbers_of_all()[name]
    with mock.patch.object(run, "calibrate", lambda plan: numbers):
        yield


def main(folder: Path, names: list[str]) -> None:
    """Run some jobs; print name and digest of each."""
    stream = folder / "recorded"
    stream.mkdir()
    write_stream(stream)
    for name in names:
        job = golden_job(name, stream, folder / name)
        with recorded_numbers(name):
            run_job(job)
        print(name, digest(published(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
