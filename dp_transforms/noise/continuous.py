"""Gaussian noise by inverse CDF at a 128-bit uniform named by its node, in floats and exactly.

For strategies with a real encoder (``blt`` and ``dense``): the node noise is the real
number N = sigma * Phi^-1((u + 1/2) / 2^128) with u the 128 bits of the node.  ``draw`` gives
it as float64 with a bounded error, ``exact`` as balls of any precision; what is released is
the exact rounding of a linear map of N, so the float error never shows.

u's upper 64 bits are the node's lane of a shared block (``sampler``), its lower 64 bits the first
word of the node's own block, which is drawn only in the tails and when a rounding must be settled.

**Quantiles** at a 128-bit uniform, to about 82 bits, many at a time (``pairs``).

``draw`` gives node noise to 46 bits, which is enough where each prefix is rounded by itself.
Where all cells of a workload share all of its components' noise, one rounding in a million that
floats leave open would ask for balls of every node; here so many bits are known that it never does.

The quantile z(p), p in (0, 1/2), is a Taylor polynomial around the middle of one of 128 parts of
each octave of p: with g = dz/dp = 1/density(z), g' = z g^2 gives all coefficients from z at the
middle, a ball.  Terms fall by 2^-8 each; the first four are pairs of floats.  Below 2^-25, once in
sixteen million draws, a ball gives the number itself.

**Pairs** are numbers as unevaluated sums of two float64, compiled: about 104 bits.  Every operation
is off by at most OPERATION_ERROR times its result (of a sum: times the sum of magnitudes).  Only
IEEE additions and multiplications are used, without contraction (numba's default), so the
classical error-free transformations hold (Dekker 1971, Knuth 1969).  A pair is normalised: its
second number is at most half a unit in the last place of the first.
"""

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Float64, Ids, Int32, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.libraries import njit, special
from dpstream.accounting.limits import MAX_REAL_SIGMA
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import own_blocks, shared_lanes

#: Relative error of an operation, generously: the proofs give a few times 2^-105.
OPERATION_ERROR = 2.0**-101

_SPLIT = float((1 << 27) + 1)
#: |quantile - pair|, in sds; tests measure at most 2^-84.
QUANTILE_ERROR = 2.0**-82
_OCTAVES = 24
_PARTS = 128
_TERMS = 11
_PAIRS = 4
_BITS = 192


