"""Released estimates as plain arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpstream.accounting.strategies.cells.stored import bases_arrays, bases_of
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.tables import TableEstimate


def to_arrays(estimate: Estimate | TableEstimate) -> dict[str, Any]:
    """Return an estimate as arrays by name, for ``np.savez``."""
    if isinstance(estimate, Estimate):
        return {
            "cells": estimate.cells,
            "scale": estimate.scale,
            "half_width": np.array(estimate.half_width),
            "summed": np.array(estimate.summed, np.int64),
            **{f"mix{number}": factor for number, factor in enumerate(estimate.mix)},
        }
    return {
        "counts": np.array([len(key) for key in estimate.keys], np.int64),
        "keys": np.array([axis for key in estimate.keys for axis in key], np.int64),
        "sds": estimate.sds,
        "found": np.concatenate([array.ravel() for array in estimate.measured]),
        **bases_arrays(estimate.bases),
    }


def of_arrays(held: Mapping[str, Any]) -> Estimate | TableEstimate:
    """Return the estimate of its arrays.

    Raises:
        KeyError, ValueError: the arrays have another form.
    """
    if "bases" not in held:
        mix = tuple(held[f"mix{number}"] for number in range(len(held) - 4))
        summed = tuple(held["summed"].tolist())
        return Estimate(held["cells"], held["scale"], mix, float(held["half_width"]), summed)
    bases = bases_of(held)
    sizes = [basis.size for basis in bases]
    ends = np.cumsum(held["counts"])
    keys = tuple(tuple(key.tolist()) for key in np.split(held["keys"], ends[:-1]))
    shapes = [[sizes[axis] - 1 for axis in key] for key in keys]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(held["found"], cuts[:-1])
    arrays = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return TableEstimate(bases, keys, held["sds"], arrays)
