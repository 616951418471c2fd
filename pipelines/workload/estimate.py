"""Answers of a workload from released estimates, with their exact standard errors.

**Estimates of the cells** are x + s L z: exact counts, L the mix, z independent components of sd 1,
s public.  So the answers W x + s W L z have covariance s^2 W L L^T W^T, computed from the L that
made the noise.  The rounding of cells to 2^-16 of the grid adds less than the last digit of that.

**Residual tables** are without a histogram of all cells.  For each measured set R of attributes the
release holds M x_R + s_R L z, M and L the products of the attributes' bases
(`accounting.strategies.cells.bases`): the residual table of R in other numbers.  The table of T is
the sum of the residual tables of its subsets, each spread by g over the attributes that it lacks.
So all tables agree with each other exactly, and the variance of a query w is

    sum over R below T of s_R^2 prod_(i in R) rest_i prod_(i in T \\ R) (w_i g_i)^2.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.bases import Basis, restored
from dpstream.accounting.workloads.workload import Product, Workload, applied
from dpstream.pipelines.workload.planning import HALF_WIDTH

# Non-negative estimates of the cells: least squares, in the noise's own metric, not clipping.
#
# Minimise (x - y)^T S^-1 (x - y) over x >= 0, y the estimates and S their covariance: the
# likeliest cells among those that can be counts.  It is post-processing.  Clipping would leave
# what it adds to empty cells in every sum of many; here the others give way.

#: How far the result may be from stationary, beside the largest slope at the start.
TOLERANCE = 1e-6


@one_thread()
def nonnegative(cells: Float64, mix: Sequence[Float64]) -> Float64:
    """Return (n,) the non-negative cells nearest to estimates whose noise has this mix.

    Args:
        cells: (n,) estimates.
        mix: L, or its Kronecker factors.

    Raises:
        RunError: the search has not come to its end.
    """
    if not (cells < 0).any():
        return cells
    inverses = [scipy.linalg.inv(factor) for factor in mix]
    shape = [len(factor) for factor in mix]

    def times(x: Float64, transposed: bool) -> Float64:
        tensor = x.reshape(shape)
        for axis, inverse in enumerate(inverses):
            matrix = inverse.T if transposed else inverse
            tensor = np.moveaxis(np.tensordot(matrix, tensor, (1, axis)), 0, axis)
        return np.asarray(tensor.ravel())

    def value(x: Float64) -> tuple[float, Float64]:
        rest = times(x - cells, False)
        return float(rest @ rest), 2 * times(rest, True)

    start = np.maximum(cells, 0.0)
    steepest = float(np.abs(value(start)[1]).max()) or 1.0
    solution = minimize(
        value,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * len(cells),
        options={
            "maxiter": 10_000,
            "maxfun": 20_000,
            "maxcor": 30,
            "ftol": 0.0,
            "gtol": TOLERANCE * steepest / 4,
        },
    )
    x = np.maximum(solution.x, 0.0)
    if slope(x, value(x)[1]) > TOLERANCE * steepest:
        raise RunError("--nonnegative", "did not come to an end", "leave it out")
    return np.asarray(x)


def slope(x: Float64, gradient: Float64) -> float:
    """Return the largest slope along which x >= 0 could still be improved; 0 at the optimum."""
    return float(np.abs(np.where(x > 0, gradient, np.minimum(gradient, 0.0))).max())


#: Numbers of the working arrays; of a covariance that is handed out.
_AT_ONCE, MAX_COVARIANCE = 1 << 24, 1 << 24


class Answers(NamedTuple):
    """(queries,) linear answers, their standard errors, and the values to show."""

    estimates: Float64
    sd: Float64
    displayed: Float64


class Estimate(NamedTuple):
    """Released estimates of the cells of a domain.

    Attributes:
        cells: (releases, n) in units of what was aggregated.
        scale: (releases,) s, sd of a component.
        mix: L, or a factor of it for each attribute.
        half_width: of a 95% interval, in sds.
        summed: numbers of the attributes of which only totals were measured.
    """

    cells: Float64
    scale: Float64
    mix: tuple[Float64, ...]
    half_width: float = HALF_WIDTH
    summed: tuple[int, ...] = ()

    def check(self, workload: Workload) -> None:
        """Refuse a workload that the estimate cannot answer.

        Raises:
            UsageError: a query of an attribute of which only totals were measured.
        """
        if any(axis in self.summed for product in workload.products for axis in product.axes):
            raise UsageError(
                "queries",
                "asks an attribute of which only totals were measured",
                "sum it out, or release another estimate",
            )

    def answers(self, workload: Workload, consistent: bool = False) -> Iterator[Answers]:
        """Yield the answers of each release.

        Args:
            consistent: use the nearest cell values that are not negative.
        """
        self.check(workload)
        norm = norms(workload, self.mix)
        for cells, scale in zip(self.cells, self.scale.tolist(), strict=True):
            estimates = values(workload, cells)
            published = estimates
            if consistent:
                if self.summed:
                    raise UsageError("--nonnegative", "needs estimates of all cells", "omit it")
                published = values(workload, nonnegative(cells, self.mix))
            yield Answers(estimates, norm * scale, published)

    def covariance(self, workload: Workload) -> Float64:
        """Return (queries, queries) covariance of the first release's answers."""
        self.check(workload)
        return covariance(workload, self.mix) * float(self.scale[0]) ** 2


