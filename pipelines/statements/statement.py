"""One differentially private statement, parsed, resolved and checked.

A statement has a private SELECT, or several side by side, each of which is a part with an identity
of its own.  One that groups and has no function asks which groups there
are; DISTINCT of columns is the same.  What surrounds it, and its own HAVING, ORDER BY, LIMIT and
arithmetic, work on the released columns and cost nothing: they become ``outer``, an ordinary
query over the released relation and public tables.

A stream can answer fewer statements.  It publishes releases: group columns, functions that have a
running form, and their sds.  What would be computed from an answer, or would need the whole of a
table, is refused with its place.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec
from sqlglot import exp
from sqlglot.errors import SqlglotError

from dpstream.accounting.errors import instance, required
from dpstream.accounting.fields import FieldType, KindName
from dpstream.accounting.limits import MAX_KEY_COLUMNS
from dpstream.pipelines.formats.receipt import LABELS
from dpstream.pipelines.statements.allowed import (
    AGGREGATES,
    GROUPINGS,
    inlined,
    parsed,
    qualified,
    require,
)
from dpstream.pipelines.statements.dialect import ANONYMIZED, DpSql, PrivacyOptions, Private
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.statements.forms import type_of
from dpstream.pipelines.statements.functions import (
    Function,
    Kind,
    Options,
    function_of,
    options_of,
    private_form,
)
from dpstream.pipelines.statements.grouping import MAX_SELECTS, set_apart
from dpstream.pipelines.statements.ownership import (
    Scope,
    Validator,
    equalities,
    groups_of,
    select_list,
)
from dpstream.pipelines.statements.subqueries import joined
from dpstream.pipelines.tables.catalog import RELEASED, Tables

# Public groups: the groups of an answer are the rows of a query over public tables.
#
# The form is GoogleSQL's: one outer join keeps ``SELECT DISTINCT`` of public columns, whose columns
# are equated with expressions of the private side and are exactly those of GROUP BY.  Any other
# public relation gets its DISTINCT; of a table the columns that are equated are taken.  A private
# row that meets no public one adds to no group, so the private relation is the inner join; groups
# that no private row meets are released too, with noise like all others.  No group is selected by
# data.


def _public_groups(
    side: exp.Subquery, validator: Validator, grouped: list[exp.Expr], core: exp.Select
) -> exp.Query:
    """The query that gives all groups, columns in the order of GROUP BY.

    Args:
        side: the public relation of the outer join.

    Raises:
        DpstreamError: it is not public, or its columns are not those of GROUP BY.
    """
    relation = validator.relation(side.this)
    require(not relation.private, "public-groups", core.args["group"])
    plain = all(isinstance(g, exp.Column) and g.table == side.alias for g in grouped)
    names = [g.name for g in grouped]
    same = plain and sorted(names) == sorted(relation.columns)
    require(same, "public-groups", core.args["group"])
    alias = exp.TableAlias(this=exp.to_identifier(side.alias, quoted=True))
    source = exp.Subquery(this=side.this.copy(), alias=alias)
    columns = [exp.column(name, table=side.alias, quoted=True) for name in names]
    return exp.Select(expressions=columns, from_=exp.From(this=source))


def public_side(core: exp.Select, validator: Validator) -> exp.Subquery:
    """Find the public side of the outer join, and make that an inner join in the tree.

    Raises:
        DpstreamError: there is none.
    """
    joins, first = core.args.get("joins") or [], core.args["from_"].this
    at = core.args["group"]
    require(joins, "public-groups", at)
    last: exp.Join = joins[-1]
    listing: exp.Expr = {"RIGHT": last.this, "LEFT": first if len(joins) == 1 else at}.get(
        last.side.upper(), at
    )
    public = not any(map(validator.is_private, listing.find_all(exp.Table)))
    require(public and isinstance(listing, exp.Subquery | exp.Table), "public-groups", at)
    require(last.args.get("on") is not None, "public-groups", at)
    public_query = _distinct(listing, last.args["on"])
    listing.replace(public_query)
    for column in list(core.find_all(exp.Coalesce)):  # USING: the listing side has the group
        parts = [column.this, *column.expressions]
        mine = [part for part in parts if part.text("table") == public_query.alias]
        if mine and all(isinstance(p, exp.Column) and p.name == mine[0].name for p in parts):
            column.replace(mine[0].copy())
    fits = isinstance(public_query.this, exp.Select)
    require(fits and public_query.this.args.get("distinct") is not None, "public-groups", at)
    _check_on(last.args["on"], public_query, at)
    # It would take groups away, not rows: it belongs into the query that lists them.
    where = core.args.get("where")
    filtered = (
        []
        if where is None
        else [c for c in where.find_all(exp.Column) if c.table == public_query.alias]
    )
    require(not filtered, "public-filter", where or at)
    last.set("side", None)
    last.set("kind", None)
    return public_query


def _distinct(listing: exp.Expr, on: exp.Expr) -> exp.Subquery:
    """Return the listing relation as a subquery with DISTINCT; of a table the columns in ON."""
    query, alias = listing.this, listing.alias_or_name
    if isinstance(listing, exp.Subquery) and isinstance(query, exp.Select):
        group, items = query.args.get("group"), [str(i.unalias()) for i in query.expressions]
        by = [] if group is None or query.args.get("having") else list(map(str, group.expressions))
        if group is not None and sorted(by) == sorted(items):
            query.set("group", None)
            query.set("distinct", exp.Distinct())
        if query.args.get("distinct") is not None:
            return listing
    mine = {c.name: c for c in on.find_all(exp.Column) if c.table == alias}
    names = list(mine) if isinstance(listing, exp.Table) else query.named_selects
    columns = [mine.get(name) or exp.column(name, table=alias, quoted=True) for name in names]
    return exp.Subquery(
        this=exp.Select(
            expressions=[exp.alias_(c.copy(), c.name, quoted=True) for c in columns],
            from_=exp.From(this=listing.copy()),
            distinct=exp.Distinct(),
        ),
        alias=exp.TableAlias(this=exp.to_identifier(alias, quoted=True)),
    )


def _check_on(on: exp.Expr, public_query: exp.Subquery, at: exp.Expr) -> None:
    """Only equalities, one for each public column: a group without rows is never a filtered one."""
    conditions = list(on.flatten()) if isinstance(on, exp.And) else [on]
    equal = [(a, b) for a, b in equalities(on)]
    require(len(conditions) == len(equal), "public-groups", at)
    named = sorted(
        side.name
        for pair in equal
        for side in pair
        if isinstance(side, exp.Column) and side.table == public_query.alias
    )
    require(
        named == sorted(item.alias_or_name for item in public_query.this.expressions),
        "public-groups",
        at,
    )


_CALLS = (*AGGREGATES, exp.AggFunc, Private)


class Group(msgspec.Struct, frozen=True):
    """A column that the answer is grouped by.

    Attributes:
        name: of the released column.
        expression: over the columns of the source.
        type: of its values; never a float.
    """

    name: str
    expression: exp.Expr
    type: exp.DType


class PrivateSelect(msgspec.Struct, frozen=True):
    """What is asked of private rows.

    Attributes:
        options: of privacy.
        source: a SELECT with FROM, joins and WHERE and no select list: the private relation.
        unit: an expression over its columns that is the unit of every row.
        groups, functions: over its columns, in the order of the select list.
        public: the query over public tables whose rows are the groups, in the order of
            ``groups``; ``None`` if groups are selected, or there are none.
    """

    options: Options
    source: exp.Select
    unit: exp.Expr
    groups: tuple[Group, ...]
    functions: tuple[Function, ...]
    public: exp.Query | None


class Statement(PrivateSelect, frozen=True):
    """The checked statement.

    Attributes:
        outer: a query over the table ``released`` (the groups' and functions' names are its
            columns) and public tables, to be run on the answer; over one such table for each part
            (`released_name`) where there are several.
        text: the private SELECT alone, without WITH and views; a statement of its own.  Empty of
            streams and points, whose answers are found otherwise.
        parts: of a statement with several private SELECTs each of them, alone; this is the first.
    """

    outer: exp.Query
    text: str
    parts: tuple["Statement", ...] = ()


#: A form that nobody foresaw has no proof, and the library's texts quote the statement.
UNFORESEEN = (
    SqlglotError,
    RecursionError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
)
#: Options of a private SELECT from its node, whether it groups, its arguments' names, and defaults.
ReadOptions = Callable[[exp.Expr, bool, Collection[str], Mapping[str, float]], Options]


def statement_of(text: str, catalog: Tables, read: ReadOptions = options_of) -> Statement:
    """Return the statement of a text.

    Args:
        read: says what the options mean, and refuses others.

    Raises:
        DpstreamError: it is not usable or not private; says where, why and what to write.
    """
    try:
        return checked(text, catalog, read)
    except UNFORESEEN:
        raise refusal("not-supported") from None


def checked(text: str, catalog: Tables, read: ReadOptions = options_of) -> Statement:
    """Return `statement_of` without its handling of this program's own errors."""
    tree, selects = _private_selects(text, catalog)
    parts = list[tuple[Options, str]]()
    for same in selects:
        private = same[0].sql(DpSql, comments=False) if read is options_of else ""
        for core in same:
            _group_distinct(core)
        core = same[0]
        arguments = {kwarg.name.lower() for kwarg in core.find_all(exp.Kwarg)}
        grouped_by = core.args.get("group") is not None
        options = read(core.args["hint"], grouped_by, arguments, catalog.defaults)
        parts.append((options, private))
        for core in same:
            core.set("hint", None)
            core.meta["private"] = len(parts)
    tree = qualified(tree, catalog.schema)
    cores = [node for node in tree.find_all(exp.Select) if node.meta.get("private")]
    statements, columns = list[Statement](), dict[str, Mapping[str, exp.DType | None]]()
    for number, (options, private) in enumerate(parts):
        core, *others = (node for node in cores if node.meta["private"] == number + 1)
        part, columns[released_name(number)] = _part(core, options, private, catalog)
        statements.append(part)
        outer = part.outer.copy()
        for table in outer.find_all(exp.Table):
            if number and table.name == RELEASED:
                table.set("this", exp.to_identifier(released_name(number), quoted=True))
        tree = outer if core is tree else tree
        for one in (core, *others) if tree is not outer else ():
            one.replace(outer.copy())
    _check_outer(tree, catalog, columns)
    _check_reports(tree, tuple(f for part in statements for f in part.functions))
    together = tuple(statements) if len(statements) > 1 else ()
    return msgspec.structs.replace(statements[0], outer=tree, parts=together)


