"""The best selection of keys where a unit has one, against its recursion in 60 digits."""

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest

from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.optimum import SelectionOptimum, selection_optimum
from dpstream.accounting.mechanisms.truncation import truncation

SETTINGS = [
    (1.0, 1e-5), (math.log(3), 1e-9), (6.0, 1e-9), (0.1, 1e-6), (1.0, 0.3), (0.5, 0.95),
    (700.0, 1e-300), (2.0, 1e-12),
]  # fmt: skip
#: Far above the rounding of 60 digits.
ROUNDING = mpmath.mpf(10) ** -50


def recursion(epsilon: float, delta: float) -> list[mpmath.mpf]:
    """p_0 .. p_N = 1, from the paper."""
    grown, d = mpmath.exp(mpmath.mpf(epsilon)), mpmath.mpf(delta)
    chances = [mpmath.mpf(0)]
    while chances[-1] < 1:
        p = chances[-1]
        chances.append(min(grown * p + d, 1 - (1 - p - d) / grown, mpmath.mpf(1)))
    return chances


def mine(optimum: SelectionOptimum, count: int) -> mpmath.mpf:
    with precision(3000):
        return mpmath.mpf(optimum.chance(count).mid().str(800, radius=False))


def excess(chances: list[mpmath.mpf], epsilon: float) -> mpmath.mpf:
    """The least delta of one more unit, in both directions."""
    grown, worst = mpmath.exp(mpmath.mpf(epsilon)), mpmath.mpf(0)
    for a, b in itertools.pairwise(chances):
        for p, q in ((a, b), (b, a)):
            gone = max(p - grown * q, 0) + max((1 - p) - grown * (1 - q), 0)
            worst = max(worst, gone)
    return worst


@pytest.mark.parametrize(("epsilon", "delta"), SETTINGS)
def test_chances_are_those_of_the_recursion_and_use_all_of_delta(
    epsilon: float, delta: float
) -> None:
    optimum = SelectionOptimum(epsilon, delta)
    with mpmath.workdps(700):
        exact = recursion(epsilon, delta)
        assert len(optimum.edges) == len(exact) - 2
        drawn = [mine(optimum, n) for n in range(len(exact) + 2)]
        for n, chance in enumerate(drawn):
            assert abs(chance - exact[min(n, len(exact) - 1)]) < ROUNDING
        assert optimum.edges.tolist() == [int(p * 2**64) for p in exact[1:-1]]
        assert abs(excess(drawn, epsilon) - mpmath.mpf(delta)) < ROUNDING
        even = next(n for n, p in enumerate(exact) if p >= 0.5)
        assert optimum.even == even


TWINS: dict[str, Callable[[list[mpmath.mpf]], list[mpmath.mpf]]] = {
    "a count is one too high": lambda chances: [mpmath.mpf(0), *chances[2:]],
    "a chance grows by a hundredth": lambda chances: [min(p * 1.01, 1) for p in chances],
    "a key without a unit may be shown": lambda chances: chances[1:],
}


@pytest.mark.parametrize("twin", TWINS)
def test_larger_chances_are_not_private(twin: str) -> None:
    with mpmath.workdps(60):
        changed = TWINS[twin](recursion(1.0, 1e-5))
        if twin == "a key without a unit may be shown":  # which keys there are would be told
            assert changed[0] > 0
        else:
            assert excess(changed, 1.0) > mpmath.mpf(1.005e-5)


@pytest.mark.parametrize(("epsilon", "delta"), SETTINGS[:4])
def test_a_count_costs_the_rounding_of_k_and_no_more(epsilon: float, delta: float) -> None:
    optimum, k = SelectionOptimum(epsilon, delta), truncation(1 / epsilon, delta, 1).most
    with mpmath.workdps(60):
        weight = {z: mpmath.exp(-abs(z) * mpmath.mpf(epsilon)) for z in range(-k, k + 1)}
        total = mpmath.fsum(weight.values())
        for n in range(2 * k + 3):
            released = mpmath.fsum(w for z, w in weight.items() if n + z > k) / total
            assert released <= mine(optimum, n) + ROUNDING


def test_a_uniform_at_a_chance_is_settled_by_its_further_bits() -> None:
    for epsilon, delta in SETTINGS[:4]:
        optimum = SelectionOptimum(epsilon, delta)
        with mpmath.workdps(140):
            exact = recursion(epsilon, delta)
            for n in (1, optimum.even, len(exact) - 2):
                edge = int(exact[n] * mpmath.mpf(2) ** 320)
                for value, least in ((edge - 2**40, n), (edge + 2**40, n + 1)):
                    calls = optimum.settle(lambda k, v=value: (v >> (256 - 128 * k), 64 + 128 * k))  # type: ignore[misc]
                    assert calls == least


def test_many_chances_are_not_listed() -> None:
    assert selection_optimum(1e-6, 1e-9) is None
    several = selection_optimum(1e-3, 1e-9)
    assert several is not None and np.all(np.diff(several.edges.astype(np.float64)) >= 0)
