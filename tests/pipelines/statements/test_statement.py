"""What a statement means: options, groups, functions, source and what is done afterwards."""

import re
from pathlib import Path
from typing import Any

import pytest
from pyarrow import csv as pacsv
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.stream import stream_job
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.functions import DEFAULT_ROWS, Options
from dpstream.pipelines.statements.statement import Statement, statement_of
from tests import projects
from tests.pipelines.sql.pairs import PAIRS
from tests.pipelines.sql.shop import shop
from tests.pipelines.sql.visited import (
    OPTIONS,
    PROJECT,
    all_rows,
    dp,
    folder,
    one_by_one,
    rows,
    through,
)

_CATALOG = shop()
_BASE = "epsilon = 1, delta = 1e-9"


def statement_with(items: str, options: str = _BASE, rest: str = "FROM users") -> Statement:
    """A statement about users."""
    form = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items} {rest}"
    return statement_of(form, _CATALOG)


@pytest.mark.parametrize(("options", "expected"), [
    (_BASE, Options(1.0, 1e-9, 1)),
    (f"{_BASE}, max_groups_contributed = 7, max_rows_contributed = 2",
     Options(1.0, 1e-9, 7, rows=2)),
    (f"{_BASE}, privacy_unit_column = uid, min_privacy_units_per_group = 9",
     Options(1.0, 1e-9, 1, unit_column="uid", min_units=9)),
    (f"{_BASE}, privacy_unit_column = users.UID", Options(1.0, 1e-9, 1, unit_column="users.uid")),
    (f"{_BASE}, contribution_norm = 2.5", Options(1.0, 1e-9, 1, norm=2.5)),
    ("epsilon = 1, mechanism = geometric", Options(1.0, 0.0, 1, mechanism="geometric")),
])  # fmt: skip
def test_options(options: str, expected: Options) -> None:
    assert statement_with("COUNT(*) AS n", options).options == expected


@pytest.mark.parametrize("text", [
    "dept, COUNT(*) AS users FROM users GROUP BY dept HAVING users > 1 ORDER BY users",
    "dept AS users, SUM(users.age) AS n FROM users GROUP BY users.dept HAVING n > 1",
    "dept, SUM(users.age) AS users FROM users GROUP BY 1 HAVING users > 1 ORDER BY users",
    "u.dept, SUM(u.age) AS u FROM (SELECT uid, dept, MAX(age) AS age FROM users "
    "GROUP BY users.uid, users.dept) AS u GROUP BY u.dept",
])  # fmt: skip
def test_a_column_may_be_called_like_its_table(text: str) -> None:
    form = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}, max_groups_contributed = 1) {text}"
    statement = statement_of(form, _CATALOG)
    assert [g.expression.name for g in statement.groups] == ["dept"] and len(
        statement.functions
    ) == 1


def test_defaults_with_groups() -> None:
    rest = "FROM users GROUP BY dept"
    norm = statement_with("dept, COUNT(*) AS n", f"{_BASE}, contribution_norm = 2", rest)
    assert norm.options.groups == MAX_GROUPS and norm.options.rows == DEFAULT_ROWS == 5
    own = statement_with("dept, COUNT(*, contribution_norm => 8) AS n", _BASE, rest)
    assert (own.options.norm, own.functions[0].norm) == (None, 8.0)


@pytest.mark.parametrize(("call", "expected"), [
    ("COUNT(*)", ("count", None, None, "group", ())),
    ("COUNT(age)", ("count", None, None, "group", ())),
    ("COUNT(DISTINCT uid)", ("units", None, None, "group", ())),
    ("ANON_COUNT(*, 5)", ("count", 0.0, 5.0, "group", ())),
    ("ANON_COUNT(* CLAMPED BETWEEN 1 AND 5)", ("count", 1.0, 5.0, "group", ())),
    ("COUNT(*, contribution_bounds_per_group => (0, 5))", ("count", 0.0, 5.0, "group", ())),
    ("SUM(age, contribution_bounds_per_row => (-1.5, 5))", ("sum", -1.5, 5.0, "row", ())),
    ("ANON_SUM(age, 0, 5)", ("sum", 0.0, 5.0, "group", ())),
    ("AVG(age, contribution_bounds_per_group => (0, 5))", ("mean", 0.0, 5.0, "group", ())),
    ("ANON_AVG(age CLAMPED BETWEEN 0 AND 5)", ("mean", 0.0, 5.0, "group", ())),
    ("VAR(age)", ("var", None, None, "row", ())),
    ("ANON_VAR(age, 0, 9)", ("var", 0.0, 9.0, "row", ())),
    ("STDDEV(age)", ("stddev", None, None, "row", ())),
    ("MIN(age)", ("quantiles", None, None, "row", (0.0,))),
    ("ANON_MAX(age, 0, 9)", ("quantiles", 0.0, 9.0, "row", (1.0,))),
    ("MEDIAN(age)", ("quantiles", None, None, "row", (0.5,))),
    ("ANON_NTILE(age, 0.9, 0, 9)", ("quantiles", 0.0, 9.0, "row", (0.9,))),
    ("PERCENTILE_CONT(age, 0.25, contribution_bounds_per_row => (0, 9))",
     ("quantiles", 0.0, 9.0, "row", (0.25,))),
    ("ANON_PERCENTILE(age, 0.25 CLAMPED BETWEEN 0 AND 9)",
     ("quantiles", 0.0, 9.0, "row", (0.25,))),
    ("APPROX_QUANTILES(age, 4)", ("quantiles", None, None, "row", (0.0, 0.25, 0.5, 0.75, 1.0))),
])  # fmt: skip
def test_functions(call: str, expected: tuple[Any, ...]) -> None:
    [f] = statement_with(f"{call} AS x").functions
    assert (f.kind, f.low, f.high, f.per, f.at) == expected
    assert f.name == "x" and not f.report
    assert (f.argument is None) == (call.startswith(("COUNT(*", "ANON_COUNT(*", "COUNT(D")))
    assert f.many == call.startswith("APPROX")


