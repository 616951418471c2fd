"""The text of a first job file: whole, commented, and checked before it is written."""

import glob
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.fields import Field
from dpstream.accounting.strength import MOST_DELTA
from dpstream.pipelines.drafting.columns import DataFile, is_file
from dpstream.pipelines.drafting.windows import Windows
from dpstream.pipelines.jobs.job import Job, decode_job, job_of
from dpstream.state.ledger.open import AccountPlace

#: The account's file, beside the job file.
ACCOUNT = "ledger.db"
#: Stands for an id while a text is checked.
_NO_ID = "0" * 16
#: What `dpstream init` calls the fields of a job.
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


class Value(NamedTuple):
    """A column whose mean is published, and its public bounds."""

    column: str
    low: float
    high: float


class Answers(NamedTuple):
    """What a person said, or what was proposed.

    Attributes:
        file: the data.
        unit, key: columns with their types.
        time: column of the event time.
        values: whose means are published.
        windows: when.
        every: distance of trigger times, ``None``: one trigger, at the end of a window.
        epsilon, delta, contributions: the guarantee, and C.
        key_name: file of the noise key, as the job names it.
        period: what epsilon and C cover, ``None``: the whole stream.
    """

    file: DataFile
    unit: Field
    key: tuple[Field, ...]
    time: str
    values: tuple[Value, ...]
    windows: Windows
    every: str | None
    epsilon: float
    delta: float
    contributions: int
    key_name: str
    period: str | None = None


def source_path(given: str, folder: Path) -> str:
    """The source's path from the job's folder; what one file is called is no pattern."""
    path = os.path.relpath(Path(given).absolute(), folder)
    return glob.escape(path) if is_file(given) else path


def checked(text: str, out: Path) -> Job:
    """The job that a text is, if `dpstream plan` will take it.

    Raises:
        UsageError, PolicyError: it will not; with the flag's name for the field's.
    """
    try:
        job = job_of(decode_job(text.encode()), out)
        allocate(job.plan)
    except UsageError as error:
        flag = FLAGS.get(error.field)
        if flag == "--window" and "multiple of release_every" in error.rule:
            raise UsageError(
                "--every", "must divide the window without a rest", "omit it, or give such a length"
            ) from None
        if flag is None and error.field.startswith("aggregate"):
            flag = "--clamp" if "clamp" in error.field else "--value"
        raise UsageError(flag or error.field, error.rule, error.fix) from None
    return job


def data_set_of(answers: Answers, out: Path) -> str:
    """What a new account calls the data set: the file's name."""
    return Path(answers.file.given).name.partition(".")[0].strip("*?[]") or out.stem


def job_text(answers: Answers, out: Path, account: AccountPlace | None = None) -> str:
    """A job file for ``answers``, to be written to ``out`` (absolute).

    Args:
        account: that it names; ``None``: a text to be checked, of an account that is not made yet.
    """
    stem, windows = out.stem, answers.windows
    account = account or AccountPlace(ACCOUNT, data_set_of(answers, out), _NO_ID)
    path = source_path(answers.file.given, out.parent)
    return f"""\
# Begun by `dpstream init`. `dpstream plan` says what it promises and what would serve it better,
# and reads no data. All keys: docs/reference/job-file.md.

[source]
kind = {_quoted(answers.file.kind)}
path = {_quoted(path)}  # a file or a pattern, from this file's folder
stamp = "event_time"  # files that are all there: nothing can come late

[schema]
unit = {_column(answers.unit)}  # whose record it is: the unit that is protected
key = [{", ".join(map(_column, answers.key))}]  # what is grouped by; keys need not be known
event_time = {_time(answers)}  # times without a zone are taken as UTC

{_aggregates(answers)}
[time]
start = {_quoted(windows.start)}  # records before it, or from the end on, do not count
end = {_quoted(windows.end)}
window = {_quoted(windows.length)}  # what is counted together
trigger_every = {_quoted(answers.every or windows.length)}  # {_growing(answers)}

[privacy]
epsilon = {answers.epsilon!r}  # the guarantee for one unit, over all releases; smaller is safer
delta = {answers.delta!r}  # far below 1 / number of units
# C: so many records of a unit count; `dpstream choose` finds a better one at a charge.
contributions = {answers.contributions}
{_period(answers)}
key_file = {_quoted(answers.key_name)}  # the secret that all noise comes from: mode 0600, backed up

[state]
store = {_quoted(f"sqlite:{stem}.db")}  # what was released; a run goes on from it

[ledger]  # the data set's account: every run is charged, none passes its limit
path = {_quoted(account.path)}
data_set = {_quoted(account.data_set)}
id = {_quoted(account.id)}{_unit(account)}

[sink]
kind = "parquet"  # or csv, jsonl
path = {_quoted(release_folder(out))}
"""


