"""The interface of a run's sink, and the form of releases as messages.

A `Sink` is a small object that pickles: it names the place, and opens its client where it is used.
What it must keep:

* a release is written idempotently by its id: whoever writes it again writes the same bytes under
  the same name, and readers see one value;
* a release counts as published once it is *sealed*, after all its rows are durable there;
* the manifest is written before the first release.

Sinks differ in what can be read back.  Where nothing can (the sink is no `ReadableSink`), a lost,
foreign, older or forked store is not noticed by the sink: the store's own epoch and restore notes
and the data set's ledger must do it, and a restored store, whose run has to be compared with what
is published, is refused.

**A release as messages**: one for each row, and a seal that says it is complete.  Names and bytes
are functions of the release alone, so a repetition writes the same message under the same name, and
a reader that keeps one value per name sees it once:

* a row: name = its release id (32 hex digits), value = the row as one JSON object, in the text
  form of the JSON Lines files;
* the seal: name ``seal-000012-000005``, value = window, trigger, number of rows and a digest; also
  of a release without rows.  It is written after all rows are durable.  A release of several parts
  (`dp_transforms.release`) has a seal for each, ``seal-000012-000005-000000`` and so on, which say
  their part and how many parts there are, and is complete with the last of them;
* the manifest: name ``run`` (a further epoch: ``run-epoch-1``), value = `RunManifest`.  Kafka
  puts the run's id behind that name; sinks that cannot be read back put it before every seal and
  manifest.

**The guarantee travels with the releases** (`accounting.facts`): a manifest holds the facts of its
run, and rows and seals bear the shortest of them as headers or attributes, where a sink has some.

The digest is BLAKE2b-128 over the values of the seal's rows in order of their names, each with a
line feed.

Where nothing can be read back (`WriteOnlySink`), nothing tells two runs apart but what is written,
so **every name begins with the run's id** and says it in a field of its own as well:
``RUN_ID/seal-000012-000005``, ``RUN_ID/run``, ``RUN_ID/run-epoch-1`` (a row's name, its release id,
differs between runs by itself).  A second run on the same place adds to the first and changes
nothing of it; readers group by run id.  A lost, older, forked or foreign store is not noticed
there: the data set's ledger must do it, and a restored store is refused.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.facts import FACTS, labels
from dpstream.dp_transforms.batches import TRIGGER, WINDOW, ids_of, part_of
from dpstream.pipelines.connectors.input_files import InputWatch
from dpstream.pipelines.formats.encodings import encode
from dpstream.pipelines.project.job_section import SinkKind

FORMAT = 1

#: (window, trigger): the public name of a release.
Name = tuple[int, int]


class RunManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of the run whose releases a sink holds.

    Attributes:
        format: version of this layout.
        run_id: the run's id as releases show it.
        epoch: epoch of the run from which on this manifest holds.
        plan_hash: the public plan.
        kind: of the sink.
        facts: what its releases promise, and to whom; files have them in a file of their own.
    """

    format: int
    run_id: str
    epoch: int
    plan_hash: str
    kind: SinkKind
    facts: dict[str, Any] = {}


class PublishedRelease(NamedTuple):
    """A sealed release in a sink; the sink compares by ``proof``."""

    window: int
    trigger: int
    proof: Any


class Sink(ABC):
    """The sink of a job's releases.

    Attributes:
        kind: the value of ``sink.kind``.
        field: the field of the job that names the target, for errors.
        another: words for a new target of the same kind, for errors.
        called: words before the target's name in a message.
        place: the target's name: a folder, a topic, a table.
        watch: compares the input before every release, if the input is files.
    """

    kind: SinkKind
    field: ClassVar[str]
    another: ClassVar[str]
    called: str
    place: str
    watch: InputWatch | None = None

    @property
    def description(self) -> str:
        """The place of the releases, for the user's message."""
        return f"{self.called} {self.place}"

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
            batches: the releases, or parts of them; each has its window, trigger and part in the
                schema's metadata.
            only_compare: write none that is not published, as long as others remain to be
                compared; each that is must be the same.

        Returns:
            (window, trigger) of those that are published now; of one in parts, with its last part.

        Raises:
            PolicyError: another content is published under the same name; the input has changed.
            RunError: they cannot be written.
        """
        if self.watch is not None:
            self.watch.check()
        written = set(self._write(batches, only_compare))
        return [name for name in map(name_of_release, filter(is_last, batches)) if name in written]

    @abstractmethod
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        """Write as ``write`` does; return the names of batches that are published now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of clients; the next use opens them again."""

    # What can be read back: nothing, unless it is a `ReadableSink`.

    def used(self) -> bool | None:
        """Return whether a run has ever published here, or begun to; ``None``: no way to tell."""
        return None

    def manifests(self) -> list[RunManifest | None]:
        """Return every manifest; ``None`` for one that cannot be read."""
        return []

    def published(self) -> Iterator[PublishedRelease]:
        """Yield the sealed releases in order of (window, trigger).

        Raises:
            PolicyError: it holds something that is no release.
        """
        return iter(())

    def content(self) -> str | None:
        """Return a digest of the names and bytes of all published releases, where that is cheap.

        Two equal ones mean that nothing was changed, lost or added.
        """
        return None

    def unsealed(self) -> Iterator[Name]:
        """Yield releases of which some rows are there and no seal, in order.

        Their writer was interrupted, and the next one must write these rows again.
        """
        return iter(())

    def holds(self, batch: pa.RecordBatch) -> bool:
        """Return whether this release, or part of one, is published with this content.

        Raises:
            PolicyError: the sink cannot be read back.
        """
        raise PolicyError(
            "sink.kind",
            f"'{self.kind}' cannot be read back, so nothing shows that it holds a release",
            "keep the releases in the store, or publish to a sink that can be read",
        )


class ReadableSink(Sink):
    """A sink whose releases can be listed and compared."""

    @abstractmethod
    @override
    def used(self) -> bool:
        """As `Sink.used`, never ``None``."""

    @abstractmethod
    @override
    def manifests(self) -> list[RunManifest | None]:
        """As `Sink.manifests`."""

    @abstractmethod
    @override
    def published(self) -> Iterator[PublishedRelease]:
        """As `Sink.published`."""

    @abstractmethod
    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        """As `Sink.holds`, never ``None``."""

    @abstractmethod
    def same(self, one: PublishedRelease, batch: pa.RecordBatch) -> bool:
        """Return whether a published release has this content, or this part."""


def name_of_release(batch: pa.RecordBatch) -> tuple[int, int]:
    """Return (window, trigger) of a sealed release."""
    metadata = batch.schema.metadata or {}
    if WINDOW not in metadata or TRIGGER not in metadata:
        raise RunError("sink", "got a release that names no window", "report this as a bug")
    return int(metadata[WINDOW]), int(metadata[TRIGGER])


def is_last(batch: pa.RecordBatch) -> bool:
    """Return whether a batch is the last part of its release, or all of it."""
    number, count = part_of(batch)
    return number + 1 == count


ID_DIGITS = 32


class SealMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the seal of a release, or of a part of one.

    Attributes:
        part: number of the part, from 0 on; parts: how many the release has.
    """

    kind: Literal["seal"]
    window: int
    trigger: int
    rows: int
    digest: str
    part: int = 0
    parts: int = 1

    @property
    def key(self) -> str:
        """The seal's name."""
        of_part = f"-{self.part:06d}" if self.parts > 1 else ""
        return f"seal-{self.window:06d}-{self.trigger:06d}{of_part}"


