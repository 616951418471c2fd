"""The plan of an execution before its begin, from public files alone.

The records need not be there.  Households need the published totals of persons to be executed; to
plan them they may still be missing, and then the plan has no hash yet.

What an execution of so many records needs (processor time, memory and what is shuffled) is figured
for one core of the machine that the benchmarks ran on, busy with two threads of one core.  These
figures are for planning: none decides anything that is published.
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

#: Seconds of a core: to load the program and its sampler, for a record and table (read, expanded,
#: counted), for a group and table (measured, written).
_START, _READ, _COUNT, _GROUP = 2.0, 1.2e-6, 5.5e-6, 0.4e-6
#: Bytes of memory: of the program and public files, of a counted pair in one process.
_BASE, _PAIR = 350 << 20, 16
#: Bytes of a pair that is shuffled between workers.
_SHUFFLED = 12
#: Groups of a level that a record is in, on average: alone and in combination for most.
_GROUPS_OF_A_RECORD = 2.5
#: Bytes of a published row, and of the block of a geography in memory.
_ROW, _BLOCK = 26, 80
MOST = 10**10
_GIB = 1 << 30


def estimate(prepared: Prepared, units: int) -> dict[str, Any]:
    """Return the needs of ``units`` records, with the groups of the public files.

    Raises:
        UsageError: no such number.
    """
    if not 1 <= units <= MOST:
        raise UsageError("--scale", f"must be 1 to {MOST:,} records", "correct it")
    tables = prepared.plan.parameters.tables
    measured = prepared.plan.measured()
    groups_of = {level.level: level.groups for level in prepared.domain.levels}
    groups = sum(groups_of[level] for _, level, _ in measured)
    cells = sum(groups_of[level] * table.leaves for table, level, _ in measured)
    pairs = int(min(units * len(measured) * _GROUPS_OF_A_RECORD, cells))
    cpu = _START + units * (_READ + _COUNT * len(tables)) + groups * _GROUP
    memory = _BASE + len(prepared.lookup.blocks) * _BLOCK + pairs * _PAIR
    return {
        "units": units,
        "groups": groups,
        "most_cells": cells,
        "pairs": pairs,
        "cpu_seconds": round(cpu, 1),
        "memory_gib": round(memory / _GIB, 2),
        "shuffled_gib": round(pairs * _SHUFFLED / _GIB, 2),
        "totals_gib": round(groups * _ROW / _GIB, 2),
    }


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


def figures(
    planned: Planned, delta: float | None = None, units: int | None = None
) -> dict[str, Any]:
    """Return every public figure; see `accounting.tabulation.describe`.

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
