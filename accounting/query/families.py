"""Comparison of a question's error in each family of noise, and the choice of its family.

The families are Gaussian and two-sided geometric noise; a question takes one for all of it.

**Why the choice is private.**  Each family is a complete mechanism (`query.calibration`) with the
guarantee that its cost states.  The choice is made once, for histograms of bounds and figures
together, before a row is read and before the charge, from the plan, the account's earlier charges
and its limit.  All of these are public, so that the answer is the output of one mechanism that was
fixed beforehand.  The choice must not use anything that the question reads or chooses later: taking
the better of two epsilon-DP mechanisms by the data is not epsilon-DP.

**What is compared** (``error_of``).  Where all groups are released: the geometric mean over the
columns of sd / L, L the most that one unit adds to a group's sum.  A bound that the question will
choose changes sd and L by the same factor, so that it is not needed.  The number of a unit's groups
changes them by different factors (sqrt(kappa) and kappa); a question that chooses kappa is compared
at the public constant of its plan.  Where groups are selected: the mean of |released - true| over
all groups of the public reference population (`tuning.reference`), where a group that is not
released counts its truth; for groups alone, the share of groups that are not released.  Weights by
the number of a unit's groups make Gaussian selection better where units have few groups, which
nothing public says.  So the geometric mean over three shapes is taken (``_SHAPES``): all units have
one group, a unit has at least i with chance 1 / i, all have kappa.

**With an account** a question may be one of many.  A limit of (8, 1e-5) accepts 8 questions of (1,
1e-9) with geometric noise and 76 with Gaussian noise.  ``optimise = "limit"`` therefore compares
both at an equal share of what is left of the limit (`accounting.periods.Room.share`: in the filter
where it is least): Gaussian noise as asked, and geometric noise of so much of its epsilon that it
takes the same share.  That is the comparison of shares at an equal accuracy: a family whose error
is smaller at an equal share has the smaller share at an equal error, because both rise and fall
together.  ``"answer"`` compares this answer alone.  A family that the limit does not allow is never
taken if the other one is allowed.

**Monotone** (all groups released, one column of one part, one account that allows both families).
By ``"answer"`` the sd is
the smaller of two, and both never rise when epsilon or delta rises, or when C, kappa or a bound
falls.  By ``"limit"`` geometric noise is taken if it is better at a share that is no larger than
its own, so that it is better as drawn as well.

**Outlook**: how exact a query's answer would be, noise and thresholds, before a row is read.  All
of it is public.  What the query chooses from the rows (bounds, rows and groups of a unit) is not
decided then, but how noise grows with it is: each part has its noise for bounds (0, 1), one row and
one group, and says by what of the choice it is to be multiplied (``times``).

* A sum of r rows, and a count of them, move by r times what one row adds: noise is r times larger.
* kappa groups move the vector of all groups by sqrt(kappa) times as much in L2, where noise is
  Gaussian, and by kappa times as much in L1, where it is geometric.

Thresholds grow with kappa in no such way: they are given for the fewest and for the most groups.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.geometric import staircase_moments
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.periods import Room
from dpstream.accounting.query.bounds import design_bounds
from dpstream.accounting.query.calibration import PartNoise, QueryBudget, cost_of, expected
from dpstream.accounting.query.grids import (
    ASSUMED,
    BITS,
    COUNTED,
    Gridded,
    assumed_bounds,
    finer_sums,
    finest,
    regridded,
)
from dpstream.accounting.query.parts import parts_of
from dpstream.accounting.query.plan import MAX_ROWS, Family, QueryPlan
from dpstream.accounting.query.thresholds import Selection

#: The factor that noise is proportional to, by kind of column and part; noise of other parts does
#: not depend on the bounds.
_BOUND_FACTORS = {
    ("count", "count"): "high",
    ("count", "distinct"): "high",
    ("sum", "sum"): "max(|low|, |high|)",
    ("mean", "sum"): "high - low",
    ("var", "sum"): "high - low",
    ("var", "square"): "(high - low)^2",
    ("stddev", "sum"): "high - low",
    ("stddev", "square"): "(high - low)^2",
}


class Outlook(NamedTuple):
    """Public figures of a query.

    Attributes:
        columns: name, kind, whether bounds are ``automatic``, which were ``assumed`` then, with
            fewer than how many units that have a value, in all groups together, the column is NULL
            (``null_below``; about, for the total that decides has noise), and each part's noise:
            ``sd`` and ``within``, the half-width of its 95% interval; both times ``times``, if that
            is not ``None``, of what the query will choose.
        selections: how groups are selected; for the fewest and for the most groups of a unit where
            the query chooses their number; empty if no groups are selected.  ``groups`` of a unit
            that count, tau in units, and how many units a group needs for an even chance to be
            shown, each in one group or in as many as count.
    """

    columns: list[dict[str, Any]]
    selections: list[dict[str, float]]


def outlook(gridded: Gridded) -> Outlook:
    """Return the expected accuracy of a query."""
    plan, columns = gridded.sketched(), []
    budget = gridded.budget(plan)
    histograms = () if gridded.design is None else gridded.design.histograms
    needed = {histogram.name: histogram.answered_from for histogram in histograms}
    for row, column in zip(expected(plan, budget), gridded.plan.columns, strict=True):
        for part in row["parts"]:
            factors = list[tuple[str, float]]()
            if column.automatic and (row["kind"], part["what"]) in _BOUND_FACTORS:
                most = COUNTED[1] if row["kind"] == "count" else 1.0
                factors.append((_BOUND_FACTORS[row["kind"], part["what"]], most))
            if column.automatic_rows:
                factors.append(("rows", float(MAX_ROWS)))
            if gridded.plan.automatic_groups:
                most, gaussian = float(plan.most_groups), budget.mu is not None
                factors.append(("sqrt(groups)", math.sqrt(most)) if gaussian else ("groups", most))
            for figure in ("sd", "within"):
                part[figure] /= math.prod(factor for _, factor in factors)
            part["times"] = _product([text for text, _ in factors])
        assumed = list(ASSUMED) if column.automatic else None
        null_below = needed[column.name] if column.automatic else None
        chosen = {"automatic": column.automatic, "assumed": assumed, "null_below": null_below}
        columns.append({**row, **chosen})
    if not plan.selects:
        return Outlook(columns, [])
    selections = [_selection(plan, budget)]
    if gridded.plan.automatic_groups:
        fewest = msgspec.structs.replace(plan, groups=1)
        selections.insert(0, _selection(fewest, gridded.budget(fewest)))
    return Outlook(columns, selections)


def _product(factors: list[str]) -> str | None:
    if len(factors) > 1:
        factors = [f"({text})" if " - " in text else text for text in factors]
    return " * ".join(factors) or None


def _selection(plan: QueryPlan, budget: QueryBudget) -> dict[str, float]:
    chosen, least = budget.selection, plan.min_units
    if chosen is None:
        return {}
    noise = None if chosen.tested is None else budget.parts[chosen.tested]
    count = 0.0 if noise is None else noise.part.alone
    sooner = 0.0 if noise is None else noise.sooner / (1 << COIN_BITS)
    return {
        "groups": budget.groups,
        "tau": chosen.tau / chosen.most,
        "even_chance_one_group": chosen.even_chance(1, least, count, sooner),
        "even_chance_all_groups": chosen.even_chance(budget.groups, least, count, sooner),
        "min_units": least,
    }


#: What the choice of a family minimises.
Optimise = Literal["limit", "answer"]
FAMILIES: tuple[Family, ...] = ("gaussian", "geometric")
#: Chance that a unit has more than i groups, i = 1, 2, .. below kappa, in each shape.
_SHAPES: tuple[Callable[[Float64], Float64], ...] = (
    np.zeros_like,
    lambda i: 1 / (i + 1),
    np.ones_like,
)
#: Points of a normal variable over which a figure of the tested count is integrated.
_NORMAL_POINTS = np.linspace(-9.0, 9.0, 361)


class Families(msgspec.Struct, frozen=True):
    """A question in each family of noise that it can take; public.

    Attributes:
        stated: the plan as the question states it, on the finest grid.
        optimise: what the choice minimises.
        options: the plan in each family that can answer it, on its grid.
    """

    stated: QueryPlan
    optimise: Optimise
    options: tuple[Gridded, ...]

    @property
    def digest(self) -> str:
        """The digest of the plan as the question states it, whichever family is taken."""
        if self.stated.mechanism == "auto":
            return f"{self.stated.digest} {self.optimise}"
        return f"{self.options[0].plan.digest} {self.options[0].bits}"

    def of(self, mu: float | None) -> Gridded:
        """Return the option that a charge with this ``mu`` paid for.

        Args:
            mu: of the charge; ``None``: a plain charge, of geometric noise.

        Raises:
            InvariantError: no option is of this family.
        """
        family = "geometric" if mu is None else "gaussian"
        named = (option for option in self.options if option.plan.mechanism == family)
        return required(next(named, None), "the charge is of one of the question's families")

    def taken(self, room: Room | None = None) -> Gridded:
        """Return the option that is taken.

        Args:
            room: of the account; ``None``: without an account or a limit.
        """
        options = self.options
        if room is not None and len(options) > 1:
            allowed = tuple(o for o in options if room.further_charges(cost_of(o.plan)))
            options = allowed or options
        if len(options) > 1 and room is not None and self.optimise == "limit":
            return _by_limit(options[0], options[1], room)
        return min(options, key=error_of)

    def described(self, chosen: Gridded, room: Room | None = None) -> list[dict[str, Any]]:
        """Return each family as a row of a plan, JSON-able.

        Returns:
            For each family ``mechanism``, whether it is ``taken``, its ``columns`` (see
            `Outlook`), its ``cost``, and how many such ``questions`` the limit allows (``None``
            without a limit).
        """
        costs = [cost_of(option.plan) for option in self.options]
        return [
            {
                "mechanism": option.plan.mechanism,
                "taken": option == chosen,
                "columns": outlook(option).columns,
                "cost": {"epsilon": cost.epsilon, "delta": cost.delta, "mu": cost.mu},
                "questions": None if room is None else room.further_charges(cost),
            }
            for option, cost in zip(self.options, costs, strict=True)
        ]


def families_of(plan_of: Callable[[int], QueryPlan], optimise: Optimise) -> Families:
    """Return a question in each of its families.

    Args:
        plan_of: maps a number of grid bits to the plan (`grids.finest`).
        optimise: what the choice minimises.

    Raises:
        UsageError: the plan is refused, or no grid is coarse enough.
    """
    plan = plan_of(BITS)
    if plan.mechanism != "auto":
        option = finest(functools.partial(_in_family, plan_of, plan.mechanism))
        return Families(plan, optimise, (option,))
    plan.check()
    options, refusals = list[Gridded](), list[UsageError]()
    for family in FAMILIES:
        if not _fits(plan, family):
            continue
        try:
            options.append(finest(functools.partial(_in_family, plan_of, family)))
        except UsageError as error:
            refusals.append(error)
    if not options:
        raise refusals[0]
    return Families(plan, optimise, tuple(options))


def _in_family(plan_of: Callable[[int], QueryPlan], family: Family, bits: int) -> QueryPlan:
    return finer_sums(msgspec.structs.replace(plan_of(bits), mechanism=family), bits)


def _fits(plan: QueryPlan, family: Family) -> bool:
    """Whether a family can answer a plan at all."""
    if family == "gaussian":
        return plan.delta > 0
    normed = plan.norm is not None or any(c.norm is not None for c in plan.columns)
    return not (plan.selects and normed)


def _by_limit(gaussian: Gridded, geometric: Gridded, room: Room) -> Gridded:
    """The better family at Gaussian noise's share of what is left."""
    part = room.equal_share(cost_of(gaussian.plan), cost_of(geometric.plan))
    if part == 1:
        return min((gaussian, geometric), key=error_of)
    plan = msgspec.structs.replace(geometric.plan, epsilon=geometric.plan.epsilon * part)
    try:
        other = error_of(Gridded(plan, design_bounds(plan), geometric.bits))
    except UsageError:  # no noise of so small a share can be drawn
        return gaussian
    return geometric if other < error_of(gaussian) else gaussian


