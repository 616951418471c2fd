"""What is known of a relation: its columns, which of them are the unit, and whether it is private.

A *scope* is what the joins of one FROM have put together so far.  Its units are kept as *covers*:
sets of columns of which, in every row, at least one is the row's unit, while those that are not
are NULL.  A column is a cover of its own unless an outer join can leave it empty; after a FULL
JOIN only ``COALESCE`` of one column of each side is the unit.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sqlglot import exp

from dpstream.pipelines.statements.allowed import require

#: A column of a scope: (name of the relation, name of the column).
Place = tuple[str, str]


class KeyPart(NamedTuple):
    """A column that holds part of a declared key of ``table``, for the row that it was read in.

    Attributes:
        row: which use of a table of the statement the value was read from: parts of one key
            belong together only if they come from one row.
        table: whose key; key: its columns; part: which of them.
    """

    row: int
    table: str
    key: tuple[str, ...]
    part: int


class Column(NamedTuple):
    """A column of a relation.

    Attributes:
        type: as far as it is known; unit: whether it is the privacy unit, unchanged.
        keys: the declared keys that it is part of.
    """

    type: exp.DType | None
    unit: bool = False
    keys: frozenset[KeyPart] = frozenset()


class Relation(NamedTuple):
    """Columns by name, in order, and whether units own its rows."""

    columns: dict[str, Column]
    private: bool


class Scope:
    """The relations of one FROM, joined from left to right."""

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
        require(side in ("", "LEFT", "RIGHT", "FULL"), "join-kind", join.this)
        require(kind in ("", "INNER", "OUTER", "CROSS"), "join-kind", join.this)
        require(not join.args.get("using"), "join-kind", join.this)
        left = dict(self.sources)
        self.sources[name] = right
        covers, partial = _units(name, right)
        if self.private and right.private:
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
        """Whether an expression is the unit of every row."""
        return _covered(node, self.covers, self.partial)

    def unit(self) -> exp.Expr:
        """An expression that is the unit of every row."""
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
        """What a column is."""
        require(_has(self.sources, node), "unknown-column", node)
        return self.sources[node.table].columns[node.name]

    def check_columns(self, node: exp.Expr) -> None:
        """Every column is one of the scope's.

        Raises:
            DpstreamError: one is not.
        """
        for column in node.find_all(exp.Column):
            require(_has(self.sources, column), "unknown-column", column)


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


def _covered(node: exp.Expr, covers: set[frozenset[Place]], partial: set[Place]) -> bool:
    places = _unit_columns(node, partial)
    return any(cover <= places for cover in covers)


def _has(sources: dict[str, Relation], column: exp.Column) -> bool:
    return column.table in sources and column.name in sources[column.table].columns


def equalities(on: exp.Expr) -> Iterator[tuple[exp.Expr, exp.Expr]]:
    """The sides of the equalities that all must hold."""
    if isinstance(on, exp.Paren):
        yield from equalities(on.this)
    elif isinstance(on, exp.And):
        yield from equalities(on.left)
        yield from equalities(on.right)
    elif isinstance(on, exp.EQ):
        yield on.left.unnest(), on.right.unnest()
