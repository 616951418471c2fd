"""Statements: both spellings, private part and outer query, and the canonical form.

The canonical form is the same relation, groups and functions by other names, and is what is
executed; ``tests/pipelines/sql/test_receipt.py`` tests that it has nothing of a presentation.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
import sqlglot
from pyarrow import csv as pacsv

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.stream import stream_job
from dpstream.pipelines.statements.canonical import (
    canonical_form,
    function_text,
    group_text,
    sql,
)
from dpstream.pipelines.statements.dialect import (
    DpSql,
)
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.statement import (
    PrivateSelect,
    statement_of,
)
from tests import projects
from tests.golden.pinned import check, of_cases, of_refusals
from tests.pipelines.sql.pairs import AROUND, PAIRS, RELATIONS
from tests.pipelines.sql.queries import generated
from tests.pipelines.sql.shop import (
    OPTIONS,
    PROJECT,
    all_rows,
    database,
    dp,
    folder,
    one_by_one,
    rows,
    shop,
    stage_text,
    through,
    ugly_rows,
)

HERE = Path(__file__).parent
_CATALOG = shop()
_BASE = "epsilon = 1, delta = 1e-9"
_ONE = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE})"
_TWO = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}, max_groups_contributed = 2)"
_BY_DEPT = "dept, COUNT(*) AS n FROM users GROUP BY dept"
_PUBLIC = "group_selection_strategy = public_groups"
_PAGES = "(SELECT DISTINCT page FROM pages) AS p"
_KEEPING = (
    f"visits AS v RIGHT JOIN {_PAGES} ON v.page = p.page",
    f"visits AS v RIGHT JOIN {_PAGES} ON UPPER(v.page) = p.page",
    f"{_PAGES} LEFT OUTER JOIN visits AS v ON p.page = v.page",
    f"visits AS v RIGHT JOIN {_PAGES} ON v.page = p.page WHERE v.n > 3 AND v.page <> 'p1'",
)
#: What each is taken for is golden text.
ACCEPTED = [
    # Options.
    *(
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) COUNT(*) AS n FROM users"
        for options in (
            _BASE, f"{_BASE}, max_groups_contributed = 7, max_rows_contributed = 2",
            f"{_BASE}, privacy_unit_column = uid, min_privacy_units_per_group = 9",
            f"{_BASE}, privacy_unit_column = users.UID", f"{_BASE}, contribution_norm = 2.5",
            f"{_BASE}, optimise = LIMIT", f"{_BASE}, optimise = answer", "epsilon = 1e0",
            "epsilon = 1, mechanism = geometric", "epsilon = 1, delta = 0",
        )
    ),
    f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}, contribution_norm = 2) {_BY_DEPT}",
    f"{_ONE} dept, COUNT(*, contribution_norm => 8) AS n FROM users GROUP BY dept",
    f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}, max_groups_contributed = 9) {_BY_DEPT}",
    # Columns that are called like their table.
    f"{_TWO} dept, COUNT(*) AS users FROM users GROUP BY dept HAVING users > 1 ORDER BY users",
    f"{_TWO} dept AS users, SUM(users.age) AS n FROM users GROUP BY users.dept HAVING n > 1",
    f"{_TWO} dept, SUM(users.age) AS users FROM users GROUP BY 1 HAVING users > 1 ORDER BY users",
    f"{_TWO} u.dept, SUM(u.age) AS u FROM (SELECT uid, dept, MAX(age) AS age FROM users "
    "GROUP BY users.uid, users.dept) AS u GROUP BY u.dept",
    # Functions.
    *(
        f"{_ONE} {call} AS x FROM users"
        for call in (
            "COUNT(*)", "COUNT(age)", "COUNT(DISTINCT uid)", "ANON_COUNT(*, 5)",
            "ANON_COUNT(* CLAMPED BETWEEN 1 AND 5)",
            "COUNT(*, contribution_bounds_per_group => (0, 5))",
            "SUM(age, contribution_bounds_per_row => (-1.5, 5))",
            "SUM(age, contribution_bounds_per_row => (- - 3, 1e60))",
            "SUM(age, contribution_bounds_per_row => (-1e-60, 0))",
            "ANON_SUM(age, 0, 5)", "AVG(age, contribution_bounds_per_group => (0, 5))",
            "ANON_AVG(age CLAMPED BETWEEN 0 AND 5)", "VAR(age)", "ANON_VAR(age, 0, 9)",
            "STDDEV(age)", "MIN(age)", "ANON_MAX(age, 0, 9)", "MEDIAN(age)",
            "ANON_NTILE(age, 0.9, 0, 9)",
            "PERCENTILE_CONT(age, 0.25, contribution_bounds_per_row => (0, 9))",
            "ANON_PERCENTILE(age, 0.25 CLAMPED BETWEEN 0 AND 9)", "APPROX_QUANTILES(age, 4)",
        )
    ),
    f"{_ONE} SUM(age WITH REPORT) AS a, SUM(age) AS b FROM users",
    f"{_ONE} COUNT(DISTINCT uid) AS a, SUM(age) AS a_sd FROM users",
    f"SELECT r.a AS b, r.a_sd FROM ({_ONE} COUNT(DISTINCT uid WITH REPORT) AS a, "
    "SUM(age) AS a_sd FROM users) AS r",
    f"{_TWO} dept, SUM(age) / COUNT(*) AS r, COUNT(*) AS n, COUNT(*) AS m FROM users GROUP BY dept "
    "HAVING MEDIAN(age) > 3 AND n > 1 ORDER BY SUM(age), dept",
    # Groups and units.
    f"{_TWO} dept AS d, DIV(age, 10) AS decade, COUNT(*) AS n FROM users GROUP BY 1, decade, age",
    f"{_ONE} COUNT(*) AS n FROM users FULL JOIN visits USING (uid)",
    f"{_ONE} COUNT(*) AS n FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid",
    f"{_ONE} COUNT(*) AS n FROM users AS a RIGHT JOIN visits AS b ON a.uid = b.uid",
    f"{_ONE} COUNT(*) AS n FROM visits AS a JOIN pages AS b ON a.page = b.page",
    f"WITH w AS (SELECT uid FROM users), v AS (SELECT uid FROM w) {_ONE} COUNT(*) AS n "
    "FROM v AS x JOIN w AS y ON x.uid = y.uid",
    *(
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, max_groups_contributed = 2, "
        f"{_PUBLIC}) p.page, COUNT(*) AS n FROM {joined} GROUP BY p.page"
        for joined in _KEEPING
    ),
]  # fmt: skip
#: Public groups in any other form.
REFUSED_GROUPS = [
    "visits AS p", f"visits AS v JOIN {_PAGES} ON v.page = p.page",
    f"visits AS v LEFT JOIN {_PAGES} ON v.page = p.page",
    "visits AS v RIGHT JOIN (SELECT page FROM visits) AS p ON v.page = p.page",
    f"visits AS v RIGHT JOIN {_PAGES} ON v.page = p.page AND v.n > 3",
    f"visits AS v RIGHT JOIN {_PAGES} ON v.page = v.page",
    f"visits AS v RIGHT JOIN {_PAGES} ON v.page = p.title",
    "visits AS v RIGHT JOIN (SELECT DISTINCT page, title FROM pages) AS p ON v.page = p.page",
    f"visits AS v RIGHT JOIN {_PAGES} ON TRUE",
    f"{_KEEPING[0]} WHERE p.page <> 'p1'", f"{_KEEPING[0]} WHERE v.n > 3 OR UPPER(p.page) IS NULL",
]  # fmt: skip


def form_of(text: str) -> str:
    """What a statement is taken for."""
    statement = statement_of(text, _CATALOG)
    parts = [f"options   {statement.options}", f"from      {sql(statement.source)}"]
    parts += [f"unit      {sql(statement.unit)}", f"public    {sql(statement.public)}"]
    parts += [f"group     {g.name} {group_text(g)}" for g in statement.groups]
    parts += [f"function  {f.name} {function_text(f)} {f.report}" for f in statement.functions]
    return "\n".join([*parts, f"outer     {sql(statement.outer)}", ""])


def test_what_statements_are_taken_for() -> None:
    check(HERE / "accepted.txt", of_cases({text: form_of(text) for text in ACCEPTED}))


def test_public_groups_in_another_form_are_refused() -> None:
    texts = [
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, max_groups_contributed = 2, "
        f"{_PUBLIC}) p.page, COUNT(*) AS n FROM {joined} GROUP BY p.page"
        for joined in REFUSED_GROUPS
    ]
    refusals = of_refusals({text: partial(statement_of, text, _CATALOG) for text in texts})
    assert refusals.count("p1") == 1  # in the statement itself
    check(HERE / "groups.txt", refusals)


_KEYED = {
    "parents": {"path": "p.csv", "unit_column": "uid",
                "columns": {"uid": "INT64", "a": "INT64", "b": "INT64"}},
    "children": {"path": "c.csv", "columns": {"x": "INT64", "y": "INT64"},
                 "unit_via": {"table": "parents", "on": [["x", "b"], ["y", "a"]]}},
}  # fmt: skip


@pytest.mark.parametrize(("relation", "usable"), [
    ("parents AS p JOIN children AS c ON p.b = c.x AND p.a = c.y", True),
    ("children AS p JOIN children AS c ON p.x = c.x AND c.y = p.y", True),
    ("parents AS p JOIN children AS c ON p.b = c.x", False),
    ("parents AS p JOIN children AS c ON p.a = c.x AND p.b = c.y", False),
    # Parts of a key that come from two rows are no key.
    ("(SELECT q.uid, q.a, r.b FROM parents AS q JOIN parents AS r ON q.uid = r.uid) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", False),
    ("(SELECT q.uid, q.a, q.b FROM parents AS q JOIN parents AS r ON q.uid = r.uid) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", True),
    ("(SELECT uid, a, b FROM parents GROUP BY a, b, uid) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", True),
    ("(SELECT uid, a, MAX(b) AS b FROM parents GROUP BY a, uid) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", False),
    ("(SELECT uid, a, b + 0 AS b FROM parents) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", False),
    ("(SELECT uid, a, b FROM parents UNION ALL SELECT uid, b, a FROM parents) AS p "
     "JOIN children AS c ON p.b = c.x AND p.a = c.y", False),
])  # fmt: skip
def test_composite_keys(relation: str, usable: bool) -> None:
    catalog = catalog_of(projects.of_tables(Path("/keyed"), ("uid", "int"), _KEYED))
    refused = of_refusals(
        {"": partial(statement_of, f"{_ONE} COUNT(*) AS n FROM {relation}", catalog)}
    )
    assert ("not refused" in refused) is usable == ("[join-without-unit]" not in refused)


_COUNT = "page, COUNT(*) AS n FROM visits GROUP BY page"
#: (code, options, what follows them)
REFUSED = [
    ("stream-option", f"{OPTIONS}, max_groups_contributed = 3", _COUNT),
    ("stream-option", f"{OPTIONS}, contribution_norm = 3", _COUNT),
    ("stream-option", f"{OPTIONS}, mechanism = GEOMETRIC", _COUNT),
    ("stream-option", f"{OPTIONS}, group_selection_strategy = PUBLIC_GROUPS", _COUNT),
    ("option-unknown", f"{OPTIONS}, rows = 3", _COUNT),
    ("epsilon", "delta = 1e-9, max_rows_contributed = 4", _COUNT),
    ("delta", "epsilon = 1, max_rows_contributed = 4", _COUNT),
    ("max-rows", "epsilon = 1, delta = 1e-9, max_rows_contributed = 0", _COUNT),
    ("stream-contributions", "epsilon = 1, delta = 1e-9", _COUNT),
    ("unit-column", f"{OPTIONS}, privacy_unit_column = page", _COUNT),
    ("stream-join", OPTIONS, "a.page, COUNT(*) AS n FROM visits a JOIN visits b ON a.user = b.user "
     "GROUP BY a.page"),
    ("join-without-unit", OPTIONS, "a.page, COUNT(*) AS n FROM visits a JOIN visits b ON a.n = b.n "
     "GROUP BY a.page"),
    ("stream-look-up", OPTIONS, "page, COUNT(*) AS n FROM visits, sections AS s GROUP BY page"
     .replace("page,", "visits.page,").replace("BY page", "BY visits.page")),
    ("stream-look-up", OPTIONS, "s.section, COUNT(*) AS n FROM visits v JOIN sections s "
     "ON v.page < s.page GROUP BY s.section"),
    ("outer-join-public", OPTIONS, "s.section, COUNT(*) AS n FROM visits v RIGHT JOIN sections s "
     "ON v.page = s.page GROUP BY s.section"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits "
     "GROUP BY user, page) AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits UNION ALL "
     "SELECT user, page FROM visits) AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "page, COUNT(*) AS n FROM (SELECT DISTINCT user, page FROM visits) "
     "AS t GROUP BY page"),
    ("stream-rows", OPTIONS, "k, COUNT(*) AS n FROM (SELECT user, SUM(n) AS k FROM visits "
     "GROUP BY user) AS t GROUP BY k"),
    ("limit", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page FROM visits LIMIT 9) AS t "
     "GROUP BY page"),
    ("window", OPTIONS, "page, COUNT(*) AS n FROM (SELECT user, page, SUM(n) OVER () AS w "
     "FROM visits) AS t GROUP BY page"),
    ("stream-function", OPTIONS, "page, COUNT(n) AS c FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, MEDIAN(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, MAX(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, STDDEV(n, contribution_bounds_per_row => (0, 1)) AS m "
     "FROM visits GROUP BY page"),
    ("stream-function", OPTIONS, "page, COUNT(DISTINCT n) AS c FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, SUM(n) AS s FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, AVG(n) AS s FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, COUNT(*, contribution_bounds_per_group => (0, 5)) AS c "
     "FROM visits GROUP BY page"),
    ("stream-bounds", OPTIONS, "page, COUNT(*, contribution_norm => 5) AS c FROM visits "
     "GROUP BY page"),
    ("stream-answer", OPTIONS, f"{_COUNT} HAVING n > 5"),
    ("stream-answer", OPTIONS, f"{_COUNT} ORDER BY n"),
    ("stream-answer", OPTIONS, f"{_COUNT} LIMIT 5"),
    ("stream-answer", OPTIONS, "page, COUNT(*) / 2 AS c FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(*) AS n, 1 AS one FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(*) AS n, COUNT(*) AS m FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "COUNT(*) AS n FROM visits GROUP BY page"),
    ("stream-answer", OPTIONS, "page, COUNT(* WITH REPORT) AS n FROM visits GROUP BY page"),
    ("stream-groups", OPTIONS, "COUNT(*) AS n FROM visits"),
    ("stream-groups", OPTIONS, "day, COUNT(*) AS n FROM visits GROUP BY day"),
    ("group-type", OPTIONS, "seconds, COUNT(*) AS n FROM visits GROUP BY seconds"),
    ("group-by-unit", OPTIONS, "user, COUNT(*) AS n FROM visits GROUP BY user"),
    ("stream-name", OPTIONS, "UPPER(page) AS at, COUNT(*) AS n FROM visits GROUP BY at"),
    ("unknown-table", OPTIONS, "page, COUNT(*) AS n FROM orders GROUP BY page"),
    ("no-private-table", OPTIONS, "page, COUNT(*) AS n FROM sections GROUP BY page"),
]  # fmt: skip


def test_every_rule_of_streams_has_a_statement_that_breaks_it() -> None:
    ours = {rule for rule in RULES if rule.startswith("stream-")}
    assert ours == {code for code, _, _ in REFUSED if code.startswith("stream-")}


NO_STREAMS = [
    f"SELECT page FROM ({dp(_COUNT)}) AS t",
    f"WITH t AS ({dp(_COUNT)}) SELECT page, n FROM t",
    "SELECT page FROM visits",
    "DELETE FROM visits WHERE true",
    f"{dp(_COUNT)}; {dp(_COUNT)}",
    f"{dp(_COUNT)} GROUP",
]


def test_statements_that_are_no_streams_are_refused(tmp_path: Path) -> None:
    """With a literal in each of them, which is in no refusal; and nothing is written."""
    project = load_project(folder(tmp_path))
    texts = [dp(items, options) for _, options, items in REFUSED] + NO_STREAMS
    commented = {text: text.replace("FROM visits", "FROM visits /* Quitte */") for text in texts}
    refusals = of_refusals(
        {text: partial(stream_job, project, None, other) for text, other in commented.items()}
    )
    assert "Quitte" not in refusals
    check(HERE / "streams.txt", refusals)
    codes = re.findall(r"\[([a-z-]+)\]", refusals)
    assert codes[: len(REFUSED)] == [code for code, _, _ in REFUSED]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dpstream.toml", "in", "sections.csv"]


_TABLES = """
[table.visits]
path = "in/*.csv"
unit_column = "uid"
time_column = "at"
columns.uid = "INT64"
columns.page = "STRING"
columns.seconds = "FLOAT64"
columns.at = "TIMESTAMP"
columns.day = "DATE"
columns.cost = "NUMERIC"
columns.flag = "BOOL"
columns.n = "INT64"

