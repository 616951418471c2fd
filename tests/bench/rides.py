"""Rides with budgets of their own, generated: a map, times, distances, fares.

Half of the rides begin in a dense part of the map, by a law that falls off from its middle, so that
squares of a grid there have very different numbers of rides.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts

#: Values of each dimension, from 0.
SIZES = {
    "x": 1024, "y": 1024, "hour": 744, "passengers": 7, "distance": 3_000, "fare": 10_000,
    "tip": 3_000,
}  # fmt: skip
#: The dense part of the map: from, to, in both directions.
DENSE = (384, 640)
_CHUNK = 2_000_000

_TABLE = """
version = 1
[data_set.rides]
account = { path = "ledger.db" }
insecure_test_secret = "KEY"
[table.rides]
path = "rides-*.parquet"
"""
_DIMENSION = """[table.rides.dimension.{}]
type = "integer"
low = 0
high = {}
"""
_BUDGET = """[table.rides.dimension.initial]
type = "budget"
most = 8.0
step = 0.1
"""


def write(folder: Path, rows: int, individual: bool) -> Path:
    """The records and the project file; budgets of 4 for everybody, or from 1 to 8 each."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(2013)
    for part, begin in enumerate(range(0, rows, _CHUNK)):
        table = _rides(draw, min(_CHUNK, rows - begin), individual)
        pq.write_table(table, folder / f"rides-{part:03}.parquet")
    text = _TABLE.replace("KEY", "5e" * 31 + "a1")
    text += "".join(_DIMENSION.format(name, size) for name, size in SIZES.items())
    path = folder / PROJECT_FILE
    accounts.write(
        path, text + _BUDGET + ('column = "budget"\n' if individual else "value = 4.0\n")
    )
    return path


def _rides(draw: np.random.Generator, count: int, individual: bool) -> pa.Table:
    middle, width = sum(DENSE) / 2, (DENSE[1] - DENSE[0]) / 5
    dense = draw.random(count) < 0.5
    places = {
        name: np.where(dense, draw.normal(middle, width, count), draw.random(count) * SIZES[name])
        for name in ("x", "y")
    }
    distance = draw.gamma(1.5, 200.0, count)
    fare = 250 + 2.5 * distance + draw.normal(0, 150, count)
    columns = places | {
        "hour": draw.integers(0, SIZES["hour"], count),
        "passengers": 1 + draw.binomial(5, 0.15, count),
        "distance": distance,
        "fare": fare,
        "tip": fare * draw.beta(1, 6, count),
    }
    fields = {
        name: np.clip(values, 0, SIZES[name] - 1).astype(np.int32)
        for name, values in columns.items()
    }
    if individual:
        fields["budget"] = draw.integers(10, 81, count) / 10
    return pa.table(fields)
