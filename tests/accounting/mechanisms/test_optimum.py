"""The best selection of keys where a unit has one, against its recursion in 60 digits."""

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import mpmath
import numpy as np
import pytest

from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms import optimum as module
from dpstream.accounting.mechanisms.laws import TruncatedGeometricLaw
from dpstream.accounting.mechanisms.optimum import SelectionOptimum, selection_optimum, truncation

Outcomes = dict[int | None, mpmath.mpf]
#: Far above the rounding of 60 digits, far below any chance that matters.
ROUNDING = mpmath.mpf(10) ** -50
TRUNCATION_SETTINGS = [
    (epsilon, delta, kappa)
    for epsilon in (0.1, 1.0, math.log(3), 6.0)
    for delta in (1e-15, 1e-9, 1e-5, 0.3, 0.9)
    for kappa in (1, 2, 32)
]


def masses(scale: float, most: int) -> dict[int, mpmath.mpf]:
    """The law of the noise, term by term."""
    weight = {z: mpmath.exp(-abs(z) / mpmath.mpf(scale)) for z in range(-most, most + 1)}
    total = mpmath.fsum(weight.values())
    return {z: w / total for z, w in weight.items()}


def published_law(count: int, noise: dict[int, mpmath.mpf], least: int) -> Outcomes:
    """The count with noise where that is at least ``least``, else ``None``.

    A key without a unit is not known, and never shown.
    """
    if count == 0:
        return {None: mpmath.mpf(1)}
    out: Outcomes = {None: mpmath.mpf(0)}
    for z, chance in noise.items():
        if count + z >= least:
            out[count + z] = chance
        else:
            out[None] += chance
    return out


def mixed(
    count: int,
    less: dict[int, mpmath.mpf],
    noise: dict[int, mpmath.mpf],
    k: int,
    chance: mpmath.mpf,
) -> Outcomes:
    """By a coin k - 1 or k, of which nothing is told."""
    out: Outcomes = {}
    for part, one in (
        (chance, published_law(count, less, k)),
        (1 - chance, published_law(count, noise, k + 1)),
    ):
        for outcome, p in one.items():
            out[outcome] = out.get(outcome, mpmath.mpf(0)) + part * p
    return out


def excess_of_truncation(one: Outcomes, other: Outcomes, epsilon: mpmath.mpf) -> mpmath.mpf:
    """The least delta of one against the other at an epsilon."""
    grown = mpmath.exp(epsilon)
    return mpmath.fsum(max(mpmath.mpf(0), p - grown * other.get(o, 0)) for o, p in one.items())


def worst(outcome: Callable[[int], Outcomes], counts: int, epsilon: mpmath.mpf) -> mpmath.mpf:
    """The least delta of neighbouring counts 0 .. counts, in both directions."""
    each = [outcome(n) for n in range(counts + 1)]
    pairs = itertools.pairwise(each)
    return max(
        max(excess_of_truncation(a, b, epsilon), excess_of_truncation(b, a, epsilon))
        for a, b in pairs
    )


@pytest.mark.parametrize(("epsilon", "delta", "kappa"), TRUNCATION_SETTINGS)
def test_k_is_the_least_that_holds(epsilon: float, delta: float, kappa: int) -> None:
    scale = kappa / epsilon
    k, coin = truncation(scale, delta, kappa)
    with mpmath.workdps(60):
        limit = mpmath.mpf(delta) / kappa
        assert masses(scale, k)[k] <= limit < masses(scale, k - 1)[k - 1]
        b = 1 / mpmath.mpf(scale)
        grown = mpmath.exp(b)
        formula = mpmath.log((grown + 2 * limit - 1) / ((grown + 1) * limit)) / b
        assert k == int(mpmath.ceil(formula))
        less, last = masses(scale, k - 1)[k - 1], masses(scale, k)[k]
        step = mpmath.mpf(2) ** -32
        assert coin * step * less + (1 - coin * step) * last <= limit
        if k > 1:
            assert (coin + 1) * step * less + (1 - (coin + 1) * step) * last > limit
        else:
            assert coin == 0


