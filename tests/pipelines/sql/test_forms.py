"""Forms of GoogleSQL that are another form's spelling, or a join: their rows, by plain DuckDB.

A relation is read in a private SELECT; what each unit adds to each value is what a query of
DuckDB's own gives, that was written by hand, on ugly rows.  On the answer, figures without noise
are those of DuckDB's own query over the groups.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.statements.canonical import canonical_form
from dpstream.pipelines.statements.statement import statement_of
from tests.pipelines.sql.asking import answer_to, charges, data_set, dp, without_noise
from tests.pipelines.sql.pairs import AROUND
from tests.pipelines.sql.shop import database, shop, stage_text, ugly_rows

_CATALOG = shop()
#: (relation, DuckDB's own)
RELATIONS = [
    ("SELECT uid, age AS v FROM users AS u WHERE EXISTS (SELECT 1 FROM visits AS w WHERE "
     "w.uid = u.uid AND w.n > 1)",
     "SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM visits WHERE n > 1)"),
    ("SELECT uid, age AS v FROM users AS u WHERE NOT EXISTS (SELECT * FROM visits AS w WHERE "
     "u.uid = w.uid AND w.page = u.dept)",
     "SELECT uid, age AS v FROM users AS u WHERE (SELECT COUNT(*) FROM visits AS w WHERE "
     "u.uid = w.uid AND w.page = u.dept) = 0"),
    ("SELECT o.uid, o.order_id AS v FROM orders AS o WHERE EXISTS (SELECT 1 FROM items AS i WHERE "
     "i.order_id = o.order_id)",
     "SELECT customer_id AS uid, order_id AS v FROM orders WHERE order_id IN (SELECT order_id "
     "FROM items) AND customer_id IN (SELECT uid FROM users)"),
    ("SELECT uid, CAST(page IN (SELECT dept FROM depts) AS INT64) AS v FROM visits",
     "SELECT uid, CAST(page IN (SELECT dept FROM depts) AS BIGINT) AS v FROM visits"),
    ("SELECT uid, CAST(n NOT IN (SELECT uid FROM pages WHERE weight IS NOT NULL) AS INT64) AS v "
     "FROM visits",
     "SELECT uid, CAST(n NOT IN (SELECT uid FROM pages WHERE weight IS NOT NULL) AS BIGINT) AS v "
     "FROM visits"),
    ("SELECT uid, CAST(page NOT IN (SELECT page FROM pages WHERE FALSE) AS INT64) AS v FROM visits",
     "SELECT uid, 1 AS v FROM visits"),
    ("SELECT uid, n + (SELECT MAX(floor) FROM depts) AS v FROM visits WHERE n < 9",
     "SELECT uid, n + 4 AS v FROM visits WHERE n < 9"),
    ("SELECT uid, COALESCE((SELECT floor FROM depts), 7) AS v FROM visits",
     "SELECT uid, 7 AS v FROM visits"),  # five rows: an error, so NULL
    ("SELECT uid, ROW_NUMBER() OVER (PARTITION BY uid ORDER BY n DESC) AS v FROM visits",
     "SELECT uid, UNNEST(RANGE(1, COUNT(*) + 1)) AS v FROM visits GROUP BY uid"),
    ("SELECT uid, DENSE_RANK() OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "SELECT a.uid, (SELECT COUNT(DISTINCT b.k) FROM keyed AS b WHERE b.uid = a.uid AND b.k <= a.k)"
     " AS v FROM keyed AS a"),
    ("SELECT uid, CAST(SUM(n) OVER (PARTITION BY uid) AS INT64) AS v FROM visits WHERE n < 9",
     "SELECT uid, s AS v FROM visits JOIN (SELECT uid, SUM(n) AS s FROM visits WHERE n < 9 "
     "GROUP BY uid) USING (uid) WHERE n < 9"),
    ("SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY page RANGE BETWEEN UNBOUNDED PRECEDING "
     "AND CURRENT ROW) AS v FROM visits",
     "SELECT uid, (SELECT COUNT(*) FROM visits AS b WHERE b.uid = a.uid AND (b.page IS NULL OR "
     "b.page <= a.page)) AS v FROM visits AS a"),
    ("SELECT uid, COUNT(DISTINCT seconds * 0) OVER (PARTITION BY uid) AS v FROM visits WHERE "
     "ABS(seconds) < 9",
     "SELECT uid, 1 AS v FROM visits WHERE ABS(seconds) < 9"),  # -0.0 equals 0.0
    ("SELECT uid, DENSE_RANK() OVER (PARTITION BY uid ORDER BY CAST(CAST(seconds AS STRING) AS "
     "FLOAT64)) AS v FROM visits",
     "SELECT a.uid, (SELECT COUNT(DISTINCT b.k) FROM keyed AS b WHERE b.uid = a.uid AND b.k <= a.k)"
     " AS v FROM keyed AS a"),
    ("SELECT a.uid, a.age AS v FROM users AS a JOIN (SELECT uid, n AS k0 FROM visits) AS s0_ ON "
     "a.uid = s0_.uid WHERE EXISTS (SELECT 1 FROM visits AS w WHERE w.uid = a.uid AND w.n = s0_.k0 "
     "AND w.page IN (SELECT dept FROM depts))",
     "SELECT a.uid, a.age AS v FROM users AS a JOIN visits AS b ON a.uid = b.uid WHERE b.n IN "
     "(SELECT w.n FROM visits AS w JOIN depts ON page = dept WHERE w.uid = a.uid)"),
    ("SELECT uid, x AS v FROM visits, UNNEST([1, 2]) AS x WHERE n IN UNNEST([1, 2, 3])",
     "SELECT uid, 1 AS v FROM visits WHERE n IN (1, 2, 3) UNION ALL SELECT uid, 2 FROM visits "
     "WHERE n IN (1, 2, 3)"),
    ("SELECT a.uid, b.n AS v FROM users AS a, visits AS b WHERE a.uid = b.uid AND b.n > 1",
     "SELECT a.uid, b.n AS v FROM users AS a JOIN visits AS b ON a.uid = b.uid AND b.n > 1"),
    ("SELECT a.uid, b.n AS v FROM users AS a JOIN (visits AS b JOIN orders AS o ON b.uid = o.uid) "
     "ON a.uid = b.uid",
     "SELECT a.uid, b.n AS v FROM users AS a JOIN visits AS b ON a.uid = b.uid JOIN orders AS o "
     "ON o.customer_id = b.uid"),
    ("SELECT uid, COUNT(*) FILTER (WHERE n > 1) + COUNTIF(flag) AS v FROM visits GROUP BY uid",
     "SELECT uid, SUM(CASE WHEN n > 1 THEN 1 ELSE 0 END + CASE WHEN flag THEN 1 ELSE 0 END) AS v "
     "FROM visits GROUP BY uid"),
    ("SELECT uid, LENGTH(ANY_VALUE(page)) AS v FROM visits WHERE page IN ('a', 'b') GROUP BY uid",
     "SELECT DISTINCT uid, 1 AS v FROM visits WHERE page IN ('a', 'b')"),
]  # fmt: skip
#: By GoogleSQL NULL is first, then NaN; -0.0 is 0.0.
_KEYED = """CREATE VIEW keyed AS SELECT uid, CASE WHEN seconds IS NULL THEN (0, 0) WHEN
ISNAN(seconds) THEN (1, 0) ELSE (2, seconds + 0.0) END AS k FROM visits"""


@pytest.mark.parametrize(("relation", "own"), RELATIONS)
def test_rows_are_those_of_duckdb(relation: str, own: str) -> None:
    base = database(_CATALOG, ugly_rows(11))
    base.execute(_KEYED)
    select = canonical_form(statement_of(AROUND[0].format(relation), _CATALOG)).select
    answer = base.execute(stage_text(select, _CATALOG)).fetchall()
    query = f"SELECT uid, v, LEAST(COUNT(*), 5) FROM ({own}) WHERE uid IS NOT NULL GROUP BY uid, v"
    assert Counter(answer) == Counter(base.execute(query).fetchall())
    assert len(answer) > 5


@pytest.mark.parametrize("window", [
    "LAG(n) OVER (PARTITION BY uid ORDER BY flag)", "LEAD(n) OVER (PARTITION BY uid ORDER BY day)",
    "FIRST_VALUE(n) OVER (PARTITION BY uid ORDER BY flag DESC)",
    "n * ROW_NUMBER() OVER (PARTITION BY uid ORDER BY day)",
    "LENGTH(CAST(MIN(seconds * 0) OVER (PARTITION BY uid) AS STRING))",
])  # fmt: skip
def test_ties_of_a_window_are_broken_by_the_row(window: str) -> None:
    """Not by the order in which a file, or a shard with others' rows, has them."""
    relation = f"SELECT uid, {window} AS v FROM visits WHERE n < 9"
    select = canonical_form(statement_of(AROUND[0].format(relation), _CATALOG)).select
    rows = ugly_rows(12, 200)
    answers = []
    for turn in (1, -1):
        base = database(_CATALOG, {name: of[::turn] for name, of in rows.items()})
        answers.append(Counter(base.execute(stage_text(select, _CATALOG)).fetchall()))
    assert answers[0] == answers[1] and len(answers[0]) > 10


