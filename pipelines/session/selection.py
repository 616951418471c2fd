"""The selection of a query, as boxes: predicates, perhaps limited to fixed boxes.

A predicate is SQL over the dimensions of a table and over what points have spent.

    hour >= 6 AND hour < 10 AND vendor IN ('CMT', 'VTS') AND remaining_epsilon >= 0.1

* Columns are the table's dimensions; a record's value that is missing (null, or outside of its
  range) is NULL, in a dimension that has a place for it.
* ``consumed_epsilon`` and ``consumed_rho`` are what a point has spent, ``remaining_epsilon`` and
  ``remaining_rho`` what it has left of its initial budget: 0 where nothing is left.  They are
  resolved when the query is charged.  (A dimension of such a name is written in quotes.)
* ``=``, ``<>``, ``<``, ``<=``, ``>``, ``>=`` with a literal, BETWEEN, IN (list), IS [NOT] NULL,
  AND, OR, NOT, TRUE, FALSE, NULL.  Anything else is refused, comments too.
* Instants are texts of RFC 3339 (without an offset: UTC) or dates, perhaps after TIMESTAMP or DATE.

A point is in a box if and only if the predicate is TRUE there, as SQL has it: a comparison with a
missing value is neither true nor false, nor is its negation.  Negation is moved into comparisons
(NOT (a AND b) is NOT a OR NOT b in three-valued logic too), so that only what is true is computed.

After each charge a predicate on consumption selects other points.  It is resolved in the
transaction that charges (`Selection.boxes`), so that no other charge comes between.
"""

import dataclasses
import functools
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NamedTuple, NoReturn

import numpy as np
from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, closest
from dpstream.accounting.limits import MAX_QUERY_BOXES
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken
from dpstream.accounting.regions.space import BudgetKind, Category, Dimension, Space, Timestamp
from dpstream.pipelines.project.text import instant_micros
from dpstream.pipelines.session.conditions import (
    FAR,
    NEGATED,
    TURNED,
    AllOf,
    AnyOf,
    Condition,
    Level,
    Ranges,
    Value,
    Views,
    Within,
    amounts_at,
    apart,
    boxes_where,
    canonical,
    joined,
    kinds_in,
    too_many,
    true_at,
)
from dpstream.pipelines.statements.errors import position
from dpstream.pipelines.statements.forms import SIGNS

#: Characters and tokens of a predicate, how deep it may be nested, and characters of a number.
MAX_CHARACTERS, MAX_TOKENS, MAX_DEPTH, MAX_DIGITS = 200_000, 20_000, 50, 60
#: Not that of a database: what a predicate is made of is the same in all, and loads faster.
_DIALECT = Dialect()
_LEVELS: dict[str, tuple[BudgetKind, bool]] = {
    "consumed_epsilon": ("epsilon", False),
    "consumed_rho": ("rho", False),
    "remaining_epsilon": ("epsilon", True),
    "remaining_rho": ("rho", True),
}
_TIME_TYPES = {exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ, exp.DType.TIMESTAMPNTZ, exp.DType.DATE}
_OPEN = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE, TokenType.CASE)
_CLOSE = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE, TokenType.END)
_NESTING = (TokenType.NOT, TokenType.DASH, TokenType.TILDE, TokenType.PLUS)
#: Words that each node of a predicate is written with, beside those of its parts.
_WORDS: dict[type[exp.Expr], int] = {
    exp.And: 1,
    exp.Or: 1,
    exp.Not: 1,
    exp.Paren: 2,
    exp.Is: 1,
    exp.Between: 2,
    exp.In: 2,
    exp.Neg: 1,
    exp.Cast: 1,
    exp.Literal: 1,
    exp.Null: 1,
    exp.Boolean: 1,
    exp.Column: 1,
    **dict.fromkeys(SIGNS, 1),
}
_NO_PREDICATE = "is no predicate"
_COMPARE = "compare a dimension, or consumed_epsilon, with a literal; join by AND, OR, NOT"


class Predicate(NamedTuple):
    """A checked predicate.

    Attributes:
        space: of the points.
        condition: where the predicate is true.
        characters, words: of its text.
        depth: how deep its text is nested.
    """

    space: Space
    condition: Condition
    characters: int = 0
    words: int = 0
    depth: int = 0

    def both(self, other: "Predicate") -> "Predicate":
        """Return the parsed form of ``(THIS) AND (OTHER)``, without parsing either again.

        Raises:
            UsageError: the combined predicate is too large.
        """
        predicate = Predicate(
            self.space,
            AllOf((self.condition, other.condition)),
            self.characters + other.characters + len("() AND ()"),
            self.words + other.words + 5,
            max(self.depth, other.depth) + 1,
        )
        most = MAX_CHARACTERS, MAX_TOKENS, MAX_DEPTH
        if any(a > b for a, b in zip(predicate[2:], most, strict=True)):
            raise _too_large()
        return predicate

    @property
    def kinds(self) -> frozenset[BudgetKind]:
        """The kinds of budget whose consumption the predicate depends on."""
        return kinds_in(self.condition)

    def boxes(self, views: Views | None = None) -> Int64:
        """Return (m, d, 2) the points where it is true, as disjoint boxes; perhaps none.

        Args:
            views: required if the predicate has ``kinds``.

        Raises:
            UsageError: it needs more boxes than one query may have.
        """
        boxes = boxes_where(self.condition, self.space, views)
        if len(boxes) > limits.MAX_QUERY_BOXES:
            raise too_many()
        return boxes


