"""Lower bounds from trials: never above the claim but with their chance, and not far below."""

from fractions import Fraction
from math import comb

import msgspec
import numpy as np
import pytest
from scipy.stats import binom, norm

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.gaussian import delta_of, epsilon_of, mu_of
from tests.accounting.plans import Make
from tests.audit.evidence.bounds import (
    Claim,
    Parts,
    ProvenBound,
    Scores,
    bound,
    claim_of,
    claimed_curve,
    fitted_weights,
    least_epsilon,
    least_mu,
    rate_above,
    rate_below,
    trade_off,
)


def claim(mu: float = 1.0, slack: float = 0.0, delta: float = 1e-6) -> Claim:
    return Claim(epsilon_of(mu, delta), delta, mu, slack, delta, slack)


@pytest.mark.parametrize("trials", [1, 7, 40])
@pytest.mark.parametrize("tail", [0.2, 0.01])
def test_rates_cover_exactly(trials: int, tail: float) -> None:
    """For every true chance the bounds are wrong with probability tail at most, in rationals."""
    bounds = [rate_above(hits, trials, tail) for hits in range(trials + 1)]
    assert bounds == sorted(bounds) and bounds[-1] == 1.0
    for chance in [Fraction(n, 97) for n in range(1, 97)]:
        wrong = sum(
            comb(trials, hits) * chance**hits * (1 - chance) ** (trials - hits)
            for hits in range(trials + 1)
            if bounds[hits] < chance
        )
        assert wrong <= tail + 1e-12
    assert all(rate_below(h, trials, tail) <= h / trials <= bounds[h] for h in range(trials + 1))
    # And not for a smaller bound: it is the smallest that covers.
    assert binom.cdf(0, trials, bounds[0]) == pytest.approx(tail)


def test_least_mu_is_the_claims_own() -> None:
    for mu in (0.1, 1.0, 3.0):
        for cutoff in (-1.0, 0.3, 2.0):
            a, f = norm.sf(cutoff), norm.cdf(cutoff - mu)
            assert least_mu(a, f, 0.0) == pytest.approx(mu)
            # With slack the claim is weaker, by just as much in both orders of the data.
            edge = max(f - 0.01, norm.cdf(norm.isf(a + 0.01) - mu))
            assert least_mu(a, edge, 0.01) == pytest.approx(mu)
            assert least_mu(a, f, 0.02) < mu
    assert least_mu(0.6, 0.5, 0.0) == 0.0
    assert least_mu(0.0, 1e-3, 0.0) > 100


def test_least_epsilon_of_randomised_response() -> None:
    for epsilon, delta in ((0.5, 0.0), (2.0, 1e-3), (6.0, 1e-9)):
        a = (1 - delta) / (1 + np.exp(epsilon))
        assert least_epsilon(a, a, delta) == pytest.approx(epsilon)
        assert least_epsilon(1.5 * a, 1.5 * a, delta) < epsilon
    assert least_epsilon(0.5, 0.5, 0.0) == 0.0


def leaky(rng: np.random.Generator, trials: int, mu: float, slack: float) -> Scores:
    """A mechanism exactly on the claimed curve: Gaussian, and with chance slack it tells all."""
    added = rng.normal(mu, 1, trials)
    return Scores(rng.normal(0, 1, trials), np.where(rng.random(trials) < slack, 50.0, added))


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_bounds_are_too_high_no_more_often_than_said(slack: float) -> None:
    """With further statistics to choose from (noise, a copy, a worse one), at a tail of 10%."""
    rng, tail, rounds = np.random.default_rng(1), 0.1, 600
    wrong = 0
    for _ in range(rounds):
        scores = leaky(rng, 600, 1.0, slack)
        noise = Scores(*(rng.normal(0, 1, 600) for _ in range(2)))
        worse = Scores(*(s + 0.3 * n for s, n in zip(scores, noise, strict=True)))
        proven = bound([worse, scores, noise], claim(1.0, slack), tail)
        wrong += proven.mu > 1.0
        assert proven.epsilon == epsilon_of(proven.mu, 1e-6)
    assert rate_below(wrong, rounds, 1e-6) <= tail