@pytest.mark.parametrize("relation", [
    "SELECT DISTINCT uid, seconds * 0 AS s FROM visits",
    "SELECT uid, seconds * 0 AS s FROM visits UNION DISTINCT SELECT uid, 0.0 * age FROM users",
    "SELECT uid, seconds * 0 AS s FROM visits INTERSECT ALL (SELECT uid, 0.0 * n FROM visits)",
    "(SELECT uid, seconds * 0 AS s FROM visits UNION ALL SELECT uid, 1.5 FROM visits) EXCEPT ALL "
    "SELECT uid, 0.0 * age FROM users",
])  # fmt: skip
def test_equal_floats_have_one_form_where_duplicates_are_lost(relation: str) -> None:
    """Not that of the row which a file, or a shard with others' rows, has first."""
    length = f"SELECT uid, LENGTH(CAST(s AS STRING)) AS v FROM ({relation}) AS d"
    select = canonical_form(statement_of(AROUND[0].format(length), _CATALOG)).select
    rows, answers = ugly_rows(12, 200), []
    for turn in (1, -1):
        base = database(_CATALOG, {name: of[::turn] for name, of in rows.items()})
        answers.append(Counter(base.execute(stage_text(select, _CATALOG)).fetchall()))
    assert answers[0] == answers[1] and len(answers[0]) > 5


