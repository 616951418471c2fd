"""Numpy array types, named by their elements, for annotations."""

import functools

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
#: Ids of 16 bytes, (n, 2): two little-endian words each.
Ids = npt.NDArray[np.uint64]


def kron(factors: list[Float64]) -> Float64:
    """Return the Kronecker product of arrays of equal numbers of axes, in order; 1 for none."""
    if not factors:
        return np.ones(1)
    return functools.reduce(lambda a, b: np.asarray(np.kron(a, b), dtype=np.float64), factors)