def test_a_leak_that_the_claim_does_not_hold_is_found() -> None:
    """The same mechanism without the slack in the claim: one trial in twenty tells all."""
    rng = np.random.default_rng(2)
    scores = leaky(rng, 10_000, 1.0, 0.05)
    assert bound([scores], claim(1.0, 0.0), 0.01).refutes(claim(1.0, 0.0))
    assert not bound([scores], claim(1.0, 0.05), 0.01).refutes(claim(1.0, 0.05))


@pytest.mark.parametrize(("trials", "least"), [(10_000, 0.88), (100_000, 0.96)])
def test_gaussians_are_measured_well(trials: int, least: float) -> None:
    rng = np.random.default_rng(3)
    mu = mu_of(6.0, 1e-9)
    for factor in (1.0, 1.25):
        scores = Scores(rng.normal(0, 1, trials), rng.normal(mu * factor, 1, trials))
        proven = bound([scores], claim(mu), 0.01)
        assert proven.mu >= least * mu * factor
        assert proven.refutes(claim(mu)) == (factor > 1)
        assert proven.epsilon_plain <= proven.epsilon


def test_a_statistic_that_separates_is_chosen() -> None:
    rng = np.random.default_rng(4)
    blind = Scores(rng.normal(0, 1, 2000), rng.normal(0.1, 1, 2000))
    exact = Scores(np.zeros(2000), np.full(2000, 1e-9))
    proven = bound([blind, exact], claim(), 0.01)
    assert proven.statistic == 1 and proven.mu > 4
    assert bound([blind, blind], claim(), 0.01).statistic == 0


def test_the_rates_are_those_of_the_counted_trials_each_with_half_of_the_tail() -> None:
    rng = np.random.default_rng(8)
    scores = Scores(np.round(rng.normal(0, 1, 3000), 1), np.round(rng.normal(1, 1, 3000), 1))
    proven = bound([scores], claim(2.0), 0.02)
    at = Parts.of(3000)
    without, added = (side[at.fit + at.choose :] for side in scores)
    above, below = (without > proven.cutoff).sum(), (added <= proven.cutoff).sum()
    assert proven.false_positives == rate_above(int(above), len(without), 0.01)
    assert proven.false_negatives == rate_above(int(below), len(added), 0.01)
    assert proven.mu == least_mu(proven.false_positives, proven.false_negatives, claim(2.0).slack)


def test_a_score_on_the_cutoff_is_not_above_it() -> None:
    scores = Scores(
        np.zeros(2000), np.repeat([0.0, 1.0], 1000)[np.random.default_rng(9).permutation(2000)]
    )
    proven = bound([scores], claim(), 0.01)
    counted = scores.added[sum(Parts.of(2000)) :]
    misses = int((counted <= proven.cutoff).sum())
    assert proven.false_negatives == rate_above(misses, len(counted), 0.005)
    assert proven.false_positives == rate_above(0, len(counted), 0.005)


def test_trials_that_choose_are_not_counted() -> None:
    """Sides that differ only among the trials set aside prove nothing."""
    rng = np.random.default_rng(5)
    without, added = rng.normal(0, 1, (2, 4000))
    parts = Parts.of(4000)
    added[: parts.fit + parts.choose] += 100
    proven = bound([Scores(without, added)], claim(), 0.01)
    assert proven.mu < 0.1 and sum(proven.trials) == 2 * (4000 - parts.fit - parts.choose)


def test_fitted_statistic_finds_noise_used_twice() -> None:
    """Two columns with one noise: alone each hides an effect of 0.01 sd, together they show it."""
    rng = np.random.default_rng(6)
    noise = rng.normal(0, 10, (2, 400))
    sides = [np.stack([n + 0.1 * side, n, np.zeros(400)], axis=1) for side, n in enumerate(noise)]
    weights = fitted_weights(*sides)
    scores = [side @ weights for side in sides]
    assert weights[2] == 0 and scores[0].max() < scores[1].min()
    alike = fitted_weights(np.ones((5, 2)), np.ones((5, 2)))
    assert not alike.any()
    # Columns that never vary within a side but differ between them tell all.
    fixed = fitted_weights(np.zeros((5, 1)), np.ones((5, 1)))
    assert fixed[0] > 0


