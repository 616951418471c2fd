"""Texts of the report: arbitrary keys, times, settings, and the table of all keys.

The table has the rows that a page's script searches, sorts and saves.  A page without its script
shows the first rows.
"""

import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.fields import Field, job_field
from dpstream.accounting.figures import duration, exact, human, moment_of, time_text
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.connectors.final import TOO_UNCERTAIN, too_uncertain
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import PublicationSection
from dpstream.pipelines.render.charts import WIDTH
from dpstream.pipelines.report.data import Keys, floats, newest_of_each

#: Characters of a key that are shown; the rest is counted.
KEY_CHARACTERS = 60
#: What stands for an empty text.
EMPTY = "(empty text)"


#: Fields of a plan's time axis that have another name in a job's section.
_TIME = {"trigger_every": "release_every", "period": "budget.covers"}


def visible(text: str, most: int = KEY_CHARACTERS) -> str:
    """Return arbitrary text as one safe line: control and direction marks as escapes, long text
    cut.

    Escaping for HTML is the template's; this is for what HTML cannot show.
    """
    short = text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(
        f"\\u{ord(char):04x}" if unicodedata.category(char) in hidden else char for char in short
    )


def key_label(row: dict[str, Any], names: list[str]) -> str:
    """Return the key of a row in one line; bytes as hex digits, an empty text by its name."""
    return " · ".join(plain(row[name]) or EMPTY for name in names)


def plain(value: Any, most: int = KEY_CHARACTERS) -> str:
    """Return one column of a key; an empty text is empty."""
    return visible(f"0x{value.hex()}" if isinstance(value, bytes) else str(value), most)


def public_source(name: str) -> str:
    """Return a source's name for a page that is published: of a path only its last part.

    Args:
        name: as the plan has it, ``KIND:PATH`` or ``KIND:TOPIC``.
    """
    kind, _, place = name.partition(":")
    if kind in ("kafka", "pubsub"):  # names, no paths
        return name
    return f"{kind}:{place.replace(chr(92), '/').rstrip('/').rpartition('/')[2]}"


def publication_of(job: Job) -> PublicationSection:
    """Return how a job's figures are presented; without a section of its own by the job's name."""
    return job.section.publication or PublicationSection(title=visible(job.name))


def label_of(name: str, publication: PublicationSection) -> str:
    """Return what a reader sees for the name of a column."""
    return visible(publication.labels.get(name, name))


def instant(micros: int) -> str:
    """Return a time in UTC, without parts that are zero."""
    try:
        moment = moment_of(micros)
    except OverflowError:
        return f"{micros} µs"
    if moment.time() == datetime.min.time():
        return f"{moment:%Y-%m-%d} UTC"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC".replace(":00 UTC", " UTC")


def stamp(micros: int) -> str:
    """Return a time as programs read it, ``2013-01-01T05:00:00Z``."""
    try:
        return time_text(moment_of(micros))
    except OverflowError:
        return str(micros)


def moment_text(timeline: Timeline, micros: int) -> str:
    """Return an instant of a timeline in UTC, or as the local day of its calendar."""
    return instant(micros) if timeline.calendar is None else timeline.calendar.day(micros)


def drawn(timeline: Timeline, micros: int) -> datetime:
    """Return an instant of a timeline where it is drawn on an axis: in the calendar's zone."""
    return moment_of(micros if timeline.calendar is None else timeline.calendar.local(micros))


def window_name(timeline: Timeline, window: int) -> str:
    """Return ``2013-01-01 05:00 UTC to 2013-01-08 05:00 UTC``, or the days of a calendar."""
    begin, end = timeline.window_bounds(window)
    if timeline.calendar is not None:
        return timeline.calendar.days(begin, end)
    return f"{instant(begin)} to {instant(end)}"


