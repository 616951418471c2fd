"""Trials of an audit: where the unit's records go, what is read, how many others there are."""

import math

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.shares import per_key_squares
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies import STRATEGIES, make_strategy
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import COUNT, MEAN, SECOND, SUM, UNITS, Make
from tests.accounting.strategies.dense import decode_matrix
from tests.audit.evidence.design import (
    MAX_PREFIXES,
    Seen,
    TrialDesign,
    calendar,
    columns_read,
    designs,
    first_triggers,
    layouts,
    others_needed,
    pattern_of,
    prefix_covariance,
    spread,
)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("triggers", [1, 2, 7, 16, 21])
def test_covariance_is_that_of_the_decoder(name: str, triggers: int) -> None:
    decoder = decode_matrix(make_strategy(name, triggers))
    rng = np.random.default_rng(triggers)
    for size in (1, triggers // 2 + 1, triggers):
        at = np.sort(rng.choice(triggers, size, replace=False)) + 1
        dense = (decoder @ decoder.T)[np.ix_(at - 1, at - 1)]
        covariance = prefix_covariance(make_strategy(name, triggers), at)
        assert np.allclose(covariance, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
def test_square_is_at_most_that_of_the_encoder(make_plan: Make, name: str) -> None:
    """Equal where every prefix is released and the decoder is invertible."""
    plan = make_plan(13, public_keys="f" * 32, strategy=name)
    noise = allocate(plan).values[0]
    seen = Seen(plan, noise, np.arange(1, 14))
    encoder = make_strategy(name, 13).matrix()
    for trigger in range(1, 14):
        square = seen.square(seen.moved(np.array([trigger]))) * noise.sigma**2
        column = float((encoder[:, trigger - 1].astype(float) ** 2).sum())
        assert square <= column * (1 + 1e-9)
        assert name in ("tree", "geometric") or square == pytest.approx(column, rel=1e-6)


def test_calendar(make_plan: Make) -> None:
    assert calendar(make_plan(5)).tolist() == [1, 2, 3, 4, 5]
    rare = make_plan(11, select_every=2, refresh_every=4, strategy="blt")
    assert calendar(rare).tolist() == [2, 4, 8, 11]
    assert calendar(make_plan(11, refresh_every=4, public_keys="f" * 32)).tolist() == [4, 8, 11]
    long = calendar(make_plan(1000, refresh_every=1, select_every=1))
    assert len(long) <= MAX_PREFIXES and long[0] == 1 and long[-1] == 1000
    assert (np.diff(long) > 0).all() and len(long) == MAX_PREFIXES
    assert calendar(make_plan(MAX_PREFIXES, refresh_every=1)).tolist() == [*range(1, 129)]


def test_layouts_and_spread(make_plan: Make) -> None:
    for most in (1, 2, 32, 1000):
        counts = layouts(make_plan(8, contributions=most))
        assert counts.dtype == np.int64 and counts[0] == 1 and counts[-1] == most
        # From one key to C, each number at most an eighth above the one before it.
        assert (counts[1:] <= np.maximum(counts[:-1] + 1, np.ceil(counts[:-1] * 1.13))).all()
        assert (np.diff(counts) > 0).all() and len(counts) <= 66
    assert spread(make_plan(8), 5) == (28, 1)
    assert spread(make_plan(8, per_key_bound=1), 5) == (1, 1)


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 16, 31, 32, 40])
@pytest.mark.parametrize("values", [0.0, 0.3, 1.0])
def test_layouts_have_the_one_that_costs_most(make_plan: Make, bound: int, values: float) -> None:
    """Of all ways to spread C pairs, at most k on a key, those that are tried have the worst."""
    plan = make_plan(8, per_key_bound=bound)
    tried = [(int(n), *spread(plan, int(n))) for n in layouts(plan)]
    for keys, first, rest in tried:
        assert 1 <= first <= bound and 1 <= rest <= bound
        assert first + (keys - 1) * rest <= 32
    cost = [n * (1 - values) + values * (a * a + (n - 1) * b * b) for n, a, b in tried]
    n = np.arange(1, 33)
    worst = (n * (1 - values) + values * per_key_squares(bound, 32)).max()
    # Between the two ends some full keys and some single pairs can cost a hundredth more.
    assert (0.99 if 0 < values < 1 else 1 - 1e-12) * worst <= max(cost) <= worst * (1 + 1e-12)


