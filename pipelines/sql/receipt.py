"""The answer of a statement, or of a DataFrame function: header and rows of a receipt, as text too.

Lines below an answer say what its intervals cover, and estimate what its bounds leave out.
"""

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.figures import human
from dpstream.accounting.query.bounds import Cut
from dpstream.dp_transforms.one_shot.estimates import Estimate
from dpstream.pipelines.formats import receipt
from dpstream.pipelines.formats.receipt import LABELS
from dpstream.state.ledger.answers import Answer
from dpstream.state.numbers import numbers

#: Parts of a column's interval, what stands between its name and theirs, and how they are called
#: in an answer: the ends are of the noise alone, and so is their name.
PARTS, MARK = ("sd", "low", "high"), "\x1f"


class Header(receipt.Header, frozen=True, kw_only=True):
    """The description of an answer.

    Attributes:
        epsilon, delta, mu, threshold_delta: what it cost.
        reports: columns whose interval was asked for (WITH REPORT).
        bounds: the bounds that the query chose, by function.
        nulls: functions without bounds, which are NULL.
        cuts: private estimates of what chosen bounds leave out, by what was chosen: a function, its
            rows, or groups.
        not_estimated: bounds that were given, for which there is no estimate.
    """

    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    reports: tuple[str, ...] = ()
    bounds: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    cuts: dict[str, Cut] = msgspec.field(default_factory=dict)
    not_estimated: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, str]:
        """Return the description of a released table for its schema."""
        encode = msgspec.json.encode
        return {
            "dpstream.intervals": "95% of the noise; not of what the bounds leave out",
            "dpstream.cuts": encode(self.cuts, order="sorted").decode(),
            "dpstream.not_estimated": encode(self.not_estimated).decode(),
        }


class SqlAnswer(NamedTuple):
    """A committed answer.

    Attributes:
        table: the statement's columns; after one WITH REPORT its sd, low and high.
        intervals: by column, (sd, low, high) of the noise's 95% interval.
        header: what it cost, and when it was first given.
        receipt: the committed bytes.
        digest: binds the receipt to the charge.
        charged: whether this very call was charged.
        insecure: whether a fixed test secret was used: whoever knows it can subtract the noise.
    """

    table: pa.Table
    intervals: dict[str, pa.Table]
    header: Header
    receipt: bytes
    digest: str
    charged: bool
    insecure: bool


def estimated(
    name: str,
    estimate: Estimate,
    places: tuple[int, ...] = (),
    many: bool = False,
    absent: bool = False,
) -> dict[str, pa.Array]:
    """Return a column of an answer and its interval, by name; NaN becomes NULL.

    Args:
        places: for a quantiles column, positions of the numbers that are asked for.
        many: whether to return them as lists.
        absent: whether all of the column is NULL.
    """
    named = {name: estimate.value} | {f"{name}{MARK}{p}": getattr(estimate, p) for p in PARTS}
    return {name: _array(values, places, many, absent) for name, values in named.items()}


def _array(values: Float64, places: tuple[int, ...], many: bool, absent: bool) -> pa.Array:
    """Return numbers, or lists of them, as an array; NaN becomes NULL."""
    if places:
        values = values[:, list(places)] if many else values[:, places[0]]
    null = np.isnan(values) | absent
    flat = numbers(values.reshape(-1), null.reshape(-1))
    if not many:
        return flat
    ends = numbers(np.arange(len(values) + 1) * len(places)).cast(pa.int32())
    return pa.ListArray.from_arrays(ends, flat)


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return values as Python's; days and instants outside its calendar as their numbers."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        width = pa.int32() if pa.types.is_date32(column.type) else pa.int64()
        return list(column.cast(width).to_pylist())


def decoded(answer: Answer, insecure: bool) -> SqlAnswer:
    """Return the answer of committed bytes: the rows of its view, or the released rows without one.

    Raises:
        PolicyError: the bytes have another form.
    """
    header = receipt.header_of(answer.receipt, Header)
    view = answer.view
    rows = receipt.table_of(answer.receipt) if view is None else receipt.read_table(view)
    columns: dict[str, pa.ChunkedArray] = {}
    intervals: dict[str, pa.Table] = {}
    for name in rows.column_names:
        if MARK in name:
            continue
        columns[name] = rows.column(name)
        if f"{name}{MARK}sd" in rows.column_names:
            parts = {part: rows.column(f"{name}{MARK}{part}") for part in PARTS}
            intervals[name] = pa.table(parts)
            if name in header.reports:
                columns |= {f"{name}_{LABELS[part]}": values for part, values in parts.items()}
    table = pa.table(columns).replace_schema_metadata(header.metadata)
    return SqlAnswer(
        table, intervals, header, answer.receipt, answer.digest, answer.charged, insecure
    )


INTERVALS = "The 95% intervals cover the noise only, not what the bounds cut."
#: After the share of values beyond the bounds of a variance, for which sizes do not add up.
_SQUARED = (
    ", each of which is counted as the bound; a variance weighs the squares of distances, so that a"
    " few far values can make most of it: it may be much too small"
)


