"""The stages of a step: units counted once, thresholds and due dates, released values.

Noisy thresholds are the integers of the paths, whatever is computed ahead; a due date is the first
later test that passes without data; released values are exact prefixes plus the noise of the key's
own paths.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import selection
from dpstream.dp_transforms.aggregation import aggregate
from dpstream.dp_transforms.batches import admitted_schema, concat
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths
from dpstream.dp_transforms.perturbation import Published, PublishedPaths, publish
from dpstream.dp_transforms.selection import (
    NoisyThresholds,
    next_publication,
    predict,
    publishes,
    select,
    wait_for_test,
)
from dpstream.dp_transforms.step import sampler_of
from dpstream.state.arrow import id_array
from dpstream.state.open import key_schema
from dpstream.state.store import NEVER, KeyShard
from tests.state.conformance import ids
from tests.streams import COUNT, KEYS, MEAN, SUM, UNITS, make_plan

#: (unit, key, rank, values by name of their column).
Pair = tuple[int, int, int, dict[str, int]]


def batch_of(plan: Plan, rows: Sequence[Pair], window: int = 0, trigger: int = 1) -> pa.RecordBatch:
    """Admitted pairs of one step."""
    columns: dict[str, object] = {
        "window": [window] * len(rows),
        "trigger": [trigger] * len(rows),
        "rank": [row[2] for row in rows],
        "_id": id_array(ids([row[1] for row in rows])),
        "unit": id_array(ids([row[0] for row in rows])),
        "page": [f"k{row[1]}" for row in rows],
    }
    for name in admitted_schema(plan).names:
        if name not in columns:
            columns[name] = [row[3][name] for row in rows]
    schema = admitted_schema(plan)
    return pa.RecordBatch.from_pydict({n: columns[n] for n in schema.names}, schema)


def states_of(plan: Plan, keys: Sequence[int] = ()) -> KeyShard:
    """Key states, with these keys in the first slots."""
    states = KeyShard(key_schema(plan), plan.design.sums)
    pages = pa.RecordBatch.from_pydict({"page": [f"k{key}" for key in keys]}, key_schema(plan))
    states.intern(ids(list(keys)), pages)
    return states


def noise_stream(plan: Plan, noise: StreamNoise, role: str = "value") -> NoiseStream:
    """A stream of the first window, under the fixed test secret."""
    bounds = plan.timeline.window_bounds(0)
    return NoiseStream(KEYS.ring(), (b"run",), bounds, role, noise, sampler_of(noise))


#: Unit 1 twice and unit 2 once in key 0, unit 1 once in key 5.
ROWS: list[Pair] = [(1, 0, 0, {"v1": 5}), (2, 0, 0, {"v1": 1}), (1, 0, 1, {"v1": 7}),
                    (1, 5, 2, {"v1": -2})]  # fmt: skip


def test_units_count_once_and_values_add_up() -> None:
    plan = make_plan(aggregates=(COUNT, SUM))
    states = states_of(plan, [9])
    update = aggregate(plan, states, batch_of(plan, ROWS), None)
    assert states.units[:3].tolist() == [0, 2, 1]
    assert states.values[:3].tolist() == [[0, 0], [3, 13], [1, -2]]
    assert update.touched.tolist() == [1, 2]
    assert sorted(update.pair_slots.tolist()) == [1, 1, 2]
    again = aggregate(plan, states, batch_of(plan, ROWS[:1]), None)
    assert states.units[:3].tolist() == [0, 2, 1] and states.values[1].tolist() == [4, 18]
    assert again.touched.tolist() == [1] and len(again.pair_slots) == 0


def test_a_key_that_was_selected_counts_no_more_units() -> None:
    plan = make_plan()
    states = states_of(plan, [0])
    states.selected[0] = 1
    update = aggregate(plan, states, batch_of(plan, [(1, 0, 0, {})]), None)
    assert states.units[0] == 0 and states.values[0].tolist() == [1]
    assert update.touched.tolist() == [0] and len(update.pair_slots) == 0
    counted = make_plan(aggregates=(UNITS,))  # unless their count is published
    states = states_of(counted, [0])
    states.selected[0] = 1
    aggregate(counted, states, batch_of(counted, [(1, 0, 0, {})]), None)
    assert states.units[0] == 1


def test_no_units_are_kept_for_a_list_of_keys() -> None:
    plan = make_plan(public="fixed list")
    states = states_of(plan, [0])
    update = aggregate(plan, states, batch_of(plan, [(1, 0, 0, {}), (2, 0, 0, {})]), None)
    assert states.units[0] == 0 and states.values[0].tolist() == [2]
    assert len(update.pair_units) == 0


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_pairs_say_which_of_them_counts_the_unit(order: tuple[int, ...]) -> None:
    """Every admitted pair adds values, the first of its key the unit; no set is kept."""
    plan = make_plan(aggregates=(COUNT, SUM), per_key_bound=2, weights=SelectionWeights())
    states = states_of(plan, [0, 5])
    rows: list[Pair] = [(1, 0, 0, {"v1": 5}), (2, 0, 2, {"v1": 1}), (1, 0, -1, {"v1": 7}),
                        (1, 5, 1, {"v1": -2})]  # fmt: skip
    batch = batch_of(plan, [rows[at] for at in order])
    update = aggregate(plan, states, batch, np.array([100, 10, 1]))
    assert states.units[:2].tolist() == [2, 1]
    assert states.values[:2].tolist() == [[3, 13, 101], [1, -2, 10]]
    assert len(update.pair_slots) == len(update.pair_units) == 0 == states.pairs.size


def test_steps_that_are_taken_together_count_as_one_after_the_other() -> None:
    """The pair of the earlier step counts, not the one that was admitted first."""
    plan = make_plan(weights=SelectionWeights(3, 1), skip=False)
    early = batch_of(plan, [(1, 0, 1, {}), (2, 0, 2, {})], trigger=2)
    later = batch_of(plan, [(1, 0, 0, {}), (3, 0, 1, {})], trigger=3)
    apart, together, weights = states_of(plan), states_of(plan), np.array([100, 10, 1])
    for rows in (early, later):
        aggregate(plan, apart, rows, weights)
    aggregate(plan, together, concat([early, later], early.schema), weights)
    assert (together.values[:1] == apart.values[:1]).all() and apart.values[0, -1] == 21


def test_a_unit_counts_with_the_weight_of_its_first_pair() -> None:
    plan = make_plan(weights=SelectionWeights(), skip=False)
    states = states_of(plan, [0, 5])
    rows: list[Pair] = [(1, 0, 2, {}), (1, 0, 1, {}), (2, 0, 0, {}), (1, 5, 2, {})]
    aggregate(plan, states, batch_of(plan, rows), np.array([100, 10, 1]))
    assert states.values[:2].tolist() == [[3, 110], [1, 1]]


TEN = range(10)


def thresholds_of(plan: Plan, look_ahead: int = 3) -> NoisyThresholds:
    budget = allocate(plan)
    assert budget.selection is not None
    terms = [(noise_stream(plan, budget.selection, "selection"), 1)]
    return NoisyThresholds(terms, plan, budget, look_ahead)


def by_definition(plan: Plan, states: KeyShard) -> npt.NDArray[np.int64]:
    """(keys, tests) floor(tau - n) + 1, at least 0."""
    budget: Budget = allocate(plan)
    assert budget.selection is not None and budget.tau is not None
    paths, keys = Paths(noise_stream(plan, budget.selection, "selection")), states.size
    paths.start(np.arange(keys), states.table.ids[:keys])
    tests = len(budget.tau)
    noise = paths.advance(np.arange(keys), np.full(keys, tests), tests)
    exact = np.floor((budget.tau - noise) / (1 << DECODE_BITS)).astype(np.int64) + 1
    return np.maximum(exact, 0)


@pytest.mark.parametrize("look_ahead", [1, 2, 5, 1000])
@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_thresholds_are_those_of_the_paths(strategy: str, look_ahead: int) -> None:
    plan = make_plan(triggers=13, strategy=strategy)
    states, thresholds = states_of(plan, TEN), thresholds_of(plan, look_ahead)
    expected, slots = by_definition(plan, states), np.arange(10)
    for step in (1, 2, 5, 6, 13):
        thresholds.ensure(states, slots, np.full(10, step))
        assert thresholds.at(slots, np.full(10, step)).tolist() == expected[:, step - 1].tolist()
    assert thresholds.horizon == min(look_ahead, 13)


@pytest.mark.parametrize(("every", "look_ahead"), [(2, 1), (4, 1), (4, 3), (2, 1000), (4, 1000)])
@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_a_combined_test_takes_the_counts_noise_of_its_own_trigger(
    strategy: str, every: int, look_ahead: int
) -> None:
    """Tests at triggers 4, 8, 12 and 13, say; the published count has noise at every trigger."""
    options: dict[str, Any] = {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True}
    plan = make_plan(triggers=13, select_every=every, strategy=strategy, **options)
    budget, keys = allocate(plan), np.arange(10)
    assert budget.selection is not None and budget.statistic is not None
    assert budget.tau is not None and len(budget.tau) == plan.design.tests
    own, tests = list(range(plan.design.tests)), [t for t in range(13) if (t + 1) % every == 0]
    at_tests = tests if tests[-1] == 12 else [*tests, 12]
    terms = [
        (noise_stream(plan, budget.selection, "selection"), budget.statistic.weighted),
        (noise_stream(plan, budget.values[0]), budget.statistic.counted),
    ]
    states, exact = states_of(plan, TEN), np.tile(budget.tau, (10, 1))
    for (stream, coefficient), at in zip(terms, (own, at_tests), strict=True):
        paths = Paths(stream)
        paths.start(keys, states.table.ids[:10])
        last = at[-1] + 1
        exact -= coefficient * paths.advance(keys, np.full(10, last), last)[:, at]
    expected = np.maximum((exact >> DECODE_BITS) + 1, 0)
    for slots, steps in ((keys, (1, 2, 4)), (keys, (3,)), (keys[4:5], (1, 3)), (keys[:1], (4,))):
        thresholds = NoisyThresholds(terms, plan, budget, look_ahead)
        for step in steps:
            test_steps = np.full(len(slots), step)
            thresholds.ensure(states, slots, test_steps)
            assert thresholds.at(slots, test_steps).tolist() == expected[slots, step - 1].tolist()


@pytest.mark.parametrize("coefficient", [1, 2, 3])
def test_noise_counts_as_often_as_its_stream(coefficient: int) -> None:
    plan, keys = make_plan(triggers=13), np.arange(10)
    budget, states = allocate(plan), states_of(plan, TEN)
    assert budget.selection is not None and budget.tau is not None
    stream = noise_stream(plan, budget.selection, "selection")
    paths = Paths(stream)
    paths.start(keys, states.table.ids[:10])
    noise = paths.advance(keys, np.full(10, 5), 5)[:, 4]
    thresholds = NoisyThresholds([(stream, coefficient)], plan, budget, 3)
    thresholds.ensure(states, keys, np.full(10, 5))
    exact = ((budget.tau[4] - coefficient * noise) >> DECODE_BITS) + 1
    assert thresholds.at(keys, np.full(10, 5)).tolist() == np.maximum(exact, 0).tolist()


def test_a_threshold_beyond_32_bits_is_the_largest_number() -> None:
    """A plan with such a threshold is refused; wrapped, it would let every key pass."""
    out, one = np.zeros((1, 3), np.int32), np.ones(1, np.int64)
    tau = np.array([2**31 - 2, 2**31 - 1, 2**40]) << DECODE_BITS
    selection._fill_thresholds(out, 0 * one, one, 3 * one, np.zeros((1, 3), np.int64), tau)
    assert out[0, [1, 2, 0]].tolist() == [2**31 - 1] * 3
    selection._fill_thresholds(out, 0 * one, one, 3 * one, np.zeros((1, 3), np.int64), -tau)
    assert out.tolist() == [[0, 0, 0]]


def test_few_keys_at_a_time_are_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(triggers=13)
    states, slots = states_of(plan, TEN), np.arange(10)
    monkeypatch.setattr(selection, "MAX_DRAWS_AT_ONCE", 1)
    thresholds = thresholds_of(plan)
    thresholds.ensure(states, slots, np.full(10, 4))
    levels = thresholds.at(slots, np.full(10, 4))
    assert levels.tolist() == by_definition(plan, states)[:, 3].tolist()


@pytest.mark.parametrize("above", [-1, 0])
def test_a_key_passes_at_its_threshold(above: int) -> None:
    plan = make_plan(triggers=13, select_every=1)
    states, slots = states_of(plan, TEN), np.arange(10)
    states.units[:10] = by_definition(plan, states)[:, 3] + above
    passed = select(plan, thresholds_of(plan), states, slots, 4)
    assert passed.tolist() == [above == 0] * 10


def test_the_statistic_of_weights_is_the_last_sum() -> None:
    options: dict[str, Any] = {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True}
    plan = make_plan(aggregates=(COUNT, SUM), **options)
    budget, states = allocate(plan), states_of(plan, [1, 2])
    assert budget.statistic is not None and budget.selection is not None
    states.units[:2], states.values[:2, -1] = [3, 4], [100, 50]
    stream = noise_stream(plan, budget.selection, "selection")
    statistics = NoisyThresholds([(stream, 1)], plan, budget, 2).statistic(states, np.arange(2))
    one, each = budget.statistic.weighted, budget.statistic.counted
    assert (
        one > 0 and each > 0 and statistics.tolist() == [100 * one + 3 * each, 50 * one + 4 * each]
    )


MANY_KEYS = 60


@pytest.mark.parametrize("look_ahead", [1, 4, 100])
@pytest.mark.parametrize("every", [1, 3])
def test_a_key_is_due_when_it_passes_by_itself(look_ahead: int, every: int) -> None:
    plan = make_plan(triggers=14, select_every=every, refresh_every=every)
    states, thresholds = states_of(plan, range(MANY_KEYS)), thresholds_of(plan, look_ahead)
    expected, slots, tests = by_definition(plan, states), np.arange(MANY_KEYS), plan.design.tests
    states.units[:MANY_KEYS] = np.arange(MANY_KEYS) % 20
    thresholds.ensure(states, slots, np.full(MANY_KEYS, 2))
    predict(plan, thresholds, states, slots, 2 * every)
    horizon = min(1 + look_ahead, tests)
    due = []
    for key in range(MANY_KEYS):
        later = [t for t in range(3, horizon + 1) if states.units[key] >= expected[key, t - 1]]
        test = later[0] if later else horizon + 1
        due.append(min(test * every, 14) if test <= tests else NEVER)
    assert states.due[:MANY_KEYS].tolist() == due and len(set(due)) > (look_ahead > 1)


@pytest.mark.parametrize(("trigger", "test"), [(1, 4), (4, 4), (5, 8), (9, 10)])
def test_between_two_tests_keys_wait_for_the_next(trigger: int, test: int) -> None:
    plan = make_plan(triggers=10, select_every=4, refresh_every=4)
    states = states_of(plan, [1, 2])
    wait_for_test(plan, states, np.array([1]), trigger)
    assert states.due[:2].tolist() == [NEVER, test]


@pytest.mark.parametrize("every", [1, 3, 10, 99])
def test_the_calendar_of_publications(every: int) -> None:
    plan: Plan = make_plan(triggers=10, refresh_every=every)
    days = [t for t in range(1, 11) if publishes(plan, t)]
    assert days == sorted({*range(every, 11, every), 10})
    for trigger in range(10):
        assert next_publication(plan, trigger) == min(day for day in days if day > trigger)
    assert next_publication(plan, 10) == NEVER


ALL = (COUNT, MEAN, SUM, UNITS)


def paths_of(plan: Plan) -> PublishedPaths:
    budget = allocate(plan)
    units = None if budget.units is None else noise_stream(plan, budget.units, "units")
    return PublishedPaths([noise_stream(plan, noise) for noise in budget.values], units)


def filled(plan: Plan, keys: int) -> KeyShard:
    states = states_of(plan, range(keys))
    states.units[:keys] = np.arange(keys) + 50
    states.values[:keys] = np.arange(keys)[:, None] * 7 + 1000 + np.arange(states.values.shape[1])
    return states


def published(plan: Plan, states: KeyShard, slots: list[int], trigger: int = 5) -> Published:
    return publish(plan, allocate(plan), states, paths_of(plan), np.array(slots), trigger)


def test_values_are_exact_prefixes_plus_the_noise_of_their_paths() -> None:
    plan = make_plan(aggregates=ALL, triggers=10)
    budget, states = allocate(plan), filled(plan, 4)
    figures = published(plan, states, [2, 0])
    for number, (stream, noise) in enumerate(zip(plan.design.streams, budget.values, strict=True)):
        paths = Paths(noise_stream(plan, noise))
        paths.start(np.arange(2), states.table.ids[[2, 0]])
        drawn = paths.advance(np.arange(2), np.full(2, 5))[:, 0] / (1 << DECODE_BITS)
        prefix = states.values[[2, 0], number] + drawn
        assert drawn.any()
        if stream.name == "count":
            assert figures.values["n"].tolist() == prefix.tolist()
            assert figures.sds["n"].tolist() == [noise.sd[4]] * 2
        if stream.name == "total":
            assert figures.values["total"].tolist() == (prefix * 0.5).tolist()
            assert figures.sds["total"] == pytest.approx([noise.sd[4] * 0.5] * 2)
    assert set(figures.values) == set(figures.sds) == {"n", "level", "total", "people"}


@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_company_does_not_matter(strategy: str) -> None:
    """Neither other keys, nor when they were first published, nor the triggers before."""
    plan = make_plan(aggregates=ALL, triggers=10, strategy=strategy)
    states, budget = filled(plan, 5), allocate(plan)
    together, paths = published(plan, states, [3, 1, 4]), paths_of(plan)
    publish(plan, budget, states, paths, np.array([4]), 2)
    publish(plan, budget, states, paths, np.array([0, 4]), 3)
    later = publish(plan, budget, states, paths, np.array([4, 3]), 5)
    for name in ("n", "total", "level", "people"):
        assert together.values[name][[2, 0]].tolist() == later.values[name].tolist()


def test_every_stream_has_noise_of_its_own() -> None:
    plan = make_plan(aggregates=(COUNT, SUM), triggers=10)
    states = filled(plan, 40)
    noise, units = paths_of(plan).noise(states, np.arange(40), 5, 5)
    assert units is None and len(noise) == 2
    assert np.abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.6
    assert len(set(noise[0].tolist())) > 30


def test_the_count_of_units_is_at_its_own_step() -> None:
    """The selection stream continued has a step for each test, not for each trigger."""
    plan = make_plan(aggregates=(UNITS,), triggers=12, select_every=3, refresh_every=3)
    states, budget = filled(plan, 3), allocate(plan)
    assert budget.units is not None and not plan.design.units_apart
    figures = published(plan, states, [0, 1, 2], 9)
    paths = Paths(noise_stream(plan, budget.units, "units"))
    paths.start(np.arange(3), states.table.ids[:3])
    drawn = paths.advance(np.arange(3), np.full(3, 3))[:, 0]
    assert figures.values["people"].tolist() == (states.units[:3] + drawn / 256).tolist()
    assert figures.sds["people"].tolist() == [budget.units.sd[2]] * 3
