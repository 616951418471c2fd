"""Positions of records, which distinguish a record that is delivered twice from two records.

A record is named by its position (partition, offset), and of equal positions of a unit one counts.
That is right for input that can be delivered again.  Bounded input is not (a runner gives every
element once, whatever it retries): two rows with one position are an error of the numbering, and
all but one would be dropped without a message.
"""

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import numbers

#: What numbers rows safely, for whoever reads an error.
ADAPTERS = (
    "let `dpstream.Rows(job, ...)` or `dpstream.ReadTable(data, job)` number them, or set "
    "dpstream.partition and dpstream.offset so that each batch of a partition begins where the one "
    "before ended"
)
_OFFSET_BITS = 40


def require_once(records: pa.RecordBatch) -> None:
    """Refuse records of a shard if two of them have one position.

    Args:
        records: canonical records (``batches.record_schema``) of bounded input without record ids.

    Raises:
        UsageError: two records have the same position.
    """
    if repeats(numbers(records.column("partition")), numbers(records.column("offset"))):
        raise UsageError(
            "records",
            "have rows that share a position, all but one of which would be lost",
            ADAPTERS,
        )


def repeats(partition: Int32, offset: Int64) -> bool:
    """Return whether a position occurs twice.

    Args:
        partition, offset: (n,) of each row; neither is negative.
    """
    if len(partition) < 2:
        return False
    if int(offset.max()) >> _OFFSET_BITS == 0 and int(partition.max()) >> (63 - _OFFSET_BITS) == 0:
        place = partition.astype(np.int64) << _OFFSET_BITS
        place |= offset
        place.sort()
        return bool((place[1:] == place[:-1]).any())
    order = np.lexsort((offset, partition))
    partition, offset = partition[order], offset[order]
    return bool(((partition[1:] == partition[:-1]) & (offset[1:] == offset[:-1])).any())
