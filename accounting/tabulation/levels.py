"""Levels of population groups: a kind of region and a level of iterations, each with a budget."""

from typing import NamedTuple

#: Kinds of regions outside and inside of Puerto Rico, in public order: no block is of both.
US_REGIONS = ("USA", "STATE", "COUNTY", "TRACT", "PLACE", "AIANNH")
PR_REGIONS = ("PR-STATE", "PR-COUNTY", "PR-TRACT", "PR-PLACE")
#: Kinds of regions that are large: their levels take the iterations that are not COARSE_ONLY.
_LARGE = frozenset({"USA", "STATE", "PR-STATE"})


class Level(NamedTuple):
    """One level; a unit is in at most s of its groups (``stability``).

    Attributes:
        iteration_level: 1 or 2.
        region_type: one of ``US_REGIONS`` or ``PR_REGIONS``.
    """

    iteration_level: int
    region_type: str

    @property
    def name(self) -> str:
        """As parameters name budgets: ``level_1_usa``, ``level_2_pr_state``."""
        return f"level_{self.iteration_level}_{self.region_type.lower().replace('-', '_')}"

    @property
    def label(self) -> str:
        """As parameters name thresholds: ``(USA, 1)``."""
        return f"({self.region_type}, {self.iteration_level})"

    @property
    def detailed(self) -> bool:
        """Whether it takes iterations that are not COARSE_ONLY; else those not DETAILED_ONLY."""
        return self.region_type in _LARGE

    @property
    def puerto_rico(self) -> bool:
        """Whether its records are those of Puerto Rico, which no other level counts."""
        return self.region_type in PR_REGIONS


def _levels(regions: tuple[str, ...]) -> tuple[Level, ...]:
    return tuple(Level(level, region) for region in regions for level in (1, 2))


US_LEVELS, PR_LEVELS = _levels(US_REGIONS), _levels(PR_REGIONS)
