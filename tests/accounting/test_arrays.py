"""The names of array types are those of the dtypes they annotate."""

from typing import get_args

import numpy as np
import pytest

from dpstream.accounting import arrays


@pytest.mark.parametrize("name", [name for name in vars(arrays) if name[0].isupper()])
def test_each_name_says_its_dtype(name: str) -> None:
    _, dtype = get_args(getattr(arrays, name))
    assert get_args(dtype) == (getattr(np, "bool_" if name == "Bool" else name.lower()),)
