"""The plan of an execution before its begin, from public files alone.

The records need not be there.  Households need the published totals of persons to be executed; to
plan them they may still be missing, and then the plan has no hash yet.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.limits import MIN_DELTA
from dpstream.accounting.tabulation.describe import describe
from dpstream.accounting.tabulation.guarantee import DELTA
from dpstream.pipelines.tabulation.config import CONFIG, Choice
from dpstream.pipelines.tabulation.inputs import (
    Prepared,
    lists_digest,
    load,
    prepared_of,
    public_paths,
    validate,
)
from dpstream.pipelines.tabulation.public_files import TOTALS, total_files
from dpstream.pipelines.tabulation.text import Fault


class Planned(NamedTuple):
    """A plan from public files.

    Attributes:
        prepared: what follows from the public files; complete: whether none was missing.
    """

    prepared: Prepared
    complete: bool


def plan(parameters: Path, data: Path, choice: Choice) -> Planned:
    """Return the plan that the public files give.

    Raises:
        UsageError: there is a fault, or the choice is not possible.
    """
    totals = choice.program != "h" or total_files(data)[0].exists()
    loaded = load(parameters, data, choice, records=False, totals=totals)
    paths = public_paths(parameters, data, choice.program)
    paths = paths if totals else [path for path in paths if path.name != TOTALS]
    return Planned(prepared_of(loaded, lists_digest(paths)), totals)


def faults(parameters: Path, data: Path, choice: Choice) -> list[Fault]:
    """Return all faults of the public files; without any, those of the plan.

    Raises:
        UsageError: the choice itself makes no sense.
    """
    fault_list = validate(parameters, data, choice)
    if not fault_list:
        try:
            plan(parameters, data, choice).prepared.plan.measured()
        except UsageError as error:
            where = "" if error.field == CONFIG else error.field
            fault_list.append(Fault(CONFIG, None, where, error.rule, error.fix))
    return fault_list


def figures(planned: Planned, delta: float | None = None) -> dict[str, Any]:
    """Return every public figure; see `accounting.tabulation.describe`.

    Raises:
        UsageError: a figure is beyond its range.
    """
    delta = DELTA if delta is None else delta
    if not MIN_DELTA <= delta < 1:
        rule = f"must be at least {MIN_DELTA:g}, and below 1"
        raise UsageError("--delta", rule, "write e.g. 1e-10")
    prepared = planned.prepared
    groups = {level.level: level.groups for level in prepared.domain.levels}
    out = describe(prepared.plan, delta, groups)
    empty = _without_block(prepared)
    if empty:
        out["notes"] = [
            *out["notes"],
            f"{empty:,} groups of {TOTALS} are in regions without a "
            "block: their counts are noise alone",
        ]
    if not planned.complete:
        out["plan_hash"] = None
        out["notes"] = [*out["notes"], f"the plan has no hash before {TOTALS} is there"]
    return out


def _without_block(prepared: Prepared) -> int:
    """Groups of published totals in regions without a block, where no record can be."""
    count = 0
    for level, published in (prepared.published or {}).items():
        domain = required(prepared.domain.of(level), "totals are of levels that run")
        region = published.groups // len(domain.iterations)
        count += int((~np.isin(region, prepared.domain.regions_of[level.region_type])).sum())
    return count
