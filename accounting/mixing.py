"""Mixing of the noise of cells from that of components: L, its inverse's norm, its rows.

Cell c's noise is n_c = sum_j L[c, j] n_j, L a Kronecker product of square factors, the first
factor's index slowest; cells and components are numbered alike.  Of exact counts x what is
published is x + n = L (L^-1 x + n_components), a fixed map of noisy components, so that one record
of cell c moves what is noised by column c of L^-1 alone.

L must be invertible.  With a singular L some combination of the published cells has no noise: the
exact counts' part outside L's range.  So the inverse is certified here, and its norm is bounded
from the L that is used, whatever it was meant to be.  What a plan says of L is `Cells`.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.limits import MAX_FACTOR, MAX_MIXED_CELLS

#: An inverse is certified if what it leaves of the identity is at most this.
_LEFT = 2.0**-10
_UNIT_ROUND_OFF = 2.0**-53
_SLACK = 1e-12
_FIELD, _FIX = "cells", "mix in a small multiple of the identity, or choose another strategy"


class Mixing:
    """A mixing matrix L with a certified norm of its inverse.

    Args:
        factors: square float64 matrices; L is their Kronecker product.
        certified: ``inverse_norm2`` of these very factors, where it was found before (for 8,192
            cells in one factor that takes a minute).

    Raises:
        UsageError: a factor is not square or finite, too large, or not certainly invertible.

    Attributes:
        factors: the factors of the product; shape: their sizes; size: number of cells.
        inverse_norm2: the largest squared norm of a column of L^-1, rounded up.
    """

    def __init__(self, factors: Sequence[Float64], certified: float | None = None) -> None:
        self.factors = tuple(np.array(factor, np.float64, order="C") for factor in factors)
        for factor in self.factors:
            _check(factor)
            factor.setflags(write=False)
        self.shape = tuple(len(factor) for factor in self.factors)
        self.size = math.prod(self.shape)
        if not self.factors or self.size > MAX_MIXED_CELLS:
            raise UsageError(
                _FIELD, f"needs 1 to {MAX_MIXED_CELLS} cells", "use fewer or coarser attributes"
            )
        # A column of a Kronecker product is one of columns, and its norm the product of norms.
        norms = () if certified else [inverse_norm2(factor) for factor in self.factors]
        self.inverse_norm2 = certified or math.prod(norms) * (1 + len(norms) * _SLACK)

    @property
    def is_identity(self) -> bool:
        """Return whether every cell has noise of its own: no mixing at all."""
        return all(np.array_equal(f, np.eye(len(f))) for f in self.factors)

    @functools.cached_property
    def digest(self) -> str:
        """128-bit hex digest of the factors, bit for bit."""
        digest = hashlib.blake2b(digest_size=16, person=b"dpstream-mixing")
        for factor in self.factors:
            digest.update(len(factor).to_bytes(8, "little"))
            digest.update(factor.astype("<f8").tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def row_norms(self) -> Float64:
        """(size,) norm of each row of L: sd of a cell in sds of a component, rounded up.

        Sums are taken in one order (they show in releases, which no processor may change).
        """
        norms = np.ones(1)
        for factor in self.factors:
            squares = np.add.accumulate(factor * factor, axis=1)[:, -1]
            norms = (norms[:, None] * np.sqrt(squares)).reshape(-1)
        norms = norms * (1 + 1e-11)
        norms.setflags(write=False)
        return norms

    @functools.cached_property
    def row_sum(self) -> float:
        """The largest sum of magnitudes of a row of L, rounded up."""
        sums = [float(np.abs(factor).sum(axis=1).max()) for factor in self.factors]
        return math.prod(sums) * (1 + 1e-11)


def _check(factor: Float64) -> None:
    square = factor.ndim == 2 and factor.shape[0] == factor.shape[1]
    if not square or not 1 <= len(factor) <= MAX_FACTOR or not np.isfinite(factor).all():
        raise UsageError(
            _FIELD, f"factors are finite square matrices of at most {MAX_FACTOR} rows", _FIX
        )
    largest = float(np.abs(factor).max())
    if not 2.0**-300 < largest < 2.0**300:
        raise UsageError(_FIELD, "a factor is zero, or out of the range of floats", "scale it")


def inverse_norm2(factor: Float64) -> float:
    """Return the largest squared norm of a column of the inverse, rounded up.

    With Y close to the inverse and R = I - Y F, |R| < 1: F^-1 = (I - R)^-1 Y exists and no column
    is longer than Y's divided by 1 - |R|.  |R|, the spectral norm, is at most the root of the
    largest row sum times the largest column sum; to what floats find of R the most that they can
    be off is added, (n + 2) units of |Y| |F|, whatever the order of a product's additions.

    Raises:
        UsageError: F is singular, or so close to it that this does not show the contrary.
    """
    size = len(factor)
    try:
        near = np.linalg.inv(factor)
    except np.linalg.LinAlgError:
        near = np.full((size, size), np.nan)
    with np.errstate(all="ignore"):
        left = np.abs(np.eye(size) - near @ factor)
        unit = (size + 8) * 1.01 * _UNIT_ROUND_OFF
        one, sizes, near_sizes = np.ones(size), np.abs(factor), np.abs(near)
        rows = left @ one + unit * (near_sizes @ (sizes @ one) + size)
        columns = one @ left + unit * ((one @ near_sizes) @ sizes + size)
        most = math.sqrt(float(rows.max()) * float(columns.max())) * 1.01
    if not most <= _LEFT:
        raise UsageError(
            _FIELD,
            "the noise of cells is singular or close to it: exact counts would show through",
            _FIX,
        )
    squares = float((near**2).sum(axis=0).max())
    rounding = 1 + (4 * size + 16) * _UNIT_ROUND_OFF
    return squares * rounding / (1 - most * 1.01) ** 2 * (1 + _SLACK)


class Cells(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cells are the public keys, in the order of their list; component j is mixed by column j.

    Figures are rounded up to 16 bits, so that they do not depend on the processor that found them.

    Attributes:
        size: number of cells.
        digest: of L.
        inverse_norm2: squared norm of the longest column of L^-1.
        rms_norm: root mean square of the norms of L's rows: sd of a typical cell.
        row_sum: the largest sum of magnitudes of a row of L.
    """

    size: int
    digest: str
    inverse_norm2: float
    rms_norm: float
    row_sum: float


