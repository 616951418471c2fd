"""Texts of the project file: durations, instants, and decoding errors with the file's own names.

This module sees no record.  Durations and instants are parsed exactly (integers and rationals,
never floats); an error names the field of the file, the rule and the fix.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints
from zoneinfo import ZoneInfo

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError, closest
from dpstream.accounting.fields import outside
from dpstream.accounting.figures import EPOCH, moment_of
from dpstream.state.disk_errors import unreadable

# What is said to a field of a project file that has another shape, or is missing.

#: A line that may be copied, for each field whose shape is often another, or that is forgotten.
EXAMPLES = {
    "data_set.unit": 'unit = { name = "user", type = "string" }',
    "data_set.account": 'account = { id = "ID", path = "PATH" }, see `dpstream account show`',
    "data_set.secret": 'secret = "file:noise.secret"',
    "table.path": 'path = "visits/*.parquet"',
    "table.unit_column": 'unit_column = "COLUMN"',
    "table.time_column": 'time_column = "COLUMN"',
    "table.record_id": 'record_id = "COLUMN"',
    "table.unit_via": 'unit_via = { table = "TABLE", on = [["COLUMN", "KEY"]] }',
    "job.table": 'table = "visits"',
    "job.key": 'key = ["COLUMN"], or key = [{ column = "COLUMN", type = "int" }]',
    "job.aggregate": 'aggregate.records = { kind = "count" }',
    "job.aggregate.bounds": "bounds = [0, 100]",
    "job.start": 'start = "2024-01-01T00:00:00Z"',
    "job.end": 'end = "2025-01-01T00:00:00Z"',
    "job.window": 'window = "7 days"',
    "job.release_every": 'release_every = "7 days"',
    "job.budget": 'budget = { epsilon = 1.0, delta = 1e-8, covers = "window" }',
    "job.budget.epsilon": "epsilon = 1.0",
    "job.budget.delta": "delta = 1e-8",
    "job.budget.covers": 'covers = "window", "lifetime" or a length such as "28 days"',
    "job.contributions": "contributions = 10; `dpstream choose` then finds a better one",
    "job.sink": 'sink = { kind = "parquet", path = "releases" }',
    "job.sink.kind": 'kind = "parquet"',
}


#: What to write where a value has another shape, by the decoder's words; the first that fits.
_FORMS = (
    ("Expected `str|got `date(time)?`", 'write it in quotes, {name} = "..."'),
    ("Expected `array", "write it in square brackets, {name} = [...]"),
    (
        "Expected `object",
        "write a table, {name} = {{ ... }}, or [{path}] with its fields below",
    ),
    ("Expected `int.*got `str`", "write a whole number without quotes, {name} = 1"),
    ("Expected `int", "write a whole number, {name} = 1"),
    ("Expected `float", "write a number without quotes, {name} = 1.0"),
    ("Expected `bool", "write {name} = true or {name} = false, without quotes"),
)


def example(path: str) -> str | None:
    """Return a line that may be copied, for the field at ``path``; ``None``: none is known."""
    parts = re.sub(r"\[[^\]]*\]", "", path).split(".")
    field = ".".join((parts[0], *parts[2:]))
    named = ".".join((parts[0], *parts[2:3], *parts[4:]))  # without the name of an aggregate
    return EXAMPLES.get(field) or (EXAMPLES.get(named) if len(parts) > 4 else None)


def fix_of(path: str, rule: str) -> str:
    """Return the form to write where a value has another shape than its key.

    Args:
        path: of the key, such as ``table.unit_column``.
        rule: the decoder's own words, such as ``Expected `object`, got `str```.
    """
    sample = example(path)
    if sample is not None:
        quotes = "it in quotes, " if "got `date" in rule else ""
        return f"write {quotes}{sample}"
    name = re.sub(r"\[.*", "", path.rpartition(".")[2])
    forms = (form for words, form in _FORMS if re.search(words, rule))
    return next(forms, "correct the value").format(name=name, path=path)


_UNIT_MICROS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(us|ms|s|m|h|d|w)")
_WORDS = {"second": "s", "minute": "m", "hour": "h", "day": "d", "week": "w"}
_IN_WORDS = re.compile(r"(?:([0-9]{1,18}) )?(second|minute|hour|day|week)s?")
_INSTANT = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})"
    r"(?:\.([0-9]{1,18}))?(?:([Zz])|([+-])([0-9]{2}):([0-9]{2}))"
)
#: Lengths of the calendar, which need one.
_CALENDAR = re.compile(r"\s*(?:[0-9]+\s*|P[0-9]*)?(mon?|months?|q|quarters?|y|yr|years?|M|Q|Y)\s*")
_JOB_FIX = 'add calendar = "UTC", or a zone such as "Europe/Berlin", or write whole weeks: \'4w\''
_CALENDAR_FIXES = {
    "--covers": "write it with a zone: '1 month in UTC'",
    "--window": "write month, quarter or year",
    **dict.fromkeys(
        ("window", "slide", "release_every", "allowed_lateness", "budget.covers"), _JOB_FIX
    ),
}
_MAX_MICROS = 1 << 62

#: Characters of an unknown name that an error shows.
_PRINTED_CHARACTERS = 64
#: Settings of the time axis that would let records decide when something is published.
_DATA_DEPENDENT = {
    "session_gap": "session windows end where a user's records end, which reveals the user",
    "session_window": "session windows end where a user's records end, which reveals the user",
    "trigger_count": "a trigger after a number of records fires when one user's records come",
    "trigger_after_count": "a trigger after a number of records fires when one user's records come",
}


#: A file that a person writes has at most so many bytes.
MAX_FILE_BYTES = 1 << 20


def duration_micros(field: str, text: str) -> int:
    """Parse a duration such as ``7d``, ``6 hours``, ``week``, ``86.4s`` or ``100ms``; exact.

    Returns:
        microseconds.

    Raises:
        UsageError: the text is not a duration, or not a whole number of microseconds.
    """
    words = _IN_WORDS.fullmatch(text.strip())
    if words is not None:
        text = f"{words[1] or 1}{_WORDS[words[2]]}"
    match = _DURATION.fullmatch(text.strip())
    if match is None and _CALENDAR.fullmatch(text):
        raise UsageError(
            field,
            "is of the calendar, and months and years differ in length",
            _CALENDAR_FIXES.get(field, "write whole weeks: '4w'"),
        )
    if match is None:
        raise UsageError(
            field,
            "is not a duration",
            "write it like '6 hours' or '15m': a number and one of us, ms, s, m, h, d, w",
        )
    micros = Fraction(match[1]) * _UNIT_MICROS[match[2]]
    if micros.denominator != 1 or micros >= _MAX_MICROS:
        raise UsageError(
            field, "must be a whole number of microseconds below 2^62", "choose another length"
        )
    return int(micros)


def instant_micros(field: str, text: str) -> int:
    """Parse an RFC 3339 time with its offset; exact.

    Returns:
        microseconds since the epoch.

    Raises:
        UsageError: the text is not a time, has no offset, or is finer than microseconds.
    """
    match = _INSTANT.fullmatch(text.strip())
    fix = "write it like '2013-01-01T05:00:00Z'"
    if match is None:
        raise UsageError(field, "is not an RFC 3339 time with an offset", fix)
    try:
        year, month, day, hour, minute, second = map(int, match.groups()[:6])
        civil = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        raise UsageError(field, "is not a time of the calendar", fix) from None
    since = civil - EPOCH
    micros = Fraction(f"0.{match[7] or 0}") * 1_000_000
    if micros.denominator != 1:
        raise UsageError(field, "is finer than microseconds", fix)
    offset = 0
    if match[9]:
        hours, minutes = int(match[10]), int(match[11])
        if hours > 23 or minutes > 59:
            raise UsageError(field, "has an offset beyond a day", fix)
        offset = (hours * 60 + minutes) * _UNIT_MICROS["m"] * (1 if match[9] == "+" else -1)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + int(micros) - offset


def read_at_most(path: Path, field: str, fix: str, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a file that a person wrote.

    Args:
        field: the name of the file in errors.
        fix: what to do if the file has more than ``most`` bytes.

    Raises:
        UsageError: the file cannot be read or is too long.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise unreadable(field, error) from None
    if len(text) > most:
        raise UsageError(field, f"exceeds {most} bytes", fix)
    return text


def text_of(data: bytes) -> str:
    """Return the text of a file that a person wrote: UTF-8, perhaps behind a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return data.decode("utf-8-sig")


