"""Ownership of the rows: Table 4.3 as one pass from the tables up, with its proof.

**Local.**  Write D for the rows of all private tables, and D = A + B for a division of them by
unit: every unit's rows lie wholly in A or wholly in B.  Public tables are constants.  A private
relation R is *local* if (1) each of its rows has a unit, in a column that `Relation` names, and
(2) R(A + B) is the disjoint union, with multiplicities, of R(A) and R(B), where the rows of R(A)
have units of A and those of R(B) units of B.  It follows that removing a unit removes exactly the
rows with that unit, and that a table divided by unit into shards gives the same rows, shard by
shard.  An accepted relation is local; by induction over its operators:

* *Table with a unit column.*  Rows without a unit are dropped (``unit IS NOT NULL`` at the table,
  by `query_plan`), so (1).  Filtering by the row itself commutes with union, so (2).
* *Table whose unit comes by a path.*  A row's unit is that of the one row with its key (keys are
  unique in A + B, so in A and in B).  Rows whose key nobody has are dropped.  A division by unit
  puts a row and the row it refers to on one side, so (2).
* *Projection, filter.*  Expressions are deterministic functions of one row (`allowed`), so they
  commute with union; (1) holds while a unit column is selected unchanged.  A row for which an
  expression fails has NULL there (`query_plan`), whatever the other rows are.
* *Join of private relations*, ON equating the units by plain columns, or all columns of one
  declared key.  Two rows that meet have one unit: of the key's one row in the second case (both
  rows hold, unchanged, the key of the row that gave them their unit).  So no row of R(A) meets
  one of S(B), and the matches of A + B are those of A and those of B; so are the rows without a
  match, which LEFT, RIGHT and FULL keep.  A kept row has its unit on the kept side only: a LEFT
  JOIN keeps the left column as unit, a FULL JOIN neither but their COALESCE.
* *Join with a public relation.*  Each private row meets the same public rows in A and in A + B.
  Kept rows without a match are fine on the private side; on the public side they would have no
  unit, and stand in R(A) and R(B) both: refused.
* *GROUP BY the unit (and more), DISTINCT with the unit.*  A group's rows have one unit, so groups
  of A + B are those of A and those of B, with the same rows.  The aggregates allowed are functions
  of the multiset of rows (`query_plan` sorts what it sums), not of an order.  Floats are no group
  columns: 0.0 and -0.0 are equal and differ, and which of them stands for the group depends on
  the order of rows.  What loses duplicates has 0.0 for both, and one NaN (`exact`).
* *UNION ALL, UNION, INTERSECT, EXCEPT* of private relations with the unit at one place: equal rows
  have one unit, so multiplicities in A + B are those in A plus those in B, one of which is 0.
* *ORDER BY* gives the same multiset, and is dropped.
* *Subqueries in expressions* have the place of a join (`subqueries`), whose rules hold.
* *Window functions*, PARTITION BY a unit column: a partition has one unit's rows, the same in A and
  in A + B.  Each value is a function of that multiset and of the row: ranks are by the order that
  is written, and where a value depends on which of two rows comes first, the order goes on with all
  columns of the relation, floats also by their text (-0.0 equals 0.0), so that rows which still
  tie are the same row twice.  Sums are of whole numbers, whose order changes nothing.  How far a
  frame or LAG reaches is a literal: of a column it could be a number that DuckDB fails on.
* *Public relation.*  Made of public tables only, or of nothing (SELECT without FROM): a constant.

Everything else is refused: LIMIT, OFFSET and samples (which rows stay depends on other units),
other windows, groups without the unit, set operations of private and public relations, recursion,
functions of a clock or a random source.

**Two spellings of a join** are written as the one above.  ``FROM a, b WHERE a.unit = b.unit``: an
equality of plain columns that all joined rows must pass anyway is in ON of the first inner join
that has both columns, where no later join keeps rows that it would drop.  ``a.unit IS NOT DISTINCT
FROM b.unit`` is ``=`` where neither side can be NULL.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sqlglot import exp

from dpstream.accounting.errors import instance
from dpstream.pipelines.statements.allowed import AGGREGATES, PLACED, require, unknown_column
from dpstream.pipelines.statements.dialect import Private
from dpstream.pipelines.statements.forms import is_literal, order_keys, type_of, typed_nulls
from dpstream.pipelines.tables.catalog import Table, Tables

#: A column of a scope: (name of the relation, name of the column).
Place = tuple[str, str]


#: Expressions whose value may be that of a part.
_SAME_VALUE = (
    *(exp.Paren, exp.Coalesce, exp.If, exp.Case, exp.Nullif),
    *(exp.Greatest, exp.Least, exp.Min, exp.Max, exp.AnyValue),
)


class KeyPart(NamedTuple):
    """A column that holds part of a declared key of ``table``, for the row that it was read in.

    Attributes:
        row: which use of a table of the statement the value was read from: parts of one key
            belong together only if they come from one row.
        table: the table of the key; key: the key's columns; part: the column's number in it.
    """

    row: int
    table: str
    key: tuple[str, ...]
    part: int


class Column(NamedTuple):
    """A column of a relation.

    Attributes:
        type: the type, ``None`` if it is not known; unit: whether it is the unchanged privacy unit.
        keys: the declared keys that it is part of.
        signed: whether it is text of files that declare signs of numbers, which CAST does not know.
    """

    type: exp.DType | None
    unit: bool = False
    keys: frozenset[KeyPart] = frozenset()
    signed: bool = False


class Relation(NamedTuple):
    """Columns by name, in order, and whether units own its rows."""

    columns: dict[str, Column]
    private: bool


class Scope:
    """The relations of one FROM, joined from left to right.

    Its units are kept as *covers*: sets of columns of which, in every row, at least one is the
    row's unit, while those that are not are NULL.  A column is a cover of its own unless an outer
    join can leave it empty; after a FULL JOIN only ``COALESCE`` of one column of each side is the
    unit.
    """

    def __init__(self, name: str, relation: Relation) -> None:
        self.sources = {name: relation}
        self.private = relation.private
        self.covers, self.partial = _units(name, relation)

    def joined(self, name: str, right: Relation, join: exp.Join) -> None:
        """Add a relation.

        Raises:
            DpstreamError: rows of two units could meet, or rows stay that no unit owns.
        """
        require(name not in self.sources, "duplicate-column", join.this)
        side, kind, on = join.side.upper(), join.kind.upper(), join.args.get("on")
        usual = side in ("", "LEFT", "RIGHT", "FULL") and kind in ("", "INNER", "OUTER", "CROSS")
        require(usual and not join.args.get("using"), "join-kind", join.this)
        left = dict(self.sources)
        self.sources[name] = right
        covers, partial = _units(name, right)
        if self.private and right.private:
            on = on and _without_null(on, self.covers | {frozenset((p,)) for p in partial})
            join.set("on", on)
            require(
                on is not None and self._equates(left, name, partial, on),
                "join-without-unit",
                on if on is not None else join.this,
            )
        elif self.private or right.private:
            sides = ("", "LEFT") if self.private else ("", "RIGHT")
            require(side in sides, "outer-join-public", join.this)
        require(on is not None or not side, "join-kind", join.this)
        if on is not None:
            self.check_columns(on)
            require(not on.find(exp.AggFunc), "aggregate-place", on)
        self._merge(side, covers, partial, right.private)

    def _merge(
        self, side: str, covers: set[frozenset[Place]], partial: set[Place], private: bool
    ) -> None:
        self.partial |= partial
        if not self.private or (side == "RIGHT" and private):
            self.covers = covers or self.covers
        elif private and side == "FULL":
            self.covers = {one | other for one in self.covers for other in covers}
        elif private and side == "":
            self.covers |= covers
        self.private = self.private or private

    def _equates(
        self,
        left: dict[str, Relation],
        name: str,
        partial: set[Place],
        on: exp.Expr,
    ) -> bool:
        """Whether an ON condition lets only rows of one unit meet."""
        matched_parts: dict[tuple[KeyPart, KeyPart], set[int]] = {}
        for one, other in equalities(on):
            sides = [(one, other), (other, one)]
            # A column that is the unit or NULL is enough: NULL equals nothing.
            if any(_unit_columns(a, self.partial) and _unit_columns(b, partial) for a, b in sides):
                return True
            for a, b in sides:
                if isinstance(a, exp.Column) and isinstance(b, exp.Column) and b.table == name:
                    mine = left[a.table].columns[a.name].keys if _has(left, a) else frozenset()
                    theirs = (
                        self.sources[name].columns[b.name].keys
                        if _has(self.sources, b)
                        else frozenset()
                    )
                    for p, q in ((p, q) for p in mine for q in theirs if p[1:] == q[1:]):
                        pair = p._replace(part=0), q._replace(part=0)
                        matched_parts.setdefault(pair, set()).add(p.part)
        return any(len(parts) == len(p.key) for (p, _), parts in matched_parts.items())

    def is_unit(self, node: exp.Expr) -> bool:
        """Return whether an expression is the unit of every row."""
        places = _unit_columns(node, self.partial)
        return any(cover <= places for cover in self.covers)

    def unit(self) -> exp.Expr:
        """Return an expression that is the unit of every row."""
        order = {name: place for place, name in enumerate(self.sources)}
        covers = [sorted((order[t], t, c) for t, c in cover) for cover in self.covers]
        best = [(t, c) for _, t, c in min(covers, key=lambda cover: (len(cover), cover))]
        columns = [exp.column(c, table=t, quoted=True) for t, c in best]
        return (
            columns[0]
            if len(columns) == 1
            else exp.Coalesce(this=columns[0], expressions=columns[1:])
        )

    def column(self, node: exp.Column) -> Column:
        """Return the column of a node."""
        self.check_columns(node)
        return self.sources[node.table].columns[node.name]

    def check_columns(self, node: exp.Expr, windows: bool = False) -> None:
        """Check that every column is one of the scope's, and that the expression has no query and,
        unless ``windows``, no window function in it.

        Raises:
            DpstreamError: it is otherwise.
        """
        query = node.find(exp.Query, exp.Exists)
        require(query is None, "subquery-expression", query)
        window = None if windows else node.find(exp.Window)
        require(window is None, "window", window)
        for column in node.find_all(exp.Column):
            if not _has(self.sources, column):
                raise unknown_column(column, {n: each.columns for n, each in self.sources.items()})
            if self.sources[column.table].columns[column.name].signed:
                cast = _passed_on(column).parent
                number = isinstance(cast, exp.Cast) and type_of(cast) in NUMBERS
                require(not number, "number-signs", cast or column)


def _units(name: str, relation: Relation) -> tuple[set[frozenset[Place]], set[Place]]:
    places = {(name, c) for c, column in relation.columns.items() if column.unit}
    return {frozenset((place,)) for place in places}, places


def _unit_columns(node: exp.Expr, partial: set[Place]) -> frozenset[Place]:
    """The columns of an expression that is the unit or NULL; none of any other."""
    parts = [node.this, *node.expressions] if isinstance(node, exp.Coalesce) else [node]
    if not all(isinstance(part, exp.Column) for part in parts):
        return frozenset()
    places = frozenset((part.table, part.name) for part in parts)
    return places if places <= partial else frozenset()


def _has(sources: dict[str, Relation], column: exp.Column) -> bool:
    return column.table in sources and column.name in sources[column.table].columns


def _without_null(on: exp.Expr, covers: set[frozenset[Place]]) -> exp.Expr:
    """Return a condition with ``=`` for IS NOT DISTINCT FROM of columns that are the unit of every
    row, and never NULL.
    """

    def equal(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.NullSafeEQ):
            sides = [side.unnest() for side in (node.left, node.right)]
            if all(frozenset(((side.text("table"), side.name),)) in covers for side in sides):
                return exp.EQ(this=sides[0], expression=sides[1])
        return node

    return on.transform(equal, copy=False)


def conjuncts(select: exp.Select) -> list[exp.Expr]:
    """Return the conditions of WHERE, all of which must hold."""
    where = select.args.get("where")
    condition = exp.true() if where is None else where.this.unnest()
    parts = condition.flatten() if isinstance(condition, exp.And) else [condition]
    return [] if where is None else list(parts)


def set_conjuncts(select: exp.Select, parts: Sequence[exp.Expr]) -> None:
    """Give a SELECT these conditions and no others."""
    condition = exp.and_(*parts, copy=False) if parts else None
    select.set("where", condition and exp.Where(this=condition))


def _take_equalities(node: exp.Select, join: exp.Join, before: set[str]) -> None:
    """Give a join without a condition the equalities of columns that are in WHERE."""
    sides = [other.side for other in node.args["joins"][node.args["joins"].index(join) :]]
    mine, parts = join.this.alias_or_name, conjuncts(node)
    moves = [part for part in parts if _between(part, before | {mine}, mine)]
    if moves and not join.args.get("on") and not sides[0] and {*sides} <= {"", "LEFT"}:
        join.set("on", exp.and_(*moves, copy=False))
        join.set("kind", None)
        set_conjuncts(node, [part for part in parts if part not in moves])


def _between(node: exp.Expr, names: set[str], mine: str) -> bool:
    """Whether a condition is the equality of a relation's column and one of those before it."""
    sides = [side for pair in equalities(node) for side in pair]
    tables = {side.table for side in sides if isinstance(side, exp.Column)}
    columns = all(isinstance(side, exp.Column) for side in sides)
    return isinstance(node.unnest(), exp.EQ) and columns and mine in tables <= names


