"""Conditions and groups of a checked statement, as ranges of coordinates.

A condition is read as GoogleSQL means it, over the columns of one table with budgets per record:

* a column is the value of its dimension: NULL at the point of missing values.  ``consumed_epsilon``
  and ``consumed_rho`` are what a point has spent, ``remaining_epsilon`` and ``remaining_rho`` what
  it has left of its initial budget, 0 where nothing is left; they are resolved when the question is
  charged;
* a comparison of a column with a literal, BETWEEN, IN, IS NULL, AND, OR and NOT become ranges of
  coordinates.  A real number or an instant is known by its step alone, so that only ``<`` and
  ``>=`` at a line of the grid are decided; others are refused;
* any other expression over one dimension whose coordinates stand for a single value each (and over
  public tables that are joined by its value) is computed by DuckDB for each of them, in the forms
  of `statements.forms`.

Negation is moved into the parts, so that a condition is represented by the points where it is TRUE;
that of a comparison with NULL is not true either.

**Joins.**  A public relation is joined by the value of a dimension, so that which rows a record
meets depends on its point alone.  A point whose records would meet several rows is refused: they
would count several times.

**Groups.**  A group is a range of coordinates of one dimension with one value: of a column each
value; of any other expression, as of RANGE_BUCKET (a CASE since `statements.spelling`), the
neighbouring coordinates for which it has the same value.
"""

import functools
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.limits import MAX_CELLS
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.conditions import (
    FAR,
    NEGATED,
    TURNED,
    AllOf,
    AnyOf,
    Condition,
    Level,
    Ranges,
    Value,
    Within,
    amounts_at,
    apart,
    joined,
    shared,
    true_at,
)
from dpstream.accounting.regions.space import (
    Budget,
    BudgetKind,
    Category,
    Dimension,
    Integer,
    Space,
    Timestamp,
)
from dpstream.accounting.sessions.aggregates import Axis, Cells
from dpstream.dp_transforms.session import labels
from dpstream.pipelines.statements.errors import position
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.forms import SIGNS, type_of
from dpstream.pipelines.statements.statement import Group
from dpstream.pipelines.tables.catalog import Tables
from dpstream.pipelines.tables.engine import Engine

#: What a point has spent or left, by the column's name.
LEVELS: dict[str, tuple[BudgetKind, bool]] = {
    "consumed_epsilon": ("epsilon", False),
    "consumed_rho": ("rho", False),
    "remaining_epsilon": ("epsilon", True),
    "remaining_rho": ("rho", True),
}
#: Values of a dimension for which an expression is computed.
_MAX_VALUES = 1 << 17
_MAX_DIGITS = 60
_TIME_TYPES = {exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ, exp.DType.DATETIME, exp.DType.DATE}
_INSTANT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ Tt]([01]?\d|2[0-3]):(\d{1,2}):(\d{1,2})(?:\.(\d{1,6}))?"
    r"(?:\s?(Z|z|UTC|[+-]\d\d(?::?\d\d)?))?)?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AT = "\x1fat"
_COMPARE = "compare a column with a literal, or compute from one column of single values"


class Grouped(NamedTuple):
    """A group of a statement as ranges along a dimension.

    Attributes:
        edges: rising coordinates; values: one for each range between two of them.
    """

    edges: list[int]
    values: pa.Array


