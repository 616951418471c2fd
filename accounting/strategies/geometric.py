"""Two-sided geometric noise for prefixes, at plain epsilon (mechanism.md section 3).

y = A x + z with A of whole numbers and z independent two-sided geometric: P[z = k] is proportional
to e^(-|k| / scale).  A = [S; P] has one row for each step (S is diagonal) and p rows that mix steps
(P).  The identity, noise for each step, has S = 1 and p = 0.  The decoder may be any matrix W of p
columns of dyadic numbers:

    n_t = sum over j <= t of u_j + sum over k of W[t, k] (z'_k - sum over j of P[k, j] u_j),
    u_j = z_j / S_j,

z are the noises of the first T rows and z' those of the last p.  So n = B z with
B = [(M - W P) S^-1, W], and B A = M - W P + W P = M holds exactly, for every W.  The published

    q_t = round(2^D (B y)_t) / 2^D = prefix_t + round(2^D n_t) / 2^D

is therefore a function of y.  W is chosen close to the decoder of least variance, M A^+.

**Sensitivity, and why rows may end in the future.**  Let a be the largest L1 norm of a column of A
as it is used: a whole number.  The records of a unit move x by v with |v|_1 <= C L.  Fix a path o
of outputs.  x_t may depend on outputs before t, but on a fixed path the inputs are fixed: x(o), and
with the unit's records x(o) + v(o).  So with n the noise as it is published,

    P[o] = P[n(z) = o - M x(o)],     P'[o] = P[n(z) = o - M x(o) - M v(o)].

z -> z + A v(o) maps whole numbers onto whole numbers.  B A = M, and M v lies on the lattice of the
rounding, so that n(z + A v) = n(z) + M v.  Hence P'[o] = P[n(z + A v(o)) = o - M x(o)]: the same
sum as P[o] with each z moved by A v(o), whose L1 norm is at most C L a.  The ratio of the two is at
most e^(C L a / scale) at every o.  The proof does not use which rows of y were complete when x_t
was chosen, because it fixes the outputs and not y.  It bounds the ratio on *every* path, and so
proves plain epsilon and nothing else: a loss distribution, or (epsilon, delta) with delta > 0,
averages over paths, and v(o) may differ from path to path.  So this noise is charged its plain
epsilon.
"""

import functools

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.base import Ranges, Strategy

# p-identities for the prefixes of T steps: encoders of small error for pure epsilon.
#
# For pure epsilon an encoder's cost is its largest column in L1.  A p-identity (McKenna, Miklau,
# Hay and Machanavajjhala 2018) has the rows
#
#     A = [I; P] diag(1 / s),    s_j = 1 + sum_k P_kj,
#
# P of p rows without negative entries, so that every column has norm 1 for any P.  With M the
# prefix sums, the squared error of all prefixes is tr(M (A^T A)^-1 M^T), and by Woodbury's lemma
#
#     sum_j s_j^2 c_j - tr(K Y Y^T),    Y = P diag(s) M^T,  K = (1 + P P^T)^-1,  c_j = T - j + 1.
#
# Y is a running sum along each row of P, so that a value and its gradient take O(p^2 T) operations
# (`cells.products` minimises the same error for any queries, in O(p n^2)).  L-BFGS from the levels
# of a k-ary tree takes a second at T = 1000.  Its sd is 8% below that of the best k-ary tree
# decoded by least squares at T = 100, and 12% below at T = 1000.
#
# The floats of two processors may differ: a run commits the whole numbers that the encoder is
# rounded to (``geometric``).

#: (largest T, arities of the trees that the search starts from).
_WIDTHS = ((1, ()), (24, (16, 8, 4)), (1024, (16,)), (1 << 20, (32,)))
#: Iterations of the search, and fewer above _LONG triggers: more gain less than .3%.
_ITERATIONS, _FEW, _LONG = 400, 150, 200


