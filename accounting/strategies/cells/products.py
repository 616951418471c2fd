"""Strategies that are products of one strategy for each axis.

For one product of queries tr(V X^-1), the unit diagonal and the dual all factor: the product of
the axes' optima is the optimum over all cells, its floor the product of the floors.  For a union
of products too large for one matrix the axes take turns: with the others fixed, one axis' error is
that of a union over that axis alone, which ``optimum`` solves.  What is left there is that the
best strategy need not be a product; the floor, the sum of what each product would cost alone, then
says little.

**The optimum of an axis of very many cells**, for all ranges or prefixes, by tridiagonal matrices.
The Gram matrix V of all prefixes is T^T T, T the lower triangle of ones; that of all ranges has
V_ij = (i + 1) (n - j), i <= j.  Both have tridiagonal inverses, and so has D^1/2 V D^1/2 of
``optimum``, D = diag(m): its eigenvectors take n^2 steps in the place of n^3.  The error of the
strategy with its diagonal scaled to ones needs V of each eigenvector, which is a sum of squares of
running sums, and so are the variances of other intervals under this strategy (`Blocks.spread_of`).
So only the strategy itself, at the end, is a product of matrices.

**Pure epsilon.** The strategy of each axis is the p-identity of HDMM.  With Laplace (or geometric)
noise the sensitivity is the largest L1 norm of a column.  Strategies A = [I; P] diag(1 / (1 +
column sums of P)), P of p non-negative rows, have column norms of exactly 1 and are always
invertible; tr(V (A^T A)^-1) needs the inverse of p x p alone and is minimised by L-BFGS from a few
fixed starts.  It is not convex: there is no floor, and the best found is taken.

Noise that is exact needs whole numbers: ``lattice`` rounds A to multiples of 2^-bits, and the
sensitivity is that of the rounded one, in whole units.  Rounding costs much where cells are hardly
asked one by one (nearly rank one), so that the choice is by the errors of what was rounded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.climb import Point, Slopes, best_of, climb
from dpstream.accounting.strategies.cells.optimum import by_axes, optimum, refined_weights
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Kron,
    Solved,
    Spread,
    dense_gram,
    mirrored,
    tree,
    wavelet,
)
from dpstream.accounting.workloads.attributes import Factor, interval, of_size
from dpstream.accounting.workloads.workload import Workload, workload_of

#: Cells of an attribute above which ranges and prefixes are solved so.
MANY_CELLS = 4096
#: Kinds of factors that are solved so, and cells of the grid that the first weights come from.
INTERVAL_KINDS, _COARSE = ("range", "prefix"), 1024
#: Columns worked on at a time; what an eigenvalue may be off, in units of the largest.
_COLUMNS, _OFF = 512, 64 * 2.0**-52


#: Kinds of factors whose variances are running sums too.
SUMMED = (*INTERVAL_KINDS, "identity", "total", "width")


class _Decomposed(NamedTuple):
    """Eigenvalues, rising, and eigenvectors of the inverse of D^1/2 V D^1/2, D = diag(weights)."""

    weights: Float64
    values: Float64
    vectors: Float64


def is_tridiagonal(factor: Factor) -> bool:
    """Return whether a factor is one that this module solves."""
    return factor.kind in INTERVAL_KINDS and not factor.relative


@one_thread()
def tridiagonal_optimum(
    factor: Factor, tolerance: float = 1e-3, most: int = 6, others: Iterable[Factor] = ()
) -> Solved:
    """Return the optimum of all ranges or prefixes, to a relative gap.

    Args:
        factor: of a kind in INTERVAL_KINDS, its rows not divided by their norms.
        most: largest number of points that are tried.
        others: further factors of the attribute whose spreads are computed too; factors that are
            not running sums are left out.
    """
    decomposed: list[_Decomposed] = []

    def primal(point: Point) -> tuple[float, tuple[Float64, Float64]]:
        error, norms = point.slopes.solution
        return error, (point.weights[0], norms)

    best = best_of(_points(factor, _start(factor), most, decomposed), primal, tolerance)
    weights, norms = best.solution
    if not np.array_equal(decomposed[0].weights, weights):
        decomposed.clear()  # before the next one, as each has n^2 numbers
        decomposed.append(_decomposed(factor, weights))
    _, values, vectors = decomposed.pop()
    scale = (weights * norms) ** 0.5
    summed = [f for f in (factor, *others) if f.kind in SUMMED and not f.relative]
    spreads = _spreads(summed, values, vectors, scale)
    vectors *= (values**-0.25)[None, :]
    vectors *= ((weights * norms) ** -0.5)[:, None]
    matrix = mirrored(scipy.linalg.blas.dsyrk(1.0, np.asfortranarray(vectors), lower=1))
    del vectors
    gram = replace(dense_gram(matrix.T), spread_of=spreads)  # symmetric, its rows are adjacent
    strategy = CellStrategy("optimum", gram)
    return Solved(strategy, best.error, best.floor, best.certificate, best.steps)


@one_thread()
def tridiagonal_floor(factor: Factor) -> float:
    """Return a floor of all ranges or prefixes from eigenvalues alone; see
    `tridiagonal_optimum`.
    """
    diagonal, beside = _inverse(factor, _start(factor))
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, beside, lapack_driver="sterf")
    return _sure(np.maximum(values, 1e-300)) ** 2


def _start(factor: Factor) -> Float64:
    """First weights of the cells, from a coarser attribute."""
    cells = min(factor.size, _COARSE)
    coarse = workload_of([of_size("cell", cells)], [(1.0, {0: interval(factor.kind, cells)})])
    return refined_weights(optimum(coarse, 1e-5).certificate[0], factor.size)


def _points(
    factor: Factor, start: Float64, most: int, decomposed: list[_Decomposed]
) -> Iterator[Point]:
    """Points of the climb; ``decomposed`` gets what the last one was computed from."""

    def dual(weights: Float64) -> Slopes:
        decomposed.clear()
        decomposed.append(_decomposed(factor, weights))
        [(_, values, vectors)] = decomposed
        roots = values**-0.5
        slopes = np.zeros(len(weights))
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS]
            slopes += (part * part) @ roots[begin : begin + _COLUMNS]
        slopes /= weights
        error = 0.0
        scale = np.sqrt(slopes * weights)[:, None]
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS] * scale
            squares = _squares(factor, part)
            error += float(squares @ values[begin : begin + _COLUMNS] ** 0.5)
        return Slopes(float(roots.sum()), (slopes,), (error, slopes), _sure(values))

    return climb(dual, [start], most)


def _sure(values: Float64) -> float:
    """Sum of the roots of the inverses of computed eigenvalues, less what their error may add."""
    return float(((values + _OFF * values[-1]) ** -0.5).sum())


def _inverse(factor: Factor, weights: Float64) -> tuple[Float64, Float64]:
    """(n,) diagonal of the inverse of D^1/2 V D^1/2, and (n - 1,) numbers beside it."""
    size = len(weights)
    diagonal, beside = np.full(size, 2.0), np.full(size - 1, -1.0)
    if factor.kind == "range":
        diagonal, beside = diagonal / (size + 1), beside / (size + 1)
    else:
        diagonal[0] = 1.0
    scale = weights**-0.5
    return diagonal * scale**2, beside * scale[1:] * scale[:-1]


def _decomposed(factor: Factor, weights: Float64) -> _Decomposed:
    diagonal, beside = _inverse(factor, weights)
    eigenvalues, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside, check_finite=False)
    return _Decomposed(weights, np.maximum(eigenvalues, 1e-300), vectors)


def _squares(factor: Factor, columns: Float64) -> Float64:
    """(k,) h V h of each column."""
    sums = np.cumsum(columns, axis=0)
    squares = np.einsum("ik,ik->k", sums, sums)
    if factor.kind == "prefix":
        return np.asarray(squares)
    return np.asarray((factor.size + 1) * squares - sums.sum(axis=0) ** 2)


def _spreads(
    factors: Sequence[Factor], values: Float64, vectors: Float64, scale: Float64
) -> dict[bytes, Spread]:
    """Variances of the queries of each factor if node noise has sd 1: X^-1 is the sum over the
    eigenvectors of h h^T, h the vector times ``scale`` and the fourth root of its eigenvalue."""
    by_name = {factor.canonical(): factor for factor in factors}
    totals = {name: 0.0 for name, factor in by_name.items() if factor.kind == "range"}
    listed = {name: np.zeros(f.rows) for name, f in by_name.items() if f.kind != "range"}
    for begin in range(0, len(values), _COLUMNS):
        part = vectors[:, begin : begin + _COLUMNS] * scale[:, None]
        part *= values[begin : begin + _COLUMNS] ** 0.25
        for name in totals:
            totals[name] += float(_squares(by_name[name], part).sum())
        for name in listed:
            answers = by_name[name].apply(part)
            listed[name] += np.einsum("qk,qk->q", answers, answers)
    spreads = {
        name: Spread(total / by_name[name].rows, None, None) for name, total in totals.items()
    }
    for name, each in listed.items():
        spreads[name] = Spread(float(each.mean()), float(each.min()), float(each.max()))
    return spreads


#: Rounds of turns: later ones change the error by less than a part in 1e4.
_ROUNDS, _SETTLED = 20, 1e-4
#: Factor below which float errors cannot bring a floor.
_DOWN = 1 - 1e-9


def product_optimum(workload: Workload, tolerance: float = 1e-3) -> Solved:
    """Return the optimum of one product, axis by axis, to a relative gap of the whole."""
    [product] = workload.products
    share = tolerance / max(1, len(product.axes))
    return by_axes("optimum", workload, lambda part: _axis(part, share))


def floor_of(workload: Workload) -> float:
    """Sum over the products of at most what each would cost if it were asked alone."""
    floors: dict[bytes, float] = {}
    total = []
    for product in workload.products:
        value = product.weight
        for axis, factor in zip(product.axes, product.factors, strict=True):
            name = factor.canonical()
            if name not in floors:
                floors[name] = _floor(workload.part(axis, factor))
            value *= floors[name]
        total.append(value)
    return math.fsum(total)


@one_thread()
def alternating(
    workload: Workload, tolerance: float = 1e-3, solved_axes: Mapping[int, Blocks] | None = None
) -> CellStrategy:
    """Return a product strategy for a union of products.

    Args:
        solved_axes: strategies of axes that take no turn.
    """
    axes = range(len(workload.sizes))
    fixed = solved_axes or {}
    grams: list[Blocks] = []
    for axis in axes:
        if axis in fixed:
            grams.append(fixed[axis])
            continue
        solved = _axis(_turn(workload, axis, np.ones(len(workload.products))), tolerance)
        grams.append(instance(solved.strategy.gram, Blocks))
    traces = np.array([_traces(workload, axis, grams[axis]) for axis in axes])
    before = math.inf
    for _ in range(_ROUNDS):
        for axis in (axis for axis in axes if axis not in fixed):
            others = np.delete(traces, axis, axis=0).prod(axis=0)
            solved = _axis(_turn(workload, axis, others), tolerance)
            grams[axis] = instance(solved.strategy.gram, Blocks)
            traces[axis] = _traces(workload, axis, grams[axis])
        error = float(workload.weights @ traces.prod(axis=0))
        if error > before * (1 - _SETTLED):
            break
        before = error
    return CellStrategy("product", Kron(tuple(grams)))


def tridiagonal_product(workload: Workload, tolerance: float = 1e-3) -> CellStrategy | None:
    """Return a product strategy for a union with one attribute of very many cells.

    That attribute has the optimum of its ranges or prefixes, of whichever more are asked (of ranges
    if neither is), and the others take turns.

    Returns:
        ``None`` where several attributes are that long, where it is asked for single cells and
        totals alone, or where the errors of its other queries are not running sums.
    """
    long = [axis for axis, size in enumerate(workload.sizes) if size > MANY_CELLS]
    factors: dict[bytes, Factor] = {}
    shares: dict[bytes, float] = {}
    for product in workload.products:
        for axis, factor in zip(product.axes, product.factors, strict=True):
            if axis in long:
                name = factor.canonical()
                factors[name] = factor
                shares[name] = shares.get(name, 0.0) + product.weight * product.rows
    if (
        len(long) != 1
        or all(factor.marginal for factor in factors.values())
        or any(factor.kind not in SUMMED or factor.relative for factor in factors.values())
    ):
        return None
    size = workload.sizes[long[0]]
    others = [*factors.values(), interval("total", size)]
    solvable = [name for name, factor in factors.items() if is_tridiagonal(factor)]
    most = max(solvable, key=lambda name: shares[name], default=None)
    main = interval("range", size) if most is None else factors[most]
    [gram] = [tridiagonal_optimum(main, tolerance, others=others).strategy.gram]
    return alternating(workload, tolerance, {long[0]: instance(gram, Blocks)})


def _floor(part: Workload) -> float:
    """A floor of one axis' factor, which is asked alone.

    Of very many cells: by eigenvalues of a tridiagonal matrix; else at even weights of the cells,
    (sum of the roots of the eigenvalues of V)^2 / n >= tr(V)^2 / (n norm of V), since a root of
    at most r is at least its square / r; the norm is at most the largest sum of a row of |V|.
    """
    [factor] = part.factors_of(part.products[0])
    if part.cells <= MANY_CELLS or factor.marginal or part.cells > MAX_SOLVED_CELLS:
        return _axis(part, 1e-2).floor
    if is_tridiagonal(factor):
        return tridiagonal_floor(factor)
    gram = factor.gram()
    norm = float(np.abs(gram).sum(axis=0).max())
    return float(np.trace(gram)) ** 2 / (part.cells * norm) * _DOWN


def _axis(part: Workload, tolerance: float) -> Solved:
    """The optimum of one axis' workload, of one matrix."""
    if part.cells > MAX_SOLVED_CELLS:
        raise UsageError(
            "domain",
            f"an attribute of a product has at most {MAX_SOLVED_CELLS} cells",
            "use coarser ones",
        )
    n, even = part.cells, np.full(part.cells, 1 / part.cells)
    [product, *others] = part.products
    if not others and not product.axes:
        total = CellStrategy("optimum", dense_gram(np.ones((n, n))))
        return Solved(total, 1.0, 1.0, (even,), 0)
    if not others and part.marginal:
        cells = CellStrategy("optimum", dense_gram(np.eye(n)))
        return Solved(cells, float(n), float(n), (even,), 0)
    [factor, *_] = product.factors or (None,)
    long = not others and part.cells > MANY_CELLS
    if factor is not None and long and is_tridiagonal(factor):
        return tridiagonal_optimum(factor, tolerance)
    return optimum(part, tolerance)


