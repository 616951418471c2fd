"""A small table of rides: its project file, its records, and what they are as coordinates."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import SessionTable
from dpstream.pipelines.session.config import Config, load_config
from dpstream.pipelines.session.records.load import init
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


# A tiny table: two dimensions, budgets of epsilon and rho, and its records by hand.


SMALL_PROJECT = """
version = 1

[data_set.small]
insecure_test_secret = "{key}"
account = {{ path = "ledger.db" }}

[table.small]
path = "small.csv"
record_id = "name"
{more}

[table.small.dimension.a]
type = "integer"
low = 0
high = 4

[table.small.dimension.b]
type = "integer"
low = 0
high = 10
missing = "point"

[table.small.dimension.epsilon]
type = "budget"
most = 2.0
step = 0.25

[table.small.dimension.rho]
type = "budget"
kind = "rho"
most = 1.0
step = 0.25
"""
#: name, a, b, epsilon, rho; the last one is not usable.
RECORDS = """name,a,b,epsilon,rho
r0,0,1,1.0,0.5
r1,0,2,2.0,0.5
r2,1,3,0.5,0.5
r3,1,,2.0,0.5
r4,2,5,1.5,0.5
r5,3,9,2.0,0.5
r6,9,9,2.0,0.5
"""


def small_config_at(folder: Path, records: str = RECORDS, more: str = "") -> Config:
    """The project file of a folder, and the table with its records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.csv").write_text(records)
    accounts.write(folder / PROJECT_FILE, SMALL_PROJECT.format(key="22" * 32, more=more))
    config = load_config(folder)
    init(config)
    return config


# A small table for tests of sessions, and random boxes of it.


#: 2013-01-01T00:00:00Z.
PEOPLE_START = 1_356_998_400_000_000
PEOPLE = SessionTable(
    name="people",
    dimensions=(
        Integer(name="age", low=0, high=100, grid=5, missing="point"),
        Category(name="smoker", codes=("no", "yes")),
        Real(name="weight", low=0.0, high=200.0, step=0.5),
        Timestamp(name="arrived", low=PEOPLE_START, high=PEOPLE_START + 30 * DAY, step=DAY),
        Budget(name="epsilon", kind="epsilon", most=4.0),
        Budget(name="rho", kind="rho", most=1.0),
    ),
)


def box(**ranges: Any) -> Int64:
    return PEOPLE.space.box(**ranges)


def random_boxes(seed: int, size: int = 1) -> Int64:
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, PEOPLE.space.sizes + 1, (2, size, 6)), axis=0)
    low, high = edges
    same = low == high
    low, high = (
        np.where(same & (low > 0), low - 1, low),
        np.where(same & (low == 0), high + 1, high),
    )
    return np.stack([low, high], axis=2)