@njit(inline="always")
def two_sum(a: float, b: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the float a + b, and its exact rounding error."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@njit(inline="always")
def two_product(a: float, b: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the float a b, and its exact rounding error; |a| and |b| are below 2^990."""
    product = a * b
    wide = _SPLIT * a
    a_high = wide - (wide - a)
    a_low = a - a_high
    wide = _SPLIT * b
    b_high = wide - (wide - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@njit(inline="always")
def plus(
    a: float, a_low: float, b: float, b_low: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the sum of the pairs (a, a_low) and (b, b_low) as a pair, within OPERATION_ERROR."""
    total, rest = two_sum(a, b)
    rest += a_low + b_low
    high = total + rest
    return high, rest - (high - total)


@njit(inline="always")
def scaled(a: float, b: float, b_low: float) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the product of a float and the pair (b, b_low) as a pair, within OPERATION_ERROR."""
    product, rest = two_product(a, b)
    rest += a * b_low
    high = product + rest
    return high, rest - (high - product)


@njit(inline="always")
def times(
    a: float, a_low: float, b: float, b_low: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the product of (a, a_low) and (b, b_low) as a pair, within OPERATION_ERROR."""
    product, rest = two_product(a, b)
    rest += a * b_low + a_low * b
    high = product + rest
    return high, rest - (high - product)


def quantiles(high: Ids, low: Ids) -> tuple[Float64, Float64]:
    """Return the standard normal quantiles Phi^-1((u + 1/2) / 2^128) as (n,) pairs of floats.

    A pair stands for the sum of its numbers and is within QUANTILE_ERROR of the quantile.

    Args:
        high, low: (n,) uint64 upper and lower word of each uniform u = 2^64 high + low.
    """
    values, rest = np.empty(len(high)), np.empty(len(high))
    beyond_table = np.empty(len(high), np.int64)
    count = _evaluate(high, low, _table(), values, rest, beyond_table)
    for at in beyond_table[:count].tolist():
        values[at], rest[at] = _far_pairs(int(high[at]) << 64 | int(low[at]))
    return values, rest


def _far_pairs(uniform: int) -> tuple[float, float]:
    """One quantile by balls."""
    with precision(_BITS):
        signed = flint.arb(2 * uniform + 1 - (1 << 128)) / (1 << 128)
        return _pair(flint.arb(2).sqrt() * signed.erfinv())


def _pair(ball: flint.arb) -> tuple[float, float]:
    first = float(ball.mid())
    return first, float((ball - first).mid())


@functools.cache
def _table() -> Float64:
    """(24 * 128, 15) coefficients of (p - middle) / half a part: four pairs, then seven floats."""
    table = np.empty((_OCTAVES * _PARTS, 2 * _PAIRS + _TERMS - _PAIRS))
    with precision(_BITS):
        for octave in range(_OCTAVES):
            half = flint.arb(2) ** -(octave + 10)  # 128 parts of [2^-(octave + 2), 2^-(octave + 1))
            for part in range(_PARTS):
                terms = _quantile(half * (2 * (_PARTS + part) + 1), half, _TERMS)
                pairs = [number for term in terms[:_PAIRS] for number in _pair(term)]
                rest = [float(term.mid()) for term in terms[_PAIRS:]]
                table[octave * _PARTS + part] = pairs + rest
    table.setflags(write=False)
    return table


def _quantile(middle: flint.arb, half: flint.arb, terms: int) -> list[flint.arb]:
    """Coefficients of z(middle + half h) in h, by g' = z g^2."""
    z = flint.arb(2).sqrt() * (2 * middle - 1).erfinv()
    values = [z]
    slopes = [(2 * flint.arb.pi()).sqrt() * (z * z / 2).exp() * half]
    squares: list[flint.arb] = []
    for order in range(terms - 1):
        values.append(slopes[order] / (order + 1))
        squares.append(sum((slopes[i] * slopes[order - i] for i in range(order + 1)), flint.arb(0)))
        change = sum((values[i] * squares[order - i] for i in range(order + 1)), flint.arb(0))
        slopes.append(change / (order + 1))
    return values


@njit(cache=True, nogil=True)
def _evaluate(
    high: Ids, low: Ids, table: Float64, values: Float64, rest: Float64, beyond_table: Int64
) -> int:  # pragma: no cover - compiled
    """Fill the pairs; returns how many places, in ``far``, lie beyond the table."""
    count = 0
    for i in range(high.size):
        first, second = high[i], low[i]
        upper = first >> np.uint64(63) == 1
        if upper:
            first, second = ~first, ~second
        octave = 0
        while octave < _OCTAVES and (first << np.uint64(octave + 1)) >> np.uint64(63) == 0:
            octave += 1
        if octave == _OCTAVES:
            beyond_table[count] = i
            count += 1
            continue
        # The leading one is shifted out: 7 bits of the part, then where in the part p lies.
        shift = np.uint64(octave + 2)
        bits = first << shift | second >> (np.uint64(64) - shift)
        behind = second << shift
        part = bits >> np.uint64(57)
        inside = bits << np.uint64(7) | behind >> np.uint64(57)
        # (32 + 53 bits + 1/2) / 2^85 of the part, as -1 .. 1: both numbers are exact.
        upper_bits = np.float64(inside >> np.uint64(32)) * 2.0**-31 - 1.0
        lower = (inside & np.uint64(0xFFFFFFFF)) << np.uint64(21)
        lower |= (behind << np.uint64(7)) >> np.uint64(43)
        lower_bits = np.float64(lower) * 2.0**-84 + 2.0**-85
        h = upper_bits + lower_bits
        h_low = lower_bits - (h - upper_bits)
        line = table[octave * _PARTS + np.int64(part)]
        tail = line[2 * _PAIRS + _TERMS - _PAIRS - 1]
        for term in range(2 * _PAIRS + _TERMS - _PAIRS - 2, 2 * _PAIRS - 1, -1):
            tail = tail * h + line[term]
        value, value_low = tail, 0.0
        for term in range(_PAIRS - 1, -1, -1):
            value, value_low = times(value, value_low, h, h_low)
            value, value_low = plus(line[2 * term], line[2 * term + 1], value, value_low)
        values[i] = -value if upper else value
        rest[i] = -value_low if upper else value_low
    return count


#: Below this the upper 64 bits alone would leave a relative error above 2^-50.
_TAIL = 2.0**-14
#: |float draw - exact draw| in sds; tests measure at most 2^-48 (the inverse normal and rounding).
_ERROR = 2.0**-46


class ContinuousGaussian:
    """Sampler of one sd.

    Args:
        sigma: sd in grid units, 0 < sigma <= MAX_REAL_SIGMA.
    """

    def __init__(self, sigma: float) -> None:
        if not 0 < sigma <= MAX_REAL_SIGMA:
            raise ValueError("sigma is outside the sampler's range")
        self.sigma = sigma
        self.error = sigma * _ERROR
        self.digest = hashlib.blake2b(
            b"gaussian of 128 bits" + struct.pack("<d", sigma), digest_size=16
        ).digest()

    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Float64, Int64]:
        """Return the noise of nodes ``first[i] .. last[i] - 1`` of each row's name.

        Args:
            prf: AES under the node key.
            tweaks: (n, 2) name of each row.
            first, last: (n,) node numbers, 0 <= first <= last.

        Returns:
            (noise, starts): flat float64 noises within ``error`` of the exact ones, and the
            (n,) index of each row's first.
        """
        shared = shared_lanes(prf, tweaks, first, last, np.uint64)
        noise = np.empty(shared.size)
        tails, rows = np.empty(shared.size, np.int64), np.empty(shared.size, np.int32)
        ends, bits = (first, last), noise.view(np.int64)
        count = _invert(*shared[:3], *ends, _draw_table(), noise, bits, tails, rows)
        if count:
            tails, rows = tails[:count], rows[:count]
            node = first[rows] + tails - shared.starts[rows]
            high = shared.lanes[shared.shift[rows] + node]
            noise[tails] = _far(high, own_blocks(prf, tweaks[rows], node)[:, 0])
        noise *= self.sigma
        return noise, shared.starts

    def pairs(self, prf: Prf, tweaks: Ids, node: int) -> tuple[Float64, Float64]:
        """Return one node of each name in sds, as (n,) pairs of floats within ``QUANTILE_ERROR``.

        A pair (high, low) stands for the number high + low.  Where ``draw`` is exact to 46 bits,
        these are to about 82, which mixed cells need (`noise.mixing`).
        """
        shared = tweaks.copy()
        shared[:, 0] ^= np.uint64(node >> 1)
        high = prf.blocks(shared)[:, node & 1]
        return quantiles(high, own_blocks(prf, tweaks, np.full(1, node))[:, 0])

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """Return nodes ``0 .. last - 1`` of one name as a function of the precision in bits.

        Every sampler has this method: where floats leave a rounding open, the noise of a strategy
        is summed of its balls.  ``tweak``: (2,) the name.
        """
        zero, node = np.zeros(1, np.int64), np.arange(last)
        tweaks = tweak.reshape(1, 2)
        high = shared_lanes(prf, tweaks, zero, zero + last, np.uint64).lanes[:last]
        low = own_blocks(prf, np.repeat(tweaks, last, axis=0), node)[:, 0]
        bits = [(int(h) << 64) | int(low_) for h, low_ in zip(high, low, strict=True)]

        def balls(wanted: int) -> Sequence[Any]:
            with precision(wanted):
                scale = flint.arb(self.sigma) * flint.arb(2).sqrt()
                # 2 (u + 1/2) / 2^128 - 1 = (2 u + 1 - 2^128) / 2^128
                signed = [flint.arb(2 * u + 1 - (1 << 128)) / (1 << 128) for u in bits]
                return [scale * x.erfinv() for x in signed]

        return balls


def _far(high: Ids, low: Ids) -> Float64:
    """Draws in the tails from all 128 bits, in sds."""
    upper = high >> np.uint64(63) == 1
    high, low = np.where(upper, ~high, high), np.where(upper, ~low, low)
    tail = (high.astype(np.float64) + (low.astype(np.float64) + 0.5) * 2.0**-64) * 2.0**-64
    value: Float64 = special.ndtri(tail)
    return np.asarray(np.where(upper, -value, value))


#: Table for draws: Taylor polynomials around the middles of 16 parts of each octave of p from _TAIL
#: to 1.  p is at most 1/2, where the last octave begins.  Each term is 2^-5 of the one before.
_DRAW_OCTAVES, _DRAW_PARTS, _DRAW_TERMS = 14, 16, 10
#: Bits of a float that tell where in its part it lies; its exponent and the part stand above them.
_INSIDE_BITS = 48
_FIRST_PART = (1023 - _DRAW_OCTAVES) * _DRAW_PARTS


@functools.cache
def _draw_table() -> Float64:
    """Return (14 * 16, 10) coefficients in (p - middle) / half, of each part of each octave."""
    table = np.empty((_DRAW_OCTAVES * _DRAW_PARTS, _DRAW_TERMS))
    with precision(_BITS):
        for row in range(len(table)):
            octave, part = divmod(row, _DRAW_PARTS)
            half = flint.arb(2) ** (octave - _DRAW_OCTAVES) / (2 * _DRAW_PARTS)
            terms = _quantile(half * (2 * (_DRAW_PARTS + part) + 1), half, _DRAW_TERMS)
            table[row] = [float(term.mid()) for term in terms]
    table.setflags(write=False)
    return table


@njit(cache=True, nogil=True)
def _invert(
    lanes: Ids,
    shift: Int64,
    starts: Int64,
    first: Int64,
    last: Int64,
    table: Float64,
    noise: Float64,
    bits: Int64,
    tails: Int64,
    rows: Int32,
) -> int:  # pragma: no cover - compiled
    """Fill ``noise`` in sds; returns how many ``tails`` (in ``rows``) need more bits.

    ``bits`` is the memory of ``noise`` as integers, which tell the part that a probability is in.
    A table is three times as fast as rational functions with a logarithm.  The released bytes are
    the same with both: what is released is the exact rounding (`ContinuousGaussian`).
    """
    count, mask = 0, (np.int64(1) << _INSIDE_BITS) - 1
    for i in range(first.size):
        row_shift = shift[i]
        for node in range(first[i], last[i]):
            at = starts[i] + node - first[i]
            lane = lanes[row_shift + node]
            upper = lane >> np.uint64(63) == 1
            noise[at] = np.float64(~lane if upper else lane) * 2.0**-64
            if noise[at] < _TAIL:
                tails[count] = at
                rows[count] = i
                count += 1
                continue
            row = (bits[at] >> _INSIDE_BITS) - _FIRST_PART
            inside = np.float64(bits[at] & mask) * 2.0 ** (1 - _INSIDE_BITS) - 1.0
            value = table[row, _DRAW_TERMS - 1]
            for term in range(_DRAW_TERMS - 2, -1, -1):
                value = value * inside + table[row, term]
            noise[at] = -value if upper else value
    return count