def _answer(folder: Path, text: str) -> list[tuple[Any, ...]]:
    table = answer_to(folder, text).table
    return list(zip(*table.to_pydict().values(), strict=True))


_CORE = dp("page, COUNT(*, contribution_bounds_per_group => (0, 30)) AS n")
_TRUE = "SELECT page, CAST(COUNT(*) AS DOUBLE) AS n FROM visits GROUP BY page"
#: Around an answer, with the answer in place of t.
AFTER = [
    "SELECT a.page, b.n FROM t AS a JOIN t AS b ON a.page = b.page",
    "SELECT page, n, RANK() OVER (ORDER BY n DESC) AS r FROM t",
    "SELECT page, n / (SELECT SUM(n) FROM t) AS share FROM t",
    "SELECT page FROM t WHERE n > (SELECT AVG(n) FROM t)",
    "SELECT page, SUM(n) OVER (ORDER BY page) AS s, LAG(n) OVER (ORDER BY page) AS l FROM t",
    "SELECT page, n FROM t UNION ALL SELECT 'all', SUM(n) FROM t",
    "SELECT page FROM t WHERE page NOT IN (SELECT page FROM t WHERE n > 300)",
    "SELECT (SELECT MAX(n) FROM t) - (SELECT MIN(n) FROM t) AS spread",
    "SELECT title FROM pages AS p WHERE NOT EXISTS (SELECT 1 FROM t WHERE t.page = p.page)",
    "SELECT n FROM t INTERSECT DISTINCT SELECT n FROM t WHERE page < 'p4'",
]  # fmt: skip


def test_all_of_an_answer_is_one_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path)
    base = duckdb.connect()
    base.execute(f"CREATE VIEW visits AS SELECT * FROM '{tmp_path}/visits.parquet'")
    base.execute(f"CREATE VIEW pages AS SELECT * FROM '{tmp_path}/pages.csv'")
    for text in AFTER:
        rows = _answer(tmp_path, f"WITH t AS ({_CORE}) {text}")
        own = base.execute(f"WITH t AS ({_TRUE}) {text}").fetchall()
        assert Counter(rows) == Counter(own) and own, text
    assert len(charges(tmp_path)) == 1


