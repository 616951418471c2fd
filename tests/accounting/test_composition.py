"""Composition of mixtures: never below dp-accounting's privacy loss distributions, exact alone."""

import math
from collections.abc import Sequence
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import (
    Limit,
    Total,
    epsilon_left,
    epsilon_spent,
    mu_left,
    rho_left,
    total_of,
    within,
)
from dpstream.accounting.gaussian import cdp_delta, delta_of, epsilon_of, mu_of
from dpstream.state.ledger.events import Charge

#: dp-accounting rounds losses up to multiples of this.
INTERVAL = 1e-4
Parts = Sequence[tuple[float, float]]


def delta_spent(spends: Sequence[Charge], epsilon: float) -> float:
    """Delta of the composition at epsilon, at most 1, rounded up."""
    exact = min(total_of(spends).delta(epsilon), Fraction(1))
    return float(exact) if float(exact) >= exact else math.nextafter(float(exact), math.inf)


def gauss(mu: float, thresholds: float = 0.0) -> Charge:
    return Charge("r", "p", "user", 99.0, 0.5, mu, thresholds)


def plain(epsilon: float, delta: float = 0.0) -> Charge:
    return Charge("r", "p", "user", epsilon, delta, None, 0.0)


def concentrated(rho: float, thresholds: float = 0.0) -> Charge:
    return Charge("r", "p", "user", 99.0, 0.5, None, thresholds, rho=rho)


def exact(mus: Sequence[float], plains: Parts, epsilon: float) -> float:
    """Delta of the exact composition, up to the discretisation (plain epsilons lie on it)."""
    parts = [
        pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=INTERVAL) for mu in mus
    ]
    parts += [pld.from_privacy_parameters(pld.common.DifferentialPrivacyParameters(e, d),
                                          INTERVAL) for e, d in plains]  # fmt: skip
    composition = parts[0]
    for part in parts[1:]:
        composition = composition.compose(part)
    return float(composition.get_delta_for_epsilon(epsilon))


MIXTURES: list[tuple[list[float], list[tuple[float, float]]]] = [
    ([0.5], [(0.3, 0.0)]),
    ([0.5, 0.25], [(0.3, 1e-6), (0.2, 0.0)]),
    ([1.0], [(1.0, 1e-5)] * 3),
    ([], [(0.1, 0.0)] * 10),
    ([0.9, 0.4, 0.4], []),
]


@pytest.mark.parametrize(("mus", "plains"), MIXTURES)
@pytest.mark.parametrize("epsilon", [0.25, 1.0, 2.5, 4.0])
def test_never_below_the_exact_composition(
    mus: list[float], plains: list[tuple[float, float]], epsilon: float
) -> None:
    spends = [*map(gauss, mus), *(plain(*p) for p in plains)]
    ours, truth = delta_spent(spends, epsilon), exact(mus, plains, epsilon)
    assert ours >= truth * (1 - 1e-3) - 1e-12
    # And a sum that forgets the plain parts, or their deltas, is below it.
    if plains:
        assert delta_spent([gauss(m) for m in mus] or [plain(0)], epsilon) < truth or truth < 1e-12
    if mus and not plains:
        assert ours <= truth * 1.01 + 1e-12


def test_a_plain_part_takes_its_epsilon_from_the_gaussian_and_nothing_else() -> None:
    mu = mu_of(1.0, 1e-6)
    spends = [gauss(mu, 1e-7), plain(0.5, 1e-8)]
    assert delta_spent(spends, 1.5) == pytest.approx(delta_of(1.0, mu) + 1.1e-7, rel=1e-9)
    assert epsilon_spent(spends, delta_spent(spends, 1.5)) == pytest.approx(1.5, rel=1e-9)
    assert epsilon_left(spends, 2.0, delta_spent(spends, 1.5)) == pytest.approx(0.5, rel=1e-8)


def test_figures_add_up_as_written() -> None:
    """Ten times 0.1 is 1, though no float sum says so; one more, or a little more, is beyond."""
    assert within([plain(0.1, 1e-7)] * 10, 1.0, 1e-6)
    assert not within([plain(0.1, 1e-7)] * 11, 1.1, 1e-6)
    assert not within([*[plain(0.1)] * 9, plain(0.1000001)], 1.0, 1e-9)
    assert epsilon_spent([plain(0.1)] * 10, 0.0) == 1.0
    assert math.isinf(epsilon_spent([plain(0.1, 1e-6)] * 2, 1e-6))


