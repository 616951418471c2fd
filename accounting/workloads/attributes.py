"""Public attributes of a workload's domain: lists of values, or bins between sorted edges.

The domain is fixed before any record is seen, so that it says nothing about the data: a value that
is not listed, or lies outside the edges, belongs to no cell (the pipeline's dead letter).
"""

import itertools
import struct
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_ATTRIBUTE_CELLS, MAX_WORKLOAD_ATTRIBUTES

#: The largest float: an integer beyond it is no edge.
_MAX_EDGE = sys.float_info.max


@dataclass(frozen=True)
class Attribute:
    """One dimension of the domain.

    Attributes:
        name: as queries name it.
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
        PolicyError: none, too many, of two types, one twice, or what no record can hold.
    """
    listed = tuple(values)
    where = f"domain.{name}.values"
    kinds = {type(value) for value in listed}
    if kinds not in ({str}, {int}):
        raise PolicyError(
            where, "must be all text or all whole numbers", "list at least one value, of one type"
        )
    if not all(_storable(value) for value in listed):
        raise PolicyError(
            where, "must be Unicode text, or whole numbers of 64 bits", "correct these values"
        )
    if len({normal(value) for value in listed}) < len(listed):
        raise PolicyError(
            where, "a value is listed twice, as text in normal form (NFC)", "list each once"
        )
    return _limited(Attribute(name, values=listed), where)


def of_size(name: str, size: int) -> Attribute:
    """Return an attribute of the codes 0 .. size - 1.

    Raises:
        PolicyError: not a size, or too large a one.
    """
    where = f"domain.{name}.size"
    if type(size) is not int or not 1 <= size <= MAX_ATTRIBUTE_CELLS:
        raise PolicyError(
            where, f"must be a whole number from 1 to {MAX_ATTRIBUTE_CELLS}", "correct it"
        )
    return Attribute(name, values=tuple(range(size)))


def of_edges(name: str, edges: Iterable[Any]) -> Attribute:
    """Return an attribute of bins.

    Raises:
        PolicyError: fewer than two edges, not finite numbers, not increasing, or too many.
    """
    where = f"domain.{name}.edges"
    listed = tuple(edges)
    if any(type(edge) not in (int, float) or not abs(edge) <= _MAX_EDGE for edge in listed):
        raise PolicyError(where, "must be finite numbers", "correct them")
    ends = tuple(float(edge) for edge in listed)
    if len(ends) < 2 or any(low >= high for low, high in itertools.pairwise(ends)):
        raise PolicyError(
            where, "must be two numbers or more, each above the one before", "sort them"
        )
    return _limited(Attribute(name, edges=ends), where)


def domain_of(attributes: Sequence[Attribute]) -> tuple[Attribute, ...]:
    """Return a domain from all its attributes.

    Raises:
        PolicyError: no attribute, too many, two of one name, or a name that is no text.
    """
    if not 1 <= len(attributes) <= MAX_WORKLOAD_ATTRIBUTES:
        raise PolicyError(
            "domain", f"must have 1 to {MAX_WORKLOAD_ATTRIBUTES} attributes", "list as many"
        )
    if not all(_storable(attribute.name) for attribute in attributes):
        raise PolicyError("domain", "has a name that is not Unicode text", "rename that attribute")
    if len({attribute.name for attribute in attributes}) < len(attributes):
        raise PolicyError("domain", "two attributes have one name", "rename one of them")
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
        raise PolicyError(
            where, f"an attribute has at most {MAX_ATTRIBUTE_CELLS} cells", "use coarser ones"
        )
    return attribute
