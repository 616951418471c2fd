"""Published and corrected figures, and each accounting against an exact one of another kind.

Published budgets of published margins, and the least budgets that keep them.

Figures of a plan: complete, margins those of the laws, and words that never promise too much.
"""

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, stats

from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    gaussian_losses,
    geometric_losses,
    mu_of_rho,
    renyi_epsilon,
    renyi_integral,
    renyi_sum,
    rounded_up,
    total,
    zcdp_epsilon,
    zcdp_epsilon_analytic,
)
from dpstream.accounting.tabulation.margins import margin, tail
from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Draws, LawName, Noise
from dpstream.accounting.tabulation.plan import (
    NO_GUARANTEE,
    SUPPRESSED,
    accountings,
    describe,
    least_budget,
    same_margins,
)
from dpstream.pipelines.render.census_plan import census_text
from tests.accounting.tabulation.examples import COUNTY, USA, households, persons, planned
from tests.oracle.published_margins import level_budget, published_epsilon, published_rho

MARGINS = (6, 6, 11, 11, 50, 50, 50)
TENTH = Fraction(1, 10)
PURE = [Spent(9, level_budget(published_epsilon(m), 9, 0.1), TENTH) for m in MARGINS]
ZCDP = [Spent(9, level_budget(published_rho(m), 9, 0.1), TENTH) for m in MARGINS]
TWICE = [each._replace(undivided=False) for each in PURE]


def near(figure: float) -> object:
    return pytest.approx(figure, abs=6e-4)


def test_table_2() -> None:
    assert float(total(PURE)) == near(15.314)
    assert zcdp_epsilon_analytic(total(ZCDP), DELTA) == near(12.791)
    assert zcdp_epsilon(total(ZCDP), DELTA) == near(12.163)
    assert renyi_epsilon(PURE, DELTA, integral=True) == near(13.574)
    assert renyi_epsilon(PURE, DELTA) == near(14.194)


def test_gaussian_dp_at_the_published_rho() -> None:
    assert mu_of_rho(total(ZCDP)) == pytest.approx(1.6775, abs=5e-5)
    assert gaussian_epsilon(total(ZCDP), DELTA) == near(11.666)


def test_gaussian_dp_at_the_least_rho() -> None:
    least = [level_budget(least_budget("rounded gauss", m), 9, 0.1) for m in MARGINS]
    assert gaussian_epsilon(sum(least, Fraction()), DELTA) == near(10.770)
    discrete = [level_budget(least_budget("discrete gauss", m), 9, 0.1) for m in MARGINS]
    assert zcdp_epsilon(sum(discrete, Fraction()), DELTA) == near(11.193)


@pytest.mark.parametrize(
    ("rho", "gaussian", "zcdp"), [("4.944", 24.402, 25.363), ("2.643", 16.790, 17.481)]
)
def test_production_rho(rho: str, gaussian: float, zcdp: float) -> None:
    assert gaussian_epsilon(Fraction(rho), DELTA) == near(gaussian)
    assert zcdp_epsilon(Fraction(rho), DELTA) == near(zcdp)


def geometric(epsilon: float, far: int) -> np.ndarray:
    """Chances of -far .. far."""
    values = np.arange(-far, far + 1)
    return np.asarray(np.tanh(epsilon / 2) * np.exp(-np.abs(values) * epsilon))


@pytest.mark.parametrize("epsilon", [0.05, 0.26, 1.0, 3.0])
def test_the_sum_is_the_divergence_and_the_integral_is_below_it(epsilon: float) -> None:
    mass = geometric(epsilon, math.ceil(60 / epsilon))
    orders = np.array([1.01, 1.5, 2.0, 4.0])
    p, q = mass[1:], mass[:-1]
    exact = [float(np.log(np.sum(p**a * q ** (1 - a))) / (a - 1)) for a in orders]
    assert renyi_sum(orders, epsilon) == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert (renyi_integral(orders, epsilon) < np.array(exact)).all()


