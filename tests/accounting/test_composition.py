"""Composition of mixtures: never below dp-accounting's privacy loss distributions, exact alone.

The filters of a limit: against formulas of their own at many digits, and by what they allow.

Periods of an account: against a model that keeps a list of charges for each period.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import mpmath
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import (
    Limit,
    Spend,
    Total,
    best_order,
    default_parts,
    divergence_of_response,
    epsilon_spent,
    fitted_parts,
    total_of,
)
from dpstream.accounting.composition import (
    Parts as DeltaParts,
)
from dpstream.accounting.gaussian import cdp_delta, delta_of, epsilon_of, mu_of
from dpstream.state.ledger.events import Charge
from tests.accounting.adversary import Charge as SpendCharge
from tests.accounting.adversary import gauss as gauss_spend
from tests.accounting.adversary import lone_key
from tests.accounting.adversary import plain as plain_spend

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


def test_figures_add_up_as_written() -> None:
    """Ten times 0.1 is 1, though no float sum says so; one more, or a little more, is beyond."""
    assert epsilon_spent([plain(0.1, 1e-7)] * 10, 1e-6) == 1.0
    assert math.isinf(epsilon_spent([plain(0.1, 1e-7)] * 11, 1e-6))
    assert epsilon_spent([plain(0.1)] * 10, 0.0) == 1.0
    assert math.isinf(epsilon_spent([plain(0.1, 1e-6)] * 2, 1e-6))


def test_one_alone_has_its_own_guarantee() -> None:
    sharp = Charge("r", "p", "user", 1.0, 1e-6, mu_of(1.0, 1e-6), 1e-6)
    assert epsilon_spent([sharp], 1e-6) == 1.0 < epsilon_spent([sharp, plain(0)], 1.1e-6)
    assert math.isinf(epsilon_spent([sharp, plain(0)], 1e-6))


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
    assert spent - 0.25 > epsilon_of(mu, delta) * (1 + 0.5e-12)


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


def test_no_charge_has_two_accounts() -> None:
    figures = {"epsilon": 1.0, "delta": 1e-9, "threshold_delta": 0.0}
    for bad in ({"mu": 1.0, "rho": 0.5}, {"mu": None, "rho": -1.0}, {"mu": None, "rho": math.inf}):
        with pytest.raises(ValueError):
            Charge("r", "p", "user", **figures, **bad)  # type: ignore[arg-type]


# --- randomised responses ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1.01, 2.0, 7.735, 400.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.01, 0.5, 4.0, 300.0])
def test_the_divergence_of_a_response_is_never_rounded_down(epsilon: float, order: float) -> None:
    """Against the sum over both answers, at 400 digits."""
    with mpmath.workdps(400):
        e, a = mpmath.mpf(epsilon), mpmath.mpf(order)
        p = mpmath.exp(e) / (1 + mpmath.exp(e))
        exact = mpmath.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)
        ours = divergence_of_response(epsilon, order)
        assert exact - mpmath.mpf("1e-390") <= ours
        assert ours <= exact * (1 + mpmath.mpf("1e-9")) + mpmath.mpf(epsilon) * 1e-12
    assert ours <= epsilon


def test_divergences_of_all_kinds_add_up() -> None:
    total = Total(order=3.0)
    for spend in (gauss(0.5), concentrated(0.25), plain(1.0), gauss(0.5, 1e-7)):
        total = total.plus(spend)
    expected = 3 * (0.5**2 + 0.25) + divergence_of_response(1.0, 3.0)
    assert float(total.divergence) == pytest.approx(expected, rel=1e-12)
    assert Total(order=3.0).plus(plain(1.0), 4) == total_four(plain(1.0))


def total_four(spend: Charge) -> Total:
    total = Total(order=3.0)
    for _ in range(4):
        total = total.plus(spend)
    return total


LIMITS = [(1.0, 1e-6), (4.0, 1e-6), (8.0, 1e-5), (0.1, 1e-9)]


def limit_of(epsilon: float, delta: float) -> Limit:
    return Limit(epsilon, delta, default_parts(epsilon, delta))


def total(limit: Limit, *charges: Spend) -> Total:
    out = Total(order=limit.parts.order)
    for charge in charges:
        out = out.plus(charge)
    return out


def zcdp_spend(rho: float) -> SpendCharge:
    return SpendCharge(rho=rho)


def allowed(limit: Limit, charges: list[SpendCharge]) -> bool:
    """The verdict by the theorems' formulas at 50 digits, each written out here."""
    with mpmath.workdps(50):
        epsilon, a = mpmath.mpf(limit.epsilon), mpmath.mpf(limit.parts.order)
        scale = mpmath.mpf(limit.delta) / mpmath.mpf(limit.parts.delta)
        thresholds = scale * mpmath.mpf(limit.parts.thresholds)
        renyi = scale * mpmath.mpf(limit.parts.renyi)
        gaussian = mpmath.mpf(limit.delta) - thresholds - renyi
        if (
            mpmath.fsum(c.threshold_delta + (c.delta if plain_one(c) else 0) for c in charges)
            > thresholds
        ):
            return False
        sizes = [mpmath.mpf(c.epsilon) for c in charges if plain_one(c)]
        mus = [mpmath.mpf(c.mu) for c in charges if c.mu is not None]
        rhos = [mpmath.mpf(c.rho) for c in charges if c.rho is not None]
        noisy = any(mus) or any(rhos)
        if not noisy and mpmath.fsum(sizes) <= epsilon:
            return True
        mu = mpmath.sqrt(mpmath.fsum(m * m for m in mus))
        if not any(sizes) and not any(rhos):
            spent = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
                -mu / 2 - epsilon / mu
            )
            if spent <= gaussian:
                return True
        divergence = a * (mu * mu / 2 + mpmath.fsum(rhos))
        for size in sizes:
            p = 1 / (1 + mpmath.exp(-size))
            both = p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)
            divergence += mpmath.log(both) / (a - 1)
        most = epsilon - mpmath.log(1 - 1 / a) + mpmath.log(a * renyi) / (a - 1)
        return bool(divergence <= most)


