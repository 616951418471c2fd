"""Statements: both spellings, private part and outer query, and the canonical form.

The canonical form is the same relation, groups and functions by other names, and is what is
executed; ``tests/pipelines/sql/test_receipt.py`` tests that it has nothing of a presentation.
"""

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
import sqlglot
from pyarrow import csv as pacsv
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.stream import stream_job
from dpstream.pipelines.statements.canonical import canonical_form, function_text, group_text
from dpstream.pipelines.statements.dialect import (
    Clamped,
    DpSql,
    PrivacyOptions,
    Private,
    WithReport,
)
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.functions import DEFAULT_ROWS, Options
from dpstream.pipelines.statements.statement import (
    PrivateSelect,
    Statement,
    public_side,
    statement_of,
)
from tests import projects
from tests.pipelines.sql.pairs import AROUND, PAIRS, RELATIONS
from tests.pipelines.sql.queries import generated
from tests.pipelines.sql.shop import database, shop, stage_text, ugly_rows
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


def test_parts_are_nodes_of_their_own() -> None:
    tree = sqlglot.parse_one(
        "SELECT WITH ANONYMIZATION OPTIONS(epsilon = 1) ANON_SUM(x CLAMPED BETWEEN 0 AND 1), "
        "SUM(y), ANON_AVG(z WITH REPORT) FROM t",
        dialect=DpSql,
    )
    assert tree.args["hint"].name == "ANONYMIZATION"
    assert len(list(tree.find_all(PrivacyOptions))) == 1
    assert [p.name for p in tree.find_all(Private)] == ["ANON_SUM", "ANON_AVG"]
    assert len(list(tree.find_all(Clamped))) == len(list(tree.find_all(WithReport))) == 1


@pytest.mark.parametrize("text", [
    "SELECT WITH SOMETHING OPTIONS(epsilon = 1) x FROM t",
    "SELECT WITH ANONYMIZATION OPTIONS(epsilon) x FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0) FROM t",
    "SELECT ANON_SUM(x CLAMPED BETWEEN 0 OR 1) FROM t",
])  # fmt: skip
def test_broken_forms_are_syntax_errors(text: str) -> None:
    with pytest.raises(sqlglot.ParseError):
        sqlglot.parse_one(text, dialect=DpSql)


PUBLIC = "(SELECT DISTINCT page FROM pages) AS p"


def core(joined: str) -> exp.Select:
    tree = parse_one(f"SELECT p.page, COUNT(*) AS n FROM {joined} GROUP BY p.page")
    assert isinstance(tree, exp.Select)
    return tree


@pytest.mark.parametrize(
    "joined",
    [f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.path = p.page",
     f"{PUBLIC} LEFT OUTER JOIN visits AS v ON p.page = v.page"],
)  # fmt: skip
def test_the_outer_join_is_found_and_made_inner(joined: str) -> None:
    tree = core(joined)
    side = public_side(tree)
    assert side.alias == "p" and side.this.sql() == "SELECT DISTINCT page FROM pages"
    [join] = tree.args["joins"]
    assert join.side == "" and join.kind == ""


def test_a_filter_of_groups_belongs_into_their_query() -> None:
    joined = f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page WHERE "
    assert public_side(core(f"{joined} v.n > 3 AND v.page <> 'p1'")).alias == "p"
    for where in ("p.page <> 'p1'", "v.n > 3 OR UPPER(p.page) IS NULL"):
        with pytest.raises(DpstreamError) as refused:
            public_side(core(joined + where))
        assert RULES["public-filter"].text in str(refused.value)
        assert "p1" not in str(refused.value)


@pytest.mark.parametrize(
    "joined",
    ["visits AS p", f"visits AS v JOIN {PUBLIC} ON v.page = p.page",
     f"visits AS v LEFT JOIN {PUBLIC} ON v.page = p.page",
     "visits AS v RIGHT JOIN (SELECT page FROM pages) AS p ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page AND v.n > 3",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = v.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.title",
     "visits AS v RIGHT JOIN (SELECT DISTINCT page, title FROM pages) AS p ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON TRUE"],
)  # fmt: skip
def test_any_other_form_is_refused(joined: str) -> None:
    with pytest.raises(DpstreamError, match=r"(?i)public"):
        public_side(core(joined))


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
