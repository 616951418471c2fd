"""Units count once in their round, values add up, and delivery does not matter."""

import itertools

import numpy as np
import pytest

from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms.aggregation import aggregate, distinct
from tests.dp_transforms.pairs import Pair, batch_of, states_of
from tests.streams import COUNT, SUM, UNITS, make_plan

#: Unit 1 twice and unit 2 once in key 0, unit 1 once in key 5.
ROWS: list[Pair] = [(1, 0, 0, {"v1": 5}), (2, 0, 0, {"v1": 1}), (1, 0, 1, {"v1": 7}),
                    (1, 5, 2, {"v1": -2})]  # fmt: skip


def test_units_count_once_and_values_add_up() -> None:
    plan = make_plan(aggregates=(COUNT, SUM))
    states = states_of(plan, [9])
    update = aggregate(plan, states, *batch_of(plan, ROWS), None)
    assert states.units[:3].tolist() == [0, 2, 1]
    assert states.values[:3].tolist() == [[0, 0], [3, 13], [1, -2]]
    assert update.touched.tolist() == [1, 2]
    assert sorted(update.pair_slots.tolist()) == [1, 1, 2]
    again = aggregate(plan, states, *batch_of(plan, ROWS[:1]), None)
    assert states.units[:3].tolist() == [0, 2, 1] and states.values[1].tolist() == [4, 18]
    assert again.touched.tolist() == [1] and len(again.pair_slots) == 0


def test_a_key_that_was_selected_counts_no_more_units() -> None:
    plan = make_plan()
    states = states_of(plan, [0])
    states.round[0] = 1
    update = aggregate(plan, states, *batch_of(plan, [(1, 0, 0, {})]), None)
    assert states.units[0] == 0 and states.values[0].tolist() == [1]
    assert update.touched.tolist() == [0] and len(update.pair_slots) == 0
    counted = make_plan(aggregates=(UNITS,))  # unless their count is published
    states = states_of(counted, [0])
    states.round[0] = 1
    aggregate(counted, states, *batch_of(counted, [(1, 0, 0, {})]), None)
    assert states.units[0] == 1


def test_no_units_are_kept_for_a_list_of_keys() -> None:
    plan = make_plan(public="fixed list")
    states = states_of(plan, [0])
    update = aggregate(plan, states, *batch_of(plan, [(1, 0, 0, {}), (2, 0, 0, {})]), None)
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
    update = aggregate(plan, states, *batch, np.array([100, 10, 1]))
    assert states.units[:2].tolist() == [2, 1]
    assert states.values[:2].tolist() == [[3, 13, 101], [1, -2, 10]]
    assert len(update.pair_slots) == len(update.pair_units) == 0 == states.pairs.size


def test_a_unit_counts_with_the_weight_of_its_first_pair() -> None:
    plan = make_plan(weights=SelectionWeights(), skip=False)
    states = states_of(plan, [0, 5])
    rows: list[Pair] = [(1, 0, 2, {}), (1, 0, 1, {}), (2, 0, 0, {}), (1, 5, 2, {})]
    aggregate(plan, states, *batch_of(plan, rows), np.array([100, 10, 1]))
    assert states.values[:2].tolist() == [[3, 110], [1, 1]]


def test_touched_slots_are_ascending() -> None:
    assert distinct(np.array([4, 1, 4, 0]), 6).tolist() == [0, 1, 4]
    assert distinct(np.zeros(0, np.int64), 3).tolist() == []
