"""NULL arguments, by the GoogleSQL documentation of differentially private aggregate functions.

SUM and AVG are of "non-NULL, non-NaN values", COUNT(x) of "non-NULL expression values", VAR and
percentiles always ignore NULL; bounds per group hold for "values per group after the values are
aggregated per privacy unit", those per row for each row.  So a unit that has only NULLs in a group
has no value there that could be clamped, and adds nothing.  The account below is plain Python on
the table's rows; every draw of noise is 0.
"""

import collections
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.query import parts
from dpstream.pipelines.sql import query_plan
from tests.pipelines.sql.asking import FRESH, answer_to, data_set, dp, without_noise

OPTIONS = ("epsilon = 2, delta = 1e-9, max_groups_contributed = 12, max_rows_contributed = 100, "
           "group_selection_strategy = PUBLIC_GROUPS")  # fmt: skip
REST = ("FROM visits AS v RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p ON v.page = p.page "
        "GROUP BY p.page ORDER BY p.page")  # fmt: skip
BOUNDS = [(50, 150), (-150, -50), (-20, 40), (0, 100)]
#: Arguments in SQL, and what they are of a row.
ARGUMENTS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "seconds": lambda row: row["seconds"],
    "IF(n > 5, seconds, NULL)": lambda row: row["seconds"] if row["n"] > 5 else None,
}


def table(seed: int = 1) -> pa.Table:
    """Visits of which most have no seconds; most users have none at all in most pages."""
    draw, size = np.random.default_rng(seed), 900
    seconds = np.round(draw.normal(60, 60, size) * 8) / 8
    seconds[::97] = math.nan
    return pa.table({
        "uid": draw.integers(0, 120, size), "page": [f"p{i}" for i in draw.integers(0, 4, size)],
        "seconds": pa.array(seconds, mask=draw.random(size) < 0.8),
        "n": draw.integers(0, 9, size),
    })  # fmt: skip


def clamped(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def expected(
    rows: list[dict[str, Any]], argument: str, bounds: tuple[float, float]
) -> Iterator[tuple[str, list[float | None]]]:
    """Of each function, its value by page."""
    not_null: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        value = ARGUMENTS[argument](row)
        if value is not None:
            of_unit = not_null.setdefault(row["page"], collections.defaultdict(list))
            of_unit[row["uid"]].append(value)
    names = sorted(f"p{i}" for i in range(12))
    counts = [[len(unit) for unit in not_null.get(page, {}).values()] for page in names]
    numbers = [[[v for v in unit if not math.isnan(v)] for unit in not_null.get(page, {}).values()]
               for page in names]  # fmt: skip
    pages = [[unit for unit in page if unit] for page in numbers]
    each = [[clamped(v, bounds) for unit in page for v in unit] for page in pages]
    means = [[clamped(statistics.fmean(unit), bounds) for unit in page] for page in pages]
    yield "s", [sum(clamped(sum(unit), bounds) for unit in page) for page in pages]
    yield "sr", [sum(page) for page in each]
    yield "c", [sum(clamped(count, (2, 4)) for count in page) for page in counts]
    yield "a", [statistics.fmean(page) if page else None for page in means]
    yield "ar", [statistics.fmean(page) if page else None for page in each]
    yield "v", [statistics.pvariance(page) if page else None for page in each]


def items(argument: str, bounds: tuple[float, float]) -> str:
    group, row = (f"contribution_bounds_per_{of} => {bounds}" for of in ("group", "row"))
    return (
        f"p.page, SUM({argument}, {group}) AS s, SUM({argument}, {row}) AS sr, COUNT({argument}, "
        f"contribution_bounds_per_group => (2, 4)) AS c, AVG({argument}, {group}) AS a, "
        f"AVG({argument}, {row}) AS ar, VAR({argument}, {row}) AS v"
    )


def differences(
    folder: Path, argument: str, bounds: tuple[float, float], laplace: bool = False, **more: Any
) -> list[str]:
    """Functions whose answer is not that of the documentation."""
    data_set(folder, table())
    options = OPTIONS + ", mechanism = GEOMETRIC" * laplace
    rows = answer_to(folder, dp(items(argument, bounds), REST, options), **more).table.to_pylist()
    wrong = []
    # The mean of a unit's rows is of whole grid steps; a sum and a count are exact.
    close: dict[str, Any] = {"s": {}, "sr": {}, "c": {}}
    for name, values in expected(table().to_pylist(), argument, bounds):
        near = close.get(name, {"rel": 1e-3, "abs": 1e-2})
        column = [row[name] for row in rows]
        if column != [None if v is None else pytest.approx(v, **near) for v in values]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_unit_of_nulls_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, bounds: tuple[int, int]
) -> None:
    without_noise(monkeypatch)
    assert not differences(tmp_path, argument, bounds)


