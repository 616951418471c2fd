"""The data behind `dpstream plan --scale`: measured rates, published limits, list prices.

Every figure says where it comes from.  Rates are for one core of the machine they were measured
on (2 shared cores, Python 3.11); ``--measure`` puts this machine's in their place.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

from dpstream.accounting.errors import UsageError

FigureKind = Literal["measured", "published", "list price", "assumed", "given"]
_DATAFLOW = "as of 2025, us-central1, cloud.google.com/dataflow/pricing"
_SPANNER = "as of 2025, us-central1, Standard edition, cloud.google.com/spanner/pricing"
_LIMITS = "cloud.google.com/spanner/docs/performance, a regional SSD node"
#: What ``records_per_core_second()`` gives on the machine of `RATES`.
REFERENCE = 1_000_000.0
_USERS, _KEYS = 50_000, 100_000
#: Instant of the first record (2024-01-01, micros), and micros of a day.
_START, _DAY = 1_704_067_200_000_000, 86_400_000_000
#: What is measured: a day of 20 triggers.
_PROJECT = """
version = 1
[data_set.day]
unit = {{ name = "user", type = "int" }}
secret = "file:noise.secret"
[table.day]
path = "data.parquet"
unit_column = "user"
time_column = "time"
[job.day]
table = "day"
key = ["key"]
aggregate.count = {{ kind = "count" }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "72m"
budget = {{ epsilon = 6.0, delta = 1e-9, covers = "lifetime" }}
contributions = 32
store = "state{number}.db"
sink = {{ kind = "parquet", path = "releases{number}" }}
"""


class Figure(NamedTuple):
    """A number and its origin.

    Attributes:
        value: in ``unit``.
        kind: whether it was measured, published by its vendor, a list price, assumed, or
            given on the command line.
        source: the command that measured it, or who says so and when.
    """

    value: float
    unit: str
    kind: FigureKind
    source: str


#: Work of the pipeline and its stores; one core each.
RATES: dict[str, Figure] = {
    "pipeline_records": Figure(
        843_000,
        "records/core-second",
        "measured",
        "python -m tests.bench.paper table1 --users 10000000 --triggers 100 --modes sticky: "
        "ingest, BOUND, steps, SQLite, sink (59.05M records, 70 CPU s)",
    ),
    "shuffle_rows": Figure(
        134_000,
        "rows/core-second",
        "measured",
        "python -m tests.bench.shuffle --prism PRISM: 268,000 rows/s on 2 cores, 64 shards",
    ),
    "spanner_records": Figure(
        22_700,
        "records/core-second",
        "measured",
        "python -m tests.bench.microbatch --stores spanner --cold: 44 CPU us of the client for a "
        "record whose unit and key are read and written",
    ),
    "sqlite_bytes": Figure(
        17,
        "bytes/admitted record",
        "measured",
        "python -m tests.bench.paper table1 --users 10000000: 934 MiB for 57.87M records of 10M "
        "users",
    ),
    "memory_bytes": Figure(
        118,
        "bytes/admitted record",
        "measured",
        "python -m tests.bench.paper table1 --users 10000000: 6.5 GiB, state of open windows and "
        "input",
    ),
}

#: What Spanner's vendor states; nothing here was run against the service.
SPANNER: dict[str, Figure] = {
    "node_writes": Figure(
        22_500, "rows/second", "published", f"peak of batched writes of 1 KB rows, {_LIMITS}"
    ),
    "node_reads": Figure(22_500, "rows/second", "published", f"peak of 1 KB rows, {_LIMITS}"),
    "node_tib": Figure(10, "TiB", "published", _LIMITS),
    "node_busy": Figure(0.65, "of the peak", "published", "recommended CPU of a regional instance"),
}

#: Dollars; each can be given on the command line.
PRICES: dict[str, Figure] = {
    "vcpu_hour": Figure(0.069, "$/streaming vCPU-hour", "list price", _DATAFLOW),
    "gib_hour": Figure(0.003557, "$/GB-hour of worker memory", "list price", _DATAFLOW),
    "spanner_node_hour": Figure(0.90, "$/node-hour", "list price", _SPANNER),
    "spanner_gib_month": Figure(0.30, "$/GB-month", "list price", _SPANNER),
}

#: How busy a worker's cores may be on average.
WORKER_BUSY = Figure(0.7, "of its cores", "assumed", "room for restarts and uneven shards")


def with_prices(given: dict[str, float]) -> dict[str, Figure]:
    """Return the price list with the prices a person gave in their place.

    Raises:
        UsageError: an unknown name, or no price.
    """
    prices = dict(PRICES)
    for name, value in given.items():
        if name not in prices or not 0 <= value < math.inf:
            names = ", ".join(prices)
            raise UsageError("--price", f"must be NAME=DOLLARS of {names}", "correct it")
        prices[name] = Figure(value, prices[name].unit, "given", "--price")
    return prices


def records_per_core_second(runs: int = 3) -> float:
    """Return records per CPU second of the whole flow without Beam, best of some runs (some
    seconds).

    Generated records of 50,000 users through ingest, BOUND and 20 triggers on a SQLite store in a
    temporary folder, with a fresh key.
    """
    # A rate that is listed needs no runner.
    from dpstream.dp_transforms.flow import run_in_memory
    from dpstream.dp_transforms.run import begin_run
    from dpstream.pipelines.connectors.files.source import batches
    from dpstream.pipelines.jobs.job import load_job
    from dpstream.pipelines.jobs.secret import new_secret, secret_source
    from dpstream.state import open as stores

    best = 0.0
    with tempfile.TemporaryDirectory(prefix="dpstream-measure-") as scratch:
        folder = Path(scratch)
        rows = _generated(folder / "data.parquet")
        new_secret(folder / "noise.secret")
        for number in range(runs + 1):  # the first one compiles kernels
            path = folder / f"job{number}.toml"
            path.write_text(_PROJECT.format(number=number), encoding="utf-8")
            job = load_job(path)
            run, _ = begin_run(
                job.plan, secret_source(job), job.state.store or "", 4, source=[b"measure"]
            )
            read = list(batches(job))
            begin = time.process_time()
            run_in_memory(run, read)
            best = max(best, rows / (time.process_time() - begin))
            run.destroy_keys()
            stores.close_all()
    return best


def _generated(path: Path) -> int:
    """A file of six records a user on average, of keys by a Zipf-Mandelbrot law, and their number.

    Their times fall on one day, in order.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(_USERS), rng.geometric(1 / 6, _USERS))
    law = (np.arange(_KEYS) + 1000.0) ** -1.4
    key = pa.array(rng.choice(_KEYS, len(user), p=law / law.sum())).cast(pa.string())
    at = pa.array(np.sort(rng.integers(0, _DAY, len(user))) + _START)
    at = at.view(pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"user": rng.permutation(user), "key": key, "time": at}), path)
    return len(user)


def measured_rates() -> dict[str, Figure]:
    """Return the table's rates, all scaled by how this machine does the pipeline's own work."""
    ratio = records_per_core_second() / REFERENCE
    return {
        name: figure
        if not figure.unit.endswith("core-second")
        else figure._replace(
            value=round(figure.value * ratio),
            source=f"this machine: {ratio:.2f} times the table's, which is of {figure.source}",
        )
        for name, figure in RATES.items()
    }
