"""One private SELECT, however it is shown, is one question: one charge, one noise, one figure.

What must stay two questions stands beside it: statements that differ in what is asked of private
rows.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.sql.ask import identity_of
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from tests.pipelines.sql.asking import COUNTED, answer_to, charges, data_set, dp
from tests.pipelines.sql.presented import Row, presented

PLAIN = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 40, delta = 1e-9, "
    "max_groups_contributed = 12, mechanism = gaussian) page, n > 2 AS late, "
    "COUNT(*, contribution_bounds_per_group => (0, 30)) AS count, "
    "SUM(seconds, contribution_bounds_per_group => (0, 900)) AS sum, "
    "COUNT(DISTINCT uid) AS users, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 100)) AS middle "
    "FROM visits GROUP BY page, late"
)


def _same(value: Any, expected: Any) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-12)


def test_two_hundred_ways_of_showing_figures_cost_one_charge(tmp_path: Path) -> None:
    """And each shows the same figures, where they are asked for and by their own groups."""
    data_set(tmp_path)
    first = answer_to(tmp_path, PLAIN)
    released: dict[tuple[Any, Any], Row] = {
        (row["page"], row["late"]): row for row in first.table.to_pylist()
    }
    assert len(released) >= 12 and len({row["count"] for row in released.values()}) > 6
    compared = 0
    for seed in range(200):
        text, columns, groups = presented(seed)
        answer = answer_to(tmp_path, text)
        assert not answer.charged and answer.receipt == first.receipt, text
        if groups is None:
            continue
        for row in answer.table.to_pylist():
            page, late = (row[name.strip("`")] for name in groups)
            for name, value in columns.items():
                expected = value(released[page, late])
                assert _same(row[name.strip("`")], expected), (text, name)
                compared += 1
    assert compared > 5_000 and len(charges(tmp_path)) == 1


#: Parts of a statement, of which each line lists private questions that differ in it.
_JOIN = "FROM visits AS a JOIN visits AS b ON a.uid = b.uid"
_ROW = "contribution_bounds_per_row => (0, 9)"
_ALL = "SELECT uid, page FROM visits"
_NAMED = "FROM (SELECT uid, {} FROM visits) AS v"
DIFFERENT: dict[str, list[str]] = {
    "function": [
        dp(f"page, {call} AS x")
        for call in (
            "COUNT(*)", COUNTED, "COUNT(seconds)", "COUNT(n)", "COUNT(DISTINCT uid)", "SUM(n)",
            "SUM(seconds)", "SUM(n + 1)", "AVG(n)", "STDDEV(n)", "VAR(n)", "MIN(n)", "MAX(n)",
            "MEDIAN(n)", "APPROX_QUANTILES(n, 2)", "APPROX_QUANTILES(n, 4)",
        )
    ],
    "bounds": [
        dp(f"page, SUM(n, {bounds}) AS x")
        for bounds in (
            _ROW, "contribution_bounds_per_group => (0, 9)",
            "contribution_bounds_per_group => (0, 10)", "contribution_bounds_per_group => (-1, 9)",
            "contribution_norm => 9, contribution_bounds_per_group => (0, 9)",
        )
    ],
    "several functions": [
        dp(f"page, {calls}")
        for calls in (
            "SUM(n) AS x", "SUM(n) AS x, SUM(seconds) AS y", "SUM(n) AS x, AVG(seconds) AS y",
            f"SUM(n, {_ROW}) AS x", f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('0', '1')}) AS y",
            f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('9', '8')}) AS y",
            f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('row', 'group')}) AS y",
            f"MEDIAN(n, {_ROW}) AS x", f"MEDIAN(n, {_ROW}) AS x, MAX(n, {_ROW}) AS y",
            f"MEDIAN(n, {_ROW}) AS x, MAX(n) AS y",
            f"MAX(n, {_ROW}) AS x, APPROX_QUANTILES(n, 2, {_ROW}) AS y",
        )
    ],
    "options": [
        dp("page, SUM(n) AS x", options=f"{options}, delta = {delta}")
        for options, delta in (
            ("epsilon = 2, max_groups_contributed = 3", "1e-9"),
            ("epsilon = 3, max_groups_contributed = 3", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 4", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3", "1e-8"),
            ("epsilon = 2, max_groups_contributed = 3, mechanism = gaussian", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, mechanism = geometric", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, optimise = ANSWER", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, max_rows_contributed = 6", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, min_privacy_units_per_group = 2", "1e-9"),
            ("epsilon = 2, contribution_norm = 3", "1e-9"),
        )
    ],
    "groups": [
        dp(f"{groups}, COUNT(*) AS x", f"FROM visits GROUP BY {groups}")
        for groups in ("page", "n", "page, n", "n > 2", "n > 3", "page, n > 2", "n + 1")
    ] + [dp("COUNT(*) AS x", "FROM visits")],
    "rows": [
        dp("page, SUM(n) AS x", f"FROM visits WHERE {where} GROUP BY page")
        for where in ("n = 1", "n = 2", "n > 1", "seconds = 1", "page = 'a'", "page = 'A'",
                      "n = 1 AND seconds = 1", "n = 1 OR seconds = 1", "NOT n = 1")
    ] + [dp("page, SUM(n) AS x")],
    "sides of a join": [
        dp(f"{one}.page, SUM({other}.n) AS x", f"{_JOIN}{where} GROUP BY {one}.page")
        for one, other in ("aa", "ab", "ba", "bb")
        for where in ("", " WHERE a.n > 1", " WHERE b.n > 1")
    ],
    "joins": [
        dp("a.page, COUNT(*) AS x", f"FROM {relation} GROUP BY a.page")
        for relation in (
            "visits AS a JOIN visits AS b ON a.uid = b.uid",
            "visits AS a LEFT OUTER JOIN visits AS b ON a.uid = b.uid",
            "visits AS a RIGHT JOIN visits AS b ON a.uid = b.uid",
            "visits AS a JOIN visits AS b ON a.uid = b.uid AND a.n = b.n",
            "visits AS a JOIN visits AS b ON a.uid = b.uid AND a.page = b.page",
            "visits AS a JOIN pages AS b ON a.page = b.page",
            "visits AS a JOIN pages AS b ON a.page = b.title",
        )
    ],
    "columns of a subquery": [
        dp("g, SUM(s) AS x", f"{_NAMED.format(items)} GROUP BY g")
        for items in ("page AS g, n AS s", "page AS g, seconds AS s", "n AS g, n AS s",
                      "page AS g, n + 1 AS s", "page AS g, n + 2 AS s", "n AS g, seconds AS s",
                      "CAST(n AS STRING) AS g, n AS s", "n + 1 AS g, n + 2 AS s",
                      "n + 2 AS g, n + 1 AS s")
    ],
    "a subquery's own rows": [
        dp("page, COUNT(*) AS x", f"FROM ({query}) AS v GROUP BY page")
        for query in (
            "SELECT uid, page FROM visits", "SELECT DISTINCT uid, page FROM visits",
            "SELECT uid, page FROM visits WHERE n > 1",
            "SELECT DISTINCT uid, page, n FROM visits",
            "SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page, n",
            "SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page HAVING COUNT(*) > 1",
            f"{_ALL} UNION ALL {_ALL}",
            f"{_ALL} UNION DISTINCT {_ALL}",
            f"{_ALL} INTERSECT DISTINCT {_ALL} WHERE n > 1",
            f"{_ALL} EXCEPT DISTINCT {_ALL} WHERE n > 1",
            f"{_ALL} WHERE n > 1 EXCEPT DISTINCT {_ALL}",
        )
    ],
    "places in a set operation": [
        dp(
            "g, SUM(s) AS x",
            f"FROM (SELECT uid, {one} UNION ALL SELECT uid, {other}) AS v GROUP BY g",
        )
        for one, other in (
            ("n AS g, n + 1 AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
            ("n AS g, n AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
            ("n AS g, n + 1 AS s FROM visits", "n + 1 AS s, n AS g FROM visits"),
            ("n + 1 AS g, n AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("part", list(DIFFERENT))
def test_what_differs_in_private_rows_stays_two_questions(part: str, tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path))
    questions = [question_of(text, catalog) for text in DIFFERENT[part]]
    identities = {tuple(identity_of(question, catalog)) for question in questions}
    assert len(identities) == len(questions) > 2


def test_functions_that_differ_in_anything_are_not_one(tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path))
    for text in DIFFERENT["several functions"]:
        assert len(question_of(text, catalog).select.functions) == text.count(" AS ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "visits AS a JOIN visits AS b ON a.uid = b.uid"),
         ("v", "visits AS v INNER JOIN `visits` AS a ON v.uid = a.uid")),
        (("a", "visits AS a LEFT JOIN visits AS b ON a.uid = b.uid"),
         ("t1", "(SELECT page, uid FROM visits) AS t1 left outer join visits AS t0 ON "
          "t1.uid = t0.uid")),
        (("a", "(SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page) AS a"),
         ("b", "(SELECT COUNT(*) AS n, v.page, uid FROM visits AS v GROUP BY v.uid, v.page) AS b")),
        (("a", "(SELECT uid, page FROM visits UNION ALL SELECT uid, page FROM visits) AS a"),
         ("b", "(SELECT v.uid AS u, page AS page FROM visits AS v UNION ALL SELECT uid AS x, "
          "page AS y FROM (SELECT * FROM visits) AS w) AS b")),
    ],
)  # fmt: skip
def test_names_within_a_private_relation_are_no_part_of_the_question(
    one: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    catalog = load_catalog(data_set(tmp_path))
    first, second = (
        question_of(
            dp(f"{name}.page, COUNT(*) AS x", f"FROM {relation} GROUP BY {name}.page"), catalog
        )
        for name, relation in (one, other)
    )
    assert identity_of(first, catalog) == identity_of(second, catalog)


def test_public_groups_keep_their_figures_in_any_order(tmp_path: Path) -> None:
    """Of the columns of GROUP BY, of the public relation, and of the select list."""
    data_set(tmp_path)
    on = "v.page = p.page AND CONCAT('Title ', CAST(MOD(v.n + 3, 3) AS STRING)) = p.title"
    options = (
        "epsilon = 40, delta = 1e-9, max_groups_contributed = 12, mechanism = gaussian, "
        "group_selection_strategy = PUBLIC_GROUPS"
    )
    rows = list[list[tuple[Any, ...]]]()
    orders = ("{t}page, {t}title", "{t}title, {t}page")
    for listed, by, selected in itertools.product(orders, repeat=3):
        relation = f"(SELECT DISTINCT {listed.format(t='')} FROM pages) AS p"
        rest = f"FROM visits AS v RIGHT JOIN {relation} ON {on} GROUP BY {by.format(t='p.')}"
        items = f"{selected.format(t='p.')}, {COUNTED} AS n"
        table = answer_to(tmp_path, dp(items, rest, options)).table
        columns = (table[name].to_pylist() for name in ("page", "title", "n"))
        rows.append(sorted(zip(*columns, strict=True)))
    assert len(charges(tmp_path)) == 1 and all(one == rows[0] for one in rows)
    assert len(rows[0]) == 12 and max(n for _, _, n in rows[0]) > 100
