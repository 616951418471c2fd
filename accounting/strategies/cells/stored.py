"""Plans as plain arrays, for a cache on disk: what is read back is what was written, or an
error."""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.bases import Basis, Even, Fitted
from dpstream.accounting.strategies.cells.fitted import FittedTables
from dpstream.accounting.strategies.cells.folding import Folding
from dpstream.accounting.strategies.cells.products import LatticeStrategy
from dpstream.accounting.strategies.cells.residual import Residual
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Gram,
    Identity,
    Kron,
    Spread,
)

_VERSION = 1


def to_arrays(plan: Plan, structure: str) -> dict[str, Any]:
    """Return a plan as arrays by name, for ``np.savez``.

    Args:
        structure: of the workload that it is for, ``Workload.structure``.
    """
    arrays: dict[str, Any] = {
        "version": np.array(_VERSION),
        "text": np.array([structure, plan.strategy.name, plan.objective, plan.note]),
        "numbers": np.array([plan.error, plan.floor]),
        "certificates": np.array(len(plan.certificate)),
        **{f"certificate{k}": array for k, array in enumerate(plan.certificate)},
        **_gram(plan.strategy.gram),
    }
    return {**arrays, "digest": np.array(_digest(arrays))}


def from_arrays(arrays: Mapping[str, Any], structure: str) -> Plan:
    """Return the plan of a workload.

    Raises:
        UsageError: another version, another workload's, or not what was written.
    """
    held = _checked(arrays, structure)
    _, name, objective, note = map(str, held["text"])
    error, floor = map(float, held["numbers"])
    certificate = tuple(held[f"certificate{k}"] for k in range(int(held["certificates"])))
    return Plan(CellStrategy(name, _read(held)), objective, error, floor, certificate, note)


def lattice_arrays(name: str, strategy: LatticeStrategy, structure: str) -> dict[str, Any]:
    """Return a strategy of whole numbers as arrays by name, for ``np.savez``."""
    arrays: dict[str, Any] = {
        "version": np.array(_VERSION),
        "text": np.array([structure, name]),
        "factors": np.array(len(strategy.factors)),
        **{f"factor{k}": factor for k, factor in enumerate(strategy.factors)},
    }
    return {**arrays, "digest": np.array(_digest(arrays))}


def lattice_of_arrays(arrays: Mapping[str, Any], structure: str) -> tuple[str, LatticeStrategy]:
    """Name and strategy of a workload.

    Raises:
        UsageError: another version, another workload's, or not what was written.
    """
    held = _checked(arrays, structure)
    factors = tuple(held[f"factor{k}"] for k in range(int(held["factors"])))
    return str(held["text"][1]), LatticeStrategy(factors)


def _checked(arrays: Mapping[str, Any], structure: str) -> dict[str, Any]:
    held = {name: np.asarray(arrays[name]) for name in arrays}
    digest = held.pop("digest", None)
    if digest is None or str(digest) != _digest(held) or int(held["version"]) != _VERSION:
        raise UsageError(
            "strategy", "the stored strategy is damaged or of another version", "remove it"
        )
    if held["text"][0] != structure:
        raise UsageError("strategy", "the stored strategy is of another workload", "remove it")
    return held


def _gram(gram: Gram) -> dict[str, Any]:
    if isinstance(gram, Identity):
        return {"form": np.array("identity")}
    if isinstance(gram, Residual):
        return {
            "form": np.array("residual"),
            "sizes": np.array(gram.sizes, np.int64),
            "counts": np.array([len(key) for key in gram.keys], np.int64),
            "keys": np.array([axis for key in gram.keys for axis in key], np.int64),
            "y": gram.y,
        }
    if isinstance(gram, FittedTables):
        return {
            "form": np.array("fitted"),
            "counts": np.array([len(key) for key in gram.keys], np.int64),
            "keys": np.array([axis for key in gram.keys for axis in key], np.int64),
            "y": gram.y,
            **bases_arrays(gram.bases),
        }
    factors = gram.factors if isinstance(gram, Kron) else (gram,)
    arrays: dict[str, Any] = {"form": np.array("kron" if isinstance(gram, Kron) else "blocks")}
    arrays["factors"] = np.array(len(factors))
    for k, factor in enumerate(instance(factor, Blocks) for factor in factors):
        arrays[f"sizes{k}"] = np.array(factor.folding.sizes, np.int64)
        arrays[f"folded{k}"] = np.array(factor.folding.folded)
        arrays |= _spread_arrays(factor, k)
        arrays |= {f"block{k}.{j}": block for j, block in enumerate(factor.blocks)}
    return arrays


