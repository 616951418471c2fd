"""The public plan of an execution: what its hash covers, what it spends, what it is charged.

**Composition.**  Levels and tables add up: a record is in groups of every level (mechanism.md
section 12).  Records of Puerto Rico are in its levels alone, all others in the rest alone, and
which a record is in is a part of the record; so a record costs the larger of the two sums.

**What is charged.**  Discrete Gaussian noise: rho.  Rounded Gaussian noise: mu = sqrt(2 rho), of
one Gaussian mechanism.  Geometric noise: plain epsilon.

**s** is the largest number of groups of one level that a record can be in, from the public code
lists.  A level takes some iterations of race, each *alone* or *in combination*, and some of
ethnicity.  A record has one to k race codes, one ethnicity code, and one region of each kind.  It
is in an iteration alone if all its race codes are the iteration's, in combination if one is, and in
an iteration of ethnicity if its ethnicity code is.  Any code of the list can stand in any of these
fields; a race code that is repeated counts once; a code may belong to no iteration.

Validation allows a code at most one iteration of each kind at a level (h <= 1).  With it s has a
closed form.  Let g be the number of iterations in combination that have a code, and g_i the number
of those that have a code of the iteration alone i.  Then

    s = max( min(k, g),  max over i of 1 + min(k, g_i) ) + (1 if any code has an ethnicity).

*Proof.*  The ethnicity code is independent of the race codes, and is in one iteration or none.  Let
S be the set of a record's race codes, 1 <= |S| <= k.  Each code of S is in at most one iteration
in combination, so S is in at most min(k, g) of them.  S is in at most one iteration alone, because
its first code is in at most one.  If S is in none, the record is in at most min(k, g) groups.  If S
is in i, all its codes are codes of i, so S is in at most min(k, g_i) iterations in combination, and
the record in at most 1 + min(k, g_i).  Every term is reached: one code each from min(k, g)
iterations in combination; and, for an i that has a code, one code of i from each of min(k, g_i)
iterations in combination, or any code of i if g_i = 0.  (If the first record is in an iteration
alone too, the second term counts it.)  So s is the maximum, neither more nor less.  ∎

The production lists have g_i = 1 everywhere and g > 8: s = 8 + 1 = 9.

**The printed plan** has budgets, noise and margins of every kind of figure, and epsilon by each
accounting.  All of it is public; no data file is read.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import PolicyError, UsageError, instance, required
from dpstream.accounting.figures import guarantee_pair, up
from dpstream.accounting.gaussian import brentq
from dpstream.accounting.libraries import special
from dpstream.accounting.strength import weaknesses
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    gaussian_losses,
    geometric_losses,
    mu_of_rho,
    renyi_epsilon,
    rounded_up,
    total,
    zcdp_epsilon,
    zcdp_epsilon_analytic,
)
from dpstream.accounting.tabulation.margins import margin, published_margin, tail
from dpstream.accounting.tabulation.parameters import (
    UNITS,
    Draws,
    LawName,
    Level,
    Noise,
    Parameters,
    Table,
    draws,
    law_of,
)

#: (m, 2) pairs of an iteration's number and a code's number.
Members = Int32 | Int64


class Stability(NamedTuple):
    """s of one level, with what it follows from.

    Attributes:
        groups: s, at least 1: a level without a member has noise too.
        combined: min(k, g), the most groups of a record that is in no iteration alone.
        alone: the largest 1 + min(k, g_i), 0 where no iteration alone has a code.
        ethnicity: 1 if an iteration of ethnicity has a code, else 0.
        codes: k.
    """

    groups: int
    combined: int
    alone: int
    ethnicity: int
    codes: int

    @property
    def description(self) -> str:
        """The rule, for people."""
        return (
            f"s = {self.groups}: up to {self.codes} race codes reach {self.combined} groups in "
            f"combination, codes that share a group alone reach {self.alone}, "
            f"and the ethnicity code {self.ethnicity}"
        )


def stability(
    alone: Members, combined: Members, ethnicity: Members, max_race_codes: int
) -> Stability:
    """Return s of the level that takes these iterations.

    Args:
        alone, combined, ethnicity: (m, 2) pairs (iteration, code) of the iterations of each kind
            that the level takes; pairs may be repeated.
        max_race_codes: k, 1 or more.

    Raises:
        UsageError: a code is in two iterations of a kind, for which the closed form is too small.
    """
    kinds = [np.unique(pairs, axis=0).astype(np.int64) for pairs in (alone, combined, ethnicity)]
    for pairs in kinds:
        if len(np.unique(pairs[:, 1])) < len(pairs):
            raise UsageError(
                "iterations", "have a code twice in one level and kind", "validate the lists"
            )
    own, joint, eth = kinds
    together = min(max_race_codes, len(np.unique(joint[:, 0])))
    reached = 1 + min(max_race_codes, _most_shared(own, joint)) if len(own) else 0
    of_ethnicity = int(len(eth) > 0)
    groups = max(1, max(together, reached) + of_ethnicity)
    return Stability(groups, together, reached, of_ethnicity, max_race_codes)


def _most_shared(alone: Int64, combined: Int64) -> int:
    """The largest g_i; both lists have each code once."""
    order = np.argsort(combined[:, 1])
    codes, iterations = combined[order, 1], combined[order, 0]
    place = np.searchsorted(codes, alone[:, 1])
    inside = place < len(codes)
    inside[inside] = codes[place[inside]] == alone[inside, 1]
    both = np.stack([alone[inside, 0], iterations[place[inside]]], axis=1)
    _, counts = np.unique(np.unique(both, axis=0)[:, 0], return_counts=True)
    return int(counts.max(initial=0))


#: Raised with any change of what is measured, drawn or published under the same parameters.
VERSION = 2


class TablePlan(msgspec.Struct, frozen=True):
    """Everything that is fixed before a record is read.

    Attributes:
        parameters: of one program.
        stability: s of each level that has groups, with what it follows from.
        files: digest of the public lists, from which all groups come.
    """

    parameters: Parameters
    stability: dict[Level, Stability]
    files: str

    @property
    def hash(self) -> str:
        """128-bit hex digest of every public parameter."""
        encoded = msgspec.json.encode(canonical(self), order="sorted")
        return hashlib.blake2b(encoded, digest_size=16, person=b"dpstream-table").hexdigest()

    @property
    def unit(self) -> str:
        """The privacy unit: one row of a data file."""
        return UNITS[self.parameters.program]

    @property
    def law(self) -> LawName:
        """The law of all noise."""
        return law_of(self.parameters)

    def measured(self) -> list[tuple[Table, Level, Draws]]:
        """Return the tables and levels with a budget and groups, in public order, with their
        noise.
        """
        out = []
        for table in self.parameters.tables:
            for level, stability in self.stability.items():
                level_draws = draws(self.parameters, table, level, stability.groups)
                if level_draws is not None:
                    out.append((table, level, level_draws))
        return out

    @property
    def exact(self) -> bool:
        """Return whether a budget is infinite: counts without noise, and no guarantee at all."""
        return any(
            self.parameters.budget(table.name, level) == math.inf
            for table, level, _ in self.measured()
        )

    def spent(self, *, puerto_rico: bool) -> tuple[Spent, ...]:
        """Return the budgets that a record of Puerto Rico, or any other, spends.

        Raises:
            PolicyError: a budget is infinite.
        """
        out = []
        for table, level, _ in self.measured():
            budget = self.parameters.budget(table.name, level)
            if isinstance(budget, float):
                raise PolicyError(
                    f"budget of {table.name} {level.label}",
                    "is infinite, so that nothing is promised",
                    "run it on public data, without an account",
                )
            if level.puerto_rico == puerto_rico:
                groups = self.stability[level].groups
                gamma, kind = self.parameters.gamma, level.iteration_level
                out.append(Spent(groups, budget, gamma, level.detailed, kind))
        return tuple(out)

    @property
    def budget(self) -> Fraction:
        """rho or pure epsilon of a record: the larger of the two sums.

        Raises:
            PolicyError: a budget is infinite.
        """
        return max(total(self.spent(puerto_rico=side)) for side in (False, True))

    def cost(self, delta: float = DELTA) -> Cost:
        """Return the cost that the ledger is charged.

        Args:
            delta: the delta at which epsilon is stated, where the guarantee is not pure.

        Raises:
            PolicyError: a budget is infinite.
        """
        budget = self.budget
        if self.law == "discrete laplace":
            return Cost(rounded_up(budget), 0.0)
        if self.law == "rounded gauss":
            return Cost(gaussian_epsilon(budget, delta), delta, mu=mu_of_rho(budget))
        return Cost(zcdp_epsilon(budget, delta), delta, rho=rounded_up(budget))


def thresholds_json(thresholds: tuple[float, ...]) -> list[float | str]:
    """Return thresholds for JSON, with an infinite one as text."""
    return [float(x) if math.isfinite(x) else repr(float(x)) for x in thresholds]


def canonical(plan: TablePlan) -> dict[str, Any]:
    """Return every public parameter by its frozen name, as JSON-able values.

    Levels and tables are listed by what they are: one that is off or has no groups is not there.
    """
    parameters = plan.parameters
    return {
        "version": VERSION,
        "program": parameters.program,
        "noise": parameters.noise,
        "definition": parameters.definition,
        "fraction": None if parameters.fraction is None else float(parameters.fraction),
        "zero_suppression": float(parameters.zero_suppression),
        "allow_negative": parameters.allow_negative,
        "max_race_codes": parameters.max_race_codes,
        "state_filter": sorted(parameters.state_filter),
        "estimates": parameters.estimates,
        "files": plan.files,
        "levels": [
            {
                "table": table.name,
                "iteration_level": level.iteration_level,
                "region_type": level.region_type,
                "budget": str(parameters.budget(table.name, level)),
                "thresholds": thresholds_json(parameters.thresholds[table.name][level]),
                "stability": plan.stability[level].groups,
            }
            for table, level, _ in plan.measured()
        ],
    }


# From the margin that a figure shall have to the least budget that gives it.
#
# A margin m is met where P(|Z| > m) <= .05.  Margins are whole numbers, so many budgets have the
# same: ``same_margins`` is the least of them.  The budgets that are published with the mechanism
# are not exact (`tests.oracle.published_margins` has them, and a test compares).

#: Chance that a figure misses its margin.
MISSED = 0.05


@functools.lru_cache(maxsize=1024)
def least_budget(law: LawName, most: int) -> float:
    """Return the least rho or epsilon of one count whose noise is within ``most`` with 95%."""
    if law == "discrete laplace":
        return brentq(
            lambda epsilon: 2 * math.exp(-epsilon * most) / (1 + math.exp(epsilon)) - MISSED,
            1e-9,
            50.0,
            xtol=1e-15,
        )
    if law == "rounded gauss":
        return 1 / (2 * ((most + 0.5) / -float(special.ndtri(MISSED / 2))) ** 2)
    near = (most + 0.5) / -float(special.ndtri(MISSED / 2))
    sigma = brentq(lambda x: tail(Noise(law, x), most) - MISSED, near / 2, 2 * near, xtol=2e-12)
    return 1 / (2 * sigma**2)


def same_margins(noise: Draws, budget: Fraction, groups: int, gamma: Fraction) -> Fraction:
    """Return the least budget of a level whose single counts have margins no larger than now.

    Margins of sums grow with it, and so does step 1's noise.

    Args:
        noise: of the level at its budget; groups: s.
    """
    least_budget = least_of(required(noise.detail, "noise.detail is there")) * groups / (1 - gamma)
    if noise.total is not None:
        least_budget = max(least_budget, least_of(noise.total) * groups)
    return min(least_budget, budget)


def least_of(noise: Noise) -> Fraction:
    """Return a budget, just above the least, of one count with no larger margin than this noise."""
    return Fraction(least_budget(noise.law, margin(noise))) * (1 + Fraction(1, 10**6))


#: Below this delta float errors of composed losses would matter.
LEAST_DELTA = 1e-12
NO_GUARANTEE = "NO GUARANTEE: a budget is infinite, and counts are exact; for public data only"
CLIPPED = (
    "counts below 0 become 0 before they are summed: margins of sums are those of the worst case, "
    "in which all their cells are truly 0"
)
SUPPRESSED = (
    "totals below a limit are left out: a margin is that of all totals of its kind, and those that "
    "are kept are too high more often than too low"
)
BIASED = (
    "combined estimates are unbiased over all noise, but not for groups near a threshold, whose "
    "detail the same step-1 total chose"
)


def describe(
    plan: TablePlan, delta: float = DELTA, groups: Mapping[Level, int] | None = None
) -> dict[str, Any]:
    """Return every public figure of a plan, JSON-able; figures of the guarantee are rounded up.

    Args:
        delta: the delta at which epsilon is stated.
        groups: how many groups each level has, if it shall be told.

    Returns:
        ``guarantee``, ``accountings`` (name, epsilon, whether it ``holds`` for this noise, note),
        ``sides`` (budget of a record of Puerto Rico and of any other), ``same_margins`` (least
        budgets with the same margins of single counts), ``levels`` (budget, s and
        its rule, noise, thresholds, ``figures`` with their exact 95% margins), ``notes`` and
        ``warnings``.
    """
    parameters = plan.parameters
    return {
        "plan_hash": plan.hash,
        "program": parameters.program,
        "noise": plan.law,
        "definition": parameters.definition,
        "estimates": parameters.estimates,
        "unit": f"one {plan.unit}'s record, added or removed",
        "guarantee": _guarantee(plan, delta),
        "accountings": [] if plan.exact else accountings(plan, delta),
        "sides": None
        if plan.exact
        else {
            side: rounded_up(total(plan.spent(puerto_rico=side == "pr"))) for side in ("us", "pr")
        },
        "same_margins": None if plan.exact else _same_margins(plan, delta),
        "levels": [
            _level(plan, table, level, noise, groups or {})
            for table, level, noise in plan.measured()
        ],
        "notes": _notes(plan),
        "warnings": [NO_GUARANTEE] if plan.exact else weaknesses(*plan.cost(delta)[:2]),
    }


def _guarantee(plan: TablePlan, delta: float) -> dict[str, Any]:
    if plan.exact:
        return {"text": NO_GUARANTEE, "epsilon": None, "delta": None, "mu": None, "rho": None}
    cost = plan.cost(delta)
    words = f"{guarantee_pair(cost.epsilon, cost.delta)}-differential privacy of all tables"
    figures = {name: getattr(cost, name) for name in ("epsilon", "delta", "mu", "rho")}
    return {"text": f"{words}, for one {plan.unit}'s record", **figures}


def _same_margins(plan: TablePlan, delta: float) -> dict[str, Any]:
    """Least budgets of all levels at which single counts keep their margins."""
    gamma, sums = plan.parameters.gamma, {False: Fraction(), True: Fraction()}
    budgets = dict[str, dict[str, float]]()
    for table, level, noise in plan.measured():
        budget = instance(plan.parameters.budget(table.name, level), Fraction)
        least = same_margins(noise, budget, plan.stability[level].groups, gamma)
        # Six digits are what a person writes into a file.
        written = min(Fraction(up(float(least))), budget)
        budgets.setdefault(table.name, {})[level.name] = rounded_up(written)
        sums[level.puerto_rico] += written
    total_ = max(sums.values())
    epsilon = rounded_up(total_)
    if plan.law != "discrete laplace":
        convert = gaussian_epsilon if plan.law == "rounded gauss" else zcdp_epsilon
        epsilon = convert(total_, delta)
    return {"budget": rounded_up(total_), "epsilon": epsilon, "budgets": budgets}


_OF_ROUNDED = (
    'what noise = "rounded" costs at this rho; the plan draws discrete Gaussian noise, for which '
    "this is no guarantee"
)


def accountings(plan: TablePlan, delta: float = DELTA) -> list[dict[str, Any]]:
    """Return epsilon of a record by each accounting, the larger one of US and of Puerto Rico.

    Those that hold for the plan's noise come first.  The others bound nothing: they are published
    figures, or those of another noise, to compare with.

    Raises:
        PolicyError: a budget is infinite.
    """
    sides = [plan.spent(puerto_rico=side) for side in (False, True)]

    def row(
        name: str, epsilon: float, holds: bool, note: str, pure: bool = False
    ) -> dict[str, Any]:
        return {
            "name": name,
            "epsilon": epsilon,
            "delta": 0.0 if pure else delta,
            "holds": holds,
            "note": note,
        }

    if plan.law == "discrete laplace":
        integral = max(renyi_epsilon(side, delta, integral=True) for side in sides)
        return [
            row("sum", rounded_up(plan.budget), True, "pure: no delta", pure=True),
            row("renyi", max(renyi_epsilon(s, delta) for s in sides), True, "exact divergences"),
            row("losses", max(geometric_losses(s, delta) for s in sides), True, "composed exactly"),
            row("renyi-integral", integral, False, "the published formula, which is too small"),
        ]
    rho, rounded = plan.budget, plan.law == "rounded gauss"
    note = "one Gaussian mechanism" if rounded else _OF_ROUNDED
    epsilon = gaussian_epsilon(rho, delta)
    gaussian = row("gaussian", epsilon, rounded, f"mu = {up(mu_of_rho(rho))}: {note}")
    losses = list[dict[str, Any]]()
    if not rounded and delta >= LEAST_DELTA:
        least = max(gaussian_losses(side, delta) for side in sides)
        losses.append(row("losses", least, True, "composed exactly; the account composes rho"))
    rows = [
        gaussian,
        *losses,
        row("zcdp", zcdp_epsilon(rho, delta), True, "best conversion"),
        row("zcdp-analytic", zcdp_epsilon_analytic(rho, delta), True, "rho + 2 sqrt(rho ln 1/d)"),
    ]
    return sorted(rows, key=lambda one: not one["holds"])


def _level(
    plan: TablePlan, table: Table, level: Level, noise: Draws, groups: Mapping[Level, int]
) -> dict[str, Any]:
    parameters, stability = plan.parameters, plan.stability[level]
    budget = parameters.budget(table.name, level)
    return {
        "table": table.name,
        "level": level.name,
        "label": level.label,
        "budget": rounded_up(budget) if isinstance(budget, Fraction) else None,
        "stability": stability.groups,
        "stability_rule": stability.description,
        "scales": {kind: one and one.scale for kind, one in noise._asdict().items()},
        "thresholds": thresholds_json(parameters.thresholds[table.name][level]),
        "groups": groups.get(level),
        "suppressed_at": _suppressed_at(plan, level, noise),
        "figures": figures(plan, table, noise),
    }


def _suppressed_at(plan: TablePlan, level: Level, noise: Draws) -> int | None:
    """The count that a total must exceed to be kept, if any is suppressed."""
    chance = plan.parameters.zero_suppression
    never = plan.parameters.program == "h" or level.detailed or not chance
    if never or noise.detail is None:
        return None
    return margins.quantile(noise.detail, chance)


def figures(plan: TablePlan, table: Table, noise: Draws) -> list[dict[str, Any]]:
    """Return each kind of figure of a table at a level, with its exact 95% margin."""
    out, parameters = list[dict[str, Any]](), plan.parameters

    def row(name: str, what: str, detail: int | None, size: int, part: int) -> None:
        own = required(noise.total if detail is None else noise.detail, "a figure is measured")
        first = None if detail is None else noise.first
        margin = published_margin(parameters, first, own, size, part)
        out.append(
            {"table": name, "figure": what, "detail": detail, "cells": part, "margin": margin}
        )

    if table.data_cells:
        for detail, each in enumerate(table.details):
            for part in sorted({len(cells) for _, cells in table.published(detail)}):
                alike = [str(cell) for cell, cells in table.published(detail) if len(cells) == part]
                row(table.name, f"data cells {', '.join(alike)}", detail, each.size, part)
        return out
    if noise.total is not None:
        row("t1", "total of a group of which only the total is measured", None, 1, 1)
    for detail, size in enumerate(each.size for each in table.details):
        row("t1", "total", detail, size, size)
        if detail:
            row("t2", "sex", detail, size, size // 2)
            row("t2", "sex by age", detail, size, 1)
    return out


def _notes(plan: TablePlan) -> list[str]:
    parameters, out = plan.parameters, list[str]()
    combines = parameters.estimates == "combined" and parameters.fraction is not None
    if combines:
        out.append(BIASED)
    elif not parameters.allow_negative:
        out.append(CLIPPED)
    if parameters.program == "p" and parameters.zero_suppression:
        out.append(SUPPRESSED)
    if parameters.program == "h":
        out.append("detail is chosen by published totals, at no further cost")
    return out
