"""Statements become plans: grids by the stated rule, shared trees, digests, charges.

Stage 1 on real DuckDB tables equals a plain Python account of the rows.
"""

import collections
import contextlib
import decimal
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.pipelines.sql import query_plan
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import (
    Grid,
    canonical,
    question_of,
    stage_one,
)
from dpstream.pipelines.statements.functions import Options
from dpstream.pipelines.statements.statement import Statement, statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from tests.lanes import few_first
from tests.pipelines.sql.asking import COUNTED, data_set, dp, visits
from tests.pipelines.sql.shop import Rows, answers, database, shop, stage_text, ugly_rows
from tests.structs import changed, leaves


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return load_catalog(data_set(tmp_path))


def _column(catalog: Catalog, item: str, options: str | None = None) -> QueryColumn:
    text = dp(f"page, {item} AS x")
    text = text if options is None else text.replace("epsilon = 2", options)
    [column] = question_of(text, catalog).plan.columns
    return column


@pytest.mark.parametrize("declared", [True, False])
def test_a_missing_number_in_parquet_changes_no_plan(tmp_path: Path, declared: bool) -> None:
    """Of pandas it makes DOUBLE of INT64: only types in the project file decide about steps."""
    bounds = "contribution_bounds_per_row => (0, 9)"
    items = ["SUM(n)", "AVG(n)", *(f"{f}(n, {bounds})" for f in ("SUM", "AVG", "MEDIAN", "VAR"))]
    project, rows = data_set(tmp_path), visits()
    if declared:
        columns = 'columns = { uid = "INT64", page = "STRING", n = "INT64" }\n[table.pages]'
        project.write_text(project.read_text().replace("[table.pages]", columns))
    plans = []
    for n in (pa.int64(), pa.float64()):
        table = rows.set_column(3, "n", rows["n"].cast(n))
        pq.write_table(table, tmp_path / "visits.parquet")
        plans.append([_column(load_catalog(project), item) for item in items])
    assert plans[0] == plans[1] and (plans[0][2].grid == 1) is declared


def test_quantiles_of_one_argument_share_a_tree(catalog: Catalog) -> None:
    bounds = "contribution_bounds_per_row => (0, 100)"
    items = (
        f"page, MEDIAN(seconds, {bounds}) AS a, MAX(seconds, {bounds}) AS b, "
        f"APPROX_QUANTILES(seconds, 2, {bounds}) AS c, MEDIAN(n, {bounds}) AS d"
    )
    question = question_of(dp(items), catalog)
    at = {column.name: column.at for column in question.plan.columns}
    outputs = {label: question.outputs[question.names[label]] for label in "abcd"}
    assert len(at) == 2 and len({outputs[label].column for label in "abc"}) == 1
    assert {label: (at[o.column], o.places) for label, o in outputs.items()} == {
        "a": ((0.0, 0.5, 1.0), (1,)), "b": ((0.0, 0.5, 1.0), (2,)),
        "c": ((0.0, 0.5, 1.0), (0, 1, 2)), "d": ((0.5,), (0,)),
    }  # fmt: skip


def test_digests_are_of_the_meaning(catalog: Catalog) -> None:
    one = dp(f"page, {COUNTED} AS n")
    alike = [one.lower(), one + " -- note", one.replace(" ", "\n"), one.replace("page", "`page`"),
             one + " LIMIT 1", one.replace("AS n", "AS m")]  # fmt: skip
    assert {question_of(text, catalog).digest for text in alike} == {
        question_of(one, catalog).digest
    }
    others = [
        one.replace("epsilon = 2", "epsilon = 3"), one.replace("30", "31"),
        one.replace("GROUP", "WHERE n = 1 GROUP"), one.replace("GROUP", "WHERE n = 2 GROUP"),
    ]  # fmt: skip
    digests = {question_of(text, catalog).digest for text in [one, *others]}
    assert len(digests) == 5


@pytest.mark.parametrize("norm", ["1e60", "1e-60", None])
@pytest.mark.parametrize("bound", ["1e60", "1e-60"])
@pytest.mark.parametrize("name", ["SUM", "AVG", "STDDEV", "MEDIAN"])
def test_the_widest_and_narrowest_bounds_end_in_a_plan_or_a_coded_error(
    name: str, bound: str, norm: str | None, catalog: Catalog
) -> None:
    per = "group" if name == "SUM" else "row"
    options = "epsilon = 1, delta = 1e-5, " + (
        "max_groups_contributed = 3" if norm is None else f"contribution_norm = {norm}"
    )
    for low in ("0", f"-{bound}"):
        item = f"{name}(seconds, contribution_bounds_per_{per} => ({low}, {bound})) AS x"
        with contextlib.suppress(DpstreamError):
            question_of(dp(f"page, {item}", options=options), catalog)
    with contextlib.suppress(DpstreamError):
        question_of(dp("page, COUNT(DISTINCT uid) AS u", options=options), catalog)