def test_distinct_values_are_those_of_duckdb_or_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path)
    base = duckdb.connect()
    base.execute(f"CREATE VIEW visits AS SELECT * FROM '{tmp_path}/visits.parquet'")
    own = dict(
        base.execute(
            "SELECT page, (COUNT(DISTINCT seconds), COUNT(DISTINCT n), COUNT(DISTINCT uid)) "
            "FROM visits GROUP BY page"
        ).fetchall()
    )
    figures = "COUNT(DISTINCT seconds, {}) AS s, COUNT(DISTINCT n, {}) AS n, COUNT(DISTINCT uid)"
    before = dict.fromkeys(own, (0, 0, 0))
    for most in (1, 4, 40):
        bounds = f"contribution_bounds_per_group => (0, {most})"
        rows = _answer(tmp_path, dp(f"page, {figures.format(bounds, bounds)} AS u"))
        figures_of = {page: (int(s), int(n), int(u)) for page, s, n, u in rows}
        for page, figure in figures_of.items():
            assert all(b <= f <= o for b, f, o in zip(before[page], figure, own[page], strict=True))
        before |= figures_of
    assert figures_of == own
    [(total,)] = _answer(tmp_path, dp("COUNT(DISTINCT page) AS n", "FROM visits"))
    assert total == len(own)  # of bounds that the query chooses


def test_a_report_is_its_column_and_noise_as_json(tmp_path: Path) -> None:
    data_set(tmp_path)
    plain = answer_to(tmp_path, _CORE.replace("(0, 30)", "(0, 30)"))
    for form in ("JSON", "PROTO"):
        report = answer_to(tmp_path, _CORE.replace("30)", f"30), report_format => '{form}'"))
        assert not report.charged and report.table.column_names == ["page", "n"]
        for cell, value, *noise in zip(
            report.table["n"].to_pylist(),
            plain.table["n"].to_pylist(),
            *plain.intervals["n"].to_pydict().values(),
            strict=True,
        ):
            names = ("standard_deviation", "noise_low", "noise_high")
            noisy = dict(zip(names, noise, strict=True))
            assert json.loads(cell) == {"result": {"value": value, **noisy}}


