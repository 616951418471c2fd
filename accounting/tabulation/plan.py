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
"""

import hashlib
import math
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    mu_of_rho,
    rounded_up,
    total,
    zcdp_epsilon,
)
from dpstream.accounting.tabulation.parameters import (
    UNITS,
    Draws,
    LawName,
    Level,
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


class Cost(NamedTuple):
    """The cost of a record: the guarantee, and the figure that the ledger composes with.

    Attributes:
        epsilon, delta: of the execution alone; delta is 0 where epsilon is pure.
        mu, rho: of rounded, of discrete Gaussian noise; with neither it is plain.
    """

    epsilon: float
    delta: float
    mu: float | None = None
    rho: float | None = None


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
