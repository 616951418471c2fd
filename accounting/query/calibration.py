"""Calibration of a query's noise: one Gaussian-DP budget, or plain epsilon with geometric noise.

A plan has one family of noise for all of its parts; `query.families` chooses it.

**Gaussian.**  mu of (epsilon, (1 - THETA) delta) where groups are selected, of (epsilon, delta)
where they are public.  Selection has share S of mu^2 and part j of the columns V_j, S + sum V_j =
1 (S = 0 with public groups).  Part j gets noise of sd Delta_j / (sqrt(V_j) mu), Delta_j^2 its
largest squared effect in kappa groups (``accounting.query.parts``), and a unit of n groups uses

    S n w_n^2 + sum_j V_j f_j(n) <= 1    of mu^2, for every n <= kappa,

by the choice of w_n (``accounting.query.thresholds``).  A query without columns (its groups are all
that is released) has no V_j: S is 1, less what bounds were chosen with, and w_n = 1 / sqrt(n), so
that a unit of n groups moves the vector of all weighted counts by sqrt(n) w_n = 1 in L2.  All noise
is drawn once and nothing is adaptive, so this is one Gaussian mechanism of mu.

**Geometric.**  Two-sided geometric noise Z of scale s, P[Z = k] proportional to e^(-|k| / s), on
every lattice point of a part.  One unit moves the vector of part j, over all groups, by at most
D_j(n) in L1 if it is in n groups (kappa L_j in kappa groups; with a norm R at most sqrt(kappa) R,
``QueryPart.absolute``), and a shift by v changes no probability by more than e^(|v|_1 / s).  Noise
of parts and groups is independent and all sums are whole numbers before it is added, so that
together the loss is at most

    sum_j D_j(kappa) / s_j + sum over histograms h of VALUES levels_h / s_h <= epsilon,

for every output.  It is charged plain: (epsilon, 0), and with thresholds (epsilon, delta).  Part j
has share V_j of epsilon, s_j = D_j(kappa) / (V_j epsilon).  Within a column the shares are
proportional to the square roots of the Gaussian shares, so that the sds of a column's parts have
the same ratio in both families.  A query whose thresholds need a separate count of units has one
more part.  The tested count has truncated noise, at (epsilon_j / kappa, delta / kappa) a group
(``mechanisms.optimum``).  Counts and sums that are clamped per group have staircase noise of the
same epsilon where its sd is smaller (``accounting.geometric``).
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.geometric import (
    geometric_sd,
    staircase,
    staircase_margin,
    staircase_moments,
    truncated_sd,
)
from dpstream.accounting.query.parts import QueryPart, parts_of, rank_factor
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.query.thresholds import Selection, count_tested, gaussian_selection

#: Part of delta kept for thresholds; between .2 and .6 keys and errors differ by less than 1%.
THETA = 0.4
#: S: with a count in the test, and where selection has only its own stream.
COMBINED, ALONE = 0.2, 0.4
#: Parts of a column's share that choosing bounds of its values, or of its rows, takes.
OF_VALUES, OF_COUNTS = 1 / 2, 1 / 6
#: Chance that an interval misses.
MISS = 0.05
#: Grid units of a bound that stands for any other; noise is proportional to it.
_STEPS = 1 << 10
_NORMAL_QUANTILE = 1.959963984540054
_SLACK = 1e-12


def half_width(law: str) -> float:
    """Return Half-width of a 95% interval in sds where several noises of a law are combined."""
    return _NORMAL_QUANTILE if law == "gaussian" else math.log(1 / MISS) / math.sqrt(2)


class PartNoise(msgspec.Struct, frozen=True):
    """Noise of one part.

    Attributes:
        part: what it is added to.
        law: ``gaussian`` (rounded), ``geometric`` (two-sided) or ``staircase``.
        share: V_j of mu^2, or of epsilon.
        sensitivity: L2 or L1 of the whole vector for one unit, in lattice units.
        scale: in lattice units, rounded up: sd of Gaussian noise, scale of geometric noise; of a
            staircase the scale of geometric noise of the same epsilon.
        most: k where the noise is truncated to [-k, k], else ``None``.
        sooner: chance of k - 1 instead of k, in 2^-32 (``accounting.mechanisms.optimum``).
        step: r of a staircase, else ``None``.
    """

    part: QueryPart
    law: str
    share: float
    sensitivity: float
    scale: float
    most: int | None = None
    sooner: int = 0
    step: int | None = None

    @property
    def sd(self) -> float:
        """The sd of the noise as drawn, in lattice units."""
        if self.law == "gaussian":
            return math.sqrt(self.scale**2 + 1 / 12)
        if self.step is not None:
            return math.sqrt(staircase_moments(self.scale, self._stair, self.step)[1])
        if self.most is None:
            return geometric_sd(self.scale)
        return truncated_sd(self.scale, self.most)

    @property
    def margin(self) -> int:
        """The least k with P[|Z| > k] <= 5%, in lattice units."""
        if self.law == "gaussian":
            return max(0, math.ceil(_NORMAL_QUANTILE * self.scale - 0.5))
        if self.step is not None:
            return staircase_margin(self.scale, self._stair, self.step, MISS)
        # 2 (q^(j + 1) - q^(k + 1)) <= MISS (1 + q - 2 q^(k + 1)), without truncation q^(k + 1) = 0.
        beyond = 0.0 if self.most is None else math.exp(-(self.most + 1) / self.scale)
        total = 1 + math.exp(-1 / self.scale) - 2 * beyond
        least = -self.scale * math.log(beyond + MISS * total / 2)
        return max(0, math.ceil(least - 1))

    @property
    def _stair(self) -> int:
        """L of a staircase, in lattice units."""
        return self.part.most * self.part.unit


class QueryBudget(msgspec.Struct, frozen=True):
    """The budget and noise of a query; all public plain numbers (it can be committed as JSON).

    Attributes:
        epsilon, delta: the guarantee for one unit.
        mu: Gaussian-DP parameter of all noise, rounded down; ``None`` where it is plain.
        threshold_delta: part of delta on top of mu's.
        groups: kappa.
        parts: noise of each part of the columns, in the order of ``parts_of``; where a geometric
            query needs a count of units for its thresholds alone, it is the last.
        selection: how groups are selected, ``None`` with public groups.
        reserved: part of mu^2, or of epsilon, that bounds were chosen with.
    """

    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    groups: int
    parts: tuple[PartNoise, ...]
    selection: Selection | None
    reserved: float = 0.0

    @property
    def weights(self) -> tuple[int, ...]:
        """The selection weights of a unit of 1, 2, .. groups; empty without a weighted count."""
        return () if self.selection is None else self.selection.weights

    @property
    def quantile(self) -> float:
        """The half-width of a 95% interval in sds where several noises are combined."""
        return half_width("gaussian" if self.mu is not None else "geometric")

    @property
    def delta_each(self) -> float:
        """delta / kappa, rounded down."""
        return _each(self.delta, self.groups)


def allocate_query(plan: QueryPlan, reserved: Mapping[str, float] | None = None) -> QueryBudget:
    """Divide a query's budget into noise and thresholds.

    Args:
        reserved: what was spent on bounds, by histogram (``accounting.query.bounds``).  A column
            whose bounds were chosen has that much less of its share.

    Raises:
        UsageError: the plan is refused, or its noise leaves the samplers' or integers' range.
    """
    plan.check()
    for index, column in enumerate(plan.columns):
        if column.automatic:
            raise UsageError(
                f"column[{index}].bounds", "are not chosen yet", "give both bounds of the column"
            )
    spent = reserved or {}
    free = {column.name: 1 - share_of_bounds(column, spent) for column in plan.columns}
    parts = [
        msgspec.structs.replace(part, share=part.share * free[part.column])
        for part in parts_of(plan)
    ]
    if plan.mechanism == "auto":
        raise InvariantError("the family of a plan's noise is chosen")
    divide = _gaussian if plan.mechanism == "gaussian" else _geometric
    budget = divide(plan, parts, math.fsum(spent.values()))
    # Refuse noise that one-shot draws do not cover.
    for noise in budget.parts:
        # Noise far below a lattice point protects nothing (the samplers' least scale).
        if not 2.0**-10 <= noise.scale <= limits.MAX_REAL_SIGMA:
            raise UsageError(
                "epsilon",
                f"gives column '{noise.part.column}' noise of {noise.scale:.3g} grid units, "
                "outside the range of exact draws",
                "use another epsilon, grid or bounds",
            )
    chosen = budget.selection
    # Q of 2^30 units, and 27 sds of its noise, fit int64.
    if chosen is not None and (
        chosen.threshold >= 1 << 60
        or chosen.most >= 1 << 32
        or chosen.sigma > limits.MAX_REAL_SIGMA
    ):
        raise UsageError(
            "epsilon", "is too small for any group to be selected", "use a larger epsilon"
        )
    return budget


def share_of_bounds(column: QueryColumn, chosen: Container[str]) -> float:
    """Return the part of a column's share that private histograms use to choose its bounds.

    Args:
        chosen: names of the columns and bounds that are chosen privately.
    """
    if column.name in chosen:
        return OF_COUNTS if column.kind == "count" else OF_VALUES
    return OF_COUNTS if column.rows_histogram in chosen else 0.0


def noise_by_bound(plan: QueryPlan, reserved: Mapping[str, float]) -> dict[str, float]:
    """Return sd of the noise of each column's count or sum, over the most that one unit adds to it.

    Args:
        reserved: see ``allocate_query``; bounds need not be chosen yet.
    """
    columns = []
    for column in plan.columns:
        most = 1.0 if column.kind == "count" else _STEPS * column.grid
        bounds = {"low": 0.0, "high": most} if column.takes_bounds else {}
        columns.append(msgspec.structs.replace(column, **bounds, rows=1))
    budget = allocate_query(msgspec.structs.replace(plan, columns=tuple(columns)), reserved)
    kinds = ("count", "sum", "distinct")
    first = [noise for noise in reversed(budget.parts) if noise.part.what in kinds]
    return {n.part.column: n.sd / (n.part.most * n.part.unit) for n in first}


def cost_of(plan: QueryPlan) -> Cost:
    """Return the cost of a plan whose family is chosen; geometric noise of public groups has delta
    0.
    """
    if plan.mechanism == "gaussian":
        return Cost(plan.epsilon, plan.delta, *mu_of_query(plan))
    return Cost(plan.epsilon, plan.delta if plan.selects else 0.0)


def mu_of_query(plan: QueryPlan) -> tuple[float, float]:
    """Return (mu, delta_tau) of a Gaussian query."""
    delta_tau = plan.delta * THETA if plan.selects else 0.0
    return mu_of(plan.epsilon, (plan.delta - delta_tau) * (1 - _SLACK)), delta_tau


def _gaussian(plan: QueryPlan, parts: Sequence[QueryPart], reserved: float) -> QueryBudget:
    kappa = plan.most_groups
    mu, delta_tau = mu_of_query(plan)
    tested = count_tested(parts, _counts_units(plan)) if plan.selects else None
    share = 0.0
    if plan.selects:
        alone = ALONE if parts else (1 - reserved) * (1 - _SLACK)
        share = alone if tested is None else COMBINED
    each = (1 - share - reserved) / (math.fsum(part.share for part in parts) or 1) * (1 - _SLACK)
    shares = [each * part.share for part in parts]
    noises = []
    for part, v in zip(parts, shares, strict=True):
        delta = math.sqrt(part.l2_squared(kappa)) * part.unit * (1 + _SLACK)
        scale = delta / (math.sqrt(v) * mu) * (1 + _SLACK)
        noises.append(PartNoise(part, "gaussian", v, delta, scale))
    selection = None
    if plan.selects:
        scales = [noise.scale for noise in noises]
        selection = gaussian_selection(
            share, mu, delta_tau, kappa, parts, shares, scales, tested, reserved
        )
    made = tuple(noises)
    return QueryBudget(plan.epsilon, plan.delta, mu, delta_tau, kappa, made, selection, reserved)


def _geometric(plan: QueryPlan, parts: Sequence[QueryPart], reserved: float) -> QueryBudget:
    kappa, made = plan.most_groups, _by_roots(parts)
    if plan.selects and not made:
        lone = _lone(plan, reserved)
        if lone is not None:
            return lone
    tested = count_tested(parts, _counts_units(plan)) if plan.selects else None
    if plan.selects and tested is None:
        tested = len(made)
        made.append(QueryPart("", "count", 0, 1, 1, None, 0, 1 / (len(plan.columns) or 1)))
    total = math.fsum(part.share for part in made)
    noises = []
    clamped = {c.name for c in plan.columns if c.kind in ("count", "sum")}
    for part in made:
        share = (1 - reserved) * part.share / total * (1 - _SLACK)
        most = part.l1(kappa) * part.unit
        scale = most / (share * plan.epsilon) * (1 + _SLACK)
        noise = PartNoise(part, "geometric", share, most, scale)
        noises.append(_stairs(noise) if part.column in clamped else noise)
    selection = None
    if tested is not None:
        # Loads the exact arithmetic of balls.
        from dpstream.accounting.mechanisms.optimum import truncation

        tau, sooner = truncation(noises[tested].scale, plan.delta, kappa)
        noises[tested] = msgspec.structs.replace(noises[tested], most=tau, sooner=sooner)
        selection = Selection(0.0, (), 0.0, 0, 1, tested, 0.0, 1, float(tau), tau)
    delta = plan.delta if plan.selects else 0.0
    return QueryBudget(plan.epsilon, delta, None, 0.0, kappa, tuple(noises), selection, reserved)


def _lone(plan: QueryPlan, reserved: float) -> QueryBudget | None:
    """Budget of keys alone: the best selection of a key at (epsilon / kappa, delta / kappa).

    No count is drawn.  ``None`` where more counts have a chance between 0 and 1 than are listed;
    truncated noise is as good there.
    """
    from dpstream.accounting.mechanisms.optimum import selection_optimum

    kappa = plan.most_groups
    epsilon = plan.epsilon * (1 - reserved) / kappa * (1 - _SLACK)
    optimum = selection_optimum(epsilon, _each(plan.delta, kappa))
    if optimum is None:
        return None
    tau = optimum.even - 1
    selection = Selection(0.0, (), 0.0, 0, 1, None, 0.0, 1, float(tau), tau, epsilon)
    return QueryBudget(plan.epsilon, plan.delta, None, 0.0, kappa, (), selection, reserved)


def _each(delta: float, groups: int) -> float:
    """delta / kappa, rounded down."""
    return delta if groups == 1 else math.nextafter(delta / groups, 0)


def _stairs(noise: PartNoise) -> PartNoise:
    """Noise of a sum that is clamped per group: a staircase where its sd is smaller."""
    part = noise.part
    normed = part.norm is not None
    stairs = None if normed else staircase(noise.scale, part.most * part.unit)
    if stairs is None:
        return noise
    scale, step = stairs
    return msgspec.structs.replace(noise, law="staircase", scale=scale, step=step)


def _by_roots(parts: Sequence[QueryPart]) -> list[QueryPart]:
    """The parts with shares of their column's budget proportional to the roots of their shares."""
    shares, roots = dict[str, float](), dict[str, float]()
    for part in parts:
        shares[part.column] = shares.get(part.column, 0.0) + part.share
        roots[part.column] = roots.get(part.column, 0.0) + math.sqrt(part.share)
    return [
        msgspec.structs.replace(
            part, share=shares[part.column] * math.sqrt(part.share) / roots[part.column]
        )
        for part in parts
    ]


def _counts_units(plan: QueryPlan) -> frozenset[str]:
    return frozenset(column.name for column in plan.columns if column.kind == "units")


def expected(plan: QueryPlan, budget: QueryBudget) -> list[dict[str, Any]]:
    """Return the noise and 95% interval of every column before any data is read.

    Returns:
        For each column its name and kind, and for each of its parts sd and half-width of the
        interval in the column's units (squared ones for a square; of a median's rank for a tree).
    """
    out = []
    for column in plan.columns:
        parts = []
        for noise in budget.parts:
            if noise.part.column != column.name:
                continue
            grid = {"sum": column.grid, "square": column.grid**2}.get(noise.part.what, 1.0)
            step = grid / noise.part.unit
            if noise.part.what == "tree":
                step *= rank_factor(column)
            row = {"what": noise.part.what, "sd": noise.sd * step, "within": noise.margin * step}
            parts.append(row)
        out.append({"name": column.name, "kind": column.kind, "parts": parts})
    return out
