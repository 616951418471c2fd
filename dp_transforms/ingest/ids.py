"""Keyed 128-bit ids of units and keys: MACs of their typed, length-prefixed canonical form."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import Ids
from dpstream.dp_transforms.noise.prf import Prf, frame

Int64 = npt.NDArray[np.int64]
#: Bytes of the messages that are worked on together: what fits the processor's cache.
_BYTES_AT_ONCE = 1 << 20
_TAGS = {"string": ord("s"), "int": ord("i"), "bool": ord("b"), "bytes": ord("y")}


def typed_ids(
    prf: Prf, fields: Sequence[tuple[str, pa.Array]], context: Int64 | None = None
) -> Ids:
    """Keyed 128-bit ids of typed, length-prefixed rows.

    Args:
        prf: AES under the id key of the purpose.
        fields: (declared type, canonical column without nulls) of each component.
        context: (n,) int64 that is part of the identity (the privacy period).
    """
    rows = len(fields[0][1])
    if context is None:
        context = np.zeros(rows, np.int64)
    # A block for the length, and each component with its tag and length, rounded up.
    size = 32 * rows + sum(column.nbytes for _, column in fields)
    at_once = max(1, _BYTES_AT_ONCE * rows // size) if rows else 1
    if rows <= at_once:
        return _typed_ids(prf, fields, context)
    ids = np.empty((rows, 2), np.uint64)
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        some = [(kind, column[part]) for kind, column in fields]
        ids[part] = _typed_ids(prf, some, context[part])
    return ids


def _typed_ids(prf: Prf, fields: Sequence[tuple[str, pa.Array]], context: Int64) -> Ids:
    rows, parts = len(context), []
    for kind, column in fields:
        if kind in ("int", "bool"):
            data = np.ascontiguousarray(column.cast(pa.int64()).to_numpy(zero_copy_only=False))
            raw = data.view(np.uint8)
            offsets = np.arange(0, 8 * rows + 1, 8, dtype=np.int64)
        else:
            _, offset_buffer, data_buffer = column.buffers()
            ends = np.frombuffer(offset_buffer, np.int32)
            offsets = ends[column.offset : column.offset + rows + 1].astype(np.int64)
            raw = np.frombuffer(data_buffer or b"", np.uint8)
        parts.append((_TAGS[kind], raw, offsets))
    message, lengths = frame(context, parts)
    return prf.mac(message, lengths)


def key_ids(plan: Plan, prf: Prf, batch: pa.RecordBatch) -> Ids:
    """(n, 2) ids of the key columns of canonical rows."""
    return typed_ids(prf, [(f.type, batch.column(f.column)) for f in plan.key])
