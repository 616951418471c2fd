"""What a statement means: options, groups, functions, source and what is done afterwards."""

from pathlib import Path
from typing import Any

import pytest
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.statements.options import DEFAULT_ROWS, Options
from dpstream.pipelines.statements.statement import Statement, statement_of
from tests import projects
from tests.pipelines.sql.shop import shop

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