def settings(job: Job, in_force: Plan) -> list[tuple[str, str]]:
    """Return (name, value) of every setting that is public.

    Paths of key, state, ledger and releases are the operator's and stay out, and so does an
    insecure test secret: it would take the noise off.

    Args:
        in_force: the plan as the run has it: so what it leaves open is shown.
    """
    plan = msgspec.to_builtins(job.plan)
    rows = [
        ("source", public_source(job.plan.source)),
        ("stamp", plan["stamp"]),
        ("unit", _field(plan["unit"])),
        ("key", ", ".join(_field(f) for f in plan["key"])),
        ("public keys", plan["public_keys"] or "none: keys are selected privately"),
        ("keys of earlier windows", _remembered(in_force)),
        ("event time", plan["event_time"]),
    ]
    if plan["query"] is not None:  # its text may hold literals that are somebody's
        rows.append(("query of rows, digest", plan["query"]))
    for aggregate in plan["aggregates"]:
        rows += [
            (f"aggregate {aggregate['name']}: {name}", value)
            for name, value in aggregate.items()
            if name != "name" and value is not None
        ]
    of_calendar = {"period_unit"} if job.plan.timeline.calendar else {"period_unit", "calendar"}
    rows += [
        (_TIME.get(k, k), _time(job.plan.timeline, k, v))
        for k, v in plan["timeline"].items()
        if k not in of_calendar
    ]
    resolved = {"weights": in_force.design.weights, "skip": in_force.design.skips}
    privacy = plan["privacy"] | msgspec.to_builtins(resolved)
    rows += [(job_field(k), v) for k, v in privacy.items() if k != "usual_weights"]
    rows += [
        ("secret", "INSECURE: fixed for tests" if job.insecure else "a secret in a file"),
        ("sink.kind", job.sink.kind),
        ("shards", job.state.shards),
        ("mechanism version", plan["mechanism_version"]),
    ]
    if job.ledger is not None:
        rows += [("data_set", job.ledger.data_set), ("account.id", job.ledger.id)]
    return [(name, _plain(value)) for name, value in rows]


def _remembered(plan: Plan) -> str:
    """What a window knows of what earlier ones have published."""
    if not plan.design.remembers:
        return "not known"
    lasting = plan.remember
    how_long = plan.timeline.words(lasting) if isinstance(lasting, int) else "the run"
    return f"published from the window's start, for {how_long}"


def _field(field: dict[str, Any]) -> str:
    return f"{field['column']} ({field['type']})"


def _time(timeline: Timeline, name: str, value: Any) -> str | None:
    """Return a field of a timeline as text."""
    if value is None:
        return None
    if name == "calendar":
        return str(value["zone"])
    if name in ("start", "end"):
        return instant(value)
    return duration(value) if name == "max_skew" else timeline.words(value)


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value)
    return exact(value) if isinstance(value, float) else str(value)


#: Rows that stand in the page itself; the script shows further ones.
FIRST_ROWS = 12
#: Characters of a key column's text in table and CSV.
KEY_TEXT = 120


class Column(NamedTuple):
    """A published column of the table.

    Attributes:
        title: its head in CSV; ``label``: its head for people.
        value, sd: the columns of value and sd.
    """

    title: str
    label: str
    value: str
    sd: str


class Table(NamedTuple):
    """A table for the page.

    Attributes:
        data: what the script is given; see `table`.
        names: labels of the key columns; ``columns``: of the others.
        first: the first rows: texts of the key, the window's start, the values.
        caption: words for the rows of the table.
        withheld: how many values of all rows are too uncertain, of so many.
    """

    data: dict[str, Any]
    names: list[str]
    columns: list[str]
    first: list[tuple[list[str], str, list[str]]]
    caption: str
    withheld: tuple[int, int]


def with_error(value: float | None, sd: float | None, share: float | None = None) -> str:
    """Return ``100 ± 19.6``: a value and 1.96 times its sd.

    Args:
        share: see `connectors.final.too_uncertain`.
    """
    if value is None or sd is None or not np.isfinite([value, sd]).all():
        return "–"
    if too_uncertain(np.array([value]), np.array([sd]), share).any():
        return TOO_UNCERTAIN
    return f"{human(value)} ± {human(WIDTH * sd)}"