@pytest.mark.parametrize("delta", [1e-30, 1e-80, 1e-300])
@pytest.mark.parametrize(("scale", "groups"), [(1.0, 1), (3.0, 3), (4.096e9, 4_096)])
def test_a_tiny_delta_has_a_truncation_too(delta: float, scale: float, groups: int) -> None:
    k = truncation(scale, delta, groups).most
    with mpmath.workdps(400):
        q, limit = mpmath.exp(-1 / mpmath.mpf(scale)), mpmath.mpf(delta) / groups
        last = [q**j * (1 - q) / (1 + q - 2 * q ** (j + 1)) for j in (k, k - 1)]
        assert last[0] <= limit < last[1]


@pytest.mark.parametrize(
    ("scale", "delta"), [(1.0, 1e-3), (2.5, 1e-4), (0.3, 1e-6), (4.0, 0.05), (1.0, 0.5)]
)
def test_one_key_is_private_at_every_count_and_its_twins_are_not(
    scale: float, delta: float
) -> None:
    k, coin = truncation(scale, delta, 1)
    with mpmath.workdps(60):
        epsilon, counts, d = 1 / mpmath.mpf(scale), 2 * k + 2, mpmath.mpf(delta)
        noise = masses(scale, k)
        drawn = worst(lambda n: published_law(n, noise, k + 1), counts, epsilon)
        assert abs(drawn - noise[k]) < ROUNDING and drawn <= d
        assert max(noise) <= k  # so that a key without a unit would not be shown if it were known
        for m in (2, 3):  # a count that is shown has m units
            assert worst(lambda n, m=m: published_law(n, noise, k + m), counts + m, epsilon) <= d  # type: ignore[misc]
            assert max(noise) + m - 1 < k + m
        # With the coin, told or not, it is d and hardly less; a coin of a tenth more is too much.
        less, chance = masses(scale, k - 1), mpmath.mpf(coin) / 2**32
        with_coin = worst(lambda n: mixed(n, less, noise, k, chance), counts, epsilon)
        loss_with_coin = (
            chance * worst(lambda n: published_law(n, less, k), counts, epsilon)
            + (1 - chance) * drawn
        )
        assert with_coin <= loss_with_coin + ROUNDING and loss_with_coin <= d
        assert k == 1 or loss_with_coin > d * (1 - mpmath.mpf(10) ** -5)
        more = (chance * 11 + 1) / 10
        assert k == 1 or worst(lambda n: mixed(n, less, noise, k, more), counts, epsilon) > d
        plain = masses(scale, k + 150 * math.ceil(scale))
        twins: dict[str, Callable[[int], Outcomes]] = {
            "k - 1": lambda n: published_law(n, less, k),
            "at least k": lambda n: published_law(n, noise, k),
        }
        for twin in twins.values():
            assert worst(twin, counts, epsilon) > d
        # Without truncation delta is the whole tail, P[Z >= k].
        untruncated = worst(lambda n: published_law(n, plain, k + 1), counts, epsilon)
        assert untruncated > drawn + ROUNDING
        # A remembered key is shown whatever it counts, and has no delta: truncated noise tells.
        tells = worst(lambda n: {n + z: p for z, p in noise.items()}, 2, epsilon)
        share = worst(lambda n: {n + z: p for z, p in plain.items()}, 2, epsilon)
        assert tells > drawn - ROUNDING and share < ROUNDING


def test_noise_that_is_not_truncated_needs_a_larger_threshold() -> None:
    """Where P[Z = k] nearly is d, the tail of plain noise is above it."""
    with mpmath.workdps(60):
        d = masses(2.0, 9)[9] * (1 + mpmath.mpf(10) ** -9)
        assert truncation(2.0, float(d), 1).most == 9
        plain = masses(2.0, 400)
        assert worst(lambda n: published_law(n, plain, 10), 20, mpmath.mpf(1) / 2) > 2 * d
        assert worst(lambda n: published_law(n, plain, 12), 20, mpmath.mpf(1) / 2) < d


