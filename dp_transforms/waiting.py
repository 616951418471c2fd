"""Records that wait beyond a pass: the partitions that the next pass has to read again.

A bounded run may stop at a trigger time before its last (``Run.upto``).  Records of later trigger
times are read, not decided, and not kept: each unit shard notes which partitions hold any, so
that the next pass reads those again and leaves all others alone.  The note is private, as the
store is; it decides what is read, never what is released: a record that is read again is answered
from its committed decision (`dp_transforms.bounding`), and one that is not read again was decided.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import numbers
from dpstream.state.store import Store


class _Waiting(msgspec.Struct, frozen=True):
    """A unit shard's note: of the pass through ``upto``; ``None``: any partition may be meant."""

    upto: int
    partitions: tuple[int, ...] | None


def note_waiting(plan: Plan, store: Store, shard: int, upto: int, waiting: pa.RecordBatch) -> None:
    """Remember where the records stand that a unit shard has left for a later pass.

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
    """Partitions that the pass after the one through ``upto`` has to read again, in order.

    Args:
        read: those that this pass has read: all of them, unless every shard has said otherwise.
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
