"""Parquet: pieces of one row group each, decoded in chunks of a size that no setting changes.

A row group that breaks off in the middle gives one refused position, the first row that could
not be decoded, for the rest of the group; the other groups are read as if nothing had been.

**Memory.**  A text that stands once in a file can be the value of every row.  So texts are read as
codes of a dictionary, and a text that no job can use is null before rows get their values.  What
pages without codes unpack to is in the file's footer: `refuse_large` looks at it before anything
is charged.  A footer that is wrong is damage, and is not looked for.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.accounting.errors import UsageError, column_list
from dpstream.accounting.limits import MAX_KEY_BYTES
from dpstream.accounting.places import FileKind
from dpstream.dp_transforms.ingest.columns import column_at, named_columns
from dpstream.pipelines.formats.columnar import groups_of, opened
from dpstream.pipelines.formats.rows import Part, Reason, Rows, refuse, repair_text
from dpstream.state.disk_errors import out_of_memory

#: Rows decoded at once; where a damaged group breaks off must not depend on batch_rows.
DECODE_ROWS = 100_000
#: Bytes of one column decoded at once, where the footer says how many there may be.
DECODE_BYTES = 64 << 20
#: Columns that unpack to more than so many times their bytes in the file may unpack to so many
#: bytes together, in one row group.
MAX_RATIO, MAX_UNPACKED = 100, 128 << 20
_MAX_ROWS = 1 << 48
#: A usual dictionary, and a code for each row; a larger chunk of texts surely has pages without
#: codes, which take seven times as long to read as codes.
_DICTIONARY_BYTES, _CODE_BYTES = 1 << 20, 2
_CODED = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_DELTA = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}


class UnpacksTooLargeError(UsageError):
    """Signals that a row group is small in its file and too large once unpacked."""


def is_os_error(error: Exception) -> bool:
    """Return whether the operating system failed, rather than the file's content."""
    return isinstance(error, OSError) and error.errno is not None


def row_groups(
    path: Any,
    columns: Sequence[str],
    field: str = "records",
    subject: str = "a file",
    kind: FileKind = "parquet",
) -> list[int] | None:
    """Return the first row number of every row group; ``None`` if the file is not readable.

    Args:
        path: of the file, or an open one.
        columns: the columns that must be there.
        field: what names the file, for an error; subject: the file, in words.
        kind: of the file, one of `places.COLUMNAR`.

    Raises:
        UsageError: a needed column is not in the schema; names those that are.
        UnpacksTooLargeError: see `refuse_large`.
        OSError: the operating system cannot read the file.
    """
    try:
        if kind != "parquet":
            schema, groups, read = groups_of(opened(path), columns[:1], kind)
            sizes = [read(number).num_rows for number in range(groups)]
        else:
            with pq.ParquetFile(opened(path), pre_buffer=False) as file:
                schema, meta = file.schema_arrow, file.metadata
                sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
                refuse_large(meta, columns, field, subject)
    except UnpacksTooLargeError:
        raise
    except Exception as error:
        if is_os_error(error) or out_of_memory(error):
            raise
        return None
    names = [column.name for column in named_columns(schema)]
    for column in columns:
        if names.count(column) != 1:
            raise UsageError(
                f"column '{column}'",
                f"is {'twice' if column in names else 'not'} in {subject}, which has:"
                f" {column_list(dict.fromkeys(names))}",
                "name one of these in the project file, or correct the file",
            )
    if any(not 0 <= n < _MAX_ROWS for n in sizes):
        return None
    return [sum(sizes[:i]) for i in range(len(sizes))]


def refuse_large(meta: pq.FileMetaData, columns: Iterable[str], field: str, subject: str) -> None:
    """Refuse a file with a row group that is small in the file and large once unpacked.

    Args:
        meta: the file's footer; columns: the columns that are read.
        field: what names the file, for the error; subject: the file, in words.

    Raises:
        UnpacksTooLargeError: columns that unpack to more than `MAX_RATIO` times their bytes
            unpack to more than `MAX_UNPACKED` together.
    """
    groups = map(meta.row_group, range(meta.num_row_groups))
    large = [group for group in groups if group.total_byte_size > MAX_UNPACKED]
    numbers = _flat(meta.schema, columns).values() if large else ()
    for group in large:
        chunks = map(group.column, numbers)
        unpacked = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.total_uncompressed_size > MAX_RATIO * chunk.total_compressed_size
        )
        if unpacked > MAX_UNPACKED:
            raise UnpacksTooLargeError(
                field,
                f"{subject} has a row group that unpacks to more than {MAX_UNPACKED >> 20} MiB and"
                f" {MAX_RATIO} times its bytes in the file",
                "write the file with smaller row groups, in DuckDB: COPY (FROM 'FILE') TO"
                " 'data.parquet' (ROW_GROUP_SIZE 2048)",
            )


