"""The public plan of an execution: what its hash covers, what it spends, what it is charged.

**Composition.**  Levels and tables add up: a record is in groups of every level (mechanism.md
section 12).  Records of Puerto Rico are in its levels alone, all others in the rest alone, and
which a record is in is a part of the record; so a record costs the larger of the two sums.

**What is charged.**  Discrete Gaussian noise: rho.  Rounded Gaussian noise: mu = sqrt(2 rho), of
one Gaussian mechanism.  Geometric noise: plain epsilon.
"""

import hashlib
import math
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    mu_of_rho,
    rounded_up,
    total,
    zcdp_epsilon,
)
from dpstream.accounting.tabulation.levels import Level
from dpstream.accounting.tabulation.parameters import UNITS, Parameters
from dpstream.accounting.tabulation.scales import Draws, LawName, draws, law_of
from dpstream.accounting.tabulation.stability import Stability
from dpstream.accounting.tabulation.tables import Table

#: Raised with any change of what is measured, drawn or published under the same parameters.
VERSION = 2


class Cost(NamedTuple):
    """What a record pays: the guarantee, and the figure that the ledger composes with.

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
        files: digest of the public files, from which all groups come.
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
        """The privacy unit: what one row of a data file is."""
        return UNITS[self.parameters.program]

    @property
    def law(self) -> LawName:
        """Of all noise."""
        return law_of(self.parameters)

    def measured(self) -> list[tuple[Table, Level, Draws]]:
        """Tables and levels with a budget and groups, in public order, with their noise."""
        out = []
        for table in self.parameters.tables:
            for level, stability in self.stability.items():
                level_draws = draws(self.parameters, table, level, stability.groups)
                if level_draws is not None:
                    out.append((table, level, level_draws))
        return out

    @property
    def exact(self) -> bool:
        """Whether a budget is infinite: counts without noise, and no guarantee at all."""
        return any(
            self.parameters.budget(table.name, level) == math.inf
            for table, level, _ in self.measured()
        )

    def spent(self, *, puerto_rico: bool) -> list[Spent]:
        """What a record of Puerto Rico, or any other, spends.

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
        return out

    @property
    def budget(self) -> Fraction:
        """rho or pure epsilon of a record: the larger of the two sums.

        Raises:
            PolicyError: a budget is infinite.
        """
        return max(total(self.spent(puerto_rico=side)) for side in (False, True))

    def cost(self, delta: float = DELTA) -> Cost:
        """What the ledger is charged.

        Args:
            delta: that epsilon is stated for, where it is not pure.

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
    """Thresholds as JSON has them: an infinite one is a text."""
    return [float(x) if math.isfinite(x) else repr(float(x)) for x in thresholds]


def canonical(plan: TablePlan) -> dict[str, Any]:
    """Every public parameter by its frozen name, as JSON-able values.

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
