"""Eigenvectors of tables of counts: products of cosines, one for each axis.

V is a number on each residual space (``residual``), so that any basis of a space is one of
eigenvectors.  Which one matters where only some of them are weighed together: a vector of a
decomposition may lie on few cells, and what is left of the others' columns is lost.  Cosines,
v_k[j] ~ cos(pi k (j + 1/2) / n), lie on all: the squares of v_k and v_(n-k) add up to a constant,
and these two stand side by side.  Those of even k are even, those of odd k odd (``folding``).
"""

import itertools
import math

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.folding import Folding
from dpstream.accounting.strategies.cells.residual import spaces_of
from dpstream.accounting.workloads.workload import Workload


def of_tables(workload: Workload, folding: Folding) -> tuple[list[Float64], list[Float64]]:
    """For each block its eigenvalues, (vectors,), and its eigenvectors, (its cells, vectors), of
    the eigenvalues above 0.

    Args:
        workload: of tables of counts; every axis of ``folding`` is folded.
    """
    spaces = spaces_of(workload)
    weights = workload.weights
    traces = spaces.traces(weights) * float(workload.cells)
    mean_traces = {
        key: trace / dim
        for key, trace, dim in zip(spaces.keys, traces, spaces.dims, strict=True)
        if trace > 0 and dim > 0
    }
    values, vectors = [], []
    for parity in folding.parities:
        axes = [_axis(n, odd) for n, odd in zip(folding.sizes, parity, strict=True)]
        inside = [[bool(k) for k in numbers] for numbers, _ in axes]
        each = [
            mean_traces.get(tuple(axis for axis, named in enumerate(chosen) if named), 0.0)
            for chosen in itertools.product(*inside)
        ]
        positive = np.array(each) > 0
        values.append(np.array(each)[positive])
        vectors.append(kron([block for _, block in axes])[:, positive])
    return values, vectors


def _axis(size: int, odd: int) -> tuple[list[int], Float64]:
    """The numbers k of one parity, mirrors side by side, and their vectors on half the axis."""
    numbers = sorted(range(odd, size, 2), key=lambda k: (min(k, size - k), k))
    if size == 1:
        return numbers, np.ones((1, 1))
    low = size // 2
    cells = np.arange(low if odd else size - low)
    cosines = np.cos(np.pi / size * np.outer(cells + 0.5, numbers))
    cosines *= np.where(np.array(numbers) > 0, math.sqrt(2 / size), math.sqrt(1 / size))
    # A cell and its mirror are one coordinate, (e_c +- e_c') / sqrt 2; a middle cell stays.
    cosines[cells < low] *= math.sqrt(2)
    return numbers, np.asarray(cosines)
