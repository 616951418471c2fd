"""A release as messages: one for each row, and a seal that says it is complete.

Names and bytes are functions of the release alone, so a repetition writes the same message under
the same name, and a reader that keeps one value per name sees it once:

* a row: name = its release id (32 hex digits), value = the row as one JSON object, in the text
  form of the JSON Lines files;
* the seal: name ``seal-000012-000005``, value = window, trigger, number of rows and a digest; also
  of a release without rows.  It is written after all rows are durable;
* the manifest: name ``run`` (a further epoch: ``run-epoch-1``), value = `RunManifest` of
  `pipelines.connectors.sink`.  Kafka puts the run's id behind that name; sinks that cannot be read
  back put it before every seal and manifest.

The digest is BLAKE2b-128 over the rows' values in order of their names, each with a line feed.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.dp_transforms.batches import ids_of
from dpstream.pipelines.connectors.files.formats import encode
from dpstream.pipelines.connectors.sink import Name, RunManifest, name_of_release

ID_DIGITS = 32


class SealMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a seal says of its release."""

    kind: Literal["seal"]
    window: int
    trigger: int
    rows: int
    digest: str


class ReleaseMessages(NamedTuple):
    """A release as messages.

    Attributes:
        name: (window, trigger).
        ids: (n, 2) uint64 view of the release ids.
        keys, values: (n,) names and values of the rows, in the release's order.
        seal: what is written after them.
    """

    name: Name
    ids: npt.NDArray[np.uint64]
    keys: list[str]
    values: list[bytes]
    seal: SealMessage


def messages_of(batch: pa.RecordBatch) -> ReleaseMessages:
    """The messages of a sealed release."""
    window, trigger = name_of_release(batch)
    values = encode(batch, "jsonl").split(b"\n")[:-1]
    ids = ids_of(batch.column("release_id"))
    digits = np.ascontiguousarray(ids).tobytes().hex()
    keys = [digits[i : i + ID_DIGITS] for i in range(0, len(digits), ID_DIGITS)]
    seal = SealMessage(
        "seal", window, trigger, len(values), digest_of(zip(keys, values, strict=True))
    )
    return ReleaseMessages((window, trigger), ids, keys, values, seal)


def digest_of(rows: Iterable[tuple[str, bytes]]) -> str:
    """Of the (name, value) of a release's rows, in any order."""
    content = hashlib.blake2b(digest_size=16)
    for _, value in sorted(rows):
        content.update(value)
        content.update(b"\n")
    return content.hexdigest()


def seal_key(name: Name) -> str:
    """The name of a release's seal."""
    return f"seal-{name[0]:06d}-{name[1]:06d}"


def manifest_key(epoch: int) -> str:
    """The name of an epoch's manifest."""
    return "run" if epoch == 0 else f"run-epoch-{epoch}"


def is_row(key: str) -> bool:
    """Whether a message of this name is a row."""
    return re.fullmatch(f"[0-9a-f]{{{ID_DIGITS}}}", key) is not None


def text_of(what: SealMessage | RunManifest) -> bytes:
    """The value of a seal or a manifest."""
    return msgspec.json.encode(what)


def lines(values: Sequence[bytes]) -> bytes:
    """Rows as one text of JSON Lines."""
    return b"".join(value + b"\n" for value in values)
