"""Asked queries that are boxes of cells: their answers and variances by differences of running
sums."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64


def box_sums(x: npt.NDArray[Any], lo: Int64, hi: Int64) -> npt.NDArray[Any]:
    """(k,) sums over boxes of cells; exact in integers.

    Args:
        x: cells, one axis for each attribute.
        lo: (k, axes) first and ``hi`` last cell on each axis.
    """
    sums = np.zeros([n + 1 for n in x.shape], np.result_type(x.dtype, np.int64))
    inner = sums[(slice(1, None),) * x.ndim]
    inner[...] = x
    for axis in range(x.ndim):
        np.cumsum(inner, axis=axis, out=inner)
    flat, strides = sums.ravel(), [math.prod(sums.shape[k + 1 :]) for k in range(x.ndim)]
    totals = np.zeros(len(lo), sums.dtype)
    for corner in itertools.product((0, 1), repeat=x.ndim):
        at = sum((hi[:, k] + 1 if high else lo[:, k]) * strides[k] for k, high in enumerate(corner))
        sign = 1 if (x.ndim - sum(corner)) % 2 == 0 else -1
        totals += sign * flat[at]
    return totals


def box_variances(covariances: Sequence[Float64], lo: Int64, hi: Int64) -> Float64:
    """(k,) variances of boxes where the covariance of the cells is a Kronecker product.

    Args:
        covariances: (n, n) for each axis.
        lo: (k, axes) first and ``hi`` last cell on each axis.
    """
    variances = np.ones(len(lo))
    for axis, covariance in enumerate(covariances):
        sums = np.zeros((len(covariance) + 1,) * 2)
        sums[1:, 1:] = covariance.cumsum(0).cumsum(1)
        a, b = lo[:, axis], hi[:, axis] + 1
        variances *= sums[b, b] - sums[a, b] - sums[b, a] + sums[a, a]
    return variances
