"""Noise of residual tables: M x + s L z, rounded once and exactly.

Noise is drawn as for mixed cells (`noise.mixing`): components with names of their own, one step,
mixed by L (`accounting.strategies.cells.bases`).  2^b M x are whole numbers, b the bits of the
table's bases, and the noise is rounded to the finer of 2^-MIXED_BITS and 2^-b.  So the published
sum is M x + s L z rounded, and tells nothing else of x.  A table is named by its set of attributes,
so that no two tables of a run share a draw, and the same run draws the same noise for the same
counts again.
"""

import math
from collections.abc import Sequence

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.strategies.cells.bases import Basis, cost2, reduced, table_bits
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.mixing import Components, mixed
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import KeyRing

#: Sd of the largest noise in whole units: 16 of them, and the counts, stay below 2^63.
_MOST = 2.0**57
#: One step of a strategy with real nodes: no time here.
_ONCE = encoder_of("dense", 1)


def spent2(bases: Sequence[Sequence[Basis]], sds: Float64, contributions: int) -> float:
    """Return mu^2 of publishing residual tables together, rounded up.

    One of C records moves each table's L^-1 M x by a column, squared norm at most ``cost2``; C of
    them by at most C times that norm (the triangle inequality).  Tables have independent noise, so
    their squares add up.

    Args:
        bases: of each axis of each table.
        sds: (tables,) s of each.
    """
    nodes = [sd / float(_ONCE.sd_factors[0]) for sd in sds.tolist()]
    col2 = _ONCE.strategy.col2
    costs = [cost2(axes) * col2 / node**2 for axes, node in zip(bases, nodes, strict=True)]
    return contributions**2 * math.fsum(costs) * (1 + 1e-12)


def check_range(bases: Sequence[Sequence[Basis]], sds: Float64) -> None:
    """Refuse noise that exceeds the range of 64-bit numbers of units.

    Args:
        bases: of each axis of each table.
        sds: (tables,) s of each.

    Raises:
        PolicyError: it does.
    """
    for axes, sd in zip(bases, sds.tolist(), strict=True):
        rows = [float(np.linalg.norm(basis.root, axis=1).max(initial=0.0)) for basis in axes]
        unit = max(MIXED_BITS, table_bits(axes))
        if not sd * math.prod(rows) * 2.0**unit <= _MOST:
            raise PolicyError(
                "budget.epsilon", "needs more noise than can be drawn", "use a larger epsilon"
            )


def published(
    tables: Sequence[Int64],
    axes: Sequence[Sequence[int]],
    bases: Sequence[Sequence[Basis]],
    sds: Sequence[float],
    ring: KeyRing,
    run_name: tuple[bytes, ...],
) -> list[Float64]:
    """Return (n - 1 on each axis) noisy M x of each table of counts.

    Args:
        tables: exact counts: PRIVATE; axes: numbers of the attributes of each, which name its
            noise; bases: of each axis.
        sds: s of each table.
        run_name: run id, committed before, and digest of the plan.
    """
    digest = InputDigest(ring)
    for table, numbers in zip(tables, axes, strict=True):
        digest.add(_label(numbers), numbered(table.size), table.reshape(-1))
    name = (*run_name, digest.value)
    each = zip(tables, axes, bases, sds, strict=True)
    return [
        _published(table, _label(numbers), of_axes, sd, ring, name)
        for table, numbers, of_axes, sd in each
    ]


def _label(axes: Sequence[int]) -> str:
    return "residual " + ",".join(map(str, axes))


def _published(
    table: Int64,
    name: str,
    bases: Sequence[Basis],
    sd: float,
    ring: KeyRing,
    run_name: tuple[bytes, ...],
) -> Float64:
    exact, bits = reduced(table, bases), table_bits(bases)
    node = sd / float(_ONCE.sd_factors[0])
    noise = StreamNoise(name, _ONCE, _ONCE.strategy.col2, 1.0, 1.0, node)
    sampler = ContinuousGaussian(node)
    stream = NoiseStream(ring, run_name, (0, 0), "value", noise, sampler)
    factors = [basis.root for basis in bases] or [np.ones((1, 1))]
    # Units of 2^-bits where those are the finer ones: what is mixed is rounded to 2^-MIXED_BITS.
    finer = max(0, bits - MIXED_BITS)
    factors[0] = factors[0] * 2.0**finer
    mixing = Mixing(factors, certified=1.0)
    components = Components(stream, mixing.size)
    components.advance(1)
    drawn = mixed(components, mixing).reshape(exact.shape)
    # Added as integers: what floats then lose of the sum is post-processing.
    unit = MIXED_BITS + finer
    return ((exact << (unit - bits)) + drawn) / 2.0**unit
