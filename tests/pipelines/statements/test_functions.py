"""Private functions: which plain aggregates have a form, and what arguments are refused."""

import pytest
from sqlglot import parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.functions import PLAIN, private_form
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