def test_the_fitted_statistic_is_fishers() -> None:
    """Columns of very different scale and middle, correlated, and one that never varies."""
    rng = np.random.default_rng(9)
    scale, middle = np.array([1e-3, 1.0, 1e4]), np.array([5.0, -3.0, 2e7])
    mix = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.5, 0.1, 0.8]])
    without = rng.normal(0, 1, (500, 3)) @ mix.T
    added = rng.normal(0, 0.7, (600, 3)) @ mix.T + [0.5, 0.1, -0.4]
    sides = [np.c_[side * scale + middle, np.full(len(side), 7.0)] for side in (without, added)]
    within = np.cov(without, rowvar=False) + np.cov(added, rowvar=False)
    best = np.linalg.solve(within, added.mean(axis=0) - without.mean(axis=0)) / scale
    weights = fitted_weights(*sides)
    assert weights[3] == 0
    assert weights[:3] / weights[1] == pytest.approx(best / best[1], rel=1e-3)


def test_float_noise_of_a_large_constant_is_no_statistic() -> None:
    rng = np.random.default_rng(10)
    jitter = [1e9 + np.where(rng.random((50, 1)) < p, 1e-6, 0.0) for p in (0.2, 0.8)]
    assert not fitted_weights(*jitter).any()


def test_only_more_than_the_claim_refutes_it() -> None:
    privacy_claim = claim(1.0)
    at = ProvenBound(1.0, 0.0, privacy_claim.epsilon, 0.1, 0.1, 0, 0.0, (9, 9))
    assert not at.refutes(privacy_claim)
    for more in ({"mu": 1.0 + 1e-9}, {"epsilon_plain": privacy_claim.epsilon + 1e-9}):
        assert msgspec.structs.replace(at, **more).refutes(privacy_claim)


def test_the_trade_off_of_scores_that_repeat() -> None:
    """Above a cutoff is strictly above it, on both sides."""
    positive, negative = trade_off(Scores(np.array([0.0, 1, 1, 2]), np.array([1.0, 2, 2, 3])))
    assert positive.tolist() == [1, 0.75, 0.25, 0, 0]
    assert negative.tolist() == [0, 0, 0.25, 0.75, 1]


def test_curves() -> None:
    rng = np.random.default_rng(7)
    scores = Scores(rng.normal(0, 1, 50_000), rng.normal(1, 1, 50_000))
    positive, negative = trade_off(scores)
    assert positive[0] == 1 and negative[0] == 0 and positive[-1] == 0 and negative[-1] == 1
    assert (np.diff(positive) <= 0).all() and (np.diff(negative) >= 0).all()
    least = claimed_curve(claim(1.0), positive)
    assert np.abs(least - negative).max() < 0.02
    # The (epsilon, delta) curve of a mu-GDP mechanism lies below its Gaussian one.
    only = claimed_curve(Claim(2.0, delta_of(2.0, 1.0), 50.0, 0.0, 1e-6, 0.0), positive)
    assert (only <= norm.cdf(norm.isf(positive) - 1.0) + 1e-9).all()
    assert (claimed_curve(claim(1.0, 0.1), positive) <= least).all()


def test_claims(make_plan: Make) -> None:
    plan = make_plan(8)
    budget = allocate(plan)
    claim = claim_of(plan, budget)
    assert claim.slack == pytest.approx(0.4e-9) and claim.delta_gaussian == pytest.approx(0.6e-9)
    assert claim.mu == budget.mu and claim.tail == budget.b
    assert (claim.epsilon, claim.delta) == (6.0, 1e-9)
    public = make_plan(8, public_keys="f" * 32)
    assert claim_of(public, allocate(public)).slack == 0.0
