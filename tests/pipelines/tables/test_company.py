"""A row of Parquet is read the same in any company: a text that is not UTF-8 changes no other row.

Neighbouring data sets differ in one unit's rows.  If they decided how the rows of others are read,
no noise would hide it.
"""

import datetime as dt
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.tables.columns import TYPES
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.files import Piece, files_of
from tests.pipelines.sql.reading import catalog, not_utf8, rows

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
        with pytest.raises(RunError):
            engine.run("SELECT CAST(page AS INT) FROM t")


def test_one_long_text_of_all_rows_fits_into_memory(tmp_path: Path) -> None:
    codes = pa.array([0, 1, None] * 800, pa.int32())
    texts = pa.DictionaryArray.from_arrays(codes, ["x" * (1 << 20), "ok"])
    table = pa.table({"user": [f"u{n}" for n in range(2_400)], "page": texts})
    pq.write_table(table, tmp_path / "t.parquet", write_statistics=False)
    declared = catalog(tmp_path, "t.parquet", {"user": "STRING", "page": "STRING"})
    with Engine(declared, ["t"], memory="400MB") as engine:
        read = engine.run("SELECT SUM(LENGTH(page)) AS n FROM t WHERE page <> 'x'")
    assert read["n"][0].as_py() == 800 * ((1 << 20) + 2)