class ReleaseMessages(NamedTuple):
    """A release, or a part of one, as messages.

    Attributes:
        name: (window, trigger).
        batch: the release.
        ids: (n, 2) uint64 view of the release ids.
        keys, values: (n,) names and values of the rows, in the release's order.
        seal: what is written after them.
        facts: of the release, as JSON; ``labels``: those that each row bears.
    """

    name: Name
    batch: pa.RecordBatch
    ids: Ids
    keys: list[str]
    values: list[bytes]
    seal: SealMessage
    facts: bytes
    labels: Mapping[str, str]


def messages_of(batch: pa.RecordBatch) -> ReleaseMessages:
    """Return the messages of a sealed release, or of a part of one."""
    window, trigger = name_of_release(batch)
    values = encode(batch, "jsonl").split(b"\n")[:-1]
    ids = ids_of(batch.column("release_id"))
    digits = np.ascontiguousarray(ids).tobytes().hex()
    keys = [digits[i : i + ID_DIGITS] for i in range(0, len(digits), ID_DIGITS)]
    digest = digest_of(zip(keys, values, strict=True))
    seal = SealMessage("seal", window, trigger, len(values), digest, *part_of(batch))
    facts = batch.schema.metadata.get(FACTS.encode(), b"{}")
    short = labels(msgspec.json.decode(facts))
    return ReleaseMessages((window, trigger), batch, ids, keys, values, seal, facts, short)


def digest_of(rows: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of the (name, value) pairs of a release's rows, in any order."""
    content = hashlib.blake2b(digest_size=16)
    for _, value in sorted(rows):
        content.update(value)
        content.update(b"\n")
    return content.hexdigest()


def manifest_key(epoch: int) -> str:
    """Return the name of an epoch's manifest."""
    return "run" if epoch == 0 else f"run-epoch-{epoch}"


def is_row(key: str) -> bool:
    """Return whether a message of this name is a row."""
    return re.fullmatch(f"[0-9a-f]{{{ID_DIGITS}}}", key) is not None


class ControlMessage(NamedTuple):
    """A seal, or a run's manifest.

    Attributes:
        kind: ``seal``, or ``run`` for a run's manifest.
        run_id: id of the run, as releases show it.
        name: name of the message, which begins with the run id.
        value: text of the seal or the manifest, as bytes.
        release: (window, trigger) of the sealed release; ``None`` for a manifest.
        labels: the shortest facts of what it is about.
    """

    kind: Literal["seal", "run"]
    run_id: str
    name: str
    value: bytes
    release: Name | None = None
    labels: Mapping[str, str] = MappingProxyType({})


class WriteOnlySink(Sink):
    """A sink that cannot be read back.

    Args:
        run_id: id of the run whose releases are written; ``None`` before a manifest names it.
    """

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id

    @abstractmethod
    def _put_rows(self, run_id: str, releases: Sequence[ReleaseMessages]) -> None:
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
        value, short = msgspec.json.encode(manifest), labels(manifest.facts)
        self._put_control_messages([ControlMessage("run", run_id, name, value, None, short)])

    @override
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        if only_compare:
            WriteOnlySink.prepare(self, restoring=True)  # refuses
        run_id = self._run_id
        if run_id is None:
            raise RunError("sink", "was not told whose releases these are", "report this as a bug")
        releases = [messages_of(batch) for batch in batches]
        self._put_rows(run_id, releases)
        seals = [
            ControlMessage(
                "seal",
                run_id,
                f"{run_id}/{release.seal.key}",
                msgspec.json.encode(release.seal),
                release.name,
                release.labels,
            )
            for release in releases
        ]
        self._put_control_messages(seals)  # only now, that every row is acknowledged
        return [release.name for release in releases]
