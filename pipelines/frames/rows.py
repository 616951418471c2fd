"""Rows of a table -> canonical rows -> partials of a query, in numpy.

What a row becomes depends on that row alone: its unit and key become keyed ids in the canonical
forms of ``dp_transforms.ingest.columns``, its value a float.  A row without a unit (or with an
empty one), a key or a usable value does not count; nor does a row whose key is not a public key.

Stage 1 is that of SQL (``pipelines.sql.query_plan``) on one table without expressions: each value
is held within the bounds and rounded to the grid; the rows of a unit with a key are added up
exactly; for a mean, the sum of a unit with more rows than count is scaled down to that many.  Stage
2 (``dp_transforms.one_shot``, mechanism.md section 11) bounds a unit's contributions: its guarantee
relies on this module only in that every partial is made of the rows of one unit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Float64, Ids, Int64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.query.parts import middle_of
from dpstream.accounting.query.plan import GROUPS, QueryColumn, QueryPlan
from dpstream.dp_transforms.ingest.columns import decoded, identity, measure, unit_identity
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Partials
from dpstream.dp_transforms.one_shot import Rows as Values
from dpstream.dp_transforms.one_shot.groups import Groups, encoded
from dpstream.dp_transforms.one_shot.partials import MAX_PARTIALS, pairs
from dpstream.pipelines.frames.question import Question
from dpstream.state.numbers import arrow_numbers, mask, values_of

#: Steps that a row is limited to where bounds hold for a group, far beyond any bound: 2^30 of them
#: add up in 64 bits.
_WIDE = 1 << 32


class Rows(NamedTuple):
    """PRIVATE: the counted rows of a table, sorted by unit and group.

    They are sorted once, because histograms and the answer read them several times.

    Attributes:
        unit: (n,) int64 slots of units; unit_ids: (units, 2) their keyed ids.
        group: (n,) int64 codes of groups; groups: their values and ids.
        value: (n,) finite floats; ``None`` where only rows are counted.
    """

    unit: Int64
    unit_ids: Ids
    group: Int64
    groups: Groups
    value: Float64 | None


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
    value = None
    if question.value is not None:
        value, ok = measure(columns[question.value].combine_chunks())
        value = value + 0.0  # no -0.0
        good &= ok
    good_rows = slice(None) if good.all() else np.flatnonzero(good)
    groups = Groups(list(question.key), list(question.kinds), ring.key, question.public)
    unit, value = unit[good_rows], None if value is None else value[good_rows]
    parts = [(codes[good_rows], values) for codes, values in keys]
    group = _groups(parts, groups) if keys else np.zeros(len(unit), np.int64)
    if len(group) and int(group.min()) < 0:  # none of the public keys
        listed = np.flatnonzero(group >= 0)
        unit, group = unit[listed], group[listed]
        value = None if value is None else value[listed]
    order = np.argsort(pairs(unit, group, len(groups.ids)))
    unit, group = unit[order], group[order]
    return Rows(unit, unit_ids, group, groups, None if value is None else value[order])


def partials_of(plan: QueryPlan, rows: Rows) -> Partials:
    """Return the input of stage 2, for a plan with its bounds."""
    partials = Partials(rows.unit, rows.group, rows.unit_ids, rows.groups.ids)
    if not plan.columns or plan.columns[0].kind == "units":
        return partials
    [column] = plan.columns
    if column.kind == "count":
        return partials._replace(sums=(np.ones(len(rows.unit), np.int64),))
    if column.kind == "mean":
        return _means(column, rows, partials)
    steps = _steps(rows, column.grid, *_limits(column))
    if column.per == "row":
        return partials._replace(sums=(steps,))
    unit, group, total, _ = _by_pair(rows, steps)
    bounded = np.clip(total, *column.grid_bounds())
    return partials._replace(unit=unit, group=group, sums=(bounded,))


def histogram_values(name: str, column: QueryColumn | None, rows: Rows) -> Values:
    """Return the values that a histogram counts.

    These are the number of groups of each unit; or, for each unit in a group, its number of rows,
    or its sum or mean (in grid steps).  For a sum within given bounds it is the multiple of the
    nearer bound, which is what a bound on rows limits.
    """
    if column is not None and name == column.rows_histogram and column.kind == "sum":
        low, high = column.grid_bounds()
        unit, group, total, _ = _by_pair(rows, _steps(rows, column.grid, low, high))
        bound = np.where(total < 0, -min(low, -1), max(high, 1))
        return Values(unit, group, np.maximum(1, -(-np.abs(total) // bound)))
    if column is None or name in (GROUPS, column.rows_histogram) or column.kind == "count":
        unit, group, _, count = _by_pair(rows, np.zeros(len(rows.unit), np.int64))
        if name != GROUPS:
            return Values(unit, group, count)
        each = np.bincount(unit)
        present = np.flatnonzero(each)
        return Values(present, np.zeros(len(present), np.int64), each[present])
    steps = _steps(rows, column.grid, -_WIDE, _WIDE)
    unit, group, total, count = _by_pair(rows, steps)
    if column.kind == "mean":
        total = total // np.maximum(count, 1)
    return Values(unit, group, np.clip(total, -_WIDE, _WIDE))


def _limits(column: QueryColumn) -> tuple[int, int]:
    """Return the bounds of each row's value in grid steps: the column's, if they hold per row."""
    return column.grid_bounds() if column.per == "row" else (-_WIDE, _WIDE)


def _steps(rows: Rows, grid: float, low: int, high: int) -> Int64:
    """Return the (n,) values in whole grid steps, held within the bounds."""
    value = required(rows.value, "the column has values")
    with np.errstate(over="ignore"):  # 1e308 on a grid of 0.1 is beyond every bound
        scaled = np.clip(np.rint(value / grid), low, high)
    return np.asarray(scaled, np.int64)


def _means(column: QueryColumn, rows: Rows, partials: Partials) -> Partials:
    """Return centred sums and counts for each unit in a group, of at most ``most_rows`` rows."""
    most = column.most_rows
    centred = _steps(rows, column.grid, *_limits(column)) - middle_of(column)
    unit, group, total, count = _by_pair(rows, centred)
    # r * |total| <= n r h, and r h <= 2^32 by the grid: 64 bits hold it for 2^30 rows.
    scaled = np.sign(total) * (np.abs(total) * most // np.maximum(count, 1))
    scaled = np.where(count > most, scaled, total)
    return partials._replace(unit=unit, group=group, sums=(scaled, np.minimum(count, most)))


def _by_pair(rows: Rows, values: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return unit, group, sum and number of rows of each (unit, group)."""
    pair = pairs(rows.unit, rows.group, len(rows.groups.ids))
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    if not first.size:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, nothing
    total = np.add.reduceat(values, first)
    count = np.diff(first, append=len(pair))
    return rows.unit[first], rows.group[first], total, count


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
        codes, spelled = encoded(_plain(column))
    except pa.ArrowException:
        raise UsageError(
            "data", "has a column of more than 2 GiB of text", "ask it by `dpstream sql`"
        ) from None
    canonical, fits = typed(spelled, kind)
    # Two spellings of one text are one value.
    again, values = encoded(pa.chunked_array([canonical]))
    return again[codes], values, fits[codes]


def _groups(keys: Sequence[tuple[Int64, pa.Array]], groups: Groups) -> Int64:
    """Return (rows,) codes of the groups; each distinct group is looked up once."""
    codes, values = keys[0][0], [keys[0][1]]
    for more, its_values in keys[1:]:
        size = np.int64(max(1, len(its_values)))
        both, pair = encoded(pa.chunked_array([arrow_numbers(codes * size + more)]))
        codes, at = both, values_of(pair)
        values = [v.take(arrow_numbers(at // size)) for v in values]
        values.append(its_values.take(arrow_numbers(at % size)))
    met = np.bincount(codes, minlength=len(values[0])) > 0
    group_codes = groups.codes([pa.chunked_array([v.filter(mask(met))]) for v in values])
    place = np.zeros(len(met), np.int64)
    place[met] = group_codes
    return place[codes]


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts and bytes in Arrow's plain layout, without dictionaries and extension types."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([decoded(column.combine_chunks())])
        kind = column.type
    if types.is_null(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return column.cast(pa.string())
    if (
        types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    ):
        return column.cast(pa.binary())
    return column
