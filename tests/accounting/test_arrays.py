"""The names of array types are those of the dtypes they annotate; products of many arrays."""

from typing import get_args

import numpy as np
import pytest

from dpstream.accounting import arrays

#: Names that say what the numbers are.
NAMED = {"Bool": "bool_", "Ids": "uint64"}


@pytest.mark.parametrize("name", [name for name in vars(arrays) if name[0].isupper()])
def test_each_name_says_its_dtype(name: str) -> None:
    _, dtype = get_args(getattr(arrays, name))
    assert get_args(dtype) == (getattr(np, NAMED.get(name, name.lower())),)


def test_products_are_in_order() -> None:
    a, b, c = np.arange(2.0), np.arange(3.0), np.arange(1.0, 3.0)
    assert arrays.kron([a, b, c]).tolist() == [x * y * z for x in a for y in b for z in c]
    assert arrays.kron([]).tolist() == [1.0]
