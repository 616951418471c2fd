"""The choice between Gaussian and geometric noise, and what geometric noise promises."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.stats import norm

from dpstream.accounting.arrays import Float64
from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.periods import Room
from dpstream.accounting.query.bounds import BoundsDesign, design_bounds
from dpstream.accounting.query.calibration import (
    PartNoise,
    QueryBudget,
    allocate_query,
    cost_of,
    expected,
)
from dpstream.accounting.query.families import Families, Optimise, error_of, families_of, outlook
from dpstream.accounting.query.grids import Gridded, finest, grid_of, regridded
from dpstream.accounting.query.plan import Family, QueryColumn, QueryPlan
from dpstream.accounting.tuning.reference import DENSITY, SIZES, mean_over_keys
from tests.accounts import room
from tests.golden.refusals import Refused
from tests.queries import COUNT, MEAN, UNITS, query

OUTLOOK_COUNT = QueryColumn("c", "count", per="group")
COLUMNS = {
    "units": QueryColumn("c", "units", per="group"), "count": OUTLOOK_COUNT,
    "sum": QueryColumn("c", "sum", per="group"), "mean": QueryColumn("c", "mean", per="group"),
    "sum of rows": QueryColumn("c", "sum", -3.0, 9.0, automatic_rows=True),
    "mean of rows": QueryColumn("c", "mean", -3.0, 9.0, automatic_rows=True),
    "given": QueryColumn("c", "sum", -3.0, 9.0),
}  # fmt: skip


def gridded(column: QueryColumn, delta: float = 1e-9, **more: Any) -> Gridded:
    def plan_of(bits: int) -> QueryPlan:
        on_grid = msgspec.structs.replace(column, grid=grid_of(column, False, bits))
        law = "gaussian" if delta else "geometric"
        given = {"groups": 8, "selects": bool(delta), "automatic_groups": True, **more}
        given |= {"norm": None, "mechanism": law, "columns": (on_grid,)}
        return QueryPlan(1.0, delta, **given)

    return finest(plan_of)


def chosen(of: Gridded, groups: int, rows: int, bounds: tuple[float, float]) -> QueryPlan:
    """The plan as it is once all is chosen, in the way of whoever draws."""
    [column] = of.plan.columns
    rows = rows if column.automatic_rows else column.rows
    if column.automatic:
        low, high = (0.0, float(rows)) if column.kind == "count" else bounds
    elif column.low is None or column.high is None:
        return msgspec.structs.replace(of.plan, groups=groups)
    else:
        low, high = column.low, column.high
    columns = (msgspec.structs.replace(column, rows=rows),)
    plan = msgspec.structs.replace(of.plan, columns=columns, groups=groups)
    return regridded(plan, {"c": (low, high)}, of.bits)


@pytest.mark.parametrize("delta", [1e-9, 0])
@pytest.mark.parametrize("name", COLUMNS)
def test_noise_is_what_it_is_multiplied_by(name: str, delta: float) -> None:
    of = gridded(COLUMNS[name], delta)
    [column] = outlook(of).columns
    for groups, rows, (low, high) in ((4, 3, (-3.0, 8.0)), (100, 700, (20.0, 25.0))):
        plan = chosen(of, groups, rows, (low, high))
        top = plan.columns[0].high or 0.0
        values = {
            "": 1.0, "high": top, "max(|low|, |high|)": max(-low, high), "high - low": high - low,
            "(high - low)": high - low, "rows": rows, "groups": groups,
            "sqrt(groups)": math.sqrt(groups),
        }  # fmt: skip
        [real] = expected(plan, of.budget(plan))
        for part, drawn in zip(column["parts"], real["parts"], strict=True):
            factor = math.prod(values[text] for text in (part["times"] or "").split(" * "))
            assert part["sd"] * factor == pytest.approx(drawn["sd"], rel=0.01)
            assert part["within"] * factor == pytest.approx(drawn["within"], rel=0.03)
    assert column["automatic"] == (name in ("count", "sum", "mean"))


def test_given_bounds_have_their_own_noise() -> None:
    of = gridded(COLUMNS["given"], automatic_groups=False)
    forecast, [real] = outlook(of), expected(of.plan, of.budget(of.plan))
    [column] = forecast.columns
    assert [part["times"] for part in column["parts"]] == [None]
    assert {**column["parts"][0], "times": None} == {**real["parts"][0], "times": None}
    [selection], budget = forecast.selections, of.budget(of.plan)
    assert budget.selection is not None
    assert selection["tau"] == budget.selection.tau / budget.selection.most
    assert (selection["groups"], selection["min_units"]) == (8, 1)


def test_thresholds_are_those_of_the_fewest_and_the_most_groups() -> None:
    """A count of several rows is no count of units: it does not join the test."""
    of = gridded(OUTLOOK_COUNT)
    selections = outlook(of).selections
    assert [one["groups"] for one in selections] == [1, 256]
    for one in selections:
        real = of.budget(chosen(of, int(one["groups"]), 5, (0.0, 1.0))).selection
        assert real is not None
        assert one["tau"] == pytest.approx(real.tau / real.most)
        assert one["even_chance_one_group"] == pytest.approx(real.even_chance(1))
    assert outlook(gridded(OUTLOOK_COUNT, selects=False)).selections == []
    assert len(outlook(of).columns) == 1


def release_chance(units: int, noise: PartNoise) -> float:
    """Chance that so many units are shown, by adding up the law of the truncated noise."""
    assert noise.most is not None
    coin, total = noise.sooner * 2.0**-32, 0.0
    for part, most in ((coin, noise.most - 1), (1 - coin, noise.most)):
        law = {j: math.exp(-abs(j) / noise.scale) for j in range(-most, most + 1)}
        above = sum(p for j, p in law.items() if units + j > most)
        total += part * above / sum(law.values())
    return total


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-9), (1.0, 3e-9), (30.0, 1e-9), (0.2, 0.1)])
def test_an_even_chance_under_geometric_noise_is_one(epsilon: float, delta: float) -> None:
    """At (30, 1e-9) a group of one unit is shown with chance 1e-9, and one of two units nearly
    always.
    """
    units = QueryColumn("c", "units", per="group")
    plan = QueryPlan(epsilon, delta, 1, None, "geometric", True, columns=(units,))
    of = finest(lambda bits: plan)
    [selection], [noise] = outlook(of).selections, of.budget(plan).parts
    least = next(number for number in range(10_000) if release_chance(number, noise) >= 0.5)
    assert selection["even_chance_one_group"] == selection["even_chance_all_groups"] == least


LIMIT = room((8.0, 1e-5))
SUM = QueryColumn("s", "sum", -1.0, 2.0, per="group")
AUTO = QueryColumn("a", "count", per="group")


def families(*columns: QueryColumn, optimise: Optimise = "answer", **settings: Any) -> Families:
    """Of a question with public groups at (1, 1e-9), unless settings say otherwise."""
    given = {"mechanism": "auto", "selects": False, "delta": 1e-9, "groups": 1} | settings
    plan = query(*columns, **given)
    return families_of(lambda bits: plan, optimise)


def taken(of: Families, limit: Room | None = None) -> str:
    return of.taken(limit).plan.mechanism


# --- what geometric noise promises, exactly --------------------------------------------------


def moves(values: Sequence[int], scale: Fraction) -> Fraction:
    """Largest privacy loss of geometric noise where sums move by these numbers.

    Enumerated over outputs: at z the chances with and without the unit differ by
    e^((|z - v| - |z|) / scale) or less, in either direction.
    """
    each = (max(abs(abs(z - v) - abs(z)) for z in range(-4, 5)) for v in values)
    return sum(each, Fraction()) / scale


def worst_loss(
    budget: QueryBudget, plan: QueryPlan, design: BoundsDesign | None = None
) -> Fraction:
    """Largest loss over all rows that one unit can have: enumerated, groups by columns."""
    loss = Fraction()
    for noise in budget.parts:
        values = range(noise.part.low, noise.part.high + 1)
        vectors = itertools.product(values, repeat=plan.most_groups)
        loss += max(moves(vector, Fraction(noise.scale)) for vector in vectors)
    for of in () if design is None else design.histograms:
        # One value of the unit, in one cell: one node of each level moves by one.
        levels = math.ceil(math.log2(of.cells)) + 1
        loss += moves([1] * levels, Fraction(of.sigma))
    return loss


SMALL = {
    "count": query(UNITS, mechanism="geometric", groups=2, selects=False),
    "two columns": query(UNITS, SUM, mechanism="geometric", groups=3, selects=False),
    "mean": query(
        QueryColumn("m", "mean", 0.0, 3.0, rows=1), mechanism="geometric", groups=2, selects=False
    ),
    "chosen": query(
        UNITS, AUTO, mechanism="geometric", groups=2, selects=False, automatic_groups=True
    ),
}


def chosen_bounds(plan: QueryPlan) -> QueryPlan:
    """With bounds of 0 to 2 for what the question chooses."""
    columns = (
        msgspec.structs.replace(c, low=0.0, high=2.0) if c.automatic else c for c in plan.columns
    )
    return msgspec.structs.replace(plan, columns=tuple(columns), automatic_groups=False)


@pytest.mark.parametrize("name", SMALL)
def test_all_parts_together_lose_no_more_than_epsilon(name: str) -> None:
    plan, design = SMALL[name], design_bounds(SMALL[name])
    plan = chosen_bounds(plan)
    budget = allocate_query(plan, {} if design is None else design.reserved)
    loss = worst_loss(budget, plan, design)
    assert Fraction("0.999999") < loss / Fraction(plan.epsilon) <= 1
    assert budget.mu is None and cost_of(plan) == Cost(plan.epsilon, 0.0, None, 0.0)


def test_a_histogram_that_is_not_charged_is_too_much() -> None:
    """Sabotage: noise of the figures as if nothing were paid for their bounds."""
    plan = SMALL["chosen"]
    design = design_bounds(plan)
    assert design is not None
    plan = chosen_bounds(plan)
    assert worst_loss(allocate_query(plan), plan, design) > Fraction("1.1") * Fraction(plan.epsilon)


def test_the_most_of_one_group_alone_is_too_little() -> None:
    """Sabotage: scale L / epsilon instead of kappa L / epsilon."""
    plan = SMALL["two columns"]
    one = allocate_query(msgspec.structs.replace(plan, groups=1))
    assert worst_loss(one, plan) > Fraction("2.9") * Fraction(plan.epsilon)


def geometric(scale: float, z: int) -> float:
    return math.exp(-abs(z) / scale) * math.tanh(1 / (2 * scale))


def test_a_family_chosen_by_the_data_is_not_private() -> None:
    """Sabotage: the noise that fits the exact count; counts of 1 and 2 are then told apart."""
    narrow, wide = 1.0, 4.0

    def loss(scales: tuple[float, float]) -> float:
        chances = ((geometric(scales[0], y - 1), geometric(scales[1], y - 2))
                   for y in range(-40, 44))  # fmt: skip
        return max(abs(math.log(a / b)) for a, b in chances)

    assert loss((narrow, narrow)) <= 1 / narrow * (1 + 1e-12)
    assert loss((wide, wide)) <= 1 / wide * (1 + 1e-12)
    assert loss((narrow, wide)) > 20


@pytest.mark.parametrize("norm", [1.0, 1.5, 2.0, 3.7])
def test_a_norm_bounds_what_a_unit_adds(norm: float, refused: Refused) -> None:
    """Over all whole vectors of at most that norm in 3 groups."""
    column = QueryColumn("n", "count", rows=3, norm=norm)
    settings: dict[str, Any] = {"groups": 3, "mechanism": "geometric", "selects": False}
    [noise] = allocate_query(query(column, **settings)).parts
    vectors = itertools.product(range(4), repeat=3)
    fits = [sum(v) for v in vectors if sum(x * x for x in v) <= norm**2]
    assert max(fits) * noise.part.unit <= noise.sensitivity <= 9 * noise.part.unit
    least = min(9.0, math.sqrt(3) * norm)
    assert noise.sensitivity == pytest.approx(least * noise.part.unit)
    assert noise.sensitivity / noise.scale <= 1.0
    refused(lambda: query(column, **settings | {"selects": True}).check())


# --- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "groups", "gaussian", "geometric"),
    [(1.0, 1, 5.503, 1.357), (1.0, 8, 15.55, 11.31), (6.0, 1, 1.066, 0.0706)],
)
def test_the_figures_of_a_count(
    epsilon: float, groups: int, gaussian: float, geometric: float
) -> None:
    of = families(UNITS, epsilon=epsilon, groups=groups)
    sds = [option.budget(option.plan).parts[0].sd for option in of.options]
    assert sds == pytest.approx([gaussian, geometric], rel=1e-3)
    assert taken(of) == "geometric"


def test_what_each_family_can_answer(refused: Refused) -> None:
    assert [o.plan.mechanism for o in families(UNITS, delta=0.0).options] == ["geometric"]
    normed = msgspec.structs.replace(COUNT, norm=2.0)
    public = families(normed, groups=None)
    assert [o.plan.mechanism for o in public.options] == ["gaussian", "geometric"]
    private = families(normed, groups=None, selects=True)
    assert [o.plan.mechanism for o in private.options] == ["gaussian"]
    for mechanism in ("gaussian", "geometric"):
        [only] = families(UNITS, mechanism=mechanism).options
        assert only.plan.mechanism == mechanism
    refused(lambda: families(UNITS, delta=0.0, selects=True))
    with pytest.raises(InvariantError):
        families(UNITS, mechanism="gaussian").of(None)
    for plan in (query(UNITS, mechanism="auto"), query(AUTO, mechanism="auto")):
        with pytest.raises(InvariantError):
            allocate_query(chosen_bounds(plan))
        with pytest.raises(InvariantError):
            design_bounds(plan)


def test_bounds_that_the_question_chooses_change_no_choice() -> None:
    """sd / L is the same for every bound, so that it is compared before one is chosen."""
    narrow = families(msgspec.structs.replace(AUTO, low=0.0, high=16.0), groups=4)
    errors = [error_of(option) for option in narrow.options]
    for most in (100.0, 1e3, 1e6):
        wide = families(msgspec.structs.replace(AUTO, low=0.0, high=most), groups=4)
        assert [error_of(option) for option in wide.options] == pytest.approx(errors, rel=1e-3)
    # Of what is chosen a sixth is paid for the choice: of mu^2, or of epsilon.
    paid = [error_of(option) for option in families(AUTO, groups=4).options]
    expected = errors[0] * math.sqrt(6 / 5), errors[1] * 6 / 5
    assert paid == pytest.approx(expected, rel=1e-3)


def test_a_limit_is_shared_equally() -> None:
    """76 questions of (1, 1e-9) with Gaussian noise, 8 with geometric noise, within (8, 1e-5)."""
    of = families(UNITS, optimise="limit")
    rows = of.described(of.taken(LIMIT), LIMIT)
    assert [row["questions"] for row in rows] == [76, 8]
    assert [row["taken"] for row in rows] == [True, False]
    assert taken(of, LIMIT) == "gaussian" and taken(of) == "geometric"
    assert taken(msgspec.structs.replace(of, optimise="answer"), LIMIT) == "geometric"
    # A question that takes most of the limit is compared at that share.
    assert taken(families(UNITS, optimise="limit", epsilon=6.0), LIMIT) == "geometric"
    assert taken(families(UNITS, optimise="limit", epsilon=8.0), LIMIT) == "geometric"


@pytest.mark.parametrize(("groups", "best"), [(1, "geometric"), (200, "gaussian")])
def test_a_question_that_takes_all_of_a_limit_is_compared_as_it_is(groups: int, best: str) -> None:
    of = families(UNITS, optimise="limit", epsilon=8.0, delta=1e-5, groups=groups)
    gaussian, geometric = of.options
    assert LIMIT.equal_share(cost_of(gaussian.plan), cost_of(geometric.plan)) == 1
    assert (error_of(gaussian) < error_of(geometric)) == (best == "gaussian")
    assert taken(of, LIMIT) == best


def test_a_family_that_the_limit_does_not_allow_is_not_taken() -> None:
    for optimise in ("answer", "limit"):
        of = families(UNITS, optimise=optimise)
        # Nothing of delta is left for Gaussian noise.
        assert taken(of, room((1.0, 1e-12))) == "geometric"
        wide = families(UNITS, optimise=optimise, groups=64)
        assert taken(wide, room((1.0, 1e-12))) == "geometric"
        assert taken(wide, LIMIT) == "gaussian"
        # Of a plain epsilon less is left than one question needs.
        spent = room((8.0, 1e-5), Cost(7.5, 0.0, None, 0.0))
        assert spent.further_charges(Cost(1.0, 0.0, None, 0.0)) == 0


def test_the_digest_is_of_what_was_asked() -> None:
    of = families(UNITS)
    assert of.digest == families(UNITS).digest
    others = [
        families(UNITS, optimise="limit"), families(UNITS, mechanism="gaussian"),
        families(UNITS, mechanism="geometric"), families(UNITS, epsilon=2.0), families(COUNT),
    ]  # fmt: skip
    assert len({of.digest, *(other.digest for other in others)}) == 6
    one = [families(UNITS, mechanism="geometric", optimise=o).digest for o in ("answer", "limit")]
    assert one[0] == one[1]


SPENT = (Cost(1.0, 1e-9, 0.18, 0.0), Cost(0.5, 0.0, None, 0.0))
KINDS = {
    "units": lambda most: QueryColumn("u", "units"),
    "rows": lambda most: QueryColumn("n", "count", rows=most),
    "per group": lambda most: QueryColumn("n", "count", 0.0, float(most), per="group"),
    "sum": lambda most: QueryColumn("s", "sum", -1.0, float(most), rows=3),
    "finer steps": lambda most: QueryColumn("s", "sum", 0.0, most + 1.0, per="group"),
}


@pytest.mark.parametrize("limit", [None, LIMIT, room((12.0, 1e-5), *SPENT)])
@pytest.mark.parametrize("kind", KINDS)
def test_sd_never_rises(kind: str, limit: Room | None) -> None:
    """With epsilon or delta, or where C, kappa or a bound falls; limits allow both families."""
    epsilons, deltas = (0.1, 0.3, 1.0, 1.7, 3.0, 6.0), (0.0, 1e-12, 1e-9, 1e-7, 1e-6)
    groups, bounds = (1, 2, 5, 9, 16, 40), (1, 2, 7)
    sd = np.empty((len(epsilons), len(deltas), len(groups), len(bounds)))
    for at in np.ndindex(sd.shape):
        epsilon, delta, kappa, most = (
            a[i] for a, i in zip((epsilons, deltas, groups, bounds), at, strict=True)
        )
        of = families(KINDS[kind](int(most)), epsilon=epsilon, delta=delta, groups=kappa,
                      optimise="answer" if limit is None else "limit")  # fmt: skip
        option = of.taken(limit)
        sd[at] = option.budget(option.plan).parts[0].sd * option.plan.columns[0].grid
    slack = 1 + 1e-9
    for axis, falls in ((0, True), (1, True), (2, False), (3, False)):
        first, then = (sd.take(range(*r), axis) for r in ((0, sd.shape[axis] - 1),
                                                         (1, sd.shape[axis])))  # fmt: skip
        low, high = (then, first) if falls else (first, then)
        # With delta 0 only geometric noise is possible, also where it costs the limit more.
        part = low <= high * slack
        assert part[:, 1:].all() if axis == 1 and limit is not None else part.all(), (kind, axis)


# --- loss distributions ----------------------------------------------------------------------


def delta_of_counts(scale: float, kappa: int, epsilon: float) -> float:
    """Hockey stick of kappa counts that each move by one: the loss of one is 1 / scale with chance
    1 / (1 + q), q = e^(-1 / scale), and else -1 / scale."""
    up = 1 / (1 + math.exp(-1 / scale))
    chances = (math.comb(kappa, n) * up**n * (1 - up) ** (kappa - n) for n in range(kappa + 1))
    losses = ((2 * n - kappa) / scale for n in range(kappa + 1))
    return math.fsum(p * max(0.0, -math.expm1(epsilon - loss))
                     for p, loss in zip(chances, losses, strict=True))  # fmt: skip


def test_loss_distributions_would_save_nothing() -> None:
    """The least scale by the exact hockey stick against the plain one, where geometric noise wins:
    for the most groups at which it does."""
    print("\nepsilon  delta   kappa  plain sd  exact saves")
    for epsilon, delta in itertools.product((0.5, 1.0, 2.0, 4.0, 6.0), (1e-9, 1e-7, 1e-6)):
        wins = [
            k
            for k in range(1, 64)
            if taken(families(UNITS, epsilon=epsilon, delta=delta, groups=k)) == "geometric"
        ]
        kappa = max(wins)
        plain = kappa / epsilon
        low, high = plain / 2, plain
        for _ in range(60):
            middle = (low + high) / 2
            fits = delta_of_counts(middle, kappa, epsilon) <= delta
            low, high = (low, middle) if fits else (middle, high)
        saved = 1 - high / plain
        print(f"{epsilon:7g}  {delta:.0e}  {kappa:5d}  {math.sqrt(2) * plain:8.3f}  {saved:.4%}")
        assert 0 <= saved <= 1e-3


# --- groups that are selected ----------------------------------------------------------------


def drawn(random: np.random.Generator, scale: float, most: int, draws: int) -> Float64:
    """Geometric noise that is truncated to [-most, most]."""
    steps = np.arange(-most, most + 1)
    chances = np.exp(-np.abs(steps) / scale)
    return np.asarray(random.choice(steps, draws, p=chances / chances.sum()), np.float64)


@pytest.mark.parametrize("family", ["gaussian", "geometric"])
@pytest.mark.parametrize("least", [1, 4])
def test_the_error_on_the_reference_population(family: Family, least: int) -> None:
    """Drawn: of groups of the population's sizes, |released - true|, of one group a unit."""
    settings: dict[str, Any] = {"selects": True, "delta": 1e-3, "min_units": least}
    of = families(UNITS, mechanism=family, **settings)
    [option] = of.options
    budget = option.budget(option.plan)
    chosen, [noise] = budget.selection, budget.parts
    assert chosen is not None
    random, draws = np.random.default_rng(5), 4000
    if family == "gaussian":
        counted = np.rint(random.normal(0, noise.scale, draws))
        weighted = np.rint(random.normal(0, chosen.sigma, draws))
    else:
        most = noise.most or 0
        sooner = random.random(draws) < noise.sooner / 2**32
        counted = np.where(
            sooner, *(drawn(random, noise.scale, k, draws) for k in (most - 1, most))
        )
        weighted = sooner.astype(np.float64)
    losses = []
    for size in SIZES[SIZES < 1e4]:
        weight = chosen.weights[0] if chosen.weights else 0
        statistic = chosen.weighted * (weight * size + weighted) + chosen.counted * (size + counted)
        statistic += weighted * (family == "geometric")
        published = (statistic > chosen.need(least)) & (size >= least)
        losses.append(np.where(published, np.abs(counted), size).mean())
    density = SIZES**DENSITY
    rest = math.sqrt(2 / math.pi) * noise.sd if family == "gaussian" else np.abs(counted).mean()
    all_losses = np.append(losses, np.full(int((SIZES >= 1e4).sum()), rest))
    expected = np.trapezoid(density * all_losses, SIZES) / np.trapezoid(density, SIZES)
    assert error_of(option) == pytest.approx(expected, rel=0.03)