def test_one_alone_has_its_own_guarantee() -> None:
    sharp = Charge("r", "p", "user", 1.0, 1e-6, mu_of(1.0, 1e-6), 1e-6)
    assert within([sharp], 1.0, 1e-6) and not within([sharp, plain(0)], 1.0, 1e-6)
    assert epsilon_spent([sharp], 1e-6) == 1.0
    assert not within([sharp], 0.99, 1e-6) and not within([sharp], 1.0, 0.9e-6)
    # What is left counts with the composition, in which the single exemption is gone.
    assert epsilon_left([sharp], 1.0, 1e-6) == 0.0


def test_only_the_first_of_an_account_is_held_to_its_own_guarantee() -> None:
    """Thresholds and mu of (1, 1e-6) compose to a little more than that."""
    sharp = Charge("r", "p", "user", 1.0, 1e-6, mu_of(1.0, 1e-6), 1e-6)
    assert Limit(total_of([]), 1.0, 1e-6).holds(sharp) == 1
    assert Limit(total_of([plain(0.0)]), 1.0, 1e-6).holds(sharp) == 0
    assert Limit(total_of([plain(0.5)]), 1.0, 1e-6).holds(plain(0.75)) == 0
    assert Limit(total_of([plain(0.5)]), 1.0, 1e-6).holds(plain(0.25)) == 2


small = st.floats(0.01, 1.5)
mixtures = st.tuples(
    st.lists(small, max_size=4), st.lists(st.tuples(small, st.floats(0, 1e-7)), max_size=4)
)


@settings(max_examples=60, deadline=None)
@given(mixtures, st.floats(0.5, 12.0))
def test_left_is_what_fits(
    mixture: tuple[list[float], list[tuple[float, float]]], epsilon: float
) -> None:
    spends = [*map(gauss, mixture[0]), *(plain(*p) for p in mixture[1])]
    delta = 1e-6
    more, mu = epsilon_left(spends, epsilon, delta), mu_left(spends, epsilon, delta)
    two = [*spends, plain(0)]  # never a single one, which has an exemption
    if within(two, epsilon, delta):
        assert within([*two, plain(more * (1 - 1e-9))], epsilon, delta)
        assert within([*two, gauss(mu * (1 - 1e-9))], epsilon, delta)
        assert not within([*two, gauss(mu * 1.001 + 1e-3)], epsilon, delta)
    else:
        assert mu == 0.0 and more <= 1e-9
    assert not within([*two, plain(more + 1e-6)], epsilon, delta) or not mixture[0]
    order = np.random.default_rng(0).permutation(len(spends))
    assert delta_spent([spends[i] for i in order], epsilon) == delta_spent(spends, epsilon)


def test_the_mu_that_is_left_is_rounded_down() -> None:
    """It fits to the last digit, and two parts in 10^12 more do not."""
    rng, fits = np.random.default_rng(8), 0
    for _ in range(100):
        spends = [*map(gauss, rng.uniform(0.05, 0.6, rng.integers(1, 5))), plain(0.2, 1e-8)]
        epsilon = float(rng.uniform(8, 12))
        left = mu_left(spends, epsilon, 1e-6)
        assert left > 0 and within([*spends, gauss(left)], epsilon, 1e-6)
        fits += within([*spends, gauss(left * (1 + 2e-12))], epsilon, 1e-6)
    assert fits <= 2


