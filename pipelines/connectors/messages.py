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

Where nothing can be read back (`WriteOnlySink`), nothing tells two runs apart but what is written,
so **every name begins with the run's id** and says it in a field of its own as well:
``RUN_ID/seal-000012-000005``, ``RUN_ID/run``, ``RUN_ID/run-epoch-1`` (a row's name, its release id,
differs between runs by itself).  A second run on the same place adds to the first and changes
nothing of it; readers group by run id.  A lost, older, forked or foreign store is not noticed
there: the data set's ledger must do it, and a restored store is refused.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms.batches import ids_of
from dpstream.pipelines.connectors.sink import Name, RunManifest, Sink, name_of_release
from dpstream.pipelines.formats.encodings import encode

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
    ids: Ids
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


class OutgoingRelease(NamedTuple):
    """A release on its way out."""

    run_id: str
    batch: pa.RecordBatch
    messages: ReleaseMessages


class ControlMessage(NamedTuple):
    """A seal, or a run's manifest.

    Attributes:
        kind: which of them.
        run_id: whose it is, as releases show it.
        name: its own; begins with the run id.
        value: its text.
        release: (window, trigger) that a seal is of.
    """

    kind: Literal["seal", "run"]
    run_id: str
    name: str
    value: bytes
    release: Name | None = None


class WriteOnlySink(Sink):
    """A sink that nothing can be read back from.

    Args:
        run_id: whose releases come, as they show it; a manifest says it too.
    """

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id

    @abstractmethod
    def _put_rows(self, releases: Sequence[OutgoingRelease]) -> None:
        """Write rows; on return they are durable."""

    @abstractmethod
    def _put_control_messages(self, messages: Sequence[ControlMessage]) -> None:
        """Write seals or a manifest; on return they are durable."""

    @override
    def prepare(self, restoring: bool = False) -> None:
        if restoring:
            raise PolicyError(
                "sink.kind",
                f"'{self.kind}' cannot be read back, and a restored store must be compared with it",
                "restore with `dpstream state restore --abandon`, which goes on in a new epoch, or "
                "publish to a folder and send it on from there",
            )

    @override
    def put_manifest(self, manifest: RunManifest) -> None:
        self._run_id = run_id = manifest.run_id
        name = f"{run_id}/{manifest_key(manifest.epoch)}"
        self._put_control_messages(
            [ControlMessage("run", run_id, name, msgspec.json.encode(manifest))]
        )

    @override
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        if only_compare:
            WriteOnlySink.prepare(self, restoring=True)  # refuses
        run_id = self._run_id
        if run_id is None:
            raise RunError("sink", "was not told whose releases these are", "report this as a bug")
        releases = [OutgoingRelease(run_id, batch, messages_of(batch)) for batch in batches]
        self._put_rows(releases)
        # Only now, that every row is acknowledged.
        self._put_control_messages([_seal(release) for release in releases])
        return [release.messages.name for release in releases]


def _seal(release: OutgoingRelease) -> ControlMessage:
    name, seal = release.messages.name, release.messages.seal
    return ControlMessage(
        "seal",
        release.run_id,
        f"{release.run_id}/{seal_key(name)}",
        msgspec.json.encode(seal),
        name,
    )