def test_large_budgets_do_not_overflow() -> None:
    large = [Spent(1, Fraction(3000), TENTH)]
    assert renyi_epsilon(large, DELTA) == pytest.approx(3000)


def test_only_kinds_of_groups_that_exist_count() -> None:
    assert renyi_epsilon(TWICE, DELTA) < renyi_epsilon(PURE, DELTA)
    assert Spent(3, Fraction(3), Fraction(0), False).releases == [(Fraction(1),)]


def test_nothing_spent() -> None:
    assert renyi_epsilon([], DELTA) == 0.0
    assert gaussian_epsilon(Fraction(), DELTA) == 0.0


def test_sums_are_rounded_up_and_decimals_stay() -> None:
    assert rounded_up(Fraction("4.944")) == 4.944
    assert Fraction(repr(rounded_up(Fraction(1, 3)))) >= Fraction(1, 3)
    for n in range(1, 50):
        rho = Fraction(n, 7)
        assert 2 * rho <= Fraction(mu_of_rho(rho)) ** 2 <= 2 * rho * (1 + Fraction(1, 2**48))


ONCE = [each._replace(gamma=Fraction()) for each in PURE]


def exact_epsilon(parts: list[tuple[float, int]], delta: float) -> float:
    """Of some geometric releases, from every combination of their two-valued losses."""
    losses, chances = np.zeros(1), np.ones(1)
    for epsilon, times in parts:
        plus = np.arange(times + 1)
        chance = stats.binom.pmf(plus, times, 1 / (1 + math.exp(-epsilon)))
        losses = (losses[:, None] + epsilon * (2 * plus - times)).ravel()
        chances = (chances[:, None] * chance).ravel()

    def excess(at: float) -> float:
        over = losses > at
        return float((chances[over] * -np.expm1(at - losses[over])).sum()) - delta

    return float(optimize.brentq(excess, 0, losses.max(), xtol=1e-12))


def test_losses_themselves() -> None:
    """All groups measured once: every combination is enumerated; the grid is above, and near."""
    exact = exact_epsilon([(float(PURE[i].budget) / 9, n) for i, n in ((0, 18), (2, 18), (4, 27))],
                          DELTA)  # fmt: skip
    loss = geometric_losses(ONCE, DELTA)
    assert exact <= loss <= exact + 2e-4
    assert loss == pytest.approx(14.0455, abs=5e-4)
    assert geometric_losses(PURE, DELTA) == loss  # the worse kind of group


def test_losses_of_two_steps() -> None:
    loss = geometric_losses(TWICE, DELTA)
    assert loss == pytest.approx(12.7415, abs=1e-3)
    parts = [part for each, n in zip(PURE[::2], (2, 2, 3), strict=False) for part in
             ((float(each.budget) / 90, 9 * n), (float(each.budget) / 10, 9 * n))]  # fmt: skip
    composed = None
    for epsilon, times in parts:
        one = pld.from_discrete_laplace_mechanism(
            epsilon, 1, value_discretization_interval=1e-4
        ).self_compose(times)
        composed = one if composed is None else composed.compose(one)
    assert composed is not None
    assert loss - 1e-3 < composed.get_epsilon_for_delta(DELTA) < loss + 0.02


def test_every_bound_is_above_the_losses_themselves() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        spent = [
            Spent(int(rng.integers(1, 10)), Fraction(float(e)), TENTH)
            for e in rng.uniform(0.05, 3, 3)
        ]
        delta = 10.0 ** -rng.integers(3, 12)
        loss = geometric_losses(spent, delta)
        assert loss <= renyi_epsilon(spent, delta) <= float(total(spent)) * 1.001
        kinds = [[(float(x) / 1, e.groups) for x in e.releases[0]] for e in spent]
        exact = exact_epsilon(list(itertools.chain(*kinds)), delta)
        assert exact <= loss <= exact + 1e-3


