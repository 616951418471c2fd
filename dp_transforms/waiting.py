"""Records that wait beyond a pass: the partitions that the next pass must read again.

A bounded run may stop at a trigger time before its last (``Run.upto``).  Records of later trigger
times are read, not decided, and not stored: each unit shard records which partitions have any, so
that the next pass reads only those again.  The note is private, as the store is; it decides what is
read, never what is released: a record that is read again gets its committed decision
(`dp_transforms.bounding`), and one that is not read again was decided.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import numbers
from dpstream.state.store import Store


class _Waiting(msgspec.Struct, frozen=True):
    """A unit shard's note, of the pass through ``upto``; ``None``: any partition may have some."""

    upto: int
    partitions: tuple[int, ...] | None


def note_waiting(plan: Plan, store: Store, shard: int, upto: int, waiting: pa.RecordBatch) -> None:
    """Record the partitions of the records that a unit shard has left for a later pass.

    Args:
        upto: the pass's last trigger time.
        waiting: canonical records; where record ids name them, their positions are not the files'.
    """
    partitions: tuple[int, ...] | None = None
    if plan.record_id is None or waiting.num_rows == 0:
        partitions = tuple(np.unique(numbers(waiting.column("partition"))).tolist())
    note = msgspec.json.encode(_Waiting(upto, partitions)).decode()
    store.set_metadata(_name(shard), note)


def waiting_partitions(store: Store, shards: int, upto: int, read: Sequence[int]) -> list[int]:
    """Return the partitions that the pass after the one through ``upto`` must read again, in order.

    Args:
        read: those that this pass has read: all of them, unless every shard has recorded less.
    """
    partitions = set[int]()
    for shard in range(shards):
        text = store.metadata(_name(shard))
        note = None if text is None else msgspec.json.decode(text, type=_Waiting)
        if note is None or note.upto != upto or note.partitions is None:
            return sorted(read)
        partitions.update(note.partitions)
    return sorted(partitions)


def _name(shard: int) -> str:
    return f"waiting-{shard}"