def test_no_charge_gives_budget_back() -> None:
    for bad in (
        {"epsilon": -0.1}, {"delta": -1e-9}, {"mu": -1.0}, {"threshold_delta": -1e-9},
        {"epsilon": math.nan}, {"mu": math.inf}, {"epoch": -1},
        {"mu": None, "threshold_delta": 1e-9},
    ):  # fmt: skip
        figures = {"epsilon": 1.0, "delta": 1e-9, "mu": 1.0, "threshold_delta": 0.0, **bad}
        with pytest.raises(ValueError):
            Charge("r", "p", "user", **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize("mus", [[0.3], [0.5, 0.25], [2.0, 0.1]])
def test_an_epsilon_is_rounded_up_beyond_the_error_of_its_parts(mus: list[float]) -> None:
    """The root search may end a little below; what is added to it must show, however small."""
    mu, delta = math.sqrt(math.fsum(m * m for m in mus)), 1e-6
    spent = epsilon_spent([gauss(m) for m in mus] + [plain(0.25)], delta)
    assert spent - 0.25 > epsilon_of(mu, delta) * (1 + 1.5e-12)


# --- zCDP ----------------------------------------------------------------------------------------


def least_delta_of_rho(rho: float, epsilon: float) -> mpmath.mpf:
    """Canonne, Kamath and Steinke's proposition 7 at 60 digits: the least over alpha."""
    with mpmath.workdps(60):
        r, e = mpmath.mpf(rho), mpmath.mpf(epsilon)

        def log_delta(alpha: mpmath.mpf) -> mpmath.mpf:
            power = (alpha - 1) * (alpha * r - e) + alpha * mpmath.log1p(-1 / alpha)
            return power - mpmath.log(alpha - 1)

        low, high = mpmath.mpf(1) + mpmath.mpf("1e-9"), (e + 1) / (2 * r) + 2
        for _ in range(400):
            third = (high - low) / 3
            if log_delta(low + third) < log_delta(high - third):
                high -= third
            else:
                low += third
        return mpmath.exp(log_delta(low))


def rounded_down(bound: float, truth: mpmath.mpf) -> bool:
    return bool(mpmath.mpf(bound) < truth)


@pytest.mark.parametrize("rho", [1e-6, 0.00768, 0.5, 2.643, 40.0])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 12.0, 60.0])
def test_rho_is_never_rounded_down(rho: float, epsilon: float) -> None:
    truth = least_delta_of_rho(rho, epsilon)
    ours = delta_spent([concentrated(rho), plain(0.0)], epsilon)
    assert not rounded_down(ours, min(truth, mpmath.mpf(1)))
    assert ours <= truth * (1 + mpmath.mpf("1e-8")) + mpmath.mpf("1e-300") or ours == 1.0
    # A sum that rounds the rho of several down is noticed.
    if 1e-250 < truth < 0.5:
        assert rounded_down(cdp_delta(rho * (1 - 1e-12), epsilon) * (1 - 1e-11), truth)


def test_figures_of_zcdp() -> None:
    """Published conversions of zCDP at delta 1e-10."""
    for rho, epsilon in ((1.6775**2 / 2, 12.1626), (4.944, 25.3628), (2.643, 17.4809)):
        assert epsilon_spent([concentrated(rho)], 1e-10) == pytest.approx(epsilon, abs=1e-4)
    # As many parts as one likes: their rho add up as they are written.
    parts = [concentrated(0.1)] * 10
    assert epsilon_spent(parts, 1e-9) == epsilon_spent([concentrated(1.0), plain(0)], 1e-9)


DISCRETE = 2.0  # sd of a discrete Gaussian: 1/8-zCDP


@pytest.mark.parametrize("mus", [[], [0.5], [0.05, 0.02], [1.5]])
@pytest.mark.parametrize("plains", [[], [(0.3, 1e-7)]])
@pytest.mark.parametrize("epsilon", [1.0, 2.5, 5.0])
def test_zcdp_is_never_below_the_exact_composition(
    mus: list[float], plains: list[tuple[float, float]], epsilon: float
) -> None:
    composition = pld.from_discrete_gaussian_mechanism(
        DISCRETE, value_discretization_interval=INTERVAL
    )
    for mu in mus:
        gaussian = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=INTERVAL)
        composition = composition.compose(gaussian)
    for e, d in plains:
        pair = pld.common.DifferentialPrivacyParameters(e, d)
        composition = composition.compose(pld.from_privacy_parameters(pair, INTERVAL))
    truth = float(composition.get_delta_for_epsilon(epsilon))
    rho = 1 / (2 * DISCRETE**2)
    spends = [concentrated(rho), *map(gauss, mus), *(plain(*p) for p in plains)]
    assert delta_spent(spends, epsilon) >= truth * (1 - 1e-3) - 1e-12
    # A program that does not know rho, and skips it, promises what does not hold.
    if not plains:
        assert delta_spent([*spends[1:], plain(0)], epsilon) < truth or truth < 1e-12


