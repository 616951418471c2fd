"""What a differentially private SELECT asks: its ``OPTIONS(...)`` and its private functions.

Numbers in a statement are literals only, so that they are public and known before a run.

**Options**, with every range checked.  Two have no default on purpose: epsilon and, where the
answer has groups, ``max_groups_contributed`` (any default would be wrong for most data).  In place
of epsilon ``within`` is the largest half-width of the 95% interval of each COUNT, as an argument
that of one COUNT or SUM; epsilon is then the least that reaches it.  Left out, the others mean:

* ``max_rows_contributed``: 5 rows of a unit in a group, of those functions that need rows
  (AVG per row, VAR, STDDEV, quantiles);
* ``mechanism``: ``auto``, the better of ``gaussian`` and ``geometric`` noise for this statement;
* ``optimise``: how ``auto`` compares: ``limit``, at an equal share of what is left of the account's
  limit; ``answer``, this answer alone;
* ``group_selection_strategy``: thresholds, of the kind that goes with the noise;
* ``min_privacy_units_per_group``: 1;
* ``contribution_norm``: none.  With it no groups are sampled.
* each that the data set has a default of (`Tables.defaults`), that;
* ``delta`` may be left out, or be 0, where nothing needs it: without selection and without
  ``mechanism = gaussian``;
* ``allow_large_delta``: FALSE, a delta above `accounting.strength.MOST_DELTA` is refused.

**Functions**, with their arguments, bounds and quantiles.  Bounds hold for what a unit adds to a
group (``per`` is "group": COUNT, SUM, and AVG, whose unit then adds its own mean), or for each of
its rows ("row": VAR, STDDEV and quantiles always, SUM and AVG by ``contribution_bounds_per_row``;
``CLAMPED BETWEEN`` is the first for COUNT, SUM and AVG).  Without bounds ``low`` and ``high`` are
``None``: they are found by the query and paid by it.
COUNT(DISTINCT x) counts the values of all units, of each at most so many in a group as its upper
bound says, chosen by a key; of the unit itself it counts the units.
VAR and STDDEV are those of the population.
"""

import math
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec
from sqlglot import exp

from dpstream.accounting.limits import MAX_EPSILON, MAX_PAIRS, MIN_DELTA, has_usable_size
from dpstream.accounting.query.families import Optimise
from dpstream.accounting.query.plan import MAX_GROUPS, MAX_QUANTILES, Mechanism
from dpstream.accounting.strength import refuses
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.dialect import Clamped, Private, WithReport
from dpstream.pipelines.statements.errors import position, refusal
from dpstream.pipelines.statements.forms import type_of
from dpstream.pipelines.statements.ownership import COMPARABLE, Scope