def parse_toml(text: bytes) -> dict[str, Any]:
    """Return the tables of a project file.

    Raises:
        UsageError: the text is not TOML in UTF-8; the error shows where.
    """
    try:
        return tomllib.loads(text_of(text))
    except tomllib.TOMLDecodeError as error:
        rule = f"is not TOML: {str(error).rstrip('.')}"
    except (ValueError, RecursionError):
        rule = "is not TOML in UTF-8 with values of a usable size"
    raise UsageError("project file", rule, "correct the file")


def refuse_data_dependent(tables: dict[str, Any]) -> None:
    """Refuse settings by which records would decide when something is published.

    Raises:
        PolicyError: session windows, count triggers or watermark settings are asked for.
    """
    for table, entries in tables.items():
        for key in entries if isinstance(entries, dict) else ():
            why = _DATA_DEPENDENT.get(key)
            if "watermark" in key:
                why = "a watermark that follows records lets one user make others late"
            if why:
                raise PolicyError(
                    f"{table}.{key}",
                    f"is not offered, because {why}",
                    "remove it; windows and triggers follow the public clock of the job",
                )


def raise_decode_error(
    error: msgspec.ValidationError,
    root: type[msgspec.Struct],
    tables: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> NoReturn:
    """Raise a decoding error again with field, rule and fix.

    Args:
        error: what ``msgspec.convert(tables, root)`` raised.
        root: the struct of the whole file.
        tables: tables of the file, which show the entry of a table of named entries that is wrong.
        prefix: the field of the file that has the tables.
    """
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", str(error), re.DOTALL)
    rule, path = (match[1], match[2] or "") if match else (str(error), "")
    path, kind = _resolved(root, path, tables)
    path = ".".join(part for part in (prefix, path) if part)
    struct = kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else root
    named = re.search(r"field `([^`]*)`", rule)
    if named and rule.startswith("Object contains unknown"):
        field_names = (f.encode_name for f in msgspec.structs.fields(struct))
        name = _short(named[1])
        where = f"{path}.{name}" if path else name
        raise UsageError(where, "is not a known key", closest(named[1], field_names)) from None
    if named and rule.startswith("Object missing"):
        where = f"{path}.{named[1]}" if path else named[1]
        sample = example(where)
        raise UsageError(where, "is required", f"add {sample}" if sample else "add it") from None
    bound = re.fullmatch(r"Expected `int` ([<>]=) (-?\d+)", rule)
    if bound:
        raise outside(path, bound[1], int(bound[2])) from None
    if rule.startswith("Invalid enum value"):
        choices = [repr(option) for option in _literals(kind)]
        fix = f"choose from {', '.join(choices) or 'the documented values'}"
        raise UsageError(path, "is not one of the choices", fix) from None
    reason = rule.replace("`", "").lower()
    raise UsageError(path or "project file", reason, fix_of(path, rule)) from None


def _literals(kind: Any) -> Iterator[Any]:
    """Values of a literal type, or of the literals in a union."""
    for option in get_args(kind):
        if get_args(option):
            yield from _literals(option)
        elif option is not type(None):
            yield option


def _resolved(
    root: type[msgspec.Struct], path: str, tables: Mapping[str, Any] | None
) -> tuple[str, Any]:
    """Return the path with the name of each entry that the decoder writes as ``[...]``, and the
    type
    at that path.
    """
    kind: Any = root
    value: Any = tables
    out = ""
    for token in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        options = [option for option in (kind, *get_args(kind)) if option is not type(None)]
        if token == "[...]":
            table = next(option for option in options if get_origin(option) is dict)
            kind = get_args(table)[1]
            name = _wrong_entry(value, kind)
            value = value.get(name) if isinstance(value, dict) else None
            out += f".{_short(name)}" if name else token
        elif token.startswith("["):
            kind = next((get_args(o)[0] for o in options if get_origin(o) in (list, tuple)), Any)
            number = int(token[1:-1])
            value = value[number] if isinstance(value, list) and number < len(value) else None
            out += token
        else:
            struct = next(
                (o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None
            )
            hints = {} if struct is None else get_type_hints(struct)
            kind = hints.get(token, Any)
            value = value.get(token) if isinstance(value, dict) else None
            out += f".{token}" if out else token
    structs = [o for o in get_args(kind) if isinstance(o, type) and issubclass(o, msgspec.Struct)]
    return out, structs[0] if structs else kind


def _wrong_entry(value: Any, kind: Any) -> str:
    """Return the name of the first entry with another type; empty if it is unknown."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        try:
            msgspec.convert(entry, kind)
        except msgspec.ValidationError:
            return str(name)
    return ""


def _short(name: str) -> str:
    """Shorten a name from the file so that a terminal can show it."""
    printable = "".join(char if char.isprintable() else "?" for char in name[:_PRINTED_CHARACTERS])
    return printable if len(name) <= _PRINTED_CHARACTERS else f"{printable}..."


def instant(field: str, text: str, zone: str | None = None) -> datetime:
    """Parse a day (``2024-01-01``) or an RFC 3339 time.

    Args:
        zone: of a time without an offset; ``None``: UTC.

    Raises:
        UsageError: the text is neither.
    """
    text = text.strip()
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        text += "T00:00:00"
    local = re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:.]+", text)
    try:
        moment = moment_of(instant_micros(field, text + "Z" if local else text))
        if local and zone is not None:
            moment = moment.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
        return moment
    except (UsageError, OverflowError):
        raise UsageError(
            field, "is neither a day nor an RFC 3339 time", "write it like 2024-01-31"
        ) from None
