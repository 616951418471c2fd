"""The sink of Kafka: one topic for one run, a message per row, a seal per release.

Rows are keyed by release id, so that a compacted topic keeps one value per release id for ever and
any consumer can do the same.  Manifest and seals are in partition 0; with two or more partitions
rows are in the others, and then what is published is read without reading the rows.

The topic must be compacted: with deletion alone a repetition would stay in it twice, and manifest
and seals would go after a while, with them every means to notice a lost, foreign or older store.
``compact,delete`` is allowed (a topic that lives for ever must let go of something); a restored
store, which is compared with all that was ever published, needs ``compact`` alone.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from typing_extensions import override

from accounting.errors import PolicyError
from accounting.limits import MICROS_PER_SECOND, SINK_SECONDS
from accounting.timeline import Timeline
from pipelines.jobs.kafka_options import check_options
from pipelines.sinks.kafka_topic import FIXED, LOOK_SECONDS, KafkaTopic
from pipelines.sinks.messages import (
    Messages,
    Seal,
    is_row,
    manifest_key,
    messages_of,
    seal_key,
    text_of,
)
from pipelines.sinks.sink import Manifest, Name, Published, Sink
from pipelines.sinks.write import name_of_release


class _RowName(msgspec.Struct):
    """What a row's text says of its release."""

    window_start: datetime
    trigger: int


class KafkaSink(Sink):
    """A topic.

    Args:
        servers, topic, options: as in the job file.
        line: the public time axis, by which a row's text names its window.
    """

    kind, field, another = "kafka", "sink.topic", "a new topic"

    def __init__(
        self, servers: str, topic: str, options: Mapping[str, str], line: Timeline
    ) -> None:
        check_options("sink", options, FIXED)
        self._topic, self._line = KafkaTopic(servers, topic, options), line
        self._partitions: int | None = None
        self._seals: dict[Name, str] | None = None
        self._loose: dict[Name, dict[str, bytes]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partitions": None, "_seals": None, "_loose": None}

    @property
    @override
    def place(self) -> str:
        return self._topic.topic

    @property
    @override
    def words(self) -> str:
        return f"Kafka's topic {self._topic.topic}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        _, policies = self._topic.describe()
        if "compact" not in policies:
            raise PolicyError(
                self.field,
                "is not compacted: it would keep repetitions, and forget what was published",
                "set cleanup.policy=compact on the topic",
            )
        if restoring and policies != {"compact"}:
            raise PolicyError(
                self.field,
                "lets releases go, and a restored store must be compared with all of them",
                "set cleanup.policy=compact, if nothing is gone yet; else restore with --abandon",
            )

    @override
    def used(self) -> bool:
        return self._topic.written()

    @override
    def manifests(self) -> list[Manifest | None]:
        found: dict[str, Manifest | None] = {}
        for key, value in self._topic.read([0]):
            if key.startswith("run"):
                found[key] = decoded(value, Manifest)
        return list(found.values())

    @override
    def put_manifest(self, manifest: Manifest) -> None:
        if manifest not in self.manifests():
            self._topic.send([(manifest_key(manifest.epoch), text_of(manifest), 0)])

    @override
    def published(self) -> Iterator[Published]:
        for name, digest in sorted(self._read_seals().items()):
            yield Published(*name, digest)

    @override
    def unsealed(self) -> Iterator[Name]:
        self._seals = self._read_seals(SINK_SECONDS)
        self._loose = self._unsealed_rows()
        yield from sorted(self._loose)

    @override
    def same(self, one: Published, batch: pa.RecordBatch) -> bool:
        return bool(one.proof == messages_of(batch).seal.digest)

    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        if self._seals is None:
            self._seals = self._read_seals()
        return self._seals.get(name_of_release(batch)) == messages_of(batch).seal.digest

    @override
    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
        if self._seals is None:  # what others publish from now on is the same
            self._seals = self._read_seals(SINK_SECONDS)
        releases = [messages_of(batch) for batch in batches]
        for release in releases:
            self._refuse_changed(release, only_compare)
        if not only_compare:
            new = [release for release in releases if release.name not in self._seals]
            partitions = self._count()
            self._topic.send([row for release in new for row in _rows(release, partitions)])
            # Only now, that every row is acknowledged.
            self._topic.send([(seal_key(r.name), text_of(r.seal), 0) for r in new])
            self._seals |= {release.name: release.seal.digest for release in new}
        return [release.name for release in releases if release.name in self._seals]

    @override
    def close(self) -> None:
        self._topic.close()
        self._seals = self._loose = self._partitions = None

    def _refuse_changed(self, release: Messages, restoring: bool) -> None:
        """A published value never changes; a restored store is also held against the rows of a
        release that was cut off before its seal."""
        sealed = (self._seals or {}).get(release.name)
        same = sealed in (None, release.seal.digest)
        if restoring and sealed is None:
            if self._loose is None:
                self._loose = self._unsealed_rows()
            mine = dict(zip(release.keys, release.values, strict=True))
            there = self._loose.get(release.name, {})
            same = all(key in mine and _digest(mine[key]) == d for key, d in there.items())
        if not same:
            window, trigger = release.name
            raise PolicyError(
                self.field,
                f"holds another release of window {window}, trigger {trigger}",
                "a published value never changes: use the state that made it, or a new topic",
            )

    def _count(self) -> int:
        if self._partitions is None:
            self._partitions = self._topic.describe(SINK_SECONDS)[0]
        return self._partitions

    def _read_seals(self, seconds: float = LOOK_SECONDS) -> dict[Name, str]:
        """(window, trigger) -> digest of every sealed release."""
        found = {}
        for key, value in self._topic.read([0], seconds):
            if key.startswith("seal-"):
                seal = decoded(value, Seal)
                if seal is None or seal_key((seal.window, seal.trigger)) != key:
                    raise no_release()
                found[seal.window, seal.trigger] = seal.digest
        return found

    def _unsealed_rows(self) -> dict[Name, dict[str, bytes]]:
        """Rows of releases without a seal: release -> name -> digest of the row, which is empty
        if the row has come with several values."""
        sealed, found = self._seals or {}, dict[Name, dict[str, bytes]]()
        for key, value in self._topic.read(range(self._count()), SINK_SECONDS):
            if not is_row(key):
                continue
            row = decoded(value, _RowName)
            if row is None:
                raise no_release()
            begin = round(row.window_start.timestamp() * MICROS_PER_SECOND)
            name = ((begin - self._line.start) // self._line.slide, row.trigger)
            if name not in sealed:
                digest, rows = _digest(value), found.setdefault(name, {})
                rows[key] = digest if rows.setdefault(key, digest) == digest else b""
        return found


def _rows(release: Messages, partitions: int) -> Iterator[tuple[str, bytes, int]]:
    """Rows with their partitions: by release id, away from the seals' where there are several."""
    spread = np.zeros(len(release.keys), np.int64)
    if partitions > 1:
        spread = 1 + (release.ids[:, 0] % np.uint64(partitions - 1)).astype(np.int64)
    return zip(release.keys, release.values, spread.tolist(), strict=True)


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


def decoded(value: bytes, kind: type[Any]) -> Any:
    """A message's value, ``None`` if it is none of this kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError:
        return None


def no_release() -> PolicyError:
    """The topic is used for something else as well."""
    return PolicyError(
        "sink.topic", "holds a message that is no release of this run", "use a new topic"
    )
