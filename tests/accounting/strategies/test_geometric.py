"""Whole-number rows, their exact decoder, and the proof of plain epsilon by enumeration."""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.limits import DECODE_BITS, MAX_GEOMETRIC_TRIGGERS
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from tests.accounting.strategies.dense import fold

Matrix = list[list[Fraction]]
Path = tuple[int, ...]
#: Chooses the input of a step by the outputs before it.
Adversary = Callable[[Path], int]


def exact_decoder(strategy: GeometricStrategy) -> Matrix:
    """(T, nodes) B in fractions, written from the docstring and not from the product's decoder."""
    size = strategy.triggers
    numbers = strategy.parameters.tolist()
    width = int(numbers[0])
    alone = numbers[1 : 1 + size] or [1.0] * size
    rows = [numbers[1 + size + k * size :][:size] for k in range(width)]
    rest = numbers[1 + size + width * size :]
    weights = [rest[t * width :][:width] for t in range(size)]
    decoder = []
    for t in range(size):
        first = [
            (int(j <= t) - sum(Fraction(weights[t][k]) * int(rows[k][j]) for k in range(width)))
            / Fraction(alone[j])
            for j in range(size)
        ]
        decoder.append([*first, *(Fraction(weight) for weight in weights[t])])
    return decoder


@pytest.mark.parametrize("triggers", [1, 3, 8, 40])
def test_decoder_inverts_the_encoder_exactly(triggers: int) -> None:
    """B A = M to the last bit: what is published is a function of y."""
    strategy = GeometricStrategy(triggers)
    decoder, matrix = exact_decoder(strategy), strategy.matrix()
    for t, row in enumerate(decoder):
        for j in range(triggers):
            entries = zip(row, matrix[:, j].tolist(), strict=True)
            assert sum(weight * entry for weight, entry in entries) == int(j <= t)
    assert strategy.column1 == int(np.abs(matrix).sum(axis=0).max())


@pytest.mark.parametrize("triggers", [3, 16, 100])
def test_prefixes_are_rounded_exactly(triggers: int) -> None:
    strategy = GeometricStrategy(triggers)
    decoder = exact_decoder(strategy)
    nodes = len(decoder[0])
    rng = np.random.default_rng(triggers)
    for size in (10, 10**6, 2**45):
        noise = rng.integers(-size, size, (3, nodes))
        up = Fraction(1, 2) + Fraction(1, 3 << 12)
        expected = [
            [
                math.floor(
                    (1 << DECODE_BITS) * sum(b * z for b, z in zip(row, path, strict=True)) + up
                )
                for row in decoder
            ]
            for path in noise.tolist()
        ]
        assert fold(strategy, noise).tolist() == expected


@pytest.mark.parametrize(("triggers", "most"), [(1, 1.42), (16, 3.62), (100, 5.93), (1000, 9.6)])
def test_error_for_plain_epsilon(triggers: int, most: float) -> None:
    """Mean sd of the prefixes in units of C L / epsilon, of noise that is not coarse."""
    strategy = GeometricStrategy(triggers)
    assert math.sqrt(2) * strategy.column1 * float(strategy.sd_factors.mean()) <= most


def test_refusals() -> None:
    with pytest.raises(ValueError, match="too many"):
        GeometricStrategy(MAX_GEOMETRIC_TRIGGERS + 1)
    good = GeometricStrategy(16).parameters
    for broken in ([], [1.0], [-1.0], good[:-1], good * 1.5, np.where(good == good[1], 0.0, good)):
        with pytest.raises(ValueError, match="strategy"):
            GeometricStrategy(16, np.array(broken))
    assert GeometricStrategy(4, IDENTITY).column1 == 1


# --- the proof, enumerated -------------------------------------------------------------------


def small(alone: list[int], rows: list[list[int]], weights: list[list[float]]) -> GeometricStrategy:
    """A strategy of few small rows, so that sums over noise can be enumerated."""
    parts = [[len(rows)], alone, *rows, *weights]
    numbers = np.concatenate([np.array(part, np.float64) for part in parts])
    return GeometricStrategy(len(alone), numbers)


