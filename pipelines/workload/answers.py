"""Answers as a table: a description of each, its value, exact standard error and 95% interval."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.estimate import Answers, Estimate
from dpstream.pipelines.workload.labels import labelled
from dpstream.pipelines.workload.release import Moment
from dpstream.pipelines.workload.tables import TableEstimate
from dpstream.pipelines.workload.ways import MAX_ANSWERS

_TIMES = ("window_start", "window_end", "trigger_time")


def answers(
    workload: Workload,
    estimate: Estimate | TableEstimate,
    moments: Sequence[Moment],
    over_time: bool = False,
    consistent: bool = False,
) -> pa.Table | None:
    """Return one row for each release and query; ``None`` if one table cannot hold them.

    Such a workload is asked of the release, part by part.

    Args:
        over_time: add the release's window and trigger time.
        consistent: values are of the non-negative estimate of least squares; ``sd`` and the
            interval stay those of the linear answers, which they are exact for.
    """
    if len(moments) * workload.queries > MAX_ANSWERS:
        return None
    labels, parts = labelled(workload), []
    for moment, answer in zip(moments, estimate.answers(workload, consistent), strict=True):
        columns = _moment(moment, len(answer.sd)) if over_time else {}
        parts.append(pa.table({**columns, **labels, **_figures(answer, estimate.half_width)}))
    return pa.concat_tables(parts)


def _figures(of: Answers, half_width: float) -> dict[str, pa.Array]:
    wide = half_width * of.sd
    columns = {
        "value": of.displayed,
        "sd": of.sd,
        "low": of.estimates - wide,
        "high": of.estimates + wide,
    }
    return {name: pa.array(column) for name, column in columns.items()}


def _moment(moment: Moment, rows: int) -> dict[str, pa.Array]:
    stamp = pa.timestamp("us", "UTC")
    columns = {name: pa.array(np.full(rows, getattr(moment, name))).cast(stamp) for name in _TIMES}
    return {**columns, "trigger": pa.array(np.full(rows, moment.trigger, np.int32))}
