"""The published content of a topic: its register, and the releases, each checked against its seal.

The `Register` is what partition 0 says: whose topic it is, and which releases are sealed.  It is
read once and then followed, message by message in the order of their offsets, so that a second run,
or a fork of this one that publishes at the same time, is seen by both of them: of two values under
one name compaction would keep the last and hide the other.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.pipelines.connectors.kafka.topic import KafkaTopic
from dpstream.pipelines.connectors.sink import (
    Name,
    RunManifest,
    SealMessage,
    digest_of,
    is_row,
    manifest_key,
    seal_key,
)
from dpstream.pipelines.formats.encodings import rows_of_text
from dpstream.pipelines.jobs.job import Job


class PublishedTopic:
    """Manifests and seals of a topic, as far as they were read.

    Attributes:
        seals: (window, trigger) -> digest of every sealed release.
    """

    def __init__(self, topic: KafkaTopic) -> None:
        self.seals = dict[Name, str]()
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
        if seal is None or seal_key((seal.window, seal.trigger)) != key:
            raise no_release()
        if self.seals.setdefault((seal.window, seal.trigger), seal.digest) != seal.digest:
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
    rows, seals = dict[str, bytes](), dict[Name, SealMessage]()
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
            if seal is None or seals.setdefault((seal.window, seal.trigger), seal) != seal:
                raise no_release()
    schema = release_schema(plan)
    table = _table(rows, schema)
    return _sealed(table, rows, seals, job, "delete" in described.policies).select(schema.names)


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
    seals: Mapping[Name, SealMessage],
    job: Job,
    goes: bool,
) -> pa.Table:
    """The rows of sealed releases, in order, each release held against its seal.

    Args:
        goes: rows may be gone.
    """
    timeline = job.plan.timeline
    start = table["window_start"].cast(pa.int64()).to_numpy()
    trigger = table["trigger"].to_numpy()
    window = (start - timeline.start) // timeline.slide
    keep = np.zeros(table.num_rows, np.bool_)
    names = table["_name"].to_pylist()
    step = window * (timeline.triggers + 1) + trigger
    order = np.argsort(step, kind="stable")
    steps = step[order]
    for (of_window, of_trigger), seal in seals.items():
        number = of_window * (timeline.triggers + 1) + of_trigger
        begin, end = np.searchsorted(steps, (number, number + 1))
        mine = order[begin:end]
        if goes and len(mine) < seal.rows:
            continue
        digest = digest_of((names[i], rows[names[i]]) for i in mine)
        if (len(mine), digest) != (seal.rows, seal.digest):
            raise PolicyError(
                "sink.topic",
                f"holds not what the seal of window {of_window}, trigger {of_trigger} says",
                "name a new topic, and write the store's releases to it with"
                " `dpstream state releases JOB`",
            )
        keep[mine] = True
    keys = [(f.name, "ascending") for f in key_fields(job.plan)]
    filtered = table.filter(pa.array(keep))
    return filtered.sort_by([("window_start", "ascending"), ("trigger", "ascending"), *keys])


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
