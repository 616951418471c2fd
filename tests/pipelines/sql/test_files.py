"""What files say of one unit stays with that unit, and a piece is read as it is in the whole."""

import gzip
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.sql.catalog import Catalog, catalog_of
from dpstream.pipelines.sql.decoded import Decoded
from dpstream.pipelines.sql.engine import Engine
from dpstream.pipelines.sql.files import Piece, rows_of, view
from dpstream.pipelines.sql.inputs import files_of

_COLUMNS = {"user": "STRING", "page": "STRING"}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    ".zst": lambda data: b"".join(
        pa.Codec("zstd").compress(part).to_pybytes() for part in (data[:50], data[50:])
    ),
}


def catalog(folder: Path, path: str, columns: dict[str, str] | None = None) -> Catalog:
    ledger = {"path": "l.db", "data_set": "d", "limit": {"epsilon": 1.0, "delta": 1e-6}}
    table = {"name": "t", "path": path, "unit_column": "user", "columns": columns or _COLUMNS}
    key = {"insecure_test_key": "00" * 32}
    unit = {"name": "user", "type": "string"}
    return catalog_of({"ledger": ledger, "unit": unit, "privacy": key, "table": [table]}, folder)


def rows(found: Catalog, query: str = "SELECT * FROM t") -> list[tuple[object, ...]]:
    """The rows of the whole; those of all pieces are the same."""
    table = found.tables["t"]
    with Engine(found, ["t"]) as engine:
        whole = [tuple(row.values()) for row in engine.run(query).to_pylist()]
    paths, apart = files_of(table), list[tuple[object, ...]]()
    if len(paths) > 1:  # of different columns: no runner reads them
        return whole
    for path in paths:
        with Engine(found, ["t"], piece=Piece("t", path)) as engine:
            apart += [tuple(row.values()) for row in engine.run(query).to_pylist()]
    assert sorted(map(str, apart)) == sorted(map(str, whole))
    return whole


def units(found: Catalog) -> set[object]:
    return {row[0] for row in rows(found)}


def test_a_line_inside_a_field_is_no_row(tmp_path: Path) -> None:
    """A reader that begins in the middle of the file would take it for one."""
    inner = "\n".join(f"victim{i},pz" for i in range(20))
    with open(tmp_path / "t.csv", "w") as file:
        file.write("user,page\n")
        file.writelines(f'u{i % 500},"{inner}"\n' for i in range(60_000))
    found = catalog(tmp_path, "t.csv")
    query = 'SELECT COUNT(*) AS n, COUNT(DISTINCT "user") AS u FROM t'
    assert rows(found, query) == [(60_000, 500)]
    text = view(found.tables["t"], None).replace("parallel = false", "parallel = true")
    text = text.replace("strict_mode = false", "strict_mode = true")
    with Engine(found, ["t"]) as engine:  # as it was: the test can fail
        wrong = engine.run(f"SELECT COUNT(*) AS n FROM ({text})")["n"][0].as_py()
    assert wrong > 60_000


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(
    "bad",
    [b'u5,"p" x', b"u5,p,x", b"u5", b"u5,\xff", b'u5,"\xff\n\xfe"', b"u5,p\r", b"u5,p\rq",
     b"\xff,p", b'u5,p"q', b"u5,a\0b", b'u5,"v,p\nv,p"', b"", b"\r", b",",
     b"u5," + b"z" * (1 << 24), b'u5,"' + b"v,p\n" * (1 << 22) + b'"'],
    ids=range(16),
)  # fmt: skip
def test_a_row_of_csv_that_is_none_is_lost_by_itself(
    bad: bytes, packing: str, tmp_path: Path
) -> None:
    lines = [b"user,page", *(b"u%d,p" % i for i in range(300))]
    lines[6] = bad
    (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](b"\n".join(lines) + b"\n"))
    found = units(catalog(tmp_path, f"t.csv{packing}"))
    assert {f"u{i}" for i in range(300) if i != 5} <= found
    assert found <= {f"u{i}" for i in range(300)} | {None, "q"}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_end_as_they_do(end: bytes, tmp_path: Path) -> None:
    lines = [b"user,page", *(b'u%d,"a%sb"' % (i, end) for i in range(9))]
    (tmp_path / "t.csv").write_bytes(end.join(lines))
    assert set(rows(catalog(tmp_path, "t.csv"))) == {
        (f"u{i}", f"a{end.decode()}b") for i in range(9)
    }