def _period(answers: Answers) -> str:
    """What the budget covers; of one window there is nothing to choose."""
    if answers.period is None:
        length = _quoted(answers.windows.length)
        return f"# period = {length}  # a fresh budget per unit and period; here: one for all time"
    return (
        f"period = {_quoted(answers.period)}  # epsilon and C are of a unit in each of these; "
        "without it: of all time"
    )


def release_folder(out: Path) -> str:
    """Where a job's releases go: no two jobs of a folder share it."""
    return "releases" if out.stem == "job" else f"{out.stem}-releases"


#: A trigger interval that divides a window of this length.
_PARTS = {"1h": "15m", "1d": "6h", "7d": "1d", "28d": "7d", "91d": "7d", "364d": "28d"}


def _growing(answers: Answers) -> str:
    if answers.every is not None:
        return "how often a window is published while it grows; fewer triggers, less noise"
    part = _PARTS.get(answers.windows.length)
    more = f"; '{part}' also shows it grow, with more noise" if part else ""
    return f"one release a window, at its end{more}"


def _unit(account: AccountPlace) -> str:
    """The account's own name of the unit, where the column has another."""
    return "" if account.unit is None else f"\nunit = {_quoted(account.unit)}"


def limit_of(epsilon: float, delta: float) -> tuple[float, float]:
    """The limit of a new account: room for two jobs like this one, since who answers for the data
    decides about more."""
    return 2 * epsilon, min(2 * delta, MOST_DELTA)


def bounded(column: str, low: float, high: float) -> Value:
    """A value with its bounds.

    Raises:
        UsageError: they are none.
    """
    if not -math.inf < low < high < math.inf:
        raise UsageError(
            "--clamp", "needs two numbers, the lower one first", "write it like --clamp 0 100"
        )
    return Value(column, low, high)


def _time(answers: Answers) -> str:
    """The column of times; of whole numbers, that they are known to be microseconds."""
    micros = any(c.name == answers.time and c.time == "micros" for c in answers.file.columns or ())
    name = _quoted(answers.time)
    return f'{{ column = {name}, type = "micros" }}' if micros else name


def _aggregates(answers: Answers) -> str:
    used = _RESERVED | {f.column for f in answers.key}
    tables = list[str]()

    def named(*wished: str) -> str:
        name = next(
            n
            for n in (*wished, *(f"{wished[0]}_{i}" for i in range(2, 99)))
            if not {n, f"{n}_sd"} & used and not n.startswith("_")
        )
        used.update((name, f"{name}_sd"))
        return name

    tables.append(
        f"[[aggregate]]\nname = {_quoted(named('records', 'count'))}  # a column of the release\n"
        'kind = "count"  # of records; "units" counts distinct units\n'
    )
    for value in answers.values:
        plain = value.column.lstrip("_") or "value"
        wished = (f"mean_{plain}",) if plain == "count" else (plain, f"mean_{plain}")
        name = named(*wished)
        tables.append(
            f'[[aggregate]]\nname = {_quoted(name)}\nkind = "mean"  # or "sum"\n'
            f"column = {_quoted(value.column)}\n"
            f"clamp = [{_number(value.low)}, {_number(value.high)}]"
            "  # public bounds: a value beyond them counts as the bound\n"
            f"grid = {_number(grid_of(value.low, value.high))}"
            "  # values are rounded to multiples of it\n"
        )
    return "\n".join(tables)


def grid_of(low: float, high: float) -> float:
    """A power of ten: a hundredth to a thousandth of the clamp's width."""
    if not 0 < high - low < math.inf:
        return 1.0  # refused where the clamp is checked
    power: int = math.floor(math.log10(high - low) - 2 + 1e-9)
    return float(f"1e{power}")


def _number(value: float) -> str:
    """As TOML writes it: whole numbers without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _column(field: Field) -> str:
    if field.type == "string":
        return f"{{ column = {_quoted(field.column)} }}"
    return f"{{ column = {_quoted(field.column)}, type = {_quoted(field.type)} }}"


def _quoted(text: str) -> str:
    """A basic string of TOML, which is JSON's but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