class Reader:
    """Reads the conditions and groups of one statement.

    Args:
        space: of the points; tables: what the statement can name.
        source: its FROM, joins and WHERE, qualified.

    Raises:
        DpstreamError: FROM is not the table itself, or a join has no meaning at points.
    """

    def __init__(self, space: Space, tables: Tables, source: exp.Select) -> None:
        self._space, self._tables, self._source = space, tables, source
        first = source.args["from_"].this
        private = isinstance(first, exp.Table) and tables.tables[first.name].unit is not None
        if not private:
            rule = "is a subquery, or comes behind a public table"
            refuse(first, rule, "write FROM the table itself, and its conditions in WHERE")
        self._name = first.alias_or_name
        self._places = {d.name.lower(): at for at, d in enumerate(space.dimensions)}
        self._joins: dict[str, exp.Join] = {
            join.this.alias_or_name: join for join in source.args.get("joins") or ()
        }

    @functools.cached_property
    def _engine(self) -> Engine:
        relations = (join.this for join in self._joins.values())
        names = {table.name for each in relations for table in each.find_all(exp.Table)}
        return Engine(self._tables, names, ordered=True)

    def close(self) -> None:
        """Close what computed expressions."""
        if "_engine" in self.__dict__:
            self._engine.close()

    def selected(self) -> Condition:
        """Return where the statement's joins keep a point, and its WHERE is true."""
        where = self._source.args.get("where")
        parts = [self._matched(join) for join in self._joins.values()]
        if where is not None:
            parts.append(self.condition(where.this, True))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def condition(self, node: exp.Expr, true: bool) -> Condition:
        """Return where a node is true, or where it is false.

        Raises:
            UsageError: coordinates cannot decide it.
        """
        while isinstance(node, exp.Paren | exp.Not):
            true ^= isinstance(node, exp.Not)
            node = node.this
        if isinstance(node, exp.And | exp.Or):
            parts = tuple(self.condition(part, true) for part in node.flatten())
            return AllOf(parts) if isinstance(node, exp.And) == true else AnyOf(parts)
        if isinstance(node, exp.Boolean):
            return AllOf(()) if bool(node.this) == true else AnyOf(())
        if isinstance(node, exp.Null):
            return AnyOf(())
        if isinstance(node, exp.Between) and self._is_own(node.this):
            at_least = self._compared(node.this, ">=", node.args["low"], true)
            at_most = self._compared(node.this, "<=", node.args["high"], true)
            return (AllOf if true else AnyOf)((at_least, at_most))
        if isinstance(node, exp.In) and self._is_own(node.this):
            return self._listed(node, true)
        null = isinstance(node, exp.Is) and isinstance(node.expression, exp.Null)
        if null and self._is_own(node.this):
            return self._missing(node.this.unnest(), true)
        if type(node) in SIGNS:
            sign, one, other = SIGNS[type(node)], node.this, node.expression
            if not self._is_own(one):
                sign, one, other = TURNED[sign], other, one
            if self._is_own(one) and _is_value(other):
                return self._compared(one, sign, other, true)
        return self._computed(node, true)

    def _is_own(self, node: exp.Expr) -> bool:
        node = node.unnest()
        return isinstance(node, exp.Column) and node.table == self._name

    def _compared(self, one: exp.Expr, sign: str, other: exp.Expr, true: bool) -> Condition:
        column, other = one.unnest(), other.unnest()
        sign = sign if true else NEGATED[sign]
        if isinstance(other, exp.Null):
            return AnyOf(())
        level = self._level(column)
        if level is not None:
            return Level(*level, amounts_at(sign, _number(other)))
        place = self._places[column.name]
        return Within(place, self._true(place, sign, other))

    def _listed(self, node: exp.In, true: bool) -> Condition:
        column, values = node.this.unnest(), [value.unnest() for value in node.expressions]
        given = [value for value in values if not isinstance(value, exp.Null)]
        if not true and len(given) < len(values):
            return AnyOf(())  # x NOT IN (..., NULL) is never true
        level = self._level(column)
        if level is not None:
            ranges = joined([amounts_at("=", _number(value)) for value in given])
            return Level(*level, ranges if true else apart(ranges, -FAR, FAR))
        place = self._places[column.name]
        ranges = joined([self._true(place, "=", value) for value in given])
        high = self._space.dimensions[place].values
        return Within(place, ranges if true else apart(ranges, 0, high))

    def _missing(self, column: exp.Expr, true: bool) -> Condition:
        """Return the condition of IS NULL; what was spent is never missing."""
        if self._level(column) is not None:
            return AnyOf(()) if true else AllOf(())
        place = self._places[column.name]
        dimension = self._space.dimensions[place]
        missing, there = (dimension.values, dimension.size), (0, dimension.values)
        return Within(place, (missing if true else there,))

    def _level(self, column: exp.Expr) -> tuple[BudgetKind, bool] | None:
        if column.name in self._places:
            return None
        if column.name not in LEVELS:
            refuse(column, "is no column that can be compared", _COMPARE)
        return LEVELS[column.name]

    def _true(self, place: int, sign: str, node: exp.Expr) -> Ranges:
        dimension = self._space.dimensions[place]
        value = _value(dimension, node)
        try:
            return true_at(dimension, sign, value)
        except UsageError as error:
            refuse(node, f"{error.field} {error.rule}", error.fix)

    # --- what is computed ------------------------------------------------------------------------

    def _computed(self, node: exp.Expr, true: bool) -> Condition:
        """Return the coordinates for which an expression is true, or false."""
        if type_of(node) not in (exp.DType.BOOLEAN, exp.DType.UNKNOWN, None):
            refuse(node, "is no condition", _COMPARE)
        place, rows = self._rows(node)
        values = rows["value"].to_pylist()
        at = [a for a, value in zip(rows[_AT].to_pylist(), values, strict=True) if value is true]
        if place is None:
            return AllOf(()) if at else AnyOf(())
        return Within(place, joined([tuple((a, a + 1) for a in at)]))

    def _matched(self, join: exp.Join) -> Condition:
        """Return the coordinates that a join keeps.

        Raises:
            UsageError: a record at one of them would meet several rows.
        """
        place, rows = self._rows(exp.column(_AT, table=self._name, quoted=True), join)
        at = rows[_AT].to_pylist()
        if len(set(at)) < len(at):
            rule = "joins a table in which a value of the dimension has several rows"
            fix = "join distinct rows ON their equality with one column"
            refuse(join.this, f"{rule}: a record would count several times", fix)
        if place is None:
            return AllOf(()) if at else AnyOf(())
        return Within(place, joined([tuple((a, a + 1) for a in at)]))

    def _rows(self, node: exp.Expr, join: exp.Join | None = None) -> tuple[int | None, pa.Table]:
        """Compute an expression for each coordinate of the one dimension that it depends on.

        Returns:
            The dimension, and coordinates with values; ``None``: it depends on none.

        Raises:
            UsageError: it depends on several, on what was spent, or on one that is too large or
                known by steps.
        """
        names = list[str]()
        pending = [node] if join is None else [node, join.this, join.args.get("on")]
        if join is not None:
            names.append(join.this.alias_or_name)
        own = set[str]()
        while pending:
            part = pending.pop()
            for column in () if part is None else part.find_all(exp.Column):
                if column.table == self._name:
                    own |= {column.name} - {_AT}
                elif column.table in self._joins and column.table not in names:
                    names.append(column.table)
                    pending.append(self._joins[column.table].args.get("on"))
        if len(own) > 1 or not own <= self._places.keys():
            rule = "depends on more than one column, or on what points have spent"
            refuse(node if join is None else join.this, rule, _COMPARE)
        place = self._places[own.pop()] if own else None
        select = exp.Select(
            expressions=[
                exp.alias_(exp.column(_AT, table=self._name, quoted=True), _AT, quoted=True),
                exp.alias_(node.copy(), "value", quoted=True),
            ],
            from_=self._source.args["from_"].copy(),
            joins=[self._joins[name].copy() for name in self._joins if name in names],
        )
        table = self._source.args["from_"].this.name
        try:
            self._engine.register(table, self._values(place))
        except UsageError as error:
            refuse(node if join is None else join.this, error.rule, error.fix)
        return place, self._engine.run(safe_query(select))

    def _values(self, place: int | None) -> pa.Table:
        """Return the coordinates of a dimension with their values, for DuckDB."""
        if place is None:
            return pa.table({_AT: pa.array([0])})
        dimension = self._space.dimensions[place]
        if not isinstance(dimension, Integer | Category | Budget) or dimension.size > _MAX_VALUES:
            rule = "is computed from a column that is known by steps, or has too many values"
            raise UsageError("", rule, "compare it by < and >= with literals on its grid")
        axis = _each(dimension, 0, dimension.size)
        values = labels(self._space, Cells((axis,)))[axis.name]
        return pa.table({_AT: pa.array(range(dimension.size)), dimension.name.lower(): values})

    # --- groups ----------------------------------------------------------------------------------

    def grouped(
        self, group: Group, low_high: Callable[[int], tuple[int, int]]
    ) -> tuple[int, Grouped]:
        """Return the dimension and the ranges of a group, within what is selected.

        Args:
            low_high: returns the first coordinate of a dimension that is selected, and the one
                behind the last.

        Raises:
            UsageError: groups are no ranges of one dimension.
        """
        node = group.expression
        if self._is_own(node):
            if node.name not in self._places:
                refuse(node, "is what points have spent, which is no group", "group by a column")
            place = self._places[node.name]
            low, high = low_high(place)
            if high - low > MAX_CELLS:
                rule = "has too many values for a group each"
                refuse(node, rule, f"write RANGE_BUCKET({node.name}, [..])")
            axis = _each(self._space.dimensions[place], low, high)
            values = labels(self._space, Cells((axis,)))[axis.name]
            return place, Grouped(list(axis.edges), values)
        cases = self._cases(node)
        if cases is None:
            of, rows = self._rows(node)
            if of is None:
                refuse(node, "depends on no column", "group by a column")
            place = of
            ranges = [(at, at + 1) for at in rows[_AT].to_pylist()]
            values = rows["value"].combine_chunks()
        else:
            place, ranges, values = cases
        low, high = low_high(place)
        numbers = [k for k, (a, b) in enumerate(ranges) if a < high and b > low]
        ranges = [(max(ranges[k][0], low), min(ranges[k][1], high)) for k in numbers]
        return place, _merged(ranges, values.take(pa.array(numbers, pa.int64())))

    def _cases(self, node: exp.Expr) -> tuple[int, list[tuple[int, int]], pa.Array] | None:
        """Return the dimension, ranges and values of CASE; ``None`` for any other expression."""
        if not isinstance(node, exp.Case) or node.this is not None:
            return None
        ends = [when.args["true"] for when in node.args["ifs"]]
        ends.append(node.args.get("default") or exp.Null())
        if not all(_is_value(end) and not isinstance(end, exp.Cast) for end in ends):
            return None
        tests = [self.condition(when.this, True) for when in node.args["ifs"]]
        places = {test.place for test in tests if isinstance(test, Within)}
        if len(places) != 1 or not all(isinstance(test, Within) for test in tests):
            return None
        [place] = places
        size = int(self._space.sizes[place])
        free: Ranges = ((0, size),)
        pieces = list[tuple[int, int, Any]]()
        for test, end in zip([*tests, Within(place, free)], ends, strict=True):
            taken = shared([free, instance(test, Within).ranges])
            free = shared([free, apart(taken, 0, size)])
            value = None if isinstance(end, exp.Null) else end.to_py()
            pieces += [(low, high, value) for low, high in taken]
        pieces.sort(key=lambda piece: piece[0])
        return place, [(a, b) for a, b, _ in pieces], pa.array([value for *_, value in pieces])


