"""A linear workload: a weighted union of products of factors over the attributes, kept implicit.

A product asks the Kronecker product of its factors' queries; an attribute that it does not name is
summed out.  Its weight multiplies the squared error of each of its queries in the total that a
strategy minimises.  The Gram matrix V = sum of weights times products of Gram matrices is all that
a strategy's total error depends on.

**Files** hold a workload as a JSON object of domain and queries, or as a plain query matrix:

    {"domain": [{"name": "age", "edges": [0, 18, 65, 120]}, {"name": "sex", "values": ["f", "m"]}],
     "queries": [{"weight": 1, "factors": {"age": "range"}},
                 {"factors": {"age": {"width": 2}, "sex": "identity"}},
                 {"ways": 2, "kind": "range"}]}

A factor is a name, ``{"width": k}`` or ``{"matrix": [[...], ...]}``; an attribute that is not
named is summed out; ``ways`` k stands for the products over all sets of k attributes.
"""

import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64, kron
from dpstream.accounting.errors import UsageError, closest
from dpstream.accounting.limits import MAX_HISTOGRAM_CELLS, MAX_QUERIES, MAX_WORKLOAD_PRODUCTS
from dpstream.accounting.workloads.attributes import (
    Attribute,
    Factor,
    domain_of,
    explicit,
    framed,
    interval,
    of_edges,
    of_size,
    of_values,
)


class Product(NamedTuple):
    """One product of factors.

    Attributes:
        weight: > 0, of each of its queries' squared error.
        axes: numbers of the attributes it names, increasing.
        factors: of these, none a ``total``: an attribute summed out is not named.
    """

    weight: float
    axes: tuple[int, ...]
    factors: tuple[Factor, ...]

    @property
    def rows(self) -> int:
        """Number of queries."""
        return math.prod([factor.rows for factor in self.factors])


def applied(factors: Iterable[Factor], x: Float64) -> Float64:
    """Return the products of factors with the axes of an array, in order."""
    for axis, factor in enumerate(factors):
        x = factor.apply(x, axis)
    return x


