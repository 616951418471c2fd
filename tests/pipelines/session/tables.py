"""A small table of rides: its project file, its records, and what they are as coordinates."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.session.config import Config, load_config
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts

PROJECT = """
version = 1

[data_set.rides]
insecure_test_secret = "{key}"
account = {{ path = "ledger.db" }}

[table.rides]
path = "{records}"
record_id = "ride"
{more}

[table.rides.dimension.hour]
type = "integer"
low = 0
high = 24
grid = 6

[table.rides.dimension.x]
type = "real"
low = -1.0
high = 1.0
step = 0.1
grid = 0.5
missing = "point"

[table.rides.dimension.day]
type = "timestamp"
low = "2024-01-01T00:00:00Z"
high = "2024-01-11T00:00:00Z"
step = "1d"
column = "time"

[table.rides.dimension.vendor]
type = "category"
values = ["b", "a", "c"]
missing = "point"

[table.rides.dimension.epsilon]
type = "budget"
most = 2.0
step = 0.5
column = "budget"

[table.rides.dimension.rho]
type = "budget"
kind = "rho"
most = 1.0
value = 0.25
"""
DAY = 86_400_000_000
START = 1_704_067_200_000_000


def config_at(folder: Path, records: str = "rides-*.parquet", more: str = "") -> Config:
    """The table of a project file in a folder, loaded."""
    text = PROJECT.format(key="11" * 32, records=records, more=more)
    accounts.write(folder / PROJECT_FILE, text)
    return load_config(folder)


def without_ids(folder: Path) -> Config:
    """The same, its records without names."""
    path, line = folder / PROJECT_FILE, 'record_id = "ride"\n'
    text = path.read_text()
    assert line in text
    path.write_text(text.replace(line, ""))
    return load_config(folder)


def rides(count: int, seed: int = 0, first: int = 0) -> dict[str, Any]:
    """Records that are all usable, by column."""
    rng = np.random.default_rng(seed)
    return {
        "ride": [f"r{first + i}" for i in range(count)],
        "hour": rng.integers(0, 24, count),
        "x": rng.integers(-10, 12, count) / 10,
        "time": START + rng.integers(0, 10, count) * DAY + rng.integers(0, DAY, count),
        "vendor": rng.choice(["a", "b", "c", "d"], count),
        "budget": rng.choice([0.0, 0.4, 0.5, 1.7, 2.0, 3.0], count),
    }


def at_of(records: dict[str, Any]) -> np.ndarray:
    """(n, 6) coordinates of such records, worked out by hand."""
    x = np.round(np.asarray(records["x"]) * 10).astype(int) + 10
    vendor = [{"b": 0, "a": 1, "c": 2}.get(v, 3) for v in records["vendor"]]
    budget = np.minimum(np.floor(np.asarray(records["budget"]) * 2), 4).astype(int)
    return np.stack(
        [
            records["hour"], np.where((x >= 0) & (x < 20), x, 20),
            (np.asarray(records["time"]) - START) // DAY, vendor, budget, np.full(len(x), 250_000),
        ],
        axis=1,
    ).astype(np.int64)  # fmt: skip


def write(path: Path, records: dict[str, Any]) -> Path:
    """Records as a file of Parquet."""
    pq.write_table(pa.table(records), path)
    return path
