"""One-shot sum and count by each peer: one function a peer, run in a process of its own.

    python -m tests.bench.peer_runs NAME DATA WARM_UP OUT --repeats 3

Every function reads the Parquet file, bounds each user to C records, releases a noisy count and
sum of every selected key under the same (epsilon, delta), and writes (key, count, total).  What
differs is said in ``HOW``.  Nothing here is timed but the runs after one on the small file.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.bench.oneshot import COUNT_AND_SUM
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.one_run import peak_gib

EPSILON, DELTA, C = 1.0, 1e-6, 10
LOWEST, HIGHEST = 0, 100
SHARDS = 2

Run = Callable[[Path, Path], None]
#: What each peer does, for the result.
HOW = {
    "dpstream": "Gaussian, joint Gaussian-DP budget, C records a user, durable commits",
    "pipeline-dp-local": "Gaussian, naive composition, C keys a user and 1 record a key",
    "pipeline-dp-beam": "the same on Beam's FnApiRunner",
    "opendp-polars": "integer Laplace and a stable-key threshold, C records a user",
    "numpy": "dpstream's sigmas and threshold, C records a user; insecure generator, no state",
}


def _job(data: Path, out: Path) -> Any:
    from dpstream.pipelines.jobs.job import load_job

    frame = Frame(data, "int", out.parent / "runs", EPSILON, DELTA, SHARDS)
    return load_job(write_job(frame, Setting(parse_mode("sticky"), 1, C), COUNT_AND_SUM))


def dpstream(data: Path, out: Path) -> None:
    """The whole job: input digest, store, commits, sealed release."""
    from dpstream.pipelines.formats.encodings import read_releases
    from dpstream.pipelines.stream.run import run_job

    job = _job(data, out)
    run_job(job)
    pq.write_table(read_releases(job.sink.path).select(["key", "count", "total"]), out)


def numpy_insecure(data: Path, out: Path) -> None:
    """The least that must be done: sort by user, cut at C, count, add noise."""
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.limits import DECODE_BITS

    budget = allocate(_job(data, out).plan)
    assert budget.statistic is not None and budget.tau is not None
    table = pq.read_table(data, columns=["user", "key", "value"])
    names = table["key"].combine_chunks().dictionary_encode()
    if isinstance(names, pa.ChunkedArray):
        names = names.combine_chunks()
    user, code = table["user"].to_numpy(), names.indices.to_numpy()
    order = np.argsort(user, kind="stable")
    first = np.searchsorted(user[order], user[order])
    index = np.arange(len(order)) - first
    rows, index = order[index < C], index[index < C]
    user, code = user[rows], code[rows].astype(np.int64)
    value = np.clip(np.rint(table["value"].to_numpy()[rows]), LOWEST, HIGHEST)
    size = len(names.dictionary)
    pairs, earliest = np.unique(user * size + code, return_index=True)
    units = tested = np.bincount(pairs % size, minlength=size)
    if budget.weights is not None:
        weight = budget.weights[index[earliest]]
        tested = budget.statistic.weighted * np.bincount(pairs % size, weight, size)
        tested = tested + budget.statistic.counted * units
    rng = np.random.default_rng()
    noisy = tested + rng.normal(0, float(budget.statistic.sd[0]), size)
    chosen = np.flatnonzero((units > 0) & (noisy > budget.tau[0] / (1 << DECODE_BITS)))
    columns: dict[str, Any] = {"key": names.dictionary.take(pa.array(chosen))}
    for name, weights, noise in zip(("count", "total"), (None, value), budget.values, strict=True):
        exact = np.bincount(code, weights, size)[chosen]
        columns[name] = exact + rng.normal(0, noise.sigma, len(chosen))
    pq.write_table(pa.table(columns), out)


def _pipeline_dp(rows: Any, backend: Any) -> Any:
    import pipeline_dp as pdp

    accountant = pdp.NaiveBudgetAccountant(EPSILON, DELTA)
    params = pdp.AggregateParams(
        metrics=[pdp.Metrics.COUNT, pdp.Metrics.SUM],
        noise_kind=pdp.NoiseKind.GAUSSIAN,
        # A bound on all records of a user (max_contributions) fails with private selection in
        # 0.3.1: C keys with one record each is the same C.
        max_partitions_contributed=C,
        max_contributions_per_partition=1,
        min_value=LOWEST,
        max_value=HIGHEST,
        partition_selection_strategy=pdp.PartitionSelectionStrategy.GAUSSIAN_THRESHOLDING,
    )
    extractors = pdp.DataExtractors(
        privacy_id_extractor=lambda row: row[0],
        partition_extractor=lambda row: row[1],
        value_extractor=lambda row: row[2],
    )
    result = pdp.DPEngine(accountant, backend).aggregate(rows, params, extractors)
    accountant.compute_budgets()
    return result


def _write_metrics(out: Path, result: list[Any]) -> None:
    columns = {
        "key": pa.array([key for key, _ in result], pa.string()),
        "count": pa.array([float(m.count) for _, m in result], pa.float64()),
        "total": pa.array([float(m.sum) for _, m in result], pa.float64()),
    }
    pq.write_table(pa.table(columns), out)


def pipeline_dp_local(data: Path, out: Path) -> None:
    """PipelineDP on its LocalBackend: rows as tuples in one process."""
    import pipeline_dp as pdp

    table = pq.read_table(data, columns=["user", "key", "value"])
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    _write_metrics(out, list(_pipeline_dp(rows, pdp.LocalBackend())))


def pipeline_dp_beam(data: Path, out: Path) -> None:
    """PipelineDP on Beam, in process."""
    import apache_beam as beam
    import pipeline_dp as pdp
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = (
            pipeline
            | beam.io.ReadFromParquet(str(data), columns=["user", "key", "value"])
            | beam.Map(lambda row: (row["user"], row["key"], row["value"]))
        )
        _ = (
            _pipeline_dp(rows, pdp.BeamBackend())
            | beam.combiners.ToList()
            | beam.Map(lambda result: _write_metrics(out, result))
        )


def opendp_polars(data: Path, out: Path) -> None:
    """OpenDP on a lazy Polars frame; whole values, as a float sum needs a public key count."""
    import opendp.prelude as dp
    import polars as pl

    dp.enable_features("contrib")
    value = pl.col("value").round().cast(pl.Int64)
    context = dp.Context.compositor(
        data=pl.scan_parquet(data).select("user", "key", value),
        privacy_unit=dp.unit_of(contributions=1, identifier="user"),
        privacy_loss=dp.loss_of(epsilon=EPSILON, delta=DELTA),
        split_evenly_over=1,
        margins=[dp.polars.Margin(by=["key"], max_length=100_000_000)],
    )
    filled: Any = pl.col("value").fill_null(0)
    total = filled.dp.sum((LOWEST, HIGHEST))
    query = context.query().truncate_per_group(C).group_by("key").agg(dp.len(), total)
    frame = query.release().collect()
    columns = {"key": frame["key"].cast(pl.String), "count": frame["len"], "total": frame["value"]}
    pq.write_table(pa.table({name: c.to_arrow() for name, c in columns.items()}), out)


PEERS: dict[str, Run] = {
    "dpstream": dpstream,
    "pipeline-dp-local": pipeline_dp_local,
    "pipeline-dp-beam": pipeline_dp_beam,
    "opendp-polars": opendp_polars,
    "numpy": numpy_insecure,
}


def errors(data: Path, out: Path) -> dict[str, float]:
    """Keys released, and L1 of the counts against the raw histogram (0 where not released)."""
    truth = pq.read_table(data, columns=["key"])["key"].value_counts()
    keys, exact = truth.field("values"), truth.field("counts").to_numpy()
    released = pq.read_table(out)
    at = pc.index_in(released["key"].cast(pa.string()), value_set=keys.cast(pa.string()))
    counts = np.zeros(len(exact))
    counts[at.to_numpy()] = released["count"].to_numpy()
    return {"keys": released.num_rows, "count_l1": round(float(np.abs(counts - exact).sum()))}


def main() -> None:
    """Command line; prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("data", type=Path)
    parser.add_argument("warm_up", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    run, seconds, cpu = PEERS[args.name], [], []
    for data in [args.warm_up] + [args.data] * args.repeats:
        start, before = time.perf_counter(), time.process_time()
        run(data, args.out)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - before)
    result = {"first_run_seconds": round(seconds[0], 2), "seconds": seconds[1:], "cpu": cpu[1:]}
    print(json.dumps({**result, "peak_gib": round(peak_gib(), 2), **errors(args.data, args.out)}))


if __name__ == "__main__":
    main()
