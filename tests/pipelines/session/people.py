"""A small table for tests of sessions, and random boxes of it."""

from typing import Any

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import SessionTable

DAY = 86_400_000_000
#: 2013-01-01T00:00:00Z.
START = 1_356_998_400_000_000
PEOPLE = SessionTable(
    name="people",
    dimensions=(
        Integer(name="age", low=0, high=100, grid=5, missing="point"),
        Category(name="smoker", codes=("no", "yes")),
        Real(name="weight", low=0.0, high=200.0, step=0.5),
        Timestamp(name="arrived", low=START, high=START + 30 * DAY, step=DAY),
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
