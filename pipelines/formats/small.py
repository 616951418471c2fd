"""Many small files at once: the rows of each, at the positions that they have alone.

A file costs an open, a read and a look at its header or footer; all that is done with rows is done
for many files together.  What becomes of a row is a function of that row (and of its file's header
or schema) alone, so its company does not matter.
"""

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import instance
from dpstream.dp_transforms.batches import position_runs
from dpstream.pipelines.formats.lines import split
from dpstream.pipelines.formats.rows import Reason, Rows, unreadable
from dpstream.pipelines.formats.texts import (
    Objects,
    csv_header,
    csv_lines,
    csv_positions,
    json_lines,
)

#: A file of this size or less is small; so many bytes, or files, are read together.
SMALL_BYTES, TOGETHER_BYTES, TOGETHER_FILES = 1 << 20, 8 << 20, 1_000
#: (partition, path)
File = tuple[int, str]


class Located(NamedTuple):
    """Rows, or refused positions, of several files: the partition of each, and its place."""

    partition: Int64
    offset: Int64
    result: pa.RecordBatch | list[str]


def read_texts(kind: str, files: Iterable[File], columns: Sequence[str]) -> Iterator[Located]:
    """Yield the rows and refused positions of small text files that are not compressed.

    Args:
        kind: ``csv`` or ``jsonl``.
        files: of this kind.
        columns: the columns that are needed.

    Raises:
        UsageError: a needed column is not in a CSV header.
        RunError: a file cannot be read.
    """
    by_header: dict[bytes, tuple[list[int], list[bytes]]] = {}
    for partition, path in files:
        data = _content(partition, path)
        head, _, body = data.partition(b"\n") if kind == "csv" else (b"", b"", data)
        partitions, bodies = by_header.setdefault(head, ([], []))
        partitions.append(partition)
        bodies.append(body if body.endswith(b"\n") or not body else body + b"\n")
    for head, (partitions, bodies) in by_header.items():
        named = np.array(partitions, np.int64)
        header = csv_header(BytesIO(head)) if kind == "csv" else []
        if header is None:
            reasons = [Reason.UNREADABLE_FILE.value] * len(named)
            yield Located(named, np.zeros_like(named), reasons)
            continue
        lines, file, row = _lines(bodies)
        if kind == "csv":
            parsed = csv_lines(lines, len(header), csv_positions(header, columns), columns)
        else:
            parsed = json_lines(lines, Objects(columns), columns)
        if parsed.reasons:
            yield Located(named[file[parsed.bad]], row[parsed.bad], parsed.reasons)
        if parsed.batch is not None:
            yield Located(named[file[parsed.good]], row[parsed.good], parsed.batch)


def _content(partition: int, path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as raw:
            return raw.read()
    except OSError as error:
        raise unreadable(partition, error) from None


def _lines(texts: list[bytes]) -> tuple[pa.BinaryArray, Int64, Int64]:
    """Non-blank lines of texts; of each the text it is of, and its number there."""
    lines, blank = split(b"".join(texts))
    begins = np.zeros(0, np.int32)
    if len(lines):
        begins = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines)]
    file = np.searchsorted(np.cumsum([len(text) for text in texts]), begins, "right")[~blank]
    first = np.searchsorted(file, np.arange(len(texts)))
    records = lines.filter(pa.array(~blank)) if blank.any() else lines
    return records, file, np.arange(len(records)) - first[file]


def joined(parts: Iterable[tuple[int, Rows]], most: int) -> Iterator[Located]:
    """Yield the rows of files, those of one schema together, about ``most`` at once."""
    held, rows = list[tuple[int, Rows]](), 0
    for partition, part in parts:
        if held and (rows >= most or part.batch.schema != held[0][1].batch.schema):
            yield _join(held)
            held, rows = [], 0
        held.append((partition, part))
        rows += part.batch.num_rows
    if held:
        yield _join(held)


def _join(held: list[tuple[int, Rows]]) -> Located:
    rows = [part.batch.num_rows for _, part in held]
    begins = np.cumsum(rows) - rows
    partition = np.repeat(np.array([number for number, _ in held], np.int64), rows)
    first = np.repeat(np.array([part.offset for _, part in held], np.int64) - begins, rows)
    batch = pa.concat_batches([part.batch for _, part in held])
    return Located(partition, np.arange(len(partition)) + first, batch)


def positioned_runs(rows: Located, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most ``batch_rows`` rows with the positions of their runs as metadata."""
    batch = instance(rows.result, pa.RecordBatch)
    for start in range(0, batch.num_rows, batch_rows):
        span = slice(start, start + batch_rows)
        where = position_runs(rows.partition[span], rows.offset[span])
        yield batch.slice(start, batch_rows).replace_schema_metadata(where)
