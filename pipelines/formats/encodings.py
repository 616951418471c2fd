"""Bytes of released files, and reading them back.

**Formulas in CSV.** Whoever makes a key popular chooses its text, and a spreadsheet takes text
that begins with ``=``, ``+``, ``-``, ``@``, a tab or a line break for a formula, also between
quotes. Such text gets an apostrophe in front, which spreadsheets take for "this is text".  So does
such text behind apostrophes of its own, so that taking one away always gives back what was
written: text is guarded if and only if it consists of an apostrophe and text that would be
guarded.

**Lines of JSON and CSV** are written a column at a time.  The text of a value is a function of the
value and its type alone: msgspec's JSON encoder defines it for JSON, Arrow's cast to text for CSV.
Both are called on columns, and Arrow joins the texts of a row, so no Python object is made for a
row.  A column with one value (the window, the trigger, the plan of a release) is written once for
all rows.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson
import pyarrow.parquet as pq
from pyarrow import csv as pacsv

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.limits import SINK_THREADS
from dpstream.accounting.places import RELEASE_KINDS, matching_in
from dpstream.dp_transforms.batches import with_plain_stamps
from dpstream.pipelines.formats.lines import split
from dpstream.state.disk_errors import decode_error, file_errors
from dpstream.state.durable import sweep

#: What a formula begins with; full-width forms count in some locales.
_FORMULA = r"[=+\-@\t\r\n\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}]"

#: A table, or a batch of one.
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def guarded(table: _Rows) -> _Rows:
    """Return the table with every text that a spreadsheet would compute behind an apostrophe."""
    return _where(
        table, rf"\A'*{_FORMULA}", lambda column: pc.binary_join_element_wise("'", column, "")
    )


def unguarded(table: _Rows) -> _Rows:
    """Return the table that `guarded` was given."""
    return _where(
        table, rf"\A'+{_FORMULA}", lambda column: pc.utf8_slice_codeunits(column, 1, None)
    )


def ambiguous(table: pa.Table) -> bool:
    """Return whether some text, written as it is, would be read as another that is guarded."""
    return unguarded(table) is not table


def _where(table: _Rows, form: str, change: Callable[[Any], Any]) -> _Rows:
    """Texts of a form changed; the table itself where there are none."""
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(i)
            mask = pc.match_substring_regex(column, form)
            if pc.any(mask).as_py():
                table = table.set_column(i, field, pc.if_else(mask, change(column), column))
    return table


#: Rows that are joined at once: their texts stay in the processor's cache, and memory is bounded.
_ROWS = 1 << 15
#: Offsets of 64 bits, so that no length of a key is too long for the texts of a block.
_TEXT = pa.large_binary()


def json_lines(batch: pa.RecordBatch) -> bytes:
    """Return each row as one JSON object with a line feed.

    Bytes are hex digits, times RFC 3339, and numbers that are not finite null.

    Raises:
        UnicodeDecodeError: a text is not UTF-8 (a lone surrogate has no UTF-8).
    """
    names = [msgspec.json.encode(name) + b":" for name in batch.schema.names]
    before = [b"{" + name if number == 0 else b"," + name for number, name in enumerate(names)]
    return b"".join(_lines(batch, before, b"}\n", _json_texts))


def csv_lines(batch: pa.RecordBatch) -> bytes:
    """Return a line of column names, and each row as one line; the bytes of Arrow's CSV writer.

    Text is between quotes, bytes are hex digits, and null is an empty field without quotes.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8, or a type has no text in Arrow.
    """
    header = b",".join(_quoted(pa.array(batch.schema.names, pa.string())).to_pylist())
    before = [b"" if number == 0 else b"," for number in range(batch.num_columns)]
    return header + b"\n" + b"".join(_lines(batch, before, b"\n", _csv_texts))


def hex_digits(column: pa.Array) -> pa.StringArray:
    """Return bytes as text of hex digits; null stays null.

    Args:
        column: (n,) binary of any width.
    """
    column = pa.concat_arrays([column.cast(pa.binary())])  # begins at the first byte of its buffers
    validity, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[: len(column) + 1] if len(column) else np.zeros(1)
    digits = data.to_pybytes().hex().encode() if data is not None else b""
    buffers = [validity, pa.py_buffer(2 * ends.astype(np.int32)), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(column), buffers)


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes, which text formats write as hex digits."""
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _lines(
    batch: pa.RecordBatch,
    before: Sequence[bytes],
    end: bytes,
    texts: Callable[[pa.Array], pa.Array],
) -> Iterator[bytes]:
    """The rows' lines, some at a time: before each value its ``before``, then ``end``."""
    for begin in range(0, batch.num_rows, _ROWS):
        part = batch.slice(begin, _ROWS)
        pieces, literal = list[pa.Array | bytes](), b""
        for start, column in zip(before, part.columns, strict=True):
            literal += start
            if _is_constant(column):
                literal += texts(column[:1])[0].as_py()
            else:
                pieces += [literal, texts(column).cast(_TEXT)]
                literal = b""
        if pieces:
            yield _content(_joined(*pieces, literal + end))
        else:
            yield (literal + end) * part.num_rows


