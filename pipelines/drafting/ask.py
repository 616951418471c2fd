"""Flags and questions -> `Answers`: what a flag says is not asked; what is missing is.

Which column is what: checked against the schema, and guessed from names for a question.
"""

import functools
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting import public_sample as sample
from dpstream.pipelines.drafting.columns import Column, DataFile, data_file
from dpstream.pipelines.drafting.draft import Answers, Value, bounded
from dpstream.pipelines.jobs.windows import instant, suited, windows

_UNIT = re.compile(
    r"(?i)(.*_)?(user|author|customer|client|person|people|patient|member|visitor|account|student|"
    r"employee|driver|rider|device|subscriber|household|owner|email|login)(_?(id|name|key|uuid))?"
)
_TIME = re.compile(
    r"(?i)(.*_)?(time|timestamp|date|datetime|day|at|when|ts|created|occurred)(_.*)?"
)
_ID = re.compile(r"(?i)(.*_)?(id|uuid|guid|hash|sha|index|row)")
#: Names that an error lists; more would hide the message.
_LISTED = 20


def field_of(name: str, columns: Sequence[Column] | None, flag: str) -> Field:
    """A unit's or key's column with its type; without a schema it is text.

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


def time_of(name: str, columns: Sequence[Column] | None, micros: bool) -> str:
    """The time's column.

    Args:
        micros: whether whole numbers are known to be microseconds.

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
    if column is not None and column.time == "micros" and not micros:
        raise UsageError(
            "--time",
            f"column '{name}' holds whole numbers, which are read as microseconds since 1970",
            "write it as timestamps, or add --micros if that is what they are",
        )
    return name


def value_of(name: str, columns: Sequence[Column] | None) -> str:
    """A value's column.

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
    """Names to choose from, for an error; empty where there is no schema, or none that is plain."""
    names = [c.name for c in columns or () if fits(c) and c.listed and c.name.isidentifier()]
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


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
        f"name one of {choices}" if choices else "write the name as the file's first line has it",
    )


def guessed_unit(columns: Sequence[Column]) -> str | None:
    """The column that is called as a person or a device is."""
    names = [c.name for c in columns if c.identity]
    return next((n for n in names if _UNIT.fullmatch(n)), None)


def guessed_time(columns: Sequence[Column]) -> str | None:
    """The first timestamp; else what is called as a time is."""
    instants = [c.name for c in columns if c.time == "instant"]
    texts = [c.name for c in columns if c.time == "text" and _TIME.fullmatch(c.name)]
    return next(iter(instants + texts), None)


def guessed_key(columns: Sequence[Column], taken: Sequence[str | None]) -> str | None:
    """The first column of text that is neither of these nor a record's own name."""
    free = [c for c in columns if c.identity and c.name not in taken and not _ID.fullmatch(c.name)]
    texts = [c.name for c in free if c.identity == "string"]
    return next(iter(texts + [c.name for c in free]), None)


#: Puts a question: (text, proposal or ``None``) -> what was typed.
Ask = Callable[[str, str | None], str]
#: Says why an answer is asked for again.
Tell = Callable[[str], None]
Reply = TypeVar("Reply")