def _each(dimension: Dimension, low: int, high: int) -> Axis:
    return Axis(dimension.name, tuple(range(low, high + 1)))


def _merged(ranges: Sequence[tuple[int, int]], values: pa.Array) -> Grouped:
    """Return ranges of which neighbours with the same value are one."""
    given = values.to_pylist()
    starts = [0, *(k for k in range(1, len(given)) if given[k] != given[k - 1])] if given else []
    edges = [ranges[k][0] for k in starts] + [ranges[-1][1]] if given else []
    return Grouped(edges, values.take(pa.array(starts, pa.int64())))


def cells_of(
    space: Space, groups: Sequence[tuple[int, Grouped]]
) -> tuple[Cells, list[tuple[int, pa.Array]]]:
    """Return the cells of groups; and for each group the axis that it is along, and its values.

    Groups along one dimension divide it together.

    Raises:
        UsageError: one value would have several cells of a dimension: noise of its own in each.
    """
    axes, values = dict[int, list[int]](), list[tuple[int, pa.Array]]()
    for place, grouped in groups:
        axes[place] = sorted({*axes.get(place, ()), *grouped.edges})
    order = list(axes)
    for place, grouped in groups:
        at = np.searchsorted(grouped.edges, axes[place][:-1], side="right") - 1
        values.append((order.index(place), grouped.values.take(pa.array(at))))
    for number, place in enumerate(order):
        alike = [column.to_pylist() for axis, column in values if axis == number]
        rows = list(zip(*alike, strict=True))
        if len(set(rows)) < len(rows):
            raise UsageError(
                f"group of {space.dimensions[place].name}",
                "has a value that is not one range of the dimension",
                "group by the column itself, and add up in an outer query",
            )
    cells = Cells(tuple(Axis(space.dimensions[p].name, tuple(e)) for p, e in axes.items()))
    return cells, values


