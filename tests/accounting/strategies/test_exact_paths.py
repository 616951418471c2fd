"""Streams of four triggers with two-sided geometric noise, enumerated in whole numbers.

With e^(-1 / scale) = 1/2 a node's noise z has chance 2^-|z| / 3, and all chances are fractions:

- of a path of published prefixes, an endless sum over the noises that decode to it, in closed form;
- of what a tested key shows, by dynamic programming over its prefix's noise, cut off where all that
  is lost together is counted as excess.

The adversary chooses the records of others, and when the unit's come, by the outputs before.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.budget.key_tests import plain_thresholds
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from tests.accounting.strategies.dense import SCALE, fold

T = 4
Path = tuple[int, ...]

# --- published prefixes ------------------------------------------------------------------------


class Mixed:
    """A strategy of one mixed row, and the noises that decode to zero.

    These are the multiples of one vector ``none``: u_t = -(W_t - W_(t-1)) r and z' = r + P u.
    """

    def __init__(self, alone: Sequence[int], row: Sequence[int], weights: Sequence[float]) -> None:
        numbers = np.array([1, *alone, *row, *weights], np.float64)
        self.strategy = GeometricStrategy(T, numbers)
        moves = [Fraction(b) - Fraction(a) for a, b in itertools.pairwise((0.0, *weights))]
        nodes = [-s * w for s, w in zip(alone, moves, strict=True)]
        nodes.append(1 - sum((p * w for p, w in zip(row, moves, strict=True)), Fraction()))
        least = math.lcm(*(node.denominator for node in nodes))
        integers = [int(node * least) for node in nodes]
        self.none = np.array(integers) // math.gcd(*integers)
        self.chance = functools.lru_cache(maxsize=None)(self._chance)

    def _chance(self, noise: Path) -> Fraction:
        """3^nodes times the chance of all noises that decode as this one does."""
        none = self.none.tolist()
        turns = [-z / g for z, g in zip(noise, none, strict=True) if g]
        first, last = math.floor(min(turns)), math.ceil(max(turns))
        sizes = [
            sum(abs(z + k * g) for z, g in zip(noise, none, strict=True))
            for k in range(first, last + 1)
        ]
        ratio = Fraction(1, 2 ** sum(map(abs, none)))
        tails = (Fraction(1, 2 ** sizes[0]) + Fraction(1, 2 ** sizes[-1])) * ratio / (1 - ratio)
        return sum((Fraction(1, 2**size) for size in sizes), start=tails)

    def paths(self, reach: int) -> dict[Path, Path]:
        """From each decoded path, in 2^-D, to one of its noises."""
        nodes = np.array(list(itertools.product(range(-reach, reach + 1), repeat=T + 1)))
        nodes = nodes[np.argsort(-np.abs(nodes).max(axis=1), kind="stable")]  # the smallest is last
        decoded = fold(self.strategy, nodes).tolist()
        named = dict(zip(map(tuple, decoded), map(tuple, nodes.tolist()), strict=True))
        # Noises of one path differ by multiples of ``none``, so that a sum has all of them.
        at = int(np.flatnonzero(self.none)[0])
        rest = nodes - np.array([named[tuple(path)] for path in decoded])
        times, left = np.divmod(rest[:, at], self.none[at])
        assert not left.any() and np.array_equal(rest, times[:, None] * self.none)
        return named


FORWARD = Mixed([1, 1, 1, 1], [1, 1, 1, 1], [0.25, 0.5, 0.5, 0.75])
UNEVEN = Mixed([1, 2, 1, 3], [2, 1, 0, 1], [0.0, 0.5, 0.25, 0.5])


@functools.cache
def largest_ratio(mixed: Mixed, bound: int) -> Fraction:
    """Over paths, and over all that a unit of ``bound`` records can add on a path.

    On a path the adversary's choices are fixed: the records of others move both sides alike, and
    the unit's are one of the vectors that are tried.  So no adversary has a larger ratio.
    """
    named, largest = mixed.paths(4), Fraction(0)
    inner = [path for path, noise in named.items() if max(map(abs, noise)) <= 2]
    adds = [v for v in itertools.product(range(bound + 1), repeat=T) if 0 < sum(v) <= bound]
    for path in inner:
        here = mixed.chance(named[path])
        for v in adds:
            moved = tuple(n - SCALE * m for n, m in zip(path, itertools.accumulate(v), strict=True))
            there = named.get(moved)
            if there is not None:
                ratio = here / mixed.chance(there)
                largest = max(largest, ratio, 1 / ratio)
    return largest


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("mixed", [FORWARD, UNEVEN], ids=["forward", "uneven"])
def test_every_path_of_four_steps_keeps_epsilon(mixed: Mixed, bound: int) -> None:
    """At most e^(C a / scale) = 2^(C a), exactly; and some path comes near to it."""
    most = 2 ** (bound * mixed.strategy.column1)
    assert most * Fraction(17, 20) <= largest_ratio(mixed, bound) <= most


def test_a_smaller_sensitivity_does_not_hold_on_four_steps() -> None:
    """Sabotage: one less than the L1 norm of a column, its L2 norm, and the rows that are complete
    when the record comes (without the mixed row, which ends in the future)."""
    complete = max(FORWARD.strategy.matrix()[:T].sum(axis=0))
    for sensitivity in (FORWARD.strategy.column1 - 1, math.sqrt(FORWARD.strategy.col2), complete):
        for bound in (1, 2):
            assert largest_ratio(FORWARD, bound) > 2 ** (bound * float(sensitivity))
    assert largest_ratio(UNEVEN, 2) > 2 ** (2 * (UNEVEN.strategy.column1 - 1))


# --- a key that is tested ------------------------------------------------------------------------

#: Nodes are cut off beyond FAR; 3^T 2^(T FAR) times a chance of the rest is a whole number.
FAR = 24
LAW = [1 << (FAR - abs(z)) for z in range(-FAR, FAR + 1)]
TOTAL = 3 << FAR
Law = dict[int, int]  # from a prefix's noise to TOTAL^t times its chance


def stepped(law: Law) -> Law:
    """One node's noise more."""
    out: Law = {}
    for n, chance in law.items():
        for z, weight in enumerate(LAW, -FAR):
            out[n + z] = out.get(n + z, 0) + chance * weight
    return out