def test_only_kinds_of_groups_that_exist_count_in_losses() -> None:
    assert geometric_losses(TWICE, DELTA) < geometric_losses(PURE, DELTA)


def test_the_published_noise_costs_less_than_was_published() -> None:
    """zCDP says 12.163 of the discrete Gaussian; a Gaussian of the same scale costs 11.666."""
    twice = gaussian_losses(tuple(each._replace(undivided=False) for each in ZCDP), DELTA)
    assert twice == pytest.approx(11.667, abs=2e-3)
    assert gaussian_epsilon(total(ZCDP), DELTA) < twice < zcdp_epsilon(total(ZCDP), DELTA) - 0.49


@pytest.mark.parametrize(("sigma", "times"), [(0.5, 1), (0.7, 6), (3.0, 9), (20.0, 40)])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_discrete_gaussians_by_another_implementation(
    sigma: float, times: int, delta: float
) -> None:
    each = Spent(times, Fraction(times) / (2 * Fraction(sigma) ** 2))
    loss = gaussian_losses((each,), delta)
    other = pld.from_discrete_gaussian_mechanism(sigma, value_discretization_interval=1e-4)
    upper = other.self_compose(times).get_epsilon_for_delta(delta)
    # The other rounds each release up, so it is above by at most a step for each.
    assert upper - 1e-4 * times - 1e-3 <= loss <= upper + 1e-3
    if sigma > 2:
        assert loss == pytest.approx(epsilon_of(math.sqrt(times) / sigma, delta), abs=5e-3)


def test_a_small_discrete_gaussian_is_exact() -> None:
    """One release of few values: its largest losses are sums by hand."""
    sigma, delta = 0.5, 1e-4
    values = np.arange(-12, 13)
    mass = np.exp(-(values**2) / (2 * sigma**2))
    mass /= mass.sum()
    losses = (1 + 2 * values) / (2 * sigma**2)

    def excess(at: float) -> float:
        return float((mass * np.maximum(0, -np.expm1(at - losses))).sum()) - delta

    exact = optimize.brentq(excess, 0, losses.max())
    loss = gaussian_losses((Spent(1, 1 / (2 * Fraction(sigma) ** 2)),), delta)
    assert exact <= loss <= exact + 2e-4


def test_every_mix_of_kinds_is_tried() -> None:
    """No record costs more: with j of s groups measured once, for each j."""
    half = Fraction(1, 2)
    mixed = Spent(3, Fraction(12), half)
    worst = gaussian_losses((mixed,), 1e-6)
    share = Fraction(4)
    for once in range(4):
        parts = [Spent(once, once * share)] if once else []
        if once < 3:
            parts.append(Spent(3 - once, (3 - once) * share, half, False))
        assert gaussian_losses(tuple(parts), 1e-6) <= worst * (1 + 1e-3)
    # Levels of one kind have equally many of each; of two kinds any number.
    two = [mixed, mixed._replace(alike=1)]
    assert gaussian_losses((mixed, mixed), 1e-6) <= gaussian_losses(tuple(two), 1e-6) * (1 + 1e-3)


def test_small_epsilons_are_found_too() -> None:
    """Far below one, where neither the sum of budgets nor Renyi's bound is near."""
    loss = geometric_losses([Spent(100, Fraction(1))], 1e-3)
    exact = exact_epsilon([(0.01, 100)], 1e-3)
    assert exact < 0.5 and exact <= loss <= exact + 1e-3


#: Margin, then epsilon of step 2 and of the level, then rho of both, as printed.
TABLE_4 = [
    (6, 3.84, 4.27, 0.481, 0.534),
    (11, 2.24, 2.49, 0.143, 0.159),
    (50, 0.531, 0.59, 0.007, 0.008),
]
#: How many of the seven levels have each margin.
TIMES = {6: 2, 11: 2, 50: 3}
LAWS: list[LawName] = ["discrete gauss", "rounded gauss", "discrete laplace"]


