"""The scales of a level's noise, from its budget.

A unit is in at most s groups of a level, and changes one measured cell of each by one.  So a level
of budget rho is s releases of rho / s each, one for each group (mechanism.md section 12):

* discrete Gaussian of parameter sigma = sqrt(s / (2 rho)): 1 / (2 sigma^2) = rho / s;
* rounded Gaussian of the same sd: each release is 1/sigma-GDP, mu^2 = 2 rho / s;
* two-sided geometric of scale s / epsilon: each release is epsilon / s-DP.

Scales are floats, rounded up: the float itself, taken as the exact number that it is, costs no more
than the budget as it was written.  A scale below the smallest of the sampler's tables is raised to
it, which costs less still.
"""

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import (
    LEAST_TABLE_SCALE,
    LEAST_TABLE_SIGMA,
    MAX_TABLE_SCALE,
)
from dpstream.accounting.tabulation.parameters import Level, Parameters, Table

LawName = Literal["discrete gauss", "rounded gauss", "discrete laplace"]


class Noise(NamedTuple):
    """Noise of one kind of measured count.

    Attributes:
        law: its law.
        scale: sigma, or the scale of the geometric law; 0 where the budget is infinite: no noise.
    """

    law: LawName
    scale: float


class Draws(NamedTuple):
    """Noise of a table and level, ``None`` where it is not drawn.

    Attributes:
        total: of the total of a DETAILED_ONLY group, with the whole budget (p).
        first: of step 1, with gamma of it (p).
        detail: of the measured cells, with the rest of it (p), with all of it (h).
    """

    total: Noise | None
    first: Noise | None
    detail: Noise | None


def law_of(parameters: Parameters) -> LawName:
    """Return the law of all noise of an execution."""
    if parameters.definition == "puredp":
        return "discrete laplace"
    return "rounded gauss" if parameters.noise == "rounded" else "discrete gauss"


def draws(parameters: Parameters, table: Table, level: Level, stability: int) -> Draws | None:
    """Return the noise of a table at a level.

    Args:
        stability: s of the level.

    Returns:
        ``None`` if the level is off: nothing of it is measured.

    Raises:
        UsageError: noise of so small a budget is beyond the sampler's tables.
    """
    budget = parameters.budget(table.name, level)
    if level not in parameters.levels or budget == 0:
        return None
    law = law_of(parameters)

    def noise(part: Fraction) -> Noise:
        if isinstance(budget, float):
            return Noise(law, 0.0)
        return Noise(law, scale_of(law, budget * part / stability, f"{table.name} {level.label}"))

    if parameters.fraction is None:
        return Draws(None, None, noise(Fraction(1)))
    gamma = parameters.gamma
    total = noise(Fraction(1)) if level.detailed else None
    return Draws(total, noise(gamma), noise(1 - gamma))


def scale_of(law: LawName, budget: Fraction, field: str = "budget") -> float:
    """Return the least scale of the sampler whose noise on one count costs at most ``budget``.

    Args:
        budget: rho (Gaussian laws) or epsilon, exact and positive.
        field: what a refusal names.

    Raises:
        UsageError: the scale is beyond the range.
    """
    if law == "discrete laplace":
        least, most = LEAST_TABLE_SCALE, MAX_TABLE_SCALE
        ratio = Fraction(most) * budget
    else:
        least, most = (LEAST_TABLE_SIGMA if law == "discrete gauss" else 2.0**-3), MAX_SIGMA
        ratio = 2 * Fraction(most) ** 2 * budget
    if ratio < 1:  # asked before there is a float, which may have no room for it
        raise UsageError(
            field, f"is so small that noise of a scale above {most:,.0f} is needed", "give more"
        )
    if law == "discrete laplace":
        scale = float(1 / budget)
        while Fraction(scale) * budget < 1:
            scale = math.nextafter(scale, math.inf)
    else:
        scale = math.sqrt(float(1 / (2 * budget)))
        while 2 * Fraction(scale) ** 2 * budget < 1:
            scale = math.nextafter(scale, math.inf)
    return min(max(scale, least), most)
