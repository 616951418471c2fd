"""Sinks that nothing can be read back from.

Nothing there tells two runs apart but what is written, so **every name begins with the run's id**
and says it in a field of its own as well: ``RUN_ID/seal-000012-000005``, ``RUN_ID/run``,
``RUN_ID/run-epoch-1`` (a row's name, its release id, differs between runs by itself).  A second run
on the same place adds to the first and changes nothing of it; readers group by run id.

A lost, older, forked or foreign store is not noticed here: the data set's ledger must do it, and a
restored store is refused.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.connectors.messages import (
    ReleaseMessages,
    manifest_key,
    messages_of,
    seal_key,
    text_of,
)
from dpstream.pipelines.connectors.sink import Name, RunManifest, Sink


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
        self._put_control_messages([ControlMessage("run", run_id, name, text_of(manifest))])

    @override
    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
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
        "seal", release.run_id, f"{release.run_id}/{seal_key(name)}", text_of(seal), name
    )
