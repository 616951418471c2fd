"""Publish a recording again, into a folder that grows, a Kafka topic or a Pub/Sub topic.

For trying a live job on recorded data: the new stream's stamps are those of now (its files'
closings, its broker's clock), the data's own times stay.  Rows leave in the order and at the pace
of `pipelines.connectors.replay.source`; a message is one JSON object of the columns that the job
reads.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.folder.store import Folder
from dpstream.pipelines.connectors.folder.watch import close_files, rfc3339
from dpstream.pipelines.connectors.kafka.client import (
    REFUSED,
    check_options,
    library,
    looked_up,
    make_client,
)
from dpstream.pipelines.connectors.pubsub.sink import Message, PubsubTopic
from dpstream.pipelines.connectors.replay.source import OpenPieces, recording_of
from dpstream.pipelines.connectors.unbounded import wall_micros
from dpstream.pipelines.formats.encodings import json_lines
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import make_folder, replacing

#: A file of a folder is closed after so many rows, or so many seconds.
FILE_ROWS, FILE_SECONDS = 100_000, 1.0
#: How long a broker may take for all that is on its way.
FLUSH_SECONDS = 120.0
_PAUSE_SECONDS = 0.02
#: Other names of Kafka's settings that are set here, and those that would print or load something.
_ALIASES = (
    *("metadata.broker.list", "request.required.acks", "delivery.timeout.ms"),
    *("queue.buffering.max.ms", "transactional.id", "debug", "plugin.library.paths"),
)


class Target(ABC):
    """The target of republished rows."""

    @abstractmethod
    def put(self, batch: pa.RecordBatch) -> None:
        """Publish rows, soon."""

    def tick(self) -> None:
        """Note that time has passed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Publish what is left.

        Raises:
            RunError: something could not be published.
        """


class Republished(NamedTuple):
    """The published rows and messages: exact, for the operator."""

    rows: int
    refused: int
    seconds: float


def target_of(text: str, options: Mapping[str, str] | None = None) -> Target:
    """Return ``folder:PATH_OR_URL``, ``kafka:HOST:PORT/TOPIC`` or ``pubsub:projects/P/topics/T``.

    Args:
        text: one of these.
        options: of Kafka's client.

    Raises:
        UsageError: none of these, its client is missing or refuses the options.
        RunError: it cannot be reached.
    """
    kind, _, rest = text.partition(":")
    if options and kind != "kafka":
        raise UsageError("--option", "is for kafka", "leave it out")
    if kind == "folder" and rest:
        return FolderTarget(rest)
    if kind == "kafka" and "/" in rest:
        servers, _, topic = rest.rpartition("/")
        return KafkaTarget(servers, topic, options)
    if kind == "pubsub" and rest:
        return PubSubTarget(rest)
    raise UsageError(
        "--to", "names no target", "write folder:PATH, kafka:HOST:PORT/TOPIC or pubsub:TOPIC"
    )


def republish(job: Job, target: Target, speed: float | None) -> Republished:
    """Publish all rows of a job's files.

    Args:
        job: of kind ``parquet``, ``csv`` or ``jsonl``.
        target: where to.
        speed: seconds of stream a second; ``None``: as fast as it goes.

    Raises:
        UsageError, RunError: see `pipelines.connectors.replay.source.Replay`; or it cannot be
        published.
    """
    if job.source.unbounded:
        raise UsageError("table.format", "is not a recording", "name a job on files")
    pieces, begun = OpenPieces(recording_of(job, speed)), time.monotonic()
    row = rows = refused = 0
    while row < pieces.index.rows:
        now = None
        if speed is not None:
            now = pieces.index.bounds[0] + int((time.monotonic() - begun) * speed * 1_000_000)
        for part in pieces.slices(row, now):
            for piece in part.parts:
                if isinstance(piece, Rows):
                    target.put(piece.batch)
                    rows += piece.batch.num_rows
                else:
                    refused += len(piece.offsets)
            row = part.last + 1
            target.tick()
        target.tick()
        time.sleep(0 if speed is None else _PAUSE_SECONDS)
    target.close()
    return Republished(rows, refused, time.monotonic() - begun)


def json_rows(batch: pa.RecordBatch) -> list[bytes]:
    """Return rows as JSON objects, in the text form of the JSON Lines files."""
    return json_lines(batch).split(b"\n")[:-1]


class FolderTarget(Target):
    """Parquet files of a folder that grows, closed by markers."""

    def __init__(self, path: str) -> None:
        self._folder, self._held = Folder(path), list[pa.RecordBatch]()
        self._run, self._numbers = rfc3339(wall_micros()), itertools.count()
        self._since, self._rows = time.monotonic(), 0
        if self._folder.local:
            make_folder(Path(self._folder.path("")))

    @override
    def put(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch.replace_schema_metadata(None))
        self._rows += batch.num_rows

    @override
    def tick(self) -> None:
        if self._rows >= FILE_ROWS or time.monotonic() - self._since >= FILE_SECONDS:
            self.close()

    @override
    def close(self) -> None:
        files = []
        try:
            if self._held:
                files = [f"{self._run}/{next(self._numbers):06d}.parquet"]
                self._write(files[0], pa.Table.from_batches(self._held))
            close_files(self._folder.url, files)
        except (OSError, pa.ArrowInvalid) as error:
            raise file_error("--to", "cannot be written", error) from None
        self._held, self._rows, self._since = [], 0, time.monotonic()

    def _write(self, name: str, table: pa.Table) -> None:
        """A file; on a disk under another name until it is whole."""
        path = self._folder.path(name)
        if not self._folder.local:
            pq.write_table(table, path, filesystem=self._folder.open())
            return
        make_folder(Path(path).parent)
        with replacing(Path(path)) as draft:
            pq.write_table(table, draft)


class KafkaTarget(Target):
    """Messages of a Kafka topic.

    Args:
        servers, topic: where.
        options: further settings of the client, as in a job; secrets as ``env:NAME``.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, str] | None = None) -> None:
        library("--to")  # or it is named as missing
        settings = {
            "bootstrap.servers": servers,
            "log_level": 0,
            "linger.ms": 20,
            "acks": "all",
            "enable.idempotence": True,
            "message.timeout.ms": int(FLUSH_SECONDS * 1000),
        }
        given = options or {}
        check_options("--option", given, {*settings, *_ALIASES})
        self._topic, self._failed = topic, 0
        settings |= looked_up("--option", given)
        self._producer = make_client("producer", settings, ("--option", *REFUSED[1:]))

    @override
    def put(self, batch: pa.RecordBatch) -> None:
        for text in json_rows(batch):
            self._queue(text)
        self.tick()

    def _queue(self, text: bytes) -> None:
        """Hand over a message; a full queue empties, by its messages' own deadline if need be."""
        while not self._failed:
            try:
                self._producer.produce(self._topic, text, on_delivery=self._delivered)
                return
            except BufferError:
                self._producer.poll(0.1)
            except Exception as error:
                raise _refused(type(error).__name__) from None
        raise _refused("some were refused")

    @override
    def tick(self) -> None:
        self._producer.poll(0)

    @override
    def close(self) -> None:
        try:
            left = self._producer.flush(FLUSH_SECONDS)
        except Exception as error:
            raise _refused(type(error).__name__) from None
        if left or self._failed:
            raise _refused("some were refused" if self._failed else "no answer in time")

    def _delivered(self, error: Any, _: Any) -> None:
        self._failed += error is not None


def _refused(reason: str) -> RunError:
    return RunError(
        "--to", f"did not take all messages: {reason}", "check broker, topic and --option"
    )


class PubSubTarget(Target):
    """Messages of a Pub/Sub topic."""

    def __init__(self, topic: str) -> None:
        self._topic = PubsubTopic(topic, FLUSH_SECONDS, "--to")
        self._topic.look()

    @override
    def put(self, batch: pa.RecordBatch) -> None:
        self._topic.send(Message("", text, {}) for text in json_rows(batch))

    @override
    def close(self) -> None:
        self._topic.close()
