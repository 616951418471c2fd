"""Released estimates as plain arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.tables import TableEstimate


def to_arrays(estimate: Estimate | TableEstimate) -> dict[str, Any]:
    """Arrays by name, for ``np.savez``."""
    if isinstance(estimate, Estimate):
        return {
            "cells": estimate.cells,
            "scale": estimate.scale,
            "half_width": np.array(estimate.half_width),
            "summed": np.array(estimate.summed, np.int64),
            **{f"mix{number}": factor for number, factor in enumerate(estimate.mix)},
        }
    return {
        "sizes": np.array(estimate.sizes, np.int64),
        "counts": np.array([len(key) for key in estimate.keys], np.int64),
        "keys": np.array([axis for key in estimate.keys for axis in key], np.int64),
        "sds": estimate.sds,
        "found": np.concatenate([found.ravel() for found in estimate.found]),
    }


def of_arrays(held: Mapping[str, Any]) -> Estimate | TableEstimate:
    """The estimate of its arrays.

    Raises:
        KeyError, ValueError: they are of another form.
    """
    if "sizes" not in held:
        mix = tuple(held[f"mix{number}"] for number in range(len(held) - 4))
        summed = tuple(held["summed"].tolist())
        return Estimate(held["cells"], held["scale"], mix, float(held["half_width"]), summed)
    sizes = tuple(held["sizes"].tolist())
    ends = np.cumsum(held["counts"])
    keys = tuple(
        tuple(key.tolist()) for key in np.split(held["keys"], ends[:-1])
    )  # fmt: skip
    shapes = [[sizes[axis] - 1 for axis in key] for key in keys]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(held["found"], cuts[:-1])
    found = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return TableEstimate(sizes, keys, held["sds"], found)
