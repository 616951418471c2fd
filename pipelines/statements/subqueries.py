"""Subqueries in expressions, as the joins that mean the same.

So they need no proof of their own: `ownership` and `exact` see joins.

* ``EXISTS (SELECT .. FROM r WHERE r.a = outer.b AND c)`` is that ``b`` meets one of the distinct
  ``r.a`` of the rows of r with c: an inner join where it is a condition of WHERE, else a LEFT JOIN
  and whether it met.  Of a private r the distinct rows have their unit too.  Where `ownership`
  lets them meet, the unit or a declared key is equated, which decides the unit, so that a row still
  meets at most one.  Without an outer column it is a count of rows.
* ``x IN (SELECT y ..)`` as a condition of WHERE is EXISTS with ``y = x``.  Elsewhere, so also NOT
  IN, it is FALSE if there is no y, NULL if x is, or if one y is and none is x.  Whether there is a
  y depends on all units, so this is refused for private rows.
* ``(SELECT y ..)`` as a value is a cross join with one row that has y, or NULL if there is not
  exactly one row, which is an error in GoogleSQL.

Left as they are, and refused by `ownership`: other correlation, and subqueries in ON, in HAVING,
and beside aggregates.
"""

import itertools

from sqlglot import exp

from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.dialect import Private
from dpstream.pipelines.statements.ownership import (
    Validator,
    aggregates_in,
    conjuncts,
    equalities,
    set_conjuncts,
)

_BOOL = exp.DataType(this=exp.DType.BOOLEAN)
_COUNT = exp.DataType(this=exp.DType.BIGINT)
#: Parts of a SELECT that has the rows of its FROM and WHERE.
_PLAIN = {"expressions", "from_", "joins", "where", "distinct", "order"}


def joined(tree: exp.Expr, validator: Validator, private: exp.Select | None = None) -> None:
    """Write the subqueries in expressions as joins, in the tree.

    Args:
        tree: qualified.
        private: the private SELECT, in which only what is computed of rows is changed.

    Raises:
        DpstreamError: one has no such join.
    """
    for select in reversed(list(tree.find_all(exp.Select))):  # the innermost first
        _Joins(select, validator).write(select is private)


def _subqueries(node: exp.Expr) -> list[exp.Expr]:
    """Return the expressions with a query in a part of a SELECT, without those in them."""
    if isinstance(node, exp.Exists | exp.Query) or node.args.get("query") is not None:
        return [node]
    return [inner for child in node.iter_expressions() for inner in _subqueries(child)]


#: What a row of a SELECT meets at most once: its name, the condition, the query, and whether units
#: own its rows.
_Met = tuple[str, exp.Expr, exp.Select, bool]