@dataclass(frozen=True, eq=False)
class Workload:
    """Attributes and products; made by ``workload_of``, which checks them."""

    attributes: tuple[Attribute, ...]
    products: tuple[Product, ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Cells of each attribute."""
        return tuple(attribute.size for attribute in self.attributes)

    @functools.cached_property
    def cells(self) -> int:
        """Cells of the domain; may be far beyond what an array holds."""
        return math.prod(self.sizes)

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """(products,) the number of queries of each."""
        return tuple(product.rows for product in self.products)

    @functools.cached_property
    def queries(self) -> int:
        """Number of queries."""
        return sum(self.rows)

    @functools.cached_property
    def weights(self) -> Float64:
        """(products,) the weight of each."""
        return np.array([product.weight for product in self.products])

    @functools.cached_property
    def weight(self) -> float:
        """Sum of the weights of all queries: what a total error is divided by for a mean."""
        return math.fsum(self.weights * np.array(self.rows, np.float64))

    @functools.cached_property
    def marginal(self) -> bool:
        """Return whether every product is a table of counts (identity and total factors only)."""
        return all(f.kind == "identity" for product in self.products for f in product.factors)

    def factors_of(self, product: Product) -> list[Factor]:
        """Return one factor for each attribute: those not named are totals."""
        factors = [interval("total", size) for size in self.sizes]
        for axis, factor in zip(product.axes, product.factors, strict=True):
            factors[axis] = factor
        return factors

    def axes(self, product: Product) -> list["Workload"]:
        """Return one workload for each attribute; their product is this one, apart from its
        weight.
        """
        named = dict(zip(product.axes, product.factors, strict=True))
        return [self.part(axis, named.get(axis)) for axis in range(len(self.sizes))]

    def part(self, axis: int, factor: Factor | None) -> "Workload":
        """Return the workload of one attribute; ``None``: of its total.

        The same factor gives the same object, so that what is computed of it can be cached.
        """
        if (axis, factor) not in self._single:
            named = {} if factor is None else {0: factor}
            self._single[axis, factor] = workload_of([self.attributes[axis]], [(1.0, named)])
        return self._single[axis, factor]

    @functools.cached_property
    def _single(self) -> dict[tuple[int, Factor | None], "Workload"]:
        return {}

    def gram(self) -> Float64:
        """Return (n, n) V over all cells; for domains that one matrix is solved for."""
        total = np.zeros((self.cells, self.cells))
        for product in self.products:
            grams = [factor.gram() for factor in self.factors_of(product)]
            total += product.weight * kron(grams)
        return total

    def apply(self, x: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the answers of each product, with one axis for each attribute (summed out: length
        1).

        Args:
            x: cells, of the shape of ``sizes``.

        Raises:
            UsageError: more cells than one array may have.
        """
        if self.cells > MAX_HISTOGRAM_CELLS:
            raise UsageError(
                "domain",
                f"a histogram has at most {MAX_HISTOGRAM_CELLS} cells",
                "use coarser cells",
            )
        return [
            applied(self.factors_of(product), x.reshape(self.sizes)) for product in self.products
        ]

    def relative(self) -> "Workload":
        """Return the same queries, each divided by its norm."""
        return replace(
            self,
            products=tuple(
                Product(
                    # What is summed out is part of a query's norm.
                    product.weight
                    / math.prod(n for k, n in enumerate(self.sizes) if k not in product.axes),
                    product.axes,
                    tuple(replace(factor, relative=True) for factor in product.factors),
                )
                for product in self.products
            ),
        )

    @functools.cached_property
    def aligned(self) -> "Workload":
        """The same products over the attributes in the order of their names.

        The order of attributes in a file is presentation: cells, strategies and estimates are
        numbered in this one, and `aligned_rows` leads from there to the queries as they are asked.
        """
        order = sorted(range(len(self.attributes)), key=lambda axis: self.attributes[axis].name)
        products = []
        for weight, axes, factors in self.products:
            pairs = sorted(zip(map(order.index, axes), factors, strict=True), key=lambda p: p[0])
            places, turned = (
                (tuple(part) for part in zip(*pairs, strict=True)) if pairs else ((), ())
            )
            products.append(Product(weight, places, turned))
        return Workload(tuple(self.attributes[axis] for axis in order), tuple(products))

    @functools.cached_property
    def canonical(self) -> "Workload":
        """What a strategy is solved for: ``aligned``, with its products in an order of their own,
        each once with the sum of its weights.
        """
        alike: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[Product]] = {}
        digests: dict[Factor, bytes] = {}
        for product in self.aligned.products:
            for factor in product.factors:
                if factor not in digests:
                    digests[factor] = hashlib.sha256(factor.canonical()).digest()
            key = product.axes, tuple(map(digests.__getitem__, product.factors))
            alike.setdefault(key, []).append(product)
        merged = (
            alike[key][0]._replace(weight=math.fsum(product.weight for product in alike[key]))
            for key in sorted(alike)
        )
        return Workload(self.aligned.attributes, tuple(merged))

    @functools.cached_property
    def aligned_rows(self) -> Int64:
        """(queries,) the number that each query has in ``aligned``."""
        parts, first = [np.zeros(0, np.int64)], 0
        for product in self.products:
            places = np.argsort([self.attributes[axis].name for axis in product.axes])
            shape = [product.factors[place].rows for place in places]
            numbers = np.arange(first, first + product.rows).reshape(shape)
            parts.append(numbers.transpose(np.argsort(places)).reshape(-1))
            first += product.rows
        return np.concatenate(parts)

    @functools.cached_property
    def structure(self) -> str:
        """Hex digest of what a strategy depends on: sizes and queries, not names and values."""
        digest = hashlib.sha256(b"dpstream linear workload 1")
        digest.update(struct.pack(f"<Q{len(self.sizes)}Q", len(self.sizes), *self.sizes))
        digests: dict[Factor, bytes] = {}
        for weight, axes, factors in self.products:
            parts = [struct.pack(f"<dQ{len(axes)}Q", weight, len(axes), *axes)]
            for factor in factors:
                if factor not in digests:
                    digests[factor] = hashlib.sha256(factor.canonical()).digest()
                parts.append(digests[factor])
            digest.update(b"".join(parts))
        return digest.hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest of the whole workload, its attributes' names and values too."""
        body = b"".join(framed(attribute.canonical()) for attribute in self.attributes)
        return hashlib.sha256(body + bytes.fromhex(self.structure)).hexdigest()