class Key:
    """What the outputs on one key tell of a unit, at worst over all adversaries.

    Args:
        tau: (T,) a key with a unit is selected at t if its noisy count is above tau[t], and from
            then on its noisy count is published.
        scale_up: e^epsilon.
        removed: whether the unit is in the second data set instead of the first.
    """

    def __init__(self, tau: Sequence[int], scale_up: int, removed: bool) -> None:
        self._tau, self._up, self._removed = tau, scale_up, removed

    def excess(self) -> Fraction:
        """The least delta: sum of max(0, P[o] - e^epsilon P'[o]), and all that is cut off."""
        worst = max(self._unselected(0, others, 0, {0: 1}, {0: 1}) for others in (0, 1, 3))
        return Fraction(worst, TOTAL**T) + 1 - Fraction(sum(LAW), TOTAL) ** T

    def _part(self, alone: int, joined: int) -> int:
        """Excess of an outcome, from its chances without and with the unit's record."""
        p, q = (alone, joined) if self._removed else (joined, alone)
        return max(0, p - self._up * q)

    def _unselected(self, t: int, others: int, unit: int, alone: Law, joined: Law) -> int:
        """After t triggers that showed nothing; the adversary chooses what comes for the next."""
        if t == T:
            return self._part(sum(alone.values()), sum(joined.values()))
        alone, joined = stepped(alone), stepped(joined)
        worst = 0
        for more, comes in itertools.product((0, 1, 2), {unit, 1}):
            count = others + more
            hidden = [
                {n: c for n, c in law.items() if not (size > 0 and size + n > self._tau[t])}
                for law, size in ((alone, count), (joined, count + comes))
            ]
            released_laws = [
                {size + n: c for n, c in law.items() if n not in rest}
                for law, size, rest in (
                    (alone, count, hidden[0]), (joined, count + comes, hidden[1]),
                )
            ]  # fmt: skip
            total = self._unselected(t + 1, count, comes, hidden[0], hidden[1])
            for value in released_laws[0].keys() | released_laws[1].keys():
                total += self._published(
                    T - t - 1, comes, released_laws[0].get(value, 0), released_laws[1].get(value, 0)
                )
            worst = max(worst, total)
        return worst

    def _published(self, left: int, unit: int, alone: int, joined: int) -> int:
        """Further outputs are an output that is known, others' records, the unit's and new noise:
        they tell of the unit only by its record, which comes at one of them or never."""
        never = self._part(alone, joined) * int(TOTAL**left)
        if unit or not left:
            return never
        law = dict(enumerate(LAW, -FAR))
        comes = sum(
            self._part(alone * law.get(z, 0), joined * law.get(z - 1, 0))
            for z in range(-FAR, FAR + 1)
        )
        return max(never, comes * int(TOTAL ** (left - 1)))


def whole_thresholds(delta: float, at: Sequence[int]) -> list[int]:
    """The product's thresholds of a noise for each step; noisy counts are whole numbers."""
    strategy, scale = GeometricStrategy(T, IDENTITY), 1 / math.log(2)
    tau = plain_thresholds(strategy, scale, delta, 0, np.array(at)) / SCALE
    return [math.floor(bound) for bound in tau.tolist()]


@pytest.mark.parametrize("delta", [0.1, 1e-3])
def test_a_key_of_four_tests_keeps_epsilon_and_delta(delta: float) -> None:
    """epsilon = 1 / scale = ln 2 and the thresholds' delta, in both directions."""
    tau = whole_thresholds(delta, [1, 2, 3, 4])
    joins, leaves = (Key(tau, 2, removed).excess() for removed in (False, True))
    assert leaves <= joins <= Fraction(delta) < 3 * joins
    # Sabotage: thresholds two lower, or that of the first test for all of them.
    for changed in ([bound - 2 for bound in tau], whole_thresholds(delta, [1]) * T):
        assert Key(changed, 2, removed=False).excess() > Fraction(delta)


def test_a_smaller_epsilon_does_not_hold() -> None:
    """Sabotage: a claim of epsilon = 0, which is that of noise that is much wider."""
    tau = whole_thresholds(0.1, [1, 2, 3, 4])
    assert Key(tau, 1, removed=False).excess() > Fraction(1, 5)
