"""The sink of Kafka: one topic for one run, a message per row, a seal per release or part.

Rows are keyed by release id, so that a compacted topic keeps one value per release id for ever and
any consumer can do the same.  Manifest and seals are in partition 0; with two or more partitions
rows are in the others, and then what is published is read without reading the rows.

The topic must be compacted: with deletion alone a repetition would stay in it twice, and manifest
and seals would go after a while, with them every means to notice a lost, foreign or older store.
``compact,delete`` is allowed (a topic that lives for ever must let go of something); a restored
store, which is compared with all that was ever published, needs ``compact`` alone.

Rows bear the labels of `accounting.facts` as headers (``epsilon``, ``unit`` ..), seals and
manifests all facts as the header ``dpstream``.

**What is published** (`PublishedTopic`) is what partition 0 says: whose topic it is, and which
releases are sealed; each release is checked against its seals.  Partition 0 is read once and then
followed, message by message in the order of their offsets, so that a second run, or a fork of this
one that publishes at the same time, is seen by both of them: of two values under one name
compaction would keep the last and hide the other.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.facts import FACTS, encoded
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.pipelines.connectors.kafka.client import (
    FIXED,
    LOOK_SECONDS,
    KafkaTopic,
    Message,
    TopicDescription,
    check_options,
    patience,
)
from dpstream.pipelines.connectors.sink import (
    Name,
    PublishedRelease,
    ReadableSink,
    ReleaseMessages,
    RunManifest,
    SealMessage,
    digest_of,
    is_row,
    manifest_key,
    messages_of,
)
from dpstream.pipelines.formats.encodings import rows_of_text
from dpstream.pipelines.jobs.job import Job


class PublishedTopic:
    """Manifests and seals of a topic, as far as they were read.

    Attributes:
        seals: the seals by their names.
        parts: how many parts each release has that is sealed, or a part of it.
    """

    def __init__(self, topic: KafkaTopic) -> None:
        self.seals, self.parts = dict[str, SealMessage](), dict[Name, int]()
        self._manifests = dict[tuple[str, bytes], RunManifest | None]()  # in order of offsets
        self._topic, self._next = topic, 0

    def follow(self, seconds: float) -> None:
        """Read what has come since.

        Args:
            seconds: how long the broker may be away.

        Raises:
            PolicyError: a seal is none, or a release is sealed twice with different content.
        """
        for offset, key, value in self._topic.follow(0, self._next, seconds):
            if key.startswith("run"):
                self._manifests[key, value] = decoded(value, RunManifest)
            elif key.startswith("seal-"):
                self._note(key, decoded(value, SealMessage))
            self._next = offset + 1

    def _note(self, key: str, seal: SealMessage | None) -> None:
        if seal is None or seal.key != key:
            raise no_release()
        parts = self.parts.setdefault((seal.window, seal.trigger), seal.parts)
        if self.seals.setdefault(key, seal) != seal or parts != seal.parts:
            raise PolicyError(
                "sink.topic",
                f"holds two releases of window {seal.window}, trigger {seal.trigger}",
                "two copies of a store have published to it: stop the one that is not the run's,"
                " and write the other's releases to a new topic",
            )

    @property
    def owner(self) -> str | None:
        """The run whose topic it is: the first that named itself in it."""
        named = (manifest.run_id for manifest in self._manifests.values() if manifest is not None)
        return next(named, None)

    @property
    def manifests(self) -> list[RunManifest | None]:
        """The owner's, one for each epoch, and those that cannot be read.

        Another run's, which came when the topic was taken already, says nothing: that run has
        published nothing here.
        """
        owner = self.owner
        return [m for m in self._manifests.values() if m is None or m.run_id == owner]


def manifest_name(manifest: RunManifest) -> str:
    """Return a manifest's name in the topic.

    The name has the run, so that compaction does not replace the owner's manifest with that of a
    run that came too late.
    """
    return f"{manifest_key(manifest.epoch)}-{manifest.run_id}"


def read_kafka_releases(job: Job) -> pa.Table:
    """Return every sealed release of a job's topic as one table, each row once.

    Where the topic lets go of what is old (``compact,delete``), a release of which rows are gone is
    left out.

    Returns:
        The columns of `dp_transforms.batches.release_schema`, ordered by window, trigger and key:
        the rows that `pipelines.formats.encodings.read_releases` gives of the sink of
        files.

    Raises:
        PolicyError: a name has two values, or a seal does not fit its rows.
    """
    sink, plan = job.sink, job.plan
    topic = KafkaTopic(sink.servers or "", sink.topic or "", sink.options)
    rows, seals = dict[str, bytes](), dict[str, SealMessage]()
    # Seals first: the rows of a seal that is there are there, and a live topic grows.
    described = topic.describe()
    others = range(1, described.partitions)
    for key, value in itertools.chain(topic.read([0]), topic.read(others)):
        if is_row(key):
            if not value or b"\n" in value:  # a row is one line
                raise no_release()
            if rows.setdefault(key, value) != value:
                raise PolicyError(
                    "sink.topic",
                    "holds two values of one release id",
                    "do not use it: name a new topic, and write the store's releases to it with"
                    " `dpstream state releases JOB`",
                )
        if key.startswith("seal-"):
            seal = decoded(value, SealMessage)
            if seal is None or seals.setdefault(key, seal) != seal:
                raise no_release()
    schema = release_schema(plan)
    table = _table(rows, schema)
    goes = "delete" in described.policies
    return _sealed(table, rows, complete(seals.values()), job, goes).select(schema.names)


def complete(seals: Iterable[SealMessage]) -> dict[Name, list[SealMessage]]:
    """Return the seals of each release whose parts are all sealed, in order."""
    releases = dict[Name, list[SealMessage]]()
    for seal in sorted(seals, key=lambda seal: (seal.window, seal.trigger, seal.part)):
        releases.setdefault((seal.window, seal.trigger), []).append(seal)
    return {name: parts for name, parts in releases.items() if len(parts) == parts[0].parts}


def _table(rows: Mapping[str, bytes], schema: pa.Schema) -> pa.Table:
    """Rows with their names, in the order of these."""
    names = sorted(rows)
    try:
        table = rows_of_text(b"".join(rows[name] + b"\n" for name in names), schema)
        table = table.append_column("_name", pa.array(names, pa.string()))
    except (pa.ArrowException, ValueError):
        raise no_release() from None
    if any(table[name].null_count for name in ("window_start", "trigger", "release_id")):
        raise no_release()
    return table


def _sealed(
    table: pa.Table,
    rows: Mapping[str, bytes],
    releases: Mapping[Name, Sequence[SealMessage]],
    job: Job,
    goes: bool,
) -> pa.Table:
    """The rows of sealed releases, in order, each release held against its seals.

    Args:
        goes: rows may be gone.
    """
    timeline = job.plan.timeline
    keys = [(f.name, "ascending") for f in key_fields(job.plan)]
    table = table.sort_by([("window_start", "ascending"), ("trigger", "ascending"), *keys])
    start = table["window_start"].cast(pa.int64()).to_numpy()
    trigger = table["trigger"].to_numpy()
    window = timeline.last_window_of(start)
    keep = np.zeros(table.num_rows, np.bool_)
    names = table["_name"].to_pylist()
    steps = window * (timeline.triggers + 1) + trigger
    for (of_window, of_trigger), parts in releases.items():
        number = of_window * (timeline.triggers + 1) + of_trigger
        begin, end = np.searchsorted(steps, (number, number + 1)).tolist()
        ends = list(itertools.accumulate((seal.rows for seal in parts), initial=begin))
        if goes and end < ends[-1]:
            continue
        digests = [
            digest_of((name, rows[name]) for name in names[first:last])
            for first, last in itertools.pairwise(ends)
        ]
        if end != ends[-1] or digests != [seal.digest for seal in parts]:
            raise PolicyError(
                "sink.topic",
                f"holds not what the seal of window {of_window}, trigger {of_trigger} says",
                "name a new topic, and write the store's releases to it with"
                " `dpstream state releases JOB`",
            )
        keep[begin:end] = True
    return table.filter(pa.array(keep))


def decoded(value: bytes, kind: type[Any]) -> Any:
    """Return a message's value, ``None`` if it is none of this kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def no_release() -> PolicyError:
    """Return the error for a topic that is used for something else as well."""
    return PolicyError(
        "sink.topic", "holds a message that is no release of this run", "use a new topic"
    )


