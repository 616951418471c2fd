"""Answers as text: rows with the intervals of their noise, what bounds cut, and what was paid."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from html import escape
from itertools import repeat
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from dpstream.accounting.figures import human
from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.formats.receipt import LABELS
from dpstream.pipelines.render.layout import table_text, value_text, with_interval

_DAY_SECONDS = 86_400
#: Days of 400 years, and from 0000-03-01 to 1970-01-01.
_CYCLE_DAYS, _DAYS_TO_1970 = 146_097, 719_468
INTERVALS = "The 95% intervals cover the noise only, not what the bounds cut."
#: After the share of values beyond bounds for whose figures sizes do not add up.
_AS_BOUND = ", each of which is counted as the bound"
_SQUARED = (
    f"{_AS_BOUND}; a variance weighs the squares of distances, so that a"
    " few far values can make most of it: it may be much too small"
)


#: Behind a mean whose noise leaves open where between its bounds it lies.
_WEAK = " ?"


def weak_rows(sds: pa.ChunkedArray, width: float) -> list[bool]:
    """Return which values have an sd above a third of their bounds' width."""
    return [sd is not None and 3 * sd > width for sd in sds.to_pylist()]


def weak_lines(weak: Mapping[str, Sequence[bool]]) -> list[str]:
    """Return a line for each column that has weak values."""
    return [
        f"{sum(rows):,} of {len(rows):,} values of {name} are mostly noise, and marked{_WEAK}: "
        "their sd exceeds a third of the bounds' width."
        for name, rows in weak.items()
        if any(rows)
    ]


def rows_text(
    columns: pa.Table,
    intervals: Mapping[str, pa.Table],
    weak: Mapping[str, Sequence[bool]] = MappingProxyType({}),
) -> str:
    """Return released rows as an aligned table; a value with an interval shows its half-width.

    Args:
        columns: the columns to show.
        intervals: by column the ends ``low`` and ``high`` of its rows; null where there are none.
        weak: by column which values are marked, see `weak_rows`.
    """
    return table_text(columns.column_names, *_cells(columns, intervals, weak))


