"""What is one row's own business, and what is refused."""

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.statements.row_local import (
    RowTables,
    numbered,
    row_query,
)
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.columns import ROW, TYPES

_ROWS = {"uid": "INT64", "page": "STRING", "x": "FLOAT64", "n": "INT64", "d": "NUMERIC"}
_TABLES = RowTables(
    UnitIdentity("uid", "int"),
    {
        "visits": Table("visits", "stream", "", _ROWS, "uid", units=("uid",)),
        "pages": Table("pages", "csv", "", {"page": "STRING", "lang": "STRING", "w": "FLOAT64"}),
        "floors": Table("floors", "csv", "", {"n": "INT64", "x": "FLOAT64"}),
        "loose": Table("loose", "csv", "", {"page": "STRING"}),
    },
    source="visits",
    keys={"pages": ("lang", "page"), "floors": ("n",)},
)
_SUB = "SELECT uid, page, n + 1 AS m, 'en' AS lang FROM visits WHERE n > 0"

ACCEPTED = [
    "SELECT page FROM visits",
    "SELECT UPPER(page) AS p, x / n AS q FROM visits AS v WHERE v.x > 1 AND n IN (1, 2)",
    "SELECT f.x AS fx, v.page FROM visits AS v JOIN floors AS f ON v.n = f.n",
    "SELECT COALESCE(f.x, 0) AS fx FROM visits AS v LEFT JOIN floors AS f ON f.n = v.n AND f.x > 1",
    "SELECT page, visits.x FROM visits JOIN floors USING (n)",
    f"SELECT s.page, p.w FROM ({_SUB}) AS s JOIN pages AS p ON s.page = p.page AND s.lang = p.lang",
    f"WITH s AS ({_SUB}) SELECT a.page, f.x FROM s AS a JOIN floors AS f ON f.n = a.m",
    "SELECT * FROM (SELECT * FROM visits WHERE x > 0) AS v ORDER BY page",
    "SELECT f.x AS a, g.x AS b FROM visits v JOIN floors f ON v.n = f.n JOIN floors g ON f.n = g.n",
]
REFUSED = [
    ("stream-rows", "SELECT page FROM visits GROUP BY page"),
    ("stream-rows", "SELECT DISTINCT page FROM visits"),
    ("stream-rows", "SELECT SUM(x) AS s FROM visits"),
    ("stream-rows", "SELECT uid, n FROM visits UNION ALL SELECT uid, n FROM visits"),
    ("stream-rows", "SELECT s FROM (SELECT uid, SUM(x) AS s FROM visits GROUP BY uid) AS t"),
    ("stream-rows", "SELECT page FROM (SELECT DISTINCT uid, page FROM visits) AS t"),
    ("stream-rows", "SELECT n FROM (SELECT uid, n FROM visits UNION ALL SELECT uid, n FROM visits)"
     " AS t"),
    ("stream-join", "SELECT a.n FROM visits AS a JOIN visits AS b ON a.uid = b.uid"),
    ("stream-join", f"SELECT a.n FROM visits AS a JOIN ({_SUB}) AS b ON a.uid = b.uid"),
    ("stream-join", "SELECT v.n FROM visits AS v JOIN (SELECT DISTINCT n FROM floors) AS f "
     "ON v.n = f.n"),
    ("stream-look-up", "SELECT page FROM visits, floors"),
    ("stream-look-up", "SELECT page FROM visits CROSS JOIN floors"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n <= f.n"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON v.x = f.x"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n = f.n OR v.x > 1"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON v.n + 0 = f.n"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON v.x = f.n"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN floors AS f ON f.n = f.n"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN pages AS p ON v.page = p.page"),
    ("stream-look-up", "SELECT v.page FROM visits AS v JOIN loose AS p ON v.page = p.page"),
    ("stream-look-up", "SELECT v.n FROM visits AS v RIGHT JOIN floors AS f ON v.n = f.n"),
    ("stream-look-up", "SELECT v.n FROM visits AS v FULL JOIN floors AS f ON v.n = f.n"),
    ("stream-look-up", "SELECT v.n FROM floors AS f JOIN visits AS v ON v.n = f.n"),
    ("stream-look-up", "SELECT n FROM floors"),
    ("limit", "SELECT page FROM visits LIMIT 5"),
    ("limit", "SELECT page FROM (SELECT uid, page FROM visits LIMIT 5) AS t"),
    ("window", "SELECT ROW_NUMBER() OVER (ORDER BY x) AS r FROM visits"),
    ("window", "SELECT SUM(x) OVER (PARTITION BY page) AS r FROM visits"),
    ("subquery-expression", "SELECT page FROM visits WHERE n IN (SELECT n FROM floors)"),
    ("nondeterministic", "SELECT RAND() AS r FROM visits"),
    ("sample", "SELECT page FROM visits TABLESAMPLE SYSTEM (10 PERCENT)"),
    ("unit-not-selected", "SELECT page FROM (SELECT page FROM visits) AS t"),
    ("one-dp-select", "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1) page FROM visits"),
    ("unknown-table", "SELECT page FROM other"),
    ("unknown-column", "SELECT missing FROM visits"),
    ("duplicate-column", "SELECT page, UPPER(page) AS page FROM visits"),
    ("select-only", "DROP TABLE visits"),
    ("from", "SELECT 1 AS one"),
]  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_and_numbered(text: str) -> None:
    types = {name: TYPES[kind] for name, kind in _ROWS.items()}
    sql = numbered(row_query(text, _TABLES), "arrived", types)
    assert sql.startswith('SELECT "') and f'"{ROW}"' in sql.partition(" FROM ")[0]
    assert sql.count('FROM "arrived"') == 1


@pytest.mark.parametrize(("code", "text"), REFUSED)
def test_refused(code: str, text: str) -> None:
    with pytest.raises((PolicyError, UsageError)) as caught:
        row_query(text, _TABLES)
    assert f"[{code}]" in caught.value.rule, caught.value.rule
    assert caught.value.field.startswith("statement, line 1, column ")