class _RowName(msgspec.Struct):
    """What a row's text says of its release."""

    window_start: datetime
    trigger: int


class KafkaSink(ReadableSink):
    """A topic.

    Args:
        servers, topic, options: those of the job.
        timeline: the public time axis, by which a row's text names its window.
    """

    kind, field, another, called = "kafka", "sink.topic", "a new topic", "Kafka's topic"

    def __init__(
        self, servers: str, topic: str, options: Mapping[str, str], timeline: Timeline
    ) -> None:
        check_options("sink", options, FIXED)
        self.place, self._timeline = topic, timeline
        self._topic = KafkaTopic(servers, topic, options)
        self._partitions: int | None = None
        self._topic_state = PublishedTopic(self._topic)
        self._loose: dict[Name, dict[str, bytes]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partitions": None, "_topic_state": None, "_loose": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._topic_state = PublishedTopic(self._topic)

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
            value, facts = msgspec.json.encode(manifest), encoded(manifest.facts)
            self._topic.send([(manifest_name(manifest), value, 0, [(FACTS, facts)])])
            self._refuse_taken(manifest)  # of two that came at once the broker knows the first

    @override
    def published(self) -> Iterator[PublishedRelease]:
        for name, seals in complete(self._followed().seals.values()).items():
            yield PublishedRelease(*name, seals)

    @override
    def unsealed(self) -> Iterator[Name]:
        self._followed(self._patience())
        self._loose = self._unsealed_rows()
        yield from sorted(self._loose)

    @override
    def same(self, one: PublishedRelease, batch: pa.RecordBatch) -> bool:
        return messages_of(batch).seal in one.proof

    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        seal = messages_of(batch).seal
        if seal.key not in self._topic_state.seals:
            self._followed()
        return self._topic_state.seals.get(seal.key) == seal

    @override
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        sealed = self._followed(self._patience()).seals
        releases = [messages_of(batch) for batch in batches]
        for release in releases:
            self._refuse_changed(release, only_compare)
        new = [release for release in releases if release.seal.key not in sealed]
        if new and not only_compare:
            partitions = self._count()
            self._topic.send([row for release in new for row in _rows(release, partitions)])
            # Only now, that every row is acknowledged.
            seals = [(r.seal.key, msgspec.json.encode(r.seal), 0, [(FACTS, r.facts)]) for r in new]
            self._topic.send(seals)
            # A fork that wrote meanwhile has left its seals beside these.
            sealed = self._followed(self._patience()).seals
        return [release.name for release in releases if release.seal.key in sealed]

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
        sealed = self._topic_state.seals.get(release.seal.key)
        parts = self._topic_state.parts.get(release.name, release.seal.parts)
        same = sealed in (None, release.seal) and parts == release.seal.parts
        if restoring and sealed is None:
            if self._loose is None:
                self._loose = self._unsealed_rows()
            mine = dict(zip(release.keys, release.values, strict=True))
            there = self._loose.get(release.name, {})
            of_others = release.seal.parts > 1  # rows that are not of this part
            same = same and all(
                _digest(mine[key]) == d if key in mine else of_others for key, d in there.items()
            )
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
        sealed = complete(self._topic_state.seals.values())
        unsealed = dict[Name, dict[str, bytes]]()
        for key, value in self._topic.read(range(self._count()), self._patience()):
            if not is_row(key):
                continue
            row = decoded(value, _RowName)
            if row is None:
                raise no_release()
            begin = round(row.window_start.timestamp() * MICROS_PER_SECOND)
            window = self._timeline.last_window_of(np.array([begin]))
            name = (int(window[0]), row.trigger)
            if name not in sealed:
                digest, rows = _digest(value), unsealed.setdefault(name, {})
                rows[key] = digest if rows.setdefault(key, digest) == digest else b""
        return unsealed


def open_sink(job: Job, run_id: str | None) -> KafkaSink:
    """Return the sink of a job."""
    sink = job.sink
    return KafkaSink(sink.servers or "", sink.topic or "", sink.options, job.plan.timeline)


def _rows(release: ReleaseMessages, partitions: int) -> Iterator[Message]:
    """Rows with their partitions: by release id, away from the seals' where there are several."""
    spread = np.zeros(len(release.keys), np.int64)
    if partitions > 1:
        spread = 1 + (release.ids[:, 0] % np.uint64(partitions - 1)).astype(np.int64)
    headers = [(name, text.encode()) for name, text in release.labels.items()]
    same = itertools.repeat(headers, len(release.keys))
    return zip(release.keys, release.values, spread.tolist(), same, strict=True)


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