def _turn(workload: Workload, axis: int, others: Float64) -> Workload:
    """One axis' part of the union, each product weighted by what the other axes make of it."""
    weights: dict[Factor | None, float] = {}
    for product, other in zip(workload.products, others.tolist(), strict=True):
        factor = dict(zip(product.axes, product.factors, strict=True)).get(axis)
        weights[factor] = weights.get(factor, 0.0) + product.weight * other
    largest = max(weights.values())
    return workload_of(
        [workload.attributes[axis]],
        [
            (max(weight / largest, 1e-9), {} if factor is None else {0: factor})
            for factor, weight in weights.items()
        ],
    )


def _traces(workload: Workload, axis: int, gram: Blocks) -> Float64:
    """(products,) error of each product's factor on this axis."""
    by_factor: dict[Factor | None, float] = {}
    traces = []
    for product in workload.products:
        factor = dict(zip(product.axes, product.factors, strict=True)).get(axis)
        if factor not in by_factor:
            by_factor[factor] = gram.sensitivity2 * gram.trace(workload.part(axis, factor))
        traces.append(by_factor[factor])
    return np.array(traces)


#: Cells of an axis for which the p-identity is looked for.
MAX_PURE_CELLS = 1024
_UP = 1 + 2.0**-40
_FIXED: dict[str, Callable[[int], Float64]] = {
    "identity": np.eye,
    "haar": wavelet,
    "hierarchical": tree,
}


