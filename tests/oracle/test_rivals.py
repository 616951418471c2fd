"""The rivals against exact enumeration, sums over whole laws, and the papers' own figures."""

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.optimize import check_grad
from scipy.signal import fftconvolve

from tests.bench.regimes import peers
from tests.oracle.rivals import arrivals, keys, laws, planner, prefixes, ranges, totals

Exact = dict[Any, Fraction]


def largest_delta(one: Exact, other: Exact, ratio: Fraction) -> Fraction:
    """The least delta for which one is within e^epsilon = ratio of the other."""
    outcomes = one.keys() | other.keys()
    zero = Fraction(0)
    return sum((max(zero, one.get(o, zero) - ratio * other.get(o, zero)) for o in outcomes), zero)


def truncated_outcomes(size: int, k: int, cut: int, half: Fraction) -> Exact:
    """What is given of a key of ``size`` people: noise on -k .. k, given if > cut."""
    weights = {z: half ** abs(z) for z in range(-k, k + 1)}
    total, out = sum(weights.values()), dict[Any, Fraction]()
    for z, weight in weights.items():
        output = size + z if size and size + z > cut else None
        out[output] = out.get(output, Fraction(0)) + weight / total
    return out


@pytest.mark.parametrize("d", [Fraction(1, 20), Fraction(1, 300), Fraction(1, 10**6)])
def test_truncated_geometric_noise_is_private_and_no_shorter_cut_is(d: Fraction) -> None:
    """All outcomes of all neighbouring counts at e^b = 2, exactly; sabotage: one less, or >=."""
    half, ratio = Fraction(1, 2), Fraction(2)
    k = laws.cut_of(math.log(2), float(d))

    def worst(k: int, cut: int) -> Fraction:
        sizes = range(2 * k + 3)
        law = [truncated_outcomes(n, k, cut, half) for n in sizes]
        pairs = [*itertools.pairwise(law), *itertools.pairwise(law[::-1])]
        return max(largest_delta(one, other, ratio) for one, other in pairs)

    assert worst(k, k) <= d
    assert worst(k - 1, k - 1) > d
    assert worst(k, k - 1) > d
    # The chances of the optimum, which is a bound for every mechanism.
    chance = keys.optimal_keep(math.log(2), float(d), 2 * k + 2)
    given = [1 - float(truncated_outcomes(n, k, k, half).get(None, 0)) for n in range(2 * k + 3)]
    assert all(g <= c * (1 + 1e-9) for g, c in zip(given, chance.tolist(), strict=True))


@pytest.mark.parametrize(("sensitivity", "step"), [(1, 1), (3, 1), (4, 2), (5, 5)])
def test_a_staircase_is_private_for_its_sensitivity_and_no_more(
    sensitivity: int, step: int
) -> None:
    b = 0.7
    law = laws.discrete_staircase(b, sensitivity, step)

    def worst(shift: int) -> float:
        inside = law.mass[5 * sensitivity : -5 * sensitivity]
        moved = law.mass[5 * sensitivity + shift :][: len(inside)]
        return float(np.abs(np.log(inside / moved)).max())

    assert max(worst(shift) for shift in range(1, sensitivity + 1)) == pytest.approx(b)
    assert worst(sensitivity + 1) > b + 1e-9
    if sensitivity == 1:
        assert law.sd == pytest.approx(laws.geometric_sd(b)) == laws.geometric(b).sd


def test_a_staircase_is_charged_for_each_key_of_a_person() -> None:
    """Two keys that move by 1 each: width 2 at epsilon loses twice epsilon; width 1 at half does
    not."""
    one = laws.discrete_staircase(1.0, 2, 1)
    other = laws.discrete_staircase(0.5, 1, 1)

    def loss(law: laws.Law) -> float:
        inside = law.mass[8:-8]
        return float(np.abs(np.log(inside / law.mass[9:][: len(inside)])).max())

    assert 2 * loss(one) == pytest.approx(2.0) and 2 * loss(other) == pytest.approx(1.0)


@pytest.mark.parametrize("b", [0.1, 1.0, 6.0])
def test_the_staircase_is_the_limit_of_fine_steps(b: float) -> None:
    fine = 60
    assert laws.discrete_staircase_sd(b, fine) / fine == pytest.approx(
        laws.staircase_sd(b), rel=0.01
    )
    assert laws.staircase_sd(b) < laws.laplace_sd(b)
    # Large epsilon: the variance falls as e^(-2 b / 3), Laplace's as b^-2 (the paper's corollary).
    if b == 6.0:
        assert laws.staircase_sd(9.0) / laws.staircase_sd(6.0) == pytest.approx(
            math.exp(-1), rel=0.1
        )


