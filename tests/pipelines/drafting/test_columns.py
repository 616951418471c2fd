"""What a schema says of columns; that nothing but a schema is read."""

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.fields import FieldType
from dpstream.pipelines.drafting.columns import Column, column_of, data_file
from tests.golden.refusals import Refused
from tests.pipelines.drafting import SECRET, commits

HEAD = b'user,"page, or part",at\n'


@pytest.mark.parametrize(
    ("kind", "identity", "time", "number"),
    [
        (pa.large_string(), "string", "text", False),
        (pa.dictionary(pa.int8(), pa.string_view()), "string", "text", False),
        (pa.uint16(), "int", "micros", True),
        (pa.bool_(), "bool", None, False),
        (pa.binary(16), "bytes", None, False),
        (pa.decimal128(9, 2), None, None, True),
        (pa.float32(), None, None, True),
        (pa.timestamp("ns"), None, "instant", False),
        (pa.date32(), None, "instant", False),
        (pa.struct({"a": pa.string()}), None, None, False),
        (pa.list_(pa.string()), None, None, False),
    ],
    ids=str,
)
def test_types(
    kind: pa.DataType, identity: FieldType | None, time: str | None, number: bool
) -> None:
    assert column_of("c", kind)._replace(sql=None) == Column("c", identity, time, number, None)


def test_a_parquet_schema_and_the_first_of_a_pattern(tmp_path: Path) -> None:
    commits(tmp_path / "b.parquet")
    file = data_file(str(tmp_path / "*.parquet"))
    assert file.kind == "parquet" and file.first.name == "b.parquet"
    assert [c.name for c in file.columns or ()][1:3] == ["author", "path"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, pa.compress])
def test_a_csv_header_however_it_is_packed(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    name = {gzip.compress: "a.csv.gz", bz2.compress: "a.csv.bz2", pa.compress: "a.csv.zst"}
    path = tmp_path / name.get(pack, "a.csv")
    body = b"\xef\xbb\xbf" + HEAD + b"x,y,z\n"
    if pack is pa.compress:
        with pa.CompressedOutputStream(str(path), "zstd") as out:
            out.write(body)
    else:
        path.write_bytes(pack(body))
    file = data_file(str(path))
    assert [c.name for c in file.columns or ()] == ["user", "page, or part", "at"]
    assert not any(c.listed for c in file.columns or ())


def test_json_lines_have_no_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"{SECRET}": 1}}\n')
    assert data_file(str(path)).columns is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", SECRET.encode() + b",2024-01-01T00:00:00Z,7\n"),
        ("a.csv", SECRET.encode() + b",a@b.example\n"),
        ("a.csv.gz", b"user,page\n"),
        ("a.csv.xz", b"\xfd7zXZ\x00"),
        ("a.parquet", SECRET.encode()),
        ("a.parquet", b""),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0)),
        ("a.xlsx", b""),
        ("b.csv", None),
    ],
)  # fmt: skip
def test_what_is_no_data(
    name: str, content: bytes | None, tmp_path: Path, refused: Refused
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(data_file, str(tmp_path / name))
    assert error.field == "FILE" and SECRET not in str(error)


def test_a_folder_is_answered_with_a_pattern(tmp_path: Path, refused: Refused) -> None:
    refused(data_file, str(tmp_path))


def test_no_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = commits(tmp_path / "a.parquet")
    raw = path.read_bytes()
    foot = int.from_bytes(raw[-8:-4], "little") + 8
    path.write_bytes(b"PAR1" + b"\xff" * (len(raw) - foot - 4) + raw[-foot:])
    assert len(data_file(str(path)).columns or ()) == 7