def _joined(*pieces: pa.LargeBinaryArray | bytes) -> pa.LargeBinaryArray:
    """Texts of each row one after the other; bytes are the same in all rows."""
    typed = [pa.scalar(p, _TEXT) if isinstance(p, bytes) else p for p in pieces]
    return pc.binary_join_element_wise(*typed, pa.scalar(b"", _TEXT))


def _content(lines: pa.LargeBinaryArray) -> bytes:
    """All values one after the other."""
    ends = np.frombuffer(lines.buffers()[1], np.int64)
    return bytes(memoryview(lines.buffers()[2])[ends[0] : ends[len(lines)]])


def _is_constant(column: pa.Array) -> bool:
    """Whether all rows have the same value, to the bit."""
    if column.null_count:
        return bool(column.null_count == len(column))
    if len(column) == 1 or pa.types.is_nested(column.type):
        return len(column) == 1
    if pa.types.is_floating(column.type):  # 0.0 and -0.0 are equal and have two texts
        column = column.view(f"int{column.type.bit_width}")
    return bool(pc.all(pc.equal(column, column[0])).as_py())


def _of_distinct(column: pa.Array, texts: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """``texts`` of each distinct value once: for types of few values that are slow to write."""
    coded = column.dictionary_encode(null_encoding="encode")
    return texts(coded.dictionary).take(coded.indices)


def _json_texts(column: pa.Array) -> pa.Array:
    """(n,) JSON texts of the values, none of them null."""
    if is_bytes(column.type):
        column = hex_digits(column)
    if pa.types.is_temporal(column.type):
        return _of_distinct(column, _encoded)
    return _encoded(column)


def _encoded(column: pa.Array) -> pa.BinaryArray:
    """Every value by msgspec, which writes no line feed into a value."""
    lines, _ = split(msgspec.json.Encoder().encode_lines(column.to_pylist()))
    return pc.binary_slice(lines, 0, -1)


def _csv_texts(column: pa.Array) -> pa.Array:
    """(n,) fields of CSV, none of them null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_bytes(column.type):
        column = hex_digits(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column.validate(full=True)
        texts = _quoted(column)
    elif pa.types.is_temporal(column.type):
        texts = _of_distinct(column, lambda values: values.cast(pa.string()))
    else:
        texts = column.cast(pa.string())
    return pc.fill_null(texts.cast(_TEXT), b"")


def _quoted(column: pa.StringArray) -> pa.Array:
    """Text between quotes, a quote in it twice."""
    doubled = pc.replace_substring(column.cast(_TEXT), '"', '""')
    return _joined(b'"', doubled, b'"')


#: Rows of a Parquet release decoded at once by `read_parts`.
PART_ROWS = 1 << 18
#: Rows of a release below which encoding it is more Python than Arrow.
_WORTH_A_THREAD = 10_000


def encode(batch: pa.RecordBatch, kind: str, guard: bool = True) -> bytes:
    """Return the file's bytes: the same for the same content (no times, no environment).

    Schema metadata travels only in Parquet.  CSV and JSON Lines write bytes as hex digits;
    JSON Lines writes times in RFC 3339 and numbers that are not finite as null.

    Args:
        guard: of CSV, whether text that a spreadsheet would compute is marked as text (see
            `pipelines.formats.encodings`).
    """
    if kind == "jsonl":
        return json_lines(batch)
    if kind == "csv":
        return csv_lines(guarded(batch) if guard else batch)
    buffer = io.BytesIO()
    pq.write_table(
        with_plain_stamps(batch),
        buffer,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def encode_all(batches: Sequence[pa.RecordBatch], kind: str, guard: bool = True) -> list[bytes]:
    """Return ``encode`` of each; large ones on threads, on which small ones would cost twice as
    much.
    """
    work = functools.partial(encode, kind=kind, guard=guard)
    if sum(batch.num_rows for batch in batches) < _WORTH_A_THREAD * max(2, len(batches)):
        return [work(batch) for batch in batches]
    with ThreadPoolExecutor(SINK_THREADS) as pool:
        return list(pool.map(work, batches))


def remove_drafts(folder: Path) -> None:
    """Remove what writers that died have left below a sink's folder."""
    for inside in [folder, *folder.glob("window-*"), *folder.glob("window-*/*/")]:
        sweep(inside)


def read_releases(
    path: str | Path, schema: pa.Schema | None = None, guard: bool = True
) -> pa.Table:
    """Return every release below a sink's folder, ordered by (window, trigger).

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
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(f"a {kind} file", error) from None
    if not tables:
        return pa.table({}) if schema is None else schema.empty_table()
    return pa.concat_tables(tables, promote_options="permissive")


def read_parts(path: Path, schema: pa.Schema, guard: bool = True) -> Iterator[pa.Table]:
    """Yield the rows of one release, only the columns of ``schema``.

    Parquet comes in pieces of at most ``PART_ROWS`` rows, CSV and JSON Lines file by file, so that
    the memory needed does not grow with the release.

    Args:
        path: the release's file, or the folder of its parts.

    Raises:
        UsageError: a file is not a readable release of these columns.
    """
    for file in part_files(path):
        yield from _pieces(file, schema, guard)


def _pieces(file: Path, schema: pa.Schema, guard: bool) -> Iterator[pa.Table]:
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file, page_checksum_verification=True) as source:
                for batch in source.iter_batches(PART_ROWS, columns=schema.names):
                    yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        else:
            read = _read_csv if file.suffix == ".csv" else _read_jsonl
            table = read([file], schema)
            yield unguarded(table) if guard and file.suffix == ".csv" else table
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _unreadable(f"{file.parent.name}/{file.name}", error, file) from None


def release_files(path: str | Path) -> Iterator[Path]:
    """Yield the files of releases below a sink's folder, ordered by (window, trigger) and part.

    Raises:
        RunError: a folder cannot be listed.
    """
    for release in release_paths(path):
        yield from part_files(release)


def part_files(release: Path) -> list[Path]:
    """Return the files of a release: those of its parts in order, if its path is a folder.

    Raises:
        RunError: the folder cannot be listed.
    """
    with file_errors("sink.path", "cannot be listed"):
        return sorted(matching_in(release, "part-*")) if release.is_dir() else [release]


def release_paths(path: str | Path) -> Iterator[Path]:
    """Yield the releases below a sink's folder, each a file or the folder of its parts, ordered by
    (window, trigger).

    Raises:
        RunError: a folder cannot be listed.
    """
    with file_errors("sink.path", "cannot be listed"):
        paths = [
            p
            for kind in RELEASE_KINDS
            for p in matching_in(Path(path), f"window-*/trigger-*.{kind}")
        ]
    yield from sorted(paths, key=lambda p: (*name_of(p), p.suffix))


def name_of(file: Path) -> tuple[int, int]:
    """Return (window, trigger) of a release's path, -1 where its name has no number."""
    return _number(file.parent.name), _number(file.stem)


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _unreadable(name: str, error: Exception, *files: Path) -> DpstreamError:
    damaged = UsageError(
        f"release {name}",
        "is damaged",
        "restore the file, or remove it and run the job again on the same state",
    )
    return decode_error(damaged, error, *files)


def _read_parquet(files: list[Path], schema: pa.Schema | None) -> pa.Table:
    tables = []
    for file in files:
        try:
            table = pq.read_table(
                file, partitioning=None, schema=schema, page_checksum_verification=True
            )
            tables.append(table)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(f"{file.parent.name}/{file.name}", error, file) from None
    return pa.concat_tables(tables, promote_options="permissive")


def _read_csv(files: list[Path], schema: pa.Schema | None) -> pa.Table:
    """All files as one text, so that types are guessed once."""
    header = files[0].read_bytes().partition(b"\n")[0] + b"\n"
    text = header + b"".join(file.read_bytes().partition(b"\n")[2] for file in files)
    return _csv_of_text(text, schema)


def table_of_text(text: bytes, kind: str, schema: pa.Schema) -> pa.Table:
    """Return the rows of a CSV or JSON Lines file as `encode` writes it."""
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
    """Return the rows of JSON Lines as `encode` writes them."""
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
    """Return bytes as text of hex digits."""
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