@pytest.mark.parametrize(("epsilon", "mu"), [(6.0, 0.9744339), (1.0, None)])
def test_the_gaussian_curve_is_the_integral_of_what_exceeds(
    epsilon: float, mu: float | None
) -> None:
    solution = laws.gaussian_mu(epsilon, 1e-9)
    if mu is not None:
        assert solution == pytest.approx(mu, rel=1e-6)
    x = np.linspace(-12, 12, 400_001)
    one, other = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (solution, 0.0))
    exceeding = float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0]))
    assert exceeding == pytest.approx(1e-9, rel=1e-3)


# --- counts of public keys -----------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "arity"), [(1, 2), (7, 2), (16, 4), (40, 3)])
def test_trees_and_their_estimates(steps: int, arity: int) -> None:
    nodes = prefixes.tree_matrix(steps, arity)
    assert np.abs(nodes).sum(axis=0).max() == prefixes.levels(steps, arity)
    decoder = np.tril(np.ones((steps, steps))) @ np.linalg.pinv(nodes)
    assert decoder @ nodes == pytest.approx(np.tril(np.ones((steps, steps))), abs=1e-9)
    best = prefixes.tree_least_squares(steps, arity)
    assert best <= prefixes.tree_sums(steps, arity) + 1e-9
    if arity == 2:
        assert best <= prefixes.honaker(steps) + 1e-9 <= prefixes.tree_sums(steps, 2) + 1e-8
    # Which nodes are added up for a prefix: those of the same tree, and as many as said.
    at = np.arange(1, steps + 1)
    covers = arrivals.nodes_of(steps, arity, at)
    assert np.sqrt(covers.sum(axis=1)).mean() == pytest.approx(prefixes.tree_sums(steps, arity))


def test_a_tree_with_geometric_noise_is_private_on_every_output() -> None:
    """T = 2, C = 1: all shifts of one record, all outputs of the nodes; half the scale is not."""
    nodes = prefixes.tree_matrix(2, 2).astype(int)
    reach = 12

    def worst(levels: int) -> float:
        b = math.log(2) / levels
        outputs = np.array(list(itertools.product(range(-reach, reach + 1), repeat=3)))
        before = -b * np.abs(outputs).sum(axis=1)
        moved = (-b * np.abs(outputs - nodes[:, step]).sum(axis=1) for step in (0, 1))
        return max(float(np.abs(before - after).max()) for after in moved)

    assert worst(prefixes.levels(2, 2)) == pytest.approx(math.log(2))
    assert worst(1) > math.log(2) * 1.9


def test_published_figures_of_prefixes() -> None:
    """In units of C L / mu: the tree with Honaker's estimate 3.66, the square root 2.36 (T = 100);
    and the identities that they rest on."""
    assert math.sqrt(prefixes.levels(100, 2)) * prefixes.honaker(100) == pytest.approx(
        3.66, abs=5e-3
    )
    assert prefixes.square_root(100) == pytest.approx(2.36, abs=5e-3)
    decoder, norm = arrivals.square_root_decoder(40)
    assert decoder @ decoder == pytest.approx(np.tril(np.ones((40, 40))))
    assert norm * np.linalg.norm(decoder, axis=1).mean() == pytest.approx(prefixes.square_root(40))
    # The optimum: below the square root, above the floor of the singular values.
    values = np.linalg.svd(np.tril(np.ones((16, 16))), compute_uv=False)
    assert float(values.sum()) / 16 < prefixes.optimum(16) < prefixes.square_root(16)


def test_p_identities_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    problem = prefixes.PIdentity(12, 3, rng.random(12) + 0.5)
    flat = rng.random(36)
    a = problem.matrix(flat)
    assert np.abs(a).sum(axis=0) == pytest.approx(1.0)
    decoder = np.tril(np.ones((12, 12))) @ np.linalg.pinv(a)
    assert problem.variances(flat) == pytest.approx((decoder**2).sum(axis=1))
    assert problem.total(flat)[0] == pytest.approx(problem.weights @ problem.variances(flat))
    off = check_grad(lambda p: problem.total(p)[0], lambda p: problem.total(p)[1], flat)
    assert off < 1e-3
    least = prefixes.p_identity(16)
    deep = min(prefixes.levels(16, k) * prefixes.tree_least_squares(16, k) for k in (2, 4, 5, 7))
    assert least < min(deep, prefixes.per_step(16))


def test_counts_that_are_given_once() -> None:
    once = dict(totals.rivals(4, 1.0, 1e-6, anywhere=False))
    assert once["geometric"] == pytest.approx(laws.geometric(0.25).sd)
    assert once["truncated geometric"] < once["geometric"] < once["Laplace"]
    assert once["Gaussian"] == pytest.approx(2 / laws.gaussian_mu(1.0, 1e-6))
    assert dict(totals.rivals(4, 1.0, 1e-6, anywhere=True))["Gaussian"] == 2 * once["Gaussian"]
    assert "Gaussian" not in dict(totals.rivals(4, 1.0, 0.0, anywhere=False))
    sums = dict(totals.rivals(1, 6.0, 0.0, anywhere=False, most=10))
    assert sums["discrete staircase"] < 0.6 * sums["geometric"]


