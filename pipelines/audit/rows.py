"""Synthetic neighbours as Arrow rows, and released rows as numbers per trial.

Units and keys are numbers: nothing here comes from a job's data.  Trial i owns the keys
``i * width .. (i + 1) * width - 1``; trials of both sides share one run, on disjoint keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.aggregates import COUNT, KINDS
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.evidence.design import TrialDesign
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan


class TrialRows(NamedTuple):
    """Parallel int64 arrays: unit and key numbers, event times (micros), and whether the row
    is one of the unit a trial is about."""

    unit: Int64
    key: Int64
    event: Int64
    own: Bool


def rows_of(
    plan: Plan,
    trials: Int64,
    added: Bool,
    width: int,
    pattern: Int64,
    when: Int64,
    others: int,
    feeds: Sequence[tuple[int, int]],
) -> TrialRows:
    """Rows of some trials.

    Args:
        trials: numbers of the trials; added: which of them are on side D'.
        width: keys of a trial; pattern: key (0 .. width - 1) of each of the unit's records;
            when: their triggers in window 0.
        others: units on every key at every (window, trigger) of ``feeds``, a record each.
    """
    line = plan.timeline

    def instant(window: int, at: int) -> int:
        return line.start + window * line.slide + (at - 1) * line.trigger_every

    keys = (trials[:, None] * width + np.arange(width)).ravel()
    parts = []
    for number, (window, at) in enumerate(feeds):
        key = np.repeat(keys, others)
        nth = np.tile(np.arange(others), len(keys))
        unit = ((key * others + nth) * len(feeds) + number) * 2 + 1
        parts.append(
            TrialRows(
                unit, key, np.full(len(key), instant(window, at)), np.zeros(len(key), np.bool_)
            )
        )
    mine = trials[added]
    key = (mine[:, None] * width + pattern).ravel()
    event = np.tile(line.start + (when - 1) * line.trigger_every, len(mine))
    parts.append(
        TrialRows(np.repeat(mine * 2, len(pattern)), key, event, np.ones(len(key), np.bool_))
    )
    return TrialRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def numbered_field(plan: Plan) -> Field:
    """The key column that holds a key's number."""
    for field in plan.key:
        if field.type != "bool":
            return field
    raise UsageError(
        "key", "has only yes/no columns: too few keys for an audit", "audit another job"
    )


def table_of(plan: Plan, rows: TrialRows, inputs: dict[str, tuple[float, float]]) -> pa.Table:
    """Rows as the job's input columns."""
    columns: dict[str, pa.Array] = {plan.unit.column: _typed(plan.unit, "u", rows.unit)}
    columns.update(key_columns(plan, rows.key))
    time = pa.array(rows.event).view(pa.timestamp("us", tz="UTC"))
    columns[plan.event_time] = time
    if plan.stamp != "event_time":
        columns[plan.stamp] = time
    if plan.record_id is not None and plan.record_id.column not in columns:
        numbers = np.arange(len(rows.unit))  # all are different records
        columns[plan.record_id.column] = _typed(plan.record_id, "r", numbers)
    for name, (own, other) in inputs.items():
        columns[name] = pa.array(np.where(rows.own, own, other))
    return pa.table(columns)


def key_columns(plan: Plan, numbers: Int64) -> dict[str, pa.Array]:
    """Key columns of numbered keys; columns other than the numbered one are constant."""
    where = numbered_field(plan)
    fixed = {"string": "x", "int": 0, "bool": True, "bytes": b"x"}
    return {
        f.column: _typed(f, "k", numbers)
        if f is where
        else pa.array([fixed[f.type]]).take(pa.array(np.zeros(len(numbers), np.int64)))
        for f in plan.key
    }


def _typed(field: Field, prefix: str, numbers: Int64) -> pa.Array:
    if field.type == "bool":
        raise UsageError(
            "table.unit_column", "of two values is no unit to audit", "audit another job"
        )
    if field.type == "int":
        return pa.array(numbers)
    text = pc.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")
    return text.cast(pa.binary()) if field.type == "bytes" else text


class Released(NamedTuple):
    """Released rows: numbers of their keys, windows and triggers, and the table itself."""

    key: Int64
    window: Int64
    trigger: Int64
    table: pa.Table


def released(plan: Plan, table: pa.Table) -> Released:
    """Numbers of released rows."""
    if table.num_rows == 0:
        none = np.zeros(0, np.int64)
        return Released(none, none, none, table)
    field = numbered_field(plan)
    key = table.column(field.column)
    if field.type != "int":
        key = pc.utf8_slice_codeunits(key.cast(pa.string()), 1).cast(pa.int64())
    begin = table.column("window_start").cast(pa.int64()).to_numpy()
    window = (begin - plan.timeline.start) // plan.timeline.slide
    trigger = table.column("trigger").to_numpy().astype(np.int64)
    return Released(key.to_numpy().astype(np.int64), window, trigger, table)


def totals(design: TrialDesign, rows: Released) -> Float64:
    """(rows, columns) released values in grid units of their streams, less what others add.

    A mean becomes a sum again: times the released count, or the others' number without one.
    """
    index = np.minimum(np.searchsorted(design.at, rows.trigger), len(design.at) - 1)
    expected = design.expected()[index]
    fed = np.searchsorted(np.array(design.feeds), rows.trigger, side="right") * design.others
    counts = next((c.name for c in design.columns if c.kind == COUNT), None)
    out = np.empty(expected.shape)
    for i, column in enumerate(design.columns):
        value = rows.table.column(column.name).to_numpy().astype(np.float64) / column.grid
        if KINDS[column.kind].divides:
            count = fed if counts is None else rows.table.column(counts).to_numpy()
            value = np.nan_to_num((value - column.middle) * count, nan=0.0)
        out[:, i] = value - expected[:, i]
    return out