def cells_of(mixing: "Mixing | None") -> Cells | None:
    """Return the cells of a plan with a mixing; ``None`` where each cell has noise of its own.

    Such a plan is that of a stream with public keys: the same hash, names and bytes.
    """
    if mixing is None or mixing.is_identity:
        return None
    rms = math.sqrt(float((mixing.row_norms**2).mean()))
    figures = (_coarse(x) for x in (mixing.inverse_norm2, rms, mixing.row_sum))
    return Cells(mixing.size, mixing.digest, *figures)


def checked_mixing(cells: Cells, mixing: "Mixing | None", rows: int) -> "Mixing":
    """Return the mixing of a plan's cells, which a run gets apart from the plan.

    Args:
        rows: cells in the public list.

    Raises:
        PolicyError: it is not the one the plan was made with.
    """
    if mixing is None or mixing.digest != cells.digest or rows != cells.size:
        raise PolicyError(
            "cells",
            "the mixing of noise, or the list of cells, is not the one the plan was made with",
            "load the job again",
        )
    if mixing.inverse_norm2 > cells.inverse_norm2 * (1 + 1e-9):
        raise PolicyError(
            "cells",
            "a record would add more to what is noised than the plan says",
            "make the plan anew from the mixing",
        )
    return mixing


def _coarse(figure: float) -> float:
    """Rounded up to 16 bits."""
    part, exponent = math.frexp(figure)
    return math.ldexp(math.ceil(math.ldexp(part, 16)), exponent - 16)
