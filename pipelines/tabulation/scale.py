"""What an execution of so many records needs: processor time, memory and what is shuffled.

The figures are of one core of the machine that the benchmarks ran on, and include that it was busy
with two threads of one core.  They are for planning: none decides anything that is published.
"""

from typing import Any

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.tabulation.inputs import Prepared

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
    """What records of so many units need, with the groups of the public files.

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


def text(figures: dict[str, Any]) -> str:
    """The same for a person."""
    cpu = figures["cpu_seconds"]
    time = f"{cpu:,.0f} s" if cpu < 7_200 else f"{cpu / 3_600:,.1f} h"
    lines = [
        "",
        f"Scale       {figures['units']:,} records, {figures['groups']:,} groups with noise",
        f"Processor   {time} of one core; on a runner its cores share it",
        f"Memory      {figures['memory_gib']:,} GiB in one process; on a runner "
        f"{figures['shuffled_gib']:,} GiB are shuffled",
        f"Output      {figures['totals_gib']:,} GiB of totals if all are kept; more with detail",
    ]
    return "\n".join(lines) + "\n"
