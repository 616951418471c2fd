"""Public attributes of a workload's domain, and the queries of one attribute: its factors.

An **attribute** is a list of values, or bins between sorted edges.  The domain is fixed before any
record is seen, so that it says nothing about the data: a value that is not listed, or lies outside
the edges, belongs to no cell (the pipeline's dead letter).

A **factor** is one attribute's part of a product of queries: an implicit matrix, rows are queries
of its cells.  ``identity`` asks each cell, ``total`` all together, ``prefix`` the first 1, 2, ...,
n, ``range`` every interval (in the order of its first and then its last cell), ``width`` every
interval of k cells, and ``matrix`` what is written out.  All but the last are intervals [lo, hi],
and none is held as a matrix: answers come from running sums, and the Gram matrix from running sums
over the pairs (lo, hi).

A *relative* factor has its rows divided by their norms (a query's error then counts in proportion
to the query's size).
"""

import functools
import itertools
import struct
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import (
    MAX_ATTRIBUTE_CELLS,
    MAX_COEFFICIENT,
    MAX_EXPLICIT_NUMBERS,
    MAX_WORKLOAD_ATTRIBUTES,
)

#: The largest float: an integer beyond it is no edge.
_MAX_EDGE = sys.float_info.max
INTERVALS = ("identity", "total", "prefix", "range", "width")
#: Gram matrices that do not change when the cells are reversed.
_REVERSIBLE = ("identity", "total", "range", "width")
#: Ranges that are listed for their norms; more are counted by their lengths.
_LISTED = 1 << 23
#: Entries of a Gram matrix closer than this, relative to the largest, are equal but for rounding.
_ALIKE = 1e-12


@dataclass(frozen=True)
class Attribute:
    """One dimension of the domain.

    Attributes:
        name: the name that queries use.
        values: its values in order, all text or all whole numbers; () for bins.
        edges: bounds of half-open bins [edge, next edge), strictly increasing; () for values.
    """

    name: str
    values: tuple[str, ...] | tuple[int, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.values) or len(self.edges) - 1

    def cells(self, column: npt.ArrayLike) -> Int64:
        """Return (rows,) the cell of each value of a column; -1 where it has none."""
        column = np.asarray(column)
        if self.edges:
            cells = np.searchsorted(np.array(self.edges), column, side="right") - 1
            inside = (column >= self.edges[0]) & (column < self.edges[-1])
            return np.where(inside, cells, -1).astype(np.int64)
        values = np.array(self.values)
        order = np.argsort(values)
        at = np.searchsorted(values, column, sorter=order).clip(max=self.size - 1)
        return np.where(values[order[at]] == column, order[at], -1).astype(np.int64)

    def canonical(self) -> bytes:
        """Return the bytes for a hash of the domain: equal iff the attributes are."""
        if self.edges:
            body = b"e" + struct.pack(f"<{len(self.edges)}d", *self.edges)
        elif isinstance(self.values[0], str):
            body = b"s" + b"".join(framed(str(value).encode()) for value in self.values)
        else:
            body = b"i" + b"".join(framed(str(value).encode()) for value in self.values)
        return framed(self.name.encode()) + framed(body)


def framed(body: bytes) -> bytes:
    """Return bytes after their length, so that a sequence of them has one reading."""
    return struct.pack("<Q", len(body)) + body


def of_values(name: str, values: Iterable[Any]) -> Attribute:
    """Return an attribute of listed values.

    Raises:
        UsageError: none, too many, of two types, one twice, or what no record can hold.
    """
    listed = tuple(values)
    where = f"domain.{name}.values"
    kinds = {type(value) for value in listed}
    if kinds not in ({str}, {int}):
        raise UsageError(
            where, "must be all text or all whole numbers", "list at least one value, of one type"
        )
    if not all(_storable(value) for value in listed):
        raise UsageError(
            where, "must be Unicode text, or whole numbers of 64 bits", "correct these values"
        )
    if len({normal(value) for value in listed}) < len(listed):
        raise UsageError(
            where, "a value is listed twice, as text in normal form (NFC)", "list each once"
        )
    return _limited(Attribute(name, values=listed), where)


