"""ROLLUP, CUBE and GROUPING SETS: the rows of DuckDB's own, charges, and what is refused."""

from collections import Counter
from pathlib import Path

import duckdb
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from tests.pipelines.sql.asking import answer_to, charges, data_set, without_noise

_MANY = "contribution_bounds_per_group => (0, 90)"
_OPTIONS = "epsilon = 600, delta = 1e-6, max_groups_contributed = 60"
#: (select list, GROUP BY, DuckDB's, sets)
SELECTED = [
    ("page, n > 3 AS late, GROUPING(page) AS a, GROUPING(late) AS b", "ROLLUP(page, late)",
     "ROLLUP(page, n > 3)", 3),
    ("n > 3 AS late, page", "CUBE(page, late)", "CUBE(page, n > 3)", 4),
    ("page, n, GROUPING(n) * 10 + GROUPING(page) AS a", "GROUPING SETS ((page, n), n, ())",
     "GROUPING SETS ((page, n), n, ())", 3),
    ("n > 3 AS late, page", "n > 3, ROLLUP(page)", "n > 3, ROLLUP(page)", 2),
    ("page, n", "GROUPING SETS (ROLLUP(page), n)", "GROUPING SETS (ROLLUP(page), n)", 3),
    ("page, n, n > 3 AS late", "ROLLUP((page, n), late)", "ROLLUP((page, n), n > 3)", 3),
]  # fmt: skip


def _base(folder: Path) -> duckdb.DuckDBPyConnection:
    base = duckdb.connect()
    base.execute(f"CREATE VIEW visits AS SELECT * FROM '{folder}/visits.parquet'")
    base.execute(f"CREATE VIEW pages AS SELECT * FROM '{folder}/pages.csv'")
    return base


def _rows(folder: Path, text: str) -> Counter[tuple[object, ...]]:
    table = answer_to(folder, text).table
    return Counter(zip(*table.to_pydict().values(), strict=True))


@pytest.mark.parametrize(("items", "by", "own", "sets"), SELECTED)
def test_selected_groups_are_those_of_duckdb(
    items: str, by: str, own: str, sets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    data_set(tmp_path, epsilon=1e6)
    rows = _rows(
        tmp_path,
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_OPTIONS}) {items}, COUNT(*, {_MANY}) AS k, "
        f"COUNT(DISTINCT uid) AS u FROM visits GROUP BY {by}",
    )
    ours = items.replace("GROUPING(late)", "GROUPING(n > 3)")
    query = (
        f"SELECT {ours}, CAST(COUNT(*) AS DOUBLE) AS k, CAST(COUNT(DISTINCT uid) AS DOUBLE) AS u "
        f"FROM visits GROUP BY {own}"
    )
    truth = Counter(_base(tmp_path).execute(query).fetchall())
    assert rows <= truth and truth.total() - rows.total() < 8  # small groups are not released
    spent = charges(tmp_path)
    assert len(spent) == sets and {charge.epsilon for charge in spent} == {600 / sets}


def test_public_groups_add_up_and_are_one_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(tmp_path, epsilon=1e6)
    text = (
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_OPTIONS}, group_selection_strategy = "
        "PUBLIC_GROUPS) p.page, p.n, GROUPING(p.page) + GROUPING(p.n) AS g, "
        f"COUNT(*, {_MANY}) AS k, SUM(v.n, contribution_bounds_per_group => (-60, 90)) AS s FROM "
        "visits AS v RIGHT JOIN (SELECT page, n FROM pages CROSS JOIN UNNEST([1, 2, 3]) AS n) AS p "
        "ON v.page = p.page AND v.n = p.n GROUP BY CUBE(p.page, p.n) ORDER BY g DESC"
    )
    noisy = answer_to(tmp_path, text).table.to_pylist()
    assert len(charges(tmp_path)) == 1 and [row["g"] for row in noisy[:2]] == [2, 1]
    cells = [row for row in noisy if row["g"] == 0]
    assert len(cells) == 36 and len(noisy) == 36 + 12 + 3 + 1
    for row in noisy:
        mine = [c for c in cells if all(row[n] in (None, c[n]) for n in ("page", "n"))]
        for figure in ("k", "s"):
            assert row[figure] == pytest.approx(sum(c[figure] for c in mine), abs=1e-6)
    without_noise(monkeypatch)
    rows = _rows(tmp_path, text.replace("epsilon = 600", "epsilon = 601"))
    own = _base(tmp_path).execute(
        "SELECT p.page, p.n, GROUPING(p.page) + GROUPING(p.n), CAST(COUNT(v.uid) AS DOUBLE), "
        "CAST(COALESCE(SUM(v.n), 0) AS DOUBLE) FROM visits AS v RIGHT JOIN (SELECT page, n FROM "
        "pages CROSS JOIN (VALUES (1), (2), (3)) AS t(n)) AS p ON v.page = p.page AND v.n = p.n "
        "GROUP BY CUBE(p.page, p.n)"
    )
    assert rows == Counter(own.fetchall())


def test_a_set_that_was_asked_alone_is_free(tmp_path: Path) -> None:
    data_set(tmp_path)
    head = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {}, delta = {}, "
    head += "max_groups_contributed = 3) page, COUNT(*) AS n FROM visits GROUP BY "
    answer_to(tmp_path, head.format(1, 5e-10) + "page")
    answer_to(tmp_path, head.format(2, 1e-9) + "ROLLUP(page)")
    assert [charge.epsilon for charge in charges(tmp_path)] == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "page, COUNT(*) AS n FROM visits GROUP BY ROLLUP(page) HAVING COUNT(*) > 3",
        "page, COUNT(*) AS n FROM visits GROUP BY ROLLUP(page) LIMIT 3",
        "COUNT(*) AS n FROM (SELECT uid, page FROM visits GROUP BY ROLLUP(uid, page)) AS t",
        "page, COUNT(*) AS n FROM visits GROUP BY CUBE(page, n, uid, seconds, n + 1)",
        "page, GROUPING(page) AS n FROM visits GROUP BY page",
        "page, COUNT(*) AS n FROM visits GROUP BY ROLLUP(page, GROUPING(page))",
        "page, COUNT(*) AS n FROM visits WHERE GROUPING(page) = 0 GROUP BY ROLLUP(page)",
        "p, AVG(v.n) AS n FROM visits AS v RIGHT JOIN UNNEST(['a']) AS p ON v.page = p GROUP BY "
        "ROLLUP(p)",
        "uid, COUNT(*) AS n FROM visits GROUP BY ROLLUP(uid)",
    ],
)
def test_what_has_no_such_form_is_refused(text: str, tmp_path: Path) -> None:
    data_set(tmp_path)
    public = ", group_selection_strategy = PUBLIC_GROUPS" if "RIGHT JOIN" in text else ""
    head = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_OPTIONS}{public}) "
    with pytest.raises(DpstreamError):
        question_of(head + text, load_catalog(tmp_path))
