"""The resolved parameters of an execution and its noise: public, and fixed before a record is read.

**Levels** of population groups are a kind of region and a level of iterations, each with a budget.

**Tables.**  A record falls into one *leaf* of a table, the finest cells there are.  A *detail* is a
partition of the leaves into measured cells, so that a record changes one measured cell of a group
by one, whatever detail the group has.  Published beside the measured cells are sums of them, which
cost nothing: ages of both sexes, the total, families of every kind.

**Noise** of a level follows from its budget.  A unit is in at most s groups of a level, and changes
one measured cell of each by one.  So a level of budget rho is s releases of rho / s each, one for
each group (mechanism.md section 12):

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

import msgspec

from dpstream.accounting.composition import decimal_value
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import (
    LEAST_TABLE_SCALE,
    LEAST_TABLE_SIGMA,
    MAX_TABLE_SCALE,
)

#: Kinds of regions outside and inside of Puerto Rico, in public order: no block is of both.
US_REGIONS = ("USA", "STATE", "COUNTY", "TRACT", "PLACE", "AIANNH")
PR_REGIONS = ("PR-STATE", "PR-COUNTY", "PR-TRACT", "PR-PLACE")
#: Kinds of regions that are large: their levels take the iterations that are not COARSE_ONLY.
_LARGE = frozenset({"USA", "STATE", "PR-STATE"})


class Level(NamedTuple):
    """One level; a unit is in at most s of its groups (`accounting.tabulation.plan`).

    Attributes:
        iteration_level: 1 or 2.
        region_type: one of ``US_REGIONS`` or ``PR_REGIONS``.
    """

    iteration_level: int
    region_type: str

    @property
    def name(self) -> str:
        """The name in parameters of budgets: ``level_1_usa``, ``level_2_pr_state``."""
        return f"level_{self.iteration_level}_{self.region_type.lower().replace('-', '_')}"

    @property
    def label(self) -> str:
        """The label in parameters of thresholds: ``(USA, 1)``."""
        return f"({self.region_type}, {self.iteration_level})"

    @property
    def detailed(self) -> bool:
        """Return whether it takes iterations that are not COARSE_ONLY; else those not
        DETAILED_ONLY.
        """
        return self.region_type in _LARGE

    @property
    def puerto_rico(self) -> bool:
        """Return whether its records are those of Puerto Rico, which no other level counts."""
        return self.region_type in PR_REGIONS


def _levels(regions: tuple[str, ...]) -> tuple[Level, ...]:
    return tuple(Level(level, region) for region in regions for level in (1, 2))


US_LEVELS, PR_LEVELS = _levels(US_REGIONS), _levels(PR_REGIONS)


#: Inner edges of the bins of age by how many bins there are; the first begins at 0.
AGE_BINS: dict[int, tuple[int, ...]] = {
    4: (18, 45, 65),
    9: (5, 18, 25, 35, 45, 55, 65, 75),
    23: (
        5,
        10,
        15,
        18,
        20,
        21,
        22,
        25,
        30,
        35,
        40,
        45,
        50,
        55,
        60,
        62,
        65,
        67,
        70,
        75,
        80,
        85,
    ),
}
#: Oldest age; the last bin ends with it.
OLDEST = 115


class Detail(NamedTuple):
    """A partition of a table's leaves.

    Attributes:
        cells: (leaves,) measured cell of each leaf, 0 .. size - 1.
    """

    cells: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of measured cells."""
        return max(self.cells) + 1


