"""Parquet by row groups: positions, missing columns, and a group that breaks off."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.files.parquet import (
    _plain,
    is_os_error,
    read_row_group,
    row_groups,
)
from dpstream.pipelines.connectors.records.rows import Refused, Rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = pa.table({"a": list(range(10)), "b": [f"v{n}" for n in range(10)]})
    pq.write_table(
        table,
        tmp_path / "x.parquet",
        row_group_size=4,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    return tmp_path / "x.parquet"


def test_groups_begin_where_those_before_end(path: Path) -> None:
    assert row_groups(str(path), ["a"]) == [0, 4, 8]
    rows = [
        part for n, at in enumerate([0, 4, 8]) for part in read_row_group(str(path), ["b"], n, at)
    ]
    assert all(isinstance(part, Rows) for part in rows)
    assert [part.offset for part in rows] == [0, 4, 8]
    assert [v for part in rows for v in part.batch["b"].to_pylist()] == [f"v{n}" for n in range(10)]


def test_a_missing_column_names_those_that_are_there(path: Path) -> None:
    with pytest.raises(UsageError) as error:
        row_groups(str(path), ["a", "z"])
    assert error.value.field == "column 'z'" and "a, b" in error.value.fix


def test_what_is_not_parquet_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 no PAR1")
    assert row_groups(str(tmp_path / "no.parquet"), ["a"]) is None
    with pytest.raises(OSError) as error:
        row_groups(str(tmp_path / "none.parquet"), ["a"])
    assert is_os_error(error.value) and not is_os_error(ValueError())


def test_a_damaged_group_is_refused_from_its_first_row(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"v5")
    data[at] ^= 1
    path.write_bytes(data)
    [refused] = read_row_group(str(path), ["b"], 1, 4)
    assert isinstance(refused, Refused)
    assert (refused.offsets.tolist(), refused.reasons) == ([4], ["unreadable_rest"])
    [good] = read_row_group(str(path), ["b"], 0, 0)
    assert isinstance(good, Rows)


def test_dictionaries_are_decoded() -> None:
    column = pa.array(["x", None, "x"]).dictionary_encode()
    assert _plain(column).equals(pa.array(["x", None, "x"]))
