"""Flags and prompts -> `Answers`: on a terminal what no flag gives is prompted for.

**Columns** are checked against the schema.

**Values** of a file are read where they are public: names in JSON Lines, times and amounts.  They
are read only where `dpstream init --public-sample` says so, and of the first ``SAMPLE_ROWS`` rows.
What is found here is written into the project file, so it must not come from private records.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, TypeVar

import click
import msgspec

from dpstream.accounting.errors import UsageError, column_list, nearest, required
from dpstream.accounting.fields import Field
from dpstream.accounting.limits import MAX_EPSILON
from dpstream.pipelines.drafting.columns import FIELD, Column, DataFile, data_file
from dpstream.pipelines.drafting.draft import Answers, Value, bounded
from dpstream.pipelines.drafting.sample import (
    bounds,
    sampled_numbers,
    sampled_time,
    stretch,
    with_names,
)
from dpstream.pipelines.drafting.windows import suited, windows
from dpstream.pipelines.project.dialect import check_csv, check_zone
from dpstream.pipelines.project.sections import CsvSection, TimeColumn
from dpstream.pipelines.project.text import instant


def field_of(name: str, columns: Sequence[Column] | None, flag: str) -> Field:
    """Return a unit's or key's column with its type; without a schema it is text.

    Raises:
        UsageError: there is no such column, or it can be no identity.
    """
    column = _column(name, columns, flag)
    if column is None:
        return Field(name)
    if column.identity is None:
        raise UsageError(
            flag,
            f"column '{name}' is of a type that names nobody and nothing: not text, whole number, "
            "bool or bytes",
            "name another column, or write this one as text",
        )
    return Field(name, column.identity)


def time_of(name: str, columns: Sequence[Column] | None, declared: TimeColumn) -> TimeColumn:
    """Return the time's column.

    Args:
        declared: format, unit and zone of any column.

    Raises:
        UsageError: there is no such column, or it cannot be a time.
    """
    column = _column(name, columns, "--time")
    if column is not None and column.time is None:
        raise UsageError(
            "--time",
            f"column '{name}' is of a type that is no time: not timestamp, date or text",
            "name another column, or write this one as timestamps",
        )
    if column is not None and column.time == "ticks" and declared.unit is None:
        raise UsageError(
            "--time",
            f"column '{name}' holds numbers, and nothing tells what they count since 1970",
            "add --time-unit s, ms or us",
        )
    return msgspec.structs.replace(declared, column=name)


def value_of(name: str, columns: Sequence[Column] | None) -> str:
    """Return a value's column.

    Raises:
        UsageError: there is no such column, or it holds no numbers.
    """
    column = _column(name, columns, "--value")
    if column is not None and not column.number:
        raise UsageError(
            "--value",
            f"column '{name}' is of a type that is no number",
            "name another column, or write this one as numbers",
        )
    return name


def listed(columns: Sequence[Column] | None, fits: Callable[[Column], object]) -> str:
    """Return names to choose from, for an error; empty without a schema or without a plain name."""
    return column_list(c.name for c in columns or () if fits(c) and c.listed)


def _column(name: str, columns: Sequence[Column] | None, flag: str) -> Column | None:
    if not name:
        raise UsageError(flag, "must not be empty", "name a column")
    if columns is None:
        return None
    named = [c for c in columns if c.name == name]
    if len(named) == 1:
        return named[0]
    if named:
        problem = f"the file has {len(named)} columns '{name}'"
        raise UsageError(flag, problem, "rename all but one of them in the file")
    choices = listed(columns, lambda c: True)
    raise UsageError(
        flag,
        f"the file has no column '{name}'",
        f"name one of {choices}"
        if choices
        else "write the name as the file's first line has it"
        + ", or say what divides fields, e.g. --csv delimiter=," * (len(columns) == 1),
    )


Reply = TypeVar("Reply")


#: What follows a flag that is required, in an error.
_FORMS = {
    "--unit": "COLUMN",
    "--key": "COLUMN",
    "--time": "COLUMN",
    "--start": "2024-01-01 (the first day)",
    "--end": "2025-01-01 (the day after the last one)",
    "--epsilon": "1.0",
    "--bounds": "0 100 (the public bounds of the --value)",
}


class Given(NamedTuple):
    """The flags of `dpstream init`; see there."""

    file: str
    unit: str | None
    key: tuple[str, ...]
    time: str | None
    value: tuple[str, ...]
    bounds: tuple[tuple[float, float], ...]
    start: str | None
    end: str | None
    window: str | None
    every: str | None
    epsilon: float | None
    delta: float
    contributions: int
    public_sample: bool
    time_format: str | None = None
    time_unit: Literal["s", "ms", "us"] | None = None
    zone: str | None = None
    csv: tuple[str, ...] = ()


class Person(NamedTuple):
    """The person who runs the command.

    Attributes:
        at_terminal: whether there is a terminal to prompt on.
    """

    at_terminal: bool

    def show(self, text: str) -> None:
        """Print text before the prompts, if there are any."""
        if self.at_terminal:
            click.echo(text, err=True)

    def confirm_header(self) -> None:
        """Ask whether the first line has names, before anything of it is shown or written.

        Raises:
            UsageError: it has none.  It is a record, so nothing of it is shown.
        """
        question = "Does the first line have the names of the columns, and nothing of a record?"
        if self.at_terminal and not click.confirm(question, default=False, err=True):
            raise UsageError(
                FIELD,
                "has no first line with the names of its columns",
                "give --csv names=user,page,time",
            )

    def answer(
        self,
        flag: str,
        given: str | None,
        question: str,
        proposal: str | None,
        read: Callable[[str], Reply],
    ) -> Reply:
        """Return the value that ``read`` makes of the flag or of what is typed, until it is valid.

        Without a terminal the flag or the proposal is there: see `_refuse_missing`.

        Raises:
            UsageError: the flag is refused.
        """
        if given is not None or not self.at_terminal:
            return read(required(given or proposal, f"{flag} is missing, and was not refused"))

        def typed(text: str) -> Reply:
            try:
                return read(text)
            except UsageError as error:  # click shows it and prompts again
                raise click.UsageError(f"{error.rule}: {error.fix}") from None

        value: Reply = click.prompt(question, default=proposal, value_proc=typed, err=True)
        return value


def answers(given: Given, person: Person) -> Answers:
    """Return all that a first job says.

    Args:
        given: the flags.
        person: is prompted for the other fields.

    Raises:
        UsageError: something is missing or wrong.
    """
    if given.zone is not None:
        check_zone("--zone", given.zone)
    file = data_file(given.file, _csv(given.csv))
    if given.public_sample:
        file = with_names(file)
    columns = file.columns
    if file.kind == "csv" and file.csv.names is None:
        person.confirm_header()
    if columns is not None:
        person.show("Columns: " + ", ".join(c.name for c in columns))
    if not person.at_terminal:
        _refuse_missing(given, columns)
    unit, key, time = _columns(given, person, columns)
    if given.public_sample:
        time = sampled_time(file, time)
        file = sampled_numbers(file, given.value)
    values = _values(given, person, file)
    start, end = _stretch(given, person, file, unit, time)
    word = person.answer(
        "--window",
        given.window,
        "Window (hour, day, week, month, quarter, year, or like 12h)",
        suited(start, end),
        lambda text: (windows(start, end, text, given.zone), text)[1],
    )
    epsilon = person.answer(
        "--epsilon",
        None if given.epsilon is None else repr(given.epsilon),
        "Epsilon, the guarantee for one unit",
        None,
        _epsilon,
    )
    return Answers(
        file=file,
        unit=unit,
        key=key,
        time=time,
        values=values,
        windows=windows(start, end, word, given.zone),
        every=given.every,
        epsilon=epsilon,
        delta=given.delta,
        contributions=given.contributions,
    )


def _csv(given: tuple[str, ...]) -> CsvSection:
    """Return what ``--csv FIELD=VALUE`` declares.

    Raises:
        UsageError: a field is not one of a table's ``csv``, or has a value that cannot be used.
    """
    values = dict[str, object]()
    for text in given:
        name, _, value = text.partition("=")
        plain = value.replace("\\t", "\t")
        values[name] = plain.split(",") if name == "names" else plain
    try:
        csv = msgspec.convert(values, CsvSection, strict=False)
    except msgspec.ValidationError:
        fields = CsvSection.__struct_fields__
        near = "".join(nearest(name, fields) for name in values if name not in fields)
        raise UsageError(
            "--csv",
            f"is not FIELD=VALUE with a field of {', '.join(fields)}",
            f"{near}write e.g. --csv decimal=,",
        ) from None
    check_csv("--csv", csv)
    return csv


def _refuse_missing(given: Given, columns: tuple[Column, ...] | None) -> None:
    """Name all flags that are missing in one error, so that one more try is enough.

    Raises:
        UsageError: a required flag is missing.
    """
    sampled = given.public_sample
    there = {
        "--unit": given.unit is not None,
        "--key": bool(given.key),
        "--time": given.time is not None,
        "--start": sampled or given.start is not None,
        "--end": sampled or given.end is not None,
        "--epsilon": given.epsilon is not None,
        "--bounds": sampled or len(given.bounds) >= len(given.value),
    }
    missing = [flag for flag, is_there in there.items() if not is_there]
    if not missing:
        return
    identities = listed(columns, lambda c: c.identity)
    choices = {
        "--unit": identities,
        "--key": identities,
        "--time": listed(columns, lambda c: c.time),
    }
    flags = [
        f"{flag} {_FORMS[flag]}" + (f", one of: {choices[flag]}" if choices.get(flag) else "")
        for flag in missing
    ]
    verb = "is" if len(missing) == 1 else "are"
    raise UsageError(
        ", ".join(missing),
        f"{verb} required where nobody can be asked",
        "add " + "; ".join(flags),
    )


def _columns(
    given: Given, person: Person, columns: tuple[Column, ...] | None
) -> tuple[Field, tuple[Field, ...], TimeColumn]:
    zone = None if given.time_unit else given.zone  # numbers since 1970 have none
    declared = TimeColumn("", given.time_unit, given.time_format, zone)
    unit = person.answer(
        "--unit",
        given.unit,
        "Unit: the column of the user to protect",
        None,
        lambda name: field_of(name, columns, "--unit"),
    )
    key = person.answer(
        "--key",
        "\n".join(given.key) or None,
        "Key: the column to group by (several with commas)",
        None,
        lambda names: _key(names, columns, unit),
    )
    time = person.answer(
        "--time",
        given.time,
        "Time: the column of the event time",
        None,
        lambda name: time_of(name, columns, declared),
    )
    return unit, key, time


def _key(names: str, columns: tuple[Column, ...] | None, unit: Field) -> tuple[Field, ...]:
    """Columns of the key, each on a line (flags), or with commas between (an answer)."""
    one = any(c.name == names for c in columns or ())
    parts = names.split("\n") if "\n" in names or one else names.split(",")
    fields = tuple(field_of(name.strip(), columns, "--key") for name in parts)
    if unit.column in [f.column for f in fields]:
        raise UsageError(
            "--key", "is the unit, and a key of one unit is never published", "name another column"
        )
    if len(set(fields)) != len(fields):
        raise UsageError("--key", "names a column twice", "name each once")
    return fields


def _values(given: Given, person: Person, file: DataFile) -> tuple[Value, ...]:
    if len(given.bounds) > len(given.value):
        raise UsageError("--bounds", "belongs to a --value", "give a --value for each --bounds")
    values = list[Value]()
    for i, name in enumerate(given.value):
        value_of(name, file.columns)
        if i < len(given.bounds):
            values.append(bounded(name, *given.bounds[i]))
            continue
        proposal = None
        if given.public_sample:
            proposal = " ".join(f"{x:g}" for x in bounds(file, name))
        values.append(
            person.answer(
                "--bounds",
                None,
                f"Bounds: public bounds of {name}, low and high",
                proposal,
                functools.partial(_bounds, name),
            )
        )
    return tuple(values)


def _bounds(name: str, text: str) -> Value:
    try:
        low, high = map(float, text.replace(",", " ").split())
    except ValueError:
        low = high = 0.0
    return bounded(name, low, high)


def _stretch(
    given: Given, person: Person, file: DataFile, unit: Field, time: TimeColumn
) -> tuple[datetime, datetime]:
    """First and last instant: of the flags, of the sample if it may be read, or asked for."""
    begin = after = None
    if given.public_sample:
        begin, after = map(str, stretch(file, (unit.column, unit.type), time))
    start = person.answer(
        "--start",
        given.start,
        "First day of the data, such as 2024-01-01",
        begin,
        lambda text: instant("--start", text, given.zone),
    )
    end = person.answer(
        "--end",
        given.end,
        "The day after the last one",
        after,
        lambda text: _later(start, text, given.zone),
    )
    return start, end


def _later(start: datetime, text: str, zone: str | None) -> datetime:
    end = instant("--end", text, zone)
    windows(start, end, "day")
    return end


def _epsilon(text: str) -> float:
    try:
        epsilon = float(text)
    except ValueError:
        raise UsageError("--epsilon", "is no number", "write it like 1.0") from None
    if not 0 < epsilon <= MAX_EPSILON:
        rule = f"must be positive and finite, at most {MAX_EPSILON:g}"
        raise UsageError("--epsilon", rule, "write it like 1.0")
    return epsilon
