"""A piece of a file is read as it is in the whole."""

from pathlib import Path

import pyarrow as pa

from dpstream.pipelines.tables.engine import Decoded, Engine
from dpstream.pipelines.tables.files import Piece, rows_of
from dpstream.pipelines.tables.inputs import files_of
from tests.pipelines.sql.reading import catalog, not_utf8


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
        stream = pa.RecordBatchReader.from_stream(Decoded(declared.tables["t"], piece))
        assert sorted(stream.read_all().column("k").to_pylist()) == sorted(numbers[-1])
    assert sorted(k for group_keys in numbers for k in group_keys) == list(range(200))
