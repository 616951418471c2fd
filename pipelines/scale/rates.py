"""What `dpstream plan --scale` rests on: measured rates, published limits, list prices.

Every figure says where it comes from.  Rates are for one core of the machine they were measured
on (2 shared cores, Python 3.11); ``--measure`` puts this machine's in their place.
"""

import math
from typing import Literal, NamedTuple

from dpstream.accounting.errors import UsageError

Kind = Literal["measured", "published", "list price", "assumed", "given"]


class Figure(NamedTuple):
    """A number and where it comes from.

    Attributes:
        value: in ``unit``.
        kind: whether it was measured, published by its vendor, a list price, assumed, or
            given on the command line.
        source: the command that measured it, or who says so and when.
    """

    value: float
    unit: str
    kind: Kind
    source: str


_DATAFLOW = "as of 2025, us-central1, cloud.google.com/dataflow/pricing"
_SPANNER = "as of 2025, us-central1, Standard edition, cloud.google.com/spanner/pricing"
_LIMITS = "cloud.google.com/spanner/docs/performance, a regional SSD node"

#: Work of the pipeline and its stores; one core each.
RATES: dict[str, Figure] = {
    "pipeline_records": Figure(
        843_000, "records/core-second", "measured",
        "dpstream experiment table1 --users 10000000 --triggers 100 --modes sticky: ingest, BOUND, "
        "steps, SQLite, sink (59.05M records, 70 CPU s)",
    ),
    "shuffle_rows": Figure(
        134_000, "rows/core-second", "measured",
        "python -m tests.bench.shuffle --prism PRISM: 268,000 rows/s on 2 cores, 64 shards",
    ),
    "spanner_records": Figure(
        22_700, "records/core-second", "measured",
        "python -m tests.bench.microbatch --stores spanner --cold: 44 CPU us of the client for a "
        "record whose unit and key are read and written",
    ),
    "sqlite_bytes": Figure(
        17, "bytes/admitted record", "measured",
        "dpstream experiment table1 --users 10000000: 934 MiB for 57.87M records of 10M users",
    ),
    "memory_bytes": Figure(
        118, "bytes/admitted record", "measured",
        "dpstream experiment table1 --users 10000000: 6.5 GiB, state of open windows and input",
    ),
}  # fmt: skip

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
    """The price list with the prices a person gave in their place.

    Raises:
        UsageError: an unknown name, or no price.
    """
    prices = dict(PRICES)
    for name, value in given.items():
        if name not in prices or not 0 <= value < math.inf:
            known = ", ".join(prices)
            raise UsageError("--price", f"must be NAME=DOLLARS of {known}", "correct it")
        prices[name] = Figure(value, prices[name].unit, "given", "--price")
    return prices