def test_laplace_noise_and_shards_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    for shards in (4, 16):
        wrong = differences(tmp_path, "seconds", (50, 150), True, shards=shards, how=FRESH)
        assert not wrong


def _null_is_clamped(real: Any) -> Any:
    """SUM of nothing is NULL, which GREATEST skips: the bound is left."""
    return lambda text, **more: real(
        re.sub(r"CASE WHEN COUNT\(\S+\) > 0 THEN (.*) END$", r"COALESCE(\1, 0)", text), **more
    )


def _bounds_without_zero(real: Any) -> Any:
    """Stage 2 clamps what is absent to the bounds of what is there."""

    def bounds(column: Any, what: Any) -> Any:
        low, high, row = real(column, what)
        per_group = column.per == "group" and column.kind in ("count", "sum")
        return (*column.grid_bounds(), row) if per_group else (low, high, row)

    return bounds


@pytest.mark.parametrize(("module", "name", "spoilt"), [
    (query_plan, "duckdb", _null_is_clamped), (parts, "_range", _bounds_without_zero),
])  # fmt: skip
def test_counting_nulls_as_a_bound_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, spoilt: Any
) -> None:
    without_noise(monkeypatch)
    monkeypatch.setattr(module, name, spoilt(getattr(module, name)))
    assert {"s", "c"} <= set(differences(tmp_path, "seconds", (50, 150)))


def test_a_median_is_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path, table())
    row = "contribution_bounds_per_row => (-256, 256)"
    options = OPTIONS.rpartition(",")[0]
    full_answer = answer_to(tmp_path, dp(f"MEDIAN(seconds, {row}) AS m", "FROM visits", options))
    values = [v for v in table()["seconds"].to_pylist() if v is not None and not math.isnan(v)]
    [answer] = full_answer.table.to_pylist()
    assert answer["m"] == pytest.approx(float(np.median(values)), abs=4)


@pytest.mark.parametrize("mechanism", ["GAUSSIAN", "GEOMETRIC"])
def test_bounds_are_chosen_from_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """Users without a value are nine of ten: as zeros they would pull the lower bound to 0."""
    without_noise(monkeypatch)
    users = 40_000
    seconds = pa.array(np.full(users, 100.0), mask=np.arange(users) % 10 > 0)
    data_set(tmp_path, pa.table({"uid": np.arange(users), "page": ["p"] * users,
                                 "seconds": seconds, "n": [1] * users}))  # fmt: skip
    options = OPTIONS.rpartition(",")[0] + f", mechanism = {mechanism}"
    items = "SUM(seconds) AS s, COUNT(seconds) AS c, AVG(seconds) AS a"
    full_answer = answer_to(tmp_path, dp(items, "FROM visits", options))
    assert full_answer.header.bounds["a"][0] > 0
    [answer] = full_answer.table.to_pylist()
    assert answer["s"] == pytest.approx(100 * users / 10) and answer["c"] == users / 10
    assert answer["a"] == pytest.approx(100)


def test_the_noisy_answer_is_near_the_truth(tmp_path: Path) -> None:
    """20,000 users, nine of ten without a value: it was five times the truth."""
    draw, users = np.random.default_rng(5), 20_000
    values = pa.array(draw.uniform(50, 150, users), mask=draw.random(users) < 0.9)
    data_set(tmp_path, pa.table({"uid": np.arange(users), "page": ["p"] * users,
                                 "seconds": values, "n": [1] * users}))  # fmt: skip
    answer = answer_to(tmp_path, dp("SUM(seconds, contribution_bounds_per_group => (50, 150)) AS s",
                                   "FROM visits", "epsilon = 2, delta = 1e-9"))  # fmt: skip
    truth = sum(v for v in values.to_pylist() if v is not None)
    [sd] = answer.intervals["s"]["sd"].to_pylist()
    assert abs(answer.table["s"][0].as_py() - truth) < 5 * sd < truth / 50
