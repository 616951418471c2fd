"""Statements about a table whose records have budgets of their own, as questions of its points.

They are parsed and checked as all statements are (`statements.statement`); each record is a unit of
its own, whose column no statement can name.  WHERE selects points, GROUP BY gives the cells of one
batch, the functions its figures; what surrounds the private SELECT works on the released rows.

**Options**, each once:

* ``epsilon`` or ``rho``: what every point pays, or what is drawn on an allotment;
* ``allotment = 'NAME'``: of the analyst's own, which pays instead of the points;
* ``drop = TRUE``: leave out points with too little budget instead of refusing;
* ``cover = ['COLUMN']``: charge the whole range of these columns, so that regions merge;
* ``union = TRUE`` without an amount: a count or sum from answers of disjoint parts, free;
* ``sliding = 'COLUMN', width = N, until = VALUE``: the earliest window of N steps of the column,
  before the value, that has enough; ``as_of`` is the name of its tick.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.amounts import charge_of
from dpstream.accounting.regions.conditions import nonempty
from dpstream.accounting.regions.space import (
    Budget,
    BudgetKind,
    Category,
    Dimension,
    Integer,
    Timestamp,
)
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate, Cells, Question, What
from dpstream.dp_transforms.one_shot.estimates import Estimate
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.formats.receipt import sorted_rows
from dpstream.pipelines.session.ask import SessionRequest, sliding_window
from dpstream.pipelines.session.conditions import LEVELS, Reader, cells_of, instant_of, refuse
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.sql.receipt import estimated
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.errors import position, refusal
from dpstream.pipelines.statements.functions import Function, Options, integer_literal
from dpstream.pipelines.statements.statement import UNFORESEEN, Statement, statement_of
from dpstream.pipelines.tables.catalog import Table, Tables
from dpstream.state.ledger.events import RECORD

#: The column of the unit, which no statement can name.
_UNIT = "\x1frecord"
_OPTIONS = (
    *("epsilon", "rho", "allotment", "drop", "cover", "union"),
    *("sliding", "width", "until"),
)
_FIGURES: dict[str, What] = {
    "count": "count",
    "sum": "sum",
    "mean": "average",
    "quantiles": "quantiles",
}


class PointOptions(Options, frozen=True):
    """The options of a statement; see the module.

    Attributes:
        kind, amount: of the budget; the amount in millionths, 0 for a union.
        until: the node of the value.
        places: node of each option, by name.
    """

    kind: BudgetKind = "epsilon"
    amount: int = 0
    allotment: str = ""
    drop: bool = False
    cover: tuple[str, ...] = ()
    sliding: str = ""
    width: int = 0
    places: Mapping[str, exp.Expr] = {}


class PointQuestion(NamedTuple):
    """A statement, what it asks of the account, and how its answer is shown.

    Attributes:
        statement: the checked statement.
        request: the question.
        figures: by function its figure, and which of its quantiles.
        groups: by group its axis, and the values of its ranges.
        union: whether the answer is put together from others.
    """

    statement: Statement
    request: SessionRequest
    figures: dict[str, tuple[Aggregate, tuple[float, ...]]]
    groups: dict[str, tuple[int, pa.Array]]
    union: bool

    def released(self, drawn: pa.Table) -> pa.Table:
        """Return a drawn table, of the canonical question, by the statement's own names."""
        canonical = self.request.question.canonical
        names = [axis.name for axis in canonical.cells.axes]
        ranges = np.unravel_index(np.arange(canonical.cells.count), canonical.cells.shape or (1,))
        columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        for label, (axis, values) in self.groups.items():
            at = ranges[names.index(self.request.question.cells.axes[axis].name)]
            columns[label] = values.take(pa.array(at))
        by_figure = {aggregate.bare: aggregate for aggregate in canonical.aggregates}
        for function in self.statement.functions:
            bare, at_quantiles = self.figures[function.name]
            outputs = dict(zip(bare.at or (None,), by_figure[bare].outputs, strict=True))
            parts = [
                [drawn[outputs[q] + end].to_numpy() for q in at_quantiles or (None,)]
                for end in ("", "_sd", "_low", "_high")
            ]
            arrays = [np.asarray(np.stack(part, axis=1), np.float64) for part in parts]
            places = tuple(range(len(at_quantiles)))
            estimate = Estimate(*(a if places else a[:, 0] for a in arrays))
            columns |= estimated(function.name, estimate, places, function.many)
        return sorted_rows(pa.table(columns), list(self.groups))


