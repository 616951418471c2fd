"""A table of one file or more, read as a whole and in pieces."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.files import Piece, files_of
from tests import projects

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    ".zst": lambda data: b"".join(
        pa.Codec("zstd").compress(part).to_pybytes() for part in (data[:50], data[50:])
    ),
}
_COLUMNS = {"user": "STRING", "page": "STRING"}


def catalog(folder: Path, path: str, columns: dict[str, str] | None = None) -> Catalog:
    table = {"path": path, "unit_column": "user", "columns": columns or _COLUMNS}
    unit, secret = ("user", "string"), "00" * 32
    project = projects.of_tables(folder, unit, {"t": table}, insecure_test_secret=secret)
    return catalog_of(project)


def rows(catalog: Catalog, query: str = "SELECT * FROM t") -> list[tuple[object, ...]]:
    """The rows of the whole; those of all pieces are the same."""
    table = catalog.tables["t"]
    with Engine(catalog, ["t"]) as engine:
        all_rows = [tuple(row.values()) for row in engine.run(query).to_pylist()]
    paths, apart = files_of(table), list[tuple[object, ...]]()
    if len(paths) > 1:  # of different columns: no runner reads them
        return all_rows
    for path in paths:
        with Engine(catalog, ["t"], piece=Piece("t", path)) as engine:
            apart += [tuple(row.values()) for row in engine.run(query).to_pylist()]
    assert sorted(map(str, apart)) == sorted(map(str, all_rows))
    return all_rows


def units(catalog: Catalog) -> set[object]:
    return {row[0] for row in rows(catalog)}


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
