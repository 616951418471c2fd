"""Non-negative estimates of the cells: least squares, in the noise's own metric, not clipping.

Minimise (x - y)^T S^-1 (x - y) over x >= 0, y the estimates and S their covariance: the likeliest
cells among those that can be counts.  It is post-processing.  Clipping adds to empty cells, and the
additions stay in every sum of many cells; here other cells become smaller instead.
"""

from collections.abc import Sequence

import numpy as np
import scipy.linalg
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import RunError
from dpstream.accounting.strategies.cells.threads import one_thread

#: How far the result may be from stationary, beside the largest slope at the start.
TOLERANCE = 1e-6


@one_thread()
def nonnegative(cells: Float64, mix: Sequence[Float64]) -> Float64:
    """Return (n,) the non-negative cells nearest to estimates whose noise has this mix.

    Args:
        cells: (n,) estimates.
        mix: L, or its Kronecker factors.

    Raises:
        RunError: the search has not converged.
    """
    if not (cells < 0).any():
        return cells
    inverses = [scipy.linalg.inv(factor) for factor in mix]
    shape = [len(factor) for factor in mix]

    def times(x: Float64, transposed: bool) -> Float64:
        tensor = x.reshape(shape)
        for axis, inverse in enumerate(inverses):
            matrix = inverse.T if transposed else inverse
            tensor = np.moveaxis(np.tensordot(matrix, tensor, (1, axis)), 0, axis)
        return np.asarray(tensor.ravel())

    def value(x: Float64) -> tuple[float, Float64]:
        rest = times(x - cells, False)
        return float(rest @ rest), 2 * times(rest, True)

    start = np.maximum(cells, 0.0)
    steepest = float(np.abs(value(start)[1]).max()) or 1.0
    solution = minimize(
        value,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * len(cells),
        options={
            "maxiter": 10_000,
            "maxfun": 20_000,
            "maxcor": 30,
            "ftol": 0.0,
            "gtol": TOLERANCE * steepest / 4,
        },
    )
    x = np.maximum(solution.x, 0.0)
    if slope(x, value(x)[1]) > TOLERANCE * steepest:
        raise RunError("--nonnegative", "did not come to an end", "leave it out")
    return np.asarray(x)


def slope(x: Float64, gradient: Float64) -> float:
    """Return the largest slope along which x >= 0 could still be improved; 0 at the optimum."""
    return float(np.abs(np.where(x > 0, gradient, np.minimum(gradient, 0.0))).max())