def tables_of(
    name: str,
    dimensions: tuple[Dimension, ...],
    public: Mapping[str, Table],
    views: Mapping[str, str],
) -> Tables:
    """Return what statements about a table can name: its dimensions, and public tables.

    Raises:
        UsageError: two names differ in case only.
    """
    columns = {dimension.name.lower(): _type(dimension) for dimension in dimensions}
    if len(columns) < len(dimensions) or name.lower() in public:
        raise UsageError(f"table.{name}", "has a name twice, but for its case", "rename one")
    kinds = {dimension.kind for dimension in dimensions if isinstance(dimension, Budget)}
    levels = {level: "NUMERIC" for level, (kind, _) in LEVELS.items() if kind in kinds}
    columns = levels | columns | {_UNIT: "STRING"}
    own = Table(name.lower(), "parquet", "", columns, _UNIT, units=(_UNIT,))
    return Tables(UnitIdentity(RECORD, "string"), {**public, own.name: own}, views=views)


def _type(dimension: Dimension) -> str:
    if isinstance(dimension, Integer):
        return "INT64"
    if isinstance(dimension, Timestamp):
        return "TIMESTAMP"
    return "STRING" if isinstance(dimension, Category) else "NUMERIC"


def checked_statement(text: str, tables: Tables, allots: bool = False) -> Statement:
    """Return the statement of a text.

    Args:
        allots: it is an allotment's, which selects ``*``.

    Raises:
        DpstreamError: it is not usable, or asks what no question of points can answer.
    """
    return statement_of(text, tables, _allotment_options if allots else _options)


def question_of(
    statement: Statement, open_table: OpenTable, tables: Tables, how: Asking
) -> PointQuestion:
    """Return the question of a statement; reads public tables and the account, no record.

    Raises:
        DpstreamError: it has no meaning at points, or names an allotment that is not there.
    """
    try:
        return _question(statement, open_table, tables, how)
    except UNFORESEEN:
        raise refusal("not-supported") from None


def _question(
    statement: Statement, open_table: OpenTable, tables: Tables, how: Asking
) -> PointQuestion:
    require(not statement.parts, "one-dp-select")
    require(statement.functions, "no-function")
    options, space = instance(statement.options, PointOptions), open_table.space
    reader = Reader(space, tables, statement.source)
    try:
        selection = Selection(space, reader.selected())
        groups = [reader.grouped(group, _hull(selection)) for group in statement.groups]
    finally:
        reader.close()
    cells, values = cells_of(space, groups) if groups else (Cells(), [])
    figures = {f.name: _figure(f, open_table) for f in statement.functions}
    trees = dict[str, set[float]]()
    for figure in figures.values():
        trees.setdefault(figure.column, set()).update(figure.at)
    aggregates = {
        name: Aggregate(f.what, f.column, tuple(sorted(trees[f.column]))) if f.at else f
        for name, f in figures.items()
    }
    question = Question(
        kind=options.kind,
        amount=options.amount,
        aggregates=tuple(dict.fromkeys(aggregates.values())) or (COUNT,),
        cells=cells,
    )
    allotment = ""
    if options.allotment:
        allotment, paid = open_table.allotment(options.allotment)
        selection = selection.cut_to(paid.read)
    cover = tuple(space.dimensions[_place(open_table, name)].name for name in options.cover)
    given = (options.drop, cover, how.fresh, allotment, how.as_of)
    request = SessionRequest(question, selection, *given)
    if options.sliding:
        arrival = _place(open_table, options.sliding)
        end = _edge(space.dimensions[arrival], options.places["until"])
        request = sliding_window(open_table, request, arrival, options.width, end)
    union = "union" in options.places
    alone = (
        len(question.aggregates) == 1
        and not groups
        and question.aggregates[0].what in ("count", "sum")
    )
    if union and not (alone and not how.as_of and not how.fresh):
        at = options.places["union"]
        refuse(at, "is for one count or sum without groups, as it was answered", "leave it out")
    by_function = {name: (aggregates[name], figure.at) for name, figure in figures.items()}
    by_group = {g.name: column for g, column in zip(statement.groups, values, strict=True)}
    return PointQuestion(statement, request, by_function, by_group, union)


def _hull(selection: Selection) -> Callable[[int], tuple[int, int]]:
    """Return the function that tells in which coordinates of a dimension all points are.

    It is all of a dimension if the condition depends on consumption: what the points have spent
    must not change the question.
    """
    space = selection.space
    boxes = space.everything if selection.moves else nonempty(selection.boxes())
    return lambda place: (int(boxes[:, place, 0].min()), int(boxes[:, place, 1].max()))