def test_reports() -> None:
    statement = statement_with("SUM(age WITH REPORT) AS a, SUM(age) AS b")
    assert [f.report for f in statement.functions] == [True, False]


def test_equal_functions_are_one_and_hidden_ones_are_added() -> None:
    statement = statement_with(
        "dept, SUM(age) / COUNT(*) AS r, COUNT(*) AS n, COUNT(*) AS m",
        f"{_BASE}, max_groups_contributed = 2",
        "FROM users GROUP BY dept HAVING MEDIAN(age) > 3 AND n > 1 ORDER BY SUM(age), dept",
    )
    assert [(f.name, f.kind) for f in statement.functions] == [
        ("_f0", "sum"), ("_f1", "count"), ("_f2", "quantiles"),
    ]  # fmt: skip
    assert [c.name for c in statement.outer.expressions[2].find_all(exp.Column)] == ["_f1"]
    assert statement.outer.args["order"].sql().startswith('ORDER BY "released"."_f0"')


def test_groups_by_name_place_and_expression() -> None:
    statement = statement_with(
        "dept AS d, DIV(age, 10) AS decade, COUNT(*) AS n",
        f"{_BASE}, max_groups_contributed = 2",
        "FROM users GROUP BY 1, decade, age",
    )
    assert [(g.name, g.type) for g in statement.groups] == [
        ("d", exp.DType.TEXT), ("decade", exp.DType.BIGINT), ("age", exp.DType.BIGINT),
    ]  # fmt: skip
    assert statement.public is None and statement.unit.sql() == '"users"."uid"'


def test_the_unit_after_a_full_join() -> None:
    statement = statement_with("COUNT(*) AS n", _BASE, "FROM users FULL JOIN visits USING (uid)")
    assert statement.unit.sql() == 'COALESCE("users"."uid", "visits"."uid")'


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
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}) COUNT(*) AS n FROM {relation}"
    if usable:
        assert statement_of(text, catalog).functions
    else:
        with pytest.raises(PolicyError) as caught:
            statement_of(text, catalog)
        assert caught.value.code == "join-without-unit"  # type: ignore[attr-defined]


@pytest.mark.parametrize("taken", ["a_sd", "a_noise_low", "a_noise_high"])
def test_no_column_is_called_like_a_part_of_an_interval(taken: str) -> None:
    """It would be shown in the place of the interval, or the interval in its."""
    both = f"COUNT(DISTINCT uid WITH REPORT) AS a, SUM(age) AS {taken}"
    with pytest.raises(DpstreamError, match="one name"):
        statement_with(both)
    core = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}) {both} FROM users"
    with pytest.raises(DpstreamError, match="one name"):
        statement_of(f"SELECT r.a, r.{taken} FROM ({core}) AS r", _CATALOG)
    statement_of(f"SELECT r.a AS b, r.{taken} FROM ({core}) AS r", _CATALOG)
    assert statement_with(both.replace(" WITH REPORT", "")).functions[1].name == taken


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
    ("count-distinct", OPTIONS, "page, COUNT(DISTINCT n) AS c FROM visits GROUP BY page"),
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


@pytest.mark.parametrize(("code", "options", "items"), REFUSED)
def test_refused(code: str, options: str, items: str, tmp_path: Path) -> None:
    with pytest.raises(DpstreamError) as caught:
        stream_job(load_project(folder(tmp_path)), None, dp(items, options))
    assert f"[{code}]" in caught.value.rule, caught.value.rule
    assert caught.value.field.startswith("statement") and caught.value.fix
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dpstream.toml", "in", "sections.csv"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("stream-answer", f"SELECT page FROM ({dp(_COUNT)}) AS t"),
        ("stream-answer", f"WITH t AS ({dp(_COUNT)}) SELECT page, n FROM t"),
        ("no-dp-select", "SELECT page FROM visits"),
        ("select-only", "DELETE FROM visits WHERE true"),
        ("one-statement", f"{dp(_COUNT)}; {dp(_COUNT)}"),
        ("syntax", f"{dp(_COUNT)} GROUP"),
    ],
)
def test_whole_statements_that_are_refused(code: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(DpstreamError) as caught:
        stream_job(load_project(folder(tmp_path)), None, text)
    assert f"[{code}]" in caught.value.rule, caught.value.rule


def test_no_literal_enters_an_error(tmp_path: Path) -> None:
    project = load_project(folder(tmp_path))
    for code, options, items in REFUSED:
        text = dp(items.replace("FROM visits", "FROM visits /* Quitte */"), options)
        text = text.replace("GROUP BY", "GROUP BY", 1)
        with pytest.raises(DpstreamError) as caught:
            stream_job(project, None, text)
        assert "Quitte" not in str(caught.value), code


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
