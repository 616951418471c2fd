"""Workloads as files hold them: a JSON object of domain and queries, or a plain query matrix.

    {"domain": [{"name": "age", "edges": [0, 18, 65, 120]}, {"name": "sex", "values": ["f", "m"]}],
     "queries": [{"weight": 1, "factors": {"age": "range"}},
                 {"factors": {"age": {"width": 2}, "sex": "identity"}},
                 {"ways": 2, "kind": "range"}]}

A factor is a name, ``{"width": k}`` or ``{"matrix": [[...], ...]}``; an attribute that is not
named is summed out; ``ways`` k stands for the products over all sets of k attributes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_WORKLOAD_PRODUCTS
from dpstream.accounting.workloads.attributes import (
    Attribute,
    domain_of,
    of_edges,
    of_size,
    of_values,
)
from dpstream.accounting.workloads.factors import Factor, explicit, interval
from dpstream.accounting.workloads.workload import Workload, of_matrix, workload_of

_FORMS = {"values": of_values, "edges": of_edges, "size": of_size}


def from_dict(text: Any) -> Workload:
    """The workload that a JSON object describes.

    Raises:
        PolicyError: a key, name, factor or number that there may not be.
    """
    _keys(text, "workload", {"domain", "queries"})
    domain, queries = text["domain"], text["queries"]
    if not isinstance(domain, list) or not isinstance(queries, list):
        raise PolicyError("workload", "domain and queries must be lists", "write them in [ ]")
    attributes = domain_of([_attribute(entry) for entry in domain])
    numbers = {attribute.name: axis for axis, attribute in enumerate(attributes)}
    products: list[tuple[float, dict[int, Factor]]] = []
    for query in queries:
        if not isinstance(query, Mapping) or not query.keys() <= {
            "weight",
            "factors",
            "ways",
            "kind",
        }:
            raise PolicyError(
                "queries",
                "a query may have the keys factors, or ways and kind, and weight, and no others",
                "correct its keys",
            )
        weight = query.get("weight", 1)
        if "ways" in query:
            # One beyond the limit, which `workload_of` refuses.
            room = max(0, MAX_WORKLOAD_PRODUCTS + 1 - len(products))
            ways = itertools.islice(_ways(query, attributes), room)
            products += [(weight, named) for named in ways]
        else:
            products.append((weight, _factors(query, attributes, numbers)))
    return workload_of(attributes, products)


def from_arrays(arrays: Mapping[str, Any]) -> Workload:
    """The workload of an NPZ file: ``W``, a query of all cells in each row.

    Raises:
        PolicyError: no ``W``, or not a query matrix.
    """
    if set(arrays) != {"W"}:
        raise PolicyError("workload", "an NPZ file must hold W and nothing else", "save W alone")
    matrix = np.asarray(arrays["W"])
    if matrix.dtype.kind not in "iuf" or matrix.ndim != 2:
        raise PolicyError("workload.W", "W must be a matrix of numbers", "save it as one")
    return of_matrix(matrix)


def _keys(entry: Any, where: str, keys: set[str]) -> None:
    if not isinstance(entry, Mapping) or set(entry) != keys:
        names = " and ".join(sorted(keys))
        raise PolicyError(
            where, f"must be an object with the keys {names} alone", "correct its keys"
        )


def _not_an_attribute() -> PolicyError:
    rule = "each attribute must have a name (text) and one of values, edges and size"
    return PolicyError("domain", rule, 'write {"name": "age", "edges": [0, 18, 65]}')


def _attribute(entry: Any) -> Attribute:
    if not isinstance(entry, Mapping) or len(entry) != 2 or "name" not in entry:
        raise _not_an_attribute()
    [form] = set(entry) - {"name"}
    name, given = entry["name"], entry[form]
    if not isinstance(name, str) or not name or form not in _FORMS:
        raise _not_an_attribute()
    if form != "size" and not isinstance(given, list):
        raise PolicyError(f"domain.{name}.{form}", "must be a list", "write it in [ ]")
    attribute: Attribute = _FORMS[form](name, given)  # type: ignore[operator]
    return attribute


def _factor(given: Any, size: int) -> Factor:
    if isinstance(given, str):
        return interval(given, size)
    if isinstance(given, Mapping) and set(given) == {"width"} and type(given["width"]) is int:
        return interval("width", size, given["width"])
    if isinstance(given, Mapping) and set(given) == {"matrix"}:
        if not _numbers(given["matrix"]):
            raise PolicyError(
                "queries.factors.matrix",
                "must be a list of rows of numbers",
                "write [[1, 0], [0, 1]]",
            )
        return explicit(given["matrix"], size)
    raise PolicyError(
        "queries.factors",
        'a factor must be a name, {"width": k} or {"matrix": rows}',
        'write "identity", "total", "prefix" or "range"',
    )


def _numbers(rows: Any) -> bool:
    """Whether these are lists of numbers: text and true would become numbers by themselves."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return False
    return set(map(type, itertools.chain.from_iterable(rows))) <= {int, float}


def _factors(
    query: Mapping[str, Any], attributes: tuple[Attribute, ...], numbers: Mapping[str, int]
) -> dict[int, Factor]:
    named = query.get("factors")
    if not isinstance(named, Mapping) or "kind" in query:
        raise PolicyError("queries.factors", "must be an object", 'write {"ATTRIBUTE": "identity"}')
    if not named.keys() <= numbers.keys():
        raise PolicyError(
            "queries.factors", "a factor names no attribute of the domain", "name one of them"
        )
    return {
        numbers[name]: _factor(given, attributes[numbers[name]].size)
        for name, given in named.items()
    }


def _ways(
    query: Mapping[str, Any], attributes: tuple[Attribute, ...]
) -> Iterator[dict[int, Factor]]:
    ways = query["ways"]
    if type(ways) is not int or not 0 <= ways <= len(attributes) or "factors" in query:
        raise PolicyError(
            "queries.ways",
            f"must be a whole number from 0 to {len(attributes)}, in a query without factors",
            "correct it, or remove factors",
        )
    if (sets := math.comb(len(attributes), ways)) > MAX_WORKLOAD_PRODUCTS:
        raise PolicyError(
            "queries.ways",
            f"stands for {sets:,} products; a workload has at most {MAX_WORKLOAD_PRODUCTS:,}",
            "ask sets of fewer attributes, or split the workload",
        )
    factors = [_factor(query.get("kind", "identity"), attribute.size) for attribute in attributes]
    return (
        {axis: factors[axis] for axis in axes}
        for axes in itertools.combinations(range(len(attributes)), ways)
    )
