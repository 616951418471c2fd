"""Labels of answers: a column for each attribute, with each distinct text stored once."""

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int32
from dpstream.accounting.workloads.attributes import Attribute
from dpstream.accounting.workloads.factors import Factor
from dpstream.accounting.workloads.workload import Workload

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
    """Return columns ``product`` (number, from 0) and one for each attribute, in the queries'
    order.

    Attributes are dictionaries: each text is stored once.
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
    """Return a text for each query of a factor."""
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
