"""Files as relations: a row is read as if no other was there.

Neighbouring data sets differ in one unit's rows.  If they decided how the rows of others are read,
no noise would hide it.
"""

import datetime as dt
import glob
import json
import os
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.formats import texts
from dpstream.pipelines.formats.rows import Part
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.tables import arrow, files
from dpstream.pipelines.tables.catalog import TYPES, Catalog, Table, canonical
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError
from dpstream.pipelines.tables.files import (
    Piece,
    casts,
    files_of,
    literal,
    place_of,
    quoted,
    rows_of,
    sqlite_path,
    stamps,
    table_parts,
)
from dpstream.pipelines.tables.registration import require_fitting
from tests import projects
from tests.golden.pinned import refusal
from tests.golden.refusals import Refused
from tests.pipelines.sql.asking import PACKED, catalog, data_set, not_utf8, rows, units
from tests.pipelines.sql.shop import shop


@pytest.fixture
def of_visits(tmp_path: Path) -> Catalog:
    return load_catalog(data_set(tmp_path))


def first(of_visits: Catalog) -> Table:
    return next(t for t in of_visits.tables.values() if files_of(t))


def test_a_changed_byte_is_another_content(of_visits: Catalog) -> None:
    table = first(of_visits)
    [path, *_] = files_of(table)
    before, at = table_parts(table), stamps(of_visits, [table.name])
    assert before == table_parts(table) and at == stamps(of_visits, [table.name])
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)
    os.utime(path, ns=(at[0][2], at[0][2]))
    assert table_parts(table) != before  # though time and size are the same
    Path(path).write_bytes(data + b"x")
    assert stamps(of_visits, [table.name]) != at


def test_what_is_no_file_is_refused(of_visits: Catalog, tmp_path: Path) -> None:
    table = first(of_visits)
    os.mkfifo(tmp_path / "pipe.parquet")
    for place in (f"{tmp_path}/none-*.parquet", f"{tmp_path}/pipe.parquet", str(tmp_path)):
        assert (
            refusal(files_of, msgspec.structs.replace(table, place=place))
            == "UsageError table visits"
        )


def test_a_sqlite_address_is_a_path(of_visits: Catalog) -> None:
    table = first(of_visits)
    for place in ("sqlite:///a/b.db", "sqlite:a/b.db", "a/b.db"):
        assert sqlite_path(msgspec.structs.replace(table, place=place)) == "a/b.db"


def test_a_place_is_the_same_in_every_spelling_and_in_a_moved_folder(of_visits: Catalog) -> None:
    table, home = first(of_visits), of_visits.folder
    for kind, spelled in (
        ("csv", ["{}/a.csv", "{}/./b/../a.csv"]),
        ("sqlite", ["sqlite:///{}/a.db", "sqlite:{}/b/../a.db"]),
    ):
        places = {
            place_of(msgspec.structs.replace(table, kind=kind, place=text.format(folder)), folder)
            for text in spelled
            for folder in (home, home / "moved")
        }
        assert len(places) == 1
    assert place_of(table, home) != place_of(table, home / "other")


def test_a_server_s_address_is_its_place_but_for_how_to_get_in(of_visits: Catalog) -> None:
    def parts(place: str) -> list[bytes]:
        table = msgspec.structs.replace(first(of_visits), kind="postgresql", place=place)
        return [*table_parts(table), place_of(table, of_visits.folder)]

    plain = "postgresql://h:5/d"
    others = ["postgresql://bob@h:5/d", f"{plain}?options=-csearch_path%3Dx", f"{plain}?user=al",
              "postgresql://h:6/d", "postgresql://h:5/e", "postgresql://h:5,i:6/d"]  # fmt: skip
    identities = [parts(place) for place in [plain, *others]]
    assert len({tuple(p) for p in identities}) == len(identities)
    assert parts("postgresql://bob:secret@h:5/d") == parts("postgresql://bob@h:5/d")
    assert parts(f"{plain}?password=secret&sslmode=require") == parts(plain)
    assert b"secret" not in b"".join(parts("postgresql://bob:secret@h:5,i:6/d?password=secret"))


def test_names_and_texts_are_quoted() -> None:
    assert quoted('a"b') == '"a""b"' and literal("a'b") == "'a''b'"