def predicate_of(text: str, space: Space) -> Predicate:
    """Parse a predicate; an empty text is true everywhere.

    Raises:
        UsageError: the text is not a predicate; the error shows where and what to write, never a
            value.
    """
    if len(text) > MAX_CHARACTERS:
        raise _too_large()
    if not text.strip():
        return Predicate(space, AllOf(()))
    try:
        tree, words, depth = _tree(text)
        condition = _Reader(space).condition(tree, True)
        if _words(tree) != words:
            _refuse(tree, _NO_PREDICATE, _COMPARE)
    except SqlglotError as error:
        details = (getattr(error, "errors", None) or [{}])[0]
        raise _error(
            details.get("line") or 1, details.get("col") or 1, _NO_PREDICATE, _COMPARE
        ) from None
    except RecursionError:
        raise _too_large() from None
    except (AttributeError, TypeError, ValueError, LookupError, AssertionError, ArithmeticError):
        # The parser met something that it does not expect: it never passes on what.
        raise _error(1, 1, _NO_PREDICATE, _COMPARE) from None
    return Predicate(space, condition, len(text), words, depth)


def _tree(text: str) -> tuple[exp.Expr, int, int]:
    """Return the tree of a text, its number of words, and how deep its brackets are nested."""
    tokens = _DIALECT.tokenize(text)
    depth = deepest = 0
    for token in tokens:
        depth += (token.token_type in _OPEN) - (token.token_type in _CLOSE)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise _too_large()
    nested = sum(token.token_type in _NESTING for token in tokens)
    if len(tokens) > MAX_TOKENS or (nested > MAX_DEPTH and _longest(tokens) > MAX_DEPTH):
        raise _too_large()
    for token in tokens:
        if token.comments or token.text in ("!", ";"):
            raise _error(token.line, token.col, _NO_PREDICATE, _COMPARE)
    trees = _DIALECT.parser().parse(tokens, text)
    if len(trees) != 1 or trees[0] is None:
        raise _error(1, 1, _NO_PREDICATE, _COMPARE)
    return trees[0], len(tokens), deepest


def _words(tree: exp.Expr) -> int:
    """How many words a predicate is written with: the parser overlooks some, and adds others."""
    lists = sum(len(node.expressions) for node in tree.find_all(exp.In))
    return lists + sum(_WORDS.get(type(node), 0) for node in tree.walk())


def _longest(tokens: list) -> int:  # type: ignore[type-arg]
    """Return the largest number of NOTs and signs in a row."""
    longest = run = 0
    for token in tokens:
        run = run + 1 if token.token_type in _NESTING else 0
        longest = max(longest, run)
    return longest


