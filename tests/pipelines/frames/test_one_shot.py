"""Figures of tables: near the truth by as much as they say, without Beam, for every library."""

import subprocess
import sys
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.arrays import Float64
from tests.pipelines.frames.visits import LIBRARIES, visits

KEYS = 600
#: A unit has one row in one key, so that no bound cuts anything.
EACH = 4


def spread() -> pa.Table:
    """EACH units in each of many keys; values within the bounds."""
    draw = np.random.default_rng(5)
    rows = KEYS * EACH
    return pa.table({
        "user": np.arange(rows), "page": np.arange(rows) % KEYS,
        "seconds": draw.integers(0, 80, rows) / 8,
    })  # fmt: skip


SPREAD = spread()
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "histogram": ("count(DISTINCT \"user\")", {}),
    "count": ("count(*)", {"max_rows": 3}),
    "sum": ("sum(seconds)", {"value": "seconds", "bounds": (0, 10), "max_rows": 1}),
}  # fmt: skip


def scores(name: str, scale: float = 1.0, **more: Any) -> Float64:
    """(released - truth) / sd of each key."""
    truth, given = CALLS[name]
    exact = {page: value for page, value in duckdb.execute(
        f"SELECT page, {truth} FROM SPREAD GROUP BY page", connection=_with_table()
    ).fetchall()}  # fmt: skip
    table = getattr(dpstream, name)(
        SPREAD, unit="user", key="page", max_keys=1, public_keys=list(range(KEYS)),
        **{"epsilon": 1.0, **given, **more},
    ).table  # fmt: skip
    figure, sd = table.column_names[1:3]
    off = np.array(table[figure].to_pylist()) - [exact[p] for p in table["page"].to_pylist()]
    return np.asarray(scale * off / np.array(table[sd].to_pylist()))


def _with_table() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.register("SPREAD", SPREAD)
    return connection


def fits(z: Float64) -> bool:
    """Mean and sd of KEYS scores, each within 4.5 of its own sds (chance of a miss: 1.4e-5)."""
    return bool(abs(z.mean()) < 4.5 / np.sqrt(KEYS) and abs(z.std() - 1) < 4.5 / np.sqrt(2 * KEYS))


@pytest.mark.parametrize("delta", [1e-9, 0])
@pytest.mark.parametrize("name", CALLS)
def test_errors_are_as_large_as_they_say(name: str, delta: float) -> None:
    z = scores(name, delta=delta, mechanism="gaussian" if delta else "geometric")
    # Scores of geometric noise have a kurtosis of about 6: their sd is less well known.
    tolerant = 1.0 if delta else np.sqrt(2.5)
    assert abs(z.mean()) < 4.5 / np.sqrt(KEYS)
    assert abs(z.std() - 1) < 4.5 * tolerant / np.sqrt(2 * KEYS)


def test_the_check_of_errors_can_fail() -> None:
    z = scores("count", mechanism="gaussian")
    assert fits(z) and not fits(1.3 * z) and not fits(z / 1.3) and not fits(z + 0.4)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    truth = {p: v for p, v in duckdb.execute(
        "SELECT page, avg(seconds) FROM SPREAD GROUP BY page", connection=_with_table()
    ).fetchall()}  # fmt: skip
    table = dpstream.mean(
        SPREAD, unit="user", key="page", value="seconds", bounds=(0, 10), epsilon=20.0,
        max_keys=1, max_rows=1, public_keys=list(range(KEYS)),
    ).table  # fmt: skip
    held = [row["mean_noise_low"] <= truth[row["page"]] <= row["mean_noise_high"]
            for row in table.to_pylist() if row["mean"] is not None]  # fmt: skip
    assert len(held) > KEYS / 2 and 0.92 < np.mean(held) <= 1.0


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_and_function(library: str) -> None:
    data = LIBRARIES[library](visits())
    both: dict[str, Any] = {"unit": "user", "epsilon": 3.0}
    value: dict[str, Any] = {"value": "seconds", "bounds": (0, 100)}
    for key in (None, "page", ["page"]):
        more = {**both, "key": key}
        answers = [dpstream.count(data, **more), dpstream.sum(data, **more, **value),
                   dpstream.mean(data, **more, **value)]  # fmt: skip
        if key is not None:
            answers.append(dpstream.histogram(data, **more))
        for answer in answers:
            assert answer.table.num_columns == 4 + (key is not None) and len(answer) >= 1


def test_noise_follows_the_bounds() -> None:
    def sd(**given: Any) -> float:
        answer = dpstream.count(
            visits(), unit="user", key="page", epsilon=0.1, public_keys=["p0"], **given
        )
        return float(answer.table["count_sd"][0].as_py())

    for mechanism, keys in (("gaussian", 2), ("geometric", 4)):
        one = sd(max_keys=1, max_rows=1, mechanism=mechanism)
        for bounds, times in (((4, 1), keys), ((1, 6), 6)):
            more = sd(max_keys=bounds[0], max_rows=bounds[1], mechanism=mechanism)
            assert more == pytest.approx(times * one, rel=0.01)


PROGRAM = """
import sys, time
began = time.process_time()
import dpstream
dpstream.histogram, dpstream.count, dpstream.sum, dpstream.mean, dpstream.account
import dpstream.pipelines.frames.answer
imported = time.process_time() - began
import pyarrow as pa
column = pa.Array.from_buffers(pa.int64(), 4, [None, pa.py_buffer(bytes(32))])
data = pa.Table.from_arrays([column, column], names=["user", "page"])
found = dpstream.histogram(data, unit="user", key="page", epsilon=1.0)
assert "differential privacy" in found.guarantee
print(imported, *(name for name in ("apache_beam", "pandas", "polars", "duckdb", "sqlglot")
                  if name in sys.modules))
"""


def test_neither_beam_nor_a_library_of_frames_is_loaded() -> None:
    """Beam-free from the first import to the answer; how long it takes: tests/bench/frames.py."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    seconds, *loaded = ran.stdout.split()
    assert loaded == [] and float(seconds) < 5