def equalities(on: exp.Expr) -> Iterator[tuple[exp.Expr, exp.Expr]]:
    """Yield the sides of the equalities that all must hold."""
    if isinstance(on, exp.Paren):
        yield from equalities(on.this)
    elif isinstance(on, exp.And):
        yield from equalities(on.left)
        yield from equalities(on.right)
    elif isinstance(on, exp.EQ):
        yield on.left.unnest(), on.right.unnest()


#: Types whose equal values are equal bytes, and that can be a group.
GROUPABLE = {
    exp.DType.BIGINT,
    exp.DType.DECIMAL,
    exp.DType.BOOLEAN,
    exp.DType.TEXT,
    exp.DType.VARBINARY,
    exp.DType.DATE,
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
}
#: Types that can lose duplicates: `exact` gives equal floats one form.
COMPARABLE = {*GROUPABLE, exp.DType.DOUBLE}
_AGGREGATES = tuple(AGGREGATES)
NUMBERS = (exp.DType.BIGINT, exp.DType.DOUBLE, exp.DType.DECIMAL)


class Validator:
    """One pass over a qualified tree.

    Args:
        catalog: the catalog of the tables.
        released: columns of a relation that is public because noise was added, by its name.
    """

    def __init__(
        self, catalog: Tables, released: Mapping[str, Mapping[str, exp.DType | None]] | None = None
    ) -> None:
        self.catalog, self.released = catalog, released or {}
        self._rows = itertools.count()

    def relation(self, node: exp.Expr, last: bool = False) -> Relation:
        """Return the relation of a query.

        Args:
            node: SELECT, set operation or subquery.
            last: whether it is the outermost one, on public relations, which may use LIMIT.

        Raises:
            DpstreamError: rows of it could belong to two units, or to none.
        """
        if isinstance(node, exp.Subquery):
            return self.relation(node.this, last)
        limit = node.args.get("limit") or node.args.get("offset")
        require(last or limit is None, "limit", limit)
        if not last:
            node.set("order", None)  # it changes no multiset, and could fail on a row
        if isinstance(node, exp.SetOperation):
            return self._combined(node)
        return self._selected(instance(node, exp.Select))

    def scope(self, node: exp.Select) -> Scope:
        """Return the scope of FROM, its joins and WHERE of a SELECT."""
        first = node.args.get("from_")
        if first is None:
            return Scope("", Relation({}, private=False))
        scope = Scope(first.this.alias_or_name, self._source(first.this))
        for join in node.args.get("joins") or ():
            relation = self._source(join.this)
            if scope.private and relation.private:
                _take_equalities(node, join, set(scope.sources))
            scope.joined(join.this.alias_or_name, relation, join)
        where = node.args.get("where")
        if where is not None:
            require(not where.find(*_AGGREGATES, Private), "aggregate-place", where)
            scope.check_columns(where)
        return scope

    def _source(self, node: exp.Expr) -> Relation:
        if isinstance(node, exp.Table):
            return self._table(node)
        require(isinstance(node, exp.Subquery), "lateral", node)
        return self.relation(node)

    def is_private(self, node: exp.Table) -> bool:
        """Return whether units own the rows of a table."""
        return node.name not in self.released and self.catalog.tables[node.name].unit is not None

    def _table(self, node: exp.Table) -> Relation:
        if node.name in self.released:
            columns = {n: Column(t) for n, t in self.released[node.name].items()}
            return Relation(columns, private=False)
        table = self.catalog.tables[node.name]
        row, keys = next(self._rows), dict[str, set[KeyPart]]()
        for owner, key, own in self._keyed(table):
            for part, name in enumerate(own):
                keys.setdefault(name, set()).add(KeyPart(row, owner, key, part))
        types, signed = self.catalog.types[table.name], table.reading.csv.signed
        return Relation(
            {
                name: Column(
                    types[name],
                    name in table.units,
                    frozenset(keys.get(name, ())),
                    signed and types[name] == exp.DType.TEXT,
                )
                for name in types
            },
            private=table.unit is not None,
        )

    def _keyed(self, table: Table) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Declared keys that a row holds: (whose key, its columns, the row's columns)."""
        declared = self.catalog.declared_keys
        held = [(owner, key, key) for owner, key in declared if owner == table.name]
        if table.via is not None:
            pairs = sorted((theirs, mine) for mine, theirs in table.via.on)
            key = tuple(theirs for theirs, _ in pairs)
            held.append((table.via.table, key, tuple(mine for _, mine in pairs)))
        return held

    def _selected(self, node: exp.Select) -> Relation:
        scope = self.scope(node)
        items = select_list(node)
        having, group = node.args.get("having"), node.args.get("group")
        for item in (*items.values(), *([having.this] if having is not None else ())):
            require(not item.find(Private), "dp-function-outside", item)
            scope.check_columns(item, windows=item in items.values())
        aggregated = any(aggregates_in(item) for item in items.values())
        if group is not None or having is not None or aggregated:
            self._check_groups(node, scope, items)
        for window in (w for item in items.values() for w in item.find_all(exp.Window)):
            require(not aggregated and group is None, "window", window)
            _check_window(window, scope, last=bool(self.released))
        columns = {name: _output(scope, item) for name, item in items.items()}
        if node.args.get("distinct") is not None:
            for name, column in columns.items():
                comparable = column.type in COMPARABLE or bool(self.released)
                require(comparable, "group-type", items[name])
        if scope.private:
            unit = any(column.unit for column in columns.values())
            require(unit, "unit-not-selected", node.expressions[0])
        return Relation(columns, scope.private)

    def _check_groups(self, node: exp.Select, scope: Scope, items: dict[str, exp.Expr]) -> None:
        groups = groups_of(node, scope)
        if scope.private:
            unit = any(scope.is_unit(group) for group in groups)
            require(unit, "group-without-unit", node.args.get("group") or node.expressions[0])
        having = node.args.get("having")
        for item in (*items.values(), *([having.this] if having is not None else ())):
            for aggregate in aggregates_in(item):
                _check_aggregate(aggregate)
            require(not _loose(item, groups), "aggregate-place", item)

    def _combined(self, node: exp.SetOperation) -> Relation:
        left, right = self.relation(node.left), self.relation(node.right)
        require(left.private == right.private, "set-operation-mixed", node.right)
        ones, others = list(left.columns.values()), list(right.columns.values())
        fits = [a.type for a in ones] == [b.type for b in others]
        if self.released and len(ones) == len(others):
            # Figures are numbers of one type, that of private functions not known.
            of = (*NUMBERS, exp.DType.UNKNOWN, None)
            mine, theirs = ([column.type for column in side] for side in (ones, others))
            mine = typed_nulls(node.left, mine, theirs)
            theirs = typed_nulls(node.right, theirs, mine)
            ones = [c._replace(type=kind) for c, kind in zip(ones, mine, strict=True)]
            fits = [k in of or k for k in mine] == [k in of or k for k in theirs]
        require(fits, "set-operation-columns", node.right)
        pairs = list(zip(ones, others, strict=True))
        units = [a.unit and b.unit for a, b in pairs]
        require(not left.private or any(units), "set-operation-unit", node.right)
        if not isinstance(node, exp.Union) or node.args.get("distinct"):
            for column in ones:
                comparable = column.type in COMPARABLE or bool(self.released)
                require(comparable, "group-type", node.right)
        columns = {
            name: Column(a.type, unit, signed=a.signed or b.signed)
            for name, unit, (a, b) in zip(left.columns, units, pairs, strict=True)
        }
        return Relation(columns, left.private)


def groups_of(node: exp.Select, scope: Scope) -> list[exp.Expr]:
    """Return the expressions of GROUP BY; names of the select list are replaced by their
    expressions.

    Raises:
        DpstreamError: one has a type that is no group, or is constant.
    """
    group = node.args.get("group")
    if group is None:
        return []
    named = {item.alias: item.this for item in node.expressions if isinstance(item, exp.Alias)}
    for item in list(group.expressions):
        if isinstance(item, exp.Column) and not item.table and item.name in named:
            item.replace(named[item.name].copy())
    for item in group.expressions:
        scope.check_columns(item)
        require(not item.find(*_AGGREGATES, Private), "aggregate-place", item)
        require(item.find(exp.Column), "group-constant", item)
        require(type_of(item) in GROUPABLE, "group-type", item)
    return list(group.expressions)


def select_list(node: exp.Select) -> dict[str, exp.Expr]:
    """Return the select list by name.

    Raises:
        DpstreamError: a name is there twice, or it has a star.
    """
    items: dict[str, exp.Expr] = {}
    for item in node.expressions:
        require(not isinstance(item, exp.Star), "not-supported", item)
        require(item.alias_or_name not in items, "duplicate-column", item)
        items[item.alias_or_name] = item.unalias()
    return items


def _output(scope: Scope, item: exp.Expr) -> Column:
    if isinstance(item, exp.Column):
        return scope.column(item)._replace(unit=scope.is_unit(item))
    texts = (c for c in item.find_all(exp.Column) if _passed_on(c) is item)
    signed = any(scope.column(c).signed for c in texts)
    return Column(type_of(item), scope.is_unit(item), signed=signed)


def _passed_on(node: exp.Expr) -> exp.Expr:
    """Return the largest expression around a text that may have this text as its value."""
    above = node.parent
    texts = isinstance(above, exp.Cast) and type_of(above) == exp.DType.TEXT
    if above is not None and (texts or isinstance(above, _SAME_VALUE)):
        return _passed_on(above)
    return node


def aggregates_in(node: exp.Expr) -> list[exp.Expr]:
    """Return the aggregates of an expression's rows; a window's, or a query's, are of others."""
    calls = [node] if isinstance(node, _AGGREGATES) else []
    for child in () if isinstance(node, exp.Window | exp.Query) else node.iter_expressions():
        calls += aggregates_in(child)
    return calls


def _check_window(node: exp.Window, scope: Scope, last: bool) -> None:
    """Check a window over a scope's rows, and give its order no ties but of equal rows.

    Raises:
        DpstreamError: rows of two units could meet in it, or its value has no order-free form.
    """
    parts, order, call = node.args.get("partition_by") or [], node.args.get("order"), node.this
    summed, spec = isinstance(call, exp.Sum | exp.Avg), node.args.get("spec")
    require(not scope.private or any(map(scope.is_unit, parts)), "window", node)
    require(last or all(type_of(part) in GROUPABLE for part in parts), "group-type", node)
    require(last or not summed or type_of(call.this) == exp.DType.BIGINT, "window-sum", node)
    require(order is not None or not (spec or isinstance(call, PLACED)), "window-order", node)
    if isinstance(call, _AGGREGATES):
        _check_aggregate(call)
    by_rows = spec is not None and spec.text("kind").upper() == "ROWS"
    kind, default = call.this and type_of(call.this), call.args.get("default")
    like = default is None or is_literal(default) or type_of(default) in (kind, exp.DType.NULL)
    require(default is None or (like and kind != exp.DType.DECIMAL), "window-frame", node)
    keys = list[exp.Expr]() if order is None else list(order.expressions)
    if order is not None and (isinstance(call, PLACED) or by_rows):
        for name, relation in scope.sources.items():
            for column_name, column in relation.columns.items():
                key = exp.column(column_name, table=name, quoted=True)
                key.type = column.type and exp.DataType(this=column.type)
                keys.append(exp.Ordered(this=key, nulls_first=True))
                if column.type not in GROUPABLE:
                    text = exp.Cast(this=key.copy(), to=exp.DataType(this=exp.DType.TEXT))
                    text.type = exp.DataType(this=exp.DType.TEXT)
                    keys.append(exp.Ordered(this=text, nulls_first=True))
    if order is not None and "total" not in order.meta:  # a subquery is checked where it is moved
        order.meta["total"] = True
        order.set("expressions", [key for ordered in keys for key in order_keys(ordered)])


def _check_aggregate(node: exp.Expr) -> None:
    extra = [part for part, value in node.args.items() if value and part not in ("this", "big_int")]
    counted = isinstance(node, exp.Count) or not isinstance(node.this, exp.Distinct | exp.Star)
    single = not isinstance(node.this, exp.Distinct) or len(node.this.expressions) == 1
    fits = not extra and node.this is not None and counted and single
    require(fits, "inner-aggregate", node)
    require(not node.this.find(*_AGGREGATES), "nested-aggregate", node)


def _loose(node: exp.Expr, groups: list[exp.Expr]) -> bool:
    """Whether a column stands neither in an aggregate nor in an expression grouped by."""
    if isinstance(node, _AGGREGATES) or node in groups:
        return False
    if isinstance(node, exp.Column):
        return True
    return any(_loose(child, groups) for child in node.iter_expressions())
