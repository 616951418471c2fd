"""``OPTIONS(...)`` of a differentially private SELECT, with every range checked.

Two options have no default on purpose: epsilon and, where the answer has groups,
``max_groups_contributed`` (any default would be wrong for most data).  Left out, the others mean:

* ``max_rows_contributed``: 5 rows of a unit in a group, of those functions that need rows
  (AVG per row, VAR, STDDEV, quantiles);
* ``mechanism``: ``auto``, the better of ``gaussian`` and ``geometric`` noise for this statement;
* ``optimise``: how ``auto`` compares: ``limit``, at an equal share of what is left of the account's
  limit; ``answer``, this answer alone;
* ``group_selection_strategy``: thresholds, of the kind that goes with the noise;
* ``min_privacy_units_per_group``: 1;
* ``contribution_norm``: none.  With it no groups are sampled.
* ``delta`` may be left out, or be 0, where nothing needs it: without selection and without
  ``mechanism = gaussian``;
* ``allow_large_delta``: FALSE, a delta above `accounting.strength.MOST_DELTA` is refused.

Numbers in a statement are literals only, so that they are public and known before a run.
"""

import math
from typing import Literal

import msgspec
from sqlglot import exp

from dpstream.accounting.limits import MAX_EPSILON, MAX_PAIRS, MIN_DELTA
from dpstream.accounting.query.families import Optimise
from dpstream.accounting.query.plan import MAX_GROUPS, Mechanism
from dpstream.accounting.strength import refuses
from dpstream.pipelines.statements.allowed import require

#: Sizes of bounds and norms.
LEAST_BOUND, MAX_BOUND = 1e-60, 1e60


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


def usable(value: float | None) -> bool:
    """Return whether a bound or a norm is one: squares of it and of its grid's steps are numbers
    too.
    """
    return value is not None and (value == 0 or LEAST_BOUND <= abs(value) <= MAX_BOUND)


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
    if low is None or high is None or not (usable(low) and usable(high)):
        return None
    return (low, high) if low < high else None


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
}
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


class Options(msgspec.Struct, frozen=True):
    """The privacy options of a statement.

    Attributes:
        epsilon, delta: of the whole statement.
        groups: max_groups_contributed, kappa; rows: max_rows_contributed.
        unit_column: as written in the statement, ``None`` if it was left out.
        norm: contribution_norm of all functions that have none of their own.
        selection: how the groups that are shown are found; without GROUP BY none are.
        min_units: least number of units of a group that is shown.
        mechanism: family of the noise; optimise: how ``auto`` compares.
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


def options_of(node: exp.Expr, grouped: bool, normed: bool) -> Options:
    """Return the options of a `dialect.PrivacyOptions`.

    Args:
        node: as parsed.
        grouped: the SELECT has GROUP BY.
        normed: its functions have norms of their own.

    Raises:
        DpstreamError: one is missing, not known or out of range.
    """
    given: dict[str, exp.Expr] = {}
    for option in node.expressions:
        require(option.name in _OPTIONS and option.name not in given, "option-unknown", option)
        given[option.name] = option.expression
    epsilon, delta = number(given.get("epsilon")), number(given.get("delta"))
    at = given.get("epsilon", node)
    require(epsilon is not None and 0 < epsilon <= MAX_EPSILON, "epsilon", at)
    mechanism = _word(given.get("mechanism"), "AUTO")
    require(mechanism in _MECHANISMS, "mechanism", given.get("mechanism", node))
    optimise = _word(given.get("optimise"), "LIMIT")
    require(optimise in _OPTIMISE, "optimise", given.get("optimise", node))
    strategy = given.get("group_selection_strategy")
    word = _word(strategy, "THRESHOLDS")
    require(word in _STRATEGIES, "selection", strategy or node)
    public = _STRATEGIES.get(word) == "public_groups"
    require(grouped or not public, "public-groups", strategy or node)
    without = mechanism != "GAUSSIAN" and (public or not grouped)
    if without and ("delta" not in given or delta == 0):
        delta = 0.0
    else:
        require(delta is not None and MIN_DELTA <= delta < 1, "delta", given.get("delta", node))
    allow = given.get("allow_large_delta", exp.false())
    require(isinstance(allow, exp.Boolean), "allow-large-delta", allow)
    at = given.get("delta", node)
    require(not refuses(delta or 0.0, bool(allow.this)), "large-delta", at)
    norm = number(given.get("contribution_norm"))
    bad = "contribution_norm" in given and (norm is None or norm <= 0 or not usable(norm))
    require(not bad, "norm", given.get("contribution_norm", node))
    at = given.get("min_privacy_units_per_group", node)
    units = integer_literal(given.get("min_privacy_units_per_group"), 1, MAX_MIN_UNITS)
    named = "min_privacy_units_per_group" in given
    require(not named or (units is not None and not public), "min-units", at)
    rows = integer_literal(given.get("max_rows_contributed"), 1, MAX_ROWS)
    at = given.get("max_rows_contributed", node)
    require("max_rows_contributed" not in given or rows is not None, "max-rows", at)
    column = given.get("privacy_unit_column")
    require(column is None or isinstance(column, exp.Column), "unit-column", column)
    return Options(
        epsilon or 0.0,
        delta or 0.0,
        _groups(node, given, grouped, normed or norm is not None),
        rows or DEFAULT_ROWS,
        None if column is None else _column_name(column),
        norm,
        _MECHANISMS[mechanism],
        "public_groups" if public else "thresholds",
        units or 1,
        _OPTIMISE[optimise],
    )


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


def _column_name(node: exp.Column) -> str:
    return ".".join(part.lower() for part in (node.table, node.name) if part)