def _is_value(node: exp.Expr) -> bool:
    """Return whether a node is a literal, with a sign or a type of time before it."""
    node = node.unnest()
    if isinstance(node, exp.Neg | exp.Cast):
        return _is_value(node.this)
    return isinstance(node, exp.Literal | exp.Null)


def _value(dimension: Dimension, node: exp.Expr) -> Value:
    """A literal as a value of a dimension."""
    if isinstance(dimension, Timestamp):
        return instant_of(node)
    if isinstance(dimension, Category):
        if not isinstance(node, exp.Literal) or not node.is_string:
            refuse(node, "is no text", "write one of the listed codes in single quotes")
        return str(node.this)
    return _number(node)


def _number(node: exp.Expr) -> Fraction:
    """A number as the decimal that it is written as."""
    sign = 1
    while isinstance(node, exp.Neg | exp.Paren):
        sign = -sign if isinstance(node, exp.Neg) else sign
        node = node.this
    if isinstance(node, exp.Literal) and not node.is_string and len(node.this) <= _MAX_DIGITS:
        try:
            number = Decimal(node.this)
            if number.is_finite() and abs(number.adjusted()) <= _MAX_DIGITS:
                return sign * Fraction(number)
        except InvalidOperation:
            pass
    refuse(node, "is no number, or one of too many digits", "write a number such as 0.1")


