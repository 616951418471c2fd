"""The tree strategy against dense matrices and exact fractions, for every T up to 130.

Whole-number rows, their exact decoder, and the proof of plain epsilon by enumeration.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.limits import DECODE_BITS, MAX_GEOMETRIC_TRIGGERS
from dpstream.accounting.strategies import TreeStrategy, make_strategy
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from dpstream.accounting.strategies.kernels import fold_tree
from tests.accounting.strategies.dense import fold

TOP = 130
EVERY_T = range(1, TOP + 1)
SCALE = 1 << DECODE_BITS


def oracle_nodes(triggers: int) -> list[tuple[int, int]]:
    """(level, first leaf) of every complete node, by completion, small levels first."""
    nodes = [
        (first + (1 << level) - 1, level, first)
        for level in range(triggers.bit_length())
        for first in range(1, triggers + 1, 1 << level)
        if first + (1 << level) - 1 <= triggers
    ]
    return [(level, first) for _, level, first in sorted(nodes)]


def oracle_matrix(triggers: int) -> np.ndarray:
    rows = np.zeros((len(oracle_nodes(triggers)), triggers), np.int64)
    for row, (level, first) in zip(rows, oracle_nodes(triggers), strict=True):
        row[first - 1 : first - 1 + (1 << level)] = 1
    return rows


def blocks(t: int) -> list[tuple[int, int]]:
    """(level, first leaf) of the dyadic blocks of 1..t, largest first."""
    nodes, first = [], 1
    for level in reversed(range(t.bit_length())):
        if (t >> level) & 1:
            nodes.append((level, first))
            first += 1 << level
    return nodes


def honaker(level: int, first: int) -> dict[tuple[int, int], Fraction]:
    """Weights of the paper's bottom-up estimate of one node, c_j on each node j levels down."""
    total = sum(Fraction(1, 2**j) for j in range(level + 1))
    return {
        (level - j, first + i * 2 ** (level - j)): Fraction(1, 2**j) / total
        for j in range(level + 1)
        for i in range(2**j)
    }


@pytest.mark.parametrize("triggers", EVERY_T)
def test_matrix_and_column_norm(triggers: int) -> None:
    strategy = TreeStrategy(triggers)
    dense = oracle_matrix(triggers)
    assert np.array_equal(strategy.matrix(), dense)
    assert strategy.col2 == int((dense**2).sum(axis=0).max()) == triggers.bit_length()
    complete = [int(strategy.nodes_through(t)) for t in range(triggers + 1)]
    ends = [first + (1 << level) - 1 for level, first in oracle_nodes(triggers)]
    assert complete == [sum(end <= t for end in ends) for t in range(triggers + 1)]
    assert np.array_equal(strategy.nodes_through(np.arange(triggers + 1)), complete)