def test_units_of_few_groups_and_of_many_count_alike_in_the_choice() -> None:
    """Three shapes, from their definitions; 1 / i alone would take geometric noise here."""
    of = families(UNITS, selects=True, epsilon=6.0, delta=1e-6, groups=4)
    assert taken(of) == "gaussian"
    assert taken(families(UNITS, selects=True, epsilon=6.0, delta=1e-6, groups=2)) == "geometric"
    gaussian = of.options[0]
    budget = gaussian.budget(gaussian.plan)
    chosen, [noise] = budget.selection, budget.parts
    assert chosen is not None
    random, draws = np.random.default_rng(6), 4000
    counted = np.rint(random.normal(0, noise.scale, draws))
    weighted = np.rint(random.normal(0, chosen.sigma, draws))
    rest, density = math.sqrt(2 / math.pi) * noise.sd, SIZES**DENSITY
    each = []
    # Units of 1, 2, 3 and 4 groups among those of a group.
    for among in ([1, 0, 0, 0], [1 / 2, 2 / 6, 3 / 12, 4 / 4], [0, 0, 0, 1]):
        weight = float(np.average(chosen.weights, weights=among))
        losses = np.full(len(SIZES), rest)
        for at, size in enumerate(SIZES[SIZES < 1e4]):
            statistic = chosen.weighted * (weight * size + weighted)
            published = statistic + chosen.counted * (size + counted) > chosen.need(1)
            losses[at] = np.where(published, np.abs(counted), size).mean()
        each.append(np.trapezoid(density * losses, SIZES) / np.trapezoid(density, SIZES))
    assert error_of(gaussian) == pytest.approx(np.prod(each) ** (1 / 3), rel=0.03)
    assert error_of(of.options[1]) < each[1]  # the middle shape alone would choose otherwise