def released_name(number: int) -> str:
    """Return the name of the relation that a private SELECT of a statement releases."""
    return RELEASED if number == 0 else f"{RELEASED} {number}"  # no table is called so


def _part(
    core: exp.Select, options: Options, private: str, catalog: Tables
) -> tuple[Statement, Mapping[str, exp.DType | None]]:
    """Return the statement of one private SELECT, and the columns that it releases."""
    require(core.args.get("from_") is not None, "from", core)
    validator = Validator(catalog)
    side = public_side(core, validator) if options.selection == "public_groups" else None
    joined(core, validator, core)
    scope = validator.scope(core)
    require(scope.private, "no-private-table", core.args["from_"])
    _check_unit(core, scope, options)
    grouped = groups_of(core, scope)
    for node in grouped:
        plain = isinstance(node, exp.Column) and (node.table, node.name) in scope.partial
        unit = plain or scope.is_unit(node)
        require(not unit, "group-by-unit", node)
    public = None if side is None else _public_groups(side, validator, grouped, core)
    selects = bool(grouped) and options.selection == "thresholds"
    released = _Released(core, grouped, scope, selects)
    functions = tuple(released.functions.values())
    _check_norms(options, functions, core)
    if options.within is not None:
        counts = {n: f for n, f in released.functions.items() if f.kind in ("count", "units")}
        require(counts, "within", core.expressions[0])
        for node, function in counts.items():
            require(function.has_fixed_noise, "within-bounds", node)
    parts = {part: core.args.get(part) for part in ("from_", "joins", "where")}
    source, outer = exp.Select(**parts).copy(), released.select(core)
    groups, unit = released.groups, scope.unit()
    part = Statement(options, source, unit, groups, functions, public, outer, private)
    return part, released.columns


