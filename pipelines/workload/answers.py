"""Answers as a table: what each is of, its value, exact standard error and 95% interval."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.estimate import HALF_WIDTH, Estimate, norms, values
from dpstream.pipelines.workload.labels import labelled
from dpstream.pipelines.workload.nonnegative import nonnegative
from dpstream.pipelines.workload.release import Moment

#: Rows of one table.
MAX_ANSWERS = 1 << 25
_TIMES = ("window_start", "window_end", "trigger_time")


def answers(
    workload: Workload,
    estimate: Estimate,
    moments: Sequence[Moment],
    over_time: bool = False,
    consistent: bool = False,
) -> pa.Table:
    """One row for each release and query.

    Args:
        over_time: with the release's window and trigger.
        consistent: values are of the non-negative estimate of least squares; ``sd`` and the
            interval stay those of the linear answers, which they are exact for.

    Raises:
        PolicyError: more rows than a table may have.
    """
    if len(moments) * workload.queries > MAX_ANSWERS:
        raise PolicyError(
            "queries", f"one table has at most {MAX_ANSWERS} answers", "ask a smaller workload"
        )
    labels, norm = labelled(workload), norms(workload, estimate.mix)
    parts = []
    for number, moment in enumerate(moments):
        cells = estimate.cells[number]
        found, sd = values(workload, cells), norm * estimate.scale[number]
        shown = found
        if consistent:
            shown = values(workload, nonnegative(cells, estimate.mix))
        columns = _moment(moment, len(found)) if over_time else {}
        parts.append(pa.table({**columns, **labels, **_figures(shown, found, sd)}))
    return pa.concat_tables(parts)


def _figures(shown: Float64, found: Float64, sd: Float64) -> dict[str, pa.Array]:
    columns = {"value": shown, "sd": sd, "low": found - HALF_WIDTH * sd,
               "high": found + HALF_WIDTH * sd}  # fmt: skip
    return {name: pa.array(column) for name, column in columns.items()}


def _moment(moment: Moment, rows: int) -> dict[str, pa.Array]:
    stamp = pa.timestamp("us", "UTC")
    columns = {name: pa.array(np.full(rows, getattr(moment, name))).cast(stamp) for name in _TIMES}
    return {**columns, "trigger": pa.array(np.full(rows, moment.trigger, np.int32))}