#: Rows that end in the future of every step but the last.
FORWARD = small([1, 1, 1], [[1, 1, 1]], [[0.25], [0.5], [0.75]])
PAIRS = small([1, 2], [[1, 0], [1, 1]], [[0.0, 0.5], [0.25, 0.5]])


def law_of_noise(strategy: GeometricStrategy, scale: float, reach: int) -> dict[Path, float]:
    """Chance of each path of decoded noise, z cut off at ``reach``; from the dense decoder."""
    nodes = np.array(
        list(itertools.product(range(-reach, reach + 1), repeat=len(strategy.matrix())))
    )
    ratio = math.exp(-1 / scale)
    chances = ((1 - ratio) / (1 + ratio)) ** nodes.shape[1] * ratio ** np.abs(nodes).sum(axis=1)
    law: dict[Path, float] = {}
    for path, chance in zip(
        map(tuple, fold(strategy, nodes).tolist()), chances.tolist(), strict=True
    ):
        law[path] = law.get(path, 0.0) + chance
    return law


def adversaries() -> Iterator[Adversary]:
    """Inputs that stand still, alternate, or follow sign and parity of what was published."""
    yield lambda before: 1
    yield lambda before: len(before) % 2
    yield lambda before: int(bool(before) and before[-1] > 0)
    yield lambda before: sum(before) // (1 << DECODE_BITS) % 2


def worst_ratio(
    law: dict[Path, float], steps: int, bound: int, adversary: Adversary, inner: set[Path]
) -> float:
    """The largest |ln P'[o] / P[o]| over paths o and over what a unit of C records adds, where the
    adversary chooses other records, and when the unit's come, by the outputs before."""
    worst = 0.0
    for adds in itertools.product(range(bound + 1), repeat=steps):
        if sum(adds) > bound:
            continue
        for path in inner:
            # With the noise path n the output is n + M x(o) on D and n + M (x(o) + v(o)) on D'.
            moved, output, total, extra = list[int](), list[int](), 0, 0
            for t in range(steps):
                chosen = adversary(tuple(output))
                total += chosen
                output.append(path[t] + (total << DECODE_BITS))
                # The unit's records come at this step only if the adversary says so.
                extra += adds[t] if t == 0 or chosen else 0
                moved.append(path[t] - (extra << DECODE_BITS))
            with_unit = law.get(tuple(moved))
            if with_unit is not None:
                worst = max(worst, abs(math.log(with_unit / law[path])))
    return worst


def middle(law: dict[Path, float], strategy: GeometricStrategy, reach: int) -> set[Path]:
    """Paths of small nodes, far from where the enumeration is cut off."""
    count = len(strategy.matrix())
    nodes = np.array(list(itertools.product(range(-1, 2), repeat=count)))
    return set(map(tuple, fold(strategy, nodes).tolist()))


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("strategy", [FORWARD, PAIRS], ids=["forward", "pairs"])
def test_every_path_keeps_epsilon(strategy: GeometricStrategy, bound: int) -> None:
    """Exact on every path, whatever chose the inputs, and reached."""
    epsilon, reach = 2.0, 9
    law = law_of_noise(strategy, bound * strategy.column1 / epsilon, reach)
    inner = middle(law, strategy, reach)
    steps = strategy.triggers
    ratios = [worst_ratio(law, steps, bound, adversary, inner) for adversary in adversaries()]
    # What is cut off changes a chance by less than this.
    assert max(ratios) <= epsilon + 1e-3
    assert max(ratios) >= 0.6 * epsilon


def test_sensitivity_in_l2_or_before_rounding_is_caught() -> None:
    """Sabotage: a column's L2 norm, or that of the rows before they were rounded up."""
    epsilon, reach = 2.0, 9
    for sensitivity in (math.sqrt(PAIRS.col2), 0.7 * PAIRS.column1):
        law = law_of_noise(PAIRS, sensitivity / epsilon, reach)
        inner = middle(law, PAIRS, reach)
        assert max(worst_ratio(law, 2, 1, a, inner) for a in adversaries()) > epsilon + 1e-3
