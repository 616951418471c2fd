"""Noise of residual tables: Sub x + s L z, rounded once and exactly to 2^-MIXED_BITS.

The machinery is that of mixed cells (`noise.mixing`): components of their own names, one step,
mixed by L (`accounting.strategies.cells.differences`).  A table's name is its set of attributes, so
no two tables of a run share a draw, and the same run draws the same of the same counts again.
"""

import math
from collections.abc import Sequence

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget import StreamNoise, encoder_of
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.strategies.cells.differences import cost2, differences, root
from dpstream.dp_transforms.noise.components import Components
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.mixing import mixed
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import KeyRing

#: One step of a strategy with real nodes: no time here.
_ONCE = encoder_of("dense", 1)


def spent2(sizes: Sequence[Sequence[int]], sds: Float64, contributions: int) -> float:
    """mu^2 of publishing residual tables together, rounded up.

    One of C records moves each table's L^-1 Sub x by a column, squared norm at most ``cost2``; C of
    them by at most C times that norm (the triangle inequality).  Tables have independent noise, so
    their squares add up.

    Args:
        sizes: cells of each axis of each table.
        sds: (tables,) sd of a cell's noise before differences.
    """
    nodes = [sd / float(_ONCE.sd_factors[0]) for sd in sds.tolist()]
    col2 = _ONCE.strategy.col2
    found = [cost2(shape) * col2 / node**2 for shape, node in zip(sizes, nodes, strict=True)]
    return contributions**2 * math.fsum(found) * (1 + 1e-12)


def published(
    tables: Sequence[Int64],
    axes: Sequence[Sequence[int]],
    sds: Sequence[float],
    keys: KeyRing,
    run_name: tuple[bytes, ...],
) -> list[Float64]:
    """(n - 1 on each axis) noisy differences of each table of counts.

    Args:
        tables: exact counts: PRIVATE; axes: numbers of the attributes of each, which name its
            noise.
        sds: of a cell's noise before differences, of each table.
        run_name: run id, committed before, and digest of the plan.
    """
    digest = InputDigest(keys)
    for table, numbers in zip(tables, axes, strict=True):
        digest.add(_label(numbers), numbered(table.size), table.reshape(-1))
    name = (*run_name, digest.value)
    each = zip(tables, axes, sds, strict=True)
    return [_published(table, _label(numbers), sd, keys, name) for table, numbers, sd in each]


def _label(axes: Sequence[int]) -> str:
    return "residual " + ",".join(map(str, axes))


def _published(
    table: Int64, name: str, sd: float, keys: KeyRing, run_name: tuple[bytes, ...]
) -> Float64:
    exact = differences(table)
    node = sd / float(_ONCE.sd_factors[0])
    noise = StreamNoise(name, _ONCE, _ONCE.strategy.col2, 1.0, 1.0, node)
    sampler = ContinuousGaussian(node)
    stream = NoiseStream(keys, run_name, (0, 0), "value", noise, sampler)
    mixing = Mixing([root(size) for size in table.shape] or [np.ones((1, 1))], certified=1.0)
    components = Components(stream, mixing.size)
    components.advance(1)
    drawn = mixed(components, mixing).reshape(exact.shape)
    # Added as integers: what floats then lose of the sum is post-processing.
    return (exact * (1 << MIXED_BITS) + drawn) / 2.0**MIXED_BITS