@functools.lru_cache(maxsize=256)
def error_of(option: Gridded) -> float:
    """Return the error that families of one question are compared by; see the module."""
    plan = regridded(option.plan, assumed_bounds(option.plan), option.bits)
    budget = option.budget(plan)
    noises = [noise for noise in budget.parts if noise.part.column]
    shares = [part.share for part in parts_of(plan)] or [1.0]
    if budget.selection is None:
        errors = [noise.sd / (noise.part.most * noise.part.unit) for noise in noises]
        return _geometric_mean(errors, shares)
    shapes = [
        _geometric_mean(errors, shares) for errors in _of_population(plan, budget, budget.selection)
    ]
    return _geometric_mean(shapes, np.ones(len(shapes)).tolist())


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    logs = (w * math.log(v) for w, v in zip(weights, values, strict=True))
    return math.exp(math.fsum(logs) / math.fsum(weights))


# --- groups that are selected --------------------------------------------------------------------


def _of_population(plan: QueryPlan, budget: QueryBudget, selection: Selection) -> list[list[float]]:
    """For each shape of the reference population that matters, the mean |released - true| of each
    part over its groups, in units of L; without columns the share of groups not released."""
    from dpstream.accounting.tuning.reference import SIZES, mean_over_keys  # loads stream plans

    tested = None if selection.tested is None else budget.parts[selection.tested]
    given = SIZES, plan.min_units
    if selection.optimum:
        shapes = [_released_best(selection, budget.delta_each, *given)]
    elif budget.mu is None:
        noise = required(tested, "geometric thresholds test a count")
        shapes = [_released_geometric(selection, noise, *given)]
    else:
        shapes = [_released_gaussian(budget, selection, tested, *given, more) for more in _SHAPES]
    enough, out = plan.min_units <= SIZES, []
    for chances, tested_errors in shapes:
        chance, tested_error = chances * enough, tested_errors * enough
        if not plan.columns:
            out.append([mean_over_keys(1 - chance)])
            continue
        errors = []
        for noise in budget.parts:
            if not noise.part.column:
                continue
            most = noise.part.most * noise.part.unit
            part_error = tested_error if noise is tested else chance * _absolute(noise)
            errors.append(mean_over_keys(SIZES * (1 - chance) + part_error / most))
        out.append(errors)
    return out


