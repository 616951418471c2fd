"""Cell strategies to compare with: none depends on more than the domain.

* gaussian: noise on each query by itself; *workload*: the queries themselves, by least squares;
* haar: on each axis, the total and for each node of a balanced binary tree left minus right;
* hierarchical: on each axis, every node of that tree;
* fourier: the residual spaces that the workload touches, all alike;
* datacube: a few of the workload's tables, so chosen that the worst table's error is small when
  each is added up from the best one (BMAX; here least squares then uses them all).
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.folding import folding_of
from dpstream.accounting.strategies.cells.residual import Residual, spaces_of
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Gram,
    Kron,
    dense_gram,
    identity,
    tree,
    wavelet,
)
from dpstream.accounting.workloads.attributes import Factor
from dpstream.accounting.workloads.workload import Workload

#: Cells times products over which the largest column is searched, and numbers of one attribute.
_MAX_ENUMERATED, _MAX_SEARCHED = 1 << 26, 1 << 30


def itself(workload: Workload) -> CellStrategy:
    """The workload's own queries, each as often as its weight says."""
    if workload.marginal:
        spaces = spaces_of(workload)
        traces = spaces.traces(workload.weights)
        support = np.flatnonzero((traces > 0) & (spaces.dims > 0))
        y = traces[support] / spaces.dims[support]
        gram: Gram = Residual(workload.sizes, tuple(spaces.keys[k] for k in support), y)
    elif len(workload.products) == 1 and max(workload.sizes) <= MAX_SOLVED_CELLS:
        factors = workload.factors_of(workload.products[0])
        gram = Kron(tuple(dense_gram(factor.gram()) for factor in factors))
    else:
        folding = folding_of(workload)
        gram = Blocks(folding, tuple(folding.grams(workload)))
    return CellStrategy("workload", gram)


def gaussian_error(workload: Workload) -> float:
    """Error of noise on each query by itself: the Gaussian mechanism, without least squares.

    Weights are those of the total alone: each query is asked once.

    Raises:
        PolicyError: the largest column needs a search over more cells than a limit.
    """
    return column_norm2(workload) * workload.weight


def column_norm2(workload: Workload) -> float:
    """Largest squared norm of a cell's column, each query asked once, without a matrix over all
    cells.

    The squared norm of a cell is a sum over the products of a product over the attributes, and no
    term is negative.  So a cell of an attribute is left out where another cell of it has no less in
    every factor.  What is left on each attribute (one cell for prefixes, for ranges the middle
    one) is enumerated.

    Raises:
        PolicyError: more is left than a limit.
    """
    factors = [dict[Factor, None]() for _ in workload.sizes]
    for product in workload.products:
        for axis, factor in zip(product.axes, product.factors, strict=True):
            factors[axis][factor] = None
    norms = [
        dict(zip(of, _undominated([_norms2(factor) for factor in of]), strict=True))
        for of in factors
    ]
    left = [max((len(row) for row in of.values()), default=1) for of in norms]
    place = {axis: at for at, axis in enumerate(k for k, n in enumerate(left) if n > 1)}
    if math.prod(left) * len(workload.products) > _MAX_ENUMERATED:
        raise _too_many()
    if not place:
        one = [{factor: float(row[0]) for factor, row in of.items()} for of in norms]
        return math.fsum(
            math.prod([one[axis][factor] for axis, factor in zip(p.axes, p.factors, strict=True)])
            for p in workload.products
        )
    total = np.zeros([left[axis] for axis in place])
    for product in workload.products:
        term = np.ones((1,) * len(place))
        for axis, factor in zip(product.axes, product.factors, strict=True):
            row = norms[axis][factor]
            shape = [-1 if at == place.get(axis) else 1 for at in range(len(place))]
            term = term * row.reshape(shape)
        total += term
    return float(total.max())


def _norms2(factor: Factor) -> Float64:
    """(n,) squared norm of each cell's column: the diagonal of the Gram matrix."""
    if factor.matrix is not None:
        rows = factor.matrix if factor.scale is None else factor.matrix * factor.scale[:, None]
        return np.asarray((rows**2).sum(axis=0))
    if factor.kind == "range" and factor.relative:
        return np.diag(factor.gram()).copy()
    if factor.kind == "range":  # one of the lows up to a cell, one of the highs from it
        return np.arange(1.0, factor.size + 1) * np.arange(float(factor.size), 0.0, -1.0)
    lo, hi = factor.spans
    each = np.ones(len(lo)) if factor.scale is None else factor.scale**2
    steps = np.bincount(lo, each, factor.size + 1) - np.bincount(hi + 1, each, factor.size + 1)
    return np.asarray(np.cumsum(steps)[:-1])