def test_a_little_zcdp_costs_a_gaussian_little() -> None:
    """As zCDP alone the Gaussian would lose its exact curve: the split keeps it."""
    spends, alone = [gauss(1.0), concentrated(1e-9)], epsilon_of(1.0, 1e-9)
    assert alone < epsilon_spent(spends, 1e-9) < alone + 1e-3
    # And with much of it both together are one zCDP mechanism.
    much = [gauss(1.0), concentrated(0.5)]
    both = epsilon_spent([concentrated(1.0), plain(0)], 1e-9)
    assert epsilon_spent(much, 1e-9) == pytest.approx(both, rel=1e-9)
    # Never as if a rho were a Gaussian of mu = sqrt(2 rho), which is less.
    assert epsilon_of(math.sqrt(2.0), 1e-9) < both


def test_what_zcdp_adds_on_top() -> None:
    spends = [concentrated(0.1, 1e-8), plain(0.5, 1e-9)]
    assert delta_spent(spends, 3.0) >= cdp_delta(0.1, 2.5) + 1.1e-8
    assert delta_spent(spends, 3.0) == pytest.approx(cdp_delta(0.1, 2.5) + 1.1e-8, rel=1e-9)
    assert delta_spent(spends, 0.5) == 1.0  # zCDP promises nothing at epsilon 0
    assert math.isinf(epsilon_spent(spends, 1e-8))
    assert within([concentrated(0.1)], 99.0, 0.5) and not within([concentrated(0.1)], 0.1, 1e-9)


@settings(max_examples=15, deadline=None)
@given(mixtures, st.floats(1e-4, 0.3), st.floats(0.5, 12.0))
def test_left_is_what_fits_beside_zcdp(
    mixture: tuple[list[float], list[tuple[float, float]]], rho: float, epsilon: float
) -> None:
    spends = [concentrated(rho), *map(gauss, mixture[0]), *(plain(*p) for p in mixture[1])]
    delta = 1e-6
    left, mu = rho_left(spends, epsilon, delta), mu_left(spends, epsilon, delta)
    more = epsilon_left(spends, epsilon, delta)
    if within([*spends, plain(0)], epsilon, delta):
        assert within([*spends, concentrated(left)], epsilon, delta)
        assert within([*spends, gauss(mu)], epsilon, delta)
        assert within([*spends, plain(more * (1 - 1e-9))], epsilon, delta)
        assert not within([*spends, concentrated(left * 1.001 + 1e-6)], epsilon, delta)
    else:
        assert left == mu == 0.0 and more <= 1e-9


def test_no_charge_has_two_accounts() -> None:
    figures = {"epsilon": 1.0, "delta": 1e-9, "threshold_delta": 0.0}
    for bad in ({"mu": 1.0, "rho": 0.5}, {"mu": None, "rho": -1.0}, {"mu": None, "rho": math.inf}):
        with pytest.raises(ValueError):
            Charge("r", "p", "user", **figures, **bad)  # type: ignore[arg-type]


def test_shares_of_a_limit() -> None:
    limit = Limit(Total(), 8.0, 1e-5)
    mu, one = mu_of(1.0, 1e-9), plain(1.0)
    assert limit.holds(one) == 8 and limit.share(one) == pytest.approx(1 / 8)
    share = (mu / mu_of(8.0, 1e-5)) ** 2
    assert limit.share(gauss(mu)) == pytest.approx(share) and share < 1 / 80
    assert limit.equal_share(gauss(mu), one) == pytest.approx(8 * share)
    # A share of delta may be the larger one.
    assert limit.share(plain(1.0, 2e-6)) == pytest.approx(0.2)
    assert limit.share(gauss(mu, 5e-6)) == pytest.approx(0.5)
    # What has the smaller share stays as it is.
    assert limit.equal_share(gauss(mu_of(4.0, 1e-5)), plain(0.5)) == 1
    half = Limit(limit.total.plus(plain(4.0)), 8.0, 1e-5)
    assert half.share(one) == pytest.approx(1 / 4)
    spent = Limit(limit.total.plus(plain(8.0)), 8.0, 1e-5)
    assert math.isinf(spent.share(one)) and spent.equal_share(gauss(mu), one) == 1


def test_where_nothing_is_left_of_one_kind() -> None:
    """Of delta nothing is left for Gaussian noise, or for thresholds, and epsilon is."""
    limit = Limit(Total().plus(plain(1.0, 1e-5)), 8.0, 1e-5)
    assert math.isinf(limit.share(gauss(0.1))) and limit.share(plain(1.0)) == pytest.approx(1 / 7)
    assert math.isinf(limit.share(plain(1.0, 1e-9)))
    assert limit.equal_share(plain(1.0), plain(1.0, 1e-9)) == 0