#: Rows of a unit in a group, unless given; and the most: each is held in memory.
DEFAULT_ROWS, MAX_ROWS = 5, 1_000
MAX_MIN_UNITS = MAX_PAIRS
_OPTIONS = {
    "epsilon",
    "delta",
    "max_groups_contributed",
    "max_rows_contributed",
    "privacy_unit_column",
    "group_selection_strategy",
    "min_privacy_units_per_group",
    "contribution_norm",
    "mechanism",
    "allow_large_delta",
    "optimise",
    "within",
}
#: Older names of options.
_OLDER = {"kappa": "max_groups_contributed"}
_BOUNDS = ("contribution_bounds_per_group", "contribution_bounds_per_row")
_STRATEGIES = {
    "LAPLACE_THRESHOLD": "thresholds",
    "GAUSSIAN_THRESHOLD": "thresholds",
    "THRESHOLDS": "thresholds",
    "PUBLIC_GROUPS": "public_groups",
}
_MECHANISMS: dict[str, Mechanism] = {
    "AUTO": "auto",
    "GAUSSIAN": "gaussian",
    "GEOMETRIC": "geometric",
}
_OPTIMISE: dict[str, Optimise] = {"LIMIT": "limit", "ANSWER": "answer"}
Selection = Literal["thresholds", "public_groups"]
Kind = Literal["count", "distinct", "sum", "mean", "var", "stddev", "units", "quantiles"]
Per = Literal["group", "row"]
#: How a function's interval is shown: not, as columns of their own, or with it as JSON.
Report = Literal["", "columns", "json"]
#: Parts of APPROX_QUANTILES.
MAX_PARTS = MAX_QUANTILES - 1
_KINDS: dict[str, Kind] = {
    "COUNT": "count",
    "SUM": "sum",
    "AVG": "mean",
    "VAR": "var",
    "VARIANCE": "var",
    "VAR_POP": "var",
    "STDDEV": "stddev",
    "STDDEV_POP": "stddev",
    "MIN": "quantiles",
    "MAX": "quantiles",
    "MEDIAN": "quantiles",
    "NTILE": "quantiles",
    "PERCENTILE": "quantiles",
    "PERCENTILE_CONT": "quantiles",
    "APPROX_QUANTILES": "quantiles",
    "QUANTILES": "quantiles",
}
_FIXED = {"MIN": (0.0,), "MAX": (1.0,), "MEDIAN": (0.5,)}
_PARTS = {"APPROX_QUANTILES", "QUANTILES"}
_ROWS_ONLY = {"var", "stddev", "quantiles"}
#: Plain aggregates that have a private form, by name.
PLAIN: dict[type[exp.Expr], str] = {
    exp.Count: "COUNT",
    exp.Sum: "SUM",
    exp.Avg: "AVG",
    exp.Min: "MIN",
    exp.Max: "MAX",
}
_UNITS = exp.var("units")
#: Types of which no value is a number: a figure of them would be NULL, after its charge.
_NO_NUMBERS = {
    exp.DType.TEXT,
    exp.DType.VARBINARY,
    exp.DType.BOOLEAN,
    exp.DType.DATE,
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
    exp.DType.TIME,
}


def number(node: exp.Expr | None) -> float | None:
    """Return the value of a number literal with or without a sign; ``None`` if it is none."""
    if isinstance(node, exp.Neg):
        value = number(node.this)
        return None if value is None else -value
    if isinstance(node, exp.Literal) and not node.is_string:
        try:
            value = float(node.this)
        except ValueError:
            return None
        return value if math.isfinite(value) else None
    return None


def integer_literal(node: exp.Expr | None, low: int, high: int) -> int | None:
    """Return the value of a literal of digits within a range; ``None`` if it is none."""
    if isinstance(node, exp.Literal) and not node.is_string and node.this.isascii():
        text = node.this
        if text.isdigit() and len(text) <= 19 and low <= int(text) <= high:
            return int(text)
    return None


def pair(node: exp.Expr | None) -> tuple[float, float] | None:
    """Return ``(low, high)`` with low below high, both usable; ``None`` if it is none."""
    if not isinstance(node, exp.Tuple) or len(node.expressions) != 2:
        return None
    low, high = (number(part) for part in node.expressions)
    if low is None or high is None or not (has_usable_size(low) and has_usable_size(high)):
        return None
    return (low, high) if low < high else None


class Options(msgspec.Struct, frozen=True):
    """The privacy options of a statement.

    Attributes:
        epsilon, delta: of the whole statement; epsilon is 0 where ``within`` determines it.
        groups: max_groups_contributed, kappa; rows: max_rows_contributed.
        unit_column: as written in the statement, ``None`` if it was left out.
        norm: contribution_norm of all functions that have none of their own.
        selection: how the groups that are shown are found; without GROUP BY none are.
        min_units: least number of units of a group that is shown.
        mechanism: family of the noise; optimise: how ``auto`` compares.
        within: the largest half-width of the interval of each count; ``None``: only functions
            state theirs, or epsilon is given.
    """

    epsilon: float
    delta: float
    groups: int
    rows: int = DEFAULT_ROWS
    unit_column: str | None = None
    norm: float | None = None
    mechanism: Mechanism = "auto"
    selection: Selection = "thresholds"
    min_units: int = 1
    optimise: Optimise = "limit"
    within: float | None = None


