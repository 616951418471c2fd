"""The owner is told of a malformed file, with no value of it."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.sql import wellformed
from dpstream.pipelines.sql.registration import register
from dpstream.pipelines.sql.wellformed import check_files
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
    found = catalog(folder, path)
    for check in (lambda: check_files(found, found.tables["t"]), lambda: register(found)):
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