def _absolute(noise: PartNoise) -> float:
    """E |Z|, in lattice units."""
    if noise.law == "gaussian":
        return noise.sd * math.sqrt(2 / math.pi)
    if noise.step is not None:
        sensitivity = noise.part.most * noise.part.unit
        return staircase_moments(noise.scale, sensitivity, noise.step)[0]
    total, beyond = _geometric_sums(noise)
    return 2 * float(beyond(np.ones(1))[0] / total)


def _geometric_sums(noise: PartNoise) -> tuple[float, Callable[[Float64], Float64]]:
    """(sum of q^|j| over all j, a function from j >= 1 to the sum of i q^i over i >= j)."""
    ratio, step = math.exp(-1 / noise.scale), -math.expm1(-1 / noise.scale)
    last = math.inf if noise.most is None else noise.most + 1.0

    def after(j: Float64 | float) -> Any:
        return ratio**j * (j + ratio / step) / step if j is not math.inf else 0.0

    total = 1 + 2 * (ratio - ratio**last) / step
    return total, lambda j: np.maximum(after(j) - after(last), 0.0)


def _released_gaussian(
    budget: QueryBudget,
    selection: Selection,
    tested: PartNoise | None,
    sizes: Float64,
    min_units: int,
    more: Callable[[Float64], Float64],
) -> tuple[Float64, Float64]:
    """(P[released], E[|noise of the tested count|; released]) of groups of so many units.

    Args:
        more: chance that a unit has more than i groups.  Among the units of a group the share of
            those with n groups is proportional to n P[n].
    """
    groups = np.arange(1, budget.groups + 1.0)
    above = np.concatenate([[1.0], more(groups[:-1]), [0.0]])
    parts = groups * (above[:-1] - above[1:])
    weight = float(parts @ np.array(selection.weights, np.float64) / parts.sum())
    each = selection.weighted * weight
    counted = 0.0 if tested is None else selection.counted * tested.sd
    if tested is not None:
        each += selection.counted * tested.part.alone
    apart = (each * sizes - selection.need(min_units))[:, None] + counted * _NORMAL_POINTS
    rest = math.sqrt(max(selection.sd**2 - counted**2, 0.0)) or 1.0
    passes = special.ndtr(apart / rest)
    density = np.exp(-(_NORMAL_POINTS**2) / 2)
    density /= density.sum()
    error = 0.0 if tested is None else passes @ (density * np.abs(_NORMAL_POINTS)) * tested.sd
    return passes @ density, np.asarray(error + np.zeros(len(sizes)))


