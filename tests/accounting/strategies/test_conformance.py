"""One suite for every noise strategy: against its own dense matrix, and streaming."""

import itertools
from fractions import Fraction

import flint
import numpy as np
import numpy.typing as npt
import pytest

from dpstream.accounting.limits import DECODE_BITS, MAX_TOEPLITZ_TRIGGERS
from dpstream.accounting.strategies import STRATEGIES, Strategy, convolution, make_strategy
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.accounting.strategies.convolution import ConvolutionStrategy

SCALE = 1 << DECODE_BITS
SIZES = (1, 2, 3, 5, 8, 31, 64, 100)
EVERY = [pytest.param(name, t, id=f"{name}-{t}") for name in STRATEGIES for t in SIZES]
CONVOLUTIONS = ("toeplitz", "blt")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def noise_of(strategy: Strategy, rows: int, sigma: float, seed: int = 0) -> npt.NDArray[np.generic]:
    """(rows, nodes) node noises as the strategy's sampler would give them."""
    nodes = int(strategy.nodes_through(strategy.triggers))
    drawn = np.random.default_rng(seed).normal(0, sigma, (rows, nodes))
    return np.rint(drawn).astype(np.int32) if strategy.rounds_nodes else drawn


def fold(
    strategy: Strategy, noise: npt.NDArray[np.generic], ends: tuple[int, ...] = (), width: int = 0
) -> Ints:
    """(rows, T) n_t * 2^D, folded in pieces that end at ``ends``; open roundings settled."""
    rows, size = len(noise), strategy.triggers
    stack = np.zeros((rows, strategy.state_columns), strategy.state_dtype)

    def exact(row: int, nodes: int) -> ExactNoise:
        return balls(noise[row, :nodes])

    result, begin = np.zeros((rows, size), np.int64), 0
    for end in (*ends, size):
        step_index, upto = np.full(rows, begin), np.full(rows, end)
        first = int(strategy.first_node(step_index)[0])
        part = np.ascontiguousarray(noise[:, first : int(strategy.nodes_through(end))])
        starts = np.arange(rows) * part.shape[1]
        out = np.zeros((rows, width or end - begin + 1), np.int64)
        strategy.fold(Ranges(part.reshape(-1), starts, step_index, upto, stack, out, exact))
        last = end - 1 if out.shape[1] == 1 else begin
        result[:, last:end] = out[:, : end - last]
        begin = end
    return result


def balls(noise: npt.NDArray[np.generic]) -> ExactNoise:
    return lambda precision: [flint.arb(z.item()) for z in noise]


def decode_matrix(strategy: Strategy) -> Floats:
    """(T, nodes) R with n_t = R z, from the decoder's answers to large single noises."""
    nodes, large = int(strategy.nodes_through(strategy.triggers)), 1 << 27
    single = np.eye(nodes) * large
    kind = np.int32 if strategy.rounds_nodes else np.float64
    return np.asarray((fold(strategy, single.astype(kind)) / SCALE / large).T)


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_decoder_inverts_its_own_matrix(name: str, triggers: int) -> None:
    """R A = prefix sums: the released prefix is unbiased, for the encoder that is used."""
    strategy = make_strategy(name, triggers)
    prefixes = np.tril(np.ones((triggers, triggers)))
    assert np.allclose(decode_matrix(strategy) @ strategy.matrix(), prefixes, atol=1e-6)


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_figures_are_those_of_the_matrix(name: str, triggers: int) -> None:
    strategy, decoder = make_strategy(name, triggers), decode_matrix(make_strategy(name, triggers))
    dense = strategy.matrix().astype(np.float64)
    assert dense.shape == (int(strategy.nodes_through(triggers)), triggers)
    if strategy.rounds_nodes:
        assert np.array_equal(dense, np.rint(dense))
    column = float((dense**2).sum(axis=0).max())
    assert column <= strategy.col2 <= column * (1 + 1e-9)
    sd = np.sqrt((decoder**2).sum(axis=1))
    assert np.all(sd <= strategy.sd_factors + 1e-7) and np.allclose(sd, strategy.sd_factors)
    assert np.abs(decoder).sum(axis=1).max() <= strategy.reach * (1 + 1e-6)
    rounded = np.abs(decoder).sum(axis=1) / 2 if strategy.rounds_nodes else 0.0
    assert np.all(strategy.rounding >= rounded)
    assert np.all(strategy.rounding <= rounded + strategy.triggers.bit_length() / SCALE + 1e-5)


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_nodes_complete_in_order(name: str, triggers: int) -> None:
    """A prefix uses complete nodes only, and encoders are lower-triangular in time."""
    strategy = make_strategy(name, triggers)
    dense, decoder = strategy.matrix(), decode_matrix(strategy)
    for t in range(1, triggers + 1):
        complete = int(strategy.nodes_through(t))
        assert not dense[:complete, t:].any()
        assert not decoder[t - 1, complete:].any()


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_any_pieces_give_the_same_path(name: str, triggers: int) -> None:
    strategy = make_strategy(name, triggers)
    noise = noise_of(strategy, 7, 400.0, triggers)
    whole = fold(strategy, noise)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = tuple(sorted(set(rng.integers(1, triggers + 1, 4).tolist()) - {triggers}))
        assert np.array_equal(fold(strategy, noise, ends), whole)
    every = fold(strategy, noise, tuple(range(1, triggers)), width=1)
    assert np.array_equal(every, whole)


