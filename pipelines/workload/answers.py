"""Answers as a table: what each is of, its value, exact standard error and 95% interval."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.estimate import Answers, Estimate
from dpstream.pipelines.workload.labels import labelled
from dpstream.pipelines.workload.release import Moment
from dpstream.pipelines.workload.tables import TableEstimate

#: Rows of one table.
MAX_ANSWERS = 1 << 25
_TIMES = ("window_start", "window_end", "trigger_time")


def answers(
    workload: Workload,
    estimate: Estimate | TableEstimate,
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
    labels, parts = labelled(workload), []
    for moment, found in zip(moments, estimate.answers(workload, consistent), strict=True):
        columns = _moment(moment, len(found.sd)) if over_time else {}
        parts.append(pa.table({**columns, **labels, **_figures(found, estimate.half_width)}))
    return pa.concat_tables(parts)


def _figures(of: Answers, half_width: float) -> dict[str, pa.Array]:
    wide = half_width * of.sd
    columns = {"value": of.shown, "sd": of.sd, "low": of.found - wide, "high": of.found + wide}
    return {name: pa.array(column) for name, column in columns.items()}


def _moment(moment: Moment, rows: int) -> dict[str, pa.Array]:
    stamp = pa.timestamp("us", "UTC")
    columns = {name: pa.array(np.full(rows, getattr(moment, name))).cast(stamp) for name in _TIMES}
    return {**columns, "trigger": pa.array(np.full(rows, moment.trigger, np.int32))}