# --- counts of keys that nobody named ------------------------------------------------------------


def small_cells() -> keys.Cells:
    by_index = np.array([[3, 1], [9, 4], [25, 30], [0, 1]])
    return keys.Cells(
        np.array([5, 16, 70, 2]), by_index.sum(axis=1), by_index, np.array([1, 2, 1, 7])
    )


def brute(cells: keys.Cells, above: float, values: Any, mass: Any) -> float:
    """The expected L1 by its definition."""
    total = 0.0
    for raw, units, times in zip(cells.raw, cells.units, cells.times, strict=True):
        noisy = units + values
        total += times * float(mass @ np.where(noisy > above, np.abs(noisy - raw), raw))
    return total


@pytest.mark.parametrize("above", [3.0, 12.5, 60.0])
def test_expected_errors_are_sums_over_the_whole_law(above: float) -> None:
    cells = small_cells()
    law = laws.geometric(0.3)
    values = np.arange(-law.reach, law.reach + 1.0)
    want = brute(cells, above, values, law.mass)
    assert keys.tested(cells, keys.integer_noise(law), above) == pytest.approx(want)
    x = np.linspace(-80, 80, 800_001)
    normal, two_sided = np.exp(-((x / 4) ** 2) / 2), np.exp(-0.5 * np.abs(x))
    for noise, mass in ((keys.gaussian(4.0), normal), (keys.laplace(0.5), two_sided)):
        want = brute(cells, above, x, mass / mass.sum())
        assert keys.tested(cells, noise, above) == pytest.approx(want, rel=1e-4)


def test_the_expected_error_of_two_noises_is_that_of_many_draws() -> None:
    cells = small_cells()
    weighted = cells.by_index @ np.array([1.0, 0.5])
    want, rng = 0.0, np.random.default_rng(5)
    for raw, units, w, times in zip(cells.raw, cells.units, weighted, cells.times, strict=True):
        n, m = rng.normal(0, 2.0, 400_000), rng.normal(0, 3.0, 400_000)
        given = 1.0 * (w + n) + 0.4 * (units + m) > 14
        want += times * float(np.where(given, np.abs(units + m - raw), raw).mean())
    error = keys.both(cells, weighted, (1.0, 0.4), (2.0, 3.0), 14.0)
    assert error == pytest.approx(want, rel=3e-3)


def test_thresholds_charge_lone_keys_what_they_say() -> None:
    """Theorem 12's figure, and the chance that any of a person's lone keys is given."""
    assert keys.laplace_threshold(1.0, 1e-5, 1) == pytest.approx(11.8198, abs=1e-4)
    for epsilon, delta, count in ((1.0, 1e-5, 1), (1.0, 1e-3, 4), (6.0, 1e-9, 8)):
        law, tau = laws.geometric(epsilon / count), keys.geometric_threshold(epsilon, delta, count)
        tail = [float(law.mass[law.reach + at :].sum()) for at in (tau, tau - 1)]
        assert 1 - (1 - tail[0]) ** count <= delta * (1 + 1e-6) < 1 - (1 - tail[1]) ** count
    alone = np.array([1.9, 1.4, 1.2])
    common = keys.lone_threshold(alone, 2.5, 1e-6)
    tails = [math.erfc((common - most) / 2.5 / math.sqrt(2)) / 2 for most in alone.tolist()]
    assert sum(tails) == pytest.approx(1e-6)
    at = keys.size_threshold(alone, 2.5, 1e-6)
    tails = [t * math.erfc((at - alone[t - 1]) / 2.5 / math.sqrt(2)) / 2 for t in (1, 2, 3)]
    assert max(tails) == pytest.approx(1e-6)
    # One weight for all is the union over C, which is never lower.
    assert common < 1.9 + 2.5 * laws.quantile(1e-6 / 3)


def test_formulas_of_other_programs_agree_with_their_packages() -> None:
    """What the packages said in an environment of their own (`tests.bench.regimes.peers`)."""
    figures = json.loads(peers.RECORDED.read_text())
    assert peers.worst(figures) <= peers.ALLOWED
    figures["thresholds"]["6 1e-09 8"] += 1
    assert peers.worst(figures) > peers.ALLOWED


