"""Selection of groups: size-aware weights, the statistic, and tau (mechanism.md section 11).

**Weights.**  A unit of n groups (after bounding) adds w_n to the selection count of each.  Its
columns' parts then move by sum_j V_j f_j(n) of mu^2, f_j(n) = squared effect in n groups over the
largest, so that selection may use what is left of mu^2 with share S:

    S n w_n^2 + sum_j V_j f_j(n) <= 1,
    w_n = floor(2^b sqrt((1 - sum_j V_j f_j(n)) / (S n))) / 2^b.

With n = kappa this is 1 / sqrt(kappa) = norm 1; a unit of fewer groups leaves part of the columns'
budget unused, and its weights have a norm above 1, up to 1 / sqrt(S).  w_n falls with n, because
the numerator does.  The weights of 1, 2, .. groups may be cut to one value (``_CAPS``): that of
the least tau is taken, which is public arithmetic.

**Statistic.**  Q = a W + d U, W the noisy weighted count in 2^-b, U the noisy published count of
units (or of rows, at most one a group), if the query has one.  Both are published or spent anyway,
so Q is post-processing of them.  a is fixed, d by precision.

**tau.**  A unit alone in t <= kappa groups is in n >= t groups, so that it adds at most
alone_t = a w_t + d c to each: w_n <= w_t, and c is the most it adds to one group's count (1;
scaled to a norm R it is min(1, R) for every t, not R / sqrt(t): the scaled vector of a count of
rows can lie in one of its t groups).  With delta_tau of delta kept for thresholds

    tau = max over t <= kappa of  alone_t + sd isf(delta_tau / t) + rounding,

and release iff exact units >= m and Q > (m - 1) most + tau, most = a w_1 + d c (so that in units
of ``most`` it is noisy > (m - 1) + tau).  Then each of the t groups in which only D' counts m
units is released with at most delta_tau / t, whichever t it is, all of them with at most delta_tau,
and (epsilon, delta) holds with delta = delta_G(epsilon; mu) + delta_tau, by the proof of section 4.

The sharper rule of one test (section 4) is proven for these weights too but is not used: in an
account queries add up as mu and delta_tau, and it would charge all of delta as delta_tau.
"""

import math
from collections.abc import Sequence

import msgspec

from dpstream.accounting.budget.thresholds import TYPICAL_SIZES, isf
from dpstream.accounting.errors import required
from dpstream.accounting.query.parts import QueryPart

#: Lattice of selection weights.
WEIGHT_BITS = 16
#: a: fine enough for a d below 1 / 16.
_WEIGHTED = 256
#: Numbers of groups below which weights may be alike.
_CAPS = (1, 2, 3, 4)
#: Relative error allowed for roots, sums and isf.
_SLACK = 1e-12


class Selection(msgspec.Struct, frozen=True):
    """The parameters of the selection of groups; all public.

    Attributes:
        share: S of mu^2, 0 where the tested count is all there is (geometric).
        weights: (kappa,) w_n in 2^-WEIGHT_BITS for n = 1, 2, ..; empty without such a stream.
        sigma: sd of the weighted count's noise in 2^-WEIGHT_BITS.
        weighted, counted: a and d.
        tested: number of the part that is U, ``None`` without.
        sd: of Q; 0 where its law is not Gaussian.
        most: the most that one unit adds to Q.
        tau: as above, in units of Q; threshold: rounded up to a whole number.
        optimum: epsilon of one key in the best selection of each key, which draws no count
            (``accounting.mechanisms.optimum``); 0 where Q is tested.
    """

    share: float
    weights: tuple[int, ...]
    sigma: float
    weighted: int
    counted: int
    tested: int | None
    sd: float
    most: int
    tau: float
    threshold: int
    optimum: float = 0.0

    def need(self, min_units: int) -> int:
        """Return the number that Q must exceed."""
        return (min_units - 1) * self.most + self.threshold

    def even_chance(
        self, groups: int, min_units: int = 1, count: float = 1.0, sooner: float = 0.0
    ) -> float:
        """Return how many units, of ``groups`` groups each, give a group a release chance of 1/2.

        Args:
            count: what each adds to U, in lattice units.
            sooner: chance that the threshold is one lower, of truncated noise.
        """
        need = self.need(min_units)
        if not self.weights:
            # U alone, a whole number: its noise is above 0 with a chance below 1/2.
            return float(max(min_units, need + 1 - int(sooner >= 0.5)))
        each = self.weighted * self.weights[groups - 1] + self.counted * count
        return max(float(min_units), need / each)


