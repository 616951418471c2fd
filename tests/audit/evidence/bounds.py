"""Lower bounds of the privacy loss of a mechanism, from trials on two neighbours.

A trial is one number (a score) computed from what was published; scores of data set D are
``without``, those of D' (one unit more) ``added``.  The test "score > cutoff" has a false positive
rate a and a false negative rate f, and the claim bounds how small both can be at once:

    f >= G_mu(a) - s,   f >= G_mu(a + s),   G_mu(a) = Phi(Phi^-1(1 - a) - mu),   s = C b.

That is the plan's claim word for word: the mechanism differs from a mu-GDP one in at most C
threshold tests that succeed by chance, each with probability at most b (mechanism.md section
4), so it is within total variation s of it, for a unit that is added and for one that is
removed.  Hence mu >= Phi^-1(1 - a) - Phi^-1(f + s) and mu >= Phi^-1(1 - a - s) - Phi^-1(f).

Validity.  The score may be any function of the output, found in any way on other trials: the
first tenth of the trials chooses statistic and cutoff, the others are counted.  Clopper-Pearson
bounds of a and f hold together with probability 1 - tail, and so does the bound of mu, for
EVERY mechanism with that trade-off, Gaussian or not, however good or bad the score.  What a
sound mechanism's trials must be is independent: they are, as noise of different node names is.
From the same two rates comes the bound of epsilon at delta that needs no Gaussian curve,
e^epsilon >= (1 - f - delta) / a, and the same with the two data sets exchanged.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.stats import beta, norm

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import Budget, lone_chance
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strength import STATED_DELTA

#: Shares of the trials that fit statistics and that choose among them; the rest is counted.
_FIT, _CHOOSE = 0.05, 0.05
_LEAST = 100
_CUTOFFS = 64
_RIDGE = 1e-6
#: How much more (in mu, and in parts of it) another statistic or cutoff must prove to be taken: the
#: largest of many estimates is too large.
_MARGIN = 0.25


class Claim(msgspec.Struct, frozen=True):
    """The claim of a plan about everything it publishes.

    Attributes:
        epsilon, delta: the guarantee of one unit.
        mu: of all noise together, of plain noise what its epsilon implies; slack: C b, of all
            threshold tests together.
        delta_gaussian: the delta at which mu is stated as epsilon.
        tail: the chance that a key of too few units is ever released, at most.
    """

    epsilon: float
    delta: float
    mu: float
    slack: float
    delta_gaussian: float
    tail: float


def mu_of_plain(epsilon: float) -> float:
    """Return the mu-GDP that plain epsilon implies, rounded up.

    The trade-off of randomised response has its corner at false positives and negatives of
    1 / (1 + e^epsilon) each, and the Gaussian curve through it lies below (convexity).
    """
    return float(2 * norm.isf(1 / (1 + np.exp(min(epsilon, 700.0))))) * (1 + 1e-9)


def claim_of(plan: Plan, budget: Budget) -> Claim:
    """Return the claim of a plan, as `accounting.guarantee` prints it."""
    return Claim(
        epsilon=budget.epsilon,
        delta=budget.delta,
        mu=mu_of_plain(budget.epsilon) if budget.plain else budget.mu,
        slack=plan.privacy.contributions * budget.b,
        delta_gaussian=budget.delta * (1 - budget.theta) or STATED_DELTA,
        tail=lone_chance(plan, budget),
    )


class ProvenBound(msgspec.Struct, frozen=True):
    """The lower bounds that the trials of one family prove.

    Attributes:
        mu: lower bound, 0 if nothing is proven; epsilon: the same at ``delta_gaussian``.
        epsilon_plain: lower bound of epsilon at delta without the Gaussian curve.
        false_positives, false_negatives: upper bounds of the two rates at the cutoff.
        statistic: number of the statistic that was chosen; cutoff: what it was compared with.
        trials: (without, added) trials that were counted.
    """

    mu: float
    epsilon: float
    epsilon_plain: float
    false_positives: float
    false_negatives: float
    statistic: int
    cutoff: float
    trials: tuple[int, int]

    def refutes(self, claim: Claim) -> bool:
        """Return whether the claim cannot hold."""
        return self.mu > claim.mu or self.epsilon_plain > claim.epsilon


def rate_above(hits: int, trials: int, tail: float) -> float:
    """Return Clopper-Pearson upper bound of a chance; wrong with probability ``tail`` at most."""
    return float(_rates_above(np.array([hits]), trials, tail)[0])


def _rates_above(hits: Int64, trials: int, tail: float) -> Float64:
    """(n,) upper bounds for as many counts; without misses 1."""
    misses = np.maximum(trials - hits, 1)
    return np.where(hits >= trials, 1.0, beta.isf(tail, hits + 1, misses))


def rate_below(hits: int, trials: int, tail: float) -> float:
    """Return Clopper-Pearson lower bound of a chance; wrong with probability ``tail`` at most."""
    return 1 - rate_above(trials - hits, trials, tail)


def least_mu(false_positives: float, false_negatives: float, slack: float) -> float:
    """Return the smallest mu >= 0 that the claim allows at these rates, in both orders of the
    data.
    """
    return float(_least_mus(np.array([false_positives]), np.array([false_negatives]), slack)[0])


def _least_mus(false_positives: Float64, false_negatives: Float64, slack: float) -> Float64:
    mus = np.zeros(len(false_positives))
    for more, rest in ((0.0, slack), (slack, 0.0)):
        a = np.minimum(1.0, false_positives + more)
        f = np.minimum(1.0, false_negatives + rest)
        proves = a + f < 1
        mus[proves] = np.maximum(mus, norm.isf(a) - norm.ppf(f))[proves]
    return mus


def least_epsilon(false_positives: float, false_negatives: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 of an (epsilon, delta)-DP mechanism with these rates."""
    a, f = false_positives, false_negatives
    pairs = [(1 - f - delta, a), (1 - a - delta, f)]
    return max([0.0, *(math.log(high / low) for high, low in pairs if high > low > 0)])


