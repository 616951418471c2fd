"""The measured numbers of a residual table for one attribute: n - 1 of n cells, beside its total.

A *basis* is a vector g of the cells that sums to 1, and a Gaussian strategy on the queries r with
r g = 0.  Every query w of the attribute is (w g) times the total plus such an r = w - (w g) 1, and
this split is unique, so that the total and the rest can be measured separately without loss.  A
table measures x_c - g_c (sum of x) for all cells but the last, with noise of covariance S = L L^T:

    variance of w  =  (w g)^2 var(total) + u S u^T,   u = (w_1 - w_n, ..., w_(n-1) - w_n).

*Even* bases have g = 1/n and the noise of independent cells.  They are the best for tables of
counts.  They measure x_1 - x_c, which is equivalent.  *Fitted* bases take g and S from a strategy X
of the attribute alone: with a = 1 / (1^T X^-1 1) and g = a X^-1 1, X = a 1 1^T + R where R g = 0.
R is what X measures beside the total, its diagonal is that of X less a, and
u S u^T = w X^-1 w^T - (w g)^2 / a.

**Sensitivity.**  A record of cell c moves the measured numbers M x by M e_c.  M x + L z is
published, z independent with sd 1: a fixed map of L^-1 M x + z.  So mu^2 is max_c |L^-1 M e_c|^2.
``norm2`` bounds it from the floats of L and the whole numbers 2^bits M as they are used, rounding
included.  For several attributes L and M are Kronecker products, and the columns' norms multiply.

**Even bases in whole numbers.**  Sub of an axis of n cells takes x to x_0 - x_1, ..., x_0 -
x_(n-1): whole numbers, and all that a table says beyond its total.  Noise of the cells, each of sd
s, moves Sub x by noise of covariance s^2 Sub Sub^T = s^2 L L^T; with D independent draws z, s L z
has it, and L is invertible.  So what is published, Sub x + s L z rounded, is L (L^-1 Sub x + s z)
rounded: a Gaussian mechanism whose sensitivity is the longest column of L^-1 Sub.  That is sqrt(1 -
1/n) for the exact root, as the rows of Sub span all that is orthogonal to the ones; it is bounded
here for the L that is used.

Of several axes all of this is the Kronecker product, of none the number 1.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy.linalg
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.workloads.attributes import Factor, framed

_U = 2.0**-53


def difference_matrix(size: int) -> Float64:
    """Return (n - 1, n) Sub."""
    return np.hstack([np.ones((size - 1, 1)), -np.eye(size - 1)])


@functools.lru_cache(maxsize=256)
def difference_root(size: int) -> Float64:
    """Return (n - 1, n - 1) L, lower triangular; read-only."""
    sub = difference_matrix(size)
    factor = np.asarray(scipy.linalg.cholesky(sub @ sub.T, lower=True))
    factor.setflags(write=False)
    return factor


@functools.lru_cache(maxsize=256)
def difference_norm2(size: int) -> float:
    """Return at least max_c |L^-1 Sub e_c|^2 of one axis.

    With Y the computed solution and R = Sub - L Y, L^-1 Sub = Y + L^-1 R.  Sub Sub^T = I + 1 1^T,
    so that |L^-1| <= 2 as soon as L L^T is within 3/4 of it (Frobenius norm); R is computed in
    floats, and what rounding can hide of it, (n + 2) units of |L| |Y|, is added.
    """
    sub, lower = difference_matrix(size), difference_root(size)
    if not np.linalg.norm(lower @ lower.T - sub @ sub.T) < 0.5:
        raise InvariantError("the factors belong to one matrix")
    solution = scipy.linalg.solve_triangular(lower, sub, lower=True)
    hidden = (size + 2) * 2 * _U * float(np.linalg.norm(lower)) * float(np.linalg.norm(solution))
    rest = 2 * (float(np.linalg.norm(sub - lower @ solution)) + hidden)
    longest = float(np.sqrt((solution**2).sum(axis=0).max())) * (1 + size * 2 * _U)
    return (longest + rest) ** 2 * (1 + 8 * _U)


#: Bits of all axes of a table together: counts keep 38 of 62 bits.
TABLE_BITS = 24
#: Bits of one axis: more do not change the error of a strategy.
_MOST_BITS = 14


class Basis(ABC):
    """The measured numbers of one attribute.

    Attributes:
        size: n, the number of cells.
        bits: the measured numbers are multiples of 2^-bits.
    """

    size: int
    bits: int

    @property
    @abstractmethod
    def spread(self) -> Float64:
        """(n,) g: the share of a total that each cell takes."""

    @property
    @abstractmethod
    def root(self) -> Float64:
        """(n - 1, n - 1) L of noise of sd 1; read-only."""

    @property
    @abstractmethod
    def norm2(self) -> float:
        """An upper bound of max_c |L^-1 M e_c|^2."""

    @property
    @abstractmethod
    def moves(self) -> Float64:
        """(n - 1, n) M: the effect of a record of each cell on the measured numbers; exact."""

    @abstractmethod
    def reduced(self, table: Int64, axis: int) -> Int64:
        """Return 2^bits M x (``moves``) along an axis, exact: n cells become n - 1 numbers."""

    @abstractmethod
    def restored(self, measured: Float64, axis: int) -> Float64:
        """Return (n along the axis) x - g (sum of x) from M x."""

    @abstractmethod
    def along(self, factor: Factor) -> Float64:
        """Return (rows,) (w g)^2 of each query."""

    @abstractmethod
    def rest(self, factor: Factor) -> Float64:
        """Return (rows,) u S u^T of each query."""

    @abstractmethod
    def masses(self, factor: Factor) -> tuple[float, float]:
        """Return (sum of ``along``, sum of ``rest``) over the queries."""

    @abstractmethod
    def canonical(self) -> bytes:
        """Return the bytes that name the basis in the hash of the noise."""


@dataclass(frozen=True)
class Even(Basis):
    """The even basis: g = 1/n, and the noise of cells of sd 1 before differences are taken."""

    size: int
    bits: int = field(default=0, init=False)

    @property
    @override
    def spread(self) -> Float64:
        return np.full(self.size, 1 / self.size)

    @property
    @override
    def root(self) -> Float64:
        return difference_root(self.size)

    @property
    @override
    def norm2(self) -> float:
        return difference_norm2(self.size)

    @property
    @override
    def moves(self) -> Float64:
        return difference_matrix(self.size)

    @override
    def reduced(self, table: Int64, axis: int) -> Int64:
        first = table.take([0], axis=axis)
        return np.asarray(first - table.take(range(1, table.shape[axis]), axis=axis))

    @override
    def restored(self, measured: Float64, axis: int) -> Float64:
        first = measured.sum(axis=axis, keepdims=True) / (measured.shape[axis] + 1)
        return np.concatenate([first, first - measured], axis=axis)

    @override
    def along(self, factor: Factor) -> Float64:
        return np.asarray(factor.parts[0] / self.size)

    @override
    def rest(self, factor: Factor) -> Float64:
        return factor.parts[1]

    @override
    def masses(self, factor: Factor) -> tuple[float, float]:
        along, rest = factor.masses
        return along / self.size, rest

    @override
    def canonical(self) -> bytes:
        return framed(b"even") + self.size.to_bytes(8, "little")


@dataclass(frozen=True, eq=False)
class Fitted(Basis):
    """A basis that is fitted to the queries of the attribute.

    Attributes:
        shares: (n,) whole numbers g 2^bits, which sum to 2^bits.
        lower: (n - 1, n - 1) L, lower triangular.
    """

    shares: Int64
    bits: int
    lower: Float64

    @functools.cached_property
    def size(self) -> int:  # type: ignore[override]
        """n."""
        return len(self.shares)

    @functools.cached_property
    def spread(self) -> Float64:  # type: ignore[override]
        """The spread as in ``Basis``; exact."""
        return np.asarray(self.shares * 2.0**-self.bits)

    @property
    @override
    def root(self) -> Float64:
        return self.lower

    @functools.cached_property
    def norm2(self) -> float:  # type: ignore[override]
        """The norm as in ``Basis``.

        With Y near L^-1 and E = I - Y L, |E| < 1: |L^-1| <= |Y| / (1 - |E|).  With Z near L^-1 M
        and R = M - L Z: L^-1 M = Z + L^-1 R.  E and R are computed in floats.  Their rounding
        errors are at most (n + 8) units of the products of magnitudes; these are added, in
        Frobenius norms.
        """
        lower, moves, size = self.lower, self.moves, self.size
        if not np.isfinite(lower).all() or not np.diag(lower).all():
            raise InvariantError("the noise of a basis is invertible")
        inverse = scipy.linalg.solve_triangular(lower, np.eye(size - 1), lower=True)
        unit = (size + 8) * 1.01 * _U
        norms = float(np.linalg.norm(lower)) * float(np.linalg.norm(inverse))
        error = float(np.linalg.norm(np.eye(size - 1) - inverse @ lower)) * 1.01
        error += unit * (norms + math.sqrt(size)) * 1.01
        if not error < 0.01:
            raise InvariantError("the noise of a basis is invertible")
        stretch = float(np.linalg.norm(inverse)) * 1.01 / (1 - error)
        columns = inverse @ moves
        sizes = float(np.linalg.norm(lower)) * float(np.linalg.norm(columns))
        hidden = unit * (sizes + float(np.linalg.norm(moves))) * 1.01
        off = stretch * (float(np.linalg.norm(moves - lower @ columns)) * 1.01 + hidden)
        longest = float(np.sqrt((columns**2).sum(axis=0).max())) * (1 + (size + 8) * 2 * _U)
        return (longest + off) ** 2 * (1 + 8 * _U)

    @property
    @override
    def moves(self) -> Float64:
        return measuring(self.spread)

    @functools.cached_property
    def covariance(self) -> Float64:
        """(n, n) of the noise of x - g (sum of x)."""
        rows = np.concatenate([self.lower, -self.lower.sum(axis=0, keepdims=True)])
        return np.asarray(rows @ rows.T)

    @override
    def reduced(self, table: Int64, axis: int) -> Int64:
        shape = [-1 if k == axis else 1 for k in range(table.ndim)]
        kept_cells = range(self.size - 1)
        total = table.sum(axis=axis, keepdims=True)
        shares = self.shares[:-1].reshape(shape)
        return np.asarray((table.take(kept_cells, axis=axis) << self.bits) - shares * total)

    @override
    def restored(self, measured: Float64, axis: int) -> Float64:
        last = -measured.sum(axis=axis, keepdims=True)
        return np.concatenate([measured, last], axis=axis)

    @override
    def along(self, factor: Factor) -> Float64:
        return np.asarray(factor.apply(self.spread), np.float64) ** 2

    @override
    def rest(self, factor: Factor) -> Float64:
        return np.maximum(factor.variances(self.covariance), 0.0)

    @override
    def masses(self, factor: Factor) -> tuple[float, float]:
        gram, spread = factor.gram(), self.spread
        return float(spread @ gram @ spread), float(np.einsum("ij,ij->", gram, self.covariance))

    @override
    def canonical(self) -> bytes:
        body = self.shares.astype("<i8").tobytes() + self.lower.astype("<f8").tobytes()
        return framed(b"fitted") + self.size.to_bytes(8, "little") + bytes([self.bits]) + body


def measuring(spread: Float64) -> Float64:
    """Return (n - 1, n) M of a vector g: x_c - g_c (sum of x) for all cells but the last."""
    size = len(spread)
    return np.asarray(np.eye(size - 1, size) - spread[:-1, None])


def bits_of(ways: int) -> int:
    """Return the bits of each axis.

    Args:
        ways: number of axes of the largest table.
    """
    return min(_MOST_BITS, TABLE_BITS // max(1, ways))


def fitted(strategy: Float64, bits: int) -> Fitted:
    """Return the basis of a strategy of one attribute.

    Args:
        strategy: (n, n) X, positive definite.
        bits: g is rounded to multiples of 2^-bits.
    """
    inverse = scipy.linalg.cho_solve(
        scipy.linalg.cho_factor(strategy, lower=True), np.eye(len(strategy))
    )
    spread = np.asarray(inverse.sum(axis=0) / inverse.sum())
    shares = _rounded(spread, 1 << bits)
    moves = measuring(np.asarray(shares * 2.0**-bits))
    covariance = moves @ ((inverse + inverse.T) / 2) @ moves.T
    lower = np.asarray(scipy.linalg.cholesky(covariance, lower=True))
    lower.setflags(write=False)
    return Fitted(shares, bits, lower)


def _rounded(shares: Float64, units: int) -> Int64:
    """Whole numbers near ``shares * units`` that sum to ``units``."""
    scaled = shares / shares.sum() * units
    down = np.floor(scaled)
    missing = units - int(down.sum())
    order = np.argsort(down - scaled, kind="stable")
    down[order[:missing]] += 1
    return np.asarray(down, np.int64)


def table_bits(bases: Sequence[Basis]) -> int:
    """Return the number of bits after the point of the numbers of one table."""
    return sum(basis.bits for basis in bases)


def cost2(bases: Sequence[Basis]) -> float:
    """Return an upper bound of the squared sensitivity of a residual table at noise of sd 1."""
    return math.prod(basis.norm2 for basis in bases) * (1 + len(bases) * 4 * _U)


def reduced(table: Int64, bases: Sequence[Basis]) -> Int64:
    """Return the measured numbers of a table, in units of 2^-``table_bits``, exact."""
    for axis, basis in enumerate(bases):
        table = basis.reduced(table, axis)
    return table


def restored(measured: npt.NDArray[np.float64], bases: Sequence[Basis]) -> Float64:
    """Return the residual table, whose sums along each axis are zero, from its measured numbers."""
    for axis, basis in enumerate(bases):
        measured = basis.restored(measured, axis)
    return measured
