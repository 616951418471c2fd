"""The names of array types mean what numpy makes of such arrays."""

import numpy as np

from dpstream.accounting import arrays


def test_each_name_is_its_numpy_type() -> None:
    for name, kind in (
        ("Int32", np.int32), ("Int64", np.int64), ("Float64", np.float64), ("Bool", np.bool_)
    ):  # fmt: skip
        alias = getattr(arrays, name)
        assert alias.__origin__ is np.ndarray
        assert alias.__args__[1].__args__ == (kind,)