def values(workload: Workload, cells: Float64) -> Float64:
    """Return (queries,) answers, product by product; axes that shrink are summed first."""
    parts = []
    for product in workload.products:
        answers, factors = cells.reshape(workload.sizes), workload.factors_of(product)
        for axis in sorted(range(len(factors)), key=lambda k: factors[k].rows / factors[k].size):
            answers = factors[axis].apply(answers, axis)
        parts.append(answers.ravel())
    return np.concatenate(parts)


@one_thread()
def norms(workload: Workload, mix: Sequence[Float64]) -> Float64:
    """Return (queries,) norm of each row of W L: its standard error for components of sd 1."""
    if len(mix) == len(workload.sizes):
        covariances = [factor @ factor.T for factor in mix]
        variances: dict[tuple[int, int], Float64] = {}
        squares = [_by_axes(workload, p, covariances, variances) for p in workload.products]
    else:
        [matrix] = mix
        squares = [_by_columns(workload, product, matrix) for product in workload.products]
    return np.sqrt(np.concatenate(squares))


def _by_axes(
    workload: Workload,
    product: Product,
    covariances: Sequence[Float64],
    variances: dict[tuple[int, int], Float64],
) -> Float64:
    """Return variances for a Kronecker product of mixes: the product of each axis's variances."""
    axis_variances = []
    for axis, factor in enumerate(workload.factors_of(product)):
        name = (axis, -1 if factor.kind == "total" else id(factor))
        if name not in variances:
            variances[name] = factor.variances(covariances[axis])
        axis_variances.append(variances[name])
    return kron(axis_variances)


def _by_columns(workload: Workload, product: Product, mix: Float64) -> Float64:
    """Return variances for one matrix: add up squares of W on some of its columns at a time."""
    factors = workload.factors_of(product)
    rows = math.prod(factor.rows for factor in factors)
    step = max(1, _AT_ONCE // max(rows, len(mix)))
    total = np.zeros(rows)
    for begin in range(0, mix.shape[1], step):
        part = mix[:, begin : begin + step].reshape(*workload.sizes, -1)
        part = applied(factors, part).reshape(rows, -1)
        total += np.einsum("qj,qj->q", part, part)
    return total


@one_thread()
def covariance(workload: Workload, mix: Sequence[Float64]) -> Float64:
    """Return (queries, queries) covariance of the answers for components of sd 1.

    Raises:
        UsageError: too many queries for a matrix.
    """
    size = workload.cells
    if max(workload.queries, size) * workload.queries > MAX_COVARIANCE:
        raise UsageError(
            "--covariance",
            f"is for queries x queries (or cells) of at most {MAX_COVARIANCE} numbers",
            "ask fewer queries at once",
        )
    # W on the unit vectors of the cells: all columns at once.
    matrix = np.concatenate(
        [kron([f.dense() for f in workload.factors_of(product)]) for product in workload.products]
    )
    if len(mix) == 1:
        mixed = matrix @ mix[0]
    else:
        mixed = matrix.reshape(-1, *workload.sizes)
        for axis, factor in enumerate(mix):
            mixed = np.moveaxis(np.tensordot(mixed, factor, (axis + 1, 0)), -1, axis + 1)
        mixed = mixed.reshape(len(matrix), -1)
    return np.asarray(mixed @ mixed.T)


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

    def answers(self, workload: Workload, consistent: bool = False) -> Iterator[Answers]:
        """Yield the answers of the release.

        Raises:
            UsageError: an attribute set that was not measured, or non-negative cells.
        """
        if consistent:
            raise UsageError("--nonnegative", "needs estimates of all cells", "omit it")
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
        """Raise an error: it is not available for tables.

        Raises:
            UsageError: always.
        """
        raise UsageError("--covariance", "needs estimates of all cells", "omit it")

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
                    raise UsageError(
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