def test_units_that_are_texts_have_one_spelling(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,page\ne\u0301,e\u0301\n")
    assert rows(catalog(tmp_path, "t.csv")) == [("\u00e9", "e\u0301")]
    assert "nfc" not in casts(shop().tables["visits"])  # its unit is a number


@pytest.mark.parametrize("kind", ["STRING", "BYTES"])
def test_an_empty_unit_is_none_as_in_streams(kind: str, tmp_path: Path) -> None:
    """NULL, so that its rows are dropped; an empty text of another column is a value."""
    user = pa.array(["", "a", None], pa.string() if kind == "STRING" else pa.binary())
    pq.write_table(pa.table({"user": user, "page": ["", "", ""]}), tmp_path / "t.parquet")
    table = {"path": "t.parquet", "unit_column": "user"}
    loaded = catalog_of(projects.of_tables(tmp_path, ("user", kind.lower()), {"t": table}))
    assert [row[0] for row in rows(loaded)] == [None, user[1].as_py(), None]
    assert {row[1] for row in rows(loaded)} == {""}


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
    parquet_catalog = catalog(tmp_path, "t.parquet", {"user": "STRING", "seen": name})
    texts = [row[0] for row in rows(parquet_catalog, "SELECT CAST(seen AS VARCHAR) AS s FROM t")]
    assert [text is None for text in texts] == [False, False, True, False, False]
    assert texts[1] == "infinity" and texts[3] == "-infinity"


def test_a_quote_takes_no_other_row(tmp_path: Path) -> None:
    """In DuckDB's own reader one stray quote of a unit took the rows of all behind it."""
    lines = [f"u{i},p" for i in range(8_000)]
    lines[40] = 'u40,"open'
    (tmp_path / "t.csv").write_text("user,page\n" + "\n".join(lines) + "\n")
    query = 'SELECT COUNT(*) AS n, COUNT(DISTINCT "user") AS u FROM t'
    assert rows(catalog(tmp_path, "t.csv"), query) == [(7_999, 7_999)]
    read = (
        f"read_csv('{tmp_path}/t.csv', columns = {{'user': 'VARCHAR', 'page': 'VARCHAR'}}, "
        "auto_detect = false, header = true, quote = '\"', escape = '\"', delim = ',', "
        "ignore_errors = true, strict_mode = false)"
    )
    [theirs] = duckdb.connect().sql(f"SELECT COUNT(*) FROM {read}").fetchall()
    assert theirs[0] < 7_000  # as it was: the test can fail


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
    unit_names = units(catalog(tmp_path, f"t.csv{packing}"))
    assert {f"u{i}" for i in range(300) if i != 5} <= unit_names
    assert unit_names <= {f"u{i}" for i in range(300)} | {None, "v"}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_nul_bytes_change_no_other_row(kind: str, tmp_path: Path) -> None:
    """Many rows of long fields: what stops other readers at a NUL byte."""
    form = '{{"user":"u{}","page":"p{}"}}' if kind == "jsonl" else "u{},p{}"
    lines = ["user,page"] if kind == "csv" else []
    for i in range(20_000):
        lines.append(form.format(i, "x" * 60))
        if i % 97 == 0:
            lines.append(form.format("y" * (i % 53) + "\0", "\0" * (i % 19)))
    (tmp_path / f"t.{kind}").write_text("\n".join(lines) + "\n")
    query = "SELECT COUNT(*) AS n, COUNT(DISTINCT \"user\") AS u FROM t WHERE page LIKE 'pxx%'"
    assert rows(catalog(tmp_path, f"t.{kind}"), query) == [(20_000, 20_000)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_end_as_they_do(end: bytes, tmp_path: Path) -> None:
    lines = [b"user,page", *(b'u%d,"a,b"' % i for i in range(9)), b'u9,"a%sb"' % end]
    (tmp_path / "t.csv").write_bytes(end.join(lines))
    assert set(rows(catalog(tmp_path, "t.csv"))) == {(f"u{i}", "a,b") for i in range(9)}


@pytest.mark.parametrize("packing", PACKED)
def test_a_header_says_the_order_of_columns(packing: str, tmp_path: Path) -> None:
    """Whatever bytes follow it, and however the file is compressed."""
    text = b"\xef\xbb\xbfpage,User,more\n" + b"p,u1,x\n\xff,\xff,\xff\n" * 30 + b'"a,b",u2,\n'
    (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](text))
    row_set = set(rows(catalog(tmp_path, f"t.csv{packing}")))
    assert row_set == {("u1", "p"), ("u2", "a,b"), (None, None)}
    (tmp_path / f"t.csv{packing}").write_bytes(PACKED[packing](b"page,\xff\np,u1\n"))
    assert refusal(rows, catalog(tmp_path, f"t.csv{packing}")) == "RunError table t"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_compressed_file_that_is_not_whole_is_refused(
    kind: str, packing: str, tmp_path: Path, refused: Refused
) -> None:
    """Else the rows behind the damage would be missing in an answer that is charged."""
    path = tmp_path / f"t.{kind}{packing}"
    line = b'{"user":"u%d","page":"p"}' if kind == "jsonl" else b"u%d,p"
    text = b"\n".join([b"user,page", *(line % i for i in range(400_000))][kind == "jsonl" :])
    packed = PACKED[packing](text)
    path.write_bytes(packed)
    assert rows(catalog(tmp_path, path.name), "SELECT COUNT(*) AS n FROM t") == [(400_000,)]
    for damaged in (packed[: len(packed) // 2], packed + b"u1", b"user,page\nu1,p\n"):
        path.write_bytes(damaged)
        failed = refused(rows, catalog(tmp_path, path.name))
        assert "u1" not in str(failed)


def test_a_scan_that_breaks_off_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks it, and however many rows were handed over: a disk, or memory that ends."""
    (tmp_path / "t.csv").write_text("user,page\n" + "u1,p\n" * 3_000)
    tables = catalog(tmp_path, "t.csv")
    honest = texts.read_text

    def breaks(error: Exception) -> Callable[..., Iterator[Part]]:
        def read(*args: Any, **more: Any) -> Iterator[Part]:
            yield from honest(*args, **more)
            raise error

        return read

    for error, kind in ((OSError(5, "u1"), RunError), (MemoryError("u1"), MemoryLimitError)):
        with Engine(tables, ["t"]) as engine, monkeypatch.context() as patch:
            patch.setattr(arrow, "read_text", breaks(error))
            for query in ("SELECT * FROM t", "SELECT COUNT(*) AS n FROM t AS a, t AS b LIMIT 1"):
                with pytest.raises(kind) as failed:
                    engine.run(query)
                assert failed.type is kind and "u1" not in str(failed.value)
                assert kind is MemoryLimitError or failed.value.field == "table t"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_that_nobody_may_read_is_refused_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"t.{kind}").write_text("user,page\n")
    tables = catalog(tmp_path, f"t.{kind}")

    def refuses(*args: Any, **more: Any) -> Any:
        raise PermissionError(13, "u1")

    monkeypatch.setattr(files, "open", refuses, raising=False)
    assert refusal(require_fitting, tables, ["t"]) == "RunError table t"


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
    unit_names = units(catalog(tmp_path, f"t.jsonl{packing}")) - {None}
    assert unit_names == {f"u{i}" for i in range(300) if i != 5}


def test_values_of_json_are_texts(tmp_path: Path) -> None:
    """Texts as they are, others as their shortest JSON text: a list that no statement names must
    cost nobody's row."""
    values = {
        "1": "1", "1.50": "1.5", "-0": "0", "true": "true", "null": None, '"a"': "a",
        '"a\\nb"': "a\nb", '"\\u00e9"': "\u00e9", '""': "", '"\\"q\\""': '"q"',
        "123456789012345678901234567890": "123456789012345678901234567890",
        '"\\ud83d\\ude00"': "\U0001f600", '{"a": 2.50}': '{"a":2.5}', '[1, "x"]': '[1,"x"]',
    }  # fmt: skip
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"user": "u", "other": [1], "page": {v}}}\n' for v in values)
    )
    read = [row[1] for row in rows(catalog(tmp_path, "t.jsonl"))]
    assert read == list(values.values())


