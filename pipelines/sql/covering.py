"""What stored answers tell about a statement: the same figures, and what can be computed from them.

**The same figures** (`StatementIdentity.covers`) are given at no charge.  Rows (relation, unit, its
files, look-ups, ``as_of``), groups, limits of groups and rows, the rule that selects groups,
functions and their bounds are those of the statement, and the plan alone says that each interval is
no wider and each threshold no higher, in the family of noise that the account would choose now.  So
epsilon, delta, mechanism, names, order and further functions may differ.

**Listed groups** may be fewer: a unit adds to at most k groups, so that a figure is the same among
fewer groups only if k is at least the number of stored groups and no unit was cut.

**Other figures** (`offers`) are never given as the answer; a plan offers them as statements about
the stored answer.  A sum of released groups differs from the figure that was asked: a unit was cut
to k of the finer groups, groups below the threshold are missing, and noise adds up.

The decision reads the account, public tables and the statement.  A stored answer names the text of
its private SELECT, which is planned again: it counts only if that has the digest that was charged.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.families import outlook
from dpstream.accounting.query.grids import Gridded
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.sql.query_plan import Question, named_tables, question_of, tables_read
from dpstream.pipelines.sql.receipt import MARK, PARTS, Header, read
from dpstream.pipelines.sql.work import typed_public
from dpstream.pipelines.statements.canonical import function_text, group_text, sql
from dpstream.pipelines.statements.functions import Function
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine, contents_of
from dpstream.pipelines.tables.files import place_of
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History

#: Relative slack of two intervals that are computed in different ways.
_SLACK = 1e-9


class StatementIdentity:
    """What identifies a statement, and which stored answers have its figures.

    Args:
        account: the charges by which a family of noise would be chosen now; ``None``: it is that
            of ``question``.
    """

    def __init__(
        self, question: Question, catalog: Catalog, account: Callable[[], History] | None = None
    ) -> None:
        self._question, self._catalog, self._account = question, catalog, account

    @functools.cached_property
    def inputs(self) -> Sequence[bytes]:
        """Places and contents of the tables that are read before the noise."""
        catalog = self._catalog
        names = sorted(tables_read(self._question.select, catalog))
        tables = [catalog.tables[name] for name in names]
        places = [place_of(table, catalog.folder) for table in tables if table.unit is not None]
        public = (table.name for table in tables if table.unit is None)
        return [*places, *(part for name in public for part in contents_of(catalog, name))]

    @property
    def identity(self) -> Sequence[bytes]:
        """The question, and its inputs; see `ask.question.Question`."""
        return [self._question.digest.encode(), *self.inputs]

    @functools.cached_property
    def families(self) -> Sequence[Sequence[bytes]]:
        """Rows and groups, then rows alone; see `ask.question.Covering`."""
        select = self._question.select
        tables = self._catalog.digest(tables_read(select, self._catalog))
        texts = sql(_unlisted(self._question)), sql(select.unit), tables
        rows = [msgspec.json.encode(texts), *self.inputs]
        groups = [group_text(group) for group in select.groups]
        shape = msgspec.json.encode((groups, select.public is None))
        return [[*rows, shape], rows]

    def covers(self, charge: Charge, receipt: bytes) -> bool:
        """Return whether an answer has the same figures at no wider an interval."""
        stored, question = stored_question(receipt, self._catalog, charge), self._question
        if stored is None:
            return False
        if self._account is not None:
            room = room_of(self._account(), self._catalog.unit)
            question = question.taking(question.families.taken(room))
        return _covers(stored, question, self._catalog, receipt)


def stored_question(
    receipt: bytes, catalog: Catalog, charge: Charge | None = None
) -> Question | None:
    """Return the question of a stored answer, in the family that was charged.

    Args:
        charge: of the answer; ``None``: the family is not needed.

    Returns:
        The question; ``None`` if the statement, or a declaration that it uses, has changed.
    """
    header, _ = read(receipt)
    try:
        question = question_of(header.statement, catalog)
    except DpstreamError:  # a table or a column is no longer declared
        return None
    if question.digest != header.plan_hash:
        return None
    return question if charge is None else question.taking(question.families.of(charge.mu))


def _covers(stored: Question, question: Question, catalog: Catalog, receipt: bytes) -> bool:
    functions = _functions(stored, question)
    if _rules(stored) != _rules(question) or functions is None:
        return False
    least, low = _noise(stored.gridded)
    most, high = _noise(question.gridded)
    columns = ((_column(stored, mine), _column(question, name)) for name, mine in functions.items())
    exact = all(least[mine].within(most[name]) for mine, name in columns)
    if not exact or not all(map(_no_higher, low, high)):
        return False
    return question.select.public is None or _lists(question, stored, catalog, receipt)


def _rules(question: Question) -> tuple[object, ...]:
    """Return what selects rows and groups, besides the relation."""
    options = question.select.options
    rules = options.groups, options.rows, options.norm, options.selection, options.min_units
    return *rules, [group_text(group) for group in question.select.groups]


def _functions(stored: Question, question: Question) -> dict[str, str] | None:
    """Return the stored function of each asked one; ``None`` if one is not stored."""
    by_text = {function_text(f): f.name for f in stored.select.functions}
    names = {f.name: by_text.get(function_text(f)) for f in question.select.functions}
    complete = {name: mine for name, mine in names.items() if mine is not None}
    return complete if len(complete) == len(names) else None


def _column(question: Question, function: str) -> str:
    return question.outputs[function].column


class _Noise(NamedTuple):
    """Figures of the noise of a column, and what multiplies them."""

    figures: tuple[float, ...]
    factors: tuple[object, ...]

    def within(self, other: "_Noise") -> bool:
        return self.factors == other.factors and all(map(_no_higher, self.figures, other.figures))


def _no_higher(mine: float, other: float) -> bool:
    return mine <= other * (1 + _SLACK)


@functools.lru_cache(maxsize=256)
def _noise(option: Gridded) -> tuple[dict[str, _Noise], tuple[float, ...]]:
    """Return the noise of each column by its name, and the figures of the thresholds."""
    columns, selections = outlook(option)
    noises = dict[str, _Noise]()
    for column in columns:
        figures = [part[figure] for part in column["parts"] for figure in ("sd", "within")]
        null_below = column["null_below"] or 0.0
        factors = [(part["what"], part["times"]) for part in column["parts"]]
        noises[column["name"]] = _Noise((*figures, null_below), (column["kind"], *factors))
    return noises, tuple(value for one in selections for value in one.values())


def _unlisted(question: Question) -> exp.Expr:
    """Return the private relation, with a name in place of the query that lists public groups."""
    select = question.select
    source = select.source.copy()
    if select.public is not None:
        listed = sql(select.public.args["from_"].this.this)
        for subquery in list(source.find_all(exp.Subquery)):
            if sql(subquery.this) == listed:
                subquery.replace(exp.to_table("listed_groups"))
    return source


def _lists(question: Question, stored: Question, catalog: Catalog, receipt: bytes) -> bool:
    """Return whether the listed groups are stored, and no unit was cut if they are fewer."""
    names = [group.name for group in question.select.groups]
    groups, listed = _tuples(read(receipt)[1].select(names)), _listed(question, catalog)
    if listed == groups:
        return True
    return listed < groups and len(groups) <= stored.select.options.groups


def _listed(question: Question, catalog: Catalog) -> set[tuple[Any, ...]]:
    """Return the groups that a statement lists now."""
    public = typed_public(question.select)
    with Engine(catalog, named_tables([public], catalog), ordered=True) as engine:
        return _tuples(engine.run(public))


def _tuples(table: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(*(column.to_pylist() for column in table.columns), strict=True))


def figures_for(question: Question, receipt: bytes, catalog: Catalog) -> tuple[Header, pa.Table]:
    """Return header and released rows of an answer by the names that a statement gives them.

    Args:
        receipt: of the statement's own answer, or of one that covers it.
    """
    header, rows = read(receipt)
    stored = None if header.plan_hash == question.digest else stored_question(receipt, catalog)
    functions = None if stored is None else _functions(stored, question)
    if stored is None or functions is None:
        return header, rows
    groups = [group.name for group in question.select.groups]
    columns = {name: rows.column(name) for name in groups}
    for name, mine in functions.items():
        marks = ("", *(f"{MARK}{part}" for part in PARTS))
        columns |= {f"{name}{mark}": rows.column(f"{mine}{mark}") for mark in marks}
    table = pa.table(columns)
    if question.select.public is not None:
        listed = _listed(question, catalog)
        keys = zip(*(columns[name].to_pylist() for name in groups), strict=True)
        table = table.filter(pa.array([group in listed for group in keys]))
    names = {_column(stored, mine): _column(question, name) for name, mine in functions.items()}
    return header.renamed(names), table


class Offer(NamedTuple):
    """A statement about a stored answer, which costs nothing and is another figure than was asked.

    Attributes:
        run_id, answered: of the stored answer.
        differs: why its figures differ from those that were asked.
        statement: what to ask.
    """

    run_id: str
    answered: str
    differs: str
    statement: str


def offers(
    question: Question, catalog: Catalog, answers: Sequence[tuple[Charge, bytes]]
) -> Iterator[Offer]:
    """Yield statements that compute figures like those of a question from stored answers.

    Args:
        answers: of the question's second family, which have its rows.
    """
    for charge, receipt in answers:
        stored = stored_question(receipt, catalog, charge)
        statement = None if stored is None else _computed(question, stored)
        if stored is not None and statement is not None:
            header, _ = read(receipt)
            yield Offer(charge.run_id, header.answered, _difference(question, stored), statement)


def _difference(question: Question, stored: Question) -> str:
    finer = len(stored.select.groups) > len(question.select.groups)
    options, parts = stored.select.options, list[str]()
    if finer:
        parts.append(f"a unit adds to at most {options.groups} of the finer groups")
        if options.selection == "thresholds":
            parts.append("groups below the threshold are missing")
    if any(f.kind == "mean" for f in question.select.functions):
        parts.append("a mean is a released sum over a released count")
    return "; ".join(parts)


def _computed(question: Question, stored: Question) -> str | None:
    """Return the statement that computes a question's columns from a stored answer.

    Returns:
        The text; ``None`` if a group or a function has no source there, or rows of it are cut off.
    """
    outer, texts = stored.statement.outer, {}
    if any(outer.args.get(part) for part in ("where", "limit", "offset")):
        return None
    columns = {i.this.name: i.alias for i in outer.selects if isinstance(i.this, exp.Column)}
    for label, part in stored.names.items():
        if label in columns:
            texts[part] = columns[label]
    groups = {group_text(g): texts.get(g.name) for g in stored.select.groups}
    wanted = {group_text(g): g.name for g in question.select.groups}
    figures = {_figure(f): texts.get(f.name) for f in stored.select.functions}
    finer = len(groups) > len(wanted)
    labels = {part: label for label, part in question.names.items()}
    items, by = list[str](), list[str]()
    for text, name in wanted.items():
        if (group := groups.get(text)) is None:
            return None
        items.append(f"{_quoted(group)} AS {_quoted(labels[name])}")
        by.append(_quoted(group))
    for function in question.select.functions:
        value = _value(function, figures, finer)
        if value is None:
            return None
        items.append(f"{value} AS {_quoted(labels[function.name])}")
    only_the_same = not finer and all(f.kind != "mean" for f in question.select.functions)
    if only_the_same or not question.select.functions:
        return None
    grouped = f" GROUP BY {', '.join(by)}" if finer and by else ""
    return f"SELECT {', '.join(items)} FROM ({stored.statement.text}){grouped}"


def _figure(function: Function) -> tuple[str, str | None]:
    return function.kind, sql(function.argument)


def _value(
    function: Function, figures: dict[tuple[str, str | None], str | None], finer: bool
) -> str | None:
    """Return a function over the columns of a stored answer; ``None`` if it has no source there."""
    argument = sql(function.argument)
    kinds = {"count": ["count"], "sum": ["sum"], "mean": ["sum", "count"]}.get(function.kind)
    sources = [figures.get((kind, argument)) for kind in kinds or ()]
    if kinds is None or None in sources:
        return None
    names = [_quoted(name) for name in sources if name is not None]
    values = [f"SUM({name})" for name in names] if finer else names
    return " / ".join(values)


def _quoted(name: str) -> str:
    return sql(exp.to_identifier(name, quoted=True)) or name
