"""Parameters that tests begin from."""

from typing import Any

import msgspec

from dpstream.accounting.tabulation.parameters import US_LEVELS, Level, Parameters
from dpstream.accounting.tabulation.plan import Stability, TablePlan

USA = Level(1, "USA")
COUNTY = Level(2, "COUNTY")
_COMMON: dict[str, Any] = {
    "noise": "census",
    "definition": "zcdp",
    "zero_suppression": 0.0,
    "allow_negative": True,
    "run_us": True,
    "run_pr": False,
    "max_race_codes": 8,
    "state_filter": ("01", "02"),
}
PERSONS = Parameters(
    program="p",
    budgets={"t1t2": dict.fromkeys(US_LEVELS, 0.5)},
    fraction=0.1,
    thresholds={"t1t2": dict.fromkeys(US_LEVELS, (50.0, 200.0, 1000.0))},
    **_COMMON,
)
HOUSEHOLDS = Parameters(
    program="h",
    budgets={"t3": dict.fromkeys(US_LEVELS, 0.25), "t4": dict.fromkeys(US_LEVELS, 0.25)},
    fraction=None,
    thresholds={
        "t3": dict.fromkeys(US_LEVELS, (50.0, 200.0, 1000.0)),
        "t4": dict.fromkeys(US_LEVELS, (100.0,)),
    },
    **_COMMON,
)


def persons(**changes: Any) -> Parameters:
    """Parameters of persons with some changes."""
    return msgspec.structs.replace(PERSONS, **changes)


def households(**changes: Any) -> Parameters:
    """Parameters of households with some changes."""
    return msgspec.structs.replace(HOUSEHOLDS, **changes)


#: s as production's lists have it.
NINE = Stability(9, 8, 2, 1, 8)


def planned(parameters: Parameters) -> TablePlan:
    """A plan of these parameters, s = 9 at every level that runs."""
    return TablePlan(parameters, dict.fromkeys(parameters.levels, NINE), "0123")