def _private_selects(text: str, catalog: Tables) -> tuple[exp.Query, list[list[exp.Select]]]:
    """The tree of a text without WITH, and each private SELECT in it, as often as it is there.

    Functions that begin with ANON_ make a SELECT private without the words, if none has them.
    """
    tree = inlined(parsed(text), catalog.views)
    selects = list(tree.find_all(exp.Select))
    if all(select.args.get("hint") is None for select in selects):
        for select in selects:
            calls = (call for item in select.expressions for call in item.find_all(Private))
            if any(call.name.upper() in ANONYMIZED for call in calls):
                select.set("hint", PrivacyOptions(this=exp.var("ANONYMIZATION"), expressions=[]))
    for select in (one for one in selects if one.args.get("hint") is not None):
        plain = set_apart(select, catalog.defaults)
        if plain is not select:
            tree = plain if select is tree else tree
            select.replace(plain)
    grouping = tree.find(exp.Grouping, *GROUPINGS)
    require(grouping is None, "grouping-sets", grouping)
    selects = list(tree.find_all(exp.Select))
    dp_selects = [select for select in selects if select.args.get("hint") is not None]
    require(dp_selects, "no-dp-select")
    by_text = list[list[exp.Select]]()
    for select in dp_selects:
        within = any(
            node is not select and node in dp_selects for node in select.find_all(exp.Select)
        )
        same = next((alike for alike in by_text if alike[0] == select), None)
        require(not within and len(by_text) < MAX_SELECTS, "one-dp-select", select.args["hint"])
        if same is None:
            by_text.append([select])
        else:
            same.append(select)
    return tree, by_text


