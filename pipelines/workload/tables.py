"""Answers from residual tables, without a histogram of all cells.

For each measured set R of attributes the differences Sub x_R + s_R L z are there.  Sub^+ takes them
to the residual table of R (zero sums along each axis) with noise of covariance s_R^2 P, P the
product of I - J/n over R.  The table of T is the sum of the residual tables of its subsets, each
spread evenly over the attributes it lacks; so all tables agree with each other exactly, and the
variance of a query w is

    sum over R below T of s_R^2 prod_(i in R) |w_i - mean|^2 prod_(i in T \\ R) (sum w_i / n_i)^2.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.differences import restored
from dpstream.accounting.workloads.workload import Product, Workload
from dpstream.pipelines.workload.estimate import Answers
from dpstream.pipelines.workload.ways import HALF_WIDTH


class TableEstimate(NamedTuple):
    """Released differences of residual tables.

    Attributes:
        sizes: cells of each attribute.
        keys: sets of attributes that were measured; sds: s_R of each.
        found: (n - 1 on each axis of R) noisy differences of each.
    """

    sizes: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    sds: Float64
    found: tuple[Float64, ...]
    half_width: float = HALF_WIDTH

    @property
    def releases(self) -> int:
        """How many there are."""
        return 1

    def answers(self, workload: Workload, consistent: bool = False) -> Iterator[Answers]:
        """Answers of the release.

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
        found = np.concatenate(values)
        yield Answers(found, np.sqrt(np.concatenate(variances)), found)

    def covariance(self, workload: Workload) -> Float64:
        """Not kept for tables.

        Raises:
            PolicyError: always.
        """
        raise PolicyError("--covariance", "needs estimates of all cells", "omit it")

    def _product(
        self, product: Product, place: dict[tuple[int, ...], int]
    ) -> tuple[Float64, Float64]:
        """The table of a product's attributes, and the variances of its queries."""
        axes = product.axes
        table = np.zeros([self.sizes[axis] for axis in axes])
        variance = np.zeros(product.rows)
        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(range(len(axes)), count):
                key = tuple(axes[k] for k in chosen)
                if any(self.sizes[axis] == 1 for axis in key):
                    continue  # no differences: nothing beyond the smaller table
                if key not in place:
                    raise PolicyError(
                        "queries", "asks a table of attributes that was not measured",
                        "ask tables of the attributes that were asked together",
                    )  # fmt: skip
                left = [k for k in range(len(axes)) if k not in chosen]
                spread = math.prod(self.sizes[axes[k]] for k in left)
                part = restored(self.found[place[key]]) / spread
                table += np.expand_dims(part, tuple(left))
                each = [
                    f.parts[1] if k in chosen else f.parts[0] / f.size
                    for k, f in enumerate(product.factors)
                ]
                variance += float(self.sds[place[key]]) ** 2 * kron(each)
        return table, variance
