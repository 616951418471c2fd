"""Messages of one Kafka partition as rows with positions, and those that are none.

What becomes of a message is a function of that message alone.  Offsets have holes (control
records of transactions, messages that were rolled back): a batch holds consecutive ones only.
"""

from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.pipelines.connectors.files.jsonl import Objects
from dpstream.pipelines.connectors.files.lines import MAX_LINE_BYTES
from dpstream.pipelines.connectors.files.rows import Int64, Part, Reason, Refused, runs

#: What Kafka calls a stamp that the broker gave (1: the producer did).
LOG_APPEND_TIME = 2
APPEND_TIME = "_append_time"
_INSTANT = pa.timestamp("us", "UTC")


class PartitionMessages(NamedTuple):
    """n messages in the order of their offsets.

    Attributes:
        offsets: (n,) int64.
        stamp_kinds: (n,) int64, see `LOG_APPEND_TIME`.
        stamps: (n,) int64 milliseconds.
        values: n payloads, ``None`` where there is none.
    """

    offsets: Int64
    stamp_kinds: Int64
    stamps: Int64
    values: list[bytes | None]

    @classmethod
    def of(cls, messages: Sequence[Any]) -> "PartitionMessages":
        """The client's messages, without a Python loop over them."""
        offsets = np.fromiter(map(methodcaller("offset"), messages), np.int64, len(messages))
        pairs = np.array(list(map(methodcaller("timestamp"), messages)), np.int64).reshape(-1, 2)
        values = list(map(methodcaller("value"), messages))
        return cls(offsets, pairs[:, 0], pairs[:, 1], values)

    @property
    def last_append(self) -> int:
        """The latest append time in milliseconds, or -1."""
        given = self.stamps[self.stamp_kinds == LOG_APPEND_TIME]
        return int(given.max()) if len(given) else -1


def parts(messages: PartitionMessages, objects: Objects, columns: Sequence[str]) -> Iterator[Part]:
    """Rows and refused positions of messages.

    Args:
        messages: of one partition.
        objects: decodes ``columns`` without `APPEND_TIME`.
        columns: of every batch, in this order: strings, and `APPEND_TIME` as instant.
    """
    texts = [b"" if value is None else value for value in messages.values]
    values = objects.decode(texts, MAX_LINE_BYTES)
    good = messages.stamp_kinds == LOG_APPEND_TIME
    if None in values:
        good &= np.array([value is not None for value in values])
    offsets, stamps = messages.offsets, messages.stamps
    if not good.all():
        yield _refused(messages, texts, good)
        values = [value for value, keep in zip(values, good.tolist(), strict=True) if keep]
        offsets, stamps = offsets[good], stamps[good]
    if values:
        given = [column for column in columns if column != APPEND_TIME]
        named = dict(zip(given, objects.arrays(values), strict=True))
        named[APPEND_TIME] = pa.array(stamps * 1_000, pa.int64()).cast(_INSTANT)
        yield from runs(offsets, pa.RecordBatch.from_pydict({c: named[c] for c in columns}))


def _refused(messages: PartitionMessages, texts: list[bytes], good: Any) -> Refused:
    """Why each message that is not good is none; the first reason that holds."""
    bad = np.flatnonzero(~good)
    sizes = np.array([len(texts[i]) for i in bad])
    reasons = np.where(sizes == 0, Reason.EMPTY.value, Reason.MALFORMED.value)
    reasons = np.where(sizes > MAX_LINE_BYTES, Reason.MESSAGE_TOO_LONG.value, reasons)
    foreign = messages.stamp_kinds[bad] != LOG_APPEND_TIME
    reasons = np.where(foreign, Reason.NOT_THE_BROKERS_STAMP.value, reasons)
    return Refused(messages.offsets[bad], reasons.tolist())