def table(
    fields: Sequence[Field],
    keys: Keys,
    timeline: Timeline,
    columns: Sequence[Column],
    file: str,
    unfinished: Sequence[int] = (),
    publication: PublicationSection | None = None,
) -> Table:
    """Return the rows of a page, column by column.

    Args:
        unfinished: windows that are not over or that the end of the job cuts: the page opens on the
            newest of the others.
        publication: labels of key columns, and what is withheld.

    ``data``: ``names``, ``texts`` (which key columns are text) and ``keys`` (texts of each key);
    ``starts`` and ``ends`` of windows, for people, and ``from`` and ``to``, for CSV; which of them
    are ``complete``; of each row
    ``key`` and ``window`` (places in those lists); ``columns``: title, ``values`` and ``sds`` of
    each; ``file``: of CSV; ``share``: above which an sd makes a value too uncertain.
    """
    publication = publication or PublicationSection(title="")
    share = publication.uncertain_above
    names = [field.column for field in fields]
    numbers, place = np.unique(keys.rows["_window"].to_numpy(), return_inverse=True)
    bounds = [timeline.window_bounds(int(number)) for number in numbers]
    texts = [[plain(v, KEY_TEXT) for v in keys.ranked[name].to_pylist()] for name in names]
    data = {
        "names": names,
        "texts": [field.type == "string" for field in fields],
        "keys": list(zip(*texts, strict=True)),
        "starts": [moment_text(timeline, low) for low, _ in bounds],
        "ends": [moment_text(timeline, high) for _, high in bounds],
        "complete": (~np.isin(numbers, unfinished)).tolist(),
        "from": [stamp(low) for low, _ in bounds],
        "to": [stamp(high) for _, high in bounds],
        "key": keys.rows["_key"].to_pylist(),
        "window": place.tolist(),
        "columns": [
            {
                "title": column.title,
                "values": _short(keys.rows[column.value], 8),
                "sds": _short(keys.rows[column.sd], 4),
            }
            for column in columns
        ],
        "file": file,
        "share": share,
    }
    complete = ~np.isin(numbers, unfinished)[place]
    withheld, defined = 0, 0
    for column in columns:
        values, sds = floats(keys.rows[column.value]), floats(keys.rows[column.sd])
        there = np.isfinite(values) & np.isfinite(sds)
        withheld += int(too_uncertain(values[there], sds[there], share).sum())
        defined += int(there.sum())
    return Table(
        data,
        [label_of(name, publication) for name in names],
        [column.label for column in columns],
        _first(data, newest_of_each(keys, complete)),
        rows_text(keys),
        (withheld, defined),
    )


def _short(column: pa.ChunkedArray, digits: int) -> list[float | None]:
    """Numbers with so many digits; what is not defined is ``None``."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in floats(column).tolist()]


def _first(data: dict[str, Any], newest: Any) -> list[tuple[list[str], str, list[str]]]:
    return [
        (
            [text or EMPTY for text in data["keys"][data["key"][row]]],
            data["starts"][data["window"][row]],
            [with_error(c["values"][row], c["sds"][row], data["share"]) for c in data["columns"]],
        )
        for row in newest[:FIRST_ROWS].tolist()
    ]


def rows_text(keys: Keys) -> str:
    """Return the text that says which of all values a page holds."""
    held, least = keys.ranked.num_rows, "" if keys.exact else "at least "
    if keys.rows.num_rows == keys.values and keys.exact:
        return f"All {keys.distinct:,} rows with all their {keys.values:,} values."
    return (
        f"The {held:,} busiest of {least}{keys.distinct:,} rows, each with its newest value; the"
        f" {keys.complete:,} busiest with all their windows: {keys.rows.num_rows:,} of"
        f" {least}{keys.values:,} values. A page holds no more, so that it stays quick; the"
        " releases hold them all."
    )