def options_of(
    node: exp.Expr, grouped: bool, arguments: Collection[str], defaults: Mapping[str, float]
) -> Options:
    """Return the options of a `dialect.PrivacyOptions`.

    Args:
        node: the parsed expression.
        grouped: the SELECT has GROUP BY.
        arguments: names of arguments that its functions have.
        defaults: the data set's, of what is left out.

    Raises:
        DpstreamError: one is missing, not known or out of range.
    """
    given, written = _given(node, grouped, arguments, defaults)

    def at(name: str) -> exp.Expr:
        return given[name] if name in written else node

    epsilon, delta = number(given.get("epsilon")), number(given.get("delta"))
    within = number(given.get("within"))
    usable = within is not None and within > 0 and has_usable_size(within)
    require("within" not in written or usable, "within", at("within"))
    if "within" in {*arguments, *written}:
        require("epsilon" not in written, "within", at("epsilon"))
    else:
        require(epsilon is not None and 0 < epsilon <= MAX_EPSILON, "epsilon", at("epsilon"))
    mechanism = _word(given.get("mechanism"), "AUTO")
    require(mechanism in _MECHANISMS, "mechanism", at("mechanism"))
    optimise = _word(given.get("optimise"), "LIMIT")
    require(optimise in _OPTIMISE, "optimise", at("optimise"))
    strategy = given.get("group_selection_strategy")
    word = _word(strategy, "THRESHOLDS")
    require(word in _STRATEGIES, "selection", strategy or node)
    public = _STRATEGIES.get(word) == "public_groups"
    require(grouped or not public, "public-groups", strategy or node)
    without = mechanism != "GAUSSIAN" and (public or not grouped)
    if without and ("delta" not in written or delta == 0):
        delta = 0.0
    else:
        require(delta is not None and MIN_DELTA <= delta < 1, "delta", at("delta"))
    allow = given.get("allow_large_delta", exp.false())
    require(isinstance(allow, exp.Boolean), "allow-large-delta", allow)
    require(not refuses(delta or 0.0, bool(allow.this)), "large-delta", at("delta"))
    norm = number(given.get("contribution_norm"))
    bad = "contribution_norm" in given and (norm is None or norm <= 0 or not has_usable_size(norm))
    require(not bad, "norm", at("contribution_norm"))
    least = "min_privacy_units_per_group"
    units = integer_literal(given.get(least), 1, MAX_MIN_UNITS)
    require(least not in given or (units is not None and not public), "min-units", at(least))
    most = "max_rows_contributed"
    rows = integer_literal(given.get(most), 1, MAX_ROWS)
    require(most not in given or rows is not None, "max-rows", at(most))
    column = given.get("privacy_unit_column")
    require(column is None or isinstance(column, exp.Column), "unit-column", column)
    return Options(
        epsilon or 0.0,
        delta or 0.0,
        _groups(node, given, grouped, norm is not None or "contribution_norm" in arguments),
        rows or DEFAULT_ROWS,
        column and ".".join(part.lower() for part in (column.table, column.name) if part),
        norm,
        _MECHANISMS[mechanism],
        "public_groups" if public else "thresholds",
        units or 1,
        _OPTIMISE[optimise],
        within,
    )


def _given(
    node: exp.Expr, grouped: bool, arguments: Collection[str], defaults: Mapping[str, float]
) -> tuple[dict[str, exp.Expr], set[str]]:
    """Return the options with their defaults, and the names of those that are written."""
    given: dict[str, exp.Expr] = {}
    for option in node.expressions:
        name = _OLDER.get(option.name, option.name)
        require(name not in given, "option-twice", option)
        if name not in _OPTIONS:
            raise refusal("option-unknown", position(option), name, _OPTIONS)
        given[name] = option.expression
    written = set(given)
    limited = grouped and not {"contribution_norm"} & {*arguments, *written}
    by_accuracy = "within" in {*arguments, *written}
    for name in defaults.keys() - written:
        no_use = {"max_groups_contributed": not limited, "epsilon": by_accuracy}
        if not no_use.get(name):
            given[name] = exp.Literal.number(defaults[name])
    return given, written


def _groups(node: exp.Expr, given: dict[str, exp.Expr], grouped: bool, normed: bool) -> int:
    argument = given.get("max_groups_contributed")
    if argument is None:
        require(not grouped or normed, "max-groups", node)
        return 1 if not grouped else MAX_GROUPS
    limit = integer_literal(argument, 1, MAX_GROUPS)
    require(limit is not None, "max-groups", argument)
    return limit or 1


def _word(node: exp.Expr | None, default: str) -> str:
    if node is None:
        return default
    return node.name.upper() if isinstance(node, exp.Column | exp.Var) else ""


