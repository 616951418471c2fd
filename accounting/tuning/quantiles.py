"""Quantiles and clamps from noisy histograms: all of it post-processing of noisy nodes.

Least squares over the nodes, then the nearest non-decreasing prefixes.  Without noise both give
back the exact prefixes, and each figure is the exact one of its definition.
"""

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.tuning.question import Histogram, covariance_of, encoder_matrix
from dpstream.accounting.tuning.weighing import coverage_of

#: Prefixes are whole numbers without noise; the decoder's float error is far below this.
_FLOAT_ERROR = 1e-7
_SLACK = 1e-12


def prefixes(of: Histogram, noisy: Int64) -> Float64:
    """(cells,) non-decreasing estimates of the prefixes of the histogram.

    Args:
        noisy: (nodes,) A x + noise.
    """
    from scipy.optimize import isotonic_regression  # slow to load, and a plan needs none of it

    nodes = encoder_matrix(of.cells).T.astype(np.float64) @ noisy.astype(np.float64)
    counts = covariance_of(of.cells) @ nodes
    return np.asarray(isotonic_regression(np.cumsum(counts)).x, np.float64)


def answers(of: Histogram, estimate: Float64) -> bool:
    """Whether the noisy total is large enough to read a quantile from."""
    return bool(estimate[-1] >= max(1 - _FLOAT_ERROR, of.answered_from))


def quantile_cell(estimate: Float64, target: float) -> int:
    """First cell t with prefix_t >= target * total."""
    return int(np.argmax(estimate >= target * estimate[-1] - _FLOAT_ERROR))


def cover_cell(of: Histogram, estimate: Float64, cover: float) -> int:
    """First cell whose candidate, as a bound, keeps ``cover`` of all pairs."""
    return int(np.argmax(coverage_of(of, estimate).part[1:] >= cover * (1 - _SLACK)))


def clamp_of(of: Histogram, estimate: Float64, tail: float) -> tuple[int, int]:
    """(low, high) candidates that at most ``tail`` of the values lie beyond, at each end.

    Cells are labelled by their edge away from 0, so a low bound above 0 and a high bound below
    0 take the candidate nearer to 0.
    """
    edges, last = of.candidates, of.cells - 1
    before = np.concatenate([[0.0], estimate[:-1]])
    low = int(np.flatnonzero(before <= tail * estimate[-1] + _FLOAT_ERROR)[-1])
    high = quantile_cell(estimate, 1 - tail)
    if low > high:  # only by noise
        low, high = high, low
    low = low if edges[low] <= 0 else max(low - 1, 0)
    high = high if edges[high] >= 0 else min(high + 1, last)
    if edges[low] == edges[high] == 0:  # bounds need a multiple of the grid other than 0
        high, low = (high + 1, low) if high < last else (high, low - 1)
    return edges[low], edges[high]
