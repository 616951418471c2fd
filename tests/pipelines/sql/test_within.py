"""A statement that states its error pays the least epsilon that reaches it."""

import dataclasses

import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.families import outlook
from dpstream.pipelines.sql.query_plan import Question, question_of
from tests.pipelines.sql.shop import shop

COUNTED = "COUNT(*, contribution_bounds_per_group => (0, 5))"
PEOPLE = "COUNT(DISTINCT uid)"


def _question(items: str, options: str, rest: str = "FROM visits") -> Question:
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items} {rest}"
    return question_of(text, shop())


def _widths(question: Question, option: int = 0) -> list[float]:
    columns = outlook(question.families.options[option]).columns
    return [column["parts"][0]["within"] for column in columns]


@pytest.mark.parametrize("within", [1.0, 7.5, 50.0, 3_000.0])
@pytest.mark.parametrize("mechanism", ["AUTO", "GAUSSIAN", "GEOMETRIC"])
@pytest.mark.parametrize("items", [PEOPLE, COUNTED, f"{PEOPLE} AS u, {COUNTED} AS n"])
@pytest.mark.parametrize("groups", [0, 3])
def test_the_least_epsilon_of_all_families(
    within: float, mechanism: str, items: str, groups: int
) -> None:
    """Every other epsilon of the list, in every family, is larger or has a wider interval."""
    rest = f"FROM visits {'GROUP BY page' if groups else ''}"
    page, more = ("page, ", f", max_groups_contributed = {groups}") if groups else ("", "")
    options = f"delta = 1e-9, mechanism = {mechanism}{more}"
    question = _question(page + items, f"within = {within}, {options}", rest)
    epsilon = question.plan.epsilon
    assert float(f"{epsilon:.3g}") == epsilon
    assert len(question.families.options) == 1
    assert max(_widths(question)) <= within
    given = _question(
        page + items,
        f"epsilon = {epsilon}, {options.replace(mechanism, question.plan.mechanism)}",
        rest,
    )
    assert given.digest == question.digest
    before = epsilon - 10.0 ** (len(f"{epsilon:.0f}") - 3) * (0.01 if epsilon < 1 else 1)
    lower = _question(page + items, f"epsilon = {min(before, epsilon * 0.989)}, {options}", rest)
    for number in range(len(lower.families.options)):
        assert max(_widths(lower, number)) > within


def test_a_sum_states_its_own_error() -> None:
    both = _question(
        f"SUM(seconds, contribution_bounds_per_group => (0, 120), within => 900) AS s, "
        f"{PEOPLE} AS u",
        "within = 40, delta = 1e-9",
    )
    widths = dict(zip([c.kind for c in both.plan.columns], _widths(both), strict=True))
    assert widths["sum"] <= 900 and widths["units"] <= 40
    assert widths["sum"] > 890 or widths["units"] > 38


def test_an_epsilon_that_all_statements_have_is_replaced() -> None:
    catalog = dataclasses.replace(shop(), defaults={"epsilon": 1.0, "delta": 1e-9})
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(within = 40) {PEOPLE} FROM visits"
    assert question_of(text, catalog).plan.epsilon < 0.2


def test_an_interval_that_no_epsilon_reaches_is_refused() -> None:
    items = "SUM(n, contribution_bounds_per_group => (0, 1e12), within => 1e-3)"
    with pytest.raises(DpstreamError) as refused:
        _question(items, "delta = 1e-9")
    assert getattr(refused.value, "code", None) == "within-reach"