def plain_one(charge: SpendCharge) -> bool:
    return charge.mu is None and charge.rho is None


CHARGES = st.one_of(
    st.floats(0.02, 1.5).map(gauss_spend),
    st.floats(0.02, 2.5).map(plain_spend),
    st.floats(1e-4, 0.4).map(zcdp_spend),
    st.floats(1e-8, 6e-7).map(lone_key),
    st.tuples(st.floats(0.02, 0.8), st.floats(0, 3e-7)).map(
        lambda pair: SpendCharge(mu=pair[0], threshold_delta=pair[1])
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LIMITS), st.lists(CHARGES, min_size=1, max_size=6))
def test_the_verdict_is_that_of_the_theorems(
    limit: tuple[float, float], charges: list[SpendCharge]
) -> None:
    """An order that is chosen late, a part that is counted twice, a measure that is missing and
    counts as 0, and a delta sum that is left out, each differ from these formulas."""
    filters = limit_of(*limit)
    assert bool(filters.accepting(total(filters, *charges))) == allowed(filters, charges)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LIMITS), st.lists(CHARGES, max_size=5))
def test_what_is_left_is_what_fits(limit: tuple[float, float], charges: list[SpendCharge]) -> None:
    filters = limit_of(*limit)
    before = total(filters, *charges)
    rest = filters.left(before)
    kinds = {
        "epsilon": plain_spend,
        "mu": gauss_spend,
        "rho": zcdp_spend,
        "delta": lone_key,
    }
    for kind, charge in kinds.items():
        size = rest[kind]
        if size > 1e-12:
            assert filters.accepting(before.plus(charge(size * (1 - 1e-9))))
        assert not filters.accepting(before.plus(charge(size * 1.001 + 1e-6)))


def test_how_many_questions_a_limit_allows() -> None:
    """The figures of the guide, and those of the whole delta for the Renyi filter."""
    small = limit_of(4.0, 1e-6)
    nothing = total(small)
    assert [small.further_charges(nothing, plain_spend(size)) for size in (0.1, 0.5, 1.0)] == [
        61,
        8,
        4,
    ]
    assert [small.further_charges(nothing, gauss_spend(size)) for size in (0.05, 0.1, 0.3)] == [
        256,
        64,
        7,
    ]
    undivided = Limit(4.0, 1e-6, DeltaParts(1e-6, 0.0, 1e-6, best_order(4.0, 1e-6)))
    nothing = total(undivided)
    assert [undivided.further_charges(nothing, plain_spend(size)) for size in (0.1, 0.5, 1.0)] == [
        66,
        8,
        4,
    ]
    assert 0.93 < undivided.left(nothing)["mu"] / mu_of(4.0, 1e-6) < 0.95
    assert small.further_charges(nothing, plain_spend(1e-13)) == 1 << 40


