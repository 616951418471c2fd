"""Mixing of noise for a strategy: n = L z has covariance X^-1, with z one draw per component.

A cell's estimate is its exact count and n_c = sum_j L[c, j] z_j.  That is the strategy A = L^-1
measured with noise z and solved for the cells: one unit in cell c moves A's answers by |L^-1 e_c|.
This holds only for an invertible L.  With a rank-deficient one, x + L z outside L's range is x
itself, published without noise.  So X is mixed with the identity, X <- (1 - a) X + a I with a =
1/1000, where it is singular or nearly so; (1 - a) X <= the mixture, so that no variance rises by
more than a / (1 - a) of itself.

``inverse_norm2`` bounds max_c |L^-1 e_c|^2 from the L that is used, rounding included: with Y any
matrix and R = I - Y L, |R| < 1, L is invertible and L^-1 = (I - R)^-1 Y, so |L^-1 e_c| <= |Y e_c|
/ (1 - |R|). R is computed in floats; the error of a product of n terms is at most n u / (1 - n u)
|Y| |L| (u = 2^-53), in whatever order it is summed.
"""

import math

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.strategies.cells.residual import Tables
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Identity,
    Kron,
)

#: a, and the smallest pivot of a matrix of unit diagonal that goes without.
MIXED_IN, _PIVOT = 1e-3, 1e-4
_U = 2.0**-53


@one_thread()
def mixed(strategy: CellStrategy, sizes: tuple[int, ...]) -> Mixing:
    """Return the certified mix of a strategy over a domain: L, or one for each axis.

    Raises:
        UsageError: a strategy that is one matrix over more cells than a limit, or no
            invertible mix.
    """
    roots = [_factored(matrix) for matrix in matrices(strategy, sizes)]
    bound = math.prod(inverse_norm2(root) for root in roots) * (1 + len(roots) * 2 * _U)
    return Mixing(roots, bound)


def matrices(strategy: CellStrategy, sizes: tuple[int, ...]) -> list[Float64]:
    """Return X as one matrix, or one for each axis."""
    gram = strategy.gram
    if isinstance(gram, Kron):
        return [factor.dense() for factor in gram.factors]
    if isinstance(gram, Identity) and max(sizes) <= MAX_SOLVED_CELLS:
        return [np.eye(size) for size in sizes]
    if math.prod(sizes) > MAX_SOLVED_CELLS or isinstance(gram, Identity):
        raise UsageError(
            "strategy",
            f"a strategy that is no product is mixed over at most {MAX_SOLVED_CELLS} cells",
            "publish residual tables, or ask one product",
        )
    if isinstance(gram, Tables):
        return [gram.dense()]
    return [instance(gram, Blocks).dense()]


def _factored(matrix: Float64) -> Float64:
    """L of X, with the identity mixed in where X is singular or nearly so."""
    matrix = matrix / matrix.diagonal().max()
    lower = _cholesky(matrix)
    if lower is None:
        matrix = (1 - MIXED_IN) * matrix
        matrix[np.diag_indices_from(matrix)] += MIXED_IN
        lower = scipy.linalg.cholesky(matrix, lower=True)
    # X = C C^T, so that A = C^T and L = C^-T, both upper triangular.
    inverse, _ = scipy.linalg.lapack.dtrtri(lower, lower=1)
    return np.ascontiguousarray(np.tril(inverse).T)


def _cholesky(matrix: Float64) -> Float64 | None:
    try:
        lower = scipy.linalg.cholesky(matrix, lower=True)
    except scipy.linalg.LinAlgError:
        return None
    return lower if lower.diagonal().min() ** 2 >= _PIVOT else None


@one_thread()
def inverse_norm2(mix: Float64) -> float:
    """Return an upper bound of max_c |L^-1 e_c|^2, for this very matrix.

    Raises:
        UsageError: L is singular or too nearly so for a bound.
    """
    size = len(mix)
    refused = UsageError(
        "strategy", "the mix of a strategy must be invertible", "mix the identity in"
    )
    if mix.shape != (size, size) or not np.isfinite(mix).all():
        raise refused
    try:
        if not np.tril(mix, -1).any():
            inverse, failed = scipy.linalg.lapack.dtrtri(mix, lower=0)
            if failed:
                raise refused
            product = scipy.linalg.blas.dtrmm(1.0, inverse, mix)
        else:
            inverse = np.linalg.inv(mix)
            product = inverse @ mix
    except np.linalg.LinAlgError:
        raise refused from None
    product[np.diag_indices(size)] -= 1
    # Norms are sums of up to n^2 squares; their own error is below the factor.
    up = 1 + (size + 4) ** 2 * 4 * _U
    summed = (size + 2) * _U / (1 - (size + 2) * _U)
    size2 = float(np.linalg.norm(inverse)) * float(np.linalg.norm(mix))
    rest = summed * (size2 + math.sqrt(size)) * up
    off = (float(np.linalg.norm(product)) + rest) * up + 1e-290
    if not off < 0.01:
        raise refused
    columns = np.einsum("ij,ij->j", inverse, inverse)
    return float(columns.max()) * up * (1 + 4 * _U) / (1 - off) ** 2 * (1 + 4 * _U)