def test_the_limits_of_options_are_those_that_are_told(catalog: Catalog) -> None:
    """Nothing that the rules allow is refused by the plan."""
    items = "page, APPROX_QUANTILES(seconds, 999, contribution_bounds_per_row => (0, 9)) AS q"
    question_of(dp(items), catalog)
    most = "epsilon = 900, delta = 1e-5, max_groups_contributed = 4096"
    question_of(dp("page, COUNT(DISTINCT uid) AS u", options=most), catalog)
    many = f"{most}, min_privacy_units_per_group = 4194304"
    question_of(dp("page, COUNT(DISTINCT uid) AS u", options=many), catalog)


OPTIONS = Options(2.0, 1e-6, 3, 4, "user_id", 1.5, "geometric", "public_groups", 5, "answer")


def test_the_canonical_form_of_a_statement_has_frozen_names(catalog: Catalog) -> None:
    """Digests of questions are computed from this text: a renamed field keeps its name here."""
    statement = question_of(dp("page, COUNT(*) AS n"), catalog).select
    options = json.loads(canonical(msgspec.structs.replace(statement, options=OPTIONS)))[0]
    assert options == {
        "epsilon": 2.0, "delta": 1e-6, "groups": 3, "rows": 4, "norm": 1.5,
        "mechanism": "geometric", "selection": "public_groups", "min_units": 5,
        "optimise": "answer",
    }  # fmt: skip


@pytest.mark.parametrize("path", leaves(OPTIONS), ids=lambda path: ".".join(map(str, path)))
def test_every_option_is_in_the_canonical_form(path: tuple[object, ...], catalog: Catalog) -> None:
    """But for the unit's column, which is checked and decides nothing, and the interval that
    determined epsilon."""
    select = question_of(dp("page, COUNT(*) AS n"), catalog).select
    one = msgspec.structs.replace(select, options=OPTIONS)
    other = msgspec.structs.replace(one, options=changed(OPTIONS, path))
    assert (canonical(one) == canonical(other)) == (path in (("unit_column",), ("within",)))


_CATALOG = shop()
_DP = ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
       "max_groups_contributed = 4, max_rows_contributed = 2) ")  # fmt: skip
_STEP, _LOW, _HIGH = 0.25, -20, 40
_PARTIALS = {"count": ["value"], "sum": ["value"], "mean": ["value", "count"], "units": [],
             "var": ["rows"], "stddev": ["rows"], "quantiles": ["rows"]}  # fmt: skip


def _statement(items: str, rest: str) -> Statement:
    return statement_of(f"{_DP} {items} {rest}", _CATALOG)