@pytest.mark.parametrize("packing", PACKED)
def test_a_header_says_the_order_of_columns(packing: str, tmp_path: Path) -> None:
    """Whatever bytes follow it, and however the file is compressed."""
    text = b"\xef\xbb\xbfpage,User,more\n" + b"p,u1,x\n\xff,\xff,\xff\n" * 30 + b'"a,b",u2,\n'
    (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](text))
    found = set(rows(catalog(tmp_path, f"t.csv{packing}")))
    assert found == {("u1", "p"), ("u2", "a,b")}
    (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](b"page,\xff\np,u1\n"))
    with pytest.raises(RunError, match="without one of its columns"):
        rows(catalog(tmp_path, f"t.csv{packing}"))


def test_what_is_not_compressed_as_it_is_named_is_no_csv(tmp_path: Path) -> None:
    for packing in (".gz", ".zst"):
        (tmp_path / f"t.csv{packing}").write_bytes(b"user,page\nu1,p\n")
        with pytest.raises(RunError) as failed:
            rows(catalog(tmp_path, f"t.csv{packing}"))
        assert "u1" not in str(failed.value)


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(
    "bad",
    [b'{"user":"u5","page":"p', b"[1,2]", b"5", b"null", b"", b'{"user":"u5"} x', b"}", b"\0",
     b'{"user":"u5","page":"\xff"}', b'{"user":"u5","page":"\\ud800"}',
     b'{"user":"u5","page":"' + b"z" * (1 << 25) + b'"}', b'{"user":"u5","page":{"a":[1', b"\x1f"],
    ids=range(13),
)  # fmt: skip
def test_a_line_that_is_no_object_is_lost_by_itself(
    bad: bytes, packing: str, tmp_path: Path
) -> None:
    lines = [b'{"user":"u%d","page":"p"}' % i for i in range(300)]
    lines[5] = bad
    (tmp_path / f"t.jsonl{packing}").write_bytes(PACKED[packing](b"\n".join(lines)))
    found = units(catalog(tmp_path, f"t.jsonl{packing}")) - {None}
    assert found == {f"u{i}" for i in range(300) if i != 5}


def test_values_of_json_are_as_duckdb_reads_them(tmp_path: Path) -> None:
    values = ["1", "1.50", "1e5", "-0", "true", "null", '"a"', '"a\\nb"', '"\\u00e9"', '""',
              '{"a": 2.50}', '[1, "x"]', "123456789012345678901234567890", '"\\"q\\""',
              '"\\ud83d\\ude00"']  # fmt: skip
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"user": "u", "other": 1, "page": {v}}}\n' for v in values)
    )
    read = duckdb.connect().sql(
        f"SELECT page FROM read_json('{tmp_path}/t.jsonl', columns = {{page: 'VARCHAR'}}, "
        "format = 'newline_delimited', ignore_errors = true)"
    )
    found = [row[1] for row in rows(catalog(tmp_path, "t.jsonl"))]
    assert found == [row[0] for row in read.fetchall()]
    assert found[-3:] == ["123456789012345678901234567890", '"q"', "\U0001f600"]