def noise_of(law: LawName, budget: float) -> Noise:
    return Noise(law, 1 / budget if law == "discrete laplace" else math.sqrt(1 / (2 * budget)))


@pytest.mark.parametrize(("target", "step", "level", "rho_step", "rho_level"), TABLE_4)
def test_table_4(target: int, step: float, level: float, rho_step: float, rho_level: float) -> None:
    epsilon = float(level_budget(published_epsilon(target), 9, 0.1))
    rho = float(level_budget(published_rho(target), 9, 0.1))
    assert epsilon == pytest.approx(level, abs=0.01) and 0.9 * epsilon == pytest.approx(
        step, abs=0.02
    )
    assert rho == pytest.approx(rho_level, abs=0.0007) and 0.9 * rho == pytest.approx(
        rho_step, abs=0.0011
    )


def test_exact_figures_of_table_4() -> None:
    epsilons = [float(level_budget(published_epsilon(m), 9, 0.1)) for m in TIMES]
    rhos = [float(level_budget(published_rho(m), 9, 0.1)) for m in TIMES]
    assert epsilons == pytest.approx([4.2796, 2.4964, 0.5874], abs=5e-5)
    assert rhos == pytest.approx([0.5333, 0.1587, 0.00768], abs=5e-5)


def test_the_published_inversion_misses_its_margins_by_one() -> None:
    missed = [margin(noise_of("discrete laplace", published_epsilon(m))) for m in TIMES]
    assert missed == [7, 12, 51]
    margins = [margin(noise_of("discrete gauss", published_rho(m))) for m in TIMES]
    assert margins == [6, 11, 50]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("target", TIMES)
def test_least_budgets_keep_the_margin_and_no_less_does(law: LawName, target: int) -> None:
    least = least_budget(law, target)
    assert tail(noise_of(law, least), target) == pytest.approx(0.05, abs=1e-9)
    assert margin(noise_of(law, least * 1.0001)) == target
    assert margin(noise_of(law, least * 0.9999)) == target + 1


def spent(law: LawName) -> list[Spent]:
    return [
        Spent(9, level_budget(least_budget(law, m), 9, 0.1), Fraction(1, 10))
        for m, times in TIMES.items()
        for _ in range(times)
    ]


def test_least_totals() -> None:
    rounded = [float(each.budget) for each in spent("rounded gauss")]
    assert rounded[0] == pytest.approx(0.4546, abs=5e-5)
    assert rounded[2] == pytest.approx(0.1452, abs=5e-5)
    assert rounded[4] == pytest.approx(0.00753, abs=5e-6)
    assert float(total(spent("rounded gauss"))) == pytest.approx(1.2223, abs=5e-5)
    assert float(total(spent("discrete gauss"))) == pytest.approx(1.2147, abs=1e-4)


def test_corrected_geometric_totals() -> None:
    pure = spent("discrete laplace")
    assert [least_budget("discrete laplace", m) for m in TIMES] == pytest.approx(
        [0.45690, 0.25977, 0.05931], abs=5e-6
    )
    assert float(total(pure)) == pytest.approx(16.113, abs=5e-4)
    assert renyi_epsilon(pure, DELTA) == pytest.approx(15.020, abs=5e-4)


@pytest.mark.parametrize("law", LAWS)
def test_the_same_margins_for_less(law: LawName) -> None:
    """Of both kinds of counts; a hundredth less would lose one of them."""
    gamma = Fraction(1, 10)
    for budget in (Fraction("0.02"), Fraction("0.159"), Fraction("2.134")):

        def drawn(spent: Fraction) -> Draws:
            parts = (spent / 9, gamma * spent / 9, (1 - gamma) * spent / 9)
            return Draws(*(noise_of(law, float(part)) for part in parts))

        def margins(spent: Fraction) -> tuple[int, int]:
            level_draws = drawn(spent)
            assert level_draws.total and level_draws.detail
            return margin(level_draws.total), margin(level_draws.detail)

        least = same_margins(drawn(budget), budget, 9, gamma)
        assert least <= budget and margins(least) <= margins(budget)
        less = margins(least * Fraction(99, 100))
        assert any(a > b for a, b in zip(less, margins(budget), strict=True))