def of_size(name: str, size: int) -> Attribute:
    """Return an attribute of the codes 0 .. size - 1.

    Raises:
        UsageError: not a size, or too large a one.
    """
    where = f"domain.{name}.size"
    if type(size) is not int or not 1 <= size <= MAX_ATTRIBUTE_CELLS:
        raise UsageError(
            where, f"must be a whole number from 1 to {MAX_ATTRIBUTE_CELLS}", "correct it"
        )
    return Attribute(name, values=tuple(range(size)))


def of_edges(name: str, edges: Iterable[Any]) -> Attribute:
    """Return an attribute of bins.

    Raises:
        UsageError: fewer than two edges, not finite numbers, not increasing, or too many.
    """
    where = f"domain.{name}.edges"
    listed = tuple(edges)
    if any(type(edge) not in (int, float) or not abs(edge) <= _MAX_EDGE for edge in listed):
        raise UsageError(where, "must be finite numbers", "correct them")
    ends = tuple(float(edge) for edge in listed)
    if len(ends) < 2 or any(low >= high for low, high in itertools.pairwise(ends)):
        raise UsageError(
            where, "must be two numbers or more, each above the one before", "sort them"
        )
    return _limited(Attribute(name, edges=ends), where)


def domain_of(attributes: Sequence[Attribute]) -> tuple[Attribute, ...]:
    """Return a domain from all its attributes.

    Raises:
        UsageError: no attribute, too many, two of one name, or a name that is no text.
    """
    if not 1 <= len(attributes) <= MAX_WORKLOAD_ATTRIBUTES:
        raise UsageError(
            "domain", f"must have 1 to {MAX_WORKLOAD_ATTRIBUTES} attributes", "list as many"
        )
    if not all(_storable(attribute.name) for attribute in attributes):
        raise UsageError("domain", "has a name that is not Unicode text", "rename that attribute")
    if len({attribute.name for attribute in attributes}) < len(attributes):
        raise UsageError("domain", "two attributes have one name", "rename one of them")
    return tuple(attributes)


def normal(value: str | int) -> str | int:
    """Return a value as records have it: text in normal form (NFC)."""
    return unicodedata.normalize("NFC", value) if isinstance(value, str) else value


