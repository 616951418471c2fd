"""Strategies that are known beforehand: every cell, and the rows of a binary tree on an axis."""

import math

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Gram, Spread
from dpstream.accounting.workloads.factors import Factor
from dpstream.accounting.workloads.workload import Product, Workload


class Identity(Gram):
    """X = I over any domain."""

    @property
    @override
    def sensitivity2(self) -> float:
        return 1.0

    @override
    def trace(self, workload: Workload) -> float:
        return math.fsum(
            product.weight
            * _summed(workload, product)
            * math.prod(sum(f.masses) for f in product.factors)
            for product in workload.products
        )

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        variances = []
        for product in workload.products:
            norms = np.ones(1)
            for factor in workload.factors_of(product):
                norms = np.kron(norms, sum(factor.parts))
            variances.append(norms)
        return variances

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        of_factor: dict[Factor, Spread] = {}
        for factor in {f for product in workload.products for f in product.factors}:
            each = np.add(*factor.parts)
            of_factor[factor] = Spread(float(each.mean()), float(each.min()), float(each.max()))
        spreads = []
        for product in workload.products:
            sides = [of_factor[factor] for factor in product.factors]
            summed = _summed(workload, product)
            spreads.append(
                Spread(
                    *(
                        summed * math.prod(side)
                        for side in zip((1.0, 1.0, 1.0), *sides, strict=True)
                    )
                )
            )
        return spreads


def _summed(workload: Workload, product: Product) -> float:
    """Cells of the attributes that a product sums out."""
    return float(workload.cells // math.prod(workload.sizes[axis] for axis in product.axes))


def identity(workload: Workload) -> CellStrategy:
    """Every cell."""
    return CellStrategy("identity", Identity())


def _nodes(size: int) -> list[tuple[int, int]]:
    """(first, end) of each node of a balanced binary tree, parents first."""
    nodes = [(0, size)]
    for lo, hi in nodes:
        if hi - lo > 1:
            nodes += [(lo, (lo + hi + 1) // 2), ((lo + hi + 1) // 2, hi)]
    return nodes


def wavelet(size: int) -> Float64:
    """(n, n) Haar's rows: the total, and each node's left less its right half."""
    rows = [np.ones(size)]
    for lo, hi in _nodes(size):
        if hi - lo > 1:
            row = np.zeros(size)
            row[lo : (lo + hi + 1) // 2], row[(lo + hi + 1) // 2 : hi] = 1.0, -1.0
            rows.append(row)
    return np.array(rows)


def tree(size: int) -> Float64:
    """(2n - 1, n) sums of the nodes."""
    rows = np.zeros((2 * size - 1, size))
    for row, (lo, hi) in zip(rows, _nodes(size), strict=True):
        row[lo:hi] = 1.0
    return rows