def _ran(statement: Statement, rows: Rows) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Partials by (unit, groups)."""
    cursor = database(_CATALOG, rows).execute(stage_text(statement, _CATALOG))
    names = [part[0] for part in cursor.description or ()]
    assert names[0] == "unit" and names[1:] == [
        *(f"group_{i}" for i in range(len(statement.groups))),
        *(f"{part}_{i}" for i, f in enumerate(statement.functions) for part in _PARTIALS[f.kind]),
    ]
    keys = 1 + len(statement.groups)
    partials = {row[:keys]: dict(zip(names[keys:], row[keys:], strict=True))
             for row in cursor.fetchall()}  # fmt: skip
    assert partials
    return partials


def _steps(value: Any, low: int = -(1 << 62), high: int = 1 << 62) -> int | None:
    """Grid steps of a value, halves away from 0; None of what is left out."""
    if value is None or not math.isfinite(value):
        return None
    exact = float(value) / _STEP
    if math.isinf(exact):
        return high if exact > 0 else low
    sign = -1 if exact < 0 else 1
    return max(low, min(high, sign * math.floor(abs(Fraction(exact)) + Fraction(1, 2))))


def _clamped(value: int, low: int = _LOW, high: int = _HIGH) -> int:
    return max(low, min(high, value))


def _mean(steps: list[int], most: int) -> tuple[int, int]:
    middle, n = (_LOW + _HIGH) // 2, len(steps)
    total = sum(step - middle for step in steps)
    if n > most:
        total = abs(total) * most // n * (1 if total >= 0 else -1)
    counted = min(n, most)
    return _clamped(total, counted * (_LOW - middle), counted * (_HIGH - middle)), counted


@pytest.mark.parametrize("seed", few_first(range(5)))
def test_partials_are_those_of_the_rows(seed: int) -> None:
    rows = ugly_rows(seed, 300)
    statement = _statement(
        "page, COUNT(*) AS n, COUNT(seconds) AS m, SUM(seconds) AS s, "
        "SUM(seconds, contribution_bounds_per_row => (-5, 10)) AS sr, AVG(seconds) AS a, "
        "AVG(seconds, contribution_bounds_per_row => (-5, 10)) AS ar, MEDIAN(seconds) AS q, "
        "STDDEV(seconds) AS d, COUNT(DISTINCT uid) AS u",
        "FROM visits GROUP BY page",
    )
    partials = _ran(statement, rows)
    expected: dict[tuple[Any, ...], list[Any]] = collections.defaultdict(list)
    for uid, page, seconds, *_ in rows["visits"]:
        if uid is not None:
            expected[uid, page].append(seconds)
    assert partials.keys() == expected.keys()
    for key, values in expected.items():
        steps = [step for v in values if (step := _steps(v)) is not None]
        bounded = [step for v in values if (step := _steps(v, _LOW, _HIGH)) is not None]
        mean, mean_rows = _mean(steps, 1), _mean(bounded, 2)
        assert partials[key] == {
            "value_0": min(5, len(values)),
            "value_1": min(5, sum(v is not None for v in values)) or None,
            "value_2": _clamped(sum(steps)) if steps else None,
            "value_3": _clamped(sum(bounded), 2 * _LOW, 2 * _HIGH) if steps else None,
            "value_4": mean[0], "count_4": mean[1],
            "value_5": mean_rows[0], "count_5": mean_rows[1],
            "rows_6": sorted(bounded), "rows_7": sorted(bounded),
        }  # fmt: skip


def test_units_come_by_foreign_keys() -> None:
    rows = ugly_rows(3)
    statement = _statement("product, SUM(qty) AS s, COUNT(*) AS n", "FROM items GROUP BY product")
    users = {u[0] for u in rows["users"]} - {None}
    owner = {o[0]: o[1] for o in rows["orders"] if o[1] in users}
    expected = collections.Counter(
        (owner[i[0]], i[2]) for i in rows["items"] if i[0] in owner
    )  # fmt: skip
    partials = _ran(statement, rows)
    assert {key: min(5, n) for key, n in expected.items()} == {
        key: row["value_1"] for key, row in partials.items()
    }


def test_a_float_sum_per_unit_is_that_of_sorted_values() -> None:
    rows = ugly_rows(4)
    statement = _statement(
        "COUNT(*) AS n, SUM(s) AS t",
        "FROM (SELECT uid, SUM(seconds) AS s, AVG(n) AS a FROM visits GROUP BY uid "
        "HAVING MAX(n) > 1) AS r",
    )
    turned = rows | {"visits": rows["visits"][::-1]}
    text = stage_text(statement, _CATALOG)
    assert answers(database(_CATALOG, rows), text) == answers(database(_CATALOG, turned), text)
    expected = {uid for uid in {v[0] for v in rows["visits"]} - {None}
            if max((v[7] for v in rows["visits"] if v[0] == uid and v[7] is not None),
                   default=0) > 1}  # fmt: skip
    assert {key[0] for key in _ran(statement, rows)} == expected


@pytest.mark.parametrize("expression", [
    "1 / 0", "n / (n - n)", "MOD(n, 0)", "DIV(n, 0)", "n * 9223372036854775807", "-n * n * n * n",
    "CAST(page AS INT64)", "CAST(page AS FLOAT64)", "CAST(seconds AS INT64)", "SQRT(seconds)",
    "LN(seconds)", "EXP(seconds)", "POW(seconds, 1000)", "seconds * 1e308", "1e308 * n * 10",
    "CAST(CAST(page AS DATE) AS STRING) = page", "DATE_ADD(day, INTERVAL 99999999 MONTH) > day",
    "SUBSTR(page, -9223372036854775807, 9)", "LEFT(page, -5)", "CAST('x' AS INT64)",
    "SAFE_DIVIDE(n, 0)", "CAST(cost * 1e30 AS NUMERIC)", "REGEXP_CONTAINS(page, CONCAT('(', page))",
    "ROUND(seconds, 400)", "EXTRACT(YEAR FROM CAST(page AS TIMESTAMP))", "CAST(flag AS INT64) / 0",
    "ABS(-9223372036854775807 - n)", "CAST(page AS BOOL)", "LOG(seconds, 0)", "n & page",
])  # fmt: skip
@pytest.mark.parametrize("form", [
    "COUNT({e}) AS k FROM visits",
    "COUNT(*) AS k FROM visits WHERE {e} = {e}",
    "COUNT(*) AS k FROM visits AS v JOIN pages AS p ON v.page = p.page AND {e} IS NOT NULL",
    "COUNT(x) AS k FROM (SELECT uid, MAX({e}) AS x FROM visits GROUP BY uid, page) AS s",
    "CAST({e} AS STRING) AS g, COUNT(*) AS k FROM visits GROUP BY g",
    "COUNT(*) AS k FROM (SELECT uid, n FROM visits ORDER BY {e}) AS s",
    "COUNT(x) AS k FROM (SELECT uid, {e} AS x FROM visits UNION ALL "
    "SELECT uid, {e} AS x FROM visits ORDER BY 2) AS s",
])  # fmt: skip
def test_data_never_raises(expression: str, form: str) -> None:
    if "pages" in form:
        for name in ("page", "n", "seconds", "day", "cost", "flag"):
            expression = _word(expression, name)
    if "GROUP BY g" in form:
        expression = f"({expression}) IS NULL AND n = 1"  # a constant is no group
    statement = _statement(form.format(e=f"({expression})"), "")
    try:
        answers(database(_CATALOG, ugly_rows(1)), stage_text(statement, _CATALOG))
    except duckdb.BinderException:
        assert "n & page" in expression.replace("v.", "")  # types, which no row decides


def test_a_pattern_that_is_none_fails_without_rows_too() -> None:
    statement = _statement("COUNT(*) AS k", "FROM visits WHERE REGEXP_CONTAINS(page, '(')")
    empty: Rows = {name: [] for name in _CATALOG.tables}
    with pytest.raises(duckdb.Error):
        answers(database(_CATALOG, empty), stage_text(statement, _CATALOG))


def _word(text: str, name: str) -> str:
    return re.sub(rf"(?<!['\w.]){name}(?!\w)", f"v.{name}", text)


def test_groups_keep_their_types_and_null_is_one_group() -> None:
    rows = ugly_rows(2)
    statement = _statement(
        "day, cost, at, TIMESTAMP_TRUNC(at, DAY) AS d, COUNT(*) AS n",
        "FROM visits GROUP BY day, cost, at, d",
    )
    keys = {key[1:] for key in _ran(statement, rows)}
    kinds = [{type(key[i]).__name__ for key in keys} for i in range(4)]
    assert kinds[:2] == [{"date", "NoneType"}, {"Decimal", "NoneType"}]
    assert kinds[2] == kinds[3] == {"datetime", "NoneType"}
    assert decimal.Decimal("1.25") in {key[1] for key in keys}


def test_public_groups_join_their_rows() -> None:
    statement = statement_of(
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
        "max_groups_contributed = 3, group_selection_strategy = PUBLIC_GROUPS) p.dept, "
        "COUNT(*) AS k FROM users AS u RIGHT JOIN (SELECT DISTINCT dept FROM depts) AS p "
        "ON u.dept = p.dept GROUP BY p.dept",
        _CATALOG,
    )
    rows = ugly_rows(1)
    groups = {row[0] for row in database(_CATALOG, rows).execute(
        statement.public.sql("duckdb")).fetchall()}  # type: ignore[union-attr]  # fmt: skip
    assert groups == {row[0] for row in rows["depts"]}
    assert {key[1] for key in _ran(statement, rows)} <= groups


def test_outer_works_on_released_columns() -> None:
    statement = _statement(
        "dept AS d, SUM(age) / COUNT(*) AS r",
        "FROM users GROUP BY dept HAVING COUNT(*) > 1 ORDER BY r DESC LIMIT 2",
    )
    connection = database(_CATALOG, ugly_rows(1))
    names = [f.name for f in statement.functions]
    columns_of = ", ".join(f'"{name}" DOUBLE' for name in names)
    connection.execute(f"CREATE TABLE released (d VARCHAR, {columns_of})")
    values = "('a', 8, 2), ('b', 1, 1), ('c', 9, 3), (NULL, 8, 4)"
    connection.execute(f"INSERT INTO released VALUES {values}")
    rows = connection.execute(statement.outer.sql("duckdb")).fetchall()
    assert rows == [("a", 4.0), ("c", 3.0)]


def test_the_middle_is_a_whole_step() -> None:
    assert Grid(0.5, -3, 4).middle == 0
    statement = _statement("COUNT(*) AS n", "FROM users")
    with pytest.raises(KeyError):
        stage_one(statement, _CATALOG, {})


_MULTIPLIED = _statement(
    "MEDIAN(v.n * p.uid, contribution_bounds_per_row => (0, 90)) AS m, "
    "VAR(v.n, contribution_bounds_per_row => (0, 9)) AS w, p.title",
    "FROM visits AS v JOIN pages AS p ON v.uid < p.uid + 7 GROUP BY p.title",
)


def _multiplied(units: range, many: int = 40) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Visits of some units meet many rows of a public table."""
    rows: Rows = {name: [] for name in _CATALOG.tables}
    rows["visits"] = [
        (u, "p", 1.0, None, None, None, None, (u * 7 + i) % 23) for u in units for i in range(5)
    ]
    rows["pages"] = [(f"p{i}", f"t{i % 2}", 1.0, i) for i in range(many)]
    return _ran(_MULTIPLIED, rows)


