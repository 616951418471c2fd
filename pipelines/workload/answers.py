"""Answers as a table: a description of each, its value, exact standard error and 95% interval."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int32
from dpstream.accounting.workloads.attributes import Attribute
from dpstream.accounting.workloads.factors import Factor
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.estimate import Answers, Estimate
from dpstream.pipelines.workload.release import Moment
from dpstream.pipelines.workload.tables import TableEstimate
from dpstream.pipelines.workload.ways import MAX_ANSWERS

# What each answer is of, in words: a column for each attribute, without a text for each row.

#: Of an attribute that is summed out.
ALL = "all"
#: Columns beside those of attributes, which get another name where theirs is one of these.
RESERVED = frozenset(
    (
        "product",
        "value",
        "sd",
        "low",
        "high",
        "window_start",
        "window_end",
        "trigger_time",
        "trigger",
    )
)


def labelled(workload: Workload) -> dict[str, pa.Array]:
    """Columns ``product`` (number, from 0) and one for each attribute, rows in the queries' order.

    Attributes are dictionaries: each text is there once.
    """
    texts: list[dict[str, int]] = [{} for _ in workload.attributes]
    numbers: list[list[Int32]] = [[] for _ in workload.attributes]
    products = []
    code_cache: dict[tuple[int, int], Int32] = {}
    for number, product in enumerate(workload.products):
        factors = workload.factors_of(product)
        rows = [factor.rows for factor in factors]
        total = int(np.prod(rows))
        products.append(np.full(total, number, np.int32))
        for axis, factor in enumerate(factors):
            key = (axis, -1 if factor.kind == "total" else id(factor))
            if key not in code_cache:
                codes = [
                    texts[axis].setdefault(text, len(texts[axis]))
                    for text in _of_factor(workload.attributes[axis], factor)
                ]
                code_cache[key] = np.array(codes, np.int32)
            after = int(np.prod(rows[axis + 1 :]))
            each = np.repeat(code_cache[key], after)
            numbers[axis].append(np.tile(each, total // len(each)))
    columns = {"product": pa.array(np.concatenate(products))}
    for attribute, own, code_arrays in zip(workload.attributes, texts, numbers, strict=True):
        name = attribute.name + "_" * (attribute.name in RESERVED)
        columns[name] = pa.DictionaryArray.from_arrays(
            pa.array(np.concatenate(code_arrays)), pa.array(list(own), pa.string())
        )
    return columns


def _of_factor(attribute: Attribute, factor: Factor) -> list[str]:
    """A text for each query of a factor."""
    if factor.kind == "total":
        return [ALL]
    if factor.matrix is not None:
        return [f"row {row}" for row in range(factor.rows)]
    first, last = factor.spans
    if attribute.edges:
        edges = [
            f"{edge:.17g}" if edge != int(edge) else f"{int(edge)}" for edge in attribute.edges
        ]
        return [
            f"[{edges[low]}, {edges[high + 1]})"
            for low, high in zip(first.tolist(), last.tolist(), strict=True)
        ]
    values = [str(value) for value in attribute.values]
    return [
        values[low] if low == high else f"{values[low]} .. {values[high]}"
        for low, high in zip(first.tolist(), last.tolist(), strict=True)
    ]


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
