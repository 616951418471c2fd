"""Bytes of released files, and reading them back."""

import functools
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson
import pyarrow.parquet as pq
from pyarrow import csv as pacsv

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import SINK_THREADS
from dpstream.pipelines.formats.formulas import guarded, unguarded
from dpstream.pipelines.formats.text_rows import (
    csv_lines,
    hex_digits,
    is_bytes,
    json_lines,
)
from dpstream.state.durable import sweep

KINDS = ("parquet", "csv", "jsonl")
#: Rows of a Parquet release decoded at once by `read_parts`.
PART_ROWS = 1 << 18
#: Rows of a release below which encoding it is more Python than Arrow.
_WORTH_A_THREAD = 10_000


def encode(batch: pa.RecordBatch, kind: str, guard: bool = True) -> bytes:
    """The file's bytes: the same for the same content (no times, no environment).

    Schema metadata travels only in Parquet.  CSV and JSON Lines write bytes as hex digits;
    JSON Lines writes times in RFC 3339 and numbers that are not finite as null.

    Args:
        guard: of CSV, whether text that a spreadsheet would compute is marked as text (see
            `pipelines.formats.formulas`).
    """
    if kind == "jsonl":
        return json_lines(batch)
    if kind == "csv":
        return csv_lines(guarded(batch) if guard else batch)
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_batches([batch]),
        buffer,
        row_group_size=1 << 20,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def encode_all(batches: Sequence[pa.RecordBatch], kind: str, guard: bool = True) -> list[bytes]:
    """``encode`` of each; large ones on threads, on which small ones would cost twice as much."""
    work = functools.partial(encode, kind=kind, guard=guard)
    if sum(batch.num_rows for batch in batches) < _WORTH_A_THREAD * max(2, len(batches)):
        return [work(batch) for batch in batches]
    with ThreadPoolExecutor(SINK_THREADS) as pool:
        return list(pool.map(work, batches))


def remove_drafts(folder: Path) -> None:
    """Remove what writers that died have left below a sink's folder."""
    for inside in [folder, *folder.glob("window-*")]:
        sweep(inside)


def read_releases(
    path: str | Path, schema: pa.Schema | None = None, guard: bool = True
) -> pa.Table:
    """Every release below a sink's folder, ordered by (window, trigger).

    Args:
        path: the folder given as ``sink.path``.
        schema: types of the columns.  CSV and JSON Lines do not keep them, and without it
            they are guessed (in CSV a key ``007`` becomes a number, in JSON a time stays text).
        guard: whether CSV was written so; see `encode`.

    Returns:
        The rows of all files; a table without columns if there are none.

    Raises:
        UsageError: a file is not a readable release (names it where it can be told).
    """
    tables = []
    for kind, files in groupby(release_files(path), lambda file: file.suffix[1:]):
        read = {"parquet": _read_parquet, "csv": _read_csv, "jsonl": _read_jsonl}[kind]
        try:
            table = read(list(files), schema).replace_schema_metadata(None)
            tables.append(unguarded(table) if guard and kind == "csv" else table)
        except (pa.ArrowException, OSError, ValueError):
            raise _unreadable(f"a {kind} file") from None
    if not tables:
        return pa.table({}) if schema is None else schema.empty_table()
    return pa.concat_tables(tables, promote_options="permissive")


def read_parts(file: Path, schema: pa.Schema, guard: bool = True) -> Iterator[pa.Table]:
    """The rows of one release file, only the columns of ``schema``.

    Parquet comes in parts of at most ``PART_ROWS`` rows, so that the memory needed does not
    grow with the release; CSV and JSON Lines come as one part.

    Raises:
        UsageError: the file is not a readable release of these columns.
    """
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file, page_checksum_verification=True) as source:
                for batch in source.iter_batches(PART_ROWS, columns=schema.names):
                    yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        else:
            read = _read_csv if file.suffix == ".csv" else _read_jsonl
            table = read([file], schema)
            yield unguarded(table) if guard and file.suffix == ".csv" else table
    except (pa.ArrowException, OSError, ValueError, KeyError):
        raise _unreadable(f"{file.parent.name}/{file.name}") from None


