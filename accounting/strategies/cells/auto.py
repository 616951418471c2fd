"""Choice of a strategy for a workload, with its cost and its gap to the least one.

Tables of counts: closed form.  One product: axis by axis.  A union that one matrix is solved for:
the better of optimum and eigen-design.  A larger union: the best of residual tables with fitted
bases, residual tables with even bases, and a product of axes.  Its floor is that of smaller queries
(`union_floor`) or the sum of each product's floor alone, and the note says so.  A union with an
attribute of very many cells: the best of even bases, all cells, and a product of the optimum of the
attribute's ranges or prefixes.

**The floor of large unions**, of more cells than one matrix is solved for.  For weights of the
cells that are a product of one vector m_i for each attribute, with D_i = diag(m_i), u_i = sqrt(m_i)
and A = D_i^1/2 V_f D_i^1/2 for each factor f of attribute i,

    tr(V X^-1) >= (tr K^1/2)^2,    K = sum over products T of  w_T (A of each i in T) x (u u^T of
                                                                each other attribute).

This holds for every strategy (``optimum``).  K couples the spaces of {i, j}, {i} and the empty set,
because A couples u to the vectors that are orthogonal to it.  K's diagonal blocks alone have a
*larger* trace of roots (pinching), so that a floor from them would be false.  K itself is too
large.  But the square root is operator monotone: K >= K' >= 0 gives tr K^1/2 >= tr K'^1/2, and
A >= A' >= 0 for every factor gives K >= K'.

A' splits each attribute into a small space L, which holds u, and the rest H.  With
A = [[P, C], [C^T, Q]] and any E > 0, [[E, C], [C^T, C^T E^-1 C]] >= 0, hence

    A >= (P - E) + (Q - C^T E^-1 C) =: A',    E = s (C C^T)^1/2,  C^T E^-1 C = (C^T C)^1/2 / s,

which is a bound where both terms are >= 0.  L contains u and the eigenvectors of A that are most
coupled to it; then C is small.  With one factor for each attribute K' has one block for each set of
attributes in H: the product of their Q', times a matrix over L of the others.  A union with several
factors for one attribute is divided into unions with one factor each, and their floors are added:
tr(V X^-1) is a sum over them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import MAX_MIXED_CELLS, MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.climb import sure_sum
from dpstream.accounting.strategies.cells.eigen import eigen, spectrum
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.optimum import optimum, worst
from dpstream.accounting.strategies.cells.products import (
    MANY_CELLS,
    alternating,
    floor_of,
    product_optimum,
    tridiagonal_product,
)
from dpstream.accounting.strategies.cells.residual import residual, spaces_of, worst_table
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Solved, identity
from dpstream.accounting.workloads.attributes import Factor
from dpstream.accounting.workloads.workload import Product, Workload

#: Rows of the largest matrix over L, and sum of cubed rows of all of them: seconds of a core.
MOST_ROWS, _MOST_WORK = 1800, 1e10
#: Blocks of K'.
_MOST_BLOCKS = 2000
#: Dimensions of L beside u, in the order in which they are tried.
WIDTHS = (40, 24, 15, 12, 9, 7, 5, 4, 3, 2, 1, 0)
#: s, as a share of u^T A u over the norm of C; tried in this order.
_SHARES = (0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.6)
#: Factor below which float errors cannot bring a trace of roots.
_DOWN = 1 - 1e-9


class _Axis(NamedTuple):
    """A' of one factor: its part over L, and the trace of the root of its part over H."""

    inner: Float64
    outer: float


def union_floor(
    workload: Workload, weights: Sequence[Float64], widths: Sequence[int] = WIDTHS
) -> float:
    """Return a floor: no strategy has a smaller weighted total of variances at mu = 1.

    Args:
        workload: a union of products.
        weights: (n,) weights >= 0 of the cells of each attribute; only their proportions count.
        widths: dimensions of the space L of the module, u not counted, tried in order until one is
            within the limits.
    """
    groups = _groups(workload)
    return math.fsum(_floor(workload, group, weights, widths) for group in groups)


def _groups(workload: Workload) -> list[list[Product]]:
    """Products in groups; within a group each attribute has one factor."""
    groups: list[tuple[dict[int, bytes], list[Product]]] = []
    for product in workload.products:
        named = {
            axis: factor.canonical()
            for axis, factor in zip(product.axes, product.factors, strict=True)
        }
        for factors, members in groups:
            if all(factors.get(axis, name) == name for axis, name in named.items()):
                factors.update(named)
                members.append(product)
                break
        else:
            groups.append((named, [product]))
    return [members for _, members in groups]


