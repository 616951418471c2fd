"""CSV and JSON Lines by their kind, from files that may be compressed and may not be whole."""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from dpstream.pipelines.connectors.files.csv_rows import read_csv
from dpstream.pipelines.connectors.records.compression import BrokenFileError
from dpstream.pipelines.connectors.records.jsonl import read_jsonl
from dpstream.pipelines.connectors.records.rows import Part, Reason, after, refuse


def read_text(kind: str, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Part]:
    """Rows and refused positions of a text file, in blocks, every column as string.

    A compressed file that breaks off gives one refused position for its rest, as a row group of
    Parquet does: the blocks before it are read, always the same ones.

    Args:
        kind: ``csv`` or ``jsonl``.
        stream: the text (see `compression.plain`), at its beginning.
        columns: that are needed.

    Raises:
        UsageError: a needed column is not in a CSV header.
        OSError: the operating system cannot read the file.
    """
    end = 0
    try:
        for part in (read_csv if kind == "csv" else read_jsonl)(stream, columns):
            end = max(end, after(part))
            yield part
    except BrokenFileError:
        yield refuse(end, Reason.UNREADABLE_REST if end else Reason.UNREADABLE_FILE)