def instant_of(node: exp.Expr) -> int:
    """Return the microseconds since 1970 of a literal instant, which is in UTC without an offset.

    Raises:
        UsageError: it is none.
    """
    casts = isinstance(node, exp.Cast) and node.args["to"].this in _TIME_TYPES
    text = node.this if casts else node
    literal = isinstance(text, exp.Literal) and text.is_string
    match = _INSTANT.fullmatch(str(text.this).strip()) if literal else None
    try:
        if match is not None:
            *parts, micros, zone = match.groups()
            at = datetime(*(int(part or 0) for part in parts), tzinfo=UTC)  # type: ignore[arg-type, misc]
            seconds = (at - _EPOCH) // timedelta(seconds=1) - _offset(zone or "Z")
            return seconds * MICRO + int((micros or "").ljust(6, "0"))
    except ValueError:
        pass
    refuse(node, "is no instant", "write '2024-01-01 00:00:00', in UTC")


def _offset(zone: str) -> int:
    """Return the seconds that a zone is before UTC."""
    if zone.upper() in ("Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


def refuse(node: exp.Expr, rule: str, fix: str) -> NoReturn:
    """Raise the refusal of a node, with its place."""
    line, column = position(node)
    raise UsageError(f"statement, line {line}, column {column}", rule, fix)
