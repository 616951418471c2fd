"""Encoders and decoders of the strategies, from their definitions alone.

Integers stay integers; the real encoders and all quotients are balls of 400 bits, so
that every rounding is decided.
"""

import functools
from fractions import Fraction
from typing import Any, NamedTuple

import flint
import numpy as np

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import BltStrategy, Strategy, make_strategy

PRECISION = 400


class Encoding(NamedTuple):
    """What an encoder is defined by: name, T, and the parameters that its run has committed."""

    name: str
    triggers: int
    parameters: tuple[float, ...]

    @classmethod
    def of(cls, strategy: Strategy) -> "Encoding":
        """That of a strategy."""
        return cls(strategy.name, strategy.triggers, tuple(strategy.parameters.tolist()))


@functools.cache
def matrix(encoding: Encoding) -> list[list[Fraction]]:
    """A, dense, its nodes in the order in which they complete."""
    triggers = encoding.triggers
    if encoding.name == "tree":
        rows = []
        for leaf in range(1, triggers + 1):
            for level in range((leaf & -leaf).bit_length()):
                begin = leaf - (1 << level)
                rows.append([Fraction(begin < t <= leaf) for t in range(1, triggers + 1)])
        return rows
    # The real matrix is these floats within 1e-13: exact rationals of them.
    floats = make_strategy(encoding.name, triggers, np.array(encoding.parameters)).matrix()
    return [[Fraction(float(v)) for v in row] for row in floats]


@functools.cache
def _column(encoding: Encoding) -> list[Any]:
    """First column of a convolution's encoder as balls."""
    triggers = encoding.triggers
    blt = BltStrategy(triggers, np.array(encoding.parameters))
    with flint.ctx.workprec(PRECISION):
        terms = [(flint.arb(o), flint.arb(t)) for o, t in zip(blt.omega, blt.theta, strict=True)]
        tail = [sum((o * t**k for o, t in terms), flint.arb(0)) for k in range(triggers - 1)]
        return [flint.arb(1), *tail]


def prefixes(encoding: Encoding, inputs: list[int], noise: list[Any]) -> list[int]:
    """Decoded noisy prefix at every step in units of 2^-DECODE_BITS, from y = A x + z alone."""
    steps = len(inputs)
    if encoding.name == "tree":
        exact = np.array(matrix(encoding), dtype=np.int64) @ np.array(inputs, np.int64)
        return decode([int(y) + z for y, z in zip(exact, noise, strict=True)], steps)
    if encoding.name == "dense":
        with flint.ctx.workprec(PRECISION):
            return _substitute(_rows(encoding), inputs, noise)
    column = _column(encoding)
    with flint.ctx.workprec(PRECISION):
        nodes = [
            sum((column[t - k] * inputs[k] for k in range(t + 1)), flint.arb(0)) + noise[t]
            for t in range(steps)
        ]
        return _solve(column, nodes)


@functools.cache
def _rows(encoding: Encoding) -> list[list[Any]]:
    """Rows of the encoder of ``dense`` as balls, each entry multiplied out by itself."""
    triggers = encoding.triggers
    table = np.array(encoding.parameters).reshape(triggers, -1)
    theta, out, into = (part.tolist() for part in np.split(table[:, :-1], 3, axis=1))
    gain = table[:, -1].tolist()
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
        partial_sum = sum((a * e for a, e in zip(row, estimates, strict=False)), flint.arb(0))
        estimates.append((node - partial_sum) / row[t])
        total = sum(estimates, flint.arb(0))
        out.append(int((total * (1 << DECODE_BITS) + up).floor().unique_fmpz()))
    return out


def _solve(column: list[Any], nodes: list[Any]) -> list[int]:
    """Running sums of A^-1 y, rounded to the lattice just above its halves."""
    estimates: list[Any] = []
    total, out = flint.arb(0), []
    up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
    for t, node in enumerate(nodes):
        partial_sum = sum((column[t - k] * estimates[k] for k in range(t)), flint.arb(0))
        estimates.append((node - partial_sum) / column[0])
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