class _Joins:
    """The subqueries of one SELECT."""

    def __init__(self, select: exp.Select, validator: Validator) -> None:
        self._select, self._validator = select, validator
        # Of the whole tree: a subquery may name a relation around it.
        self._names = {name.name for name in select.root().find_all(exp.Identifier)}

    def write(self, private: bool) -> None:
        """Write them as joins."""
        select, parts = self._select, conjuncts(self._select)
        others = [part for part in parts if not self._semi(part.unnest())]
        if len(others) < len(parts):
            set_conjuncts(select, others)
        group, items = select.args.get("group"), select.expressions
        grouped = private or group is not None or any(map(aggregates_in, items))
        for node in (n for part in (*conjuncts(select), *items) for n in _subqueries(part)):
            call = node.find_ancestor(exp.AggFunc, Private, exp.Where, exp.Select)
            if not isinstance(call, exp.Select) or not grouped:
                node.replace(self._value(node))

    def _semi(self, node: exp.Expr) -> bool:
        """Join what a condition of WHERE asks for, if it can be met."""
        met = self._met(node) if isinstance(node, exp.Exists | exp.In) else None
        if met is not None:
            self._join(met[2], met[0], met[1])
        return met is not None

    def _met(self, node: exp.Expr) -> _Met | None:
        """What a row meets for which EXISTS or IN is true; ``None`` if all rows meet the same."""
        query = (node.args.get("query") or node.this).unnest()
        if isinstance(node, exp.In) and node.args.get("query") is None:
            return None
        if not _is_plain(query):
            query = self._wrapped(query)
        pairs, others = _split(query)
        if isinstance(node, exp.In):
            require(len(query.expressions) == 1, "subquery-expression", node)
            pairs.append((query.expressions[0].unalias(), node.this))
        if not pairs:
            return None
        keys = [exp.alias_(mine.copy(), f"k{i}", quoted=True) for i, (mine, _) in enumerate(pairs)]
        parts = {part: query.args.get(part) for part in ("from_", "joins")}
        where = exp.Where(this=exp.and_(*others, copy=False)) if others else None
        distinct = exp.Select(expressions=keys, **parts, where=where, distinct=exp.Distinct())
        scope = self._validator.scope(distinct)
        if scope.private and not any(scope.is_unit(mine) for mine, _ in pairs):
            distinct.append("expressions", exp.alias_(scope.unit(), "unit", quoted=True))
        # A public row would be there once for each unit, not once.
        sources = [part.this for part in _sources(self._select)]
        owned = any(
            map(
                self._validator.is_private,
                exp.Tuple(expressions=sources).copy().find_all(exp.Table),
            )
        )
        require(owned or not scope.private, "subquery-expression", node)
        alias = self._alias()
        ons = [
            exp.EQ(this=_column(alias, f"k{i}", mine), expression=outer.copy())
            for i, (mine, outer) in enumerate(pairs)
        ]
        return alias, exp.and_(*ons, copy=False), distinct, scope.private

    def _value(self, node: exp.Expr) -> exp.Expr:
        """The expression that takes the place of one with a query."""
        if isinstance(node, exp.Query):
            return self._scalar(node.unnest())
        met = self._met(node)
        if met is None:
            [rows] = self._counts(node.this.unnest(), [])
            return _as(exp.GT(this=rows, expression=_number(0)), _BOOL)
        alias, on, distinct, private = met
        require(isinstance(node, exp.Exists) or not private, "subquery-expression", node)
        self._join(distinct, alias, on, "LEFT")
        key = _column(alias, "k0", distinct.expressions[0].unalias())
        matched = exp.Not(this=exp.Is(this=key, expression=exp.Null()))
        if isinstance(node, exp.Exists):
            return _as(exp.Paren(this=matched), _BOOL)
        query = self._wrapped(node.args["query"].unnest())
        rows, there = self._counts(query, [query.expressions[0].unalias()])
        cases = (
            (exp.EQ(this=rows, expression=_number(0)), exp.false()),
            (exp.Is(this=node.this.copy(), expression=exp.Null()), exp.Null()),
            (matched, exp.true()),
            (exp.LT(this=there, expression=rows.copy()), exp.Null()),
        )
        ifs = [exp.If(this=test, true=value) for test, value in cases]
        return _as(exp.Case(ifs=ifs, default=exp.false()), _BOOL)

    def _counts(self, query: exp.Query, of: list[exp.Expr]) -> list[exp.Expr]:
        """Join the number of rows of a query, and of values that are there; return their columns.

        Args:
            of: expressions over the relations of the query, which then is a plain SELECT.
        """
        if not _is_plain(query) or query.args.get("distinct") is not None:
            query = self._wrapped(query)
        calls = [exp.Count(this=value) for value in (exp.Star(), *(v.copy() for v in of))]
        items = [
            exp.alias_(_as(call, _COUNT), f"n{i}", quoted=True) for i, call in enumerate(calls)
        ]
        parts = {part: query.args.get(part) for part in ("from_", "joins", "where")}
        alias = self._join(exp.Select(expressions=items, **parts).copy())
        return [_column(alias, f"n{i}", call) for i, call in enumerate(calls)]

    def _scalar(self, query: exp.Query) -> exp.Expr:
        """The column of the one row that a query has."""
        require(len(query.selects) == 1, "subquery-expression", query)
        row = self._wrapped(query)
        value = row.expressions[0].unalias()
        one = exp.EQ(this=_as(exp.Count(this=exp.Star()), _COUNT), expression=_number(1))
        case = exp.Case(ifs=[exp.If(this=one, true=_as(exp.Min(this=value), value.type))])
        row.set("expressions", [exp.alias_(_as(case, value.type), "v", quoted=True)])
        return _column(self._join(row), "v", value)

    def _wrapped(self, query: exp.Query) -> exp.Select:
        """The SELECT of a query's columns."""
        alias, items = self._alias(), [(i.alias_or_name, i.unalias()) for i in query.selects]
        columns = [
            exp.alias_(_column(alias, name, item), name, quoted=True) for name, item in items
        ]
        return exp.Select(expressions=columns, from_=exp.From(this=_named(query.copy(), alias)))

    def _join(
        self, query: exp.Select, alias: str = "", on: exp.Expr | None = None, side: str = ""
    ) -> str:
        """Join a relation and return its name; without a condition, each row meets all of it."""
        private = any(map(self._validator.is_private, query.find_all(exp.Table)))
        require(on is not None or not private, "subquery-expression", query)
        table = _named(query, alias or self._alias())
        if self._select.args.get("from_") is None and on is None:
            self._select.set("from_", exp.From(this=table))
        else:
            kind = "CROSS" if on is None else None
            self._select.append("joins", exp.Join(this=table, on=on, side=side or None, kind=kind))
        return str(table.alias)

    def _alias(self) -> str:
        alias = next(f"s{i}_" for i in range(len(self._names) + 1) if f"s{i}_" not in self._names)
        self._names.add(alias)
        return alias


