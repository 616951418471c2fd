"""A key that a catalog declares is unique, or the catalog is refused: without saying which."""

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.tables.registration import check_keys
from tests.pipelines.sql.shop import shop

Row = dict[str, int | None]
SCHEMA = pa.schema([("UID", pa.int64()), ("age", pa.int64())])


def reader(rows: dict[str, list[Row]]) -> Callable[[str], Iterator[pa.RecordBatch]]:
    def read(table: str) -> Iterator[pa.RecordBatch]:
        for row in rows.get(table, []):  # a batch each: keys meet across batches
            yield pa.RecordBatch.from_pylist([row], schema=SCHEMA)

    return read


def test_keys_of_the_shop() -> None:
    assert ("users", ("uid",)) in [(t, tuple(c)) for t, c in shop().declared_keys]
    users: list[Row] = [{"UID": 1, "age": 3}, {"UID": 2, "age": 3}, {"UID": None, "age": 1}]
    check_keys(shop(), reader({"users": [*users, {"UID": None, "age": 2}]}))
    with pytest.raises(PolicyError) as error:
        check_keys(shop(), reader({"users": [*users, {"UID": 77123, "age": 1}] * 2}))
    assert error.value.field == "table users" and "77123" not in str(error.value)
