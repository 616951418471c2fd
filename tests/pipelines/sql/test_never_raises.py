"""No row makes a statement fail: nested expressions on nasty values, in the engine itself.

An error after the charge is an output that no noise was added to.  What the engine refuses on
tables without rows is refused before the charge, and no row is seen.  These run against each new
DuckDB: its optimizer may take an expression out of its TRY.
"""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.query.grids import grids_of
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.query_plan import question_of, stage_one
from dpstream.pipelines.tables import engine as engines
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from tests import projects
from tests.pipelines.sql.asking import KEY
from tests.pipelines.sql.nested import Nested, nasty

_DP = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 10, delta = 1e-5) "
_TO = "contribution_bounds_per_group => (0, 5)"


def _catalog(folder: Path, seed: int) -> Catalog:
    pq.write_table(nasty(seed), folder / "v.parquet")
    tables = {"v": {"path": "v.parquet", "unit_column": "uid"}}
    unit = ("uid", "string")
    return catalog_of(projects.of_tables(folder, unit, tables, insecure_test_secret=KEY))


def _stage(text: str, catalog: Catalog) -> str:
    question = question_of(text, catalog)
    grids = grids_of(question.gridded.sketched())
    return stage_one(question.per_column, catalog, grids).sql("duckdb", comments=False)


def _outcomes(catalog: Catalog, statements: list[str]) -> Counter[str]:
    """How many are refused, run, or fail because of a row (these by their text)."""
    counts = Counter[str]()
    with Engine(catalog, ["v"], empty=True) as empty, Engine(catalog, ["v"]) as full:
        for text in statements:
            try:
                query = _stage(text, catalog)
                empty.run(query)
            except DpstreamError:
                counts["refused"] += 1
                continue
            try:
                full.run(query)
                counts["ran"] += 1
            except RunError:
                counts[text] += 1
    return counts


def _fuzzed(folder: Path, seed: int, size: int) -> Counter[str]:
    nested = Nested(seed)
    return _outcomes(_catalog(folder, seed), [nested.statement() for _ in range(size)])


def test_some_nested_statements(tmp_path: Path) -> None:
    counts = _fuzzed(tmp_path, 1, 40)
    assert counts.keys() <= {"refused", "ran"} and counts["ran"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 18))
def test_nested_statements(seed: int, tmp_path: Path) -> None:
    counts = _fuzzed(tmp_path, seed, 400)
    assert counts.keys() <= {"refused", "ran"} and counts["ran"] >= 200


#: By what was wrong, statements that a row once made fail.
_FAILED = {
    "a part of two expressions":
        f"SUM(x * 9223372036854775807 + 1, {_TO}) AS a, "
        f"SUM(x * 9223372036854775807 + 2, {_TO}) AS b FROM v",
    "the same in a subquery":
        f"SUM(q.a + q.b, {_TO}) AS s FROM (SELECT uid, x * 9223372036854775807 + 1 AS a, "
        "x * 9223372036854775807 + 2 AS b FROM v) AS q",
    "the same in groups":
        f"SUM(q.a, {_TO}) AS s FROM (SELECT uid, MAX(x * 9223372036854775807 + 1) AS a, "
        "MIN(x * 9223372036854775807 + 2) AS b FROM v GROUP BY uid) AS q",
    "statistics of dates": f"SUM(EXTRACT(ISOYEAR FROM dd), {_TO}) AS s FROM v WHERE uid = 'none'",
    "weeks of dates": f"SUM(EXTRACT(ISOWEEK FROM dd), {_TO}) AS s FROM v WHERE uid = 'none'",
    "two decimals that meet":
        f"COUNT(*, {_TO}) AS n FROM (SELECT uid, x * 0.5 AS a, "
        "0.0000000000000000000000000000000000001 AS b FROM v) AS q WHERE q.a = q.b",
    "two decimals of a file": f"COUNT(*, {_TO}) AS n FROM v WHERE d = w",
    "two decimals that are joined":
        f"COUNT(*, {_TO}) AS n FROM v JOIN v AS o ON v.uid = o.uid AND v.d = o.w",
}  # fmt: skip


@pytest.mark.parametrize("kind", _FAILED)
def test_what_once_failed(kind: str, tmp_path: Path) -> None:
    assert _outcomes(_catalog(tmp_path, 3), [_DP + _FAILED[kind]]) == {"ran": 1}


def test_a_row_cannot_fill_the_memory(tmp_path: Path) -> None:
    """Texts that grow fourfold at each level."""
    catalog = _catalog(tmp_path, 3)
    inner = "SELECT uid, IF(uid = 'u1', 'abcdefgh', '') AS s FROM v"
    for _ in range(13):
        inner = f"SELECT uid, CONCAT(s, s, s, s) AS s FROM ({inner}) AS q"
    query = _stage(f"{_DP} SUM(LENGTH(q.s), {_TO}) AS n FROM ({inner}) AS q", catalog)
    with Engine(catalog, ["v"], memory="300MB") as engine:
        assert engine.run(query).num_rows == 5


def test_the_optimizers_that_are_off_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = _catalog(tmp_path, 3)
    # Dates of files are looked at by the view first, so that their statistics decide nothing.
    shared = [_DP + _FAILED["a part of two expressions"]]
    monkeypatch.setattr(
        engines, "_LOCKS", [lock for lock in engines._LOCKS if "optimizers" not in lock]
    )
    assert _outcomes(catalog, shared) == dict.fromkeys(shared, 1)
