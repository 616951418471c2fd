"""Which column is what: checked against the schema, and guessed from names for a question."""

import re
from collections.abc import Callable, Sequence

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.columns import Column

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
