"""The names of array types are those of the dtypes they annotate."""

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