@pytest.mark.parametrize(("name", "triggers"), [c for c in EVERY if c.values[1] <= 5])
def test_worst_split_is_an_upper_bound(name: str, triggers: int) -> None:
    strategy = make_strategy(name, triggers)
    dense = strategy.matrix().astype(np.float64)
    for total, pieces in itertools.product(range(1, 7), range(1, triggers + 1)):
        if pieces > total:
            continue
        most = 0.0
        for chosen in itertools.combinations(range(triggers), pieces):
            for parts in itertools.product(range(1, total + 1), repeat=pieces):
                if sum(parts) == total:
                    a = np.zeros(triggers)
                    a[list(chosen)] = parts
                    most = max(most, float(((dense @ a) ** 2).sum()))
        bound = strategy.worst_split(pieces, total)
        assert most * (1 - 1e-12) <= bound <= 1.35 * most


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("triggers", [2, 7, 40])
def test_rounding_is_that_of_the_exact_number(name: str, triggers: int) -> None:
    """Against rationals: solve A w = z, add up, round at the announced offset."""
    strategy = make_strategy(name, triggers)
    column = [_coefficient(strategy, lag) for lag in range(triggers)]
    noise = noise_of(strategy, 4, 900.0, triggers)
    found = fold(strategy, noise)
    up = Fraction(1, 2) + Fraction(1, 3 << 12)
    for row in range(4):
        solved: list[Fraction] = []
        for t in range(triggers):
            rest = Fraction(noise[row, t].item())
            rest -= sum((column[t - k] * solved[k] for k in range(t)), Fraction(0))
            solved.append(rest / column[0])
            expected = (sum(solved) * SCALE + up).__floor__()
            assert found[row, t] == expected


def _coefficient(strategy: Strategy, lag: int) -> Fraction:
    """First column of the encoder, exactly."""
    if strategy.rounds_nodes:
        return Fraction(int(strategy.matrix()[lag, 0]))
    if lag == 0:
        return Fraction(1)
    pairs = zip(strategy.theta, strategy.omega, strict=True)  # type: ignore[attr-defined]
    return sum((Fraction(o) * Fraction(t) ** (lag - 1) for t, o in pairs), Fraction(0))


def convolving(name: str, triggers: int) -> ConvolutionStrategy:
    """A strategy whose floats are settled exactly."""
    strategy = make_strategy(name, triggers)
    assert isinstance(strategy, ConvolutionStrategy)
    return strategy


@pytest.mark.parametrize("triggers", [1000, MAX_TOEPLITZ_TRIGGERS])
def test_toeplitz_coefficients_are_rounded_exactly(triggers: int) -> None:
    """rint(2^g C(2k, k) / 4^k), ties to even, from whole binomials."""
    scale, binomial, expected = 64 if triggers <= 1000 else 256, 1, []
    for k in range(triggers):
        whole, rest = divmod(scale * binomial, 1 << 2 * k)
        up = 2 * rest > 1 << 2 * k or (2 * rest == 1 << 2 * k and whole % 2 == 1)
        expected.append(whole + up)
        binomial = binomial * 2 * (2 * k + 1) // (k + 1)
    assert convolving("toeplitz", triggers).coefficients().tolist() == expected


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_float_error_is_within_what_fold_assumes(name: str) -> None:
    """Every prefix settled exactly equals the one the floats gave, also far along a path."""
    triggers = 700
    strategy = convolving(name, triggers)
    noise = noise_of(strategy, 3, 5000.0)
    found = fold(strategy, noise)
    for row, t in itertools.product(range(3), (1, 2, 333, 699, 700)):
        assert strategy.exact(balls(noise[row]), t) == found[row, t - 1]