def test_fields_of_json_are_as_the_project_file_writes_them(tmp_path: Path) -> None:
    """Statements name columns in any case; objects do not."""
    (tmp_path / "t.jsonl").write_text('{"userId": "u1", "Page": "p"}\n{"userid": "u2"}\n')
    columns = {"userId": "STRING", "Page": "STRING"}
    table = {"path": "t.jsonl", "unit_column": "userId", "columns": columns}
    unit, secret = ("user", "string"), "00" * 32
    project = projects.of_tables(tmp_path, unit, {"t": table}, insecure_test_secret=secret)
    declared = catalog_of(project)
    assert rows(declared, "SELECT USERID, page FROM t") == [("u1", "p"), (None, None)]
    other = msgspec.structs.replace(declared.tables["t"], fields=("userid", "page"))
    assert canonical(other) != canonical(declared.tables["t"])
    assert canonical(other) == canonical(msgspec.structs.replace(other, fields=()))


def test_a_piece_is_those_row_groups(tmp_path: Path) -> None:
    not_utf8(tmp_path, pa.string())
    declared = catalog(tmp_path, "a.parquet", {"k": "INT64", "user": "STRING", "page": "STRING"})
    [path] = files_of(declared.tables["t"])
    assert rows_of(declared.tables["t"]) == 200
    parts = [Piece("t", path, 0, 60), Piece("t", path, 60, 90), Piece("t", path, 150, 50)]
    numbers = []
    for piece in parts:
        with Engine(declared, ["t"], piece=piece) as engine:
            numbers.append(engine.run("SELECT k, page FROM t").column("k").to_pylist())
        assert sorted(numbers[-1]) == list(range(piece.first, piece.first + piece.rows))
    assert sorted(k for group_keys in numbers for k in group_keys) == list(range(200))


