"""Groups get codes and ids of their own, whatever shard they come in."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from dpstream.dp_transforms.noise.ids import KINDS
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.groups import Groups
from tests.pipelines.sql.asking import KEY


def _ring() -> KeyRing:
    return KeyRing(bytes.fromhex(KEY))


def _chunked(values: list[object], kind: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, kind)])


def test_codes_are_those_of_equal_rows_over_all_shards() -> None:
    groups = Groups(["a", "b"], ["string", "int"], _ring().key)
    first = groups.codes([_chunked(["x", "y", None, "x"]), _chunked([1, 1, None, 1])])
    second = groups.codes([_chunked(["y", "x", None]), _chunked([1, 2, None])])
    assert first.tolist() == [0, 1, 2, 0] and second.tolist() == [1, 3, 2]
    assert groups.values is not None and groups.values.to_pylist() == [
        {"a": "x", "b": 1}, {"a": "y", "b": 1}, {"a": None, "b": None}, {"a": "x", "b": 2},
    ]  # fmt: skip
    assert len(np.unique(groups.ids, axis=0)) == 4


def test_two_spellings_of_a_word_are_two_groups_with_two_ids() -> None:
    """One id for both would be one noise for two sums, whose difference would be exact."""
    groups = Groups(["a"], ["string"], _ring().key)
    assert groups.codes([_chunked(["e\u0301", "\u00e9"])]).tolist() == [0, 1]
    assert (groups.ids[0] != groups.ids[1]).all()


def test_ids_are_of_the_value_not_of_its_place() -> None:
    one, other = (Groups(["a"], ["int"], _ring().key) for _ in range(2))
    one.codes([_chunked([5, 6])])
    other.codes([_chunked([6, 7, 5])])
    assert (one.ids[0] == other.ids[2]).all() and (one.ids[1] == other.ids[0]).all()


def test_public_groups_are_all_there_are() -> None:
    groups = Groups(["a"], ["string"], _ring().key, pa.table({"a": ["q", None, "p"]}))
    assert groups.codes([_chunked(["p", "z", None])]).tolist() == [2, -1, 1]
    assert len(groups.ids) == 3


def test_no_group_columns_is_one_group() -> None:
    groups = Groups([], [], _ring().key)
    assert len(groups.ids) == 1 and groups.values is None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", -5), ("decimal", decimal.Decimal("1.50")), ("bool", True),
        ("string", "x" * 3000), ("bytes", b"\x00y" * 3000),
        ("date", datetime.date(2024, 2, 29)), ("timestamp", datetime.datetime(1960, 1, 2)),
    ],
)  # fmt: skip
def test_every_kind_has_values_and_null(kind: str, value: object) -> None:
    assert kind in KINDS
    groups = Groups(["a"], [kind], _ring().key)
    assert groups.codes([_chunked([value, None, value])]).tolist() == [0, 1, 0]
    assert (groups.ids[0] != groups.ids[1]).any()


def test_no_rows() -> None:
    groups = Groups(["a", "b"], ["string", "date"], _ring().key)
    empty = [_chunked([], pa.string()), _chunked([], pa.date32())]
    assert groups.codes(empty).tolist() == [] and len(groups.ids) == 0
    assert groups.values is not None
    assert groups.values.schema == pa.schema({"a": pa.string(), "b": pa.date32()})
    full = [_chunked(["x"], pa.string()), _chunked([None], pa.date32())]
    assert groups.codes(full).tolist() == [0] and groups.values.num_rows == 1


def test_public_groups_that_are_none() -> None:
    groups = Groups(["a"], ["string"], _ring().key, pa.table({"a": pa.array([], pa.string())}))
    assert groups.codes([_chunked(["x"])]).tolist() == [-1] and len(groups.ids) == 0
    assert groups.values is not None and groups.values.column_names == ["a"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 0), ("decimal", decimal.Decimal(0)), ("bool", False), ("string", ""),
        ("bytes", b""), ("date", datetime.date(1970, 1, 1)),
        ("timestamp", datetime.datetime(1970, 1, 1)),
    ],
)  # fmt: skip
def test_null_is_no_filler(kind: str, value: object) -> None:
    """One id for both would be one noise for two groups."""
    groups = Groups(["a"], [kind], _ring().key)
    assert groups.codes([_chunked([value, None])]).tolist() == [0, 1]
    assert (groups.ids[0] != groups.ids[1]).any()


def test_the_first_group_stays_the_first() -> None:
    groups = Groups(["a"], ["string"], _ring().key)
    for _ in range(3):
        assert groups.codes([_chunked(["x", "y"])]).tolist() == [0, 1]
    assert groups.codes([_chunked(["z", "x"])]).tolist() == [2, 0] and len(groups.ids) == 3