def _floor(
    workload: Workload, products: list[Product], weights: Sequence[Float64], widths: Sequence[int]
) -> float:
    factors = {axis: f for p in products for axis, f in zip(p.axes, p.factors, strict=True)}
    names = {axis: (f.canonical(), weights[axis].tobytes()) for axis, f in factors.items()}
    turned = {name: _turned(factors[axis], weights[axis]) for axis, name in names.items()}
    sides = {axis: turned[name] for axis, name in names.items()}
    best = 0.0
    for width in widths:
        dims = {axis: 1 + min(width, len(side.alone)) for axis, side in sides.items()}
        if width and _work(products, dims) > _MOST_WORK:
            continue
        before = 0.0
        for share in _SHARES:
            split = {name: _split(side, width, share) for name, side in turned.items()}
            sure = {axis: side for axis, name in names.items() if (side := split[name])}
            if len(sure) < len(names):
                continue
            value = _trace(products, sure) if width else _alone(workload, products, sure)
            best = max(best, value)
            if value <= before * (1 + 1e-6):
                break
            before = value
        if best > 0:
            break
    return (best * _DOWN) ** 2


class _Turned(NamedTuple):
    """A in the basis of u and of the eigenvectors of what is orthogonal to it.

    Attributes:
        total: u A u; coupled: (n - 1,) between u and each eigenvector; alone: (n - 1,) eigenvalues;
            the most coupled come first.
    """

    total: float
    coupled: Float64
    alone: Float64


def _turned(factor: Factor, weights: Float64) -> _Turned:
    u = np.sqrt(weights / weights.sum())
    matrix = u[:, None] * factor.gram() * u
    # A reflection that takes u to the first axis: the other axes are orthogonal to it.
    mirror = u.copy()
    mirror[0] += math.copysign(1.0, u[0])
    mirror /= np.linalg.norm(mirror)
    matrix = matrix - 2 * np.outer(mirror, mirror @ matrix)
    matrix = matrix - 2 * np.outer(matrix @ mirror, mirror)
    values, vectors = np.linalg.eigh((matrix[1:, 1:] + matrix[1:, 1:].T) / 2)
    values = np.maximum(values, 0.0)
    coupled = vectors.T @ matrix[1:, 0]
    order = np.argsort(-(coupled**2) / np.maximum(values, 1e-300), kind="stable")
    return _Turned(float(matrix[0, 0]), coupled[order], values[order])


def _split(side: _Turned, width: int, share: float) -> _Axis | None:
    """A' for an L of u and ``width`` eigenvectors; ``None`` where this share gives no bound.

    C has one row, b, because the eigenvectors are not coupled to each other.  So E is a number, a
    share of u A u, and H has Q - b b^T / E.
    """
    inner = np.diag(np.concatenate([[side.total], side.alone[:width]]))
    inner[0, 1:] = inner[1:, 0] = side.coupled[:width]
    b, values = side.coupled[width:], side.alone[width:]
    norm = float(np.linalg.norm(b))
    if norm <= 1e-9 * side.total:  # only the odd vectors of ranges remain
        share = 1e-6
    taken = share * side.total
    inner[0, 0] -= taken
    if np.linalg.eigvalsh(inner)[0] < -1e-12 * side.total:
        return None
    outer = np.diag(values) - np.outer(b, b) / taken if len(b) else np.zeros((0, 0))
    eigenvalues = np.linalg.eigvalsh(outer) if len(b) else np.zeros(0)
    if len(b) and eigenvalues[0] < -1e-12 * max(eigenvalues[-1], 0.0):
        return None
    return _Axis(inner, sure_sum(np.asarray(np.maximum(eigenvalues, 0.0))) if len(b) else 0.0)


def _outside(products: list[Product]) -> dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]:
    """For each set of attributes in H: weights and other attributes of the products with it."""
    products_outside: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for product in products:
        axes = product.axes
        for code in range(1 << len(axes)):
            inside = tuple(a for k, a in enumerate(axes) if code >> k & 1)
            rest = tuple(a for k, a in enumerate(axes) if not code >> k & 1)
            products_outside.setdefault(inside, []).append((product.weight, rest))
    return products_outside