[table.pages]
public = true
path = "sections.csv"
key_columns = ["page"]
columns = { page = "STRING", title = "STRING", weight = "FLOAT64", uid = "INT64" }

[job.daily]
"""


def test_whatever_the_tables_front_is_asked_is_refused_or_local(tmp_path: Path) -> None:
    """Statements on tables, as streams: coded refusals, or a query that no cut of batches shows."""
    head, job = PROJECT.partition("[table.visits]")[0], PROJECT.partition("[job.daily]\n")[2]
    head = head.replace('name = "user"', 'name = "uid", type = "int"')
    project = load_project(folder(tmp_path, head + _TABLES + job))
    (tmp_path / "sections.csv").write_text("page,title,weight,uid\np1,T,1,2\np2,U,,3\n")
    table = rows(16).rename_columns(["uid", "page", "at", "seconds", "n", "flag", "day"])
    pacsv.write_csv(table.append_column("cost", table["n"]), tmp_path / "in" / "0.csv")
    (tmp_path / "in" / "1.csv").unlink()
    texts = sorted({text for pair in PAIRS for text in pair[:2] if "visits" in text})
    accepted = 0
    for text in texts[::9]:
        statement = re.sub(r"max_groups_contributed = \d+", "max_rows_contributed = 4", text)
        try:
            stream = stream_job(project, None, statement).job
        except DpstreamError as error:
            assert error.fix
            continue
        accepted += 1
        if stream.source.query is not None:
            batch = all_rows(stream)
            assert through(stream, list(one_by_one(batch))) == through(stream, [batch]), text
    assert accepted >= 3


_FORMS = [
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1.5, delta = 1e-9, mechanism = geometric, "
    "privacy_unit_column = t.uid, group_selection_strategy = PUBLIC_GROUPS) k, "
    "COUNT(*, contribution_bounds_per_group => (0, 5)) AS n FROM t GROUP BY k HAVING n > 5",
    "SELECT WITH ANONYMIZATION OPTIONS(epsilon = 1) ANON_COUNT(* CLAMPED BETWEEN 0 AND 5) FROM t",
    "SELECT WITH ANONYMIZATION ANON_SUM(x CLAMPED BETWEEN -1 AND 2.5 WITH REPORT) FROM t",
    "SELECT WITH ANONYMIZATION ANON_NTILE(x, 0.9, 0, 10), ANON_MEDIAN(x WITH REPORT) FROM t",
    "SELECT COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 1)) FROM t",
    "SELECT SUM(x + 1, contribution_bounds_per_row => (-1, 2.5)), SUM(x) FROM t",
    "SELECT PERCENTILE_CONT(x, 0.5, contribution_bounds_per_row => (0, 1)) FROM t",
    "SELECT APPROX_QUANTILES(x, 4), MEDIAN(x), VAR(x), STDDEV_POP(x), VARIANCE(x) FROM t",
    "SELECT AVG(x, contribution_norm => 4.64) FROM t",
    "SELECT MIN(x WITH REPORT), MAX(x), COUNT(DISTINCT a, b) FROM t",
]


@pytest.mark.parametrize("text", _FORMS)
def test_forms_round_trip(text: str) -> None:
    tree = sqlglot.parse_one(text, dialect=DpSql)
    written = tree.sql(dialect=DpSql)
    assert sqlglot.parse_one(written, dialect=DpSql) == tree
    assert written == sqlglot.parse_one(written, dialect=DpSql).sql(dialect=DpSql)
    assert written == text  # the forms are in the generator's own words


def test_every_accepted_statement_round_trips() -> None:
    for text in {good for good, _, _ in PAIRS}:
        tree = sqlglot.parse_one(text, dialect=DpSql)
        assert sqlglot.parse_one(tree.sql(dialect=DpSql), dialect=DpSql) == tree


@pytest.mark.parametrize("text", [
    "SELECT WITH SOMETHING OPTIONS(epsilon = 1) x FROM t",
    "SELECT WITH ANONYMIZATION OPTIONS(epsilon) x FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0) FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0 OR 1) FROM t",
])  # fmt: skip
def test_broken_forms_are_syntax_errors(text: str) -> None:
    with pytest.raises(sqlglot.ParseError):
        sqlglot.parse_one(text, dialect=DpSql)


#: Relations, and renamings in them, that the generator does not write.
_MORE = (
    "a.uid, SUM(b.v) AS s FROM (SELECT uid, n AS v, page AS b FROM visits) AS b JOIN (SELECT uid "
    "AS v, age AS uid, uid AS u FROM users) AS a ON a.v = b.uid GROUP BY a.uid",
    "v, COUNT(*) AS k, SUM(v) AS s FROM (SELECT uid, u AS v FROM (SELECT uid, n AS u, n AS w FROM "
    "visits WHERE n > 0) AS x) AS y GROUP BY v",
    "v, SUM(s) AS a, SUM(u) AS b FROM (SELECT uid, n AS v, n AS s, 1 AS u FROM visits UNION ALL "
    "SELECT uid, age AS u, 1 AS v, age AS s FROM users) AS x GROUP BY v",
    "t1.g, SUM(t0.n) AS s, COUNT(*) AS k FROM visits AS t1x JOIN visits AS t0 ON t1x.uid = t0.uid "
    "JOIN (SELECT uid, page AS g FROM visits) AS t1 ON t1.uid = t0.uid GROUP BY t1.g",
)
_DP = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
    "max_groups_contributed = 4, max_rows_contributed = 2) "
)


@pytest.fixture(scope="module")
def ugly() -> duckdb.DuckDBPyConnection:
    return database(_CATALOG, ugly_rows(5))


def _columns(connection: duckdb.DuckDBPyConnection, select: PrivateSelect) -> dict[str, list[Any]]:
    """Stage 1: of each unit's row the partials, by group and function."""
    table = connection.sql(stage_text(select, _CATALOG)).to_arrow_table().to_pydict()
    out = {"unit": table["unit"]}
    out |= {group.name: table[f"group_{i}"] for i, group in enumerate(select.groups)}
    for i, function in enumerate(select.functions):
        for part in ("value", "count", "rows"):
            if f"{part}_{i}" in table:
                out[f"{part} of {function.name}"] = table[f"{part}_{i}"]
    return out


