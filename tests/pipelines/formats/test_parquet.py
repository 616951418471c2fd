"""Parquet by row groups: positions, missing columns, a group that breaks off, bounded memory."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import instance
from dpstream.pipelines.formats.parquet import (
    MAX_UNPACKED,
    UnpacksTooLargeError,
    is_os_error,
    read_row_group,
    row_groups,
)
from dpstream.pipelines.formats.rows import Refused, Rows
from tests.golden import refusals


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
        instance(part, Rows)
        for n, at in enumerate([0, 4, 8])
        for part in read_row_group(str(path), ["b"], n, at)
    ]
    assert [part.offset for part in rows] == [0, 4, 8]
    assert [v for part in rows for v in part.batch["b"].to_pylist()] == [f"v{n}" for n in range(10)]


def test_a_file_in_the_place_of_another_has_its_own_footer(path: Path) -> None:
    """Of the same size and the same time of change, which a copy keeps."""
    other = path.with_name("other.parquet")
    columns = pq.read_table(path)
    pq.write_table(columns.select(["b", "a"]), other, row_group_size=4, write_page_checksum=True,
                   use_dictionary=False, compression="none")  # fmt: skip
    (before,) = read_row_group(str(path), ["a", "b"], 1, 4)
    was, size = path.stat(), other.stat().st_size
    assert was.st_size == size
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)
    (after,) = read_row_group(str(path), ["a", "b"], 1, 4)
    assert instance(after, Rows).batch.equals(instance(before, Rows).batch)


def test_a_missing_column_names_those_that_are_there(path: Path, refused: refusals.Refused) -> None:
    refused(row_groups, str(path), ["a", "z"])


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


LONG = "x" * (1 << 20)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dictionary": {},
    "fallback": {"dictionary_pagesize_limit": 2_000},
    "plain": {"use_dictionary": False},
    "delta": {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}},
    "lengths": {"use_dictionary": False, "column_encoding": {"a": "DELTA_LENGTH_BYTE_ARRAY"}},
}


def read(path: Path, columns: list[str]) -> dict[str, list[object]]:
    starts = row_groups(str(path), columns)
    assert starts is not None
    parts = [
        instance(part, Rows)
        for n, at in enumerate(starts)
        for part in read_row_group(str(path), columns, n, at)
    ]
    offsets = np.cumsum([0, *(part.batch.num_rows for part in parts)])[:-1]
    assert [part.offset for part in parts] == offsets.tolist()
    return {name: [v for p in parts for v in p.batch[name].to_pylist()] for name in columns}


KINDS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary())
#: Arrow writes, and cannot read, delta pages of columns that it read as codes before.
CODED = [(layout, pa.dictionary(pa.int16(), pa.string())) for layout in list(LAYOUTS)[:3]]


@pytest.mark.parametrize(("layout", "kind"), [*itertools.product(LAYOUTS, KINDS), *CODED], ids=str)
def test_texts_are_the_same_in_every_layout(tmp_path: Path, layout: str, kind: pa.DataType) -> None:
    """Long ones, which no job can use, are null; every other value is what was written."""
    rng = np.random.default_rng(7)
    words = [*(f"w{n}" for n in range(300)), "é", "", "y" * 1_024, "y" * 1_025, "z" * 90_000]
    chosen = [words[n] for n in rng.integers(0, len(words), 2_000)]
    values = [None if n % 11 == 0 else word for n, word in enumerate(chosen)]
    texts = pa.array(values, pa.string()).cast(kind)
    table = pa.table({"a": texts, "n": range(2_000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1_500, **LAYOUTS[layout])
    expected = [None if v is None or len(v.encode()) > 1_024 else v for v in values]
    if kind == pa.binary():
        expected = [None if v is None else v.encode() for v in expected]
    assert read(tmp_path / "x.parquet", ["n", "a"]) == {"n": list(range(2_000)), "a": expected}


def test_a_text_that_is_not_utf8_is_null_wherever_it_stands(tmp_path: Path) -> None:
    values = [b"ok", b"\xff\xfe", None, b"\xff" * 2_000] * 20_000
    texts = pa.array(values, pa.binary()).view(pa.string())
    views = pa.array(values, pa.binary()).cast(pa.binary_view()).view(pa.string_view())
    for number, options in enumerate(({}, {"use_dictionary": False})):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"a": texts, "b": views}), path, **options)
        expected = ["ok", None, None, None] * 20_000
        assert read(path, ["a", "b"]) == {"a": expected, "b": expected}


def test_nested_columns_are_null_and_never_decoded(tmp_path: Path) -> None:
    table = pa.table({"a": [[1, 2], [3]], "b": [{"c": 1}] * 2, "d": [1, 2], "c.e": [3, 4]})
    pq.write_table(table, tmp_path / "x.parquet")
    given = read(tmp_path / "x.parquet", ["d", "a", "b", "c.e"])
    assert given == {"d": [1, 2], "a": [None] * 2, "b": [None] * 2, "c.e": [3, 4]}
    assert read(tmp_path / "x.parquet", ["a"]) == {"a": [None] * 2}


def small_bomb(path: Path, layout: str) -> Path:
    """A file of kilobytes whose texts are 600 MiB once every row has its own."""
    rows, options = 600, dict[str, Any]()
    words = [LONG, "ok"]
    if layout == "delta":
        texts = pa.concat_arrays([pa.array([LONG] * rows), pa.array(["ok"])])
        options = LAYOUTS["delta"]
    else:
        few: list[int | None] = [0] * rows
        if layout == "fallback":
            words += [f"user {n:09}" for n in range(150_000)]
            few = [*[None] * 2_000, *range(2, 150_002), *few]
        texts = pa.DictionaryArray.from_arrays(pa.array([*few, 1], pa.int32()), words)
    pq.write_table(
        pa.table({"a": texts}), path, compression="zstd", write_statistics=False,
        dictionary_pagesize_limit=1 << 30, **options,
    )  # fmt: skip
    return path


_PEAK = """
import re, sys
from pathlib import Path
from dpstream.pipelines.formats.parquet import read_row_group, row_groups
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
before, last = peak(), None
for number, at in enumerate(row_groups(sys.argv[1], ["a"])):
    for part in read_row_group(sys.argv[1], ["a"], number, at):
        last = part.batch["a"][-1].as_py()
