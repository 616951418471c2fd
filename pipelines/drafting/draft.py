"""The text of a first job: sections of a project file, whole, commented, and checked before they
are written.
"""

import glob
import json
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.places import COLUMNAR, file_kind
from dpstream.accounting.plan.plan import declared
from dpstream.accounting.strength import MOST_DELTA
from dpstream.pipelines.drafting.columns import DataFile, is_file
from dpstream.pipelines.drafting.windows import WORDS, Windows
from dpstream.pipelines.jobs.job import Job, job_in
from dpstream.pipelines.project.expected import proposed
from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.project.sections import CsvSection, Section, TimeColumn
from dpstream.pipelines.tables.catalog import MAX_COLUMNS, UNIT_TYPES, usable_names

#: Stands for an id while a text is checked.
NO_ID = "0" * 16
#: What `dpstream init` calls the fields of a job and its table, without the names of sections.
FLAGS = {
    "table.unit_column": "--unit",
    "key": "--key",
    "table.time_column": "--time",
    "start": "--start",
    "end": "--end",
    "window": "--window",
    "time": "--window",
    "release_every": "--every",
    "budget.epsilon": "--epsilon",
    "budget.delta": "--delta",
    "contributions": "--contributions",
    "budget.covers": "--covers",
}
#: Columns of every release.
_RESERVED = {
    "release_id",
    "window_start",
    "window_end",
    "trigger",
    "trigger_time",
    "plan_hash",
    "run_id",
}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Value(NamedTuple):
    """A column whose mean is published, and its public bounds."""

    column: str
    low: float
    high: float


class Answers(NamedTuple):
    """The answers of a person, or the proposed ones.

    Attributes:
        file: the data.
        unit, key: columns with their types.
        time: column of the event time, and how it is written.
        values: the columns whose means are published.
        windows: when.
        every: distance of trigger times, ``None``: one trigger, at the end of a window.
        epsilon, delta, contributions: the guarantee, and C.
        period: what epsilon and C cover, ``None``: the whole stream.
    """

    file: DataFile
    unit: Field
    key: tuple[Field, ...]
    time: TimeColumn
    values: tuple[Value, ...]
    windows: Windows
    every: str | None
    epsilon: float
    delta: float
    contributions: int
    period: str | None = None


class NewDataSet(NamedTuple):
    """A data set that the file does not have yet.

    Attributes:
        unit: what its account calls the privacy unit.
        account: path or URL, as the file names it; id: of the account, of zeros until it is made.
        secret: path of the secret, as the file names it.
        limit: of a new account; ``None``: it was there.
    """

    unit: str
    account: str
    id: str
    secret: str
    limit: tuple[float, float] | None

    @property
    def limit_text(self) -> str:
        """The limit as text for people."""
        if self.limit is None:
            return "the limit that it has"
        return "epsilon {:g} at delta {:g}".format(*self.limit)

    def as_dict(self) -> dict[str, object]:
        """Return the account as JSON; its limit is ``null`` where it was there."""
        limit = (
            None if self.limit is None else dict(zip(("epsilon", "delta"), self.limit, strict=True))
        )
        return {"path": self.account, "id": self.id, "limit": limit}


class Target(NamedTuple):
    """The sections that are added to a project file.

    Attributes:
        path: of the file, absolute.
        before: the file's text before the change; empty without a file.
        job, table, data_set: names of the sections.
        new_data_set: ``None``: the file has it.
        new_table: whether the file lacks the table.
    """

    path: Path
    before: str
    job: str
    table: str
    data_set: str
    new_data_set: NewDataSet | None
    new_table: bool = True

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections that are added."""
        data_set = () if self.new_data_set is None else (f"data_set.{self.data_set}",)
        table = (f"table.{self.table}",) if self.new_table else ()
        return (*data_set, *table, f"job.{self.job}")


def source_path(given: str, folder: Path) -> str:
    """Return the source's path from the project's folder; what one file is called is no pattern."""
    path = os.path.relpath(Path(given).absolute(), folder)
    return glob.escape(path) if is_file(given) else path


def checked(text: str, target: Target) -> Job:
    """Return the drafted job of a project file's text, if `dpstream plan` will take it.

    Raises:
        UsageError, PolicyError: it will not; with the flag's name for the field's.
    """
    try:
        job = job_in(decode_project(text.encode(), target.path), target.job)
        allocate(job.plan)
    except UsageError as error:
        field = re.sub(r"^(job|table|data_set)\.[^.]+\.", r"\1.", error.field).removeprefix("job.")
        flag = FLAGS.get(field)
        if flag is None and field.startswith("aggregate"):
            flag = "--bounds" if "bounds" in field else "--value"
        texts = (re.sub("release_every( =)?", "--every", each) for each in (error.rule, error.fix))
        raise UsageError(flag or error.field, *texts) from None
    return job


def project_text(answers: Answers, target: Target) -> str:
    """Return the project file's text with the drafted sections at its end."""
    parts = [target.before.rstrip("\n") or _HEAD]
    if target.new_data_set is not None:
        parts.append(_data_set(target.data_set, target.new_data_set, answers))
    if target.new_table:
        parts.append(_table(answers, target))
    parts.append(_job(answers, target))
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Begun by `dpstream init`. `dpstream plan` says what a job promises and what would serve it better,
# and reads no record. All fields: docs/reference/project-file.md.
version = 1"""


def _data_set(name: str, new: NewDataSet, answers: Answers) -> str:
    """Unit, account and secret, which all tables and jobs of a data set share."""
    account = f"{{ path = {_quoted(new.account)}, id = {_quoted(new.id)} }}"
    return f"""\