def lines_of(header: Header, unit: str, group: str, intervals: bool = True) -> list[str]:
    """Return a line for each chosen bound, with the estimate of its cut, and one for the others.

    Args:
        unit: the name of the privacy unit.
        group: the name of a group; empty without groups.
        intervals: whether the answer has intervals.
    """
    lines = [INTERVALS] * intervals
    lines += [_line(name, cut, unit, group) for name, cut in header.cuts.items()]
    if header.not_estimated:
        given = ", ".join(header.not_estimated)
        lines.append(f"Not estimated: what the given bounds cut ({given}).")
    return lines


def _line(name: str, cut: Cut, unit: str, group: str) -> str:
    within = f"(to within {_share(cut.within)} of them, at 95%)"
    if cut.of == "values":
        head = f"Bounds of {name}, chosen privately: {human(cut.low)} to {human(cut.high)}"
        beyond = (
            f"about {_share(cut.below)} of values are below, {_share(cut.above)} above {within}"
        )
        return f"{head}; {beyond}{_amount(cut, 'their size') or _SQUARED}."
    if cut.of == "bounds":
        each, times = f" in a {group}" * bool(group), f"{human(cut.high)} times " * (cut.high != 1)
        head = f"The sum of one {unit}{each} counts up to {times}the given bounds"
        subject = f"sums in one random {group} of each {unit}" if group else f"sums of one {unit}"
        beyond = f"about {_share(cut.above)} of {subject} are larger {within}"
        return f"{head}, chosen privately; {beyond}{_amount(cut, 'their size')}."
    rows = f"of one {unit}" + f" in a {group}" * bool(group and cut.of == "rows")
    many = "s" * (cut.high != 1)
    what = f"{group if cut.of == 'groups' else 'row'}{many} {rows}"
    head = f"At most {human(cut.high)} {what} count{'' if many else 's'}, chosen privately"
    subject = f"pairs of {unit} and {group}" if cut.of == "groups" else "rows"
    if cut.of == "rows" and group:  # what the histogram holds: units of many groups weigh no more
        subject = f"rows in one random {group} of each {unit}"
    return f"{head}; about {_share(cut.above)} have more {within}{_amount(cut, f'all {subject}')}."


def _amount(cut: Cut, of: str) -> str:
    """Return the share of the amount that is cut, after the share of the number."""
    if cut.amount is None or cut.amount_at_most is None:
        return ""
    most = f"up to {_share(cut.amount_at_most)} if the largest fall as slowly as a power law"
    return f", and about {_share(cut.amount)} of {of} is cut ({most})"


def _share(part: float) -> str:
    """Return a share as a percentage with two digits, no finer than a hundredth."""
    return "0%" if part < 5e-5 else "100%" if part >= 0.995 else f"{100 * part:.2g}%"


def answer_text(answer: SqlAnswer) -> str:
    """Return the rows as an aligned table; a column with an interval shows its half-width."""
    reports = [name for name in answer.header.reports if name in answer.intervals]
    extra = {f"{name}_{label}" for name in reports for label in LABELS.values()}
    names = [n for n in answer.table.column_names if n not in extra]
    columns = []
    for name in names:
        cells = [_cell(value) for value in python_values(answer.table.column(name))]
        if name in answer.intervals:
            between = answer.intervals[name]
            pairs = zip(between["low"].to_pylist(), between["high"].to_pylist(), strict=True)
            cells = [_with_bar(c, *pair) for c, pair in zip(cells, pairs, strict=True)]
        number = pa.types.is_integer(answer.table.schema.field(name).type)
        number |= pa.types.is_floating(answer.table.schema.field(name).type)
        wide = max(len(name), *(len(cell) for cell in cells), 1) if cells else len(name)
        place = str.rjust if number else str.ljust
        columns.append([place(cell, wide) for cell in (name, "-" * wide, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True)) + "\n"


def records(answer: SqlAnswer) -> list[dict[str, Any]]:
    """Return the rows for JSON: values, and under ``intervals`` each column's sd and ends."""
    values = {name: python_values(answer.table.column(name)) for name in answer.table.column_names}
    between = {name: table.to_pylist() for name, table in answer.intervals.items()}
    return [
        {
            "values": {name: _plain(values[name][row]) for name in values},
            "intervals": {
                name: {LABELS[part]: _plain(end) for part, end in between[name][row].items()}
                for name in between
            },
        }
        for row in range(answer.table.num_rows)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_cell(part) for part in value) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.6g}"
    if value is None:
        return "NULL"
    text = str(_plain(value))
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _with_bar(cell: str, low: Any, high: Any) -> str:
    """Return a value with the half-width of its interval, at two digits."""
    if not isinstance(low, float) or not isinstance(high, float) or not math.isfinite(high - low):
        return cell
    return f"{cell} ±{(high - low) / 2:.2g}" if high - low < 200 else f"{cell} ±{_half(high - low)}"


def _half(width: float) -> str:
    return f"{width / 2:,.0f}"
