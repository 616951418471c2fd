"""The answer of a statement, or of a DataFrame function: header and rows of a receipt."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.figures import decimal_text, guarantee_pair
from dpstream.accounting.query.bounds import Cut
from dpstream.accounting.query.plan import GROUPS, QueryPlan
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.sessions.aggregates import Question
from dpstream.dp_transforms.one_shot.estimates import Estimate
from dpstream.pipelines.formats import receipt
from dpstream.pipelines.formats.receipt import LABELS
from dpstream.pipelines.render.answer import json_rows, rows_text, weak_rows
from dpstream.state.ledger.contract import Answer
from dpstream.state.numbers import arrow_numbers

#: Parts of a column's interval, what stands between its name and theirs, and how they are called
#: in an answer: the ends are of the noise alone, and so is their name.
PARTS, MARK = ("sd", "low", "high"), "\x1f"


class Points(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer says of points that paid, in a table whose records have budgets of their own.

    Attributes:
        table: digest of the table's model.
        question: figures, cells and amount, in canonical form.
        drop: whether points with too little budget were left out.
        allotment: run id of the allotment that paid; empty if the points paid.
        name: of the allotment that was made, or was given up; empty for a question.
    """

    table: str
    question: Question
    drop: bool = False
    allotment: str = ""
    name: str = ""

    @property
    def paid(self) -> str:
        """The amount, and who paid it."""
        amount = f"{self.question.kind} {decimal_text(self.question.amount / MICRO)}"
        if self.allotment:
            return f"{amount} from an allotment"
        which = "that had as much left (the others are left out)" if self.drop else "asked"
        return f"{amount} to every point {which}"


class Header(receipt.Header, frozen=True, kw_only=True):
    """The description of an answer.

    Attributes:
        epsilon, delta, mu, threshold_delta: what it cost.
        bounds: the bounds that the query chose, by function.
        nulls: functions without bounds, which are NULL.
        cuts: private estimates of what chosen bounds leave out, by what was chosen: a function, its
            rows, or groups.
        not_estimated: bounds that were given, for which there is no estimate.
        statement: the private SELECT, as it was written first; empty: it was no statement.
        points: of a table whose records have budgets of their own.
    """

    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    bounds: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    cuts: dict[str, Cut] = msgspec.field(default_factory=dict)
    not_estimated: tuple[str, ...] = ()
    statement: str = ""
    points: Points | msgspec.UnsetType = msgspec.UNSET

    def renamed(self, names: Mapping[str, str]) -> "Header":
        """Return the same header with other names of columns, in their order.

        Columns without a name are left out.
        """
        cuts = {GROUPS: GROUPS, "groups": "groups"}
        for column, name in names.items():
            cuts |= {column: name}
            cuts |= {f"{of} of {column}": f"{of} of {name}" for of in ("bounds", "rows")}
        return msgspec.structs.replace(
            self,
            bounds={names[c]: self.bounds[c] for c in names if c in self.bounds},
            nulls=tuple(names[c] for c in names if c in self.nulls),
            cuts={cuts[c]: self.cuts[c] for c in cuts if c in self.cuts},
            not_estimated=tuple(cuts[c] for c in cuts if c in self.not_estimated),
        )

    def together(self, others: Sequence["Header"], paid: Sequence[bool]) -> "Header":
        """Return the description of several answers that are shown as one.

        Args:
            others: the headers of the others.
            paid: of each, whether its cost is counted.
        """
        every = [self, *others]
        costs = [header for header, counted in zip(every, paid, strict=True) if counted]
        mus = [header.mu for header in costs]
        squares = [mu * mu for mu in mus if mu is not None]
        return msgspec.structs.replace(
            self,
            epsilon=sum(header.epsilon for header in costs),
            delta=sum(header.delta for header in costs),
            mu=math.sqrt(sum(squares)) if len(squares) == len(mus) else None,
            threshold_delta=sum(header.threshold_delta for header in costs),
            bounds={name: pair for header in every for name, pair in header.bounds.items()},
            nulls=tuple(name for header in every for name in header.nulls),
            cuts={name: cut for header in every for name, cut in header.cuts.items()},
            not_estimated=tuple(
                dict.fromkeys(name for header in every for name in header.not_estimated)
            ),
        )

    @property
    def paid(self) -> str:
        """What it cost, and to whom."""
        if not self.run_id:
            return "Nothing"
        if self.points:
            return self.points.paid
        return f"{guarantee_pair(self.epsilon, self.delta)} per unit"

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
    """A committed answer as a statement shows it.

    Attributes:
        table: the statement's columns; after one WITH REPORT its sd, low and high.
        intervals: by column, (sd, low, high) of the noise's 95% interval.
        reports: columns whose interval is in the table too.
        header: what it cost, and when it was first given.
        receipt: the committed bytes.
        digest: binds the receipt to the charge.
        charged: whether this very call was charged.
        insecure: whether a fixed test secret was used: whoever knows it can subtract the noise.
        weak: by column of means, which are mostly noise (`render.answer.weak_rows`).
    """

    table: pa.Table
    intervals: dict[str, pa.Table]
    reports: tuple[str, ...]
    header: Header
    receipt: bytes
    digest: str
    charged: bool
    insecure: bool
    weak: dict[str, list[bool]]

    def __repr__(self) -> str:
        """Return the rows as a table, and the cost."""
        return f"{answer_text(self)}{self.header.paid}; run {self.header.run_id}"


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
    flat = arrow_numbers(values.reshape(-1), null.reshape(-1))
    if not many:
        return flat
    ends = arrow_numbers(np.arange(len(values) + 1) * len(places)).cast(pa.int32())
    return pa.ListArray.from_arrays(ends, flat)