[data_set.{name}]
unit = {{ name = {_quoted(new.unit)}, type = "{answers.unit.type}" }}  # what is protected
account = {account}  # every run is charged, none passes its limit
secret = {_quoted("file:" + new.secret)}  # all noise comes from it: mode 0600, backed up"""


def _table(answers: Answers, target: Target) -> str:
    """Where the records are."""
    path = source_path(answers.file.given, target.path.parent)
    expect, kind = expected_names(answers, target.path.parent), ""
    if expect is not None:
        kind = f"expect = {_quoted(expect)}  # a run is refused while one is missing\n"
    kind += "" if file_kind(path) else f"format = {_quoted(answers.file.kind)}\n"
    if answers.file.csv != CsvSection():
        kind += f"csv = {_written(answers.file.csv)}  # how the files are written\n"
    return f"""\
[table.{target.table}]
data_set = "{target.data_set}"
path = {_quoted(path)}  # a file or a pattern, from this file's folder
{kind}unit_column = {_quoted(answers.unit.column)}  # whose record it is
time_column = {_time(answers)}  # without a zone: {answers.time.zone or "UTC"}{_typed(answers)}"""


def expected_names(answers: Answers, folder: Path) -> str | None:
    """Return the rule for the names of complete data, if the pattern's first file shows a time."""
    first = os.path.relpath(answers.file.first.absolute(), folder)
    return proposed(source_path(answers.file.given, folder), first)


def _typed(answers: Answers) -> str:
    """The line of a table's columns with their types, for statements.

    Without it a statement looks at the schema of Parquet each time, also if it was answered.  Types
    of text files follow from the roles of the columns, never from a value: what a row holds would
    decide about the line.  All other columns are texts.  The lines of JSON have names where they
    are public; without them only columns with a role are known.
    """
    roles = {value.column: "FLOAT64" for value in answers.values} | {
        answers.time.column: "TIMESTAMP"
    }
    roles |= {field.column: UNIT_TYPES[field.type] for field in (*answers.key, answers.unit)}
    types: dict[str, str | None] = {c.name: c.sql for c in answers.file.columns or ()}
    advice = ""
    if answers.file.kind not in COLUMNAR:
        types |= roles
        advice = "; write FLOAT64, INT64 or BOOL where it is one"
    columns = [name for name in usable_names(types) if types[name] is not None]
    if len(columns) > MAX_COLUMNS:
        columns = [name for name in columns if name in roles]
    if not columns:
        return ""
    declared = ", ".join(f'{_key(name)} = "{types[name]}"' for name in columns)
    return f"\ncolumns = {{ {declared} }}  # for SQL{advice}"


def _job(answers: Answers, target: Target) -> str:
    """What is published, when, and at which guarantee."""
    windows, name = answers.windows, target.job
    guarantee = f"epsilon = {answers.epsilon!r}, delta = {answers.delta!r}"
    covered = _COVERED[answers.period is None]
    zone = windows.calendar
    late = _lateness(answers, target)
    calendar = "" if zone is None else f"\ncalendar = {_quoted(zone)}  # whose days count"
    return f"""\
[job.{name}]
table = "{target.table}"
key = [{", ".join(map(_column, answers.key))}]  # what is grouped by; keys need not be known
{_aggregates(answers)}
start = {_quoted(windows.start)}  # records before it, or from the end on, do not count
end = {_quoted(windows.end)}{calendar}
window = {_quoted(windows.length)}  # what is counted together
release_every = {_quoted(answers.every or windows.length)}  # {_growing(answers)}{late}
# The guarantee for one unit {covered}.
budget = {{ {guarantee}, covers = {_covers(answers)} }}  # delta far below 1 / number of units
# C: so many records of a unit count; `dpstream choose` finds a better one at a charge.
contributions = {answers.contributions}
store = {_quoted(store_name(name))}  # what was released; a run goes on from it
sink = {{ kind = "parquet", path = {_quoted(release_folder(name))} }}  # or csv, jsonl"""


_COVERED = {
    True: 'over all windows; "window" or a length gives each its own',
    False: 'in each of what it covers; "lifetime" is all windows together',
}


def _covers(answers: Answers) -> str:
    """What the budget covers, as the file writes it."""
    if answers.period is None:
        return _quoted("lifetime")
    return _quoted("window" if answers.period == answers.windows.length else answers.period)


def store_name(job: str) -> str:
    """Return the file of a job's store."""
    return f"{job}.store.db"


