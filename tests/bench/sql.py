"""A statement over 1M rows of 100k users: sum and count by key, cold and warm, and 14M rows.

    python -m tests.bench.sql [--rows N] [--repeats R] [--out FILE]

``cold`` is the whole command ``dpstream sql`` in a process of its own; ``warm`` is ``ask`` again in
one process (a new charge each time, receipt included).  Seconds, CPU seconds and peak memory of
each; ``validated`` is parsing, validation and the plan alone.  ``duckdb`` bounds the same records
in DuckDB alone (sums and counts clamped, 32 keys of a user by a hash), without noise and account.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests import accounts
from tests.bench.common import emit, machine

PROJECT = """
version = 1
[data_set.bench]
unit = { name = "user", type = "int" }
account = { path = "ledger.db", limit = { epsilon = 900.0, delta = 1e-5 } }
insecure_test_secret = "KEY"
[table.records]
path = "records.parquet"
unit_column = "user"
"""
STATEMENT = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 6, delta = 1e-9, "
    "max_groups_contributed = 32) key, SUM(value, contribution_bounds_per_group => (0, 1)) AS s, "
    "COUNT(*, contribution_bounds_per_group => (0, 1)) AS n FROM records GROUP BY key"
)
_WARM = """
import json, resource, sys, time
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
catalog, text, repeats = load_catalog(sys.argv[1]), sys.argv[2], int(sys.argv[3])
out = []
for _ in range(repeats + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    question_of(text, catalog)
    validated = time.perf_counter() - wall
    wall, cpu = time.perf_counter(), time.process_time()
    answer = ask(catalog, text, Asking(fresh=True))
    out.append((time.perf_counter() - wall, time.process_time() - cpu, validated,
                answer.table.num_rows))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"runs": out[1:], "peak_mib": peak}))
"""

_DUCKDB = """
import json, sys, time
import duckdb
text = \"\"\"
SELECT key, SUM(s), SUM(n) FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY user ORDER BY HASH(user, key)) AS rank FROM (
    SELECT user, key, LEAST(SUM(LEAST(GREATEST(value, 0), 1)), 1) AS s, LEAST(COUNT(*), 1) AS n
    FROM 'FILE' GROUP BY user, key))
WHERE rank <= 32 GROUP BY key HAVING COUNT(*) >= 10\"\"\".replace("FILE", sys.argv[1])
out = []
for _ in range(int(sys.argv[2]) + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    rows = duckdb.connect(config={"threads": 2}).sql(text).arrow().read_all().num_rows
    out.append((time.perf_counter() - wall, time.process_time() - cpu, rows))
print(json.dumps({"first": time.process_time(), "runs": out[1:]}))
"""


def data(folder: Path, rows: int) -> Path:
    """Users by Zipf s = .6, keys by Zipf-Mandelbrot s = 1.05, q = 2.7, values uniform."""
    draw, users, keys = np.random.default_rng(1), rows // 10, 100_000
    laws = []
    for most, q, s in ((users, 0.0, 0.6), (keys, 2.7, 1.05)):
        weights = (np.arange(1, most + 1) + q) ** -s
        laws.append(np.cumsum(weights / weights.sum()))
    user, key = (np.searchsorted(cdf, draw.random(rows)).clip(max=len(cdf) - 1) for cdf in laws)
    table = pa.table({"user": user, "key": key, "value": draw.random(rows)})
    pq.write_table(table, folder / "records.parquet")
    path = folder / "dpstream.toml"
    accounts.write(path, PROJECT.replace("KEY", "5e" * 31 + "a1"))
    return path


def cold(catalog: Path) -> tuple[dict[str, float], str]:
    """One command in a process of its own, and what it said."""
    words = [sys.executable, "-m", "dpstream", "sql", "--project", str(catalog), STATEMENT]
    words += ["--fresh", "--json"]
    wall = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as command:
        assert command.stdout is not None
        output = command.stdout.read().decode()
        _, status, used = os.wait4(command.pid, 0)  # of this process alone
        command.returncode = os.waitstatus_to_exitcode(status)
    assert command.returncode == 0
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
    }, output


def warm(catalog: Path, repeats: int) -> dict[str, Any]:
    """The median of several answers of one process, after a first."""
    words = [sys.executable, "-c", _WARM, str(catalog), STATEMENT, str(repeats)]
    report = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    names = ("seconds", "cpu_seconds", "validated_seconds", "keys")
    medians = (statistics.median(part) for part in zip(*report["runs"], strict=True))
    return dict(zip(names, medians, strict=True)) | {"peak_mib": report["peak_mib"]}


def duckdb(records: Path, repeats: int) -> dict[str, float]:
    """CPU seconds of the same bounding in DuckDB alone, in a new process and again."""
    words = [sys.executable, "-c", _DUCKDB, str(records)]

    def ran(times: int) -> dict[str, Any]:
        report = subprocess.run([*words, str(times)], check=True, capture_output=True, text=True)
        return dict(json.loads(report.stdout))

    _, cpu, _ = zip(*ran(repeats)["runs"], strict=True)
    return {"cold_cpu_seconds": ran(0)["first"], "warm_cpu_seconds": statistics.median(cpu)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        catalog = data(Path(folder), options.rows)
        timings = {"cold": cold(catalog)[0], "warm": warm(catalog, options.repeats)}
        timings["duckdb"] = duckdb(Path(folder) / "records.parquet", options.repeats)
    emit({"bench": "sql", "rows": options.rows, **timings, "machine": machine()}, options.out)


if __name__ == "__main__":
    main()
