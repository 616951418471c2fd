"""Rows of a table -> canonical rows -> partials of a query, in numpy.

What a row becomes depends on that row alone: its unit and key become keyed ids in the canonical
forms of ``dp_transforms.ingest.columns``, its values floats.  A row without a unit (or with an
empty one) or a key does not count; nor does a row whose key is not a public key, nor, unless rows
or units are counted, one that has none of the values.  A row without a value adds nothing to the
figures of that column.

Stage 1 is that of SQL (``pipelines.sql.query_plan``) on one table without expressions: each value
is held within the bounds and rounded to the grid; the rows of a unit with a key are added up
exactly; for a mean, the sum of a unit with more rows than count is scaled down to that many; of
quantiles the rows stay.  Stage 2 (``dp_transforms.one_shot``, mechanism.md section 11) bounds a
unit's contributions: its guarantee relies on this module only in that every partial is made of the
rows of one unit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Float64, Ids, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.parts import middle_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.ingest.columns import identity, laid_out, measure, unit_identity
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Partials
from dpstream.dp_transforms.one_shot import Rows as Values
from dpstream.dp_transforms.one_shot.groups import Groups, distinct, encoded
from dpstream.dp_transforms.one_shot.partials import MAX_PARTIALS, pairs
from dpstream.pipelines.frames.question import Question
from dpstream.state.numbers import mask

#: Steps that a row is limited to where bounds hold for a group, far beyond any bound: 2^30 of them
#: add up in 64 bits.
_WIDE = 1 << 32


class Measured(NamedTuple):
    """PRIVATE: (n,) finite numbers of a column of values, 0 where there is none; (n,) where."""

    number: Float64
    there: Bool


class Rows(NamedTuple):
    """PRIVATE: the counted rows of a table, sorted by unit and group.

    They are sorted once, because histograms and the answer read them several times.

    Attributes:
        unit: (n,) int64 slots of units; unit_ids: (units, 2) their keyed ids.
        group: (n,) int64 codes of groups; groups: their values and ids.
        first: number of the first row of each (unit, group).
        values: by column of the answer; empty where only rows are counted.
    """

    unit: Int64
    unit_ids: Ids
    group: Int64
    groups: Groups
    first: Int64
    values: Mapping[str, Measured]

    def added(self, values: Int64) -> Int64:
        """Return the sum of each (unit, group)."""
        return np.add.reduceat(values, self.first) if len(self.first) else np.zeros(0, np.int64)


def rows_of(question: Question, columns: Mapping[str, pa.ChunkedArray], ring: KeyRing) -> Rows:
    """Return copies of the rows that count, so that later changes of the table have no effect.

    Raises:
        UsageError: there are too many rows.
    """
    if len(columns[question.unit]) > MAX_PARTIALS:
        raise UsageError("data", f"has more than {MAX_PARTIALS} rows", "ask it by `dpstream sql`")
    unit, units, good = _coded(columns[question.unit], question.unit_type, unit_identity)
    unit_ids = typed_ids(ring.unit, [(question.unit_type, units)])
    keys = []
    for name, kind in zip(question.key, question.kinds, strict=True):
        codes, values, ok = _coded(columns[name], kind)
        keys.append((codes, values))
        good &= ok
    names = {figure.value for figure in question.figures.values() if figure.value is not None}
    values = {name: Measured(*measure(columns[name].combine_chunks())) for name in sorted(names)}
    if values and not question.counts_rows:
        good &= np.any([value.there for value in values.values()], axis=0)
    good_rows = slice(None) if good.all() else np.flatnonzero(good)
    groups = Groups(list(question.key), list(question.kinds), ring.key, question.public)
    parts = [(codes[good_rows], values) for codes, values in keys]
    unit = unit[good_rows]
    group = _groups(parts, groups) if keys else np.zeros(len(unit), np.int64)
    pair = pairs(unit, group, len(groups.ids))
    order = np.argsort(pair)
    if len(group) and int(group.min()) < 0:  # none of the public keys
        order = order[group[order] >= 0]
    first = np.flatnonzero(np.diff(pair[order], prepend=-1))

    def ordered(value: Measured) -> Measured:
        number, there = value.number[good_rows][order], value.there[good_rows][order]
        return Measured(number + 0.0, there)  # no -0.0

    values = {name: ordered(value) for name, value in values.items()}
    of_answer = {n: values[f.value] for n, f in question.figures.items() if f.value is not None}
    return Rows(unit[order], unit_ids, group[order], groups, first, of_answer)


def partials_of(plan: QueryPlan, rows: Rows) -> Partials:
    """Return the input of stage 2, for a plan with its bounds."""
    sums, lists = list[Int64](), dict[str, Values]()
    size = np.diff(rows.first, append=len(rows.unit))
    for column in plan.columns:
        if column.kind == "count":
            sums.append(size)
        elif column.kind != "units":
            value = rows.values[column.name]
            steps = _steps(value, column.grid, *_limits(column))
            if column.kind == "quantiles":
                there = value.there
                lists[column.name] = Values(rows.unit[there], rows.group[there], steps[there])
            elif column.kind == "mean":
                sums += _means(column, steps, value.there, rows)
            else:
                sums.append(_sums(column, steps, value.there, rows))
    unit, group = rows.unit[rows.first], rows.group[rows.first]
    return Partials(unit, group, rows.unit_ids, rows.groups.ids, tuple(sums), lists)


def histogram_values(name: str, column: QueryColumn | None, rows: Rows) -> Values:
    """Return the values that a histogram counts.

    These are the number of groups of each unit; or, for each unit in a group, its number of rows,
    or its sum or mean (in grid steps); or, of quantiles, each row.  For a sum within given bounds
    it is the multiple of the nearer bound, which is what a bound on rows limits.

    Args:
        column: whose histogram it is; ``None``: of groups.
    """
    unit, group = rows.unit[rows.first], rows.group[rows.first]
    if column is None:
        each = np.bincount(unit)
        present = np.flatnonzero(each)
        return Values(present, np.zeros(len(present), np.int64), each[present])
    if column.kind == "count":
        return Values(unit, group, np.diff(rows.first, append=len(rows.unit)))
    value = rows.values[column.name]
    number = rows.added(value.there.astype(np.int64))
    valued = number > 0
    if name == column.rows_histogram and column.kind != "sum":
        return Values(unit[valued], group[valued], number[valued])
    limits = _limits(column) if name == column.rows_histogram else (-_WIDE, _WIDE)
    steps = _steps(value, column.grid, *limits)
    if column.kind == "quantiles":
        there = value.there
        return Values(rows.unit[there], rows.group[there], steps[there])
    total = rows.added(np.where(value.there, steps, 0))
    if name == column.rows_histogram:
        low, high = limits
        bound = np.where(total < 0, -min(low, -1), max(high, 1))
        total = np.maximum(1, -(-np.abs(total) // bound))
    elif column.kind == "mean":
        total = total // np.maximum(number, 1)
    return Values(unit[valued], group[valued], np.clip(total, -_WIDE, _WIDE)[valued])


def _limits(column: QueryColumn) -> tuple[int, int]:
    """Return the bounds of each row's value in grid steps: the column's, if they hold per row."""
    return column.grid_bounds() if column.per == "row" else (-_WIDE, _WIDE)


def _steps(value: Measured, grid: float, low: int, high: int) -> Int64:
    """Return the (n,) values in whole grid steps, held within the bounds."""
    with np.errstate(over="ignore"):  # 1e308 on a grid of 0.1 is beyond every bound
        scaled = np.clip(np.rint(value.number / grid), low, high)
    return np.asarray(scaled, np.int64)


def _sums(column: QueryColumn, steps: Int64, there: Bool, rows: Rows) -> Int64:
    """Return the sum of each unit in a group, 0 where it has no value there."""
    total = rows.added(np.where(there, steps, 0))
    if column.per == "row":
        return total
    held = np.clip(total, *column.grid_bounds())
    return np.where(rows.added(there.astype(np.int64)) > 0, held, 0)


def _means(column: QueryColumn, steps: Int64, there: Bool, rows: Rows) -> tuple[Int64, Int64]:
    """Return centred sums and counts for each unit in a group, of at most ``most_rows`` rows."""
    most, count = column.most_rows, rows.added(there.astype(np.int64))
    total = rows.added(np.where(there, steps - middle_of(column), 0))
    # r * |total| <= n r h, and r h <= 2^32 by the grid: 64 bits hold it for 2^30 rows.
    scaled = np.sign(total) * (np.abs(total) * most // np.maximum(count, 1))
    return np.where(count > most, scaled, total), np.minimum(count, most)


def _coded(
    column: pa.ChunkedArray,
    kind: str,
    typed: Callable[[pa.Array, str], tuple[pa.Array, Bool]] = identity,
) -> tuple[Int64, pa.Array, Bool]:
    """Return (rows,) codes of canonical values, the values by code, and a mask of rows with one.

    Args:
        typed: returns canonical values and the mask of distinct ones.
    """
    try:
        codes, spelled = encoded(laid_out(column))
    except pa.ArrowException:
        raise UsageError(
            "data", "has a column of more than 2 GiB of text", "ask it by `dpstream sql`"
        ) from None
    canonical, fits = typed(spelled, kind)
    # Two spellings of one text are one value.
    again, values = encoded(canonical)
    return again[codes], values, fits[codes]


def _groups(keys: Sequence[tuple[Int64, pa.Array]], groups: Groups) -> Int64:
    """Return (rows,) codes of the groups; each distinct group is looked up once."""
    codes, values = distinct(iter(keys))
    met = np.bincount(codes, minlength=len(values[0])) > 0
    group_codes = groups.codes([pa.chunked_array([v.filter(mask(met))]) for v in values])
    place = np.zeros(len(met), np.int64)
    place[met] = group_codes
    return place[codes]