def test_a_folder_s_name_is_no_column(tmp_path: Path) -> None:
    """One person's rows in folders that are named like units are still one person's."""
    for number in range(3):
        folder = tmp_path / "data" / f"user=u{number}" / "page=shown"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user": ["me"], "page": ["home"]}), folder / "rows.parquet")
    assert rows(catalog(tmp_path, "data/*/*/*.parquet")) == [("me", "home")] * 3


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a[1].parquet", "a1.parquet"),
        ("a?.parquet", "ab.parquet"),
        ("*.parquet", "x.parquet"),
    ],
)
def test_a_file_s_name_is_no_pattern(tmp_path: Path, name: str, other: str) -> None:
    for user, file in (("named", name), ("other", other)):
        pq.write_table(pa.table({"user": [user], "page": ["home"]}), tmp_path / file)
    assert units(catalog(tmp_path, glob.escape(name))) == {"named"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_units_that_differ_behind_a_nul_are_two(tmp_path: Path, kind: str) -> None:
    """Each is in one spelling: the other is composed, or not."""
    given = ["Jos\u00e9", "Jos\u00e9\0a", "Jose\u0301\0a", "Jose\u0301\0a\u0301"]
    if kind == "parquet":
        pq.write_table(pa.table({"user": given, "page": ["home"] * 4}), tmp_path / "t.parquet")
    else:
        lines = [json.dumps({"user": user, "page": "home"}) for user in given]
        (tmp_path / "t.jsonl").write_text("\n".join(lines))
    expected = {"Jos\u00e9", "Jos\u00e9\0a", "Jos\u00e9\0\u00e1"}
    assert units(catalog(tmp_path, f"t.{kind}")) == expected


_BIG, _DAY = 1 << 53, dt.date(2024, 2, 29)
_COLUMNS: dict[str, pa.Array] = {
    "int8": pa.array([-128, 127, None], pa.int8()),
    "int64": pa.array([-(2**63), 2**63 - 1, _BIG + 1]),
    "uint64": pa.array([0, 2**64 - 1, None], pa.uint64()),
    "half": pa.array(np.array([1.5, np.nan, -0.0], np.float16)),
    "float": pa.array([1.1, float("nan"), -0.0], pa.float32()),
    "double": pa.array([1e300, float("-inf"), 0.1]),
    "decimal9": pa.array([Decimal("1.50"), Decimal("-9999999.99"), None], pa.decimal128(9, 2)),
    "decimal38": pa.array([Decimal(10**37), Decimal(-1), None], pa.decimal128(38, 0)),
    "decimal60": pa.array([Decimal(10**50), Decimal("1.5"), None], pa.decimal256(60, 2)),
    "bool": pa.array([True, False, None]),
    "text": pa.array(["?", "e\u0301", "\x00x"]),
    "words": pa.array(["x", "?", "x"]).dictionary_encode(),
    "bytes": pa.array([b"a", b"\xff", b""]),
    "fixed": pa.array([b"0123456789abcdef"] * 3, pa.binary(16)),
    "uuid": pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([uuid.UUID(int=i).bytes for i in range(3)], pa.binary(16))
    ),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', "2", None])),
    "date": pa.array([_DAY, dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "date64": pa.array([_DAY, dt.date(1, 1, 1), None], pa.date64()),
    "seconds": pa.array([0, -1, 10**10], pa.timestamp("s")),
    "millis": pa.array([0, -1, 2**63 - 1], pa.timestamp("ms")),
    "micros": pa.array([0, -1, 2**63 - 1], pa.timestamp("us")),
    "nanos": pa.array([999, -999, 2**63 - 1], pa.timestamp("ns")),
    "zoned": pa.array([999, -999, 2**62], pa.timestamp("ns", "America/New_York")),
    "time32": pa.array([dt.time(1, 2, 3), dt.time(23, 59, 59), None], pa.time32("ms")),
    "time64": pa.array([dt.time(1, 2, 3, 4), None, dt.time(0)], pa.time64("us")),
    "duration": pa.array([1, -1, None], pa.duration("us")),
    "list": pa.array([["a", None], [], None]),
    "struct": pa.array([{"a": float("nan"), "b": "x"}, {"a": 2.0, "b": None}, None]),
    "null": pa.nulls(3),
}


def _unchecked(values: list[bytes | None]) -> pa.Array:
    """Bytes as a column of texts."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


def _of_all_types(victims: int) -> pa.Table:
    """Three rows with a value of every type, after those of a unit whose texts are none."""
    columns = {}
    for name, values in _COLUMNS.items():
        stored = values.dictionary_decode() if name == "words" else values
        columns[name] = pa.concat_arrays([stored[:1]] * victims + [stored])
    note = _unchecked([*[b"\xff\xfe", b"\xc3", b"\xa9"][:victims], b"ok", b"?", None])
    users = [b"victim\xff"] * victims + [b"u0", b"u1", b"u2"]
    return pa.table({"user": _unchecked([*users]), "note": note, **columns})


def _read(
    folder: Path, path: str, columns: dict[str, str], piece: Piece | None = None
) -> list[str]:
    """The rows with a unit, as texts: NaN is equal to none."""
    declared = catalog(folder, path, {"user": "STRING", "note": "STRING", **columns})
    with Engine(declared, ["t"], piece=piece) as engine:
        read = engine.run("SELECT * FROM t WHERE \"user\" IS NOT NULL AND note <> 'x'")
    return sorted(map(repr, read.to_pylist()))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("int96", [False, True], ids=["int64", "int96"])
def test_rows_are_read_as_if_no_other_was_there(int96: bool, kind: str, tmp_path: Path) -> None:
    for victims in range(4):
        made = _of_all_types(victims)
        if int96:
            made = made.drop_columns(["seconds", "millis", "micros"])
        options: dict[str, Any] = {"use_deprecated_int96_timestamps": int96, "row_group_size": 2}
        pq.write_table(made, tmp_path / f"{victims}.parquet", **options)
    columns = dict.fromkeys(made.column_names[2:], kind)
    alone, *others = [_read(tmp_path, f"{victims}.parquet", columns) for victims in range(4)]
    assert len(alone) == 2 and others == [alone] * 3  # but for the one without a note
    path = str(tmp_path / "3.parquet")
    pieces = [Piece("t", path, first, 2) for first in range(0, 6, 2)]
    parts = [_read(tmp_path, "3.parquet", columns, piece) for piece in pieces]
    assert sorted(sum(parts, list[str]())) == alone


def test_a_file_is_read_by_its_own_types(tmp_path: Path) -> None:
    """Not by types that its files have in common: a DOUBLE does not hold every INT64."""
    values = {"a": pa.array([_BIG + 1]), "b": pa.array([0.5]), "c": pa.array(["7"])}
    for name, column in values.items():
        pq.write_table(pa.table({"user": [name], "v": column}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"user": ["d"]}), tmp_path / "d.parquet")
    declared = catalog(tmp_path, "*.parquet", {"user": "STRING", "v": "INT64"})
    assert sorted(rows(declared)) == [("a", _BIG + 1), ("b", 0), ("c", 7), ("d", None)]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN", ""])
def test_exactly_texts_that_are_not_utf8_are_null(encoding: str, tmp_path: Path) -> None:
    edges = [0x41, 0x7F, 0x80, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    raw = [bytes([a, b]) for a in range(0, 256, 3) for b in range(256)]
    raw += [bytes([a, b, c]) for a in edges for b in edges for c in edges]
    raw += [chr(code).encode("utf-8", "surrogatepass") for code in range(0, 0x110000, 1_111)]
    np.random.default_rng(3).shuffle(raw)  # type: ignore[arg-type]
    expected = dict[int, str | None]()
    for number, text in enumerate(raw):
        try:
            expected[number] = text.decode()
        except UnicodeDecodeError:
            expected[number] = None
    table = pa.table({"user": map(str, range(len(raw))), "page": _unchecked([*raw])})
    own = {"use_dictionary": False, "column_encoding": {"page": encoding, "user": "PLAIN"}}
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=701, **(own if encoding else {}))
    read = rows(catalog(tmp_path, "t.parquet"))
    assert {int(str(user)): page for user, page in read} == expected


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_texts_stay_with_their_rows(threads: int, tmp_path: Path) -> None:
    """They are read twice, side by side, and nothing may leave out a row on one side."""
    numbers = np.random.default_rng(5).permutation(40_000)
    user = _unchecked([b"u%d" % n if n % 7 else b"\xff%d" % n for n in numbers])
    table = pa.table({"user": user, "page": [f"p{n % 13}" for n in numbers], "n": numbers})
    for first in range(0, 40_000, 20_000):
        name = f"{first}.parquet"
        pq.write_table(table.slice(first, 20_000), tmp_path / name, row_group_size=1_701)
    columns = {"user": "STRING", "page": "STRING", "n": "INT64"}
    declared = catalog(tmp_path, "*.parquet", columns)
    queries = {
        "": 40_000, "ORDER BY n DESC LIMIT 50": 50, "LIMIT 5000": 5_000, "WHERE n >= 39900": 100,
        "WHERE page = 'p3' AND n < 1300": 100, "WHERE n IN (SELECT MAX(n) FROM t)": 1,
        "SEMI JOIN (SELECT n FROM t WHERE n < 100) AS s ON t.n = s.n": 100,
        "SEMI JOIN (SELECT 1000 * x AS n FROM range(40) AS r(x)) AS s ON t.n = s.n": 40,
    }  # fmt: skip
    for path in [None, *files_of(declared.tables["t"])]:
        piece = None if path is None else Piece("t", path, 0, 20_000)
        with Engine(declared, ["t"], threads=threads, piece=piece) as engine:
            for rest, expected in queries.items():
                read = engine.run(f'SELECT t.n, t."user", t.page FROM t {rest}').to_pylist()
                assert piece is not None or len(read) == expected, rest
                for row in read:
                    n = row["n"]
                    assert row["page"] == f"p{n % 13}", rest
                    assert row["user"] == (f"u{n}" if n % 7 else None), rest


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_a_text_of_parquet_that_is_none_is_null(kind: pa.DataType, tmp_path: Path) -> None:
    not_utf8(tmp_path, kind)
    declared = catalog(tmp_path, "*.parquet", {"k": "INT64", "user": "STRING", "page": "STRING"})
    expected = [(i, f"u{i % 20}", None if i == 7 else f"x{i}") for i in range(200)]
    assert sorted(rows(declared), key=str) == sorted([*expected, (7, "z", None)], key=str)
    query = "SELECT COUNT(page) AS n FROM t WHERE "
    assert rows(declared, query + "\"user\" = 'u7'")[0] == (9,)
    rows(catalog(tmp_path, "a.parquet", {"user": "STRING", "page": "STRING"}))
    with Engine(declared, ["t"]) as engine:  # again, and both at once
        for _ in range(2):
            assert engine.run(query + "page > 'x'")["n"][0].as_py() == 199
        same = "SELECT COUNT(*) AS n FROM t a JOIN t b ON a.page = b.page"
        assert engine.run(same)["n"][0].as_py() == 199
        assert refusal(engine.run, "SELECT CAST(page AS INT) FROM t") == "RunError statement"


def test_one_long_text_of_all_rows_fits_into_memory(tmp_path: Path) -> None:
    codes = pa.array([0, 1, None] * 800, pa.int32())
    texts = pa.DictionaryArray.from_arrays(codes, ["x" * (1 << 20), "ok"])
    table = pa.table({"user": [f"u{n}" for n in range(2_400)], "page": texts})
    pq.write_table(table, tmp_path / "t.parquet", write_statistics=False)
    declared = catalog(tmp_path, "t.parquet", {"user": "STRING", "page": "STRING"})
    with Engine(declared, ["t"], memory="400MB") as engine:
        read = engine.run("SELECT SUM(LENGTH(page)) AS n FROM t WHERE page <> 'x'")
    assert read["n"][0].as_py() == 800 * ((1 << 20) + 2)