def release_folder(job: str) -> str:
    """Return the folder of a job's releases: no two jobs share it."""
    return f"releases/{job}"


#: A trigger interval that divides a window of this length.
_PARTS = {"1h": "15m", "1d": "6h", "7d": "1d"} | {
    "1 week": "1 day",
    "1 quarter": "1 month",
    "1 year": "1 month",
}


def _growing(answers: Answers) -> str:
    if answers.every is not None:
        return "how often a window is published while it grows; fewer triggers, less noise"
    part = _PARTS.get(answers.windows.length)
    more = f"; '{part}' also shows it grow, with more noise" if part else ""
    return f"one release a window, at its end{more}"


def _lateness(answers: Answers, target: Target) -> str:
    """The line that lets files come later, where no rule over their names shows that one is
    missing.
    """
    file = answers.file
    if file.first == Path(file.given) or expected_names(answers, target.path.parent) is not None:
        return ""
    length = _quoted(answers.every or answers.windows.length)
    advice = "files may come this late, for one more release; '0s' has less noise, if none does"
    return f"\nallowed_lateness = {length}  # {advice}"


def limit_of(epsilon: float, delta: float) -> tuple[float, float]:
    """Return the limit of a new account: room for two jobs like this one."""
    return 2 * epsilon, min(2 * delta, MOST_DELTA)


def bounded(column: str, low: float, high: float) -> Value:
    """Return a value with its bounds.

    Raises:
        UsageError: they are none.
    """
    if not -math.inf < low < high < math.inf:
        raise UsageError(
            "--bounds", "needs two numbers, the lower one first", "write it like --bounds 0 100"
        )
    return Value(column, low, high)


def _time(answers: Answers) -> str:
    """The column of times, and what is declared of it."""
    time = answers.time
    if time == TimeColumn(time.column):
        return _quoted(time.column)
    return _written(time)


def _written(section: Section) -> str:
    """A table of TOML with the fields that differ from their defaults."""
    fields = [
        f"{name} = [{', '.join(map(_quoted, value))}]"
        if isinstance(value, list)
        else f"{name} = {json.dumps(value) if isinstance(value, int) else _quoted(value)}"
        for name, value in declared(section).items()
    ]
    return f"{{ {', '.join(fields)} }}"


def _aggregates(answers: Answers) -> str:
    used = _RESERVED | {f.column for f in answers.key}
    lines = list[str]()

    def named(*wished: str) -> str:
        name = next(
            n
            for n in (*wished, *(f"{wished[0]}_{i}" for i in range(2, 99)))
            if not {n, f"{n}_sd"} & used and not n.startswith("_")
        )
        used.update((name, f"{name}_sd"))
        return _key(name)

    lines.append(
        f'aggregate.{named("records", "count")} = {{ kind = "count" }}'
        '  # of records; "units" counts distinct units'
    )
    for value in answers.values:
        plain = value.column.lstrip("_") or "value"
        wished = (f"mean_{plain}",) if plain == "count" else (plain, f"mean_{plain}")
        bounds = f"[{_number(value.low)}, {_number(value.high)}]"
        lines += [
            "# Values beyond the public bounds count as the bound; all are rounded to the grid.",
            f'aggregate.{named(*wished)} = {{ kind = "mean", column = {_quoted(value.column)}, '
            f'bounds = {bounds}, grid = {_number(grid_of(value.low, value.high))} }}  # or "sum"',
        ]
    return "\n".join(lines)


def grid_of(low: float, high: float) -> float:
    """Return a power of ten: a hundredth to a thousandth of the bounds' distance."""
    if not 0 < high - low < math.inf:
        return 1.0  # refused where the bounds are checked
    power: int = math.floor(math.log10(high - low) - 2 + 1e-9)
    return float(f"1e{power}")


def _number(value: float) -> str:
    """As TOML writes it: whole numbers without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _column(field: Field) -> str:
    if field.type == "string":
        return _quoted(field.column)
    return f"{{ column = {_quoted(field.column)}, type = {_quoted(field.type)} }}"


def _key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """A basic string of TOML, which is JSON's but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


WINDOW, LIFETIME = "window", "lifetime"


def with_covers(answers: Answers, target: Target, covers: str) -> Answers:
    """Return the answers with a budget that covers a window, the lifetime, or a length.

    Raises:
        UsageError: it is none of them, or a length that the job does not accept.
    """
    word = covers.strip().lower()
    if word not in (WINDOW, LIFETIME, *WORDS) and not word[:1].isdigit():
        raise UsageError(
            "--covers",
            f"'{covers}' is neither a length nor what a budget can cover",
            f"write {WINDOW}, {LIFETIME}, or a length such as 28d or 1 month",
        )
    if answers.windows.calendar is None and re.search("month|quarter|year", word):
        raise UsageError(
            "--covers",
            "is of the calendar, and the windows are not",
            "add --zone UTC, or a zone such as Europe/Berlin",
        )
    period = {WINDOW: answers.windows.length, LIFETIME: None}.get(word, word)
    covered = answers._replace(period=period)
    checked(project_text(covered, target), target)
    return covered
