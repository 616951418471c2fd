"""Choosing C and clamps privately: public grids, noisy histograms, quantiles, accuracy.

The paper takes C and the bounds of values as given; choosing them by looking is a release.
Here each is a quantile of one histogram over a public grid, read through Gaussian noise.

Sensitivity (before any code).  Neighbours differ in all records of one unit.

* ``contributions``: a unit falls in exactly one cell, that of its number of (record, window)
  pairs in the first hours.  The histogram x moves by one unit vector: L2 = 1.
* a value column: of each unit at most m values are counted, picked by sampling keys of its own
  records.  x moves by a vector v >= 0 with sum(v) <= m, all of it in one cell at worst:
  L2 = m (not sqrt(m)).  The sampling keys of all other units stay what they are: they are fresh per
  run and independent of the data, so that giving a record that moved to another position the
  coin it had before is a coupling that changes no distribution.

What is noised is A x for a public 0/1 matrix A of which no column has more than ``col2`` ones;
|A v|_2 is convex in v, so its maximum is at a corner of the simplex: L2 = m sqrt(col2).  A
histogram with share s of mu^2 gets node sigma m sqrt(col2) / (sqrt(s) mu), and all of them
together are mu-GDP: one Gaussian mechanism.  The number of units is not public: it is the
last noisy prefix.  Every figure and every refusal is computed from noisy counts alone, so it
is post-processing; that the decoder is a float matter therefore costs nothing.

Which A: a quantile compares prefix_t with q * total.  G plain cells (col2 = 1) sum up to G
cell noises, sd sqrt(G) / mu for the total.  A binary tree over the cells has col2 = ceil(log2 G)
+ 1, and least squares over all its nodes (offline, so both up and down) has at worst 1.65 / mu
at G = 4, 2.4 at 16, 3.1 at 64 and 3.7 at 200 where cells have 2, 4, 8 and 14: the tree wins
from G = 2 on (``worst_factor``; a test repeats it).  Square-root Toeplitz would be 10
to 20% better still at G = 64.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.libraries import special

#: The histogram of pairs per unit; no aggregate can be called so (a space).
CONTRIBUTIONS = "pairs per unit"
#: Rank error, as a share of the units, at which figures are called good; and too poor to give.
GOOD, POOR = 0.05, 0.2
#: Chance that some prefix errs by more than the stated rank error.
_MISS = 0.05
_SLACK = 1e-12


class Histogram(msgspec.Struct, frozen=True):
    """One noisy histogram; all public.

    Attributes:
        name: ``CONTRIBUTIONS`` or the aggregate whose bounds are chosen.
        candidates: increasing upper edges of the cells (pairs, or grid units of a value).
        cells: number of cells; one more than candidates where the last takes all beyond.
        targets: quantiles that are read.
        col2: the most ones in a column of A.
        sensitivity: L2 of A x for one unit.
        share: fraction of mu^2.
        sigma: sd of one node's noise in units of count, rounded up.
        rank_error: 95% bound, in counts, of the error of every prefix minus its target.
    """

    name: str
    candidates: tuple[int, ...]
    cells: int
    targets: tuple[float, ...]
    col2: int
    sensitivity: float
    share: float
    sigma: float
    rank_error: float

    @property
    def good_from(self) -> int:
        """Units needed for a rank error of ``GOOD``, at 95%."""
        return math.ceil(self.rank_error / GOOD)

    @property
    def answered_from(self) -> int:
        """The noisy total below which nothing is answered."""
        return math.ceil(self.rank_error / POOR)


def magnitudes(most: int) -> tuple[int, ...]:
    """Return 1, 2, 3 and (4 .. 7) 2^k up to ``most``, and ``most`` itself: steps of 14 to 25%."""
    grown = (m << k for k in range(max(1, most.bit_length())) for m in (4, 5, 6, 7))
    return tuple(sorted({x for x in (1, 2, 3, *grown) if x < most} | {most}))


def value_candidates(lo: int, hi: int) -> tuple[int, ...]:
    """Return the candidate bounds within [lo, hi] (grid units): both ends, 0 and +-magnitudes."""
    up = magnitudes(hi) if hi > 0 else ()
    down = magnitudes(-lo) if lo < 0 else ()
    inner = {0, *up, *(-x for x in down)}
    return tuple(sorted({x for x in inner if lo <= x <= hi} | {lo, hi}))


def pair_candidates(scale: Fraction, most: int) -> tuple[int, ...]:
    """Return the candidate pairs per unit in the first hours, at most ``most`` after scaling."""
    return magnitudes(max(1, math.ceil(most / scale)))


def contributions_of(pairs: int, scale: Fraction, most: int) -> int:
    """Return C of a candidate: pairs in the first hours, extrapolated, at most ``most``."""
    return max(1, min(most, math.ceil(scale * pairs)))


@functools.lru_cache(maxsize=32)
def encoder_matrix(cells: int) -> Int64:
    """Return (nodes, cells) 0/1 matrix A of a binary tree over the cells, leaves first;
    read-only.
    """
    rows = []
    for width in (1 << level for level in range((cells - 1).bit_length() + 1)):
        for begin in range(0, cells, width):
            row = np.zeros(cells, np.int64)
            row[begin : begin + width] = 1
            rows.append(row)
    matrix = np.array(rows)
    matrix.setflags(write=False)
    return matrix


@functools.lru_cache(maxsize=32)
def covariance_of(cells: int) -> Float64:
    """Return (cells, cells) covariance of a tree's least-squares cells for node noise of sd 1;
    read-only.

    It is inv(A^T A), so that the estimate of noisy nodes y is this times A^T y.
    """
    matrix = encoder_matrix(cells).astype(np.float64)
    out = np.asarray(np.linalg.inv(matrix.T @ matrix), np.float64)
    out.setflags(write=False)
    return out


@functools.lru_cache(maxsize=32)
def factor_of(cells: int, targets: tuple[float, ...]) -> float:
    """Return ``worst_factor`` of the tree over so many cells."""
    return worst_factor(encoder_matrix(cells), targets)


def worst_factor(matrix: Int64, targets: tuple[float, ...]) -> float:
    """Return the largest sd, for node noise of sd 1, of prefix_t - q * total by least squares.

    It is over cells t, and q in ``targets`` and q = 0 (prefixes and the total themselves).
    """
    encoder, cells = matrix.astype(np.float64), matrix.shape[1]
    covariance = np.linalg.inv(encoder.T @ encoder)
    worst = 0.0
    for target in (*targets, 0.0):
        weights = np.tril(np.ones((cells, cells))) - target
        variance = ((weights @ covariance) * weights).sum(axis=1)
        worst = max(worst, math.sqrt(float(variance.max())))
    return worst


def histogram(
    name: str,
    candidates: tuple[int, ...],
    cells: int,
    targets: tuple[float, ...],
    per_unit: int,
    share: float,
    mu: float,
) -> Histogram:
    """Return a histogram with its noise and accuracy; ``per_unit`` is m.

    Raises:
        UsageError: the noise would exceed what the sampler's table covers.
    """
    matrix = encoder_matrix(cells)
    col2 = int(matrix.sum(axis=0).max())
    sensitivity = per_unit * math.sqrt(col2) * (1 + _SLACK)
    sigma = sensitivity / (math.sqrt(share) * mu) * (1 + _SLACK)
    if sigma > limits.MAX_SIGMA:
        raise UsageError(
            "--epsilon",
            "is too small for any answer",
            "use a larger epsilon or choose fewer bounds",
        )
    # Rounding adds at most 1/12 to a node's variance; a union bound over the cells.
    rounding = 0.0 if math.isinf(mu) else 1 / 12
    sd = math.sqrt(sigma**2 + rounding) * factor_of(cells, targets)
    rank_error = sd * float(-special.ndtri(_MISS / (2 * cells)))
    return Histogram(name, candidates, cells, targets, col2, sensitivity, share, sigma, rank_error)


class TunedColumn(msgspec.Struct, frozen=True):
    """Bounds to choose: aggregate ``name`` with declared range [lo, hi] in grid units."""

    name: str
    lo: int
    hi: int


class Question(msgspec.Struct, frozen=True):
    """Everything public about one tuning; fixed before a record is read.

    Attributes:
        first: micros of the stream that are read.
        epsilon, delta: what the tuning may spend; 0 and 0 for proxy data (no noise).
        quantile: of pairs per unit, or ``None`` when ``cover`` is asked.
        cover: share of all pairs that C must keep.
        max_contributions: largest C.
        scale: pairs in the whole horizon over pairs in the first hours, as a fraction in text.
        tail: share of values that may lie beyond each bound.
        values_per_unit: m.
        columns: clamps to choose.
        key_records: of a key for which noise is weighed against what C cuts
            (`accounting.tuning.answer`), where neither a quantile nor a cover is asked.
    """

    first: int
    epsilon: float
    delta: float
    quantile: float | None
    cover: float | None
    max_contributions: int
    scale: str
    tail: float
    values_per_unit: int
    columns: tuple[TunedColumn, ...] = ()
    key_records: int | None = None


class TuningDesign(msgspec.Struct, frozen=True):
    """The mechanism of a question: mu of all histograms together, and each of them."""

    mu: float
    histograms: tuple[Histogram, ...]


def design(question: Question, private: bool = True) -> TuningDesign:
    """Divide the budget equally over the histograms in one Gaussian mechanism.

    Args:
        private: False for proxy data: the same histograms, read exactly.

    Raises:
        UsageError: a figure is out of range, or the budget allows no answer at all.
    """
    _check(question, private)
    mu = mu_of(question.epsilon, question.delta) if private else math.inf
    share = (1 - _SLACK) / (1 + len(question.columns))
    pairs = pair_candidates(Fraction(question.scale), question.max_contributions)
    targets = () if question.quantile is None else (question.quantile,)
    histograms = [histogram(CONTRIBUTIONS, pairs, len(pairs) + 1, targets, 1, share, mu)]
    for column in question.columns:
        values = value_candidates(column.lo, column.hi)
        ends, per_unit = (question.tail, 1 - question.tail), question.values_per_unit
        histograms.append(histogram(column.name, values, len(values), ends, per_unit, share, mu))
    return TuningDesign(mu, tuple(histograms))


def canonical_names(aggregates: Sequence[Aggregate]) -> dict[str, str]:
    """Return what each of a job's aggregates is called in a tuning's question and receipt.

    Its own name is presentation: a job that differs in names alone asks the same question.  The
    place counts, because C is weighed by the noise of the first one.
    """
    return {aggregate.name: f"column_{at}" for at, aggregate in enumerate(aggregates)}


def canonical(question: Question, design: TuningDesign) -> dict[str, Any]:
    """Return a question and its mechanism by frozen names, for the digest of a tuning.

    What is computed stands with 9 digits: the last bits of a figure differ between processors,
    and the same question must not be another request, with a charge of its own, on the next one.
    """
    fields = {
        "first": question.first,
        "epsilon": float(question.epsilon),
        "delta": float(question.delta),
        "quantile": question.quantile,
        "cover": question.cover,
        "max_contributions": question.max_contributions,
        "scale": question.scale,
        "tail": float(question.tail),
        "values_per_unit": question.values_per_unit,
        "columns": [[column.name, column.lo, column.hi] for column in question.columns],
        "key_records": question.key_records,
    }
    drawn = [
        {
            "name": of_histogram.name,
            "candidates": list(of_histogram.candidates),
            "cells": of_histogram.cells,
            "targets": list(of_histogram.targets),
            "col2": of_histogram.col2,
            "sensitivity": _canonical(of_histogram.sensitivity),
            "share": _canonical(of_histogram.share),
            "sigma": _canonical(of_histogram.sigma),
            "rank_error": _canonical(of_histogram.rank_error),
        }
        for of_histogram in design.histograms
    ]
    return {"question": fields, "mu": _canonical(design.mu), "histograms": drawn}


def _canonical(number: float) -> str:
    """Return a number as digests hold it."""
    return f"{number:.9g}"


def _check(question: Question, private: bool) -> None:
    budget = (
        ("--epsilon", question.epsilon, 0, limits.MAX_EPSILON * (1 + _SLACK)),
        ("--delta", question.delta, 0, 1),
    )
    ranges = (
        *(budget if private else ()),
        ("--quantile", 0.5 if question.quantile is None else question.quantile, 0, 1),
        ("--cover", 0.5 if question.cover is None else question.cover, 0, 1),
        ("--key-records", question.key_records or 1, 0, limits.MAX_PAIRS + 1),
        ("--tail", question.tail, 0, 0.5),
        ("--max-contributions", question.max_contributions, 0, limits.MAX_CONTRIBUTIONS + 1),
        ("--values-per-unit", question.values_per_unit, 0, limits.MAX_VALUES_PER_UNIT + 1),
    )
    for field, value, low, high in ranges:
        if not low < value < high:
            raise UsageError(field, f"must lie between {low:g} and {high:g}", "correct it")
    if Fraction(question.scale) * 2 > question.max_contributions:
        raise UsageError(
            "--first",
            "is so short that two pairs of a unit already extrapolate to --max-contributions",
            "use a longer --first or budget.covers, a larger --max-contributions, or --scale",
        )