def workload_of(
    attributes: Sequence[Attribute], products: Sequence[tuple[float, dict[int, Factor]]]
) -> Workload:
    """Return a workload of (weight, factor by number of attribute).

    Raises:
        UsageError: no product, too many, or a weight that is not positive and finite.
    """
    if not 1 <= len(products) <= MAX_WORKLOAD_PRODUCTS:
        raise UsageError(
            "queries", f"a workload has 1 to {MAX_WORKLOAD_PRODUCTS} products", "name as many"
        )
    parts = []
    for weight, named in products:
        if isinstance(weight, bool) or not (
            isinstance(weight, int | float) and 1e-12 <= weight <= 1e12
        ):
            raise UsageError(
                "queries.weight",
                "a weight is a number from 1e-12 to 1e12",
                "rescale them, or leave it out",
            )
        axes = tuple(sorted(axis for axis, f in named.items() if f.kind != "total" or f.relative))
        parts.append(Product(float(weight), axes, tuple([named[axis] for axis in axes])))
    workload = Workload(domain_of(attributes), tuple(parts))
    if workload.queries > MAX_QUERIES:
        raise UsageError(
            "queries",
            f"are more than {MAX_QUERIES:.0e}, whose errors are beyond a float's range",
            "ask products of fewer attributes",
        )
    return workload


def marginals(
    attributes: Sequence[Attribute], ways: Sequence[int], kind: str = "identity"
) -> Workload:
    """Return the workload of all marginal tables of some numbers of attributes.

    Args:
        ways: numbers of attributes in a table.
        kind: ``identity`` asks for each cell of a table, ``range`` for each sum of a range.
    """
    factors = [interval(kind, attribute.size) for attribute in attributes]
    products = [
        Product(1.0, axes, tuple(factors[axis] for axis in axes))
        for way in ways
        for axes in itertools.combinations(range(len(attributes)), way)
    ]
    return Workload(domain_of(attributes), tuple(products))


def over(sizes: Sequence[int], kinds: Sequence[str]) -> Workload:
    """Return one product of intervals over attributes of these sizes, named by their numbers."""
    attributes = [of_size(str(axis), size) for axis, size in enumerate(sizes)]
    factors = {
        axis: interval(kind, size)
        for axis, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    }
    return workload_of(attributes, [(1.0, factors)])


def of_matrix(matrix: npt.ArrayLike) -> Workload:
    """Return explicit queries over the cells of one attribute.

    Raises:
        UsageError: see ``attributes.explicit``.
    """
    shape = np.shape(matrix)
    size = int(shape[-1]) if shape and shape[-1] else 1
    return workload_of([of_size("cell", size)], [(1.0, {0: explicit(matrix, size)})])


def codes(sizes: Sequence[int], cells: Int64) -> Int64:
    """Return (rows,) the number of each row's cell in the flat histogram; -1 for a missing
    attribute.

    Args:
        cells: (attributes, rows) as ``Attribute.cells`` gives them.
    """
    outside = (cells < 0).any(axis=0)
    flat = np.ravel_multi_index(tuple(cells.clip(min=0)), tuple(sizes)).astype(np.int64)
    return np.where(outside, -1, flat)


#: Factors that a file names by a text.
_NAMED = ("identity", "total", "prefix", "range")
_FORMS = {"values": of_values, "edges": of_edges, "size": of_size}


def from_dict(text: Any) -> Workload:
    """Return the workload that a JSON object describes.

    Raises:
        UsageError: a key, name, factor or number that there may not be.
    """
    _check_keys(text, "workload", ("domain", "queries"), ("domain", "queries"))
    domain, queries = text["domain"], text["queries"]
    if not isinstance(domain, list) or not isinstance(queries, list):
        raise UsageError("workload", "domain and queries must be lists", "write them in [ ]")
    attributes = domain_of([_attribute(entry, f"domain[{n}]") for n, entry in enumerate(domain)])
    numbers = {attribute.name: axis for axis, attribute in enumerate(attributes)}
    products: list[tuple[float, dict[int, Factor]]] = []
    for number, query in enumerate(queries):
        where = f"queries[{number}]"
        _check_keys(query, where, ("factors", "ways", "kind", "weight"))
        weight = query.get("weight", 1)
        if "ways" in query:
            # One beyond the limit, which `workload_of` refuses.
            room = max(0, MAX_WORKLOAD_PRODUCTS + 1 - len(products))
            ways = itertools.islice(_ways(query, where, attributes), room)
            products += [(weight, named) for named in ways]
        else:
            products.append((weight, _factors(query, where, attributes, numbers)))
    return workload_of(attributes, products)


