"""The filters of a limit: against formulas of their own at many digits, and by what they allow."""

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.composition import Total
from dpstream.accounting.filters import Limit, Parts, best_order, default_parts, fitted_parts
from dpstream.accounting.gaussian import delta_of, mu_of
from tests.accounting.adversary import Charge, gauss, lone_key, plain

LIMITS = [(1.0, 1e-6), (4.0, 1e-6), (8.0, 1e-5), (0.1, 1e-9)]


def limit_of(epsilon: float, delta: float) -> Limit:
    return Limit(epsilon, delta, default_parts(epsilon, delta))


def total(limit: Limit, *charges: Charge) -> Total:
    out = Total(order=limit.parts.order)
    for charge in charges:
        out = out.plus(charge)
    return out


def concentrated(rho: float) -> Charge:
    return Charge(rho=rho)


def allowed(limit: Limit, charges: list[Charge]) -> bool:
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


def plain_one(charge: Charge) -> bool:
    return charge.mu is None and charge.rho is None


CHARGES = st.one_of(
    st.floats(0.02, 1.5).map(gauss),
    st.floats(0.02, 2.5).map(plain),
    st.floats(1e-4, 0.4).map(concentrated),
    st.floats(1e-8, 6e-7).map(lone_key),
    st.tuples(st.floats(0.02, 0.8), st.floats(0, 3e-7)).map(
        lambda pair: Charge(mu=pair[0], threshold_delta=pair[1])
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LIMITS), st.lists(CHARGES, min_size=1, max_size=6))
def test_the_verdict_is_that_of_the_theorems(
    limit: tuple[float, float], charges: list[Charge]
) -> None:
    """An order that is chosen late, a part that is counted twice, a measure that is missing and
    counts as 0, and a delta sum that is left out, each differ from these formulas."""
    filters = limit_of(*limit)
    assert bool(filters.accepting(total(filters, *charges))) == allowed(filters, charges)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LIMITS), st.lists(CHARGES, max_size=5))
def test_what_is_left_is_what_fits(limit: tuple[float, float], charges: list[Charge]) -> None:
    filters = limit_of(*limit)
    before = total(filters, *charges)
    left = filters.left(before)
    kinds = {"epsilon": plain, "mu": gauss, "rho": concentrated, "delta": lone_key}
    for kind, charge in kinds.items():
        size = left[kind]
        if size > 1e-12:
            assert filters.accepting(before.plus(charge(size * (1 - 1e-9))))
        assert not filters.accepting(before.plus(charge(size * 1.001 + 1e-6)))


def test_how_many_questions_a_limit_allows() -> None:
    """The figures of the guide, and those of the whole delta for the Renyi filter."""
    small = limit_of(4.0, 1e-6)
    nothing = total(small)
    assert [small.further_charges(nothing, plain(size)) for size in (0.1, 0.5, 1.0)] == [61, 8, 4]
    assert [small.further_charges(nothing, gauss(size)) for size in (0.05, 0.1, 0.3)] == [
        256,
        64,
        7,
    ]
    undivided = Limit(4.0, 1e-6, Parts(1e-6, 0.0, 1e-6, best_order(4.0, 1e-6)))
    nothing = total(undivided)
    assert [undivided.further_charges(nothing, plain(size)) for size in (0.1, 0.5, 1.0)] == [
        66,
        8,
        4,
    ]
    assert 0.93 < undivided.left(nothing)["mu"] / mu_of(4.0, 1e-6) < 0.95
    assert small.further_charges(nothing, plain(1e-13)) == 1 << 40


def test_parts_add_up_to_delta_and_are_raised_together() -> None:
    for epsilon, delta in LIMITS:
        parts = default_parts(epsilon, delta)
        exact = [Fraction(repr(part)) for part in (parts.delta, parts.thresholds, parts.renyi)]
        assert exact[0] == exact[1] + exact[2] + parts.gaussian
        before, raised = Limit(epsilon, delta, parts), Limit(2 * epsilon, 3 * delta, parts)
        assert raised.left(total(raised))["delta"] == pytest.approx(3 * 0.4 * delta)
        for kind, size in before.left(total(before)).items():
            assert raised.left(total(raised))[kind] > size
    for bad in ((1e-6, 6e-7, 5e-7, 3.0), (1e-6, -1e-9, 0.0, 3.0), (1e-6, 0.0, 0.0, 1.0)):
        with pytest.raises(ValueError, match="parts of delta"):
            Parts(*bad)


@pytest.mark.parametrize(("epsilon", "delta"), [(4.0, 1e-6), (1.0, 1e-9), (6.0, 1e-9)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_a_first_job_fits_exactly(epsilon: float, delta: float, share: float) -> None:
    """Into its own budget as the limit, and beside another one into twice of it."""
    thresholds = share * delta
    job = Charge(epsilon, delta, mu_of(epsilon, delta - thresholds), None, thresholds)
    own = Limit(epsilon, delta, fitted_parts(epsilon, delta, job))
    assert own.accepting(total(own, job)) == ["gaussian"]
    assert not own.accepting(total(own, job, gauss(1e-3)))
    both = Limit(2 * epsilon, 2 * delta, fitted_parts(2 * epsilon, 2 * delta, job))
    assert both.accepting(total(both, job, job))
    assert both.left(total(both, job))["epsilon"] > 0.1 * epsilon


def test_a_part_that_cannot_hold_a_first_job_is_the_default() -> None:
    sharp = Charge(1.0, 1e-6, mu_of(1.0, 1e-6), None, 1e-6)
    assert fitted_parts(1.0, 1e-6, sharp) == default_parts(1.0, 1e-6)
    assert fitted_parts(1.0, 1e-6, concentrated(0.01)) == default_parts(1.0, 1e-6)
    keys = Charge(0.5, 8e-7)
    assert Limit(1.0, 1e-6, fitted_parts(1.0, 1e-6, keys)).delta_sum_share(Total().plus(keys)) < 1


def test_the_best_order_allows_gaussian_charges_the_most() -> None:
    for epsilon, delta in LIMITS:
        best = best_order(epsilon, delta)
        most = [
            Limit(epsilon, delta, Parts(delta, 0.0, delta, order)).left(Total(order=order))["rho"]
            for order in (best, 1 + (best - 1) * 0.9, 1 + (best - 1) * 1.1)
        ]
        assert most[0] == max(most) > 0


def test_shares_say_which_filter_has_room() -> None:
    filters = limit_of(4.0, 1e-6)
    shares = filters.shares(total(filters, gauss(0.4)))
    assert math.isinf(shares["plain"]) and 0 < shares["gaussian"] < shares["renyi"] < 1
    shares = filters.shares(total(filters, plain(1.0)))
    assert math.isinf(shares["gaussian"]) and shares["plain"] == 0.25 < shares["renyi"]
    shares = filters.shares(total(filters, concentrated(0.01)))
    assert [name for name, share in shares.items() if math.isinf(share)] == ["plain", "gaussian"]
    # Every filter has used at least the share of the delta sum.
    assert min(filters.shares(total(filters, lone_key(2e-7))).values()) == pytest.approx(0.5)
    assert delta_of(4.0, filters.left(total(filters))["mu"]) <= 3e-7