class Function(msgspec.Struct, frozen=True):
    """One private function.

    Attributes:
        name: label of the output, unique in the statement.
        kind: what is published; MIN, MAX, MEDIAN and all quantiles are ``quantiles``,
            COUNT(DISTINCT x) is ``distinct`` or, of the unit, ``units``.
        argument: over the columns of the statement's source; ``None`` for COUNT(*) and units.
        low, high: bounds, or both ``None``: automatic.
        per: what the bounds hold for.
        report: how its interval is asked for.
        at: the quantiles, from 0 to 1, in the order asked.
        norm: contribution_norm of its own.
        many: whether the answer is a list of all of ``at`` (APPROX_QUANTILES), not one number.
        within: the largest half-width of its interval, where that determines epsilon.
    """

    name: str
    kind: Kind
    argument: exp.Expr | None
    low: float | None = None
    high: float | None = None
    per: Per = "group"
    report: Report = ""
    at: tuple[float, ...] = ()
    norm: float | None = None
    many: bool = False
    within: float | None = None

    @property
    def has_fixed_noise(self) -> bool:
        """Whether the plan alone determines its interval."""
        return self.kind == "units" or (
            self.kind in ("count", "distinct", "sum") and self.low is not None
        )


def private_form(node: exp.Expr) -> Private:
    """Return an aggregate of a private select list as a `Private` node.

    Raises:
        DpstreamError: it has no private form.
    """
    if isinstance(node, Private):
        return node
    name = PLAIN.get(type(node))
    require(name is not None, "dp-aggregate", node)
    extra = [part for part, value in node.args.items() if value and part not in ("this", "big_int")]
    require(not extra and node.this is not None, "arguments", node)
    return Private(this=exp.var(name or ""), expressions=[node.this])


def function_of(node: exp.Expr, name: str, scope: Scope) -> Function:
    """Return the function that a node of a private select list is.

    Args:
        node: plain or private.
        name: label of its output.
        scope: the scope in which its columns are looked up.

    Raises:
        DpstreamError: wrong arguments or bounds.
    """
    call = private_form(node)
    inside = [n for n in call.walk() if n is not call and isinstance(n, exp.AggFunc | Private)]
    require(not inside, "nested-aggregate", node)
    called = call.name.upper()
    legacy, kind = called.startswith("ANON_"), _KINDS[called.removeprefix("ANON_")]
    called = called.removeprefix("ANON_")
    bounds: list[tuple[tuple[float, float] | None, Per]] = []
    report: Report = ""
    norm, within, plain = None, None, []
    for given in call.expressions:
        part = given
        while isinstance(part, Clamped | WithReport):
            if isinstance(part, Clamped):
                values = exp.Tuple(expressions=[part.args["low"].copy(), part.args["high"].copy()])
                bounds.append((pair(values), "row" if kind in _ROWS_ONLY else "group"))
            else:
                report = _report(part.args.get("format"), node)
            part = part.this
        if not isinstance(part, exp.Kwarg):
            plain.append(part)
        elif part.name.lower() == "report_format":
            report = _report(part.expression, node)
        elif part.name.lower() == "contribution_norm":
            require(norm is None, "norm", node)
            norm = number(part.expression)
            require(norm is not None and norm > 0 and has_usable_size(norm), "norm", node)
        elif part.name.lower() == "within":
            within = number(part.expression)
            require(within is not None and within > 0 and has_usable_size(within), "within", node)
        else:
            bounds.append((pair(part.expression), _per(part, kind)))
    needed = 1 if kind != "quantiles" or called in _FIXED else 2
    if legacy:
        bounds += _legacy_bounds(plain[needed:], kind)
        plain = plain[:needed]
    require(len(bounds) <= 1 and all(b is not None for b, _ in bounds), "bounds", node)
    at = _quantiles(called, plain, node)
    require(len(plain) == needed, "arguments", node)
    argument = _argument(kind, plain[0], scope, node)
    if argument is _UNITS:
        # A unit adds 1, which such bounds leave as it is.
        require(all(b is not None and b[0] <= 1 <= b[1] for b, _ in bounds), "bounds", node)
        return Function(name, "units", None, report=report, norm=norm, within=within)
    low, high, per = None, None, _default(kind)
    if bounds and bounds[0][0] is not None:
        (low, high), per = bounds[0][0], bounds[0][1]
    many, distinct = called in _PARTS, isinstance(plain[0], exp.Distinct)
    function = Function(name, kind, argument, low, high, per, report, at, norm, many, within)
    function = _count(function, distinct, node) if kind == "count" else function
    require(within is None or function.has_fixed_noise, "within-bounds", node)
    return function