def _flat(schema: pq.ParquetSchema, columns: Iterable[str]) -> dict[str, int]:
    """Numbers of the columns, and of parts of structs by their paths, that have no lists."""
    numbers = dict[str, int]()
    for number in range(len(schema)):
        column = schema.column(number)
        is_own = column.name == column.path
        if not column.max_repetition_level and (is_own or column.path not in numbers):
            numbers[column.path] = number
    return {name: numbers[name] for name in columns if name in numbers}


def _file(source: Any, meta: pq.FileMetaData | None = None, coded: Sequence[str] = ()) -> Any:
    """An open file, some columns of which are read as codes of a dictionary."""
    return pq.ParquetFile(
        source,
        metadata=meta,
        read_dictionary=list(coded),
        pre_buffer=False,
        page_checksum_verification=True,
    )


@functools.lru_cache(maxsize=2)
def _footer(path: str, size: int, changed: int) -> pq.FileMetaData:
    """The footer of a file, once for its row groups: it names all of them, so that to read it for
    each takes the square of their number.
    """
    with _file(opened(path)) as file:
        return file.metadata


@contextlib.contextmanager
def coded_batches(
    path: Any, columns: Sequence[str], group: int, kind: FileKind = "parquet"
) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
    """Yield (number of rows, batches) of one row group of a file in bounded memory.

    Columns of text may be codes of a dictionary; structs as a whole, and lists, are null.

    Args:
        path: of the file, or an open one.
        columns: those that are read.
        group: number of the row group.
        kind: of the file.

    Raises:
        OSError, pa.ArrowException: it cannot be read.
    """
    source, meta = opened(path), None
    if kind != "parquet":
        batch = groups_of(source, columns, kind)[2](group)
        flat = [each.name for each in named_columns(batch.schema)]
        parts = (batch.slice(at, DECODE_ROWS) for at in range(0, batch.num_rows, DECODE_ROWS))
        yield batch.num_rows, (_with_nested(part, columns, flat) for part in parts)
        return
    if source is not path:
        status = os.stat(path)
        meta = _footer(path, status.st_size, status.st_ctime_ns)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file(source, meta))
        footer = file.metadata.row_group(group)
        numbers = _flat(file.metadata.schema, columns)
        coded, rows = list[str](), DECODE_ROWS
        if footer.num_rows * footer.total_byte_size > DECODE_BYTES:  # else no text can be too long
            coded, rows = _coded_and_rows(source, file.metadata, numbers, group)
        if coded:
            file = stack.enter_context(_file(source, file.metadata, coded))
        batches = file.iter_batches(
            rows, row_groups=[group], columns=list(numbers), use_threads=False
        )
        yield footer.num_rows, (_with_nested(batch, columns, numbers) for batch in batches)


