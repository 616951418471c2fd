"""p-identities for the prefixes of T steps: encoders of small error for pure epsilon.

For pure epsilon an encoder's cost is its largest column in L1.  A p-identity (McKenna, Miklau, Hay
and Machanavajjhala 2018) has the rows

    A = [I; P] diag(1 / s),    s_j = 1 + sum_k P_kj,

P of p rows without negative entries, so that every column has norm 1 for any P.  With M the
prefix sums, the squared error of all prefixes is tr(M (A^T A)^-1 M^T), and by Woodbury's lemma

    sum_j s_j^2 c_j - tr(K Y Y^T),    Y = P diag(s) M^T,  K = (1 + P P^T)^-1,  c_j = T - j + 1.

Y is a running sum along each row of P, so that a value and its gradient take O(p^2 T) operations
(``cells.pure`` minimises the same error for any queries, in O(p n^2)).  L-BFGS from the levels of a
k-ary tree takes a second at T = 1000.  Its sd is 8% below that of the best k-ary tree decoded by
least squares at T = 100, and 12% below at T = 1000.

The floats of two processors may differ: a run commits the whole numbers that the encoder is rounded
to (``geometric``).
"""

import functools

import numpy as np

from dpstream.accounting.arrays import Float64

#: (largest T, arities of the trees that the search starts from).
_WIDTHS = ((1, ()), (24, (16, 8, 4)), (1024, (16,)), (1 << 20, (32,)))
#: Iterations of the search, and fewer above _LONG triggers: more gain less than .3%.
_ITERATIONS, _FEW, _LONG = 400, 150, 200


@functools.lru_cache(maxsize=16)
def prefix_identity(triggers: int) -> Float64:
    """(p, T) the best P of the search, read-only; (0, T) where no P is better than the identity."""
    widths = next(widths for most, widths in _WIDTHS if triggers <= most)
    starts = [start for width in widths if len(start := _levels(triggers, width))]
    best = np.zeros((0, triggers))
    if starts:
        from dpstream.accounting.strategies.cells.threads import one_thread  # loads scipy.linalg

        with one_thread():
            best = min(best, *map(_improved, starts), key=squared_error)
    best.setflags(write=False)
    return best


def squared_error(extra: Float64) -> float:
    """tr(M (A^T A)^-1 M^T) of a p-identity, whose columns have norm 1.

    Args:
        extra: (p, T) P.
    """
    return _value(extra.ravel(), extra.shape)[0]


def _levels(triggers: int, width: int) -> Float64:
    """(p, T) one row for each inner node of a tree whose nodes have ``width`` children."""
    rows, size = [], width
    while size <= triggers:
        first = np.arange(0, triggers, size)[:, None]
        steps = np.arange(triggers)
        rows.append(((steps >= first) & (steps < first + size)).astype(np.float64))
        size *= width
    if not rows and triggers > 2:
        rows.append(np.ones((1, triggers)))
    return np.concatenate(rows) if rows else np.zeros((0, triggers))


def _improved(start: Float64) -> Float64:
    from scipy.optimize import minimize  # not needed to read the numbers of a run

    iterations = _FEW if start.shape[1] > _LONG else _ITERATIONS
    least = minimize(
        _value,
        start.ravel(),
        args=(start.shape,),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * start.size,
        options={"maxiter": iterations, "maxcor": 20, "maxfun": 2 * iterations},
    )
    extra = least.x.reshape(start.shape)
    return np.asarray(extra[extra.any(axis=1)])


def _value(flat: Float64, shape: tuple[int, int]) -> tuple[float, Float64]:
    """The squared error and its gradient in P."""
    extra = flat.reshape(shape)
    rows, triggers = shape
    sums = 1 + extra.sum(axis=0)
    counted = np.arange(triggers, 0, -1.0)
    along = np.cumsum(extra * sums, axis=1)
    short = np.linalg.inv(np.eye(rows) + extra @ extra.T) @ along
    value = float((sums**2) @ counted - np.vdot(short, along))
    back = np.cumsum(short[:, ::-1], axis=1)[:, ::-1]
    slope_sums = 2 * sums * counted - 2 * (back * extra).sum(axis=0)
    slope = -2 * back * sums + 2 * (short @ short.T) @ extra + slope_sums
    return value, slope.ravel()