def rows_html(columns: pa.Table, weak: Mapping[str, Sequence[bool]]) -> str:
    """Return released rows as a table of HTML."""
    texts, _ = _cells(columns, {}, weak)
    rows = [columns.column_names, *zip(*texts, strict=True)]
    lines = (
        "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row)
        for tag, row in zip(("th", *["td"] * columns.num_rows), rows, strict=True)
    )
    return "".join(["<table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])


def _cells(
    columns: pa.Table, intervals: Mapping[str, pa.Table], weak: Mapping[str, Sequence[bool]]
) -> tuple[list[list[str]], list[bool]]:
    """Return the texts of each column, and whether they end at the right."""
    texts, right = list[list[str]](), list[bool]()
    for name, column in zip(columns.column_names, columns.columns, strict=True):
        values = python_values(column)
        if name in intervals:
            ends = (intervals[name][end].to_pylist() for end in ("low", "high"))
            texts.append(list(map(with_interval, values, *ends)))
        else:
            texts.append(list(map(value_text, values)))
        marks = zip(texts[-1], weak.get(name, repeat(False)), strict=False)
        texts[-1] = [text + _WEAK * mark for text, mark in marks]
        right.append(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))
    return texts, right


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return values as Python's; a day or instant outside its calendar as an exact text.

    The text is that of ISO 8601 with a sign before the year (``+12345-06-07``, ``-0043-03-15``: the
    year before 1 is 0), or ``infinity`` and ``-infinity``, as databases have them.
    """
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return list(map(_python_value, column))


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        return _far_text(scalar)


def _far_text(scalar: pa.Scalar) -> str:
    """Return a day or instant of any year as text."""
    kind, number = scalar.type, scalar.value
    if abs(number) == (1 << (kind.bit_width - 1)) - 1:
        return "infinity" if number > 0 else "-infinity"
    per_day = {"date32[day]": 1, "date64[ms]": _DAY_SECONDS * 10**3}.get(str(kind))
    if per_day is not None:
        return _day_text(number // per_day)
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[kind.unit]
    seconds, part = divmod(number, 10**digits)
    days, second = divmod(seconds, _DAY_SECONDS)
    fraction = f".{part:0{digits}}" if part else ""
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return f"{_day_text(days)}T{clock}{fraction}" + "Z" * (kind.tz is not None)


def _day_text(days: int) -> str:
    """Return the day that is so many days after 1970-01-01."""
    cycles, day = divmod(days + _DAYS_TO_1970, _CYCLE_DAYS)  # 400 years have the same days
    near = date(2000, 3, 1) + timedelta(day)
    return f"{near.year + 400 * cycles - 2000:+05}-{near:%m-%d}"


def json_value(value: Any) -> Any:
    """Return a released value as JSON has it: bytes as hex digits, NaN and infinity as texts."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [json_value(part) for part in value]
    finite = isinstance(value, float) and math.isfinite(value)
    if value is None or finite or isinstance(value, bool | int | str):
        return value
    return value_text(value)


def json_rows(columns: pa.Table, intervals: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Return released rows for JSON: values, and under ``intervals`` each column's sd and ends.

    Args:
        columns: the values.
        intervals: by column its sd and the ends of its interval, by `formats.receipt.LABELS`.
    """
    values = {name: python_values(columns.column(name)) for name in columns.column_names}
    between = {
        name: {LABELS[part]: python_values(parts[part]) for part in parts.column_names}
        for name, parts in intervals.items()
    }
    return [
        {
            "values": {name: json_value(values[name][row]) for name in values},
            "intervals": {
                name: {part: json_value(ends[row]) for part, ends in parts.items()}
                for name, parts in between.items()
            },
        }
        for row in range(columns.num_rows)
    ]


def cut_lines(
    cuts: Mapping[str, Cut], not_estimated: Sequence[str], unit: str, group: str, intervals: bool
) -> list[str]:
    """Return a line for each chosen bound, with the estimate of its cut, and one for the others.

    Args:
        cuts: private estimates of what chosen bounds leave out, by the name of the bound.
        not_estimated: bounds that were given, for which there is no estimate.
        unit: the name of the privacy unit.
        group: the name of a group; empty without groups.
        intervals: whether the answer has intervals.
    """
    lines = [INTERVALS] * intervals
    several = Counter(cut.of for cut in cuts.values() if cut.of in ("rows", "bounds"))
    for name, cut in cuts.items():
        figure = f" for {name.removeprefix('rows of ')}" * (several[cut.of] > 1)
        lines.append(_cut(name, cut, unit, group, figure))
    if not_estimated:
        lines.append(f"Not estimated: what the given bounds cut ({', '.join(not_estimated)}).")
    return lines


def _cut(name: str, cut: Cut, unit: str, group: str, figure: str) -> str:
    within = f"(to within {_share(cut.within)} of them, at 95%)"
    if cut.of in ("values", "squares"):
        head = f"Bounds of {name}, chosen privately: {human(cut.low)} to {human(cut.high)}"
        beyond = (
            f"about {_share(cut.below)} of values are below, {_share(cut.above)} above {within}"
        )
        amount = _SQUARED if cut.of == "squares" else _amount(cut, "their size") or _AS_BOUND
        return f"{head}; {beyond}{amount}."
    if cut.of == "bounds":
        each, times = f" in a {group}" * bool(group), f"{human(cut.high)} times " * (cut.high != 1)
        head = f"The sum of one {unit}{each} counts up to {times}the given bounds{figure}"
        subject = f"sums in one random {group} of each {unit}" if group else f"sums of one {unit}"
        beyond = f"about {_share(cut.above)} of {subject} are larger {within}"
        return f"{head}, chosen privately; {beyond}{_amount(cut, 'their size')}."
    rows = f"of one {unit}" + f" in a {group}" * bool(group and cut.of == "rows")
    many = "s" * (cut.high != 1)
    what = f"{group if cut.of == 'groups' else 'row'}{many} {rows}"
    head = f"At most {human(cut.high)} {what} count{'' if many else 's'}{figure}, chosen privately"
    subject = f"pairs of {unit} and {group}" if cut.of == "groups" else "rows"
    if cut.of == "rows" and group:  # what the histogram holds: units of many groups weigh no more
        subject = f"rows in one random {group} of each {unit}"
    return f"{head}; about {_share(cut.above)} have more {within}{_amount(cut, f'all {subject}')}."


def _amount(cut: Cut, subject: str) -> str:
    """Return the share of the amount that is cut, after the share of the number."""
    if cut.amount is None or cut.amount_at_most is None:
        return ""
    most = f"up to {_share(cut.amount_at_most)} if the largest fall as slowly as a power law"
    return f", and about {_share(cut.amount)} of {subject} is cut ({most})"


def _share(part: float) -> str:
    """Return a share as a percentage with two digits, no finer than a hundredth."""
    return "0%" if part < 5e-5 else "100%" if part >= 0.995 else f"{100 * part:.2g}%"