class PureStrategy(NamedTuple):
    """A product of one matrix for each axis.

    Attributes:
        name: the kind of the best strategy.
        factors: the (rows, n) matrix of each axis.
    """

    name: str
    factors: tuple[Float64, ...]

    @property
    def sensitivity1(self) -> float:
        """Largest L1 norm of a column, rounded up."""
        return math.prod(float(np.abs(f).sum(0).max()) for f in self.factors) * _UP

    @property
    def gram(self) -> Kron:
        """A^T A."""
        return Kron(tuple(dense_gram(f.T @ f) for f in self.factors))

    def error(self, workload: Workload) -> float:
        """Return the weighted total of variances if a node at sensitivity 1 has noise of variance
        1.
        """
        return self.sensitivity1**2 * self.gram.trace(workload)

    def lattice(self, bits: int = 12) -> "LatticeStrategy":
        """Return the strategy in multiples of 2^-bits on each axis.

        A row of one cell alone is never rounded to nothing: the identity below other rows is what
        keeps every cell measured, however little of it the strategy wants.
        """
        return LatticeStrategy(tuple(_rounded(f, 2**bits) for f in self.factors))


def _rounded(factor: Float64, scale: int) -> Int64:
    rounded = np.rint(factor * scale)
    alone = (np.count_nonzero(factor, axis=1) == 1) & ~rounded.any(axis=1)
    rounded[alone] = np.sign(factor[alone])
    return rounded[rounded.any(axis=1)].astype(np.int64)


