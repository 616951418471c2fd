"""Strategies that are products of one strategy for each axis.

For one product of queries tr(V X^-1), the unit diagonal and the dual all factor: the product of
the axes' optima is the optimum over all cells, its floor the product of the floors.  For a union
of products too large for one matrix the axes take turns: with the others fixed, one axis' error is
that of a union over that axis alone, which ``optimum`` solves.  What is left there is that the
best strategy need not be a product; the floor, the sum of what each product would cost alone, then
says little.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import InvariantError, PolicyError, instance
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.optimum import Solved, optimum
from dpstream.accounting.strategies.cells.strategy import Blocks, CellStrategy, Kron, dense_gram
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.strategies.cells.tridiagonal import (
    MANY_CELLS,
    SUMMED,
    is_tridiagonal,
    tridiagonal_floor,
    tridiagonal_optimum,
)
from dpstream.accounting.workloads.factors import Factor, interval
from dpstream.accounting.workloads.workload import Workload, workload_of

#: Rounds of turns: later ones change the error by less than a part in 1e4.
_ROUNDS, _SETTLED = 20, 1e-4
#: Factor below which float errors cannot bring a floor.
_DOWN = 1 - 1e-9

Solver = Callable[[Workload], Solved]


def product_optimum(
    workload: Workload, tolerance: float = 1e-3, solve: Solver | None = None
) -> Solved:
    """The optimum of one product, axis by axis, to a relative gap of the whole.

    Args:
        solve: of one axis' workload; default: ``optimum`` or, for a sum alone, the one query.
    """
    [product] = workload.products
    parts = workload.axes(product)
    share = tolerance / max(1, len(product.axes))
    solved: dict[tuple[str, int], Solved] = {}
    for part in parts:
        if (key := (part.structure, part.cells)) not in solved:
            solved[key] = solve(part) if solve else _axis(part, share)
    solutions = [solved[part.structure, part.cells] for part in parts]
    return _joined("optimum", solutions, product.weight)


def floor_of(workload: Workload, tolerance: float = 1e-2) -> float:
    """Sum over the products of at most what each would cost if it were asked alone."""
    floors: dict[bytes, float] = {}
    total = []
    for product in workload.products:
        value = product.weight
        for axis, factor in zip(product.axes, product.factors, strict=True):
            name = factor.canonical()
            if name not in floors:
                floors[name] = _floor(workload.part(axis, factor), tolerance)
            value *= floors[name]
        total.append(value)
    return math.fsum(total)


@one_thread()
def alternating(
    workload: Workload, tolerance: float = 1e-3, solved_axes: Mapping[int, Blocks] | None = None
) -> CellStrategy:
    """A product strategy for a union of products.

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
        [gram] = solved.strategy.gram.factors  # type: ignore[attr-defined]
        grams.append(gram)
    traces = np.array([_traces(workload, axis, grams[axis]) for axis in axes])
    before = math.inf
    for _ in range(_ROUNDS):
        for axis in (axis for axis in axes if axis not in fixed):
            others = np.delete(traces, axis, axis=0).prod(axis=0)
            solved = _axis(_turn(workload, axis, others), tolerance)
            [grams[axis]] = solved.strategy.gram.factors  # type: ignore[attr-defined]
            traces[axis] = _traces(workload, axis, grams[axis])
        weights = workload.weights
        error = float(weights @ traces.prod(axis=0))
        if error > before * (1 - _SETTLED):
            break
        before = error
    return CellStrategy("product", Kron(tuple(grams)))


def tridiagonal_product(workload: Workload, tolerance: float = 1e-3) -> CellStrategy | None:
    """A product strategy for a union with one attribute of very many cells.

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
    if len(long) != 1 or all(factor.marginal for factor in factors.values()):
        return None
    if any(factor.kind not in SUMMED or factor.relative for factor in factors.values()):
        return None
    size = workload.sizes[long[0]]
    others = [*factors.values(), interval("total", size)]
    solvable = [name for name, factor in factors.items() if is_tridiagonal(factor)]
    most = max(solvable, key=lambda name: shares[name], default=None)
    main = interval("range", size) if most is None else factors[most]
    [gram] = [tridiagonal_optimum(main, tolerance, others=others).strategy.gram]
    return alternating(workload, tolerance, {long[0]: instance(gram, Blocks)})


def _floor(part: Workload, tolerance: float) -> float:
    """A floor of one axis' factor, which is asked alone.

    Of very many cells: by eigenvalues of a tridiagonal matrix; else at even weights of the cells,
    (sum of the roots of the eigenvalues of V)^2 / n >= tr(V)^2 / (n norm of V), since a root of
    at most r is at least its square / r; the norm is at most the largest sum of a row of |V|.
    """
    [factor] = part.factors_of(part.products[0])
    if part.cells <= MANY_CELLS or factor.marginal or part.cells > MAX_SOLVED_CELLS:
        return _axis(part, tolerance).floor
    if is_tridiagonal(factor):
        return tridiagonal_floor(factor)
    gram = factor.gram()
    norm = float(np.abs(gram).sum(axis=0).max())
    return float(np.trace(gram)) ** 2 / (part.cells * norm) * _DOWN


def _axis(part: Workload, tolerance: float) -> Solved:
    """The optimum of one axis' workload, as a product of one factor."""
    if part.cells > MAX_SOLVED_CELLS:
        raise PolicyError(
            "domain",
            f"an attribute of a product has at most {MAX_SOLVED_CELLS} cells",
            "use coarser ones",
        )
    n, even = part.cells, np.full(part.cells, 1 / part.cells)
    [product, *others] = part.products
    if not others and not product.axes:
        return Solved(
            CellStrategy("optimum", Kron((dense_gram(np.ones((n, n))),))), 1.0, 1.0, (even,), 0
        )
    if not others and part.marginal:
        cells = CellStrategy("optimum", Kron((dense_gram(np.eye(n)),)))
        return Solved(cells, float(n), float(n), (even,), 0)
    [factor, *_] = product.factors or (None,)
    long = not others and part.cells > MANY_CELLS
    if factor is not None and long and is_tridiagonal(factor):
        solution = tridiagonal_optimum(factor, tolerance)
    else:
        solution = optimum(part, tolerance)
    if not isinstance(solution.strategy.gram, Blocks):
        raise InvariantError("isinstance(found.strategy.gram, Blocks)")
    return solution._replace(strategy=CellStrategy("optimum", Kron((solution.strategy.gram,))))


def _joined(name: str, solutions: list[Solved], weight: float) -> Solved:
    return Solved(
        CellStrategy(name, Kron(tuple(s.strategy.gram.factors[0] for s in solutions))),  # type: ignore[attr-defined]
        weight * math.prod(s.error for s in solutions),
        weight * math.prod(s.floor for s in solutions),
        tuple(s.certificate[0] for s in solutions),
        max(s.steps for s in solutions),
    )


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