def test_keys_of_one_unit_compose() -> None:
    """Two keys, one unit in both or in one, and another in the first: all outcomes at once."""
    epsilon, delta, kappa = 2.0, 0.02, 2
    k = truncation(kappa / epsilon, delta, kappa).most
    with mpmath.workdps(40):
        noise = masses(kappa / epsilon, k)
        for before, after in (((0, 0), (1, 1)), ((1, 0), (2, 1)), ((3, 2), (4, 3))):
            joint = []
            for counts in (before, after):
                first, second = (published_law(n, noise, k + 1) for n in counts)
                joint.append({
                    (a, b): p * q for a, p in first.items() for b, q in second.items()
                })  # fmt: skip
            for one, other in (joint, joint[::-1]):
                grown = mpmath.exp(mpmath.mpf(epsilon))
                excesses = (p - grown * other.get(o, 0) for o, p in one.items())
                assert mpmath.fsum(max(e, mpmath.mpf(0)) for e in excesses) <= delta
            # Half of the budget would not be enough: the bound is nearly reached at 0 and 1.
        lone = [published_law(n, noise, k + 1) for n in (0, 1)]
        assert 2 * excess_of_truncation(lone[1], lone[0], mpmath.mpf(1)) > 0.9 * delta / math.e


@pytest.mark.parametrize(("scale", "delta"), [(1.0, 1e-3), (2.5, 1e-4), (4.0, 0.05)])
def test_no_selection_shows_a_key_more_often(scale: float, delta: float) -> None:
    """The largest chances that (b, d) allows, by induction over counts (theorem 1 of the paper):
    reached where k needs no rounding, and with the coin while chances grow."""
    k, coin = truncation(scale, delta, 1)
    with mpmath.workdps(60):
        b, noise, less = 1 / mpmath.mpf(scale), masses(scale, k), masses(scale, k - 1)
        for d, c in ((noise[k], mpmath.mpf(0)), (mpmath.mpf(delta), mpmath.mpf(coin) / 2**32)):
            chance = mpmath.mpf(0)
            for n in range(1, 2 * k + 3):
                grown = mpmath.exp(b) * chance + d
                chance = min(grown, 1 - mpmath.exp(-b) * (1 - chance - d), mpmath.mpf(1))
                mine = 1 - mixed(n, less, noise, k, c)[None]
                assert mine <= chance + ROUNDING
                if c == 0 or n <= k - 1:
                    assert mine > chance * (1 - mpmath.mpf(10) ** -6)


def test_the_law_is_the_one_that_is_proven() -> None:
    for scale, most in ((0.3, 1), (1.0, 7), (4.0, 12)):
        with precision(256), mpmath.workdps(60):
            tails = list(itertools.islice(TruncatedGeometricLaw(scale, most).lower(), most + 2))
            exact = masses(scale, most)
            for j, ball in enumerate(tails, 1):
                wanted = mpmath.fsum(p for z, p in exact.items() if z <= -j)
                middle = mpmath.mpf(ball.mid().str(55, radius=False))
                assert abs(middle - wanted) < ROUNDING and float(ball.rad()) < 1e-60


def test_a_precision_that_decides_nothing_is_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 bits on, the numbers are those of 192."""
    expected, used = module.truncation(3.7, 1e-9, 5), list[int]()

    def listening(bits: int) -> AbstractContextManager[object]:
        used.append(bits)
        assert len(used) < 20
        return precision(bits)

    monkeypatch.setattr(module, "_TRUNCATION_PRECISION", 2)
    monkeypatch.setattr(module, "precision", listening)
    assert module.truncation(3.7, 1e-9, 5) == expected
    assert len(used) > 2 and used == [2 << at for at in range(len(used))]


SETTINGS = [
    (1.0, 1e-5), (math.log(3), 1e-9), (6.0, 1e-9), (0.1, 1e-6), (1.0, 0.3), (0.5, 0.95),
    (700.0, 1e-300), (2.0, 1e-12), (300.0, 1e-9), (1000.0, 1e-9), (600.0, 1e-60),
]  # fmt: skip


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