def from_arrays(arrays: Mapping[str, Any]) -> Workload:
    """Return the workload of an NPZ file: ``W``, a query of all cells in each row.

    Raises:
        UsageError: no ``W``, or not a query matrix.
    """
    if set(arrays) != {"W"}:
        raise UsageError("workload", "an NPZ file must hold W and nothing else", "save W alone")
    matrix = np.asarray(arrays["W"])
    if matrix.dtype.kind not in "iuf" or matrix.ndim != 2:
        raise UsageError("workload.W", "W must be a matrix of numbers", "save it as one")
    return of_matrix(matrix)


def _check_keys(entry: Any, where: str, keys: Sequence[str], required: Sequence[str] = ()) -> None:
    """Refuse what is no object, has a key that there is not, or lacks one."""
    if not isinstance(entry, Mapping):
        raise UsageError(where, "must be an object", f"its keys are {', '.join(keys)}")
    for key in map(str, entry):
        if key not in keys:
            raise UsageError(where, f"has an unknown key {key!r:.60}", closest(key, keys))
    for key in required:
        if key not in entry:
            raise UsageError(f"{where}.{key}", "is required", "add it")


def _attribute(entry: Any, where: str) -> Attribute:
    _check_keys(entry, where, ("name", *_FORMS), ("name",))
    name = entry["name"]
    if not isinstance(name, str) or not name or len(entry) != 2:
        rule = "must have a name (text) and one of values, edges and size"
        raise UsageError(where, rule, 'write {"name": "age", "edges": [0, 18, 65]}')
    [form] = set(entry) - {"name"}
    given = entry[form]
    if form != "size" and not isinstance(given, list):
        raise UsageError(f"domain.{name}.{form}", "must be a list", "write it in [ ]")
    attribute: Attribute = _FORMS[form](name, given)  # type: ignore[operator]
    return attribute


def _factor(given: Any, where: str, size: int) -> Factor:
    if isinstance(given, str):
        if given not in _NAMED:
            raise UsageError(where, f"is no factor: {given!r:.60}", closest(given, _NAMED))
        return interval(given, size)
    if isinstance(given, Mapping):
        _check_keys(given, where, ("width", "matrix"))
        if set(given) == {"width"} and type(given["width"]) is int:
            return interval("width", size, given["width"])
    if isinstance(given, Mapping) and set(given) == {"matrix"}:
        if not _numbers(given["matrix"]):
            raise UsageError(
                "queries.factors.matrix",
                "must be a list of rows of numbers",
                "write [[1, 0], [0, 1]]",
            )
        return explicit(given["matrix"], size)
    raise UsageError(
        where,
        'a factor must be a name, {"width": k} or {"matrix": rows}',
        'write "identity", "total", "prefix" or "range"',
    )


def _numbers(rows: Any) -> bool:
    """Whether these are lists of numbers: text and true would become numbers by themselves."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return False
    return set(map(type, itertools.chain.from_iterable(rows))) <= {int, float}


def _factors(
    query: Mapping[str, Any],
    where: str,
    attributes: tuple[Attribute, ...],
    numbers: Mapping[str, int],
) -> dict[int, Factor]:
    named, where = query.get("factors"), f"{where}.factors"
    if not isinstance(named, Mapping) or "kind" in query:
        raise UsageError(where, "must be an object", 'write {"ATTRIBUTE": "identity"}')
    for name in map(str, named):
        if name not in numbers:
            raise UsageError(where, f"no attribute {name!r:.60}", closest(name, numbers))
    return {
        numbers[name]: _factor(given, f"{where}.{name}", attributes[numbers[name]].size)
        for name, given in named.items()
    }


def _ways(
    query: Mapping[str, Any], where: str, attributes: tuple[Attribute, ...]
) -> Iterator[dict[int, Factor]]:
    ways = query["ways"]
    if type(ways) is not int or not 0 <= ways <= len(attributes) or "factors" in query:
        raise UsageError(
            f"{where}.ways",
            f"must be a whole number from 0 to {len(attributes)}, in a query without factors",
            "correct it, or remove factors",
        )
    if (sets := math.comb(len(attributes), ways)) > MAX_WORKLOAD_PRODUCTS:
        raise UsageError(
            f"{where}.ways",
            f"stands for {sets:,} products; a workload has at most {MAX_WORKLOAD_PRODUCTS:,}",
            "ask sets of fewer attributes, or split the workload",
        )
    kind = query.get("kind", "identity")
    factors = [_factor(kind, f"{where}.kind", attribute.size) for attribute in attributes]
    return (
        {axis: factors[axis] for axis in axes}
        for axes in itertools.combinations(range(len(attributes)), ways)
    )