class Table(NamedTuple):
    """The measured tables.

    Attributes:
        name: ``t1t2`` of persons, ``t3`` and ``t4`` of households.
        leaves: of ``t1t2`` 46, 23 ages of sex 1 and then of sex 2; of ``t3`` the 5 data cells 2, 4,
            5, 7, 8; of ``t4`` the 3 data cells 1, 2, 3.
        details: the details in order, from the total to the leaves.
        data_cells: leaves of each numbered data cell (``t3``, ``t4``); 0 is the total.
    """

    name: str
    leaves: int
    details: tuple[Detail, ...]
    data_cells: tuple[tuple[int, ...], ...] = ()

    def published(self, detail: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the numbered data cells of a detail, each with the measured cells that it sums.

        A data cell is there if it is a union of measured cells.
        """
        cells, out = self.details[detail].cells, []
        for number, leaves in enumerate(self.data_cells):
            measured = sorted({cells[leaf] for leaf in leaves})
            if sum(cell in measured for cell in cells) == len(leaves):
                out.append((number, tuple(measured)))
        return tuple(out)


def _sex_by_age(bins: int) -> Detail:
    """The partition of sex by 23 ages into sex by ``bins`` ages."""
    fine = (0, *AGE_BINS[23])
    bins_of_ages = [sum(edge <= start for edge in AGE_BINS[bins]) for start in fine]
    return Detail(tuple(sex * bins + bin_ for sex in (0, 1) for bin_ in bins_of_ages))


PERSONS = Table("t1t2", 46, (Detail((0,) * 46), *(_sex_by_age(bins) for bins in (4, 9, 23))))
T3 = Table(
    "t3",
    5,
    (
        Detail((0, 0, 0, 0, 0)),
        Detail((0, 0, 0, 1, 1)),
        Detail((0, 1, 1, 2, 3)),
        Detail((0, 1, 2, 3, 4)),
    ),
    ((0, 1, 2, 3, 4), (0, 1, 2), (0,), (1, 2), (1,), (2,), (3, 4), (3,), (4,)),
)
T4 = Table("t4", 3, (Detail((0, 0, 0)), Detail((0, 1, 2))), ((0, 1, 2), (0,), (1,), (2,)))
#: Tables of each program.
TABLES: dict[str, tuple[Table, ...]] = {"p": (PERSONS,), "h": (T3, T4)}


Program = Literal["p", "h"]
#: The privacy unit of each program: what one row of its data file is.
UNITS: dict[Program, str] = {"p": "person", "h": "household"}
Family = Literal["census", "rounded"]
Definition = Literal["zcdp", "puredp"]


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of one program.

    Attributes:
        program: ``p``: persons (t1, t2); ``h``: households (t3, t4).
        noise: ``census``: discrete Gaussian (zcdp) or two-sided geometric (puredp); ``rounded``:
            rounded Gaussian (zcdp only).
        definition: what budgets are: rho, or epsilon.
        budgets: by table name; rho or epsilon of a level, shared by its s groups; 0 switches the
            level off; infinite: exact counts, for public data only.
        fraction: gamma, the part of a level's budget that step 1 spends (p); ``None`` (h).
        thresholds: by table name; of each level one for each detail above 0, not falling.
        zero_suppression: chance of the quantile that a total must exceed to be kept; 0: all are.
        allow_negative: whether measured counts below 0 are published as they are.
        run_us, run_pr: whether levels of the US run, and those of Puerto Rico.
        max_race_codes: race codes of a record that count, 1 to 8.
        state_filter: FIPS codes of the states whose blocks and records count.
        estimates: ``census``: counts of the detail only; ``combined``: with step 1.
    """

    program: Program
    noise: Family
    definition: Definition
    budgets: dict[str, dict[Level, float]]
    fraction: float | None
    thresholds: dict[str, dict[Level, tuple[float, ...]]]
    zero_suppression: float
    allow_negative: bool
    run_us: bool
    run_pr: bool
    max_race_codes: int
    state_filter: tuple[str, ...]
    estimates: Literal["census", "combined"] = "census"

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables of the program."""
        return TABLES[self.program]

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that run, also without a budget, in public order."""
        return (US_LEVELS if self.run_us else ()) + (PR_LEVELS if self.run_pr else ())

    def budget(self, table: str, level: Level) -> Fraction | float:
        """Return the budget of a level as it was written, 0 if it is off or infinite if it is
        exact.
        """
        budget = self.budgets.get(table, {}).get(level, 0.0)
        return budget if math.isinf(budget) else decimal_value(budget)

    @property
    def gamma(self) -> Fraction:
        """Part of a level's budget that step 1 spends, as it was written; 0 without a step 1."""
        return Fraction() if self.fraction is None else decimal_value(self.fraction)


LawName = Literal["discrete gauss", "rounded gauss", "discrete laplace"]


class Noise(NamedTuple):
    """Noise of one kind of measured count.

    Attributes:
        law: the law of the noise.
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