def _sources(select: exp.Select) -> list[exp.Expr]:
    """Return FROM and the joins of a SELECT."""
    parts = (select.args.get("from_"), *(select.args.get("joins") or ()))
    return [part for part in parts if part is not None]


def _is_plain(query: exp.Expr) -> bool:
    """Whether a query has the rows of its FROM and WHERE, and nothing computed of several."""
    parts = {part for part, value in query.args.items() if value}
    computed = any(item.find(exp.AggFunc, exp.Window) for item in query.selects)
    return isinstance(query, exp.Select) and parts <= _PLAIN and "from_" in parts and not computed


def _split(query: exp.Select) -> tuple[list[tuple[exp.Expr, exp.Expr]], list[exp.Expr]]:
    """Return the equalities with outer expressions, the inner side first, and the other conditions.

    Raises:
        DpstreamError: another condition has an outer column.
    """
    own = {part.this.alias_or_name for part in _sources(query)}
    pairs, others = list[tuple[exp.Expr, exp.Expr]](), list[exp.Expr]()
    for part in conjuncts(query):
        if {column.table for column in part.find_all(exp.Column)} <= own:
            others.append(part.copy())
            continue
        sides = [side.unnest() for pair in equalities(part) for side in pair]
        fitting = [
            (mine, outer)
            for mine, outer in itertools.permutations(sides, 2)
            if isinstance(mine, exp.Column)
            and mine.table in own
            and own.isdisjoint(column.table for column in outer.find_all(exp.Column))
        ]
        require(len(fitting) == 1, "subquery-expression", part)
        pairs += fitting
    return pairs, others


def _named(query: exp.Query, alias: str) -> exp.Subquery:
    name = exp.to_identifier(alias, quoted=True)
    return exp.Subquery(this=query, alias=exp.TableAlias(this=name))


def _number(value: int) -> exp.Expr:
    return _as(exp.Literal.number(value), _COUNT)


def _as(node: exp.Expr, kind: exp.DataType | None) -> exp.Expr:
    node.type = kind
    return node


def _column(table: str, name: str, like: exp.Expr) -> exp.Expr:
    """A column that has an expression's values."""
    return _as(exp.column(name, table=table, quoted=True), like.type)
