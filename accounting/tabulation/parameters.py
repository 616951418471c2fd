"""What an execution was asked for, resolved: public, and fixed before a record is read."""

from fractions import Fraction
from typing import Literal

import msgspec

from dpstream.accounting.tabulation.levels import PR_LEVELS, US_LEVELS, Level
from dpstream.accounting.tabulation.tables import TABLES, Table

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
        """Levels that run, those without a budget too, in public order."""
        return (US_LEVELS if self.run_us else ()) + (PR_LEVELS if self.run_pr else ())

    def budget(self, table: str, level: Level) -> Fraction | float:
        """Budget of a level as it was written, 0 if it is off or infinite if it is exact."""
        return written(self.budgets.get(table, {}).get(level, 0.0))

    @property
    def gamma(self) -> Fraction:
        """Part of a level's budget that step 1 spends, as it was written; 0 without a step 1."""
        return Fraction() if self.fraction is None else Fraction(repr(float(self.fraction)))


def written(figure: float) -> Fraction | float:
    """A figure as a person writes it, exactly: 0.1 is a tenth; what is infinite stays so."""
    return figure if figure == float("inf") else Fraction(repr(float(figure)))