def _group_distinct(core: exp.Select) -> None:
    """Write DISTINCT of plain columns as the GROUP BY that it is."""
    distinct = core.args.get("distinct")
    if distinct is None:
        return
    columns = [item.unalias() for item in core.expressions]
    plain = all(isinstance(column, exp.Column) for column in columns)
    fits = plain and distinct.args.get("on") is None and core.args.get("group") is None
    require(fits, "not-supported", distinct)
    core.set("distinct", None)
    core.set("group", exp.Group(expressions=[column.copy() for column in columns]))


class _Released:
    """The select list of the private SELECT, taken apart."""

    def __init__(
        self, core: exp.Select, grouped: list[exp.Expr], scope: Scope, selects: bool
    ) -> None:
        self.names = set(select_list(core))
        self.functions: dict[Private, Function] = {}
        self._grouped, self._scope = grouped, scope
        self.groups = tuple(self._group(core, node) for node in grouped)
        self._labels = {group.name for group in self.groups} | self.names
        for item in core.expressions:
            is_call = isinstance(item.unalias(), _CALLS)
            self._collect(item.unalias(), item.alias if is_call else None)
        # Groups that are selected are an answer by themselves: which keys there are.
        require(self.functions or selects, "no-function", core.expressions[0])
        for part in ("having", "order"):
            if core.args.get(part) is not None:
                self._collect(core.args[part], None)

    def _group(self, core: exp.Select, node: exp.Expr) -> Group:
        named = [item.alias_or_name for item in core.expressions if item.unalias() == node]
        name = named[0] if named else node.alias_or_name or f"_group{self._grouped.index(node)}"
        if not named:
            require(name not in self.names, "duplicate-column", node)
            self.names.add(name)
        kind = type_of(node)
        return Group(name, node.copy(), required(kind, "kind is there"))

    def _collect(self, node: exp.Expr, label: str | None) -> None:
        """Every function in an expression; nothing else in it may depend on a row."""
        if node in self._grouped or isinstance(node, exp.Query):  # a query is the outer one's
            return
        require(not isinstance(node, exp.Window), "window", node)
        if isinstance(node, _CALLS):
            call = private_form(node)
            if call not in self.functions:
                self.functions[call] = function_of(node, label or self._fresh(), self._scope)
            return
        if isinstance(node, exp.Column):
            own = not node.table and node.name in self.names  # ORDER BY a name of the select list
            require(own, "not-grouped", node)
        for child in node.iter_expressions():
            self._collect(child, None)

    def _fresh(self) -> str:
        name = next(f"_f{i}" for i in range(10_000) if f"_f{i}" not in self._labels)
        self._labels.add(name)
        return name

    def _over(self, node: exp.Expr) -> exp.Expr:
        """The expression over the released columns."""
        if node in self._grouped:
            name = self.groups[self._grouped.index(node)].name
        elif isinstance(node, exp.Query):
            return node
        elif isinstance(node, _CALLS):
            name = self.functions[private_form(node)].name
        else:
            for child in list(node.iter_expressions()):
                new = self._over(child)
                if new is not child:
                    child.replace(new)
            return node
        return exp.column(name, table=RELEASED, quoted=True)

    def select(self, core: exp.Select) -> exp.Select:
        """The SELECT over the released relation that takes the private one's place."""
        items = [
            exp.alias_(self._over(item.unalias().copy()), item.alias_or_name, quoted=True)
            for item in core.expressions
        ]
        table = exp.to_table(RELEASED)
        having, order = core.args.get("having"), core.args.get("order")
        parts = {
            "expressions": items,
            "from_": exp.From(this=exp.alias_(table, RELEASED, table=True, quoted=True)),
            "where": having and exp.Where(this=self._over(having.this.copy())),
            "order": order and self._over(order.copy()),
            "limit": core.args.get("limit"),
            "offset": core.args.get("offset"),
        }
        return exp.Select(**{part: value for part, value in parts.items() if value is not None})

    @property
    def columns(self) -> dict[str, exp.DType | None]:
        """Columns of the released relation."""
        groups = {group.name: group.type for group in self.groups}
        return groups | {f.name: exp.DType.DOUBLE for f in self.functions.values()}


