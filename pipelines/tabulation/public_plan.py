"""The plan of an execution before it is one: from public files alone.

The records need not be there.  Households need the published totals of persons to be executed; to
plan them they may still be missing, and then the plan has no hash yet.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.limits import MIN_DELTA
from dpstream.accounting.tabulation.describe import describe, text
from dpstream.accounting.tabulation.guarantee import DELTA
from dpstream.pipelines.tabulation.config import CONFIG, Choice
from dpstream.pipelines.tabulation.faults import Fault
from dpstream.pipelines.tabulation.files import load, public_paths, validate
from dpstream.pipelines.tabulation.inputs import Prepared, digest_of, prepared_of
from dpstream.pipelines.tabulation.scale import estimate
from dpstream.pipelines.tabulation.scale import text as scale_text
from dpstream.pipelines.tabulation.totals import TOTALS, total_files


class Planned(NamedTuple):
    """A plan as it can be known.

    Attributes:
        prepared: what follows from the public files; complete: whether none was missing.
    """

    prepared: Prepared
    complete: bool


def plan(parameters: Path, data: Path, choice: Choice) -> Planned:
    """What the public files mean.

    Raises:
        UsageError: there is a fault, or the choice is not possible.
    """
    totals = choice.program != "h" or total_files(data)[0].exists()
    loaded = load(parameters, data, choice, records=False, totals=totals)
    paths = public_paths(parameters, data, choice.program)
    paths = paths if totals else [path for path in paths if path.name != TOTALS]
    return Planned(prepared_of(loaded, digest_of(paths)), totals)


def faults(parameters: Path, data: Path, choice: Choice) -> list[Fault]:
    """All faults of the public files; where each is as it must be, what is wrong with the plan.

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


def figures(
    planned: Planned, delta: float | None = None, units: int | None = None
) -> dict[str, Any]:
    """Every public figure; see `accounting.tabulation.describe`.

    Args:
        units: records to estimate a load for, ``None``: none.

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
    if units is not None:
        out["scale"] = estimate(prepared, units)
    return out


def _without_block(prepared: Prepared) -> int:
    """Groups of published totals in regions without a block, where no record can be."""
    count = 0
    for level, published in (prepared.published or {}).items():
        domain = required(prepared.domain.of(level), "totals are of levels that run")
        region = published.groups // len(domain.iterations)
        count += int((~np.isin(region, prepared.domain.regions_of[level.region_type])).sum())
    return count


def plan_text(public_figures: dict[str, Any]) -> str:
    """The same for a person."""
    plan_hash = public_figures["plan_hash"] or "none yet"
    groups = {row["label"]: row["groups"] for row in public_figures["levels"]}
    lines = [
        f"Plan        {plan_hash}",
        f"Groups      {sum(groups.values()):,} in {len(groups)} levels",
    ]
    more = scale_text(public_figures["scale"]) if "scale" in public_figures else ""
    return "\n".join([*lines, text(public_figures)]) + more
