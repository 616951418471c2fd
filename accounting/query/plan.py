"""The plan of one query: its request and its guarantee; public, fixed before a row is read.

A query is answered once, so it has no timeline.  Stage 1 gives, for each (unit, group), integer
*partials* of every column (``accounting.query.parts``); what bounds them stands here.  The digest
names the query's noise: a field that is added later is left out of ``canonical`` at its default.
"""

import hashlib
import math
from typing import Any, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.fields import Aggregate

ColumnKind = Literal["count", "sum", "mean", "var", "stddev", "units", "quantiles"]
#: Families of noise, and the word that leaves the choice to the program.
Family = Literal["gaussian", "geometric"]
Mechanism = Literal["auto", "gaussian", "geometric"]
#: Histogram of the groups of a unit; no column is called so (spaces).
GROUPS = "groups of a unit"
#: Kinds whose values have bounds.
BOUNDED = ("sum", "mean", "var", "stddev", "quantiles")
#: Groups of a unit that a ``contribution_norm`` may spread over, and largest kappa.
MAX_GROUPS = 4_096
#: r: rows of a unit in a group.
MAX_ROWS = 1_024
#: Quantiles of one column: all come from one tree, at no further cost.
MAX_QUANTILES = 1_000
#: |value| of a second moment on the grid: squares of it are summed.
_MAX_SQUARED = 1 << 16


class QueryColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column of the answer.

    Attributes:
        name: unique in the query.
        kind: ``units`` = COUNT(DISTINCT unit), ``quantiles`` also MIN (0), MAX (1) and MEDIAN (.5).
        low, high: bounds of each value that is summed (of what ``per`` says); of a count per group
            the bounds of a unit's count.  ``None`` for both: chosen by the query (automatic).
        per: whether bounds hold for a unit's value in a group (its count, its sum, its average) or
            for each of its rows there.
        rows: r, the most rows of a unit in a group that count where ``per`` is ``row``.
        grid: values are whole multiples of it.
        at: the quantiles, each in [0, 1].
        share: weight in the division of the budget over the columns.
        norm: R of this column instead of the query's.
        automatic_rows: r is the query's to choose; ``rows`` is what it is where too few units have
            a value to choose by.
        distinct: a count of the different values that units have in a group, ``high`` of each unit.
    """

    name: str
    kind: ColumnKind
    low: float | None = None
    high: float | None = None
    per: Literal["group", "row"] = "row"
    rows: int = 5
    grid: float = 1.0
    at: tuple[float, ...] = ()
    share: float = 1.0
    norm: float | None = None
    automatic_rows: bool = False
    distinct: bool = False

    @property
    def has_rows(self) -> bool:
        """Return whether it is computed from a table of rows, not from one sum of each unit."""
        return self.distinct or self.kind == "quantiles"

    @property
    def most_rows(self) -> int:
        """Values of a unit in one group: r, or one of the whole group."""
        if self.distinct:
            return int(self.high or 1)
        return self.rows if self.per == "row" else 1

    @property
    def takes_bounds(self) -> bool:
        """Return whether the column has bounds, given or chosen; units and rows have none."""
        return self.kind in BOUNDED or (self.kind == "count" and self.per == "group")

    @property
    def automatic(self) -> bool:
        """Return whether the query chooses the bounds of this column."""
        return self.takes_bounds and self.low is None and self.high is None

    @property
    def rows_histogram(self) -> str:
        """Name of the histogram of rows that r is chosen from."""
        return f"rows of {self.name}"

    @property
    def aggregate(self) -> Aggregate:
        """The column as one of a stream, for what both have in common; it must have bounds."""
        low, high = (required(bound, "a column has bounds") for bound in (self.low, self.high))
        return Aggregate(self.name, "mean", self.name, (low, high), self.grid)

    def grid_bounds(self) -> tuple[int, int]:
        """Return (low, high) in grid units, snapped inward."""
        return self.aggregate.grid_bounds()


class QueryPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query; all public.

    Attributes:
        epsilon, delta: the guarantee for one unit.
        groups: kappa = max_groups_contributed: that many of a unit's groups are sampled.
        norm: contribution_norm R: a unit's vector over its groups is scaled to this L2 norm, in
            counts of rows for counts, means, variances and quantiles, in values for sums.
        mechanism: family of the noise: ``gaussian`` (one Gaussian-DP budget), ``geometric``
            (charged plain) or ``auto``, which `query.families` replaces by one of the two before
            anything is charged.
        selects: False with public groups; no GROUP BY is one public group.
        min_units: m, a group of fewer units is never released.
        columns: of the answer; none where it is the selected groups alone.
        automatic_groups: kappa is the query's to choose; ``groups`` is what it is where too few
            units can be told from noise.
    """

    epsilon: float
    delta: float
    groups: int | None
    norm: float | None
    mechanism: Mechanism
    selects: bool
    min_units: int = 1
    columns: tuple[QueryColumn, ...] = ()
    automatic_groups: bool = False

    @property
    def most_groups(self) -> int:
        """kappa: groups that one unit can be in after bounding."""
        return MAX_GROUPS if self.groups is None else self.groups

    @property
    def grouped(self) -> bool:
        """Return whether a unit can be in several groups, or groups are selected."""
        return self.selects or self.automatic_groups or self.most_groups > 1

    def norm_of(self, column: QueryColumn) -> float | None:
        """Return R of a column."""
        return self.norm if column.norm is None else column.norm

    def check(self) -> None:
        """Refuse what is no guarantee, or has no meaning.

        Raises:
            UsageError: names the option.
        """
        _check_budget(self)
        _check_bounds(self)
        names = [column.name for column in self.columns]
        enough, alike = bool(names) or self.selects, len(set(names)) < len(names)
        if not enough or alike or len(names) > limits.MAX_AGGREGATES:
            raise UsageError(
                "columns",
                f"must be 1 to {limits.MAX_AGGREGATES} of different names",
                "select fewer, or give each a name of its own",
            )
        for index, column in enumerate(self.columns):
            check_column(column, f"column[{index}]")

    @property
    def digest(self) -> str:
        """128-bit hex digest of every public parameter."""
        encoded = msgspec.json.encode(canonical(self), order="sorted")
        return hashlib.blake2b(encoded, digest_size=16, person=b"dpstream-query").hexdigest()