def test_of_groups_alone_and_of_several_columns() -> None:
    alone = families(selects=True, delta=1e-6)
    assert all(0 < error_of(option) < 1 for option in alone.options)
    few, many = (families(UNITS, MEAN, selects=True, delta=1e-6, groups=k) for k in (1, 64))
    assert (taken(few), taken(many)) == ("geometric", "gaussian")


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_the_error_of_truncated_noise_is_its_sum(epsilon: float, least: int) -> None:
    """Term by term over the values of the noise and of the coin, not drawn."""
    of = families(
        UNITS, mechanism="geometric", selects=True, delta=1e-2, epsilon=epsilon, min_units=least
    )
    [option] = of.options
    budget = option.budget(option.plan)
    [noise], chosen = budget.parts, budget.selection
    assert chosen is not None and noise.most is not None and noise.sooner > 0
    coin, losses = noise.sooner / 2**32, np.zeros(len(SIZES))
    for less, chance in ((0, 1 - coin), (1, coin)):
        z = np.arange(-noise.most + less, noise.most - less + 1)
        law = np.exp(-np.abs(z) / noise.scale)
        law *= chance / law.sum()
        is_released = SIZES[:, None] + z > chosen.need(least) - less
        is_released &= SIZES[:, None] >= least
        losses += np.where(is_released, np.abs(z), SIZES[:, None]) @ law
    assert error_of(option) == pytest.approx(mean_over_keys(losses), rel=1e-9)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_error_of_a_sum_without_a_count_is_that_of_normal_noise(groups: int) -> None:
    """Three shapes from their definitions: a group is shown by the weights of its units."""
    of = families(SUM, mechanism="gaussian", selects=True, delta=1e-6, groups=groups)
    [option] = of.options
    budget = option.budget(option.plan)
    chosen = budget.selection
    assert chosen is not None and chosen.tested is None
    [noise] = [noise for noise in budget.parts if noise.part.column]
    absolute = math.sqrt(2 / math.pi) * noise.sd / (noise.part.most * noise.part.unit)
    number = np.arange(1, groups + 1)
    tails = np.where(number < groups, 1 / (number + 1), 0.0)
    middle = number * (np.append(1.0, tails[:-1]) - tails)
    each = []
    for among in (number == 1, middle, number == groups):
        weight = float(np.average(chosen.weights, weights=among))
        release_chance = norm.cdf((chosen.weighted * weight * SIZES - chosen.need(1)) / chosen.sd)
        each.append(mean_over_keys(SIZES * (1 - release_chance) + release_chance * absolute))
    assert error_of(option) == pytest.approx(np.prod(each) ** (1 / 3), rel=1e-6)