#: Spellings of one question.
SAME = [
    ("COUNTIF(n > 3) AS k FROM visits", "COUNT(IF(n > 3, 1, NULL)) AS k FROM visits"),
    ("COUNTIF(n > 3, contribution_bounds_per_group => (-4, 5)) AS k FROM visits",
     "COUNT(*, contribution_bounds_per_group => (0, 5)) FILTER (WHERE n > 3) AS k FROM visits"),
    ("COUNT(1, contribution_bounds_per_group => (-5, -1)) AS k FROM visits",
     "COUNT([1, 2], contribution_bounds_per_group => (-5, -1)) AS k FROM visits"),
    ("COUNT(DISTINCT page, contribution_bounds_per_group => (-3, 2)) AS k FROM visits",
     "COUNT(DISTINCT (page), contribution_bounds_per_group => (0, 2)) AS k FROM visits"),
    ("COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 1)) AS k FROM visits",
     "COUNT(DISTINCT (uid)) AS k FROM visits"),
    ("SUM(n) AS k FROM users AS u, visits AS v WHERE u.uid = v.uid",
     "SUM(n) AS k FROM users AS u JOIN visits AS v ON u.uid = v.uid"),
    ("SUM(n) AS k FROM (users AS u JOIN visits AS v ON u.uid IS NOT DISTINCT FROM v.uid)",
     "SUM(n) AS k FROM users AS u JOIN visits AS v ON (u.uid) = v.uid"),
    ("COUNT(*) AS k FROM visits WHERE page IN UNNEST(['a', r'b'])",
     "COUNT(* WITH REPORT) AS k FROM visits WHERE page IN ('a', 'b')"),
    ("COUNT(*) AS k FROM users AS u WHERE EXISTS (SELECT 1 FROM visits AS v WHERE v.uid = u.uid)",
     "COUNT(*) AS k FROM users WHERE uid IN (SELECT uid FROM visits)"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_spellings_are_one_question(one: str, other: str) -> None:
    options = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9) "
    digests = {question_of(options + text, _CATALOG).digest for text in (one, other)}
    assert len(digests) == 1


@pytest.mark.parametrize("call", ["RANK()", "LAG(n)", "SUM(n)", "COUNT(*)"])
@pytest.mark.parametrize("frame", ["", " ROWS 3 PRECEDING", " RANGE UNBOUNDED PRECEDING"])
def test_orders_of_a_window_are_questions_of_their_own(call: str, frame: str) -> None:
    """What is computed decides the identity: NULLS LAST is nothing that the text may leave out."""
    digests = {
        question_of(
            "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9) COUNTIF(v > 2) "
            f"AS k FROM (SELECT uid, {call} OVER (PARTITION BY uid ORDER BY day {order}{frame}) AS "
            "v FROM visits)",
            _CATALOG,
        ).digest
        for order in ("", "NULLS LAST", "DESC", "DESC NULLS FIRST")
    }
    assert len(digests) == 4


_PUBLIC = "epsilon = 2, max_groups_contributed = 12, group_selection_strategy = PUBLIC_GROUPS"


@pytest.mark.parametrize(
    "joined",
    [
        "page, {} FROM visits RIGHT JOIN (SELECT DISTINCT page FROM pages) USING (page)",
        "page, {} FROM (SELECT page FROM pages GROUP BY page) AS p LEFT JOIN visits USING (page)",
        "p.page, {} FROM visits AS v RIGHT JOIN pages AS p ON v.page = p.page",
        "p.page, {} FROM visits AS v RIGHT JOIN (SELECT page FROM pages UNION ALL SELECT page FROM "
        "pages) AS p ON v.page = p.page",
    ],
)
def test_public_groups_are_the_distinct_rows(
    joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path)
    base = duckdb.connect()
    own = base.execute(
        f"SELECT p.page, CAST(COUNT(v.uid) AS DOUBLE) FROM (SELECT DISTINCT page FROM "
        f"'{tmp_path}/pages.csv') AS p LEFT JOIN '{tmp_path}/visits.parquet' AS v USING (page) "
        "GROUP BY 1"
    ).fetchall()
    counted = "COUNT(*, contribution_bounds_per_group => (0, 30)) AS n"
    group = joined.partition(",")[0]
    rows = _answer(tmp_path, dp(joined.format(counted), f"GROUP BY {group}", _PUBLIC))
    assert Counter(rows) == Counter(own)


_LISTED = "p, COUNT(*) AS n FROM visits AS v RIGHT JOIN UNNEST(['p1', 'none', 'p1']) AS p"


def test_groups_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path)
    rows: dict[object, Any] = dict(
        _answer(tmp_path, dp(_LISTED, "ON v.page = p GROUP BY p", _PUBLIC))
    )
    assert set(rows) == {"p1", "none"} and rows["none"] == 0 < rows["p1"]


_DEFAULTS = "defaults = { epsilon = 2, delta = 1e-9, max_groups_contributed = 12 }\n"


def test_what_the_data_set_says_can_be_left_out(tmp_path: Path) -> None:
    project = data_set(tmp_path)
    project.write_text(
        project.read_text().replace("[table.visits]", f"{_DEFAULTS}[table.visits]", 1)
        + '[view]\nshort = "SELECT * FROM visits WHERE seconds < 50"\n'
        'shorter = "SELECT uid, page FROM short WHERE seconds < 20"\n'
    )
    first = answer_to(tmp_path, dp("page, COUNT(*) AS n"))
    for text in (
        "SELECT WITH DIFFERENTIAL_PRIVACY page, COUNT(*) AS n FROM visits GROUP BY page",
        "SELECT WITH ANONYMIZATION OPTIONS() page, ANON_COUNT(*) AS m FROM visits GROUP BY page",
        "SELECT page, ANON_COUNT(*) AS n FROM visits GROUP BY page",
        "SELECT page, ANON_COUNT(*) AS n FROM (SELECT * FROM visits) GROUP BY page",
    ):
        again = answer_to(tmp_path, text)
        assert not again.charged and again.receipt == first.receipt
    catalog = load_catalog(tmp_path)
    digests = {
        question_of(f"SELECT ANON_COUNT(*) AS n FROM {of} WHERE page > 'p'", catalog).digest
        for of in (
            "shorter",
            "(SELECT uid, page FROM (SELECT * FROM visits WHERE seconds < 50) WHERE seconds < 20)",
        )
    }
    assert len(digests) == 1
    without = question_of("SELECT ANON_COUNT(*) AS n FROM visits", catalog).statement.options
    assert (without.epsilon, without.delta, without.groups) == (2.0, 0.0, 1)  # no delta is needed