def canonical(plan: QueryPlan) -> dict[str, Any]:
    """Return every public parameter by its frozen name, as JSON-able values."""
    chosen = {"automatic_groups": True} if plan.automatic_groups else {}
    return chosen | {
        "version": 1,
        "epsilon": float(plan.epsilon),
        "delta": float(plan.delta),
        "groups": plan.groups,
        "norm": _float(plan.norm),
        "mechanism": plan.mechanism,
        "selects": plan.selects,
        "min_units": plan.min_units,
        "columns": [_column(column) for column in plan.columns],
    }


def _column(column: QueryColumn) -> dict[str, Any]:
    chosen = {n: True for n in ("automatic_rows", "distinct") if getattr(column, n)}
    return chosen | {
        "name": column.name,
        "kind": column.kind,
        "low": _float(column.low),
        "high": _float(column.high),
        "per": column.per,
        "rows": column.rows,
        "grid": float(column.grid),
        "at": [float(q) for q in column.at],
        "share": float(column.share),
        "norm": _float(column.norm),
    }


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _check_budget(plan: QueryPlan) -> None:
    if not 0 < plan.epsilon <= limits.MAX_EPSILON:
        rule = f"must be positive and finite, at most {limits.MAX_EPSILON:g}"
        raise UsageError("epsilon", rule, "write e.g. 1.0")
    pure = plan.mechanism != "gaussian" and not plan.selects
    if not (limits.MIN_DELTA <= plan.delta < 1 or (pure and plan.delta == 0)):
        rule = f"must be at least {limits.MIN_DELTA:g}, and below 1"
        raise UsageError("delta", rule, "write e.g. 1e-9")