def test_of_noise_that_no_family_can_draw_there_is_a_refusal(refused: Refused) -> None:
    wide = QueryColumn("s", "sum", 0.0, 1e6, per="group")
    for mechanism in ("auto", "gaussian", "geometric"):
        refused(families, wide, mechanism=mechanism, epsilon=1e-6, groups=4096)


@pytest.mark.parametrize(("least", "groups"), [(1, 1), (1, 2), (4, 2)])
def test_the_error_of_groups_alone_is_the_share_that_the_best_selection_hides(
    least: int, groups: int
) -> None:
    """Its chances by their recursion: p_n, or that of m - 1 units less where m are needed."""
    settings: dict[str, Any] = {"selects": True, "delta": 1e-3, "groups": groups}
    [option] = families(mechanism="geometric", min_units=least, **settings).options
    grown, delta, chances = math.exp(1.0 / groups), 1e-3 / groups, [0.0]
    while chances[-1] < 1:
        last = chances[-1]
        chances.append(min(grown * last + delta, 1 - (1 - last - delta) / grown, 1.0))
    counts = np.minimum(np.maximum(np.floor(SIZES) - (least - 1), 0), len(chances) - 1)
    hidden = mean_over_keys(1 - np.array(chances)[counts.astype(np.int64)])
    assert error_of(option) == pytest.approx(hidden, rel=1e-6)


