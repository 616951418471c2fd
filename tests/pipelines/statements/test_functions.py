"""What a private SELECT asks: functions with a form and their arguments; options and literals."""

import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.statements.allowed import parsed
from dpstream.pipelines.statements.dialect import PrivacyOptions
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.functions import (
    PLAIN,
    Options,
    integer_literal,
    number,
    options_of,
    pair,
    private_form,
)
from dpstream.pipelines.statements.statement import statement_of
from tests.pipelines.sql.shop import shop


@pytest.mark.parametrize("name", sorted(PLAIN.values()))
def test_plain_aggregates_have_a_private_form(name: str) -> None:
    form = private_form(parse_one(f"{name}(a)"))
    assert form.name == name and form.expressions[0].name == "a"
    assert private_form(form) is form


@pytest.mark.parametrize(
    ("call", "code"),
    [("LOGICAL_OR(flag)", "dp-aggregate"), ("SUM(COUNT(n))", "nested-aggregate"),
     ("COUNT(DISTINCT page)", "count-distinct"), ("SUM(*)", "arguments"),
     ("SUM(n, contribution_bounds_per_group => (5, 5))", "bounds"),
     ("COUNT(n, contribution_bounds_per_group => (0, 1.5))", "count-bounds"),
     ("COUNT(n, contribution_bounds_per_row => (0, 1))", "arguments"),
     ("COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 1))", "bounds"),
     ("PERCENTILE_CONT(n, 1.5)", "quantile"), ("APPROX_QUANTILES(n, 1000)", "quantile"),
     ("SUM(n, contribution_norm => 1e61)", "norm"), ("SUM(n, contribution_norm => 1e-61)", "norm"),
     ("SUM(n, contribution_norm => 0)", "norm"), ("SUM(page)", "numbers"),
     ("AVG(flag)", "numbers"), ("MEDIAN(CONCAT(page, 'x'))", "numbers")],
)  # fmt: skip
def test_what_no_private_function_takes(call: str, code: str) -> None:
    form = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)"
    with pytest.raises(DpstreamError) as error:
        statement_of(f"{form} {call} AS x FROM visits", shop())
    assert RULES[code].text in str(error.value)


def tree(text: str) -> exp.Expression:
    return parse_one(text, dialect="bigquery")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-2.5", -2.5), ("- - 3", 3.0), ("1e3", 1000.0), ("1e999", None), ("'1'", None),
     ("1 + 1", None), ("x", None), ("-x", None), ("NULL", None)],
)  # fmt: skip
def test_a_number_is_a_literal(text: str, value: float | None) -> None:
    assert number(tree(text)) == value
    assert number(None) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("10", 10), ("2", None), ("11", None), ("3.0", None), ("-3", None), ("'3'", None)],
)
def test_a_whole_number_lies_in_its_range(text: str, value: int | None) -> None:
    assert integer_literal(tree(text), 3, 10) == value
    assert integer_literal(exp.Literal.number("٣"), 3, 10) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("(0, 5)", (0.0, 5.0)), ("(-1.5, 1)", (-1.5, 1.0)), ("(5, 5)", None), ("(5, 0)", None),
     ("(1, 2, 3)", None), ("(0, 1e60)", (0.0, 1e60)), ("(0, 1.1e60)", None), ("(-1e-61, 0)", None),
     ("(0, 5e-324)", None), ("(-1e-60, 0)", (-1e-60, 0.0)), ("(-1e308, 1e308)", None),
     ("(x, 1)", None), ("(1)", None)],
)  # fmt: skip
def test_a_pair_is_ordered(text: str, value: tuple[float, float] | None) -> None:
    assert pair(tree(text)) == value


def options(text: str, grouped: bool = False, normed: bool = False) -> Options:
    tree = parsed(f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({text}) COUNT(*) AS n FROM t")
    [node] = tree.find_all(PrivacyOptions)
    return options_of(node, grouped, normed)


BASE = "epsilon = 1, delta = 1e-9"


@pytest.mark.parametrize(
    ("text", "code"),
    [("delta = 1e-9", "epsilon"), ("epsilon = 0, delta = 1e-9", "epsilon"),
     ("epsilon = 1001, delta = 1e-9", "epsilon"),
     ("epsilon = 1, mechanism = gaussian", "delta"),
     ("epsilon = 1, delta = 0, mechanism = gaussian", "delta"),
     (f"{BASE}, optimise = best", "optimise"),
     ("epsilon = 1, delta = 1", "delta"), (f"{BASE}, nothing = 1", "option-unknown"),
     (f"{BASE}, epsilon = 2", "option-twice"), (f"{BASE}, mechanism = snapping", "mechanism"),
     (f"{BASE}, max_rows_contributed = 0", "max-rows"), (f"{BASE}, contribution_norm = 0", "norm"),
     (f"{BASE}, min_privacy_units_per_group = 0", "min-units"),
     (f"{BASE}, min_privacy_units_per_group = 4194305", "min-units"),
     (f"{BASE}, contribution_norm = 1e300", "norm"),
     (f"{BASE}, contribution_norm = 1e-300", "norm"),
     (f"{BASE}, max_groups_contributed = 4097", "max-groups"),
     (f"{BASE}, group_selection_strategy = PUBLIC_GROUPS", "public-groups"),
     (f"{BASE}, group_selection_strategy = best", "selection")],
)  # fmt: skip
def test_out_of_range(text: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        options(text)
    assert RULES[code].text in str(error.value)


def test_groups_are_asked_for_where_there_are_some() -> None:
    assert options(BASE).groups == 1
    with pytest.raises(DpstreamError) as error:
        options(BASE, grouped=True)
    assert RULES["max-groups"].text in str(error.value)
    assert options(BASE, grouped=True, normed=True).groups == MAX_GROUPS
    assert options(f"{BASE}, max_groups_contributed = 9", grouped=True).groups == 9
    with pytest.raises(DpstreamError) as error:
        options(f"{BASE}, max_groups_contributed = {MAX_GROUPS + 1}", True, True)
    assert RULES["max-groups"].text in str(error.value)


def test_delta_is_not_needed_where_nothing_is_selected() -> None:
    for more in ("", ", mechanism = geometric", ", delta = 0", ", mechanism = auto"):
        pure = f"epsilon = 1, max_groups_contributed = 2{more}"
        assert options(pure).delta == 0.0
        public = f"{pure}, group_selection_strategy = public_groups"
        assert options(public, grouped=True).selection == "public_groups"
        with pytest.raises(DpstreamError):
            options(pure, grouped=True)


@pytest.mark.parametrize("word", ["limit", "answer", "LIMIT"])
def test_what_the_choice_of_noise_goes_by(word: str) -> None:
    assert options(BASE).optimise == "limit"
    assert options(f"{BASE}, optimise = {word}").optimise == word.lower()
