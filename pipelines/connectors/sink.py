"""What a run needs of the place it publishes to, whatever kind it is.

A `Sink` is a small object that pickles: it names the place, and opens its client where it is used.
What it must keep:

* a release is written idempotently by its id: whoever writes it again writes the same bytes under
  the same name, and readers see one value;
* a release counts as published once it is *sealed*, after all its rows are durable there;
* the manifest is written before the first release.

Sinks differ in what can be read back.  Where nothing can (the sink is no `ReadableSink`), a lost,
foreign, older or forked store is not noticed by the sink: the store's own epoch and restore notes
and the data set's ledger must do it, and a restored store, whose run has to be compared with what
is published, is refused (see `pipelines.connectors.messages`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms.batches import TRIGGER, WINDOW
from dpstream.pipelines.connectors.watch import InputWatch
from dpstream.pipelines.project.job_section import SinkKind

FORMAT = 1

#: (window, trigger): the public name of a release.
Name = tuple[int, int]


class RunManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose releases a sink holds.

    Attributes:
        format: version of this layout.
        run_id: as releases show it, stamps included.
        epoch: epoch of the run from which on this manifest holds.
        plan_hash: the public plan.
        kind: of the sink.
    """

    format: int
    run_id: str
    epoch: int
    plan_hash: str
    kind: SinkKind


class PublishedRelease(NamedTuple):
    """A sealed release in a sink; ``proof`` is what the sink compares by."""

    window: int
    trigger: int
    proof: Any


class Sink(ABC):
    """Where a job's releases go.

    Attributes:
        kind: as ``sink.kind`` says.
        field: the field of the job that names the place.
        another: words for a fresh place of the same kind.
        watch: compares the input before every release, where it is files.
    """

    kind: SinkKind
    field: ClassVar[str]
    another: ClassVar[str]
    watch: InputWatch | None = None

    @property
    @abstractmethod
    def place(self) -> str:
        """The place's name: a folder, a topic, a table."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Where the releases are, for the user's message."""

    @abstractmethod
    def prepare(self, restoring: bool = False) -> None:
        """Refuse a place that is not there, or that is not fit to publish to.

        Args:
            restoring: the run is to be compared with all that was ever published here.

        Raises:
            PolicyError, RunError.
        """

    @abstractmethod
    def put_manifest(self, manifest: RunManifest) -> None:
        """Write a manifest, durably; the same one again changes nothing.

        Raises:
            RunError: it cannot be written.
        """

    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
        """Write sealed releases, once the run's input is compared; on return they are durable.

        Args:
            batches: with window and trigger in their schema's metadata.
            only_compare: write none that is not published, as long as others remain to be
                compared; each that is must be the same.

        Returns:
            (window, trigger) of those that are published now.

        Raises:
            PolicyError: another content is published under the same name; the input has changed.
            RunError: they cannot be written.
        """
        if self.watch is not None:
            self.watch.check()
        return self._write(batches, only_compare)

    @abstractmethod
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        """As ``write`` says."""

    @abstractmethod
    def close(self) -> None:
        """Let go of clients; the next use opens them again."""


class ReadableSink(Sink):
    """A sink whose releases can be listed and compared."""

    @abstractmethod
    def used(self) -> bool:
        """Whether a run has ever published here, or begun to."""

    @abstractmethod
    def manifests(self) -> list[RunManifest | None]:
        """Every manifest; ``None`` for one that cannot be read."""

    @abstractmethod
    def published(self) -> Iterator[PublishedRelease]:
        """Sealed releases in order of (window, trigger).

        Raises:
            PolicyError: it holds something that is no release.
        """

    def content(self) -> str | None:
        """A digest of the names and bytes of all that is published, where that is cheap to tell:
        two that are equal mean that nothing was changed, lost or added."""
        return None

    def unsealed(self) -> Iterator[Name]:
        """Releases of which some rows are there and no seal, in order: someone was cut off, and
        whoever goes on must write these rows again."""
        return iter(())

    @abstractmethod
    def same(self, one: PublishedRelease, batch: pa.RecordBatch) -> bool:
        """Whether a published release has this content."""

    @abstractmethod
    def holds(self, batch: pa.RecordBatch) -> bool:
        """Whether this release is published with this content."""


def manifests_of(sink: Sink) -> list[RunManifest | None]:
    """The manifests that a sink tells of: none where it cannot be read back."""
    return sink.manifests() if isinstance(sink, ReadableSink) else []


def releases_of(sink: Sink) -> list[PublishedRelease]:
    """The published releases that a sink tells of: none where it cannot be read back."""
    return list(sink.published()) if isinstance(sink, ReadableSink) else []


def unsealed_of(sink: Sink) -> list[Name]:
    """The releases without a seal that a sink tells of: none where it cannot be read back."""
    return list(sink.unsealed()) if isinstance(sink, ReadableSink) else []


def holds_release(sink: Sink, batch: pa.RecordBatch) -> bool:
    """Whether this release is published with this content.

    Raises:
        PolicyError: the sink cannot be read back.
    """
    if isinstance(sink, ReadableSink):
        return sink.holds(batch)
    raise PolicyError(
        "sink.kind",
        f"'{sink.kind}' cannot be read back, so nothing shows that it holds a release",
        "keep the releases in the store, or publish to a sink that can be read",
    )


def name_of_release(batch: pa.RecordBatch) -> tuple[int, int]:
    """(window, trigger) of a sealed release."""
    metadata = batch.schema.metadata or {}
    if WINDOW not in metadata or TRIGGER not in metadata:
        raise RunError("sink", "got a release that names no window", "report this as a bug")
    return int(metadata[WINDOW]), int(metadata[TRIGGER])
