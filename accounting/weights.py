"""Decaying selection weights, and the statistic a key is tested on (mechanism.md section 8).

Most units have few records, so their first ones should count more: the i-th admitted
(record, window) pair of a unit (i = 1 .. C, in admission order, each pair its own index)
adds w_i instead of 1 to the selection count of its key.  A unit counts once per (key, round):
the first of its pairs that is applied counts, the lowest index within a micro-batch.

Sensitivity: a unit's pairs in n different (key, round) trees have n different indices, so
their squared effect is at most (sum of the n largest w_i^2) col2.  Weights are whole numbers
of 2^-WEIGHT_BITS, rounded DOWN from c (i + offset)^-power with c such that the real ones have
sum of squares 1; the accounting uses the integers.

**By size** (``SelectionWeights.size_share``).  Where all pairs of a unit are decided at once, in
one window with one trigger and with a bound of 1 per key (`accounting.plan.plan`), their number n
is known before any of them is counted, and each adds w_n.  With S = size_share the unit's part of
the columns' budget that n pairs leave unused goes to selection:

    S n w_n^2 + (1 - S) n / C <= 1,    w_n = sqrt((1 - (1 - S) n / C) / (S n)),

rounded down to the lattice.  Sensitivity: n is a function of
the unit's own records, so that the unit moves n trees of selection by w_n each and n trees of a
column by one record each: n w_n^2 of norm 1, which has share S, and n / C of the columns' share.
The sum is at most 1 for every n <= C.  Other units' numbers do not depend on the unit.  The noise
of all these trees is drawn once, in the only step of the only window that the unit is in.

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
from dpstream.accounting.budget.thresholds import TYPICAL_SIZES
from dpstream.accounting.errors import UsageError

#: Weighted counts are integers in units of 2^-WEIGHT_BITS.
WEIGHT_BITS = 8
#: The weighted term of a combined statistic; the plain one's coefficient is set by precision.
_COMBINED_SCALE = 8
_PRECISION = 256
_SLACK = 1e-12


class SelectionWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Public, decreasing weights: of the i-th pair proportional to (i + offset)^-power, or by size.

    Attributes:
        offset: >= 0; 3 keeps the second pair at 4/5 (power 1) of the first.
        power: 0 < power <= 4; larger ones favour units with few records.
        size_share: S, in the place of offset and power: weights go by the number of a unit's
            pairs, and selection has this share of mu^2; ``None``: by their order.
    """

    offset: float = 3.0
    power: float = 1.0
    size_share: float | None = None

    @property
    def by_size(self) -> bool:
        """Return whether weights go by the number of a unit's pairs."""
        return self.size_share is not None

    def check(self, contributions: int, vanishing: bool = False) -> None:
        """Refuse weights that do not decay, or (unless they may) vanish on their lattice."""
        if self.size_share is not None:
            if not 0.01 <= self.size_share <= 0.99:
                raise UsageError(
                    "mechanism.weights.size_share", "must lie between 0.01 and 0.99", "write 0.2"
                )
            if (self.offset, self.power) != (3.0, 1.0):
                raise UsageError(
                    "mechanism.weights.size_share",
                    "sets weights by size, but offset and power set weights by order",
                    "keep one of the two",
                )
        if not (0 <= self.offset <= 1e6 and 0 < self.power <= 4):
            raise UsageError(
                "mechanism.weights",
                "needs 0 <= offset <= 1e6 and 0 < power <= 4",
                "write e.g. weights = { offset = 3, power = 1 }",
            )
        if not vanishing and self.integers(contributions)[-1] < 1:
            raise UsageError(
                "mechanism.weights",
                f"the weight of a unit's last pair is below the lattice of 2^-{WEIGHT_BITS}",
                "use a smaller power or fewer contributions",
            )

    def integers(self, contributions: int) -> Int64:
        """Return (C,) weights in units of 2^-WEIGHT_BITS, decreasing.

        By order of the i-th pair, i = 1 .. C, with a sum of squares <= 2^(2 bits).  By size of each
        pair of a unit of n, n = 1 .. C: see the module.
        """
        if self.size_share is not None:
            return _by_size(self.size_share, contributions)
        return _integers(self.offset, self.power, contributions)

    def alone(self, contributions: int, keys: int) -> Int64:
        """Return (keys,) the part of a unit of ``contributions`` pairs in the count of each of its
        keys.
        """
        weights = self.integers(contributions)
        return np.full(keys, weights[keys - 1]) if self.by_size else weights[:keys]

    def norm2(self, contributions: int) -> float:
        """Return the squared norm, in 2^-(2 WEIGHT_BITS), that the share of selection pays for."""
        if self.by_size:
            return float(1 << 2 * WEIGHT_BITS)
        return float((self.integers(contributions) ** 2).sum())

    def squares(self, contributions: int) -> Float64:
        """Return (C,) the largest effect of n pairs on selection, n = 1 .. C, of ``norm2``; rounded
        up.
        """
        weights = self.integers(contributions)
        if not self.by_size:
            return square_parts(weights, contributions)
        number = np.arange(1, contributions + 1)
        return number * weights.astype(np.float64) ** 2 / self.norm2(contributions) * (1 + _SLACK)


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