print(last, peak() - before)
"""


SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("fallback", "delta")]


@pytest.mark.parametrize("layout", ["dictionary", *SLOW])
def test_one_long_text_of_all_rows_takes_the_memory_of_one(tmp_path: Path, layout: str) -> None:
    """Not of all rows, as where rows get their texts before their lengths are looked at.

    Linux hands the peak of `resource.getrusage` on from a parent to its child, so it is not used.
    """
    path = small_bomb(tmp_path / "x.parquet", layout)
    assert path.stat().st_size < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True
    )
    last, mib = done.stdout.split()
    assert last == "ok" and int(mib) < 400


def plain_bomb(path: Path) -> Path:
    rows = (MAX_UNPACKED >> 20) + 2
    table = pa.table({"a": pa.array([LONG] * rows), "n": range(rows)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    return path


def test_pages_that_unpack_to_much_more_are_refused_by_the_footer(tmp_path: Path) -> None:
    path = plain_bomb(tmp_path / "x.parquet")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UnpacksTooLargeError) as error:
        row_groups(str(path), ["n", "a"], "table.path", "file 3")
    assert error.value.field == "table.path" and error.value.rule.startswith("file 3 ")
    assert row_groups(str(path), ["n"]) == [0]  # of columns that are read
    fix = error.value.fix.partition("DuckDB: ")[2]
    new = fix.replace("'FILE'", f"'{path}'").replace("data.parquet", f"{tmp_path}/new.parquet")
    duckdb.sql(new)
    assert row_groups(f"{tmp_path}/new.parquet", ["n", "a"]) is not None


def test_what_is_large_and_does_not_compress_is_read(tmp_path: Path) -> None:
    path = plain_bomb(tmp_path / "x.parquet")
    with mock.patch("dpstream.pipelines.formats.parquet.MAX_RATIO", 1 << 30):
        assert row_groups(str(path), ["a"]) == [0]


@pytest.mark.parametrize("limit", [MemoryError(), pa.ArrowMemoryError()])
def test_memory_that_ends_is_no_damage(path: Path, limit: Exception) -> None:
    """Rows that could not be read for want of memory must not go to the dead letter."""
    with mock.patch.object(pq, "ParquetFile", side_effect=limit):
        with pytest.raises(MemoryError):
            list(read_row_group(str(path), ["b"], 0, 0))
        with pytest.raises(MemoryError):
            row_groups(str(path), ["b"])