def _read(held: Mapping[str, Any]) -> Gram:
    form = str(held["form"])
    if form == "identity":
        return Identity()
    if form in ("residual", "fitted"):
        flat = iter(held["keys"].tolist())
        names = tuple(tuple(islice(flat, count)) for count in held["counts"].tolist())
        if form == "fitted":
            bases = bases_of(held)
            return FittedTables(tuple(b.size for b in bases), names, held["y"], bases)
        return Residual(tuple(held["sizes"].tolist()), names, held["y"])
    factors = []
    for k in range(int(held["factors"])):
        folding = Folding(tuple(held[f"sizes{k}"].tolist()), tuple(held[f"folded{k}"].tolist()))
        blocks: list[Float64] = [held[f"block{k}.{j}"] for j in range(len(folding.parities))]
        factors.append(Blocks(folding, tuple(blocks), _spread_of(held, k)))
    return Kron(tuple(factors)) if form == "kron" else factors[0]


def _spread_arrays(factor: Blocks, k: int) -> dict[str, Any]:
    """The solved spreads of a factor; a figure that is missing is NaN."""
    if not factor.spread_of:
        return {}
    figures = [
        [math.nan if figure is None else figure for figure in spread]
        for spread in factor.spread_of.values()
    ]
    names = [name.hex() for name in factor.spread_of]
    return {f"spreads{k}": np.array(figures), f"spread_names{k}": np.array(names)}


def _spread_of(held: Mapping[str, Any], k: int) -> dict[bytes, Spread]:
    if f"spreads{k}" not in held:
        return {}
    names = map(bytes.fromhex, held[f"spread_names{k}"].tolist())
    rows = held[f"spreads{k}"].tolist()
    return {
        name: Spread(mean, *(None if math.isnan(figure) else figure for figure in ends))
        for name, (mean, *ends) in zip(names, rows, strict=True)
    }


def bases_arrays(bases: Sequence[Basis]) -> dict[str, Any]:
    """Return bases as arrays by name; attributes with equal bases share arrays."""
    distinct = list(dict.fromkeys(bases))
    number = {basis: k for k, basis in enumerate(distinct)}
    arrays: dict[str, Any] = {
        "bases": np.array([number[basis] for basis in bases], np.int64),
        "bits": np.array([basis.bits for basis in distinct], np.int64),
        "cells": np.array([basis.size for basis in distinct], np.int64),
    }
    for k, basis in enumerate(distinct):
        if isinstance(basis, Fitted):
            arrays |= {f"shares{k}": basis.shares, f"lower{k}": basis.lower}
    return arrays


def bases_of(held: Mapping[str, Any]) -> tuple[Basis, ...]:
    """Return bases from their arrays; see ``bases_arrays``.

    Raises:
        KeyError: they are of another form.
    """
    distinct: list[Basis] = []
    for k, (bits, size) in enumerate(
        zip(held["bits"].tolist(), held["cells"].tolist(), strict=True)
    ):
        if f"shares{k}" in held:
            distinct.append(Fitted(held[f"shares{k}"], bits, held[f"lower{k}"]))
        else:
            distinct.append(Even(size))
    return tuple(distinct[k] for k in held["bases"].tolist())


def _digest(arrays: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        head = f"{name} {array.dtype.str} {array.shape}".encode()
        digest.update(struct.pack("<QQ", len(head), array.nbytes) + head)
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
