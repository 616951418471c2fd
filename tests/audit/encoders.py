"""Encoders and decoders of the strategies, from their definitions alone.

Integers stay integers; the real encoders and all quotients are balls of 400 bits, so
that every rounding is decided.
"""

import functools
import math
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import BltStrategy, DenseStrategy, make_strategy

PRECISION = 400


@functools.cache
def matrix(strategy: str, triggers: int) -> list[list[Fraction]]:
    """A, dense, its nodes in the order in which they complete."""
    if strategy == "tree":
        rows = []
        for leaf in range(1, triggers + 1):
            for level in range((leaf & -leaf).bit_length()):
                begin = leaf - (1 << level)
                rows.append([Fraction(begin < t <= leaf) for t in range(1, triggers + 1)])
        return rows
    if strategy == "toeplitz":
        column = toeplitz_column(triggers)
        return [
            [Fraction(column[t - k] if k <= t else 0) for k in range(triggers)]
            for t in range(triggers)
        ]
    # The real matrix is these floats within 1e-13: exact rationals of them.
    floats = make_strategy(strategy, triggers).matrix()
    return [[Fraction(float(v)) for v in row] for row in floats]


@functools.cache
def toeplitz_column(triggers: int) -> list[int]:
    """rint(2^6 C(2k, k) / 4^k); the audited plans have few triggers."""
    assert triggers <= 1000
    return [round(64 * Fraction(math.comb(2 * k, k), 4**k)) for k in range(triggers)]


@functools.cache
def _column(strategy: str, triggers: int) -> list[Any]:
    """First column of a convolution's encoder as balls."""
    if strategy == "toeplitz":
        return [flint.arb(c) for c in toeplitz_column(triggers)]
    blt = BltStrategy(triggers)
    with flint.ctx.workprec(PRECISION):
        terms = [(flint.arb(o), flint.arb(t)) for o, t in zip(blt.omega, blt.theta, strict=True)]
        tail = [sum((o * t**k for o, t in terms), flint.arb(0)) for k in range(triggers - 1)]
        return [flint.arb(1), *tail]


def prefixes(strategy: str, inputs: list[int], noise: list[Any]) -> list[int]:
    """Decoded noisy prefix at every step in units of 2^-DECODE_BITS, from y = A x + z alone."""
    steps = len(inputs)
    if strategy == "tree":
        exact = np.array(matrix("tree", steps), dtype=np.int64) @ np.array(inputs, np.int64)
        return decode([int(y) + z for y, z in zip(exact, noise, strict=True)], steps)
    if strategy == "dense":
        with flint.ctx.workprec(PRECISION):
            return _substitute(_rows(steps), inputs, noise)
    column = _column(strategy, steps)
    with flint.ctx.workprec(PRECISION):
        nodes = [
            sum((column[t - k] * inputs[k] for k in range(t + 1)), flint.arb(0)) + noise[t]
            for t in range(steps)
        ]
        return _solve(column, nodes)


@functools.cache
def _rows(triggers: int) -> list[list[Any]]:
    """Rows of the encoder of ``dense`` as balls, each entry multiplied out by itself."""
    theta, out, into, gain = (part.tolist() for part in DenseStrategy(triggers).generators)
    with flint.ctx.workprec(PRECISION):
        rows = []
        for t in range(triggers):
            row = []
            for j in range(t):
                entry = flint.arb(0)
                for k in range(len(out[t])):
                    term = flint.arb(out[t][k]) * into[j][k]
                    for m in range(j + 1, t):
                        term *= theta[m][k]
                    entry += term
                row.append(entry)
            rows.append([*row, 1 / flint.arb(gain[t])])
        return rows


def _substitute(rows: list[list[Any]], inputs: list[int], noise: list[Any]) -> list[int]:
    """Running sums of A^-1 (A x + z), rounded as in ``_solve``."""
    estimates: list[Any] = []
    out, up = [], flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
    for t, row in enumerate(rows):
        node = sum((a * x for a, x in zip(row, inputs, strict=False)), flint.arb(0)) + noise[t]
        known = sum((a * e for a, e in zip(row, estimates, strict=False)), flint.arb(0))
        estimates.append((node - known) / row[t])
        total = sum(estimates, flint.arb(0))
        out.append(int((total * (1 << DECODE_BITS) + up).floor().unique_fmpz()))
    return out


def _solve(column: list[Any], nodes: list[Any]) -> list[int]:
    """Running sums of A^-1 y, rounded to the lattice just above its halves."""
    estimates: list[Any] = []
    total, out = flint.arb(0), []
    up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
    for t, node in enumerate(nodes):
        known = sum((column[t - k] * estimates[k] for k in range(t)), flint.arb(0))
        estimates.append((node - known) / column[0])
        total += estimates[-1]
        out.append(int((total * (1 << DECODE_BITS) + up).floor().unique_fmpz()))
    return out


def decode(nodes: list[int], steps: int) -> list[int]:
    """Bottom-up Honaker on noisy nodes in order of completion; no float, no noise apart."""
    blocks: dict[int, int] = {}
    out, node = [], 0
    for leaf in range(1, steps + 1):
        level, total = 0, nodes[node]
        node += 1
        while leaf >> level & 1 == 0:
            total += blocks.pop(level)
            level += 1
            total += nodes[node] << level
            node += 1
        blocks[level] = total
        parts = []
        for height, block in blocks.items():
            divisor = (2 << height) - 1
            parts.append((2 * (block << DECODE_BITS) + divisor) // (2 * divisor))
        out.append(sum(parts))
    return out
