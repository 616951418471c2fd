"""The sink of Kafka: one topic for one run, a message per row, a seal per release.

Rows are keyed by release id, so that a compacted topic keeps one value per release id for ever and
any consumer can do the same.  Manifest and seals are in partition 0 (see `Register`); with two or
more partitions rows are in the others, and then what is published is read without reading the rows.

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

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.connectors.kafka.client import check_options, patience
from dpstream.pipelines.connectors.kafka.read import (
    PublishedTopic,
    decoded,
    manifest_name,
    no_release,
)
from dpstream.pipelines.connectors.kafka.topic import (
    FIXED,
    LOOK_SECONDS,
    KafkaTopic,
    TopicDescription,
)
from dpstream.pipelines.connectors.sink import (
    Name,
    PublishedRelease,
    ReadableSink,
    ReleaseMessages,
    RunManifest,
    is_row,
    messages_of,
    name_of_release,
    seal_key,
)


class _RowName(msgspec.Struct):
    """What a row's text says of its release."""

    window_start: datetime
    trigger: int


class KafkaSink(ReadableSink):
    """A topic.

    Args:
        servers, topic, options: as in the job.
        timeline: the public time axis, by which a row's text names its window.
    """

    kind, field, another = "kafka", "sink.topic", "a new topic"

    def __init__(
        self, servers: str, topic: str, options: Mapping[str, str], timeline: Timeline
    ) -> None:
        check_options("sink", options, FIXED)
        self._topic, self._timeline = KafkaTopic(servers, topic, options), timeline
        self._partitions: int | None = None
        self._topic_state = PublishedTopic(self._topic)
        self._loose: dict[Name, dict[str, bytes]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partitions": None, "_topic_state": None, "_loose": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._topic_state = PublishedTopic(self._topic)

    @property
    @override
    def place(self) -> str:
        return self._topic.topic

    @property
    @override
    def description(self) -> str:
        return f"Kafka's topic {self._topic.topic}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        refuse_unfit(self._topic.describe(), restoring)

    @override
    def used(self) -> bool:
        return self._topic.written()

    @override
    def manifests(self) -> list[RunManifest | None]:
        return self._followed().manifests

    @override
    def put_manifest(self, manifest: RunManifest) -> None:
        self._refuse_taken(manifest)
        if manifest not in self._topic_state.manifests:
            self._topic.send([(manifest_name(manifest), msgspec.json.encode(manifest), 0)])
            self._refuse_taken(manifest)  # of two that came at once the broker knows the first

    @override
    def published(self) -> Iterator[PublishedRelease]:
        for name, digest in sorted(self._followed().seals.items()):
            yield PublishedRelease(*name, digest)

    @override
    def unsealed(self) -> Iterator[Name]:
        self._followed(self._patience())
        self._loose = self._unsealed_rows()
        yield from sorted(self._loose)

    @override
    def same(self, one: PublishedRelease, batch: pa.RecordBatch) -> bool:
        return bool(one.proof == messages_of(batch).seal.digest)

    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        name = name_of_release(batch)
        if name not in self._topic_state.seals:
            self._followed()
        return self._topic_state.seals.get(name) == messages_of(batch).seal.digest

    @override
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        sealed = self._followed(self._patience()).seals
        releases = [messages_of(batch) for batch in batches]
        for release in releases:
            self._refuse_changed(release, only_compare)
        new = [release for release in releases if release.name not in sealed]
        if new and not only_compare:
            partitions = self._count()
            self._topic.send([row for release in new for row in _rows(release, partitions)])
            # Only now, that every row is acknowledged.
            self._topic.send([(seal_key(r.name), msgspec.json.encode(r.seal), 0) for r in new])
            # A fork that wrote meanwhile has left its seals beside these.
            sealed = self._followed(self._patience()).seals
        return [release.name for release in releases if release.name in sealed]

    @override
    def close(self) -> None:
        self._topic.close()
        self._loose = self._partitions = None
        self._topic_state = PublishedTopic(self._topic)

    def _followed(self, seconds: float = LOOK_SECONDS) -> PublishedTopic:
        """Manifests and seals as they are now."""
        self._topic_state.follow(seconds)
        return self._topic_state

    def _patience(self) -> float:
        return patience(self._topic.options)

    def _refuse_taken(self, mine: RunManifest) -> None:
        if self._followed().owner not in (None, mine.run_id):
            raise PolicyError(
                self.field,
                "was taken by another run meanwhile",
                f"write this run's releases to {self.another}",
            )

    def _refuse_changed(self, release: ReleaseMessages, restoring: bool) -> None:
        """A published value never changes; a restored store is also held against the rows of a
        release that was cut off before its seal."""
        sealed = self._topic_state.seals.get(release.name)
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
            self._partitions = self._topic.describe(self._patience()).partitions
        return self._partitions

    def _unsealed_rows(self) -> dict[Name, dict[str, bytes]]:
        """Rows of releases without a seal: release -> name -> digest of the row, which is empty
        if the row has come with several values."""
        sealed, unsealed = self._topic_state.seals, dict[Name, dict[str, bytes]]()
        for key, value in self._topic.read(range(self._count()), self._patience()):
            if not is_row(key):
                continue
            row = decoded(value, _RowName)
            if row is None:
                raise no_release()
            begin = round(row.window_start.timestamp() * MICROS_PER_SECOND)
            name = ((begin - self._timeline.start) // self._timeline.slide, row.trigger)
            if name not in sealed:
                digest, rows = _digest(value), unsealed.setdefault(name, {})
                rows[key] = digest if rows.setdefault(key, digest) == digest else b""
        return unsealed


def _rows(release: ReleaseMessages, partitions: int) -> Iterator[tuple[str, bytes, int]]:
    """Rows with their partitions: by release id, away from the seals' where there are several."""
    spread = np.zeros(len(release.keys), np.int64)
    if partitions > 1:
        spread = 1 + (release.ids[:, 0] % np.uint64(partitions - 1)).astype(np.int64)
    return zip(release.keys, release.values, spread.tolist(), strict=True)


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


def refuse_unfit(description: TopicDescription, restoring: bool = False) -> None:
    """Refuse a topic that would forget or lose what it has acknowledged.

    Args:
        description: what it is.
        restoring: the run is to be compared with all that was ever published there.

    Raises:
        PolicyError: names the setting.
    """
    if "compact" not in description.policies:
        raise PolicyError(
            "sink.topic",
            "is not compacted: it would keep repetitions, and forget what was published",
            "set cleanup.policy=compact on the topic",
        )
    if restoring and description.policies != {"compact"}:
        raise PolicyError(
            "sink.topic",
            "lets releases go, and a restored store must be compared with all of them",
            "set cleanup.policy=compact, if nothing is gone yet; else restore with --abandon",
        )
    if description.replicas > 1 and description.in_sync < 2:
        raise PolicyError(
            "sink.topic",
            "is replicated, but one replica acknowledges alone: with it releases would be lost",
            "set min.insync.replicas=2 on the topic",
        )
