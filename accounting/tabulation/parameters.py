"""The resolved parameters of an execution: public, and fixed before a record is read.

**Levels** of population groups are a kind of region and a level of iterations, each with a budget.

**Tables.**  A record falls into one *leaf* of a table, the finest cells there are.  A *detail* is a
partition of the leaves into measured cells, so that a record changes one measured cell of a group
by one, whatever detail the group has.  Published beside the measured cells are sums of them, which
cost nothing: ages of both sexes, the total, families of every kind.
"""

from fractions import Fraction
from typing import Literal, NamedTuple

import msgspec

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
        details: from the least detail, which is the total, to the most, which are the leaves.
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
    """The partition of sex by 23 ages into sex by so many."""
    fine = (0, *AGE_BINS[23])
    of = [sum(edge <= start for edge in AGE_BINS[bins]) for start in fine]
    return Detail(tuple(sex * bins + bin_ for sex in (0, 1) for bin_ in of))


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
        run_us, run_pr: which levels run.
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
        return written(self.budgets.get(table, {}).get(level, 0.0))

    @property
    def gamma(self) -> Fraction:
        """Part of a level's budget that step 1 spends, as it was written; 0 without a step 1."""
        return Fraction() if self.fraction is None else Fraction(repr(float(self.fraction)))


def written(figure: float) -> Fraction | float:
    """Return a figure exactly as a person writes it: 0.1 is a tenth; infinity stays."""
    return figure if figure == float("inf") else Fraction(repr(float(figure)))
