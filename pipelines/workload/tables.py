"""Answers from residual tables, without a histogram of all cells.

For each measured set R of attributes the release holds M x_R + s_R L z, M and L the products of the
attributes' bases (`accounting.strategies.cells.bases`): the residual table of R in other numbers.
The table of T is the sum of the residual tables of its subsets, each spread by g over the
attributes that it lacks.  So all tables agree with each other exactly, and the variance of a query
w is

    sum over R below T of s_R^2 prod_(i in R) rest_i prod_(i in T \\ R) (w_i g_i)^2.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.bases import Basis, restored
from dpstream.accounting.workloads.workload import Product, Workload
from dpstream.pipelines.workload.estimate import Answers
from dpstream.pipelines.workload.ways import HALF_WIDTH


class TableEstimate(NamedTuple):
    """Released residual tables.

    Attributes:
        bases: one for each attribute.
        keys: sets of attributes that were measured; sds: s_R of each.
        measured: (n - 1 on each axis of R) noisy M x_R of each set.
    """

    bases: tuple[Basis, ...]
    keys: tuple[tuple[int, ...], ...]
    sds: Float64
    measured: tuple[Float64, ...]
    half_width: float = HALF_WIDTH

    @property
    def sizes(self) -> tuple[int, ...]:
        """Cells of each attribute."""
        return tuple(basis.size for basis in self.bases)

    @property
    def releases(self) -> int:
        """The number of releases."""
        return 1

    def answers(self, workload: Workload, consistent: bool = False) -> Iterator[Answers]:
        """Yield the answers of the release.

        Raises:
            PolicyError: an attribute set that was not measured, or non-negative cells.
        """
        if consistent:
            raise PolicyError("--nonnegative", "needs estimates of all cells", "omit it")
        place = {key: number for number, key in enumerate(self.keys)}
        values, variances = [], []
        for product in workload.products:
            table, variance = self._product(product, place)
            for axis, factor in enumerate(product.factors):
                table = factor.apply(table, axis)
            values.append(table.ravel())
            variances.append(variance)
        estimates = np.concatenate(values)
        yield Answers(estimates, np.sqrt(np.concatenate(variances)), estimates)

    def covariance(self, workload: Workload) -> Float64:
        """Not available for tables.

        Raises:
            PolicyError: always.
        """
        raise PolicyError("--covariance", "needs estimates of all cells", "omit it")

    def _product(
        self, product: Product, place: dict[tuple[int, ...], int]
    ) -> tuple[Float64, Float64]:
        """Return the table of a product's attributes, and the variances of its queries."""
        axes, bases = product.axes, [self.bases[axis] for axis in product.axes]
        table = np.zeros([basis.size for basis in bases])
        variance = np.zeros(product.rows)
        sides = [
            (basis.along(factor), basis.rest(factor))
            for basis, factor in zip(bases, product.factors, strict=True)
        ]
        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(range(len(axes)), count):
                key = tuple(axes[k] for k in chosen)
                if any(bases[k].size == 1 for k in chosen):
                    continue  # no differences: nothing beyond the smaller table
                if key not in place:
                    raise PolicyError(
                        "queries",
                        "asks a table of attributes that was not measured",
                        "ask tables of the attributes that were asked together",
                    )
                part = restored(self.measured[place[key]], [bases[k] for k in chosen])
                missing = tuple(k for k in range(len(axes)) if k not in chosen)
                part = np.expand_dims(part, missing)
                for k in missing:
                    shape = [-1 if k == other else 1 for other in range(len(axes))]
                    part = part * bases[k].spread.reshape(shape)
                table += part
                each = [side[k in chosen] for k, side in enumerate(sides)]
                variance += float(self.sds[place[key]]) ** 2 * kron(each)
        return table, variance
