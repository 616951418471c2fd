"""The encoder with the smallest weighted squared error of all T prefixes, and its certificate.

With X = A^T A and V = M^T diag(c) M (M the prefix sums, c_t > 0 what prefix t counts) the squared
error of all prefixes at mu = 1 is tr(V X^-1) if no diagonal entry of X exceeds 1, which is convex
in X.  For any weights d of sum 1 and D = diag(d) no X does better than

    floor = (tr (D^1/2 V D^1/2)^1/2)^2,

and X = D^-1/2 (D^1/2 V D^1/2)^1/2 D^-1/2 reaches it if its diagonal is constant.  Taking d times
that diagonal for the next d converges in a few rounds.

No eigenvectors are needed, because V^-1 is tridiagonal: 1/c_t + 1/c_(t-1) on its diagonal and
-1/c_(t-1) beside it, the second difference where all prefixes count alike.  With
H = D^-1/2 V^-1 D^-1/2 the root above is H^-1/2, and (Hale, Higham, Trefethen 2008)

    H^-1/2 = about sum_k w_k (H + s_k)^-1,   so   X = about sum_k w_k (V^-1 + s_k D)^-1

with poles s_k by elliptic functions, whose error falls exponentially with their number.  The
inverse of a tridiagonal matrix is g_j rho_(j+1) ... rho_i below its diagonal.  So X has few
numbers for each step, and its Cholesky factor A keeps the ratios rho (``generators``).  X is
scaled to a diagonal of 1 before it is factored.  There the error is stationary under changes of X
that keep the diagonal, so that what few poles miss enters it squared.
"""

import numpy as np

from dpstream.accounting import special
from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.generators import Generators

_ROUNDS = 20
#: Poles that give diagonals to about 1e-9.
_MANY = 24
#: Up to so many rows all eigenvalues of a matrix take less time than loading ``scipy.linalg``.
_FEW = 64


def prefix_weights(importance: Float64) -> tuple[Float64, float]:
    """(d of sum 1, floor of tr(V X^-1)).

    Args:
        importance: (T,) c, positive: what the squared error of each prefix counts.
    """
    weights = np.full(len(importance), 1 / len(importance))
    floor = 0.0
    for _ in range(_ROUNDS):
        diagonal = weights * _inverses(importance, weights, _MANY)[1].sum(axis=1)
        total = float(diagonal.sum())
        if total**2 > floor:
            best, floor = weights, total**2
        weights = diagonal / total
    return best, floor


def prefix_optimum(importance: Float64, buffers: int) -> Generators:
    """The optimum's encoder with so many buffers; columns of norm about 1.

    Args:
        importance: (T,) as for ``prefix_weights``; ones: all prefixes alike.
    """
    triggers = len(importance)
    weights, _ = prefix_weights(importance)
    rho, diagonal = _inverses(importance, weights, buffers)
    scale = 1 / np.sqrt(diagonal.sum(axis=1))
    into = diagonal * scale[:, None]
    # A[t, j] = r_t . (ratios between) . into_j; A^T A = X gives, from the last step on,
    #   (r_t r_t^T + rest_t) into_t = scale_t (1, ..., 1),  rest_t what later rows of A add.
    rows, root = np.zeros((triggers, buffers)), np.zeros(triggers)
    rest = np.zeros((buffers, buffers))
    for t in range(triggers - 1, -1, -1):
        wanted = scale[t] - rest @ into[t]
        root[t] = np.sqrt(wanted @ into[t])
        rows[t] = wanted / root[t]
        rest = rho[t][:, None] * (np.outer(rows[t], rows[t]) + rest) * rho[t]
    return Generators(rho, rows * rho, into, 1 / root)


def _second_difference(importance: Float64) -> tuple[Float64, Float64]:
    """(T,) diagonal of V^-1, and (T,) minus its entries before the diagonal, the first one 0."""
    before = np.concatenate([[0.0], 1 / importance[:-1]])
    return 1 / importance + before, before


def _inverses(importance: Float64, weights: Float64, poles: int) -> tuple[Float64, Float64]:
    """(T, poles) ratios rho and diagonals w_k g of w_k (V^-1 + s_k D)^-1 for each pole."""
    shifts, factors = _poles(importance, weights, poles)
    size = len(weights)
    own, before = _second_difference(importance)
    diagonal = np.outer(weights, shifts) + own[:, None]
    above, below = diagonal.copy(), diagonal.copy()
    for t in range(1, size):
        above[t] -= before[t] ** 2 / above[t - 1]
        below[size - 1 - t] -= before[size - t] ** 2 / below[size - t]
    return before[:, None] / below, factors / (above + below - diagonal)


def _poles(importance: Float64, weights: Float64, count: int) -> tuple[Float64, Float64]:
    """(s_k, w_k) for x^-1/2 over the eigenvalues of H."""
    own, before = _second_difference(importance)
    diagonal = own / weights
    beside = -before[1:] / np.sqrt(weights[:-1] * weights[1:])
    low, high = _extremes(diagonal, beside)
    part = low / high
    period = special.ellipkm1(part)
    sn, cn, dn, _ = special.ellipj((np.arange(count) + 0.5) * period / count, 1 - part)
    return low * (sn / cn) ** 2, 2 / np.pi * period / count * np.sqrt(low) * dn / cn**2


def _extremes(diagonal: Float64, beside: Float64) -> tuple[float, float]:
    """Smallest and largest eigenvalue of a symmetric tridiagonal matrix."""
    size = len(diagonal)
    if size <= _FEW:
        values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, -1))
        return values[0], values[-1]
    from scipy.linalg import eigvalsh_tridiagonal

    low, high = (
        eigvalsh_tridiagonal(diagonal, beside, select="i", select_range=(k, k))[0]
        for k in (0, size - 1)
    )
    return low, high
