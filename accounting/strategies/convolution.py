"""Strategies whose encoder and decoder are convolutions, with exactly rounded decoding.

A is lower-triangular Toeplitz with first column c; the released prefix is

    q_t = round(2^D (B y)_t) / 2^D,   B = M A^-1 (M: prefix sums),   so   q_t = prefix_t + n_t,
    n_t = round(2^D (b * z)_t) / 2^D,   b = coefficients of 1 / ((1 - x) c(x)),

because the prefix is a whole number of lattice points.  q is a function of y alone only if
the rounding is that of the exact real number.  ``fold`` therefore computes in floats with a
bound of their error, and ``exact`` settles every prefix whose rounding the bound leaves open in
ball arithmetic of growing precision.  The result depends neither on the order of float
operations nor on the machine.

Sensitivity: one unit of input at any step moves y by a column of A, squared norm <= col2,
the first column's (all columns are its beginnings).
"""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.base import ExactNoise, Ranges, Strategy

_SLACK = 1e-10
#: Prefixes are rounded by floor(2^D x + ROUND_UP).  Decoded integers are dyadic and would often
#: lie exactly on the boundary of 1/2; no dyadic number lies on this one.
ROUND_UP = 0.5 + 2.0**-12 / 3
_FIRST_PRECISION = 256
_LAST_PRECISION = 1 << 20


class ConvolutionStrategy(Strategy):
    """A lower-triangular Toeplitz encoder with non-negative, decreasing coefficients."""

    @abstractmethod
    def coefficients(self) -> Float64:
        """(T,) c_k, first column of the encoder, within 1e-13 of the exact numbers."""

    @abstractmethod
    def _inverse(self) -> Sequence[Any]:
        """(T,) balls of 1/c(x) at the current precision."""

    def decoder_balls(self, bits: int) -> list[Any]:
        """(T,) b_k as balls of that precision."""
        with precision(bits):
            return _running_sums(self._inverse())

    @functools.cached_property
    def decoder(self) -> Float64:
        """(T,) b_k, each the float nearest to the exact number (1 ulp)."""
        return np.array([float(b) for b in self.decoder_balls(_FIRST_PRECISION)])

    @functools.cached_property
    def _balls(self) -> list[Any]:
        return self.decoder_balls(_FIRST_PRECISION)

    @property
    @override
    def col2(self) -> float:
        return float(np.sum(self.coefficients() ** 2) * (1 + _SLACK))

    @property
    @override
    def sd_factors(self) -> Float64:
        return np.asarray(np.sqrt(np.cumsum(self.decoder**2)) * (1 + _SLACK))

    @property
    @override
    def reach(self) -> float:
        return float(np.abs(self.decoder).sum() * (1 + _SLACK))

    @property
    @override
    def rounding(self) -> Float64:
        # Half a lattice step of the decoder; a rounded node is within 1/2 of its Gaussian.
        nodes = 0.5 * np.cumsum(np.abs(self.decoder)) if self.rounds_nodes else 0.0
        decode = np.full(self.triggers, ROUND_UP / (1 << DECODE_BITS))
        return np.asarray((decode + nodes) * (1 + _SLACK))

    @functools.cached_property
    def _gram(self) -> Float64:
        """(T,) Gram entry of the first column with the column ``lag`` later: the largest of
        that lag, because later columns are shorter and the coefficients non-negative."""
        from scipy.fft import irfft, next_fast_len, rfft  # mode 'rounds' alone needs it

        column = self.coefficients()
        size = self.triggers
        length = next_fast_len(2 * size - 1, real=True)
        product = rfft(column, length) * rfft(column[::-1], length)
        lags = irfft(product, length)[size - 1 : 2 * size - 1]
        return np.asarray(lags + lags[0] * _SLACK)

    @override
    def worst_split(self, pieces: int, total: int | Int64) -> float | Float64:
        """See base.  |A a|^2 is convex in a, so a is (total - pieces + 1, 1, ..., 1); the Gram
        entries are non-negative and fall with the lag, so the steps are neighbours with the
        heavy one in the middle.  Every pair is charged the largest entry of its lag."""
        return heavy_split(self._gram, min(pieces, self.triggers), total)

    @override
    def matrix(self) -> npt.NDArray[Any]:
        column, size = self.coefficients(), self.triggers
        lag = np.subtract.outer(np.arange(size), np.arange(size))
        return np.where(lag >= 0, column[np.maximum(lag, 0)], 0)

    @override
    def nodes_through(self, step_index: int | Int64) -> Int64:
        return np.asarray(step_index, np.int64).copy()

    @override
    def fold(self, ranges: Ranges) -> None:
        for row, step_index in zip(*(where.tolist() for where in self._fold(ranges)), strict=True):
            column = step_index - ranges.step_index[row] - 1 if ranges.out.shape[1] > 1 else 0
            ranges.out[row, column] = self.exact(ranges.exact(row, step_index), step_index)

    @abstractmethod
    def _fold(self, ranges: Ranges) -> tuple[Int64, Int64]:
        """``fold`` in floats; returns the (rows, steps) whose rounding these cannot settle."""

    def exact(self, noise: ExactNoise, step_index: int) -> int:
        """n_t * 2^DECODE_BITS at ``step_index``, whatever precision that takes."""
        bits = _FIRST_PRECISION
        while bits <= _LAST_PRECISION:
            decoder = self._balls if bits == _FIRST_PRECISION else self.decoder_balls(bits)
            with precision(bits):
                rounded = _rounded(decoder, noise(bits), step_index)
            if rounded is not None:
                return rounded
            bits *= 4
        raise ArithmeticError("a prefix lies on a rounding boundary")


def heavy_split(gram: Float64, pieces: int, total: int | Int64) -> float | Float64:
    """|A a|^2 of ``total`` on ``pieces`` neighbours, one on each and the rest on the middle one;
    rounded up.

    Args:
        gram: (T,) the largest Gram entry of two columns by their lag; not negative, falling.
        pieces: at most T.
    """
    extra = total - pieces
    lag = np.arange(1, pieces)
    ones = pieces * gram[0] + 2 * float((pieces - lag) @ gram[1:pieces])
    left, right = (pieces - 1) // 2, pieces // 2
    row = gram[0] + gram[1 : left + 1].sum() + gram[1 : right + 1].sum()
    return (ones + 2 * extra * row + extra**2 * gram[0]) * (1 + _SLACK)  # type: ignore[no-any-return]


def _rounded(decoder: Sequence[Any], nodes: Sequence[Any], step_index: int) -> int | None:
    """floor(2^D (b * z)_leaf + ROUND_UP), ``None`` while the balls are too wide to tell."""
    total = flint.arb(0)
    for weight, node in zip(reversed(decoder[:step_index]), nodes[:step_index], strict=True):
        total += weight * node
    up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
    floor = (total * (1 << DECODE_BITS) + up).floor()
    integer = floor.unique_fmpz()
    return None if integer is None else int(integer)


def _running_sums(terms: Sequence[Any]) -> list[Any]:
    total, sums = flint.arb(0), []
    for term in terms:
        total += term
        sums.append(total)
    return sums