def read(data: bytes) -> tuple[Header, pa.Table]:
    """Return the header and the released rows of a receipt.

    Raises:
        PolicyError: the bytes have another form.
    """
    return receipt.header_of(data, Header), receipt.table_of(data)


def free(rows: pa.Table, answered: str = "") -> SqlAnswer:
    """Return rows that cost nothing: of public tables, or made of earlier answers.

    Args:
        answered: when the last of these was given.
    """
    cost = {"epsilon": 0.0, "delta": 0.0, "mu": None, "threshold_delta": 0.0}
    header = Header(run_id="", plan_hash="", answered=answered, **cost)  # type: ignore[arg-type]
    return presented(Answer("", b"", "", False), header, rows, {}, False, {})


def presented(
    answer: Answer,
    header: Header,
    rows: pa.Table,
    reports: Mapping[str, str],
    insecure: bool,
    widths: Mapping[str, float],
) -> SqlAnswer:
    """Return a committed answer in the form that whoever asks gets.

    Args:
        header, rows: of its receipt, with the names that are shown.
        reports: how the interval of columns is asked for.
        insecure: whether its secret is a fixed test secret.
        widths: of the bounds of means, by column.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    intervals: dict[str, pa.Table] = {}
    for name in rows.column_names:
        if MARK in name:
            continue
        columns[name] = rows.column(name)
        if f"{name}{MARK}sd" in rows.column_names:
            parts = {part: rows.column(f"{name}{MARK}{part}") for part in PARTS}
            if reports.get(name) == "json":
                columns[name] = _reported(columns[name], parts)
                continue
            intervals[name] = pa.table(parts)
            if name in reports:
                columns |= {f"{name}_{LABELS[part]}": values for part, values in parts.items()}
    table = pa.table(columns).replace_schema_metadata(header.metadata)
    reported = tuple(name for name in reports if name in intervals)
    committed = answer.receipt, answer.digest, answer.charged
    means = {name: width for name, width in widths.items() if name in intervals}
    weak = {name: weak_rows(intervals[name]["sd"], width) for name, width in means.items()}
    return SqlAnswer(table, intervals, reported, header, *committed, insecure, weak)


def _reported(values: pa.ChunkedArray, parts: Mapping[str, pa.ChunkedArray]) -> pa.Array:
    """Return figures with their noise as JSON: ``value`` and ``standard_deviation``, as GoogleSQL
    calls them, and the ends of the interval."""
    names = ("value", "standard_deviation", *(LABELS[end] for end in ("low", "high")))
    rows = zip(*(column.to_pylist() for column in (values, *parts.values())), strict=True)
    cells = ({"result": dict(zip(names, row, strict=True))} for row in rows)
    return pa.array([msgspec.json.encode(cell).decode() for cell in cells], pa.string())


def widths_of_means(plan: QueryPlan, header: Header) -> dict[str, float]:
    """Return the width of each mean's bounds, which were given or chosen, by column of the plan."""
    means = [c for c in plan.columns if c.kind == "mean" and c.name not in header.nulls]
    given = {column.name: (column.low or 0.0, column.high or 0.0) for column in means}
    bounds = given | {name: header.bounds[name] for name in given if name in header.bounds}
    return {name: high - low for name, (low, high) in bounds.items()}


def answer_text(answer: SqlAnswer) -> str:
    """Return the rows as an aligned table; a column with an interval shows its half-width."""
    extra = [f"{name}_{label}" for name in answer.reports for label in LABELS.values()]
    return rows_text(answer.table.drop_columns(extra), answer.intervals, answer.weak)


def records(answer: SqlAnswer) -> list[dict[str, Any]]:
    """Return the rows for JSON."""
    return json_rows(answer.table, answer.intervals)