def test_prefixes_that_noise_error_leaves_open_are_reported() -> None:
    """With noise known only to 1e-3 of a lattice step about 2e-3 of all roundings are open."""
    strategy = make_strategy("blt", 50)
    noise = noise_of(strategy, 200, 300.0)
    expected, asked = fold(strategy, noise), []
    zero, end, out = np.zeros(200, np.int64), np.full(200, 50), np.zeros((200, 50), np.int64)

    def exact(row: int, nodes: int) -> ExactNoise:
        asked.append(row)
        return balls(noise[row, :nodes])

    for error, least, most in ((0.0, 0, 0), (1e-3 / SCALE / strategy.reach, 5, 50)):
        stack = np.zeros((200, strategy.state_columns))
        asked.clear()
        path = (noise.reshape(-1), np.arange(200) * 50, zero, end, stack, out, exact)
        strategy.fold(Ranges(*path, error))
        assert least <= len(asked) <= most
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_no_dyadic_number_lies_on_the_rounding_boundary(name: str) -> None:
    """Prefixes of small integer noise are dyadic; at 1/2 a quarter of them would be ties."""
    strategy = make_strategy(name, 3)
    noise = np.arange(-600, 600, dtype=np.int32).repeat(3).reshape(-1, 3)
    kind = np.int32 if strategy.rounds_nodes else np.float64
    stack = np.zeros((1200, strategy.state_columns), strategy.state_dtype)
    out = np.zeros((1200, 3), np.int64)
    ends = np.zeros(1200, np.int64), np.full(1200, 3)

    def exact(row: int, nodes: int) -> ExactNoise:
        raise AssertionError("floats left a rounding open")

    path = (noise.reshape(-1).astype(kind), np.arange(1200) * 3, *ends, stack, out)
    strategy.fold(Ranges(*path, exact))


def test_more_precision_settles_what_little_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = convolving("toeplitz", 60)
    noise = noise_of(strategy, 1, 900.0)[0]
    expected = strategy.exact(balls(noise), 60)
    monkeypatch.setattr(convolution, "_FIRST_PRECISION", 2)
    assert convolving("toeplitz", 60).exact(balls(noise), 60) == expected
    monkeypatch.setattr(convolution, "_LAST_PRECISION", 2)
    with pytest.raises(ArithmeticError):
        convolving("toeplitz", 60).exact(balls(noise), 60)


@pytest.mark.parametrize(
    ("name", "triggers", "mean", "final"),
    [
        ("tree", 100, 3.66, 3.33),
        ("tree", 1000, 5.28, 5.52),
        ("toeplitz", 100, 2.37, 2.53),
        ("toeplitz", 1000, 3.10, 3.29),
        ("blt", 100, 2.34, 2.54),
        ("blt", 1000, 3.05, 3.30),
    ],
)
def test_error_figures(name: str, triggers: int, mean: float, final: float) -> None:
    """Mean and final sd of the prefix in units of C L / mu (mechanism.md section 3)."""
    strategy = make_strategy(name, triggers)
    unit = strategy.sd_factors * np.sqrt(strategy.col2)
    assert float(unit.mean()) == pytest.approx(mean, abs=0.006)
    assert float(unit[-1]) == pytest.approx(final, abs=0.006)


@pytest.mark.parametrize("power", range(2, 17))
def test_blt_is_near_the_square_root_toeplitz_matrix(power: int) -> None:
    """Every row of the table, at its power of two and just above the one before."""
    for triggers in (1 << power, (1 << power - 1) + 1):
        strategy = make_strategy("blt", triggers)
        k = np.arange(1, triggers)
        root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
        ideal = np.sqrt(np.cumsum(root**2) * (root**2).sum())
        ours = strategy.sd_factors * np.sqrt(strategy.col2)
        assert ours.mean() <= 1.005 * ideal.mean()
        assert ours[-1] <= 1.03 * ideal[-1]


def test_names_and_refusals() -> None:
    for name, kind in STRATEGIES.items():
        assert isinstance(make_strategy(name, 3), kind) and kind.name == name
        with pytest.raises(ValueError, match="at least one"):
            kind(0)
    with pytest.raises(ValueError, match="unknown"):
        make_strategy("other", 3)
    make_strategy("toeplitz", MAX_TOEPLITZ_TRIGGERS)
    with pytest.raises(ValueError, match="too many"):
        make_strategy("toeplitz", MAX_TOEPLITZ_TRIGGERS + 1)
    assert make_strategy("blt", 1 << 20).sd_factors[-1] < 6


@pytest.mark.parametrize("triggers", [1 << 13, 1 << 17])
def test_sd_of_long_streams_is_that_of_the_exact_decoder(triggers: int) -> None:
    """Poles near 1 cost a direct-form filter 1e-5 here; sd_t must not be too small."""
    strategy = convolving("blt", triggers)
    exact = np.array([float(b) for b in strategy.decoder_balls(1024)])
    assert np.abs(strategy.decoder / exact - 1).max() < 1e-10
    assert np.all(strategy.sd_factors >= np.sqrt(np.cumsum(exact**2)))