@pytest.mark.parametrize(
    "text",
    [
        *map(generated, range(40)),
        *(AROUND[i % len(AROUND)].format(r) for i, (r, _, _) in enumerate(RELATIONS)),
        *(_DP + more for more in _MORE),
    ],
)
def test_the_canonical_form_has_the_same_rows(text: str, ugly: duckdb.DuckDBPyConnection) -> None:
    statement = statement_of(text, _CATALOG)
    select, names = canonical_form(statement)
    written, canonical = _columns(ugly, statement), _columns(ugly, select)
    named = {}
    for name in written:
        part, of, label = name.rpartition(" of ")
        named[name] = f"{part}{of}{names.get(label, label)}"
    one = zip(*written.values(), strict=True)
    other = zip(*(canonical[name] for name in named.values()), strict=True)
    assert sorted(map(repr, one)) == sorted(map(repr, other))


def test_groups_and_functions_are_sorted_sets() -> None:
    def form(items: str, by: str) -> PrivateSelect:
        text = f"{_DP} {items} FROM visits AS v GROUP BY {by}"
        return canonical_form(statement_of(text, _CATALOG)).select

    first = form("page, n, COUNT(*) AS k, SUM(n) AS s, SUM(n) AS r", "page, n")
    second = form("SUM(v.n) AS a, v.n AS b, COUNT(*) AS c, v.page", "v.n, v.page, v.page")
    for select in (first, second):
        assert [g.name for g in select.groups] == ["group_0", "group_1"]
        assert [f.name for f in select.functions] == ["function_0", "function_1"]
    assert list(map(group_text, first.groups)) == list(map(group_text, second.groups))
    assert list(map(function_text, first.functions)) == list(map(function_text, second.functions))
