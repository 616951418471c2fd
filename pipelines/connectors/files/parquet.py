"""Parquet: pieces of one row group each, decoded in chunks of a size that no setting changes.

A row group that breaks off in the middle gives one refused position, the first row that could
not be decoded, for the rest of the group; the other groups are read as if nothing had been.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.records.rows import Part, Reason, Rows, refuse, repair_text

#: Rows decoded at once; where a damaged group breaks off must not depend on batch_rows.
DECODE_ROWS = 100_000
_MAX_ROWS = 1 << 48


def is_os_error(error: Exception) -> bool:
    """Whether the operating system failed, rather than the file's content."""
    return isinstance(error, OSError) and error.errno is not None


def _opened(path: Any) -> Any:
    """A path as an open file: to look for its file system costs more than to open it."""
    return pa.OSFile(path) if isinstance(path, str) else path


def row_groups(path: Any, columns: Sequence[str]) -> list[int] | None:
    """First row number of every row group; ``None`` if the file is not readable Parquet.

    Args:
        path: of the file, or an open one.
        columns: that must be there.

    Raises:
        UsageError: a needed column is not in the schema; names those that are.
        OSError: the operating system cannot read the file.
    """
    try:
        with pq.ParquetFile(_opened(path), pre_buffer=False) as file:
            names = list(file.schema_arrow.names)
            meta = file.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    except Exception as error:
        if is_os_error(error):
            raise
        return None
    for column in columns:
        if names.count(column) != 1:
            plain = sorted({n for n in names if n.isidentifier() and len(n) <= 64})
            raise UsageError(
                f"column '{column}'",
                "is not, or not just once, in the schema of a Parquet file",
                f"choose from the columns there are: {', '.join(plain)}",
            )
    if any(not 0 <= n < _MAX_ROWS for n in sizes):
        return None
    return [sum(sizes[:i]) for i in range(len(sizes))]


def read_row_group(path: Any, columns: Sequence[str], group: int, first_row: int) -> Iterator[Part]:
    """Rows of one row group; the needed columns only, dictionaries decoded.

    Raises:
        OSError: the operating system cannot read the file.
    """
    done, claimed = 0, None
    try:
        source = _opened(path)
        with pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True) as file:
            claimed = file.metadata.row_group(group).num_rows
            for batch in file.iter_batches(
                DECODE_ROWS, row_groups=[group], columns=list(columns), use_threads=False
            ):
                arrays = [_plain(batch.column(name)) for name in columns]
                decoded = pa.RecordBatch.from_arrays(arrays, list(columns))
                decoded = decoded.slice(0, claimed - done)
                yield Rows(first_row + done, decoded)
                done += decoded.num_rows
    except Exception as error:
        if is_os_error(error):
            raise
        yield refuse(first_row + done, Reason.UNREADABLE_REST)
        return
    if done != claimed:
        yield refuse(first_row + done, Reason.UNREADABLE_REST)


def _plain(column: pa.Array) -> pa.Array:
    """Dictionary and extension types as what they hold; text that is not UTF-8 as null."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    column.validate()
    return repair_text(column)
