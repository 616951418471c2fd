"""Residual tables in whole numbers: differences of a table, and noise that fits them.

Sub of an axis of n cells takes x to x_0 - x_1, ..., x_0 - x_(n-1): whole numbers, and all that a
table says beyond its total.  Noise of the cells, each of sd s, moves Sub x by noise of covariance
s^2 Sub Sub^T = s^2 L L^T; with D independent draws z, s L z has it, and L is invertible.  So what
is published, Sub x + s L z rounded, is L (L^-1 Sub x + s z) rounded: a Gaussian mechanism whose
sensitivity is the longest column of L^-1 Sub.  That is sqrt(1 - 1/n) for the exact root, as the
rows of Sub span all that is orthogonal to the ones; it is bounded here for the L that is used.

Of several axes all of this is the Kronecker product, of none the number 1.
"""

import functools

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import InvariantError

_U = 2.0**-53


def differences(table: Int64, axis: int) -> Int64:
    """(n - 1 along the axis) Sub x, exact."""
    first = table.take([0], axis=axis)
    return np.asarray(first - table.take(range(1, table.shape[axis]), axis=axis))


def restored(measured: Float64, axis: int) -> Float64:
    """(n along the axis) the array with zero sums along the axis and these differences."""
    first = measured.sum(axis=axis, keepdims=True) / (measured.shape[axis] + 1)
    return np.concatenate([first, first - measured], axis=axis)


def matrix(size: int) -> Float64:
    """(n - 1, n) Sub."""
    return np.hstack([np.ones((size - 1, 1)), -np.eye(size - 1)])


@functools.lru_cache(maxsize=256)
def root(size: int) -> Float64:
    """(n - 1, n - 1) L, lower triangular; read-only."""
    sub = matrix(size)
    factor = np.asarray(scipy.linalg.cholesky(sub @ sub.T, lower=True))
    factor.setflags(write=False)
    return factor


@functools.lru_cache(maxsize=256)
def column_norm2(size: int) -> float:
    """At least max_c |L^-1 Sub e_c|^2 of one axis.

    With Y the computed solution and R = Sub - L Y, L^-1 Sub = Y + L^-1 R.  Sub Sub^T = I + 1 1^T,
    so that |L^-1| <= 2 as soon as L L^T is within 3/4 of it (Frobenius norm); R is computed in
    floats, and what rounding can hide of it, (n + 2) units of |L| |Y|, is added.
    """
    sub, lower = matrix(size), root(size)
    if not np.linalg.norm(lower @ lower.T - sub @ sub.T) < 0.5:
        raise InvariantError("the factors belong to one matrix")
    solution = scipy.linalg.solve_triangular(lower, sub, lower=True)
    hidden = (size + 2) * 2 * _U * float(np.linalg.norm(lower)) * float(np.linalg.norm(solution))
    rest = 2 * (float(np.linalg.norm(sub - lower @ solution)) + hidden)
    longest = float(np.sqrt((solution**2).sum(axis=0).max())) * (1 + size * 2 * _U)
    return (longest + rest) ** 2 * (1 + 8 * _U)
