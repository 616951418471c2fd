"""Rows with positions, and refused positions, as a source hands them to the flow.

See `pipelines.connectors.files.source` for the contract with the next stage.
"""

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, OFFSET, PARTITION
from dpstream.dp_transforms.telemetry import count
from dpstream.pipelines.connectors.records.rows import Int64, Refused, Rows

RECORDS, DEAD_LETTER = "records", "dead_letter"


def positioned(rows: Rows, partition: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of at most ``batch_rows`` rows with their positions as metadata."""
    for start in range(0, rows.batch.num_rows, batch_rows):
        where = {PARTITION: str(partition), OFFSET: str(rows.offset + start)}
        yield rows.batch.slice(start, batch_rows).replace_schema_metadata(where)


def dead_letters(refused: Refused, partition: int | Int64) -> pa.RecordBatch:
    """Refused positions as a batch of ``DEAD_LETTER_SCHEMA``.

    Args:
        partition: of all of them, or of each.
    """
    columns = [
        pa.array(np.broadcast_to(partition, refused.offsets.shape).astype(np.int32)),
        pa.array(refused.offsets, pa.int64()),
        pa.array(refused.reasons, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTER_SCHEMA)


def refusal(refused: Refused, partition: int | Int64) -> pa.RecordBatch:
    """The dead letters of refused positions, counted for the operator."""
    count("operator_dead_letters", len(refused.offsets))
    count("operator_dead_source", len(refused.offsets))
    return dead_letters(refused, partition)


def reading(reader: beam.DoFn) -> Any:
    """A reader's transform to the outputs ``records`` and ``dead_letter``, both of batches.

    Beam would pickle elements of a type that it does not know.
    """
    read = beam.ParDo(reader).with_output_types(pa.RecordBatch, **{DEAD_LETTER: pa.RecordBatch})
    return read.with_outputs(DEAD_LETTER, main=RECORDS)
