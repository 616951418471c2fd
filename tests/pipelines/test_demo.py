"""The demo's truth: clamped delays, the first flights of each aircraft; what is there stays."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.demo import distances, joined, prepare, read_flights, truth
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.stream.run import run_job


def flights(count: int, delays: list[float | None]) -> pa.Table:
    micros = pa.array([n * 1_000_000 for n in range(count)]).view(pa.timestamp("us", "UTC"))
    return pa.table({
        "tailnum": ["N1"] * (count - 1) + [None], "origin": ["JFK"] * count,
        "carrier": ["B6"] * count, "time_hour": micros, "dep_delay": delays,
    })  # fmt: skip


def test_the_truth_of_a_week() -> None:
    delays = [100.0, -100.0, 30.0, None, *[0.0] * 8]
    [row] = truth(flights(12, delays), 7 * 86_400_000_000, 0).to_pylist()
    # One flight has no aircraft and one no delay; of an aircraft the first eight count.
    assert (row["window"], row["true_flights"], row["counted_flights"]) == (0, 10, 8)
    assert row["true_delay"] == (60 - 60 + 30) / 10


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    pq.write_table(flights(1, [1.0]), tmp_path / "flights.parquet")
    data = (tmp_path / "flights.parquet").read_bytes()
    job = prepare(tmp_path)
    key = (tmp_path / "flights.secret").read_bytes()
    assert prepare(tmp_path).plan.hash == job.plan.hash
    assert (tmp_path / "flights.secret").read_bytes() == key
    assert (tmp_path / "flights.parquet").read_bytes() == data


def test_released_values_are_near_the_truth(tmp_path: Path) -> None:
    """The figures of the demo; a fresh key moves them by less than one flight."""
    job = prepare(tmp_path)
    run_job(job)
    line = job.plan.timeline
    table = joined(read_releases(job.sink.path), read_flights(), line.start, line.window)
    flights, minutes = distances(table)
    assert flights <= 22 and minutes <= 6.5
    assert table.num_rows > 1150