def test_parts_add_up_to_delta_and_are_raised_together() -> None:
    for epsilon, delta in LIMITS:
        parts = default_parts(epsilon, delta)
        exact = [Fraction(repr(part)) for part in (parts.delta, parts.thresholds, parts.renyi)]
        assert exact[0] == exact[1] + exact[2] + parts.gaussian
        before, raised = Limit(epsilon, delta, parts), Limit(2 * epsilon, 3 * delta, parts)
        assert raised.left(total(raised))["delta"] == pytest.approx(3 * 0.4 * delta)
        for kind, size in before.left(total(before)).items():
            assert raised.left(total(raised))[kind] > size
    for bad in (
        (1e-6, 6e-7, 5e-7, 3.0),
        (1e-6, -1e-9, 0.0, 3.0),
        (1e-6, 0.0, 0.0, 1.0),
        (1e-6, 0.0, 0.0, math.inf),
    ):
        with pytest.raises(ValueError, match="parts of delta"):
            DeltaParts(*bad)


@pytest.mark.parametrize(("epsilon", "delta"), [(4.0, 1e-6), (1.0, 1e-9), (6.0, 1e-9)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_a_first_job_fits_exactly(epsilon: float, delta: float, share: float) -> None:
    """Into its own budget as the limit, and beside another one into twice of it."""
    thresholds = share * delta
    job = SpendCharge(epsilon, delta, mu_of(epsilon, delta - thresholds), None, thresholds)
    own = Limit(epsilon, delta, fitted_parts(epsilon, delta, job))
    assert own.accepting(total(own, job)) == ["gaussian"]
    assert not own.accepting(total(own, job, gauss_spend(1e-3)))
    both = Limit(2 * epsilon, 2 * delta, fitted_parts(2 * epsilon, 2 * delta, job))
    assert both.accepting(total(both, job, job))
    assert both.left(total(both, job))["epsilon"] > 0.1 * epsilon


def test_a_part_that_cannot_hold_a_first_job_is_the_default() -> None:
    sharp = SpendCharge(1.0, 1e-6, mu_of(1.0, 1e-6), None, 1e-6)
    assert fitted_parts(1.0, 1e-6, sharp) == default_parts(1.0, 1e-6)
    assert fitted_parts(1.0, 1e-6, zcdp_spend(0.01)) == default_parts(1.0, 1e-6)
    keys = SpendCharge(0.5, 8e-7)
    assert Limit(1.0, 1e-6, fitted_parts(1.0, 1e-6, keys)).delta_sum_share(Total().plus(keys)) < 1


def test_the_best_order_allows_gaussian_charges_the_most() -> None:
    for epsilon, delta in LIMITS:
        best = best_order(epsilon, delta)
        most = [
            Limit(epsilon, delta, DeltaParts(delta, 0.0, delta, order)).left(Total(order=order))[
                "rho"
            ]
            for order in (best, 1 + (best - 1) * 0.9, 1 + (best - 1) * 1.1)
        ]
        assert most[0] == max(most) > 0


def test_shares_say_which_filter_has_room() -> None:
    filters = limit_of(4.0, 1e-6)
    shares = filters.shares(total(filters, gauss_spend(0.4)))
    assert math.isinf(shares["plain"]) and 0 < shares["gaussian"] < shares["renyi"] < 1
    shares = filters.shares(total(filters, plain_spend(1.0)))
    assert math.isinf(shares["gaussian"]) and shares["plain"] == 0.25 < shares["renyi"]
    shares = filters.shares(total(filters, zcdp_spend(0.01)))
    assert [name for name, share in shares.items() if math.isinf(share)] == ["plain", "gaussian"]
    # Every filter has used at least the share of the delta sum.
    assert min(filters.shares(total(filters, lone_key(2e-7))).values()) == pytest.approx(0.5)
    assert delta_of(4.0, filters.left(total(filters))["mu"]) <= 3e-7
