"""Columns have the types of their catalog: what does not fit is NULL, whatever bits a file has."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.tables.casts import casts, listed, quoted
from tests.pipelines.sql.reading import catalog, rows
from tests.pipelines.sql.shop import shop


def test_names_and_texts_are_quoted() -> None:
    assert quoted('a"b') == '"a""b"' and listed(["a'b", "c"]) == "['a''b', 'c']"


def test_units_that_are_texts_have_one_spelling(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,page\ne\u0301,e\u0301\n")
    assert rows(catalog(tmp_path, "t.csv")) == [("\u00e9", "e\u0301")]
    assert "nfc" not in casts(shop().tables["visits"])  # its unit is a number


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