def release_files(path: str | Path) -> Iterator[Path]:
    """Files of releases below a sink's folder, ordered by (window, trigger)."""
    paths = (p for kind in KINDS for p in Path(path).glob(f"window-*/trigger-*.{kind}"))
    yield from sorted(paths, key=lambda p: (*name_of(p), p.suffix))


def name_of(file: Path) -> tuple[int, int]:
    """(window, trigger) of a release's file, -1 where its name has no number."""
    return _number(file.parent.name), _number(file.stem)


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _unreadable(name: str) -> UsageError:
    return UsageError(
        f"release {name}",
        "cannot be read",
        "restore the file, or remove it and run the job again on the same state",
    )


def _read_parquet(files: list[Path], schema: pa.Schema | None) -> pa.Table:
    tables = []
    for file in files:
        try:
            table = pq.read_table(
                file, partitioning=None, schema=schema, page_checksum_verification=True
            )
            tables.append(table)
        except (pa.ArrowException, OSError):
            raise _unreadable(f"{file.parent.name}/{file.name}") from None
    return pa.concat_tables(tables, promote_options="permissive")


def _read_csv(files: list[Path], schema: pa.Schema | None) -> pa.Table:
    """All files as one text, so that types are guessed once."""
    header = files[0].read_bytes().partition(b"\n")[0] + b"\n"
    text = header + b"".join(file.read_bytes().partition(b"\n")[2] for file in files)
    return _csv_of_text(text, schema)


def table_of_text(text: bytes, kind: str, schema: pa.Schema) -> pa.Table:
    """The rows of a CSV or JSON Lines file as `encode` writes it."""
    return _csv_of_text(text, schema) if kind == "csv" else rows_of_text(text, schema)


def _csv_of_text(text: bytes, schema: pa.Schema | None) -> pa.Table:
    """The rows of CSV; Arrow misreads a NUL byte of a key, so an absent character replaces it."""
    absent = next(c for c in map(chr, range(0xE000, 0x110000)) if c.encode() not in text)
    encoded = text.replace(b"\0", absent.encode())
    table = pacsv.read_csv(
        pa.BufferReader(encoded),
        pacsv.ReadOptions(block_size=len(encoded) + 1),
        pacsv.ParseOptions(newlines_in_values=True),
        pacsv.ConvertOptions(
            column_types=_text_types(schema), include_columns=schema.names if schema else None
        ),
    )
    if b"\0" in text:
        for number, field in enumerate(table.schema):
            if pa.types.is_string(field.type):
                column = pc.replace_substring(table.column(number), absent, "\0")
                table = table.set_column(number, field, column)
    return table if schema is None else _from_hex(table, schema)


def _read_jsonl(files: list[Path], schema: pa.Schema | None) -> pa.Table:
    text = b"".join(file.read_bytes() for file in files)
    if schema is None:
        return pa.Table.from_pylist(msgspec.json.Decoder().decode_lines(text))
    return rows_of_text(text, schema)


def rows_of_text(text: bytes, schema: pa.Schema) -> pa.Table:
    """The rows of JSON Lines as `encode` writes them."""
    if not text:
        return schema.empty_table()
    options = pajson.ParseOptions(
        explicit_schema=pa.schema(_text_types(schema)), unexpected_field_behavior="ignore"
    )
    reading = pajson.ReadOptions(block_size=len(text) + 1)
    return _from_hex(pajson.read_json(pa.BufferReader(text), reading, options), schema)


def _text_types(schema: pa.Schema | None) -> dict[str, pa.DataType]:
    """Types to read text columns with: bytes are hex digits."""
    return {f.name: pa.string() if is_bytes(f.type) else f.type for f in schema or ()}


def as_hex(table: pa.Table) -> pa.Table:
    """Bytes as text of hex digits."""
    for i, field in enumerate(table.schema):
        if is_bytes(field.type):
            digits = [hex_digits(chunk) for chunk in table.column(i).chunks]
            table = table.set_column(i, field.name, pa.chunked_array(digits, pa.string()))
    return table


def _from_hex(table: pa.Table, schema: pa.Schema) -> pa.Table:
    for i, field in enumerate(schema):
        if is_bytes(field.type):
            values = [v if v is None else bytes.fromhex(v) for v in table.column(i).to_pylist()]
            table = table.set_column(i, field.name, pa.array(values, field.type))
    return table.cast(schema)
