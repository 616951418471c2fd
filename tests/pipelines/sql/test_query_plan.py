"""Statements become plans: grids by the stated rule, shared trees, digests, charges."""

import contextlib
import json
import math
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import Question, canonical, named_tables, question_of
from dpstream.pipelines.statements.options import Options
from dpstream.pipelines.tables.catalog import Catalog
from tests.pipelines.sql.asking import COUNTED, data_set, dp
from tests.structs import changed, leaves


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return load_catalog(data_set(tmp_path))


def _column(catalog: Catalog, item: str, options: str | None = None) -> QueryColumn:
    text = dp(f"page, {item} AS x")
    text = text if options is None else text.replace("epsilon = 2", options)
    [column] = question_of(text, catalog).plan.columns
    return column


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 100), (-3, 7), (0.25, 0.3), (1e6, 2e6)])
@pytest.mark.parametrize("name", ["SUM", "AVG", "STDDEV", "MEDIAN"])
def test_a_grid_is_the_largest_step_with_enough_of_them(
    name: str, low: float, high: float, catalog: Catalog
) -> None:
    per = "group" if name == "SUM" else "row"
    column = _column(catalog, f"{name}(seconds, contribution_bounds_per_{per} => ({low}, {high}))")
    bits = 24 if name in ("SUM", "AVG") else 16
    most = high - low if bits == 16 else max(abs(low), abs(high), high - low)
    assert 2 ** (bits - 1) < most / column.grid <= 2**bits
    assert math.frexp(column.grid)[0] == 0.5
    lo, hi = column.grid_bounds()
    assert lo * column.grid >= low and hi * column.grid <= high


def test_whole_numbers_and_counts_have_whole_steps(catalog: Catalog) -> None:
    bounds = "contribution_bounds_per_group => (0, 9)"
    assert _column(catalog, f"SUM(n, {bounds})").grid == 1
    assert _column(catalog, f"AVG(n, {bounds})").grid < 1  # a unit's own mean is no whole number
    assert _column(catalog, "COUNT(*)").grid == 1


def test_tiny_budgets_have_coarser_grids(catalog: Catalog) -> None:
    item = "SUM(seconds, contribution_bounds_per_group => (0, 1))"
    fine, coarse = (_column(catalog, item, f"epsilon = {e}") for e in ("1", "0.0001"))
    assert coarse.grid == fine.grid * 16


def test_quantiles_of_one_argument_share_a_tree(catalog: Catalog) -> None:
    bounds = "contribution_bounds_per_row => (0, 100)"
    items = (
        f"page, MEDIAN(seconds, {bounds}) AS a, MAX(seconds, {bounds}) AS b, "
        f"APPROX_QUANTILES(seconds, 2, {bounds}) AS c, MEDIAN(n, {bounds}) AS d"
    )
    question = question_of(dp(items), catalog)
    assert [(c.name, c.at) for c in question.plan.columns] == [
        ("a", (0.5, 1.0, 0.0)),
        ("d", (0.5,)),
    ]
    assert {k: tuple(v) for k, v in question.outputs.items()} == {
        "a": ("a", (0,)), "b": ("a", (1,)), "c": ("a", (2, 0, 1)), "d": ("d", (0,)),
    }  # fmt: skip


def _question(catalog: Catalog, text: str) -> Question:
    return question_of(text, catalog)


def test_digests_are_of_the_meaning(catalog: Catalog) -> None:
    one = dp(f"page, {COUNTED} AS n")
    alike = [one.lower(), one + " -- note", one.replace(" ", "\n"), one.replace("page", "`page`")]
    assert {_question(catalog, text).digest for text in alike} == {_question(catalog, one).digest}
    others = [
        one.replace("epsilon = 2", "epsilon = 3"), one.replace("30", "31"), one + " LIMIT 1",
        one.replace("GROUP", "WHERE n = 1 GROUP"), one.replace("AS n", "AS m"),
        one.replace("WHERE n = 1", "WHERE n = 2"),
    ][:5]  # fmt: skip
    digests = {_question(catalog, text).digest for text in [one, *others]}
    assert len(digests) == 6


def test_charge_and_tables(catalog: Catalog) -> None:
    question = _question(catalog, dp(f"page, {COUNTED} AS n"))
    charge, budget = question.charge(catalog, "ab"), question.budget(question.plan)
    assert (charge.mu, charge.threshold_delta) == (budget.mu, budget.threshold_delta)
    assert grids_of(question.plan) == {"n": (1.0, 0, 30)}
    assert named_tables([question.statement.source], catalog) == {"visits"}


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
    statement = question_of(dp("page, COUNT(*) AS n"), catalog).statement
    options = json.loads(canonical(msgspec.structs.replace(statement, options=OPTIONS)))[0]
    assert options == {
        "epsilon": 2.0, "delta": 1e-6, "groups": 3, "rows": 4, "unit_column": "user_id",
        "norm": 1.5, "mechanism": "geometric", "selection": "public_groups", "min_units": 5,
        "optimise": "answer",
    }  # fmt: skip


@pytest.mark.parametrize("path", leaves(OPTIONS), ids=lambda path: ".".join(map(str, path)))
def test_every_option_is_in_the_canonical_form(path: tuple[object, ...], catalog: Catalog) -> None:
    statement = question_of(dp("page, COUNT(*) AS n"), catalog).statement
    one = msgspec.structs.replace(statement, options=OPTIONS)
    assert canonical(one) != canonical(msgspec.structs.replace(one, options=changed(OPTIONS, path)))