def _figure(function: Function, open_table: OpenTable) -> Aggregate:
    argument, at = function.argument, function.argument or exp.null()
    what = _FIGURES.get(function.kind)
    if what is None or function.norm or function.low is not None:
        fix = "write COUNT(*), SUM, AVG, MEDIAN, APPROX_QUANTILES or PERCENTILE_CONT of a column"
        rule = "has a function, bounds or a norm that a table of points has not"
        refuse(at, f"{rule}: {function.name!r}", f"{fix}; its range is that of the points")
    if argument is None:
        return COUNT
    if what == "count":
        refuse(at, "counts values of a column", "write COUNT(*), and WHERE column IS NOT NULL")
    if not isinstance(argument, exp.Column) or argument.name not in _names(open_table):
        refuse(at, "has no bounds: it is no column of the table", "name a column of numbers")
    column = _names(open_table)[argument.name]
    return Aggregate(what, column, function.at)


def _names(open_table: OpenTable) -> dict[str, str]:
    return {d.name.lower(): d.name for d in open_table.space.dimensions}


def _place(open_table: OpenTable, name: str) -> int:
    return open_table.space.place(_names(open_table).get(name.lower(), name))


def _edge(dimension: Dimension, node: exp.Expr) -> int:
    """Return the first coordinate at or above a literal."""
    value: Any = instant_of(node) if isinstance(dimension, Timestamp) else node.name
    return dimension.edge(value)


def _options(
    node: exp.Expr, grouped: bool, normed: Collection[str], defaults: Mapping[str, float]
) -> PointOptions:
    """Return the options of a statement; see the module."""
    given: dict[str, exp.Expr] = {}
    for option in node.expressions:
        require(option.name not in given, "option-twice", option)
        if option.name not in _OPTIONS:
            raise refusal("option-unknown", position(option), option.name, _OPTIONS)
        given[option.name] = option.expression
    kinds: list[BudgetKind] = [kind for kind in ("epsilon", "rho") if kind in given]  # type: ignore[misc]
    union = "union" in given
    if len(kinds) != (not union):
        refuse(node, "needs epsilon or rho, and union neither", "write OPTIONS(epsilon = 0.1)")
    amount = 0
    for kind in kinds:
        value = given[kind]
        require(isinstance(value, exp.Literal) and not value.is_string, "epsilon", value)
        amount = charge_of(value.name, kind)
    for name in ("drop", "union"):
        value = given.get(name, exp.true())
        if not isinstance(value, exp.Boolean):
            refuse(value, f"has {name}, which is TRUE or FALSE", f"write {name} = TRUE")
    if "allotment" in given and {"drop", "cover", "sliding", "union"} & given.keys():
        rule = "has an allotment, which pays at its own points"
        refuse(given["allotment"], rule, "leave out drop, cover, sliding and union")
    sliding = {"sliding", "width", "until"} & given.keys()
    if len(sliding) not in (0, 3):
        rule = "needs sliding, width and until together"
        refuse(given[min(sliding)], rule, "write sliding = 'day', width = 7, until = '2024-01-09'")
    return PointOptions(
        epsilon=0.0,
        delta=0.0,
        groups=1,
        kind=kinds[0] if kinds else "epsilon",
        amount=amount,
        allotment=_text(given, "allotment"),
        drop=bool(given.get("drop", exp.false()).this),
        cover=_listed(given.get("cover")),
        sliding=_text(given, "sliding"),
        width=integer_literal(given.get("width"), 1, 1 << 60) or 0,
        places={name: value for name, value in given.items() if value != exp.false()},
    )


def _allotment_options(
    node: exp.Expr, grouped: bool, normed: Collection[str], defaults: Mapping[str, float]
) -> PointOptions:
    """Return the options of an allotment; a count, which is not asked, stands for its ``*``."""
    options, select = _options(node, grouped, normed, defaults), instance(node.parent, exp.Select)
    plain = [type(item) for item in select.expressions] == [exp.Star] and not grouped
    if not plain or {*options.places} - {"epsilon", "rho", "cover"}:
        rule = "is an allotment, which selects * with epsilon or rho, and perhaps cover"
        refuse(
            node, rule, "write SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.1) * FROM .."
        )
    select.set("expressions", [exp.Count(this=exp.Star(), big_int=True)])
    return options


def _text(given: Mapping[str, exp.Expr], name: str) -> str:
    value = given.get(name)
    if value is not None and not (isinstance(value, exp.Literal) and value.is_string):
        refuse(value, f"has {name}, which is a text", f"write {name} = 'NAME'")
    return "" if value is None else value.name


def _listed(node: exp.Expr | None) -> tuple[str, ...]:
    """Return the texts of a list, or of one."""
    nodes = node.expressions if isinstance(node, exp.Tuple) else [node] if node else []
    return tuple(_text({"cover": each}, "cover") for each in nodes)
