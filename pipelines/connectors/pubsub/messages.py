"""Messages of Pub/Sub as rows, and those that are none.

What becomes of a message is a function of that message alone.  Its id names the record; a
position is only there for the dead letters, so that an operator finds what they mean:

* a message that is no row: partition 1, offset = its id where that is a number below 2^63 (the
  service's are), else 63 bits of BLAKE2b of the id;
* a row that a later stage refuses: partition 0, offset = micros of publishing of the first row of
  its batch, plus its place in the batch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.pipelines.connectors.pubsub.puller import publish_micros
from dpstream.pipelines.connectors.records.jsonl import Objects
from dpstream.pipelines.connectors.records.lines import MAX_LINE_BYTES
from dpstream.pipelines.connectors.records.rows import Part, Reason, Refused, Rows

PUBLISH_TIME, MESSAGE_ID = "_publish_time", "_message_id"
ROWS, LETTERS = 0, 1
_INSTANT = pa.timestamp("us", "UTC")


def parts(received: Sequence[Any], objects: Objects, columns: Sequence[str]) -> Iterator[Part]:
    """Rows (of partition `ROWS`) and refused positions (of `LETTERS`).

    Args:
        received: the service's ``ReceivedMessage``s.
        objects: decodes ``columns`` without `PUBLISH_TIME` and `MESSAGE_ID`.
        columns: of the batch, in this order: strings, and `PUBLISH_TIME` as instant.
    """
    texts = [m.message.data for m in received]
    values = objects.decode(texts, MAX_LINE_BYTES)
    bad = [i for i, value in enumerate(values) if value is None]
    if bad:
        offsets = np.array([number(received[i].message.message_id) for i in bad], np.int64)
        yield Refused(offsets, [_reason(texts[i]).value for i in bad])
        received = [m for m, value in zip(received, values, strict=True) if value is not None]
        values = [value for value in values if value is not None]
    if values:
        stamps = np.array([publish_micros(m.message) for m in received], np.int64)
        data = [c for c in columns if c not in (PUBLISH_TIME, MESSAGE_ID)]
        named = dict(zip(data, objects.arrays(values), strict=True))
        named[PUBLISH_TIME] = pa.array(stamps).cast(_INSTANT)
        named[MESSAGE_ID] = pa.array([m.message.message_id for m in received], pa.string())
        batch = pa.RecordBatch.from_arrays([named[c] for c in columns], list(columns))
        yield Rows(max(0, int(stamps[0])), batch)


def number(message_id: str) -> int:
    """A message's id as an offset."""
    if message_id.isascii() and message_id.isdigit() and len(message_id) < 19:
        return int(message_id)
    digest = hashlib.blake2b(message_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _reason(text: bytes) -> Reason:
    if not text:
        return Reason.EMPTY
    return Reason.MESSAGE_TOO_LONG if len(text) > MAX_LINE_BYTES else Reason.MALFORMED