def _released_best(
    selection: Selection, delta: float, sizes: Float64, min_units: int
) -> tuple[Float64, Float64]:
    """As above, of groups alone, where there is no count."""
    from dpstream.accounting.mechanisms.optimum import selection_optimum  # with balls

    optimum = required(selection_optimum(selection.optimum, delta), "it was listed before")
    counts = np.maximum(np.floor(sizes) - (min_units - 1), 0).astype(np.int64)
    chances = np.concatenate([[0.0], optimum.edges * 2.0**-64, [1.0]])
    return chances[np.minimum(counts, len(chances) - 1)], np.zeros(len(sizes))


def _released_geometric(
    selection: Selection, noise: PartNoise, sizes: Float64, min_units: int
) -> tuple[Float64, Float64]:
    """As above, where the noisy count is what is tested: means over the coin of its truncation."""
    need = selection.need(min_units)
    passes, error = _above(noise, need - sizes)
    if noise.sooner:
        less = msgspec.structs.replace(noise, most=required(noise.most, "it is truncated") - 1)
        coin = noise.sooner / (1 << COIN_BITS)
        other, of_other = _above(less, need - 1 - sizes)
        passes, error = (coin * a + (1 - coin) * b for a, b in ((other, passes), (of_other, error)))
    return passes, error


def _above(noise: PartNoise, bound: Float64) -> tuple[Float64, Float64]:
    """P[Z > bound] and E[|Z|; Z > bound] of geometric noise."""
    ratio, step = math.exp(-1 / noise.scale), -math.expm1(-1 / noise.scale)
    last = math.inf if noise.most is None else noise.most + 1.0
    total, beyond = _geometric_sums(noise)
    least = np.floor(bound) + 1
    # P[Z >= j] and E[Z; Z >= j] for j >= 1; below by the symmetry of the law.
    from_there = np.where(least > 0, least, 1 - least)
    chance = np.maximum(ratio**from_there - ratio**last, 0.0) / step / total
    error = beyond(from_there) / total
    passes = np.where(least > 0, chance, 1 - chance)
    return passes, np.where(least > 0, error, _absolute(noise) - error)