@functools.lru_cache(maxsize=64)
def _by_size(share: float, contributions: int) -> Int64:
    """Ball arithmetic, so that every machine rounds alike."""
    with precision(_PRECISION):
        part = flint.arb(share)
        rest, scale = (1 - part) / contributions, 1 << WEIGHT_BITS
        squares = [(1 - rest * n) / (part * n) for n in range(1, contributions + 1)]
        weights = np.array([_floor(square.sqrt() * scale) for square in squares], np.int64)
    weights.setflags(write=False)
    return weights


def _floor(ball: Any) -> int:
    """floor, or one less where the number is whole as far as its ball tells."""
    floor = ball.floor().unique_fmpz()
    return round(float(ball)) - 1 if floor is None else int(floor)


def square_parts(weights: Int64 | None, contributions: int) -> Float64:
    """Return (C,) sum of the n largest squared weights for n = 1..C, the whole being 1; rounded
    up.
    """
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
    contributions: int, *, combine: bool, selects: bool, fused: bool, skip: bool = False
) -> SelectionWeights | None:
    """Return the weights of a job that names none.

    Steep where the statistic is combined (steeper where published keys are skipped), mild where
    every record counts and selection has noise of its own; equal where the published count of
    units IS the selection, where units have few pairs, or so many that the last weights vanish,
    and where nothing is selected.

    Args:
        contributions: C; combine: the statistic is combined.
        selects: keys are selected; fused: a count of units is published.
        skip: pairs on published keys take no weight, so that the first ones last longer.
    """
    if combine and skip:
        return SPARED
    if combine:
        return next((w for w in (STEEP, MILD) if w.integers(contributions)[-1]), STEEP)
    if not selects or fused or not 8 <= contributions <= limits.MAX_WEIGHTED:
        return None
    return MILD if MILD.integers(contributions)[-1] else None


class Statistic(msgspec.Struct, frozen=True, eq=False):
    """The statistic that a key is tested on: ``weighted * W + counted * U``, both with their noise.

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
    weights: Int64, selection_variance: float, count_variance: float, by_size: bool = False
) -> tuple[int, int]:
    """Return the most sensitive coefficients: a typical unit's weight over the variance of each
    stream.

    The typical unit is public, the mean of the first quarter of the weights (a unit's first
    records are its most common ones; by size of the first `TYPICAL_SIZES`); any coefficients are
    private.

    Args:
        weights: (C,) in 2^-WEIGHT_BITS; by_size: they go by the number of a unit's pairs.
        selection_variance: of the weighted stream's final prefix, in 2^-WEIGHT_BITS squared.
        count_variance: of the plain count's, in counts squared.

    Returns:
        (weighted, counted): the statistic adds ``weighted`` per 2^-WEIGHT_BITS and
        ``counted`` per unit.
    """
    most = TYPICAL_SIZES if by_size else max(1, len(weights) // 4)
    typical = float(weights[:most].mean())
    ratio = selection_variance / count_variance / typical
    return _COMBINED_SCALE, max(1, round(_COMBINED_SCALE * ratio))