def of_level(figures: dict[str, Any], table: str, label: str) -> dict[Any, int]:
    [row] = [r for r in figures["levels"] if (r["table"], r["label"]) == (table, label)]
    return {(f["table"], f["figure"], f["detail"]): f["margin"] for f in row["figures"]}


def test_every_kind_of_figure_of_persons() -> None:
    figures = of_level(describe(planned(persons())), "t1t2", USA.label)
    detail = Noise("discrete gauss", math.sqrt(10))
    expected: dict[Any, int] = {
        ("t1", "total of a group of which only the total is measured", None): margins.margin(
            Noise("discrete gauss", 3.0)
        ),
        ("t1", "total", 0): margins.margin(detail),
        **{("t1", "total", d): margins.margin(detail, n) for d, n in ((1, 8), (2, 18), (3, 46))},
        **{("t2", "sex", d): margins.margin(detail, n) for d, n in ((1, 4), (2, 9), (3, 23))},
        **{("t2", "sex by age", d): margins.margin(detail) for d in (1, 2, 3)},
    }
    assert figures == expected
    assert len(of_level(describe(planned(persons())), "t1t2", COUNTY.label)) == len(figures) - 1


def test_every_kind_of_figure_of_households() -> None:
    description = describe(planned(households()))
    detail = Noise("discrete gauss", math.sqrt(18))
    t3 = of_level(description, "t3", COUNTY.label)
    assert t3["t3", "data cells 0", 3] == margins.margin(detail, 5)
    assert t3["t3", "data cells 3, 6", 3] == margins.margin(detail, 2)
    assert of_level(description, "t4", COUNTY.label) == {
        ("t4", "data cells 0", 0): margins.margin(detail),
        ("t4", "data cells 1, 2, 3", 1): margins.margin(detail),
        ("t4", "data cells 0", 1): margins.margin(detail, 3),
    }
    assert "no further cost" in description["notes"][-1]


def test_margins_follow_the_estimates_and_the_options() -> None:
    detail, first = Noise("discrete gauss", math.sqrt(10)), Noise("discrete gauss", math.sqrt(90))
    both = of_level(describe(planned(persons(estimates="combined"))), "t1t2", USA.label)
    assert both["t1", "total", 3] == margins.combined_margin(first, detail, 46, 46)
    clipped = of_level(describe(planned(persons(allow_negative=False))), "t1t2", USA.label)
    assert clipped["t1", "total", 3] == margins.margin(detail, 46, clipped=True)
    plain = of_level(describe(planned(persons())), "t1t2", USA.label)
    assert both["t1", "total", 3] < plain["t1", "total", 3] < clipped["t1", "total", 3]


def test_suppression_is_below_the_state_only() -> None:
    description = describe(planned(persons(zero_suppression=0.9)))
    thresholds = {row["label"]: row["suppressed_at"] for row in description["levels"]}
    assert thresholds[USA.label] is None and thresholds["(STATE, 2)"] is None
    assert thresholds[COUNTY.label] == margins.quantile(Noise("discrete gauss", math.sqrt(10)), 0.9)
    assert describe(planned(persons()))["levels"][-1]["suppressed_at"] is None
    budgets = {"t1t2": dict.fromkeys(US_LEVELS, math.inf)}
    exact = describe(planned(persons(budgets=budgets, zero_suppression=0.9)))
    assert {row["label"]: row["suppressed_at"] for row in exact["levels"]}[COUNTY.label] == 0
    assert exact["guarantee"].keys() == description["guarantee"].keys()
    assert (
        SUPPRESSED in description["notes"]
        and SUPPRESSED not in describe(planned(persons()))["notes"]
    )