def test_values_move_at_their_own_step(make_plan: Make) -> None:
    """Counts for selection move at the next test, values at once."""
    plan = make_plan(12, select_every=3, refresh_every=3, strategy="blt")
    budget, at = allocate(plan), np.array([3, 6, 9, 12])
    assert budget.selection is not None
    tests, values = Seen(plan, budget.selection, at), Seen(plan, budget.values[0], at)
    when = np.array([1, 4, 12])
    assert tests.moved(when).tolist() == values.moved(when).tolist() == [1, 2, 2, 3]
    apart = Seen(plan, budget.values[0], np.array([1, 2, 3, 5]))
    assert apart.moved(np.array([2, 4])).tolist() == [0, 1, 1, 2]


PUBLIC = "f" * 32


def first(plan: Plan) -> TrialDesign:
    return designs(plan, allocate(plan))[0]


@pytest.mark.parametrize("aggregates", [(COUNT,), (COUNT, SUM, UNITS), (UNITS,)])
def test_the_weights_see_the_mu_of_the_design(
    make_plan: Make, aggregates: tuple[Aggregate, ...]
) -> None:
    """mu^2 is the weights times the effect that they are weights of, over keys and columns."""
    plan = make_plan(9, aggregates=aggregates, strategy="blt", contributions=4)
    for design in designs(plan, allocate(plan)):
        on_first, on_rest, square = *design.weights(plan), 0.0
        for j, column in enumerate(design.columns):
            for weights, keys, most in (
                (on_first, 1, design.heavy),
                (on_rest, design.keys - 1, design.each),
            ):
                records = 1 if column.once else most
                after = design.when[:records] <= design.at[:, None]
                square += keys * (weights[:, j] @ after.sum(axis=1)) * column.effect
        assert design.mu == pytest.approx(math.sqrt(square))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["values"]),
        ({"aggregates": (COUNT, UNITS)}, ["values", "one key"]),
        ({"aggregates": (COUNT, UNITS), "contributions": 2}, ["values", "one key"]),
        ({"aggregates": (COUNT, UNITS), "contributions": 1}, ["values"]),
        ({"per_key_bound": 1}, ["values", "one key"]),
        ({"per_key_bound": 3}, ["values", "one key"]),
        ({"per_key_bound": 32}, ["values"]),
    ],
)
def test_records_of_one_key_are_tried_where_a_unit_counts_once(
    make_plan: Make, options: dict[str, object], names: list[str]
) -> None:
    plan = make_plan(4, strategy="blt", **options)
    trial_designs = designs(plan, allocate(plan))
    assert [d.name for d in trial_designs] == names
    for heap in trial_designs[1:]:
        count = plan.privacy.contributions
        assert (heap.keys, heap.extra) == (1, 0) and heap.pattern.tolist() == [0] * count
        assert heap.heavy == (plan.privacy.per_key_bound or count)
        # One trigger after the other as long as there are any.
        assert heap.when.tolist() == [min(i, 4) for i in range(1, count + 1)]


def test_nobody_else_is_needed_for_a_key_of_a_list(make_plan: Make) -> None:
    plan = make_plan(8, public_keys=PUBLIC)
    assert others_needed(plan, allocate(plan), 4.0) == 0 and first(plan).others == 0


def test_when_others_come_and_what_they_add(make_plan: Make) -> None:
    design = first(make_plan(10, strategy="tree"))
    assert design.feeds == (1,) and design.at.tolist() == [*range(1, 11)] and design.others > 0
    assert design.expected()[:, 0].tolist() == [design.others] * 10


@pytest.mark.parametrize("louder", [0.99, 1.01])
@pytest.mark.parametrize("other", [COUNT, Aggregate("total", "sum", "v", (0.0, 7.0), 0.5)])
def test_the_layout_is_the_one_that_shows_most(
    make_plan: Make, louder: float, other: Aggregate
) -> None:
    """Records show most on one key, units on C keys, both as much with the plan's own noise: a
    little more noise of the records, or less, decides."""
    plan = make_plan(8, aggregates=(other, UNITS), public_keys=PUBLIC, strategy="blt")
    budget = allocate(plan)
    noise = msgspec.structs.replace(budget.values[0], sigma=budget.values[0].sigma * louder)
    best = designs(plan, msgspec.structs.replace(budget, values=(noise,)))[0]
    assert best.keys == (1 if louder < 1 else 32)
    assert best.extra == (0 if louder < 1 else 32)
    for keys in layouts(plan).tolist():
        heavy, each = spread(plan, keys)
        laid_out = msgspec.structs.replace(
            best, keys=keys, heavy=heavy, each=each, when=np.full(64, best.when[0])
        )
        assert laid_out.with_mu(plan).mu <= best.mu * (1 + 1e-9)