def count_tested(parts: Sequence[QueryPart], units: frozenset[str]) -> int | None:
    """Return the published count that joins the test: of units, else of rows where one is the most.

    Args:
        units: names of the columns that count units.
    """
    fine = [
        (part.column not in units, index)
        for index, part in enumerate(parts)
        if part.what == "count" and (part.low, part.high) == (0, 1)
    ]
    return min(fine)[1] if fine else None


def weights_of(
    share: float,
    parts: Sequence[QueryPart],
    shares: Sequence[float],
    groups: int,
    reserved: float = 0.0,
) -> tuple[int, ...]:
    """Return (kappa,) weights in 2^-WEIGHT_BITS, rounded down, not capped.

    Args:
        share: S; shares: V_j of each part, as fractions of mu^2; reserved: what every unit
            may have used before (bounds that the query chose).
    """
    largest = [part.l2_squared(groups) for part in parts]
    out = []
    for n in range(1, groups + 1):
        terms = zip(parts, shares, largest, strict=True)
        used = math.fsum(v * (p.l2_squared(n) / most) for p, v, most in terms) * (1 + _SLACK)
        free = max(0.0, 1 - _SLACK - reserved - used) / (share * n)
        out.append(math.floor(math.sqrt(free) * (1 - _SLACK) * (1 << WEIGHT_BITS)))
    return tuple(out)


def coefficient(weights: Sequence[int], sigma: float, part: QueryPart, part_sigma: float) -> int:
    """Return d of Q for a = _WEIGHTED: the points of W that a typical unit's point of U is worth.

    Precision weighting: a typical unit's weight over the variance, for each of the two.
    """
    typical = weights[: min(len(weights), TYPICAL_SIZES)]
    mean = math.fsum(typical) / len(typical)
    counted = part.alone / part_sigma**2
    return max(1, round(_WEIGHTED * sigma**2 / mean * counted)) if mean else 1


def alone_of(
    weights: Sequence[int], weighted: int, counted: int, part: QueryPart | None
) -> tuple[int, ...]:
    """Return (kappa,) alone_t: the most a unit alone in t groups adds to Q of one of them."""
    extra = 0 if part is None else counted * math.ceil(part.alone)
    return tuple(weighted * w + extra for w in weights)


def tau_of(
    alone: Sequence[int], sd: float, rounding: float, delta_tau: float, isfs: Sequence[float] = ()
) -> float:
    """Return tau: see the module; rounded up."""
    isfs = isfs or tails(delta_tau, len(alone))
    worst = max(most + sd * isf_t for most, isf_t in zip(alone, isfs, strict=True))
    return (worst + rounding) * (1 + _SLACK / 10)


def tails(delta_tau: float, groups: int) -> tuple[float, ...]:
    """Return isf(delta_tau / t) for t = 1 .. kappa, rounded up."""
    log = math.log(delta_tau)
    return tuple(isf(log - math.log(t)) for t in range(1, groups + 1))


def gaussian_selection(
    share: float,
    mu: float,
    delta_tau: float,
    groups: int,
    parts: Sequence[QueryPart],
    shares: Sequence[float],
    sigmas: Sequence[float],
    tested: int | None,
    reserved: float = 0.0,
) -> Selection:
    """Return the selection of a Gaussian query: weights, coefficients, tau.

    Args:
        share: S; shares, sigmas: V_j and noise of each part; tested: number of U's part.
    """
    all_weights = weights_of(share, parts, shares, groups, reserved)
    sigma = (1 << WEIGHT_BITS) / (math.sqrt(share) * mu) * (1 + _SLACK)
    part = None if tested is None else parts[tested]
    part_sigma = 0.0 if tested is None else sigmas[tested]
    isfs = tails(delta_tau, groups)
    best: Selection | None = None
    for cap in _CAPS[:groups]:
        weights = tuple(min(w, all_weights[cap - 1]) for w in all_weights)
        d = 0 if part is None else coefficient(weights, sigma, part, part_sigma)
        sd = math.sqrt((_WEIGHTED * sigma) ** 2 + (d * part_sigma) ** 2) * (1 + _SLACK / 10)
        alone = alone_of(weights, _WEIGHTED, d, part)
        tau = tau_of(alone, sd, (_WEIGHTED + d) / 2, delta_tau, isfs)
        if best is None or tau / best.tau < 1 - _SLACK:
            best = Selection(
                share, weights, sigma, _WEIGHTED, d, tested, sd, alone[0], tau, math.ceil(tau)
            )
    return required(best, "best is there")