def not_utf8(folder: Path, kind: pa.DataType) -> None:
    """Two files of Parquet in row groups, one with a text that is none, and a column less."""
    raw = [f"x{i}".encode() for i in range(200)]
    raw[7] = b"\xff\xfe"
    made = pa.array(raw, pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    text = pa.string() if pa.types.is_dictionary(kind) else kind
    bad = pa.Array.from_buffers(text, 200, made.buffers())
    bad = bad.dictionary_encode() if pa.types.is_dictionary(kind) else bad
    user = [f"u{i % 20}" for i in range(200)]
    table = pa.table({"page": bad, "User": user, "k": list(range(200))})
    pq.write_table(table, folder / "a.parquet", row_group_size=30)
    pq.write_table(pa.table({"User": ["z"], "k": pa.array([7], pa.int32())}), folder / "b.parquet")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_a_text_of_parquet_that_is_none_is_null(kind: pa.DataType, tmp_path: Path) -> None:
    not_utf8(tmp_path, kind)
    found = catalog(tmp_path, "*.parquet", {"k": "INT64", "user": "STRING", "page": "STRING"})
    expected = [(i, f"u{i % 20}", None if i == 7 else f"x{i}") for i in range(200)]
    assert sorted(rows(found), key=str) == sorted([*expected, (7, "z", None)], key=str)
    query = "SELECT COUNT(page) AS n FROM t WHERE "
    assert rows(found, query + "\"user\" = 'u7'")[0] == (9,)
    rows(catalog(tmp_path, "a.parquet", {"user": "STRING", "page": "STRING"}))
    with Engine(found, ["t"]) as engine:  # again, and both at once
        for _ in range(2):
            assert engine.run(query + "page > 'x'")["n"][0].as_py() == 199
        same = "SELECT COUNT(*) AS n FROM t a JOIN t b ON a.page = b.page"
        assert engine.run(same)["n"][0].as_py() == 199
        with pytest.raises(RunError):
            engine.run("SELECT CAST(page AS INT) FROM t")


def test_a_piece_is_those_row_groups(tmp_path: Path) -> None:
    not_utf8(tmp_path, pa.string())
    found = catalog(tmp_path, "a.parquet", {"k": "INT64", "user": "STRING", "page": "STRING"})
    [path] = files_of(found.tables["t"])
    assert rows_of(found.tables["t"]) == 200
    parts = [Piece("t", path, 0, 60), Piece("t", path, 60, 90), Piece("t", path, 150, 50)]
    numbers = []
    for piece in parts:
        with Engine(found, ["t"], piece=piece) as engine:
            numbers.append(engine.run("SELECT k, page FROM t").column("k").to_pylist())
        stream = pa.RecordBatchReader.from_stream(Decoded(found.tables["t"], piece))
        assert sorted(stream.read_all().column("k").to_pylist()) == sorted(numbers[-1])
    assert sorted(k for some in numbers for k in some) == list(range(200))


@pytest.mark.parametrize(
    ("kind", "most"),
    [(pa.timestamp("us"), 1 << 63), (pa.timestamp("us", "UTC"), 1 << 63), (pa.date32(), 1 << 31)],
    ids=str,
)
def test_bits_of_parquet_that_are_no_time_are_null(
    kind: pa.DataType, most: int, tmp_path: Path
) -> None:
    """DuckDB reads them and ends, for good, where it writes them as text."""
    bits = [1, most - 1, -most, -most + 1, 5]
    raw = pa.array(bits, pa.int32() if most == 1 << 31 else pa.int64())
    at = pa.Array.from_buffers(kind, 5, raw.buffers())
    pq.write_table(pa.table({"user": ["a"] * 5, "seen": at}), tmp_path / "t.parquet")
    name = "DATE" if most == 1 << 31 else "DATETIME" if kind.tz is None else "TIMESTAMP"
    found = catalog(tmp_path, "t.parquet", {"user": "STRING", "seen": name})
    texts = [row[0] for row in rows(found, "SELECT CAST(seen AS VARCHAR) AS s FROM t")]
    assert [text is None for text in texts] == [False, False, True, False, False]
    assert texts[1] == "infinity" and texts[3] == "-infinity"