def test_a_flood_goes_to_the_keys_that_count_and_as_many_more(make_plan: Make) -> None:
    plan = make_plan(8)
    assert pattern_of(plan, 1, 32, 1).tolist() == [0] * 64
    assert pattern_of(plan, 2, 31, 1).tolist() == [0] * 30 + [0, 1, 2, 3]
    assert pattern_of(plan, 5, 28, 1).tolist() == [0] * 27 + [*range(10)]
    assert pattern_of(plan, 32, 1, 1).tolist() == [*range(64)]
    assert pattern_of(plan, 3, 2, 3).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    two = first(make_plan(8, aggregates=(UNITS,), contributions=2, public_keys=PUBLIC))
    assert (two.keys, two.extra, two.heavy) == (2, 2, 1)


def test_a_unit_starts_in_the_first_window_alone(make_plan: Make) -> None:
    plan, at = make_plan(12), np.array([2, 4, 8, 11, 12])
    timeline = plan.timeline

    def starts(**changes: object) -> list[int]:
        changed = msgspec.structs.replace(timeline, **changes)
        return first_triggers(msgspec.structs.replace(plan, timeline=changed), at)

    assert starts() == starts(end=None) == [1, 3, 5, 9, 12]
    assert starts(slide=4 * SECOND) == [1, 3]
    assert starts(slide=5 * SECOND) == [1, 3, 5]
    for begin in (0, 40 * SECOND):
        assert starts(start=begin, end=begin + 3 * SECOND) == [1, 3]
        assert starts(start=begin, end=begin + 9 * SECOND) == [1, 3, 5, 9]
    assert first_triggers(plan, np.array([1, 2, 3])) == [1, 2, 3]
    short = msgspec.structs.replace(timeline, end=SECOND // 2)
    assert first_triggers(msgspec.structs.replace(plan, timeline=short), np.array([1, 2])) == [1]


AT = np.array([1, 2, 3])


def test_columns_as_a_statistic_reads_them(make_plan: Make) -> None:
    """Means need others, so many that the count's noise does not matter."""
    plan = make_plan(8, aggregates=(UNITS, MEAN, SUM, COUNT), strategy="blt")
    budget = allocate(plan)
    columns, inputs, needed = columns_read(plan, budget, AT)
    noises = {s.name: n for s, n in zip(plan.design.streams, budget.values, strict=True)}
    assert budget.units is not None and inputs == first(plan).inputs
    own, other = inputs["v"]
    assert (own, other) == (9.0 + 2 * 12.0 + 1, 3.5)
    column_tuples = [msgspec.structs.astuple(c) for c in columns]
    assert column_tuples == [
        ("people", "units", 1.0, 0, budget.units, 1.0, 1.0, True),
        ("level", "mean", 0.25, 14, noises["level"], 22.0, 0.0, False),
        ("total", "sum", 0.5, 0, noises["total"], 14.0, 7.0, False),
        ("n", "count", 1.0, 0, noises["count"], 1.0, 1.0, False),
    ]
    assert needed == math.ceil(6 * noises["count"].sd[2]) + 32 + 1
    assert noises["count"].sd[0] < noises["count"].sd[2]
    assert first(plan).others >= needed
    assert columns_read(make_plan(8), allocate(make_plan(8)), AT)[2] == 0


def test_means_that_need_too_many_others_are_left_out(make_plan: Make) -> None:
    def read(*aggregates: Aggregate) -> tuple[list[str], int]:
        plan = make_plan(8, aggregates=aggregates, epsilon=0.5, public_keys=PUBLIC)
        columns, _, needed = columns_read(plan, allocate(plan), AT)
        return [c.name for c in columns], needed

    assert read(MEAN, SUM, UNITS, COUNT) == (["total", "people", "n"], 0)
    names, needed = read(MEAN)
    assert names == ["level"] and needed > 1500


@pytest.mark.parametrize(
    ("aggregates", "values"),
    [
        ((SUM,), (7.0 + 2 * 10 + 1, 0.0)),
        ((Aggregate("low", "sum", "v", (-7.0, 3.0), 0.5),), (-7.0 - 2 * 10 - 1, 0.0)),
        # The stream with more of the budget sees more, and decides.
        ((Aggregate("low", "sum", "v", (-7.0, 3.0), 0.5, share=20.0),
          Aggregate("high", "sum", "v", (-3.0, 8.0), 0.5, share=0.1)),
         (-7.0 - 2 * 15 - 1, 0.0)),
    ],
)  # fmt: skip
def test_the_units_value_lies_beyond_the_clamps_that_show_more(
    make_plan: Make, aggregates: tuple[Aggregate, ...], values: tuple[float, float]
) -> None:
    plan = make_plan(4, aggregates=aggregates, public_keys=PUBLIC, strategy="blt")
    assert first(plan).inputs == {"v": values}


def test_values_move_nothing_before_they_come(make_plan: Make) -> None:
    plan = make_plan(4, strategy="blt")
    design = first(plan)
    seen = Seen(plan, design.columns[0].noise, design.at)
    assert seen.moved(np.array([3])).tolist() == [0, 0, 1, 1]


HEAVY = {"weights": SelectionWeights(3.0, 1.5), "per_key_bound": 1, "combine": True}
PLANS: list[tuple[dict[str, object], float]] = [
    ({"public_keys": "f" * 32, "strategy": "blt"}, 1.0),
    ({"public_keys": "f" * 32, "strategy": "blt", "aggregates": (COUNT, SUM, UNITS)}, 1.0),
    ({"strategy": "blt"}, (32 / 33) ** 0.5),
    ({"strategy": "blt", "aggregates": (COUNT, SUM), "contributions": 8}, (8 / 9) ** 0.5),
    ({"strategy": "blt", "aggregates": (UNITS,)}, 1.0),
    ({"strategy": "blt", "aggregates": (UNITS,), "triggers": 12, "select_every": 3,
      "refresh_every": 3}, 0.5),
    ({"strategy": "blt", "aggregates": (COUNT, UNITS), **HEAVY}, 0.5),
    ({"strategy": "blt", "aggregates": (MEAN,)}, 0.5),
    ({"strategy": "tree"}, 0.6),
    ({"contributions": 1, "strategy": "blt"}, 0.5**0.5),
    ({"per_key_bound": 5, "public_keys": "f" * 32, "strategy": "blt"}, 1.0),
    ({"per_key_bound": 2, "strategy": "blt"}, (2 / 3) ** 0.5),
    ({"per_key_bound": 3, "strategy": "blt", "aggregates": (COUNT, UNITS)}, 0.7),
]  # fmt: skip


@pytest.mark.parametrize(("options", "least"), PLANS)
def test_designs_see_what_the_shares_allow(
    make_plan: Make, options: dict[str, object], least: float
) -> None:
    options = dict(options)
    plan = make_plan(options.pop("triggers", 24), **options)
    budget = allocate(plan)
    for number, design in enumerate(designs(plan, budget)):
        assert design.mu <= budget.mu * (1 + 1e-9)
        assert number or design.mu >= least * budget.mu * (1 - 1e-6)
        sent = np.bincount(design.pattern, minlength=design.keys)
        assert len(design.pattern) == len(design.when)
        assert (sent[: design.keys] >= 1).all() and sent[0] >= design.heavy
        # No more than C of the unit's records may count for the design's own figure.
        counted = design.heavy + (design.keys - 1) * design.each
        assert counted <= plan.privacy.contributions
        for shape in design.weights(plan):
            assert shape.shape == (len(design.at), len(design.columns))
        assert design.expected().shape == (len(design.at), len(design.columns))


def test_units_values_lie_beyond_the_clamps(make_plan: Make) -> None:
    plan = make_plan(4, aggregates=(COUNT, SUM, MEAN), strategy="blt")
    design = designs(plan, allocate(plan))[0]
    own, other = design.inputs["v"]
    assert own > 9.0 or own < -3.0
    effects = {c.name: (c.effect, c.other) for c in design.columns}
    assert effects["n"] == (1.0, 1.0)
    assert effects["total"][0] in (14.0, -6.0) and effects["level"][1] == 0.0
    assert other == 3.5


def test_others_bring_a_key_over_its_first_threshold(make_plan: Make) -> None:
    for options in ({}, {"pre_threshold": 500}, HEAVY):
        plan = make_plan(24, strategy="blt", **options)
        budget = allocate(plan)
        assert budget.tau is not None and budget.statistic is not None
        for above in (0.0, 4.0):
            count = others_needed(plan, budget, above)
            goal = budget.tau[0] / (1 << DECODE_BITS) + above * budget.statistic.sd[0]
            assert count * budget.statistic.alone >= goal
            least = max(plan.privacy.pre_threshold + 1, goal / budget.statistic.alone)
            assert count <= least + 1