def _undominated(rows: list[Float64]) -> list[Float64]:
    """Rows over the cells, without the cells than which another one has as much in every row.

    Raises:
        PolicyError: the search is beyond a limit.
    """
    if not rows:
        return rows
    columns = np.unique(np.array(rows).T, axis=0)
    columns = columns[np.argsort(-columns.sum(axis=1), kind="stable")]
    size = 0
    for column in columns:  # what dominates a column has no smaller sum: it comes before
        if not (columns[:size] >= column).all(axis=1).any():
            columns[size] = column
            size += 1
        if size * columns.size > _MAX_SEARCHED:
            raise _too_many()
    return list(columns[:size].T)


def _too_many() -> PolicyError:
    return PolicyError(
        "strategy", "needs a search over too many cells", "choose another --strategy"
    )


def haar(workload: Workload) -> CellStrategy:
    """Haar's wavelet on each axis."""
    return CellStrategy("haar", _each(workload, wavelet))


def hierarchical(workload: Workload) -> CellStrategy:
    """A binary tree on each axis."""
    return CellStrategy("hierarchical", _each(workload, tree))


def fourier(workload: Workload) -> CellStrategy:
    """All characters that the workload needs, unweighted."""
    spaces = spaces_of(workload)
    traces = spaces.traces(np.ones(len(workload.products)))
    keys = tuple(key for key, t in zip(spaces.keys, traces, strict=True) if t > 0)
    return CellStrategy("fourier", Residual(workload.sizes, keys, np.ones(len(keys))))


def datacube(workload: Workload) -> CellStrategy:
    """Tables that cover the workload's: for each bound of a sum's length a greedy cover, the
    best."""
    axis_sets = [frozenset(axes) for axes in dict.fromkeys(p.axes for p in workload.products)]
    candidates = sorted({a | b for a in axis_sets for b in axis_sets}, key=sorted)

    def length(table: frozenset[int], source: frozenset[int]) -> float:
        return math.prod(float(workload.sizes[a]) for a in source - table)

    best: tuple[float, list[frozenset[int]]] = math.inf, []
    for most in sorted({length(t, s) for t in axis_sets for s in candidates if t <= s}):
        left, chosen = set(axis_sets), list[frozenset[int]]()
        while left:
            covers = {s: {t for t in left if t <= s and length(t, s) <= most} for s in candidates}
            source = max(candidates, key=lambda s: len(covers[s]))
            chosen.append(source)
            left -= covers[source]
        best = min(best, (len(chosen) * most, chosen), key=lambda pair: pair[0])
    return tables(workload, [tuple(sorted(table)) for table in best[1]], "datacube")


def _each(workload: Workload, make: Callable[[int], Float64]) -> Kron:
    if max(workload.sizes) > MAX_SOLVED_CELLS:
        raise PolicyError(
            "strategy",
            f"needs a matrix for each attribute, of at most {MAX_SOLVED_CELLS:,} cells",
            "choose another --strategy, or use coarser cells",
        )
    grams = {}
    for size in workload.sizes:
        if size not in grams:
            rows = make(size)
            grams[size] = dense_gram(rows.T @ rows)
    return Kron(tuple(grams[size] for size in workload.sizes))


def tables(workload: Workload, chosen: Sequence[tuple[int, ...]], name: str) -> CellStrategy:
    """The strategy that asks some tables of counts as they are, all alike."""
    all_weights: dict[tuple[int, ...], float] = {}
    for table in chosen:
        cells = math.prod(float(workload.sizes[axis]) for axis in table)
        for count in range(len(table) + 1):
            for key in itertools.combinations(table, count):
                all_weights[key] = all_weights.get(key, 0.0) + 1 / cells
    weights = {
        key: y for key, y in all_weights.items() if all(workload.sizes[axis] > 1 for axis in key)
    }
    return CellStrategy(
        name, Residual(workload.sizes, tuple(weights), np.array(list(weights.values())))
    )


#: Strategies by name.
BY_NAME: dict[str, Callable[[Workload], CellStrategy]] = {
    "identity": identity, "workload": itself, "haar": haar, "hierarchical": hierarchical,
    "fourier": fourier, "datacube": datacube,
}  # fmt: skip


def errors(workload: Workload) -> dict[str, float]:
    """Weighted total of the variances at mu = 1 of each strategy that measures all queries."""
    method_errors = {name: make(workload).error(workload) for name, make in BY_NAME.items()}
    method_errors["gaussian"] = gaussian_error(workload)
    return {name: error for name, error in method_errors.items() if math.isfinite(error)}
