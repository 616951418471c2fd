"""A release's file held against what the store committed: the same, damaged, or another release.

Bytes decide where the library that writes them is of one version (Parquet names it in
``created_by``; of text files the bytes always do), content where it is not.  A file that differs
is *damaged* when no run can have written it, or when it says what it should in other bytes: it may
be written again, for no published value changes by that.  Everything else may be another release
under this name, which must stay; damage that made one number of a text file another number cannot
be told from it.

No two Parquet files that say different things differ in one byte only: their pages hold checksums.
"""

import re
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.formats.encodings import ambiguous, encode, table_of_text, unguarded

#: How the library names itself and its version.
_WRITER = re.compile(r"parquet-cpp-arrow version [0-9]+\.[0-9]+\.[0-9]+(-SNAPSHOT)?$")


class Verdict(Enum):
    """What a file is to a release."""

    SAME = "same"
    DAMAGED = "damaged"
    OTHER = "other"


def verdict(existing: bytes, batch: pa.RecordBatch, kind: str, guard: bool = True) -> Verdict:
    """What the bytes of a file are to a release that was committed.

    Args:
        guard: how CSV is written now (see `encode`).  Written the other way it is the same, where
            that is clear: a sink that was begun before there was a guard goes on.
    """
    data = encode(batch, kind, guard)
    if existing == data:
        return Verdict.SAME
    if kind == "parquet":
        return _parquet(existing, data)
    clear = kind == "csv" and not ambiguous(pa.Table.from_batches([batch]))
    if clear and existing == encode(batch, kind, not guard):
        return Verdict.SAME
    return _text(existing, batch, kind, guard)


def _parquet(existing: bytes, data: bytes) -> Verdict:
    new, writer = _read(data)
    # Whatever a library makes of damaged bytes: errors of its own, of texts, of memory.
    try:
        old, old_writer = _read(existing)
    except Exception:
        return Verdict.DAMAGED
    if old_writer != writer and _WRITER.match(old_writer):
        return Verdict.SAME if old.equals(new, check_metadata=True) else Verdict.OTHER
    return Verdict.DAMAGED if old.equals(new) or _one_byte(existing, data) else Verdict.OTHER


def _one_byte(old: bytes, new: bytes) -> bool:
    """Whether the two differ in one byte."""
    if len(old) != len(new):
        return False
    return int(np.count_nonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))) == 1


def _read(data: bytes) -> tuple[pa.Table, str]:
    """(rows, the library that wrote them), after a check of the pages' checksums."""
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        table = file.read()
        table.validate(full=True)
        return table, str(file.metadata.created_by)


def _text(existing: bytes, batch: pa.RecordBatch, kind: str, guard: bool) -> Verdict:
    try:
        old = table_of_text(existing, kind, batch.schema.remove_metadata())
        old.validate(full=True)
        old = unguarded(old) if guard and kind == "csv" else old
    except (pa.ArrowException, OSError, ValueError, LookupError):
        return Verdict.DAMAGED
    return Verdict.DAMAGED if old.equals(pa.Table.from_batches([batch])) else Verdict.OTHER