def _with_nested(
    batch: pa.RecordBatch, columns: Sequence[str], flat: Collection[str]
) -> pa.RecordBatch:
    if batch.schema.names == list(columns):
        return batch
    rows = batch.num_rows
    arrays = [column_at(batch, name) if name in flat else pa.nulls(rows) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _coded_and_rows(
    source: Any, meta: pq.FileMetaData, numbers: dict[str, int], group: int
) -> tuple[list[str], int]:
    """Columns that are read as codes, and how many rows are read at once."""
    footer, coded, rows = meta.row_group(group), list[str](), DECODE_ROWS
    for name, number in numbers.items():
        chunk = footer.column(number)
        longest: int | None = 1
        if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
            longest = meta.schema.column(number).length
        elif chunk.physical_type == "BYTE_ARRAY":
            longest = _longest(chunk, partial(_longest_word, source, meta, name, group))
        if longest is None:
            coded.append(name)
        else:
            rows = min(rows, DECODE_BYTES // max(1, longest))
    return coded, max(1, rows)


def _longest(chunk: pq.ColumnChunkMetaData, longest_word: Callable[[], int]) -> int | None:
    """About how many bytes a row of a chunk of texts may have; ``None``: it is read as codes."""
    size, rows = int(chunk.total_uncompressed_size), int(chunk.num_values)
    encodings = set(chunk.encodings)
    # A text of DELTA_BYTE_ARRAY may repeat what stands once.
    by_row = size if "DELTA_BYTE_ARRAY" in encodings else size // max(1, rows)
    if not (encodings & _CODED or chunk.has_dictionary_page):
        return by_row
    delta = encodings & _DELTA
    if size <= _DICTIONARY_BYTES + _CODE_BYTES * rows and not delta:
        return None
    word = longest_word()
    if delta:  # of these pages, Arrow makes no codes
        return max(word, by_row)
    return None if word > MAX_KEY_BYTES else by_row


def _longest_word(source: Any, meta: pq.FileMetaData, name: str, group: int) -> int:
    """Bytes of the longest text of a chunk's dictionary, which comes with its first text."""
    with _file(source, meta, [name]) as file:
        for batch in file.iter_batches(
            1_000, row_groups=[group], columns=[name], use_threads=False
        ):
            words = _stored(column_at(batch, name)).dictionary
            if len(words):
                return int(pc.max(pc.binary_length(words)).as_py() or 0)
    return 0


def read_row_group(
    path: Any, columns: Sequence[str], group: int, first_row: int, kind: FileKind = "parquet"
) -> Iterator[Part]:
    """Yield the rows of one row group; the needed columns only, dictionaries decoded.

    Raises:
        OSError: the operating system cannot read the file.
    """
    done, claimed = 0, None
    try:
        with coded_batches(path, columns, group, kind) as (claimed, batches):
            for batch in batches:
                arrays = [_plain(column) for column in batch.columns]
                decoded = pa.RecordBatch.from_arrays(arrays, list(columns))
                decoded = decoded.slice(0, claimed - done)
                yield Rows(first_row + done, decoded)
                done += decoded.num_rows
    except Exception as error:
        if is_os_error(error) or out_of_memory(error):
            raise
        yield refuse(first_row + done, Reason.UNREADABLE_REST)
        return
    if done != claimed:
        yield refuse(first_row + done, Reason.UNREADABLE_REST)


def check_whole(
    path: str, columns: Iterable[str], field: str, subject: str, kind: FileKind = "parquet"
) -> None:
    """Refuse a file of which a page of some columns cannot be read.

    Its later rows would be missing in what is released.  That a file is damaged tells nothing of a
    record: no record can bring it about.

    Args:
        path: of the file; columns: those that are read.
        field: what names the file, for the error; subject: the file, in words.

    Raises:
        UsageError: it is damaged.
        OSError: the operating system cannot read the file.
    """
    status = os.stat(path)
    if not _is_whole(path, tuple(columns), kind, status.st_size, status.st_mtime_ns):
        raise UsageError(
            field,
            f"{subject} is damaged: a page of it cannot be read, and the rows behind it would be "
            "lost",
            "make the file again from its source, or take it away",
        )


@functools.lru_cache(maxsize=1 << 16)
def _is_whole(path: str, columns: tuple[str, ...], kind: FileKind, size: int, changed: int) -> bool:
    """Whether all pages can be read, in bounded memory, once for as long as a file does not
    change.
    """
    try:
        for group in range(number_of_groups(path, kind)):
            with coded_batches(path, columns, group, kind) as (claimed, batches):
                if sum(batch.num_rows for batch in batches) != claimed:
                    return False
    except Exception as error:
        if is_os_error(error) or out_of_memory(error):
            raise
        return False
    return True


def number_of_groups(path: str, kind: FileKind) -> int:
    """Return how many groups of rows a file has; raises as `columnar.groups_of` does."""
    if kind == "parquet":
        return int(pq.read_metadata(path).num_row_groups)
    return groups_of(opened(path), (), kind)[1]


def _stored(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _plain(column: pa.Array) -> pa.Array:
    """Dictionary and extension types as what they hold; text that is not UTF-8, or is too long for
    any use (see `dp_transforms.ingest.columns`), as null."""
    column = _stored(column)
    column.validate()
    if isinstance(column, pa.DictionaryArray):
        return _usable(column.dictionary).take(column.indices)
    return _usable(column)


def _usable(column: pa.Array) -> pa.Array:
    if column.type in (pa.string_view(), pa.binary_view()):
        raw = column.cast(pa.binary())
        column = raw if column.type == pa.binary_view() else raw.view(pa.string())
    column = repair_text(column)
    if not _is_text(column.type) or column.nbytes <= MAX_KEY_BYTES:
        return column
    longer = pc.greater(pc.binary_length(column), MAX_KEY_BYTES)
    if not pc.any(longer, min_count=0).as_py():
        return column
    return pc.replace_with_mask(column, longer, pa.scalar(None, column.type))