class _Reader:
    """Reads the tree of a predicate over a space."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._names = {d.name: place for place, d in enumerate(space.dimensions)}
        folded: dict[str, list[int]] = {}
        for name, place in self._names.items():
            folded.setdefault(name.lower(), []).append(place)
        self._folded = {name: at[0] for name, at in folded.items() if len(at) == 1}

    def condition(self, node: exp.Expr, true: bool) -> Condition:
        """Return where a node is true, or where it is false."""
        while isinstance(node, exp.Paren | exp.Not):
            true ^= isinstance(node, exp.Not)
            node = node.this
        if isinstance(node, exp.And | exp.Or):
            parts = tuple(self.condition(part, true) for part in _flat(node))
            return AllOf(parts) if isinstance(node, exp.And) == true else AnyOf(parts)
        if isinstance(node, exp.Boolean):
            return AllOf(()) if bool(node.this) == true else AnyOf(())
        if isinstance(node, exp.Null):
            return AnyOf(())
        if isinstance(node, exp.Between) and not _has_other_parts(node, "this", "low", "high"):
            at_least = self._compared(node.this, ">=", node.args["low"], node, true)
            at_most = self._compared(node.this, "<=", node.args["high"], node, true)
            return (AllOf if true else AnyOf)((at_least, at_most))
        if isinstance(node, exp.In) and not _has_other_parts(node, "this", "expressions"):
            return self._listed(node, true)
        if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
            return self._missing(_column(node.this, node), true)
        if type(node) in SIGNS:
            sign, one, other = SIGNS[type(node)], node.this, node.expression
            if not isinstance(_bare(one), exp.Column):
                sign, one, other = TURNED[sign], other, one
            return self._compared(one, sign, other, node, true)
        _refuse(node, _NO_PREDICATE, _COMPARE)

    def _compared(
        self, one: exp.Expr, sign: str, other: exp.Expr, node: exp.Expr, true: bool
    ) -> Condition:
        column, other = _column(one, node), _bare(other)
        sign = sign if true else NEGATED[sign]
        level = self._level(column)
        if level is not None:
            if isinstance(other, exp.Null):
                return AnyOf(())
            return Level(*level, amounts_at(sign, _number(other)))
        place = self._place(column)
        if isinstance(other, exp.Null):
            return AnyOf(())
        return Within(place, self._true(place, sign, other))

    def _listed(self, node: exp.In, true: bool) -> Condition:
        column = _column(node.this, node)
        values = [_bare(value) for value in node.expressions]
        if not values:
            _refuse(node, "has an empty list", "list at least one value")
        given = [value for value in values if not isinstance(value, exp.Null)]
        level = self._level(column)
        place = -1 if level is not None else self._place(column)
        if level is not None:
            ranges = joined([amounts_at("=", _number(value)) for value in given])
            low, high = -FAR, FAR
        else:
            ranges = joined([self._true(place, "=", value) for value in given])
            low, high = 0, self._space.dimensions[place].values
        if not true and len(given) < len(values):
            return AnyOf(())  # x NOT IN (..., NULL) is never true
        ranges = ranges if true else apart(ranges, low, high)
        return Within(place, ranges) if level is None else Level(*level, ranges)

    def _missing(self, column: exp.Column, true: bool) -> Condition:
        """Return the condition of IS NULL; what was spent is never missing."""
        if self._level(column) is not None:
            return AnyOf(()) if true else AllOf(())
        place = self._place(column)
        dimension = self._space.dimensions[place]
        return Within(
            place, ((dimension.values, dimension.size),) if true else ((0, dimension.values),)
        )

    def _level(self, column: exp.Column) -> tuple[BudgetKind, bool] | None:
        if column.this.args.get("quoted"):
            return None
        level = _LEVELS.get(column.name.lower())
        if level is not None:
            try:
                self._space.budget_place(level[0])
            except UsageError as error:
                _refuse(column, f"budget {error.rule}", error.fix)
        return level

    def _place(self, column: exp.Column) -> int:
        place = self._names.get(column.name, self._folded.get(column.name.lower()))
        if place is None:
            name = "" if column.this.args.get("quoted") else column.name  # "Ann" may be a value
            rule = f"names no dimension of the table{f': {name!r}' if name else ''}"
            _refuse(column, rule, closest(name, self._names))
        return place

    def _true(self, place: int, sign: str, node: exp.Expr) -> Ranges:
        dimension = self._space.dimensions[place]
        value = _value(dimension, node)
        try:
            return true_at(dimension, sign, value)
        except UsageError as error:
            _refuse(node, f"{error.field} {error.rule}", error.fix)


def _flat(node: exp.Expr) -> list[exp.Expr]:
    """The parts of a chain of ANDs, or of ORs, however long."""
    parts, left = list[exp.Expr](), [node]
    while left:
        part = left.pop()
        if type(part) is type(node):
            left += [part.expression, part.this]
        else:
            parts.append(part)
    return parts


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _column(node: exp.Expr, around: exp.Expr) -> exp.Column:
    """Return the column that is compared; it must have no table's name before it."""
    node = _bare(node)
    if not isinstance(node, exp.Column) or _has_other_parts(node, "this"):
        _refuse(around, "compares something else than a dimension with a literal", _COMPARE)
    return node


def _has_other_parts(node: exp.Expr, *part_names: str) -> bool:
    """Return whether a node has other parts than these."""
    return any(value for part, value in node.args.items() if part not in part_names)


def _value(dimension: Dimension, node: exp.Expr) -> Value:
    """A literal as a value of a dimension."""
    if isinstance(dimension, Timestamp):
        text = node.this if isinstance(node, exp.Cast) and node.to.this in _TIME_TYPES else node
        if not isinstance(text, exp.Literal) or not text.is_string:
            _refuse(node, "is no instant", "write '2024-01-01T00:00:00Z'")
        return _instant(text)
    if isinstance(dimension, Category):
        if not isinstance(node, exp.Literal) or not node.is_string:
            _refuse(node, "is no text", "write one of the listed codes in single quotes")
        return str(node.this)
    return _number(node)