def test_of_rows_that_a_join_multiplies_a_unit_s_own_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By that unit's rows alone, some whole values, other ones for other units."""
    partials = _multiplied(range(6))
    assert max(len(of["rows_0"]) for of in partials.values()) == 100
    monkeypatch.setattr(query_plan, "MAX_ROWS", 30)
    few = _multiplied(range(6))
    chosen = set()
    for key, of in partials.items():
        for name in ("rows_0", "rows_1"):
            chosen_rows = collections.Counter(few[key][name])
            assert sum(chosen_rows.values()) == min(30, len(of[name]))
            assert not chosen_rows - collections.Counter(of[name])
        chosen.add(tuple(collections.Counter(few[key]["rows_1"])))
    assert len(chosen) > 4
    alone = _multiplied(range(2, 4))
    assert alone == {key: of for key, of in few.items() if key[0] in (2, 3)}


@pytest.mark.slow
def test_joins_that_multiply_rows_do_not_fill_the_memory(tmp_path: Path) -> None:
    """30 million values of one unit, of which a list would need 240 MB."""
    size = 3_000
    columns = {"uid": [1] * size, "page": ["a"] * size, "seconds": [i / 8 for i in range(size)]}
    path = data_set(tmp_path, pa.table({**columns, "n": [1] * size}))
    (tmp_path / "pages.csv").write_text("page,title\n" + "a,x\n" * 10_000)
    catalog = load_catalog(path)
    text = dp("MEDIAN(seconds, contribution_bounds_per_row => (0, 400)) AS m",
              "FROM visits AS v JOIN pages AS p ON v.page = p.page")  # fmt: skip
    question = question_of(text.replace(", max_groups_contributed = 12", ""), catalog)
    query = stage_one(question.per_column, catalog, grids_of(question.gridded.sketched()))
    with Engine(catalog, ["visits", "pages"], memory="200MB", threads=2) as engine:
        [row] = engine.run(query).to_pylist()
    assert len(row["rows_0"]) == query_plan.MAX_ROWS and len(set(row["rows_0"])) >= 6


@pytest.mark.parametrize(("low", "high"), [(-40, -20), (20, 40)])
@pytest.mark.parametrize("per", ["row", "group"])
def test_a_unit_without_a_usable_row_has_no_partial(low: int, high: int, per: str) -> None:
    statement = _statement(f"SUM(seconds, contribution_bounds_per_{per} => (-5, 10)) AS s",
                           "FROM visits")  # fmt: skip
    query = stage_one(statement, _CATALOG, {"s": (_STEP, low, high)}).sql("duckdb")
    rows = ugly_rows(0)
    first, nobody = rows["visits"][0], 10**6
    for seconds in (None, math.nan):
        rows["visits"].append((nobody, first[1], seconds, *first[3:]))
    partials = dict(database(_CATALOG, rows).execute(query).fetchall())
    assert partials.pop(nobody) is None
    least, most = (min(low, 0) * 2, max(high, 0) * 2) if per == "row" else (low, high)
    values = [value for value in partials.values() if value is not None]
    assert values and all(least <= value <= most for value in values)