@pytest.mark.parametrize(
    ("changes", "names", "held"),
    [
        ({}, ["losses", "zcdp", "zcdp-analytic", "gaussian"], [True, True, True, False]),
        ({"noise": "rounded"}, ["gaussian", "zcdp", "zcdp-analytic"], [True, True, True]),
        (
            {"definition": "puredp"},
            ["sum", "renyi", "losses", "renyi-integral"],
            [True, True, True, False],
        ),
    ],
)
def test_accountings(changes: dict[str, Any], names: list[str], held: list[bool]) -> None:
    rows = accountings(planned(persons(**changes)))
    assert [row["name"] for row in rows] == names
    assert [row["holds"] for row in rows] == held
    epsilons = {row["name"]: row["epsilon"] for row in rows}
    assert epsilons.get("renyi-integral", 0.0) < epsilons.get("renyi", math.inf)
    guarantee = describe(planned(persons(**changes)))["guarantee"]
    assert any(row["epsilon"] == guarantee["epsilon"] and row["holds"] for row in rows)
    lines = census_text(describe(planned(persons(**changes)))).splitlines()
    marks = [line.split()[:1] for line in lines if " at delta " in line]
    assert marks == [["Epsilon"] if holds else ["No"] for holds in held]


def test_for_machines_and_for_people() -> None:
    both = {"run_pr": True, "thresholds": {"t1t2": dict.fromkeys(US_LEVELS + PR_LEVELS, (0, 1, 2))},
            "budgets": {"t1t2": dict.fromkeys(US_LEVELS + PR_LEVELS, 0.5)}}  # fmt: skip
    for parameters in (persons(**both), households(), persons(definition="puredp", **both)):
        description = describe(planned(parameters), groups={USA: 12})
        assert json.loads(json.dumps(description)) == description
        words = census_text(description)
        assert description["guarantee"]["text"] in words and "s = 9" in words
        assert all(row["label"] in words for row in description["levels"])
    assert describe(planned(persons()), groups={USA: 12})["levels"][0]["groups"] == 12


def test_words_round_the_guarantee_up() -> None:
    description = describe(planned(persons()))
    epsilon = float(description["guarantee"]["text"].split("(")[1].split(",")[0])
    assert (
        description["guarantee"]["epsilon"] <= epsilon <= description["guarantee"]["epsilon"] + 1e-4
    )


def test_exact_counts_have_no_guarantee() -> None:
    description = describe(planned(persons(budgets={"t1t2": {USA: math.inf}})))
    assert description["guarantee"]["text"] == NO_GUARANTEE and description["accountings"] == []
    assert NO_GUARANTEE in census_text(description) and "exact" in census_text(description)
    assert json.loads(json.dumps(description)) == description


@pytest.mark.parametrize("changes", [{}, {"noise": "rounded"}, {"definition": "puredp"}])
def test_budgets_of_the_same_margins(changes: dict[str, Any]) -> None:
    """Written into the parameters they give those margins at that cost."""
    plan = planned(persons(**changes))
    same = describe(plan)["same_margins"]
    least = {level: same["budgets"]["t1t2"][level.name] for level in plan.parameters.levels}
    cheaper = planned(persons(**changes, budgets={"t1t2": least}))
    assert float(cheaper.budget) == same["budget"] < plan.budget
    assert cheaper.cost().epsilon == pytest.approx(same["epsilon"])
    single = ("sex by age", "total of a group of which only the total is measured")
    for label in (USA.label, COUNTY.label):
        before, after = (of_level(describe(p), "t1t2", label) for p in (plan, cheaper))
        for kind, figure in before.items():
            if kind[1] in single or kind[2] == 0:
                assert after[kind] == figure
    assert f"{same['budget']:g}"[:4] in census_text(describe(plan))


def test_large_and_no_budgets() -> None:
    assert geometric_losses([Spent(1, Fraction(3000), TENTH)], DELTA) == pytest.approx(3000)
    assert geometric_losses([], DELTA) == gaussian_losses((), DELTA) == 0.0
