"""Decaying selection weights, and the statistic a key is tested on (mechanism.md section 8).

Most units have few records, so their first ones should count more: the i-th admitted
(record, window) pair of a unit (i = 1 .. C, in admission order, each pair its own index)
adds w_i instead of 1 to the selection count of its key.  A unit counts once per (key, round):
the first of its pairs that is applied counts, the lowest index within a micro-batch.

Sensitivity: a unit's pairs in n different (key, round) trees have n different indices, so
their squared effect is at most (sum of the n largest w_i^2) col2.  Weights are whole numbers
of 2^-WEIGHT_BITS, rounded DOWN from c (i + offset)^-power with c such that the real ones have
sum of squares 1; the accounting uses the integers.

Combined: the test uses ``a * (weighted count) + d * (plain count)``, both noisy streams, the
plain one published anyway: post-processing of two Gaussian mechanisms.  A unit alone in a key
adds at most a max w + d to it, which is what the thresholds are raised by.
"""

import functools
from typing import Any

import flint
import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.errors import UsageError

#: Weighted counts are integers in units of 2^-WEIGHT_BITS.
WEIGHT_BITS = 8
#: The weighted term of a combined statistic; the plain one's coefficient is set by precision.
_COMBINED_SCALE = 8
_PRECISION = 256
_SLACK = 1e-12


class SelectionWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Public, decreasing weights proportional to (i + offset)^-power.

    Attributes:
        offset: >= 0; 3 keeps the second pair at 4/5 (power 1) of the first.
        power: 0 < power <= 4; larger ones favour units with few records.
    """

    offset: float = 3.0
    power: float = 1.0

    def check(self, contributions: int, vanishing: bool = False) -> None:
        """Refuse weights that do not decay, or (unless they may) vanish on their lattice."""
        if not (0 <= self.offset <= 1e6 and 0 < self.power <= 4):
            raise UsageError(
                "privacy.weights",
                "needs 0 <= offset <= 1e6 and 0 < power <= 4",
                "write e.g. weights = { offset = 3, power = 1 }",
            )
        if not vanishing and self.integers(contributions)[-1] < 1:
            raise UsageError(
                "privacy.weights",
                f"the weight of a unit's last pair is below the lattice of 2^-{WEIGHT_BITS}",
                "use a smaller power or fewer contributions",
            )

    def integers(self, contributions: int) -> Int64:
        """(C,) weights in units of 2^-WEIGHT_BITS, decreasing, sum of squares <= 2^(2 bits)."""
        return _integers(self.offset, self.power, contributions)


@functools.lru_cache(maxsize=64)
def _integers(offset: float, power: float, contributions: int) -> Int64:
    """Ball arithmetic, so that every machine rounds alike."""
    with precision(_PRECISION):
        exponent = -flint.arb(power)
        raw = [(flint.arb(offset) + i) ** exponent for i in range(1, contributions + 1)]
        norm = sum((w * w for w in raw), flint.arb(0)).sqrt()
        scaled = [_floor(w / norm * (1 << WEIGHT_BITS)) for w in raw]
    weights = np.array(scaled, np.int64)
    weights.setflags(write=False)
    return weights


def _floor(ball: Any) -> int:
    """floor, or one less where the number is whole as far as its ball tells."""
    floor = ball.floor().unique_fmpz()
    return round(float(ball)) - 1 if floor is None else int(floor)


def square_parts(weights: Int64 | None, contributions: int) -> Float64:
    """(C,) sum of the n largest squared weights for n = 1..C, the whole being 1; rounded up."""
    if weights is None:
        return np.arange(1, contributions + 1) / contributions
    squares = np.cumsum(np.sort(weights.astype(np.float64) ** 2)[::-1])
    return np.asarray(np.minimum(squares / squares[-1] * (1 + _SLACK), 1.0))


#: More keys at the same error than with equal weights, for every record counted.
MILD = SelectionWeights(3.0, 0.35)
#: Many more keys for a little more error.
EVEN = SelectionWeights(3.0, 0.5)
#: For the combined statistic, where values do not depend on the selection's weights.
STEEP = SelectionWeights(3.0, 1.5)
#: The same where pairs on published keys take none of them: the first ones last longer.
SPARED = SelectionWeights(1.5, 2.0)


def usual_weights(
    contributions: int, *, combine: bool, sticky: bool, fused: bool, skip: bool = False
) -> SelectionWeights | None:
    """The weights of a job that names none.

    Steep where the statistic is combined (steeper where published keys are skipped), mild where
    every record counts and selection has noise of its own; equal where the published count of
    units IS the selection, where units have few pairs, or so many that the last weights vanish,
    and where nothing is selected.

    Args:
        contributions: C; combine: the statistic is combined.
        sticky: keys are selected, once a window; fused: a count of units is published.
        skip: pairs on published keys take no weight, so that the first ones last longer.
    """
    if combine and skip:
        return SPARED
    if combine:
        return next((w for w in (STEEP, MILD) if w.integers(contributions)[-1]), STEEP)
    if not sticky or fused or not 8 <= contributions <= limits.MAX_WEIGHTED:
        return None
    return MILD if MILD.integers(contributions)[-1] else None


class Statistic(msgspec.Struct, frozen=True, eq=False):
    """What a key is tested on: ``weighted * W + counted * U``, both with their noise.

    W is the selection stream's count (in 2^-WEIGHT_BITS with weights), U the plain published
    count of units (``counted`` = 0: not used).

    Attributes:
        weighted, counted: public integer coefficients.
        alone: the most one unit alone in a key adds.
        sd: sd of the statistic at each test; rounding: its D_t; in its own units, rounded up.
    """

    weighted: int
    counted: int
    alone: int
    sd: Float64
    rounding: Float64


def precision_weighted(
    weights: Int64, selection_variance: float, count_variance: float
) -> tuple[int, int]:
    """Coefficients that see most: a typical unit's weight over the variance, for each stream.

    The typical unit is public, the mean of the first quarter of the weights (a unit's first
    records are its most common ones); any coefficients are private.

    Args:
        weights: (C,) in 2^-WEIGHT_BITS.
        selection_variance: of the weighted stream's final prefix, in 2^-WEIGHT_BITS squared.
        count_variance: of the plain count's, in counts squared.

    Returns:
        (weighted, counted): the statistic adds ``weighted`` per 2^-WEIGHT_BITS and
        ``counted`` per unit.
    """
    typical = float(weights[: max(1, len(weights) // 4)].mean())
    ratio = selection_variance / count_variance / typical
    return _COMBINED_SCALE, max(1, round(_COMBINED_SCALE * ratio))