def _check_unit(core: exp.Select, scope: Scope, options: Options) -> None:
    """``privacy_unit_column`` names the unit that the catalog knows."""
    if options.unit_column is None:
        return
    places = {(t, c) for t, c in scope.partial if options.unit_column in (c, f"{t}.{c}")}
    require(any(cover <= places for cover in scope.covers), "unit-column", core.args["from_"])


def _check_norms(options: Options, functions: tuple[Function, ...], core: exp.Select) -> None:
    norms = [f.norm or options.norm for f in functions]
    if not any(norms):
        return
    fits = all(norms) and all(f.kind in ("count", "sum", "units") for f in functions)
    selects = bool(core.args.get("group")) and options.selection == "thresholds"
    unscaled = options.mechanism == "geometric" and selects
    require(fits and not unscaled, "norm", core.expressions[0])


def _check_reports(tree: exp.Query, functions: tuple[Function, ...]) -> None:
    """Columns of an interval stand beside its own: no other is called like one of them."""
    reports = {function.name for function in functions if function.report == "columns"}
    items = {item.alias_or_name: item for item in tree.selects}
    for name in reports & items.keys():
        for label in LABELS.values():
            other = items.get(f"{name}_{label}")
            require(other is None, "duplicate-column", other)


def _check_outer(
    tree: exp.Expr, catalog: Tables, released: Mapping[str, Mapping[str, exp.DType | None]]
) -> None:
    for table in tree.find_all(exp.Table):
        own = table.name in released
        public = own or catalog.tables[table.name].unit is None
        require(public, "private-outside", table)
    validator = Validator(catalog, released)
    joined(tree, validator)
    validator.relation(tree, last=True)