class Scores(NamedTuple):
    """The (n,) scores of trials on D and (m,) on D', by one statistic."""

    without: Float64
    added: Float64


class Parts(NamedTuple):
    """The numbers of trials of a side that fit statistics, and that choose among them."""

    fit: int
    choose: int

    @classmethod
    def of(cls, trials: int) -> "Parts":
        """Return the parts of ``trials`` a side."""
        least = min(_LEAST, trials // 4)
        return cls(max(least, int(trials * _FIT)), max(least, int(trials * _CHOOSE)))


def bound(statistics: Sequence[Scores], claim: Claim, tail: float) -> ProvenBound:
    """Return lower bounds from trials, each scored by one or more statistics.

    Args:
        statistics: scores of the same trials; the first `Parts.fit` of each side are left out
            (statistics may have been fitted to them), the next `Parts.choose` choose statistic
            and cutoff, the rest is counted.
        claim: gives slack and deltas; the bound does not depend on mu or epsilon.
        tail: the chance that the result is too high.
    """
    parts = [Parts.of(len(side)) for side in statistics[0]]
    chosen, cutoff = _choice(statistics, parts, claim.slack, tail)
    counted = [s[p.fit + p.choose :] for s, p in zip(statistics[chosen], parts, strict=True)]
    positive = rate_above(int((counted[0] > cutoff).sum()), len(counted[0]), tail / 2)
    negative = rate_above(int((counted[1] <= cutoff).sum()), len(counted[1]), tail / 2)
    mu = least_mu(positive, negative, claim.slack)
    return ProvenBound(
        mu=mu,
        epsilon=epsilon_of(mu, claim.delta_gaussian),
        epsilon_plain=least_epsilon(positive, negative, claim.delta),
        false_positives=positive,
        false_negatives=negative,
        statistic=chosen,
        cutoff=cutoff,
        trials=(len(counted[0]), len(counted[1])),
    )


def _choice(
    statistics: Sequence[Scores], parts: Sequence[Parts], slack: float, tail: float
) -> tuple[int, float]:
    """(statistic, cutoff) to count with: the first statistic, half-way between the two sides'
    means, unless another choice proves clearly more on the trials set aside for this."""
    middle = sum(
        float(s[: p.fit + p.choose].mean()) for s, p in zip(statistics[0], parts, strict=True)
    )
    chosen, cutoff, best = 0, middle / 2, 0.0
    for number, scores in enumerate(statistics):
        a, b = (np.sort(s[p.fit : p.fit + p.choose]) for s, p in zip(scores, parts, strict=True))
        if number == 0:
            best = _MARGIN + (1 + _MARGIN) * float(
                _proven(a, b, np.array([cutoff]), slack, tail)[0]
            )
        cutoffs = _cutoffs(a, b)
        mus = _proven(a, b, cutoffs, slack, tail)
        if mus.max() > best:
            chosen, cutoff, best = number, float(cutoffs[mus.argmax()]), float(mus.max())
    return chosen, cutoff


def _cutoffs(without: Float64, added: Float64) -> Float64:
    """Cutoffs to try, at scores and between them: a broken mechanism's may hardly differ."""
    both = np.concatenate([without, added])
    at = np.unique(np.quantile(both, np.linspace(0, 1, _CUTOFFS), method="inverted_cdf"))
    return np.concatenate([(at[1:] + at[:-1]) / 2, at])


def _proven(
    without: Float64, added: Float64, cutoffs: Float64, slack: float, tail: float
) -> Float64:
    """(n,) bounds of mu that cutoffs prove on some trials, both sides sorted."""
    positive = len(without) - np.searchsorted(without, cutoffs, side="right")
    negative = np.searchsorted(added, cutoffs, side="right")
    return _least_mus(
        _rates_above(positive, len(without), tail / 2),
        _rates_above(negative, len(added), tail / 2),
        slack,
    )


def fitted_weights(without: Float64, added: Float64) -> Float64:
    """Return (d,) weights of the linear statistic that best distinguishes the two sides.

    Fisher's discriminant of columns scaled to sd 1.  Unlike the statistic of a plan it needs no
    claim: it finds noise that is used twice, effects beyond a bound, publication by data.

    Args:
        without, added: (n, d) and (m, d) public features of trials that are not counted.
    """
    both = np.concatenate([without, added])
    scale = both.std(axis=0)
    live = scale > 1e-9 * (1 + np.abs(both).max(axis=0, initial=0))
    weights = np.zeros(both.shape[1])
    if not live.any():
        return weights
    a, b = without[:, live] / scale[live], added[:, live] / scale[live]
    within = (np.cov(a, rowvar=False) + np.cov(b, rowvar=False)).reshape(a.shape[1], -1)
    within[np.diag_indices_from(within)] += _RIDGE
    solved = np.linalg.solve(within, b.mean(axis=0) - a.mean(axis=0))
    weights[live] = solved / scale[live]
    return weights


def trade_off(scores: Scores) -> tuple[Float64, Float64]:
    """Return empirical (false positives, false negatives) of every cutoff, from none to all
    flagged.
    """
    cutoffs = np.unique(np.concatenate(scores))
    without, added = np.sort(scores.without), np.sort(scores.added)
    positive = 1 - np.searchsorted(without, cutoffs, side="right") / len(without)
    negative = np.searchsorted(added, cutoffs, side="right") / len(added)
    return np.concatenate([[1.0], positive]), np.concatenate([[0.0], negative])


def claimed_curve(claim: Claim, false_positives: Float64) -> Float64:
    """Return the least false negatives that the claim allows, by (epsilon, delta) and mu-GDP
    together.
    """
    a = np.asarray(false_positives, np.float64)
    gaussian = np.maximum(
        norm.cdf(norm.isf(a) - claim.mu) - claim.slack,
        norm.cdf(norm.isf(np.minimum(1.0, a + claim.slack)) - claim.mu),
    )
    mass = 1 - claim.delta
    plain = np.maximum(mass - np.exp(claim.epsilon) * a, np.exp(-claim.epsilon) * (mass - a))
    return np.asarray(np.maximum(0.0, np.maximum(gaussian, plain)))