def _check_bounds(plan: QueryPlan) -> None:
    norms = [plan.norm_of(column) for column in plan.columns]
    if plan.groups is not None and not 1 <= plan.groups <= MAX_GROUPS:
        rule = f"must be a whole number from 1 to {MAX_GROUPS}"
        raise UsageError("max_groups_contributed", rule, "choose how many groups of a unit count")
    if plan.norm is not None and not plan.columns:
        raise UsageError(
            "contribution_norm",
            "bounds figures, and only groups are selected",
            "give max_groups_contributed instead",
        )
    if plan.groups is None and (None in norms or not norms):
        raise UsageError(
            "max_groups_contributed",
            "is needed: without it nothing bounds what one unit adds",
            "write e.g. max_groups_contributed = 10, or give contribution_norm",
        )
    given = [norm for norm in norms if norm is not None]
    if not all(norm > 0 and limits.has_usable_size(norm) for norm in given):
        sizes = f"from {limits.LEAST_SIZE:g} to {limits.MOST_SIZE:g}"
        raise UsageError("contribution_norm", f"must be a number {sizes}", "write e.g. 8")
    if given and plan.mechanism == "geometric" and plan.selects:
        raise UsageError(
            "contribution_norm",
            "bounds an L2 norm, and thresholds of geometric noise are for counts that are not "
            "scaled to one",
            "use max_groups_contributed, public groups or the gaussian mechanism",
        )
    if not 1 <= plan.min_units <= limits.MAX_PAIRS:
        raise UsageError(
            "min_privacy_units_per_group", "must be a whole number, 1 or more", "write 1"
        )
    if plan.min_units > 1 and not plan.selects:
        raise UsageError(
            "min_privacy_units_per_group",
            "would compare exact counts of public groups, which are all released",
            "omit it, or select groups privately",
        )


def check_column(column: QueryColumn, where: str) -> None:
    """Refuse a column that nothing bounds.

    Raises:
        UsageError: names the field below ``where``.
    """
    if not column.name:
        raise UsageError(f"{where}.name", "must be non-empty", "give the column a name")
    if not 0 < column.share < math.inf:
        raise UsageError(f"{where}.share", "must be a positive number", "write e.g. 1.0")
    if not 1 <= column.rows <= MAX_ROWS:
        rule = f"must be a whole number from 1 to {MAX_ROWS}"
        raise UsageError(f"{where}.max_rows_contributed", rule, "write e.g. 5")
    if not 0 < column.grid < math.inf:
        raise UsageError(f"{where}.grid", "must be a positive number", "write e.g. 0.001")
    _check_quantiles(column, where)
    if column.automatic or not column.takes_bounds:
        if column.low is not None or column.high is not None:
            raise UsageError(f"{where}.bounds", "have no meaning for this function", "omit them")
        return
    _check_values(column, where)


def _check_quantiles(column: QueryColumn, where: str) -> None:
    if column.kind != "quantiles":
        if column.at:
            raise UsageError(f"{where}.at", "is for quantiles only", "omit it")
        return
    fine = all(0 <= q <= 1 for q in column.at)
    if not fine or not 1 <= len(column.at) <= MAX_QUANTILES:
        raise UsageError(
            f"{where}.at", f"must be 1 to {MAX_QUANTILES} numbers from 0 to 1", "write e.g. 0.5"
        )


def _check_values(column: QueryColumn, where: str) -> None:
    low, high = column.low, column.high
    sizes = () if low is None or high is None else (low, high)
    if low is None or high is None or not low < high or not all(map(limits.has_usable_size, sizes)):
        raise UsageError(
            f"{where}.bounds",
            f"must be two numbers, the lower one first, each 0 or of a size from "
            f"{limits.LEAST_SIZE:g} to {limits.MOST_SIZE:g}",
            "write e.g. (0, 100)",
        )
    lo, hi = column.grid_bounds()
    most = max(abs(lo), abs(hi), hi - lo) * column.most_rows
    if lo > hi or (lo == hi and column.kind != "count") or most == 0:
        raise UsageError(f"{where}.grid", "leaves no value between the bounds", "use a finer grid")
    if most > limits.MAX_GRID_VALUE:
        raise UsageError(
            f"{where}.grid", "is too fine for integers of these bounds", "use a coarser grid"
        )
    if column.kind == "count" and (lo < 0 or column.grid != 1):
        raise UsageError(f"{where}.bounds", "of a count are 0 or more, on grid 1", "write (0, 10)")
    if column.kind in ("var", "stddev") and hi - lo > _MAX_SQUARED:
        raise UsageError(
            f"{where}.grid",
            f"puts more than {_MAX_SQUARED} steps between the bounds, whose squares are summed",
            "use a coarser grid or narrower bounds",
        )