def _work(products: list[Product], dims: dict[int, int]) -> float:
    """Sum of the cubed numbers of rows of all matrices; infinite where one is too large."""
    total = 0.0
    outside = _outside(products)
    if len(outside) > _MOST_BLOCKS:
        return math.inf
    for parts in outside.values():
        rows = sum(
            math.prod([dims[axis] - 1 for axis in key]) for key in _below([p for _, p in parts])
        )
        if rows > MOST_ROWS:
            return math.inf
        total += float(rows) ** 3
    return total


def _below(sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All subsets of these sets, the small ones first."""
    subsets = {
        subset
        for axes in sets
        for size in range(len(axes) + 1)
        for subset in itertools.combinations(axes, size)
    }
    return sorted(subsets, key=lambda key: (len(key), key))


def _trace(products: list[Product], sides: dict[int, _Axis]) -> float:
    """tr K'^1/2, rounded down."""
    total = []
    for outside, parts in _outside(products).items():
        outer = math.prod([sides[axis].outer for axis in outside])
        if outer > 0:
            total.append(outer * _root(parts, sides))
    return math.fsum(total)


def _alone(workload: Workload, products: list[Product], sides: dict[int, _Axis]) -> float:
    """tr K'^1/2 where L is u alone: then each block over L is a number."""
    union = replace(workload, products=tuple(products))
    spaces = spaces_of(union)
    along = np.array([sides[axis].inner[0, 0] for axis, _ in spaces.pairs])
    rest = np.array([sides[axis].outer ** 2 for axis, _ in spaces.pairs])
    mass = spaces.masses(along, rest) * union.weights[spaces.products]
    return float(np.sqrt(np.bincount(spaces.spaces, mass)).sum())


def _root(parts: list[tuple[float, tuple[int, ...]]], sides: dict[int, _Axis]) -> float:
    """Trace of the root of a sum of products over L.

    The rows of a set of attributes are those where exactly these attributes are not at u.
    """
    places, size = {}, 0
    for key in _below([axes for _, axes in parts]):
        rows = math.prod([len(sides[axis].inner) - 1 for axis in key])
        places[key] = slice(size, size + rows)
        size += rows
    matrix, blocks = np.zeros((size, size)), dict[tuple[Any, ...], Float64]()
    where = slice(0, 1), slice(1, None)  # of an attribute at u, and of one that is not
    # Equal attributes have the same side, and so the same blocks.
    first_equal = {a: min(b for b in sides if sides[b] is sides[a]) for a in sides}
    for weight, axes in parts:
        subsets = _below([axes])
        for one in subsets:
            for other in subsets:
                kind = tuple((first_equal[a], a in one, a in other) for a in axes)
                if kind not in blocks:
                    inner = [sides[a].inner[where[a in one], where[a in other]] for a in axes]
                    blocks[kind] = kron(inner) if inner else np.ones((1, 1))
                matrix[places[one], places[other]] += weight * blocks[kind]
    return sure_sum(np.asarray(np.linalg.eigvalsh(matrix)))


#: Products times axes up to which axes take turns.
_TURNS = 20_000
OBJECTIVES = ("total", "relative", "worst")
#: Note of a union for which no floor of all cells is computed.
LARGE = "the union is too large for one matrix: the floor is a smaller one that is proven"
#: Note of a union with an attribute of very many cells.
LONG = (
    f"an attribute has more than {MANY_CELLS:,} cells: the strategy is the best that is found"
    " without a search over it, and the floor is a smaller one that is proven"
)


class Plan(NamedTuple):
    """A strategy and its proof.

    Attributes:
        objective: ``total`` (weighted), ``relative`` (each query divided by its norm) or ``worst``.
        error: weighted total of the variances at mu = 1, or the largest variance.
        floor: lower bound of it for every strategy of a Gaussian mechanism.
        certificate: the arrays from which the floor can be computed again; see ``optimum``,
            ``worst``.
        note: what a reader must know of the floor; "" otherwise.
    """

    strategy: CellStrategy
    objective: str
    error: float
    floor: float
    certificate: tuple[Float64, ...] = ()
    note: str = ""

    @property
    def gap(self) -> float:
        """error / floor - 1."""
        return self.error / self.floor - 1


def auto(workload: Workload, objective: str = "total", tolerance: float = 1e-3) -> Plan:
    """Return the best strategy known for an objective, to a relative gap where there is a floor.

    Raises:
        UsageError: an objective that there is not, or a domain beyond what is solved.
    """
    if objective not in OBJECTIVES:
        raise UsageError("objective", f"an objective is one of {', '.join(OBJECTIVES)}", "use one")
    with one_thread():
        if objective == "worst":
            table = workload.marginal and len(workload.products) > 1
            solved = worst_table(workload, tolerance) if table else worst(workload, tolerance)
            return _planned(solved, "worst")
        if objective == "relative":
            workload = workload.relative()
        return _total(workload, tolerance)._replace(objective=objective)


def _total(workload: Workload, tolerance: float) -> Plan:
    [product, *others] = workload.products
    if not others and workload.marginal and len(product.axes) == len(workload.sizes):
        error = product.weight * workload.queries
        return Plan(identity(workload), "total", error, error)
    if not others and max(workload.sizes) <= MAX_SOLVED_CELLS:
        return _planned(product_optimum(workload, tolerance))
    if workload.marginal:
        strategy, error = residual(workload)
        # Closed form: the error is the singular value bound.
        return Plan(strategy, "total", error, error)
    if max(workload.sizes) > MANY_CELLS:
        return _long(workload, tolerance)
    if workload.cells <= MAX_SOLVED_CELLS:
        best = _planned(optimum(workload, tolerance))
        if best.gap > tolerance:
            best = _better(best, workload, [eigen(spectrum(workload))])
        return best
    floor = floor_of(workload)  # first, as it refuses attributes too large to list their queries
    fitted = fit(workload)
    best = Plan(fitted.strategy, "total", fitted.error, floor, (), LARGE)
    proven = union_floor(workload, fitted.weights)
    if proven > floor:
        best = best._replace(floor=proven, certificate=fitted.weights)
    candidates = [residual(workload)[0]]
    # A product over more cells than are ever noised one by one answers nothing.
    few = workload.cells <= MAX_MIXED_CELLS
    if few and len(workload.products) * len(workload.sizes) <= _TURNS:
        candidates.append(alternating(workload, tolerance))
    return _better(best, workload, candidates)


def _long(workload: Workload, tolerance: float) -> Plan:
    """A union with an attribute of so many cells that matrices over them take minutes."""
    floor = floor_of(workload)  # first, as it refuses attributes too large to list their queries
    strategy, error = residual(workload)
    candidates = [identity(workload)]
    if workload.cells <= MAX_MIXED_CELLS:
        product = tridiagonal_product(workload, tolerance)
        candidates += [product] if product is not None else []
    return _better(Plan(strategy, "total", error, floor, (), LONG), workload, candidates)


def _better(plan: Plan, workload: Workload, others: list[CellStrategy]) -> Plan:
    for strategy in others:
        error = strategy.error(workload)
        if error < plan.error:
            plan = plan._replace(strategy=strategy, error=error)
    return plan


def _planned(solved: Solved, objective: str = "total") -> Plan:
    return Plan(solved.strategy, objective, solved.error, solved.floor, solved.certificate)


def strategy_named(workload: Workload, name: str) -> CellStrategy:
    """Return a strategy by its name.

    Raises:
        UsageError: it needs a matrix over more cells than a limit.
    """
    return _MAKERS[name](workload)


def largest(workload: Workload, strategy: CellStrategy) -> float:
    """Return the largest weighted variance of a query at mu = 1.

    Raises:
        UsageError: more queries than are computed one by one, of a strategy that is no product.
    """
    spreads = strategy.spreads(workload)
    if any(spread.most is None for spread in spreads):
        raise UsageError("objective", "worst needs the error of each query", "ask fewer queries")
    return max(
        product.weight * (spread.most or 0.0)
        for product, spread in zip(workload.products, spreads, strict=True)
    )


def _optimum(workload: Workload) -> CellStrategy:
    if len(workload.products) == 1 and max(workload.sizes) <= MAX_SOLVED_CELLS:
        return product_optimum(workload).strategy
    return optimum(workload).strategy


_MAKERS: dict[str, Callable[[Workload], CellStrategy]] = {
    "optimum": _optimum,
    "eigen": lambda workload: eigen(spectrum(workload)),
    "identity": identity,
    "product": alternating,
}
#: Names that ``--strategy`` accepts.
STRATEGIES = ("auto", *_MAKERS)