class LatticeStrategy(NamedTuple):
    """A strategy of whole numbers: for each axis (rows, n)."""

    factors: tuple[Int64, ...]

    @property
    def sensitivity1(self) -> int:
        """Largest L1 norm of a column, exact."""
        return math.prod(int(np.abs(f).sum(0).max()) for f in self.factors)

    def floats(self) -> PureStrategy:
        """Return the same strategy in floats, for the formulas of error."""
        return PureStrategy("lattice", tuple(f.astype(np.float64) for f in self.factors))


@one_thread()
def pure(workload: Workload, bits: int | None = None) -> PureStrategy:
    """Return the best strategy found for pure epsilon: p-identities, trees, wavelets or the cells.

    Args:
        bits: of the lattice that it will be rounded to, by which the choice is made.

    Raises:
        UsageError: a union over several axes, or an axis beyond the limit.
    """
    if len(workload.products) > 1 and len(workload.sizes) > 1:
        raise UsageError(
            "privacy",
            "pure epsilon answers one product of queries, or one attribute: a union of products, "
            "such as all 2-way tables, has no answer at delta 0",
            "give a delta above 0 (--delta 1e-9, or budget.delta = 1e-9 in the job) without "
            "--mechanism geometric, or ask one product",
        )
    parts = [workload] if len(workload.sizes) == 1 else workload.axes(workload.products[0])
    solved = {key: _best(part, bits) for key, part in {p.structure: p for p in parts}.items()}
    strategies = [solved[part.structure] for part in parts]
    names = {strategy.name for strategy in strategies}
    name = names.pop() if len(names) == 1 else "product"
    return PureStrategy(name, tuple(strategy.factors[0] for strategy in strategies))