def _number(node: exp.Expr) -> Fraction:
    """A number as the decimal that it is written as."""
    sign = 1
    while isinstance(node, exp.Neg | exp.Paren):
        sign = -sign if isinstance(node, exp.Neg) else sign
        node = node.this
    if isinstance(node, exp.Literal) and not node.is_string and len(node.this) <= MAX_DIGITS:
        try:
            number = Decimal(node.this)
            if number.is_finite() and abs(number.adjusted()) <= MAX_DIGITS:
                return sign * Fraction(number)
        except InvalidOperation:
            pass
    _refuse(node, "is no number, or one of too many digits", "write a number such as 0.1")


def _instant(node: exp.Literal) -> int:
    text = str(node.this).strip()
    for more in ("", "Z", "T00:00:00Z"):
        try:
            return instant_micros("where", text + more)
        except UsageError:
            continue
    _refuse(node, "is no instant", "write '2024-01-01T00:00:00Z'")


def _refuse(node: exp.Expr, rule: str, fix: str) -> NoReturn:
    raise _error(*position(node), rule, fix)


def _error(line: int, column: int, rule: str, fix: str) -> UsageError:
    return UsageError(f"where, line {line}, column {column}", rule, fix)


def _too_large() -> UsageError:
    return UsageError(
        "where",
        f"is longer than {MAX_CHARACTERS:,} characters or {MAX_TOKENS:,} words, or nested deeper "
        f"than {MAX_DEPTH}",
        "divide it into several queries",
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A part of a space.

    Attributes:
        space: the space of the points.
        text: a predicate; empty for all points.
        fixed: (m, d, 2) disjoint boxes that limit the selection; ``None``: the whole space.
        parsed: the parsed text; ``None``: it is not parsed yet.
    """

    space: Space
    text: str = ""
    fixed: Int64 | None = None
    parsed: Predicate | None = None

    def where(self, text: str) -> "Selection":
        """Return the part in which a predicate is true as well.

        Raises:
            UsageError: the text is not a predicate.
        """
        predicate = predicate_of(text, self.space)  # by itself: not half of a bracket
        if not text.strip():
            return self
        if self.text:
            text = f"({self.text}) AND ({text})"
            predicate = self.predicate.both(predicate)
        return dataclasses.replace(self, text=text, parsed=predicate)

    def cut_to(self, boxes: Int64) -> "Selection":
        """Return the part that lies in some fixed boxes."""
        fixed = boxes if self.fixed is None else common(self.fixed, boxes)
        return dataclasses.replace(self, fixed=fixed)

    def boxes(self, views: Views | None = None) -> Int64:
        """Return (m, d, 2) the points as disjoint boxes, perhaps none.

        Args:
            views: required if the predicate depends on consumption.
        """
        return self._boxes(views) if self.moves else self._still

    def _boxes(self, views: Views | None) -> Int64:
        boxes = self.predicate.boxes(views)
        return boxes if self.fixed is None else common(boxes, self.fixed)

    @functools.cached_property
    def predicate(self) -> Predicate:
        """The predicate, parsed."""
        return predicate_of(self.text, self.space) if self.parsed is None else self.parsed

    @functools.cached_property
    def _still(self) -> Int64:
        """The boxes of a selection that does not depend on consumption."""
        boxes = self._boxes(None)
        boxes.setflags(write=False)
        return boxes

    @property
    def moves(self) -> bool:
        """Return whether a charge can change which points are selected."""
        return bool(self.predicate.kinds)

    @property
    def identity(self) -> bytes:
        """Bytes without anything of how the predicate is written: the boxes of its points, or what
        it compares, if it depends on consumption.
        """
        if not self.moves:
            return b"boxes " + _canonical(self.boxes())
        fixed = b"" if self.fixed is None else _canonical(self.fixed)
        return b"condition " + canonical(self.predicate.condition).encode() + b"\0" + fixed


def _canonical(boxes: Int64) -> bytes:
    """Encode boxes in order; uncompressed, because versions of zlib compress differently."""
    order = np.lexsort(boxes.reshape(len(boxes), 2 * boxes.shape[1]).T[::-1])
    return len(boxes).to_bytes(4, "little") + np.ascontiguousarray(boxes[order], "<i8").tobytes()


def common(boxes: Int64, others: Int64) -> Int64:
    """Return (k, d, 2) the points that are in boxes of both; each argument is disjoint.

    Raises:
        UsageError: the result has more boxes than one query may have.
    """
    few, many = (boxes, others) if len(boxes) <= len(others) else (others, boxes)
    parts = [cut(taken(many, at), box) for box in few if len(at := overlapped(many, box))]
    if not parts:
        return stacked([few[:0]])
    overlaps = stacked(parts)
    if len(overlaps) > MAX_QUERY_BOXES:
        raise UsageError(
            "where", f"is more than {MAX_QUERY_BOXES:,} boxes", "ask for simpler parts one by one"
        )
    return overlaps