#: What follows a flag, in an error.
_FORMS = {
    "--unit": "COLUMN",
    "--key": "COLUMN",
    "--time": "COLUMN",
    "--epsilon": "1.0",
    "--start": "2024-01-01 (the first day)",
    "--end": "2025-01-01 (the day after the last one)",
    "--covers": "window, lifetime, or like 28d",
    "--bounds": "0 100, the public bounds of the --value",
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
    micros: bool
    public_sample: bool


class Person:
    """Who answers what no flag says.

    Args:
        ask: puts a question on the terminal; ``None``: there is none.
        tell: shows why an answer will not do.
    """

    def __init__(self, ask: Ask | None, tell: Tell) -> None:
        self.ask, self._echo = ask, tell

    def show(self, text: str) -> None:
        """Say something before the questions, if there are any."""
        if self.ask is not None:
            self._echo(text)

    def answer(
        self,
        flag: str,
        given: str | None,
        question: str,
        proposal: str | None,
        read: Callable[[str], Reply],
        choices: str = "",
    ) -> Reply:
        """What ``read`` makes of the flag, or of the answer, which is asked for until it will do.

        Raises:
            UsageError: there is no flag and nobody to ask, or the flag will not do.
        """
        if given is not None:
            return read(given)
        if self.ask is None:
            if proposal is not None:
                return read(proposal)
            more = f", one of: {choices}" if choices else ""
            raise UsageError(
                flag, "is required where nobody can be asked", f"add {flag} {_FORMS[flag]}{more}"
            )
        while True:
            try:
                return read(self.ask(question, proposal))
            except UsageError as error:
                self._echo(f"{error.rule}: {error.fix}")


def answers(given: Given, person: Person) -> Answers:
    """All that a first job says.

    Args:
        given: the flags.
        person: who is asked for the rest.

    Raises:
        UsageError: something is missing or wrong.
    """
    file = data_file(given.file)
    if given.public_sample:
        file = sample.with_names(file)
    columns = file.columns
    if columns is not None:
        person.show("Columns: " + ", ".join(c.name for c in columns))
    unit, key, time = _columns(given, person, columns)
    values = _values(given, person, file)
    start, end = _stretch(given, person, file, unit, time)
    word = person.answer(
        "--window",
        given.window,
        "Window (hour, day, week, month, quarter, year, or like 12h)",
        suited(start, end),
        lambda text: (windows(start, end, text), text)[1],
    )
    epsilon = person.answer(
        "--epsilon",
        None if given.epsilon is None else repr(given.epsilon),
        "Epsilon, the guarantee for one unit",
        None if person.ask is None else "1.0",
        _epsilon,
    )
    return Answers(
        file=file,
        unit=unit,
        key=key,
        time=time,
        values=values,
        windows=windows(start, end, word),
        every=given.every,
        epsilon=epsilon,
        delta=given.delta,
        contributions=given.contributions,
    )


def _columns(
    given: Given, person: Person, columns: tuple[Column, ...] | None
) -> tuple[Field, tuple[Field, ...], str]:
    """Unit, key and time; names are proposed to a person only."""
    candidates = () if person.ask is None or columns is None else columns
    guess = guessed_time(candidates)
    unit = person.answer(
        "--unit",
        given.unit,
        "Unit: the column of the user to protect",
        guessed_unit(candidates),
        lambda name: field_of(name, columns, "--unit"),
        listed(columns, lambda c: c.identity),
    )
    key = person.answer(
        "--key",
        "\n".join(given.key) or None,
        "Key: the column to group by (several with commas)",
        guessed_key(candidates, (unit.column, guess)),
        lambda names: _key(names, columns, unit),
        listed(columns, lambda c: c.identity),
    )
    time = person.answer(
        "--time",
        given.time,
        "Time: the column of the event time",
        guess,
        lambda name: time_of(name, columns, given.micros),
        listed(columns, lambda c: c.time),
    )
    return unit, key, time


def _key(names: str, columns: tuple[Column, ...] | None, unit: Field) -> tuple[Field, ...]:
    """Columns of the key, each on a line (flags), or with commas between (an answer)."""
    parts = names.split("\n") if "\n" in names or _is_column(names, columns) else names.split(",")
    fields = tuple(field_of(name.strip(), columns, "--key") for name in parts)
    if unit.column in [f.column for f in fields]:
        raise UsageError(
            "--key", "is the unit, and a key of one unit is never published", "name another column"
        )
    if len(set(fields)) != len(fields):
        raise UsageError("--key", "names a column twice", "name each once")
    return fields


def _is_column(name: str, columns: tuple[Column, ...] | None) -> bool:
    return any(c.name == name for c in columns or ())


def _values(given: Given, person: Person, file: DataFile) -> tuple[Value, ...]:
    names = list(given.value)
    if not names and person.ask is not None:
        none = "no value: counts only"

        def one(text: str) -> list[str]:
            return [] if text in ("", none) else [value_of(text, file.columns)]

        names = person.answer("--value", None, "Value: a column whose mean is wanted", none, one)
    if len(given.bounds) > len(names):
        raise UsageError("--bounds", "belongs to a --value", "give a --value for each --bounds")
    values = list[Value]()
    for i, name in enumerate(names):
        value_of(name, file.columns)
        if i < len(given.bounds):
            values.append(bounded(name, *given.bounds[i]))
            continue
        proposal = None
        if given.public_sample:
            proposal = " ".join(f"{x:g}" for x in sample.bounds(file, name))
        values.append(
            person.answer(
                "--bounds",
                None,
                "Bounds: public bounds of a value, low and high",
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
    given: Given, person: Person, file: DataFile, unit: Field, time: str
) -> tuple[datetime, datetime]:
    """First and last instant: of the flags, of the sample if it may be read, or asked for."""
    begin = after = None
    if given.public_sample:
        moments = sample.stretch(file, (unit.column, unit.type), time)
        begin, after = (f"{moment:%Y-%m-%d}" for moment in moments)
    start = person.answer(
        "--start",
        given.start,
        "First day of the data, such as 2024-01-01",
        begin,
        lambda text: instant("--start", text),
    )
    end = person.answer(
        "--end", given.end, "The day after the last one", after, lambda text: _later(start, text)
    )
    return start, end


def _later(start: datetime, text: str) -> datetime:
    end = instant("--end", text)
    windows(start, end, "day")
    return end


def _epsilon(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError("--epsilon", "is no number", "write it like 1.0") from None