#: Options that mean nothing, or something else, in a stream.
_TABLES_ONLY = ("max_groups_contributed", "contribution_norm", "within")
#: Types of group columns, as types of a key.
KEYS: dict[exp.DType, FieldType] = {
    exp.DType.TEXT: "string",
    exp.DType.BIGINT: "int",
    exp.DType.BOOLEAN: "bool",
    exp.DType.VARBINARY: "bytes",
}
#: Functions with a running form, and the kind of aggregate that each is.
KINDS: dict[Kind, KindName] = {"count": "count", "units": "units", "sum": "sum", "mean": "mean"}


def stream_options(
    node: exp.Expr, grouped: bool, arguments: Collection[str], defaults: Mapping[str, float]
) -> Options:
    """Return the options of a statement that becomes a stream; C is 0 where it is left to the job.

    Raises:
        DpstreamError: one is missing, out of range, or means nothing in a stream.
    """
    for option in node.expressions:
        require(option.name not in _TABLES_ONLY, "stream-option", option)
    require(not {"contribution_norm", "within"} & set(arguments), "stream-bounds", node)
    options = options_of(node, False, (), {})
    require(any(option.name == "delta" for option in node.expressions), "delta", node)
    for name, usual in (
        ("mechanism", ("auto", "gaussian")),
        ("selection", ("thresholds",)),
        ("optimise", ("limit",)),
    ):
        option = {"selection": "group_selection_strategy"}.get(name, name)
        at = next((o for o in node.expressions if o.name == option), node)
        require(getattr(options, name) in usual, "stream-option", at)
    has_rows = any(option.name == "max_rows_contributed" for option in node.expressions)
    return options if has_rows else msgspec.structs.replace(options, rows=0)


def checked_form(text: str, catalog: Tables) -> None:
    """Refuse what works on an answer: a stream has releases, which are computed on elsewhere.

    Raises:
        DpstreamError: says where.
    """
    tree, [[core, *_], *_] = _private_selects(text, catalog)
    for part in ("having", "order", "limit", "offset", "distinct"):
        require(core.args.get(part) is None, "stream-answer", core.args.get(part))
    require(tree is core, "stream-answer", tree)
    for option in core.args["hint"].expressions:
        selects = option.name == "group_selection_strategy"
        word = option.expression.name.upper() if selects else ""
        require(word != "PUBLIC_GROUPS", "stream-option", option)


def check_functions(statement: Statement, text: str) -> None:
    """Check that a stream supports the functions and their bounds, and that groups are plain
    columns.

    Raises:
        DpstreamError: says where it is otherwise.
    """
    tree = inlined(parsed(text))
    items = {item.alias_or_name: item for item in tree.args["expressions"]}
    for function in statement.functions:
        at = items.get(function.name, tree)
        counts = function.kind in ("count", "units")
        supported = function.kind in KINDS and (
            function.kind != "count" or function.argument is None
        )
        require(supported, "stream-function", at)
        require(counts == (function.low is None) and not function.norm, "stream-bounds", at)
        require(not function.report, "stream-answer", at)
    labels = {f.name for f in statement.functions} | {g.name for g in statement.groups}
    outer = instance(statement.outer, exp.Select)
    for item in outer.expressions:
        plain = isinstance(item.unalias(), exp.Column) and item.unalias().name == item.alias
        at = items.get(item.alias_or_name, tree)
        require(plain and item.alias in labels, "stream-answer", at)
    require(len(outer.expressions) == len(labels), "stream-answer", tree.args.get("group"))
    group = tree.args.get("group")
    require(1 <= len(statement.groups) <= MAX_KEY_COLUMNS, "stream-groups", group or tree)
    for one in statement.groups:
        require(one.type in KEYS, "stream-groups", group)