# --- streams of such keys ------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "terms"), [(0.4, 1), (0.4, 5), (2.0, 12)])
def test_tails_of_sums_of_geometric_noise(b: float, terms: int) -> None:
    law = laws.geometric(b).mass
    total = law
    for _ in range(terms - 1):
        total = fftconvolve(total, law)
    at = arrivals.geometric_tail(b, terms, 1e-6)
    beyond = [float(total[len(total) // 2 + k :].sum()) for k in (at, at - 1)]
    assert beyond[0] <= 1e-6 * (1 + 1e-6) < beyond[1]


def test_streams_without_noise_lose_what_the_bound_leaves_out() -> None:
    stream = arrivals.Arrivals(
        np.array([40, 9, 0]), np.repeat([0, 1], [30, 9]), np.tile([1, 2, 3], 13), np.zeros(39, int)
    )
    rows = list(arrivals.rivals(stream, (1, 3, 400.0, 1e-6), range(2)))
    assert len(rows) == 5
    for name, error, _ in rows:
        if name.startswith(("geometric", "truncated")):
            assert error == 10, name
        assert error == pytest.approx(10, abs=1), name
    assert stream.by(np.array([1, 3])).tolist() == [[10, 30], [3, 9], [0, 0]]


# --- tables of a large domain --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes", "printed"),
    [("range", (10,) * 20, 21.79), ("prefix", (10,) * 20, 19.34), ("range", (100,) * 3, 10.28),
     ("range", (100,) * 5, 17.47)],
)  # fmt: skip
def test_residual_planner_has_its_known_errors(
    kind: str, sizes: tuple[int, ...], printed: float
) -> None:
    assert planner.rmse(kind, sizes, 2) == pytest.approx(printed, abs=5e-3)


def test_residual_planner_in_matrices() -> None:
    """A domain of 3 x 4, both attributes: every table and every residual written out."""
    sizes, kind = (3, 4), "prefix"
    parts = [planner.attribute(kind, n) for n in sizes]
    queries = np.kron(planner.queries(kind, 3), planner.queries(kind, 4))
    spaces = list(itertools.product((False, True), repeat=2))
    costs = [math.prod(p.cost for p, take in zip(parts, s, strict=True) if take) for s in spaces]
    given = [
        math.prod(p.residual if take else p.total for p, take in zip(parts, s, strict=True))
        for s in spaces
    ]
    noise = [math.sqrt(c / v) for c, v in zip(costs, given, strict=True)]
    scale = sum(c / n for c, n in zip(costs, noise, strict=True))
    total = scale * sum(v * n for v, n in zip(given, noise, strict=True))
    assert math.sqrt(total / len(queries)) == pytest.approx(planner.rmse(kind, sizes, 2))
    # The same by linear algebra: a strategy of all spaces, its longest column, its inverse.
    rows = []
    for s, n in zip(spaces, noise, strict=True):
        factors = [
            residual(kind, n_i) if take else np.ones((1, n_i))
            for take, n_i in zip(s, sizes, strict=True)
        ]
        rows.append(np.kron(*factors) / math.sqrt(n * scale))
    strategy = np.vstack(rows)
    assert (strategy**2).sum(axis=0).max() <= 1 + 1e-9
    variance = np.trace(queries @ np.linalg.inv(strategy.T @ strategy) @ queries.T)
    assert variance == pytest.approx(total)


def residual(kind: str, size: int) -> Any:
    """R of an attribute, by its own way from the same strategy."""
    work, centre = planner.queries(kind, size), np.eye(size) - 1 / size
    x = planner.gaussian_strategy(centre @ work.T @ work @ centre + np.ones((size, size)))
    values, vectors = np.linalg.eigh(centre @ x @ centre)
    return (vectors[:, 1:] * np.sqrt(values[1:])).T


def test_ranges_of_one_attribute() -> None:
    """The gradient; a p-identity's error by the pseudo-inverse; the optimum's floor."""
    gram, count = ranges.gram_of("range", 9)
    flat = np.random.default_rng(0).random(18)
    problem = [lambda p, at=at: ranges.p_identity_total(p, gram, 2)[at] for at in (0, 1)]
    assert check_grad(*problem, flat) < 1e-3
    p = flat.reshape(2, 9)
    a = np.vstack([np.eye(9), p]) / (1 + p.sum(axis=0))
    want = float(((planner.queries("range", 9) @ np.linalg.pinv(a)) ** 2).sum())
    assert ranges.p_identity_total(flat, gram, 2)[0] == pytest.approx(want)
    values = np.linalg.svd(planner.queries("range", 9), compute_uv=False)
    floor = float(values.sum()) / math.sqrt(9 * count)
    assert floor < ranges.optimum("range", 9) < 1.02 * floor
    errors = dict(ranges.rivals("range", 40, 2, 1.0, 1e-9))
    assert errors["p-identity"] < errors["geometric per cell"]
    assert "Gaussian optimum" not in dict(ranges.rivals("range", 9, 2, 1.0, 0.0))
