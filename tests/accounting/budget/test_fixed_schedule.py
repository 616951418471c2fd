"""Schedules that are fixed beforehand, against all outcomes of randomised response."""

import itertools
import math

import pytest

from dpstream.accounting.budget.fixed_schedule import delta_of_responses, epsilon_of_responses


def enumerated(epsilon: float, each: float, count: int) -> float:
    """Delta of so many responses, over all 2^count outcomes."""
    keep = math.exp(each) / (1 + math.exp(each))
    total = 0.0
    for flips in itertools.product((0, 1), repeat=count):
        own = math.prod(1 - keep if flip else keep for flip in flips)
        other = math.prod(keep if flip else 1 - keep for flip in flips)
        total += max(0.0, own - math.exp(epsilon) * other)
    return total


@pytest.mark.parametrize("each", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_delta_is_that_of_all_outcomes(each: float, count: int) -> None:
    for part in (0.0, 0.3, 0.7, 0.99):
        exact = enumerated(part * count * each, each, count)
        bound = delta_of_responses(part * count * each, each, count)
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-8) + 1e-15


def test_epsilon_at_a_delta() -> None:
    assert epsilon_of_responses(0.0, 2.0, 91) == 182
    for delta in (1e-9, 1e-6):
        for each, count in ((2.0, 91), (1.0, 182), (0.1, 1000)):
            epsilon = epsilon_of_responses(delta, each, count)
            assert delta_of_responses(epsilon, each, count) <= delta < 1
            assert delta_of_responses(epsilon * (1 - 1e-9), each, count) > delta
    # 91 months of epsilon 2: one record a month, and two on two keys, each of which pays 1.
    assert epsilon_of_responses(4e-6, 2.0, 91) == pytest.approx(181, abs=0.6)
    assert epsilon_of_responses(4e-6, 1.0, 182) == pytest.approx(133, abs=0.6)
    assert epsilon_of_responses(1.0, 1.0, 3) == 0