@functools.lru_cache(maxsize=16)
def prefix_identity(triggers: int) -> Float64:
    """Return (p, T) the best P of the search, read-only; (0, T) if no P is better than the
    identity.
    """
    widths = next(widths for most, widths in _WIDTHS if triggers <= most)
    starts = [start for width in widths if len(start := _levels(triggers, width))]
    best = np.zeros((0, triggers))
    if starts:
        with one_thread():
            best = min(best, *map(_improved, starts), key=squared_error)
    best.setflags(write=False)
    return best


def squared_error(extra: Float64) -> float:
    """Return tr(M (A^T A)^-1 M^T) of a p-identity, whose columns have norm 1.

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


_SLACK = 1e-10
#: A p-identity is rounded to multiples of 2^-_LATTICE_BITS of its column norm, its decoder to
#: _DECODER_BITS bits more.  The variance is stationary at the exact decoder, so that rounding the
#: decoder costs nothing.
_LATTICE_BITS, _DECODER_BITS = 10, 16
#: Parameters of the identity.
IDENTITY = np.zeros(1)


@functools.lru_cache(maxsize=16)
def mixed_rows(triggers: int) -> Float64:
    """Return parameters of the p-identity for T prefixes: p, S, P and W; read-only."""
    extra = prefix_identity(triggers)
    if not len(extra):
        return IDENTITY
    sums = 1 + extra.sum(axis=0)
    rows = np.rint(extra / sums * (1 << _LATTICE_BITS))
    rows = rows[rows.any(axis=1)]
    alone = np.maximum(1, np.rint((1 << _LATTICE_BITS) / sums))
    # The own rows of columns below the largest norm are raised to it, at no cost.
    alone += (alone + rows.sum(axis=0)).max() - (alone + rows.sum(axis=0))
    step = 2.0 ** -(_LATTICE_BITS + _DECODER_BITS)
    decoder = np.rint(_least_variance(alone, rows) / step) * step
    parameters = np.concatenate([[len(rows)], alone, rows.ravel(), decoder.ravel()])
    parameters.setflags(write=False)
    return parameters


def _least_variance(alone: Float64, rows: Float64) -> Float64:
    """(T, p) the W of least variance for each prefix: M S^-2 P^T (I + P S^-2 P^T)^-1."""
    along = np.cumsum(rows / alone**2, axis=1)
    gram = np.eye(len(rows)) + (rows / alone**2) @ rows.T
    return np.asarray(np.linalg.solve(gram, along).T)


class GeometricStrategy(Strategy):
    """Whole-number rows for two-sided geometric noise; by default the p-identity."""

    name = "geometric"
    law = "geometric"
    state_dtype = np.float64

    @override
    def choose(self, parameters: Float64 | None) -> None:
        numbers = mixed_rows(self.triggers) if parameters is None else np.array(parameters)
        size, width = self.triggers, int(numbers[0]) if len(numbers) else -1
        if width < 0 or len(numbers) != 1 + (size + 2 * width * size if width else 0):
            raise ValueError("the strategy takes p, and for p > 0 another T (2 p + 1) numbers")
        alone, rows, decoder = np.split(numbers[1:], [size, size + width * size])
        if not width:
            alone = np.ones(size)
        if not (np.isfinite(numbers).all() and (alone >= 1).all() and (rows >= 0).all()):
            raise ValueError(
                "the strategy's rows must not be negative, and each step needs a row of its own"
            )
        entries = np.concatenate([alone, rows])
        if not np.array_equal(entries, np.rint(entries)):
            raise ValueError("the strategy's rows must be whole numbers")
        self._numbers = numbers
        self._alone, self._rows = alone, rows.reshape(width, size)
        self._decoder = decoder.reshape(size, width)

    @property
    @override
    def parameters(self) -> Float64:
        return self._numbers.copy()

    @property
    def column1(self) -> int:
        """a: the largest L1 norm of a column of the encoder; exact."""
        return int((self._alone + self._rows.sum(axis=0)).max())

    @property
    @override
    def col2(self) -> float:
        return float((self._alone**2 + (self._rows**2).sum(axis=0)).max() * (1 + _SLACK))

    @property
    def decoder(self) -> Float64:
        """(T, T + p) B, in floats."""
        prefixes = np.tril(np.ones((self.triggers, self.triggers)))
        first = (prefixes - self._decoder @ self._rows) / self._alone
        return np.concatenate([first, self._decoder], axis=1)

    @functools.cached_property
    def _figures(self) -> tuple[Float64, float]:
        """((T,) sd_t for noise of sd 1, the largest sum of magnitudes of a row of B)."""
        if not len(self._rows):
            steps = np.arange(1, self.triggers + 1)
            return np.sqrt(steps) * (1 + _SLACK), float(self.triggers)
        decoder = self.decoder
        factors = np.sqrt((decoder**2).sum(axis=1)) * (1 + _SLACK)
        return factors, float(np.abs(decoder).sum(axis=1).max() * (1 + _SLACK))

    @property
    @override
    def sd_factors(self) -> Float64:
        return self._figures[0].copy()

    @property
    @override
    def reach(self) -> float:
        return self._figures[1]

    @override
    def matrix(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.diag(self._alone), self._rows]).astype(np.int64)

    @override
    def nodes_through(self, step_index: int | Int64) -> Int64:
        """See base; with p > 0 a prefix needs the noise of all steps, of future ones too."""
        steps = np.asarray(step_index, np.int64)
        if not len(self._rows):
            return steps.copy()
        return np.where(steps > 0, self.triggers + len(self._rows), 0).astype(np.int64)

    @override
    def last_node(self, step_index: Int64, upto: Int64) -> Int64:
        """See base; after the first step the state holds the mixed rows, future steps included."""
        if not len(self._rows):
            return super().last_node(step_index, upto)
        return np.where(step_index > 0, upto, self.nodes_through(upto)).astype(np.int64)

    @override
    def first_node(self, step_index: Int64) -> Int64:
        return np.asarray(step_index, np.int64).copy()

    @property
    @override
    def state_columns(self) -> int:
        return 3 + len(self._rows)

    @override
    def fold(self, ranges: Ranges) -> None:
        """Fold as in the base; the state has four parts.

        They are the sum of u_j, the sum of magnitudes that bounds its float error, the largest
        error bound of a mixed row, and the p mixed rows.
        """
        from dpstream.accounting.strategies.kernels import fold_geometric

        tables = self._alone, self._rows, np.ascontiguousarray(self._decoder)
        ranges.settle(
            fold_geometric(*ranges.arrays, *tables), lambda row, at: self._exact(ranges, row, at)
        )

    def _exact(self, ranges: Ranges, row: int, step_index: int) -> int:
        """n_t * 2^DECODE_BITS, rounded, in fractions: a value may lie on a rounding boundary, which
        balls of no precision decide."""
        import flint

        size = int(self.nodes_through(step_index))
        nodes = [int(ball.unique_fmpz()) for ball in ranges.exact(row, size)(128)]
        steps = [
            flint.fmpq(node, int(alone))
            for node, alone in zip(nodes[: self.triggers], self._alone.tolist(), strict=False)
        ]
        total = sum(steps[:step_index], start=flint.fmpq(0))
        for k, mixed in enumerate(nodes[self.triggers :]):
            rest = flint.fmpq(mixed)
            for weight, step in zip(self._rows[k].tolist(), steps, strict=True):
                if weight:
                    rest -= int(weight) * step
            top, bottom = float(self._decoder[step_index - 1, k]).as_integer_ratio()
            total += flint.fmpq(top, bottom) * rest
        up = flint.fmpq(1, 2) + flint.fmpq(1, 3 << 12)
        return int((total * (1 << DECODE_BITS) + up).floor())


@functools.lru_cache(maxsize=16)
def geometric_encoders(triggers: int) -> tuple[GeometricStrategy, ...]:
    """Return the encoders to choose from: noise for each step, and the p-identity if there is
    one.
    """
    identity = GeometricStrategy(triggers, IDENTITY)
    mixed = GeometricStrategy(triggers)
    return (identity, mixed) if len(mixed.parameters) > 1 else (identity,)