def test_sd_is_honakers() -> None:
    exact = [
        float(sum(w**2 for block in blocks(t) for w in honaker(*block).values()))
        for t in range(1, TOP + 1)
    ]
    for triggers in EVERY_T:
        sd = TreeStrategy(triggers).sd_factors
        assert sd.shape == (triggers,)
        assert np.allclose(sd, np.sqrt(exact[:triggers]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("level", range(6))
def test_honaker_is_the_best_linear_estimate(level: int) -> None:
    """Unbiased, and of least variance among all linear maps of the subtree's nodes."""
    size = 1 << level
    dense = oracle_matrix(size).astype(float)
    weights = honaker(level, 1)
    row = np.array([float(weights[node]) for node in oracle_nodes(size)])
    assert np.allclose(row @ dense, np.ones(size))
    assert np.allclose(np.ones(size) @ np.linalg.pinv(dense), row)


def exact_noise(noise: np.ndarray, inputs: np.ndarray) -> list[int]:
    """2^D n_t from the noisy nodes y = A x + z in fractions, minus 2^D prefix."""
    nodes = oracle_nodes(len(inputs))
    noisy = dict(zip(nodes, oracle_matrix(len(inputs)) @ inputs + noise, strict=True))
    result = []
    for t in range(1, len(inputs) + 1):
        estimates = (
            sum(w * int(noisy[node]) for node, w in honaker(*block).items()) for block in blocks(t)
        )
        released = sum(round(SCALE * estimate) for estimate in estimates)
        result.append(released - SCALE * int(inputs[:t].sum()))
    return result


def run_fold(noise: np.ndarray, triggers: int, ends: tuple[int, ...], width: int) -> list[int]:
    """n_t of one row, folded in pieces that end at ``ends``."""
    strategy = TreeStrategy(triggers)
    stack = np.zeros((1, strategy.levels), np.int64)
    step_index, prefixes = 0, []
    for end in (*ends, triggers):
        out = np.zeros((1, width), np.int64)
        start = np.array([strategy.nodes_through(step_index)], np.int64)
        fold_tree(noise, start, np.array([step_index]), np.array([end]), stack, out)
        prefixes += out[0, : end - step_index].tolist()
        step_index = end
    return prefixes


def test_fold_equals_exact_decoding_for_every_t() -> None:
    rng = np.random.default_rng(3)
    noise = rng.integers(-60_000, 60_000, int(TreeStrategy(TOP).nodes_through(TOP))).astype(
        np.int32
    )
    expected = exact_noise(noise, rng.integers(-(10**9), 10**9, TOP))
    for triggers in EVERY_T:
        assert run_fold(noise, triggers, (), TOP) == expected[:triggers]


@pytest.mark.parametrize("triggers", [1, 2, 3, 7, 8, 9, 64, 100, 127, 128, 129])
def test_fold_resumes_anywhere(triggers: int) -> None:
    rng = np.random.default_rng(triggers)
    nodes = int(TreeStrategy(triggers).nodes_through(triggers))
    noise = rng.integers(-500, 500, nodes).astype(np.int32)
    prefixes = run_fold(noise, triggers, (), triggers + 1)
    assert run_fold(noise, triggers, tuple(range(1, triggers)), 1) == prefixes
    ends = tuple(sorted(set(rng.integers(1, triggers + 1, 3).tolist()) - {triggers}))
    assert run_fold(noise, triggers, ends, triggers + 1) == prefixes
    last_only = run_fold(noise, triggers, (), 1)
    assert last_only == prefixes[-1:]


def test_fold_keeps_rows_apart() -> None:
    rng = np.random.default_rng(5)
    strategy = TreeStrategy(20)
    step_index, upto = np.array([0, 0, 0]), np.array([20, 5, 13])
    sizes = strategy.nodes_through(upto)
    noise = rng.integers(-99, 99, int(sizes.sum())).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    stack, out = np.zeros((3, strategy.levels), np.int64), np.zeros((3, 20), np.int64)
    fold_tree(noise, starts, step_index, upto, stack, out)
    for row in range(3):
        alone = noise[starts[row] : starts[row] + sizes[row]]
        assert out[row, : upto[row]].tolist() == run_fold(alone, int(upto[row]), (), 21)


def test_rounding_bound_holds_and_is_tight() -> None:
    """D_t against nodes whose rounding error is the worst, +-1/2 at every node."""
    rng = np.random.default_rng(7)
    nodes = oracle_nodes(TOP)
    bound = TreeStrategy(TOP).rounding
    worst = np.zeros(TOP)
    for sign in (Fraction(1, 2), Fraction(-1, 2)):
        noise = rng.integers(-400, 400, len(nodes))
        decoded = exact_noise(noise, np.zeros(TOP, np.int64))
        ideal = {n: int(z) - sign for n, z in zip(nodes, noise, strict=True)}
        for t in range(1, TOP + 1):
            value = sum(w * ideal[n] for b in blocks(t) for n, w in honaker(*b).items())
            error = abs(Fraction(decoded[t - 1], SCALE) - value)
            assert error <= Fraction(float(bound[t - 1]))
            worst[t - 1] = max(worst[t - 1], float(error))
    assert np.all(bound - worst < 0.03)


def test_variance_by_simulation_and_sabotage() -> None:
    """20,000 paths: sd within 2.5% of sd_factors, which rejects a noise 10% off."""
    triggers, sigma, paths = 100, 30.0, 20_000
    strategy = TreeStrategy(triggers)
    nodes = int(strategy.nodes_through(triggers))
    rng = np.random.default_rng(11)
    noise = np.rint(rng.normal(0, sigma, paths * nodes)).astype(np.int32)
    out = np.zeros((paths, triggers), np.int64)
    zeros = np.zeros(paths, np.int64)
    stack = np.zeros((paths, strategy.levels), np.int64)
    fold_tree(noise, np.arange(paths) * nodes, zeros, zeros + triggers, stack, out)
    ratio = (out / SCALE).std(axis=0) / (sigma * strategy.sd_factors)
    assert np.all(np.abs(ratio - 1) < 0.025)
    assert np.all(np.abs(1.1 * ratio - 1) > 0.025)


def test_names_and_refusals() -> None:
    assert isinstance(make_strategy("tree", 3), TreeStrategy)
    with pytest.raises(ValueError, match="unknown"):
        make_strategy("other", 3)
    with pytest.raises(ValueError, match="at least one"):
        TreeStrategy(0)


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
    with pytest.raises(ValueError, match="fewer"):
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