def _best(part: Workload, bits: int | None) -> PureStrategy:
    if not any(product.axes for product in part.products):
        return PureStrategy("total", (np.ones((1, part.cells)),))
    if part.cells > MAX_PURE_CELLS:
        raise UsageError(
            "domain",
            f"pure epsilon needs attributes of at most {MAX_PURE_CELLS} cells",
            "merge cells",
        )
    candidates = [PureStrategy(name, (make(part.cells),)) for name, make in _FIXED.items()]
    rows = max(1, part.cells // 16)
    gram = part.gram()
    for start in range(3):
        matrix = p_identity(gram, rows, start)
        candidates.append(PureStrategy("p-identity", (matrix,)))

    def error(strategy: PureStrategy) -> float:
        rounded = strategy if bits is None else strategy.lattice(bits).floats()
        return rounded.error(part)

    return min(candidates, key=error)


def p_identity(gram: Float64, rows: int, start: int = 0) -> Float64:
    """Return (n + rows, n) the p-identity that L-BFGS finds from a fixed start.

    Args:
        gram: (n, n) V.
        rows: p.
        start: number of the starting point.
    """
    from scipy.optimize import minimize  # a plan of Gaussian noise need not wait for it

    size = len(gram)
    first = _scattered(rows * size, start)
    minimum = minimize(
        value_and_gradient,
        first,
        args=(gram, rows),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (rows * size),
        options={"maxiter": 1500, "maxcor": 20},
    )
    extra = minimum.x.reshape(rows, size)
    return np.asarray(np.concatenate([np.eye(size), extra]) / (1 + extra.sum(0)))


def _scattered(count: int, start: int) -> Float64:
    """Numbers in [0, 1) without a pattern, the same everywhere: splitmix64 of 1, 2, ..."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(start << 32)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53)


def value_and_gradient(flat: Float64, gram: Float64, rows: int) -> tuple[float, Float64]:
    """Return tr(S V S N) with S = diag(1 + column sums), N = (I + P^T P)^-1, and its gradient."""
    extra = flat.reshape(rows, -1)
    sums = 1 + extra.sum(0)
    # P N = (I + P P^T)^-1 P.
    short = np.linalg.solve(np.eye(rows) + extra @ extra.T, extra)
    inverse = np.eye(len(gram)) - extra.T @ short
    scaled = sums[:, None] * gram * sums
    moved = scaled - (scaled @ extra.T) @ short
    value = float(np.trace(moved))
    slope = -2 * short @ moved + 2 * ((gram * inverse) @ sums)
    return value, slope.ravel()