def test_the_error_of_a_clamped_sum_beside_a_count_is_that_of_its_steps() -> None:
    """Term by term: the count's noise, its coin, and the staircase of the sum that is shown."""
    of = families(UNITS, SUM, mechanism="geometric", selects=True, epsilon=12.0, delta=1e-6)
    [option] = of.options
    budget = option.budget(option.plan)
    chosen, [count, stairs] = budget.selection, budget.parts
    assert chosen is not None and count.most is not None
    assert stairs.law == "staircase" and stairs.step is not None
    coin, counted, released = count.sooner / 2**32, np.zeros(len(SIZES)), np.zeros(len(SIZES))
    for less, chance in ((0, 1 - coin), (1, coin)):
        z = np.arange(-count.most + less, count.most - less + 1)
        law = np.exp(-np.abs(z) / count.scale)
        law *= chance / law.sum()
        is_released = SIZES[:, None] + z > chosen.need(1) - less
        counted += np.where(is_released, np.abs(z), SIZES[:, None]) @ law
        released += is_released @ law
    size, most = np.arange(200), stairs.part.most
    level = size // most + (size % most >= stairs.step)
    mass = np.where(size > 0, 2, 1) * np.exp(-level * most / stairs.scale)
    absolute = mass @ size / mass.sum() / most
    summed = SIZES * (1 - released) + released * absolute
    expected = math.sqrt(mean_over_keys(counted) * mean_over_keys(summed))
    assert error_of(option) == pytest.approx(expected, rel=1e-9)
