"""The Polars plan beside a stream: ``python -m tests.bench.polars_plan PARQUET TRIGGERS LIMIT``.

The least that a job of one day computes without privacy: sort by time, keep the first LIMIT records
of each user, count records by key and trigger.  It imports nothing of the product, so that no
change of the product moves this baseline; the CPU time that counts is the whole process's.
"""

import sys

import polars as pl

DAY_MICROS = 86_400_000_000


def counts(path: str, triggers: int, limit: int) -> pl.DataFrame:
    """Return the records of each key and trigger, of the first ``limit`` of each user."""
    trigger = pl.col("time").dt.timestamp("us") % DAY_MICROS // (DAY_MICROS // triggers)
    return (
        pl.scan_parquet(path)
        .select("user", "time", "key")
        .sort("time")
        .filter(pl.col("user").cum_count().over("user") <= limit)
        .group_by("key", trigger.alias("trigger"))
        .agg(pl.len().alias("count"))
        .collect()
    )


if __name__ == "__main__":
    print(len(counts(sys.argv[1], *map(int, sys.argv[2:]))))
