"""Numbers between numpy and Arrow are as Arrow itself has them, and nobody waits for pandas."""

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.state.numbers import constant, mask, mask_of, numbers, valid_of, values_of

CUTS = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), CUTS)
def test_numbers_there_and_back(given: list[int | None], cut: tuple[int, int]) -> None:
    column = pa.array(given, pa.int64())[cut[0] :][: cut[1]]
    valid = valid_of(column)
    assert valid.tolist() == [x is not None for x in column.to_pylist()]
    values = values_of(column)
    assert values[valid].tolist() == [x for x in column.to_pylist() if x is not None]
    again = numbers(values, ~valid)
    assert again.equals(column) and again.null_count == column.null_count
    halves = pa.chunked_array([column[:3], column[3:]])
    assert values_of(halves)[valid].tolist() == values[valid].tolist()


@given(st.lists(st.none() | st.booleans()), CUTS)
def test_booleans_there_and_back(given: list[bool | None], cut: tuple[int, int]) -> None:
    column = pa.array(given, pa.bool_())[cut[0] :][: cut[1]]
    assert mask_of(column).tolist() == [bool(x) for x in column.to_pylist()]
    assert mask(mask_of(column)).equals(column.fill_null(False))


@pytest.mark.parametrize("kind", ["int32", "int64", "float64"])
def test_each_kind_of_number(kind: str) -> None:
    values = np.array([1, -2, 3], kind)[::2]  # not in one piece
    assert numbers(values).equals(pa.array([1, 3], kind))
    assert values_of(pa.array(values)).tolist() == [1, 3]
    assert values_of(pa.nulls(0, kind)).dtype == kind and not len(values_of(pa.chunked_array(
        [], kind)))  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, pa.int64()), (0, pa.bool_()), (1, pa.bool_()), (7, pa.int8()), (0, pa.timestamp("us")),
     (0, pa.date32()), (1, pa.float64()), ("é", pa.string()), (b"\xff", pa.binary()),
     ("", pa.string()), (0, pa.timestamp("ns", "UTC")), (0, pa.decimal128(9, 2)),
     (0, pa.decimal256(50, 2)), (0, pa.uint64())],
    ids=str,
)  # fmt: skip
def test_constants(value: Any, kind: pa.DataType) -> None:
    scalar = constant(value, kind)
    wanted = pa.scalar(bool(value), kind) if pa.types.is_boolean(kind) else pa.scalar(value, kind)
    assert scalar.equals(wanted) and scalar.type == kind


def test_all_of_a_null_column_is_null() -> None:
    assert not valid_of(pa.nulls(3)).any() and valid_of(pa.array([1, 2])).all()


def test_nothing_here_imports_pandas() -> None:
    code = """
import sys
import numpy as np, pyarrow as pa
from dpstream.state.numbers import constant, mask, mask_of, numbers, valid_of, values_of
values_of(pa.chunked_array([numbers(np.arange(3)), numbers(np.arange(4))]))
mask_of(mask(valid_of(numbers(np.arange(3.0), np.ones(3, bool)))))
for value, kind in ((1, pa.int8()), ("a", pa.string()), (0, pa.timestamp("us"))):
    constant(value, kind)
print("pandas" in sys.modules)
pa.scalar(1)  # the test can fail
print("pandas" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]