def _storable(value: str | int) -> bool:
    """Whether a record can hold a value: no lone surrogate, no number beyond int64."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in value)


def _limited(attribute: Attribute, where: str) -> Attribute:
    if attribute.size > MAX_ATTRIBUTE_CELLS:
        raise UsageError(
            where, f"an attribute has at most {MAX_ATTRIBUTE_CELLS} cells", "use coarser ones"
        )
    return attribute


@dataclass(frozen=True, eq=False)
class Factor:
    """The queries of one attribute.

    Attributes:
        kind: one of INTERVALS, or ``matrix``.
        size: n, number of cells.
        width: k of ``width``, else 0.
        matrix: (rows, n) of ``matrix``, read-only.
        relative: rows are divided by their norms.
    """

    kind: str
    size: int
    width: int = 0
    matrix: Float64 | None = field(default=None, repr=False)
    relative: bool = False

    @functools.cached_property
    def rows(self) -> int:
        """Number of queries."""
        n = self.size
        if self.matrix is not None:
            return len(self.matrix)
        counts = {"identity": n, "total": 1, "prefix": n, "range": n * (n + 1) // 2}
        return counts.get(self.kind, n - self.width + 1)

    @functools.cached_property
    def spans(self) -> tuple[Int64, Int64]:
        """(rows,) first and (rows,) last cell of each interval."""
        cells = np.arange(self.size)
        if self.kind == "range":
            lo, hi = np.triu_indices(self.size)
            return lo.astype(np.int64), hi.astype(np.int64)
        first = {"identity": cells, "total": cells[:1], "prefix": cells * 0}
        lo = first.get(self.kind, cells[: self.rows])
        last = {"identity": cells, "total": cells[-1:], "prefix": cells}
        return lo, last.get(self.kind, lo + self.width - 1)

    @functools.cached_property
    def scale(self) -> Float64 | None:
        """(rows,) the factor of each row; ``None``: 1."""
        if not self.relative:
            return None
        if self.matrix is not None:
            return np.asarray(1 / np.linalg.norm(self.matrix, axis=1))
        lo, hi = self.spans
        return np.asarray((hi - lo + 1.0) ** -0.5)

    def apply(self, x: npt.NDArray[Any], axis: int = 0) -> npt.NDArray[Any]:
        """Return W x along an axis, whose n cells become rows (exact for integers)."""
        if self.matrix is not None:
            product = np.moveaxis(np.tensordot(self.matrix, x, (1, axis)), 0, axis)
        elif self.kind == "identity":
            product = x
        else:
            shape = list(x.shape)
            shape[axis] = 1
            sums = np.cumsum(x, axis=axis)
            sums = np.concatenate([np.zeros(shape, sums.dtype), sums], axis=axis)
            lo, hi = self.spans
            product = sums.take(hi + 1, axis=axis) - sums.take(lo, axis=axis)
        if self.scale is None:
            return product
        return product * self.scale.reshape([-1 if k == axis else 1 for k in range(product.ndim)])

    def dense(self) -> Float64:
        """Return (rows, n) the matrix itself; for small ones."""
        return np.asarray(self.apply(np.eye(self.size)), dtype=np.float64)

    def gram(self) -> Float64:
        """Return (n, n) W^T W."""
        if self.matrix is not None:
            rows = self.matrix if self.scale is None else self.matrix * self.scale[:, None]
            return np.asarray(rows.T @ rows)
        n = self.size
        if self.kind == "identity":
            return np.eye(n)
        # Entry (lo, hi) counts that interval; a pair i <= j lies in those with lo <= i, hi >= j.
        counts = np.zeros((n, n))
        if self.kind == "range":
            counts[np.tri(n, dtype=bool).T] = 1.0
            if self.relative:
                counts /= np.maximum(1, 1 + np.arange(n) - np.arange(n)[:, None])
        else:
            lo, hi = self.spans
            counts[lo, hi] = 1 / (hi - lo + 1.0) if self.relative else 1.0
        np.cumsum(counts, axis=0, out=counts)
        backward = counts[:, ::-1]
        np.cumsum(backward, axis=1, out=backward)
        upper = np.triu(counts, 1)
        counts[np.tri(n, k=-1, dtype=bool)] = 0.0
        counts += upper.T
        return counts

    @functools.cached_property
    def reversible(self) -> bool:
        """Return whether the Gram matrix stays the same when the cells are reversed."""
        if self.matrix is None:
            return self.kind in _REVERSIBLE or self.size == 1
        gram = self.gram()
        return bool(np.abs(gram - gram[::-1, ::-1]).max() <= _ALIKE * gram.max())

    @property
    def marginal(self) -> bool:
        """Return whether it is all single cells or their total, as in tables of counts."""
        return self.kind in ("identity", "total")

    def variances(self, covariance: Float64) -> Float64:
        """Return (rows,) variance of each answer, if the cells' errors have this (n, n)
        covariance.
        """
        if self.matrix is not None:
            variances = np.einsum("qi,qi->q", self.matrix @ covariance, self.matrix)
        elif self.kind == "identity":
            return np.diag(covariance).copy()
        else:
            sums = np.zeros((self.size + 1,) * 2)
            sums[1:, 1:] = covariance
            np.cumsum(sums, axis=0, out=sums)
            np.cumsum(sums, axis=1, out=sums)
            lo, hi = self.spans[0], self.spans[1] + 1
            variances = sums[hi, hi]
            variances -= sums[lo, hi]
            variances -= sums[hi, lo]
            variances += sums[lo, lo]
        return np.asarray(variances if self.scale is None else variances * self.scale**2)

    @functools.cached_property
    def parts(self) -> tuple[Float64, Float64]:
        """(rows,) squared norm of each query along the vector of ones, and of the rest of it."""
        if self.matrix is not None:
            along, squares = self.matrix.sum(1) ** 2 / self.size, (self.matrix**2).sum(1)
        else:
            squares = self.spans[1] - self.spans[0] + 1.0
            along = squares**2 / self.size
        scale = 1.0 if self.scale is None else self.scale**2
        return along * scale, np.maximum(squares - along, 0.0) * scale

    @functools.cached_property
    def masses(self) -> tuple[float, float]:
        """The sums of ``parts`` over the queries: trace of the Gram matrix along ones, and of the
        rest.
        """
        if self.kind == "range" and self.rows > _LISTED:
            lengths = np.arange(1.0, self.size + 1)
            counts = (self.size + 1 - lengths) / (lengths if self.relative else 1.0)
            along_ones = counts @ lengths**2 / self.size
            return float(along_ones), float(counts @ lengths - along_ones)
        along, rest = self.parts
        return float(along.sum()), float(rest.sum())

    def canonical(self) -> bytes:
        """Return the bytes that a hash of the workload is made of."""
        head = framed(self.kind.encode()) + struct.pack(
            "<QQ?", self.size, self.width, self.relative
        )
        return head + framed(b"" if self.matrix is None else self.matrix.astype("<f8").tobytes())


def interval(kind: str, size: int, width: int = 0, relative: bool = False) -> Factor:
    """Return a factor of intervals.

    Raises:
        UsageError: a width outside 1 .. n, or a kind that there is not.
    """
    if kind not in INTERVALS:
        raise UsageError(
            "queries.factors", f"must be one of {', '.join(INTERVALS)} or a matrix", "correct it"
        )
    if (kind == "width") != bool(width) or not 0 <= width <= size:
        raise UsageError(
            "queries.factors", f"width must be a whole number from 1 to {size}", "correct it"
        )
    return Factor(kind, size, width, relative=relative)


def explicit(matrix: npt.ArrayLike, size: int, relative: bool = False) -> Factor:
    """Return an explicit factor; equal rows are asked, and weigh, as often as they occur.

    Raises:
        UsageError: not a matrix of finite numbers within limits, or a row of nothing.
    """
    where = "queries.factors.matrix"
    try:
        coefficients = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        coefficients = np.zeros(0)
    if coefficients.ndim != 2 or coefficients.shape[1] != size or not coefficients.size:
        raise UsageError(
            where, "must have a row or more, each with a number for each cell", "correct it"
        )
    if coefficients.size > MAX_EXPLICIT_NUMBERS:
        raise UsageError(
            where, f"must have at most {MAX_EXPLICIT_NUMBERS} numbers", "use fewer queries"
        )
    if not np.abs(coefficients).max() <= MAX_COEFFICIENT:
        raise UsageError(
            where,
            f"must have finite coefficients of at most {MAX_COEFFICIENT:.0e}",
            "rescale the row",
        )
    if not np.abs(coefficients).max(axis=1).all():
        raise UsageError(where, "has a row of zeros, which asks nothing", "remove it")
    if np.abs(coefficients).max(axis=1).min() < 1 / MAX_COEFFICIENT:
        raise UsageError(
            where,
            f"must have a coefficient of at least {1 / MAX_COEFFICIENT:.0e} in each row",
            "rescale the row",
        )
    coefficients += 0.0  # One zero, so that equal matrices have equal bytes.
    coefficients.flags.writeable = False
    return Factor("matrix", size, matrix=coefficients, relative=relative)
