"""Releases written to a folder as the sink of files writes them, one at a time and together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA
from dpstream.pipelines.connectors.files.sink import FileSink


def write_release(folder: Path, kind: Any, batch: pa.RecordBatch) -> tuple[int, int]:
    """Write one sealed release; its (window, trigger)."""
    return FileSink(folder, kind).write([batch])[0]


def write_releases(
    folder: Path, kind: Any, batches: Sequence[pa.RecordBatch]
) -> list[tuple[int, int]]:
    """Write sealed releases together."""
    return FileSink(folder, kind).write(batches)


def read_dead_letters(folder: str | Path) -> pa.Table:
    """Every dead letter below a folder, each position and reason once, sorted."""
    tables = [pq.read_table(p, schema=DEAD_LETTER_SCHEMA) for p in Path(folder).glob("part-*")]
    if not tables:
        return DEAD_LETTER_SCHEMA.empty_table()
    names = DEAD_LETTER_SCHEMA.names
    distinct = pa.concat_tables(tables).group_by(names).aggregate([]).select(names)
    return distinct.sort_by([(name, "ascending") for name in names])
