"""A text of Parquet that is no UTF-8 is NULL, and no other value."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.tables.engine import Decoded, Engine
from tests.pipelines.sql.reading import catalog, not_utf8, rows


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


def test_one_long_text_of_all_rows_is_decoded_for_few_rows_at_a_time(tmp_path: Path) -> None:
    codes = pa.array([0, 1, None] * 200, pa.int32())
    texts = pa.DictionaryArray.from_arrays(codes, ["x" * (1 << 20), "ok"])
    table = pa.table({"user": [f"u{n}" for n in range(600)], "page": texts})
    pq.write_table(table, tmp_path / "t.parquet", write_statistics=False)
    tables = catalog(tmp_path, "t.parquet", {"user": "STRING", "page": "STRING"}).tables
    users, sizes = list[bytes](), list[int]()
    for batch in pa.RecordBatchReader.from_stream(Decoded(tables["t"], None)):
        users += batch["user"].to_pylist()
        sizes.append(batch.nbytes)
    assert users == [b"u%d" % n for n in range(600)] and max(sizes) < 66 << 20
