"""Sum and count by key in SQL or its like, by one peer, with the libraries of that peer alone.

    PYTHON tests/bench/sql_peer_runs.py NAME DATA OUT

It imports nothing of dpstream, so that PYTHON may be of an environment where dpstream cannot be
installed.  The released keys go to OUT (Parquet: key, s, n); the last line of the output is JSON:
seconds and CPU seconds from the read file to the written result, peak MiB, the version.
"""

import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

EPSILON, DELTA, GROUPS = 6.0, 1e-9, 32


def smartnoise(data: str, out: str) -> str:
    """SmartNoise SQL on a pandas frame: ``max_ids`` groups of a user, clamped sums, tau."""
    import pandas as pd
    from snsql import Privacy, from_df

    frame = pd.read_parquet(data)
    columns = {
        "user": {"type": "int", "private_id": True},
        "key": {"type": "int"},
        "value": {"type": "float", "lower": 0.0, "upper": 1.0},
    }
    bounds = {"max_ids": GROUPS, "sample_max_ids": True, "clamp_counts": False, "rows": len(frame)}
    metadata = {"": {"d": {"records": {**columns, **bounds}}}}
    query = "SELECT key, SUM(value) AS s, COUNT(*) AS n FROM d.records GROUP BY key"
    # Its epsilon is one column's: what the whole statement costs is asked, and the rest scaled.
    part, delta = EPSILON / 2, DELTA
    for _ in range(40):
        privacy = Privacy(epsilon=part, delta=delta)
        cost = from_df(frame[:0], privacy=privacy, metadata=metadata).get_privacy_cost(query)
        if cost[0] <= EPSILON and cost[1] <= DELTA:
            break
        part = part * 0.98 if cost[0] > EPSILON else part
        delta = delta * 0.999 * DELTA / cost[1] if cost[1] > DELTA else delta
    reader = from_df(frame, privacy=privacy, metadata=metadata)
    rows = reader.execute(query)
    pd.DataFrame(rows[1:], columns=["key", "s", "n"]).astype(
        {"key": "int64", "s": "float64", "n": "float64"}
    ).to_parquet(out)
    return f"{part:.3g} of epsilon a column, ({cost[0]:.3g}, {cost[1]:.3g}) in all"


def opendp_polars(data: str, out: str) -> str:
    """OpenDP on a lazy Polars frame: integer Laplace; values in thousandths."""
    import opendp.prelude as dp
    import polars as pl

    dp.enable_features("contrib")
    value = (pl.col("value") * 1000).round().cast(pl.Int64)
    context = dp.Context.compositor(
        data=pl.scan_parquet(data).select("user", "key", value),
        privacy_unit=dp.unit_of(contributions=1, identifier="user"),
        privacy_loss=dp.loss_of(epsilon=EPSILON, delta=DELTA),
        split_evenly_over=1,
        margins=[dp.polars.Margin(by=["key"], max_length=100_000_000)],
    )
    filled: Any = pl.col("value").fill_null(0)
    total = filled.dp.sum((0, 1000))
    query = context.query().truncate_per_group(GROUPS).group_by("key").agg(dp.len(), total)
    frame = query.release().collect()
    pl.DataFrame(
        {"key": frame["key"], "s": frame["value"] / 1000, "n": frame["len"].cast(pl.Float64)}
    ).write_parquet(out)
    return f"{GROUPS} rows of a user"


PEERS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "smartnoise": ("smartnoise-sql", smartnoise),
    "opendp-polars": ("opendp", opendp_polars),
}


def main() -> None:
    """Run one peer once."""
    name, data, out = sys.argv[1:]
    package, run = PEERS[name]
    wall, cpu = time.perf_counter(), time.process_time()
    how = run(data, out)
    report: dict[str, Any] = {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "version": importlib.metadata.version(package),
        "how": how,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