def _count(function: Function, distinct: bool, node: exp.Expr) -> Function:
    """Return a count with its bounds as they are: whole numbers."""
    low, high = function.low, function.high
    if low is not None and high is not None:
        fits = low == int(low) and high == int(high) > (0 if distinct else -math.inf)
        require(fits, "count-bounds", node)
        if high <= 0:  # a unit in a group has a row there, and adds high
            constant = _constant(function.argument, int(high))
            bounds = {"low": min(high, -1.0), "high": 0.0}
            return msgspec.structs.replace(function, kind="sum", argument=constant, **bounds)
        low = 0.0 if distinct else max(low, 0.0)
    kind: Kind = "distinct" if distinct else "count"
    return msgspec.structs.replace(function, kind=kind, low=low)


def _constant(argument: exp.Expr | None, value: int) -> exp.Expr:
    """Return a whole number where an argument has a value; ``None`` always has one."""
    number_ = exp.Literal.number(value)
    there = exp.Not(this=exp.Is(this=argument or exp.true(), expression=exp.Null()))
    constant = exp.If(this=there, true=number_, false=exp.Null())
    constant.type = exp.DataType(this=exp.DType.BIGINT)
    return constant


def _report(form: exp.Expr | None, node: exp.Expr) -> Report:
    """PROTO has the same figures: its message in JSON."""
    word = "" if form is None else form.name.upper()
    require(form is None or word in ("JSON", "PROTO"), "report", node)
    return "json" if word else "columns"


def _default(kind: Kind) -> Per:
    return "row" if kind in _ROWS_ONLY else "group"


def _per(node: exp.Expr, kind: Kind) -> Per:
    name = node.name.lower()
    if name not in _BOUNDS:
        names = (*_BOUNDS, "contribution_norm", "report_format", "within")
        raise refusal("arguments", position(node), name, names)
    per: Per = "row" if name.endswith("row") else "group"
    fits = per == "row" if kind in _ROWS_ONLY else kind != "count" or per == "group"
    require(fits, "arguments", node)
    return per


def _legacy_bounds(
    extra: list[exp.Expr], kind: Kind
) -> list[tuple[tuple[float, float] | None, Per]]:
    """``ANON_SUM(x, low, high)`` and ``ANON_COUNT(*, high)``: bounds by place."""
    if not extra:
        return []
    if kind == "count" and len(extra) == 1:
        extra = [exp.Literal.number(0), *extra]
    values = exp.Tuple(expressions=[part.copy() for part in extra])
    return [(pair(values), _default(kind))]


def _quantiles(called: str, plain: list[exp.Expr], node: exp.Expr) -> tuple[float, ...]:
    if _KINDS[called] != "quantiles":
        return ()
    if called in _FIXED:
        return _FIXED[called]
    require(len(plain) == 2, "arguments", node)
    if called in _PARTS:
        parts = integer_literal(plain[1], 1, MAX_PARTS)
        require(parts is not None, "quantile", node)
        return tuple(i / (parts or 1) for i in range((parts or 1) + 1))
    quantile = number(plain[1])
    require(quantile is not None and 0 <= quantile <= 1, "quantile", node)
    return (quantile or 0.0,)


def _argument(kind: Kind, given: exp.Expr, scope: Scope, node: exp.Expr) -> exp.Expr | None:
    scope.check_columns(given)
    if isinstance(given, exp.Distinct):
        require(kind == "count" and len(given.expressions) == 1, "arguments", node)
        [value] = given.expressions
        unit = scope.is_unit(value)
        require(unit or type_of(value) in COMPARABLE, "group-type", node)
        return _UNITS if unit else value
    if isinstance(given, exp.Star):
        require(kind == "count", "arguments", node)
        return None
    require(kind == "count" or type_of(given) not in _NO_NUMBERS, "numbers", node)
    return given
