"""The owner is told of a malformed file, with no value of it."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.tables import wellformed
from dpstream.pipelines.tables.registration import register
from dpstream.pipelines.tables.wellformed import check_files
from tests.pipelines.formats.test_parquet import plain_bomb, small_bomb
from tests.pipelines.sql.reading import PACKED, catalog, not_utf8

_GOOD = [b'u1,"a""b"', b'u2,""', b'"u3","a,b\r\nc"', b'u4,""""', b"u5,\xc3\xa9", b'u6,"', b'"']
_BAD = {
    b'u7,"secret': "a quote",
    b'u7,"secret" x': "a quote",
    b'u7,secret"x"': "a quote",
    b'u7,"secret"b"': "a quote",
    b'u7,"secret""': "a quote",
    b"u7,secret\xff": "not UTF-8",
    b"secret": "too short",
    b"u7," + b"secret" * (1 << 22): "too long",
}


@pytest.fixture(params=[7, 1 << 22])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wellformed, "_BLOCK", request.param)


def refusal(folder: Path, path: str) -> str:
    declared = catalog(folder, path)
    for check in (lambda: check_files(declared, declared.tables["t"]), lambda: register(declared)):
        with pytest.raises(RunError, match="has a malformed file") as refused:
            check()
        assert "secret" not in str(refused.value) and "u7" not in str(refused.value)
    return str(refused.value)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("packing", PACKED)
def test_a_good_file_of_csv_passes(packing: str, tmp_path: Path) -> None:
    for first in (b"", b"\xef\xbb\xbf"):
        for last in (b"", b"\n"):
            text = b"\n".join([first + b'"user",page', *_GOOD]) + last
            (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](text))
            register(catalog(tmp_path, f"t.csv{packing}"))


@pytest.mark.parametrize("bad", _BAD, ids=range(len(_BAD)))
def test_a_bad_row_of_csv_is_told(bad: bytes, tmp_path: Path) -> None:
    for rest in ([], _GOOD):
        (tmp_path / "t.csv").write_bytes(b"\n".join([b"user,page", *_GOOD, bad, *rest]))
        assert _BAD[bad] in refusal(tmp_path, "t.csv") or rest


@pytest.mark.usefixtures("block")
def test_a_bad_quote_is_told_wherever_blocks_end(tmp_path: Path) -> None:
    for bad in list(_BAD)[:6]:
        (tmp_path / "t.csv").write_bytes(b"\n".join([b"user,page", *_GOOD, bad]))
        assert _BAD[bad] in refusal(tmp_path, "t.csv")


@pytest.mark.parametrize("packing", PACKED)
def test_json_lines_are_objects(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.jsonl{packing}"
    good = [b'{"user":"u%d", "page":[1]}' % i for i in range(9)] + [b"", b" \r"]
    path.write_bytes(PACKED[packing](b"\n".join(good)))
    register(catalog(tmp_path, path.name))
    for bad in (b"[]", b'{"user":"secret', b"secret", b'{"page":"\xffsecret"}'):
        path.write_bytes(PACKED[packing](b"\n".join([*good, bad, *good])))
        refusal(tmp_path, path.name)


def test_texts_of_parquet_and_whole_archives(tmp_path: Path) -> None:
    not_utf8(tmp_path, pa.string())
    assert "UTF-8" in refusal(tmp_path, "*.parquet")
    register(catalog(tmp_path, "b.parquet", {"user": "STRING"}))
    packed = PACKED[".gz"](b"user,page\n" + b"u1,secret\n" * 500)
    (tmp_path / "t.csv.gz").write_bytes(packed[:-20])
    assert "unpacked" in refusal(tmp_path, "t.csv.gz")


_PEAK = """
import re, sys
from pathlib import Path
from dpstream.pipelines.tables.wellformed import check_files
from tests.pipelines.sql.reading import catalog
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
tables = catalog(Path(sys.argv[1]), "t.parquet", {"user": "STRING", "a": "STRING"})
before = peak()
check_files(tables, tables.tables["t"])
print(peak() - before)
"""


def test_the_check_of_parquet_takes_little_memory(tmp_path: Path) -> None:
    small_bomb(tmp_path / "t.parquet", "dictionary")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300


def test_parquet_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    plain_bomb(tmp_path / "t.parquet")
    tables = catalog(tmp_path, "t.parquet", {"user": "STRING", "a": "STRING"})
    with pytest.raises(UsageError) as error:
        check_files(tables, tables.tables["t"])
    assert error.value.field == "table t"


def test_memory_that_ends_is_no_malformed_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "t.parquet")
    tables = catalog(tmp_path, "t.parquet", {"user": "STRING", "a": "STRING"})
    ends = mock.patch.object(pq, "ParquetFile", side_effect=pa.ArrowMemoryError())
    with ends, pytest.raises(MemoryError):
        check_files(tables, tables.tables["t"])
