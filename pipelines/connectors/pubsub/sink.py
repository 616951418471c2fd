"""The sink of Pub/Sub: a message per row, a seal per release or part, in order within a window.

Nothing can be listed or read back from a topic (see `pipelines.connectors.sink`).  Delivery
is at least once, and a worker that is killed before the seal writes the rows again: **subscribers
keep one message per name** (attribute ``release_id`` of a row, ``name`` of a seal or manifest), and
all of one name are the same bytes.

Messages (value as in `pipelines.connectors.sink`) carry the attributes ``kind`` (``row``,
``seal``, ``run``), ``run_id``, ``window`` and ``trigger``, the labels of `accounting.facts`
(``epsilon``, ``unit`` and others), and run and window as ordering key: a subscription that keeps
the order delivers a seal after its rows.  The service takes about 1 MB/s of one ordering key.

The client keeps connections, batches, retries and their back-off.  What it holds at once is bounded
here: its own flow control would wait without an end while the service is away.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.sink import ControlMessage, Name, ReleaseMessages, WriteOnlySink
from dpstream.pipelines.jobs.job import Job
from dpstream.state.connecting import (
    LOOK_SECONDS,
    ServiceClient,
    failed,
    imported,
    retry,
)

#: What the client is given before the oldest is acknowledged.
HELD_MESSAGES, HELD_BYTES = 20_000, 64 << 20


class Message(NamedTuple):
    """One message; ``order`` is its ordering key ('': none)."""

    order: str
    value: bytes
    attributes: Mapping[str, str]


class PubsubTopic(ServiceClient):
    """A topic.

    Args:
        topic: ``projects/P/topics/T``.
        seconds: how long the service may be away, which is time in which nothing gets through.
    """

    service = "Pub/Sub"

    def __init__(self, topic: str, seconds: float = SINK_SECONDS) -> None:
        super().__init__("sink.topic")
        self.topic, self._seconds = topic, seconds

    def look(self) -> None:
        """Refuse a topic that is not there.

        Raises:
            UsageError: the client is not installed.
            RunError: no such topic, or the service cannot be reached.
        """
        client = self._reached()
        from google.api_core import exceptions

        try:
            client.get_topic(topic=self.topic, timeout=LOOK_SECONDS, retry=retry(LOOK_SECONDS))
        except exceptions.NotFound:
            raise RunError(
                self.field, "is not there", "make it: gcloud pubsub topics create TOPIC"
            ) from None
        except Exception as error:
            raise failed(self.field, error, "cannot be reached") from None

    def send(self, messages: Iterable[Message]) -> None:
        """Publish and wait until all are acknowledged.

        With an ordering key the client would try for ever, so the deadline is kept here; it begins
        anew with each acknowledgement.

        Raises:
            RunError: refused, or nothing acknowledged in time; some may be published.
        """
        client, waiting, held = self._open(), deque[tuple[Any, int]](), 0
        try:
            for message in messages:
                size = len(message.value)
                while waiting and (len(waiting) >= HELD_MESSAGES or held + size > HELD_BYTES):
                    held -= self._first(waiting)
                future = client.publish(
                    self.topic, message.value, ordering_key=message.order, **message.attributes
                )
                waiting.append((future, size))
                held += size
            while waiting:
                self._first(waiting)
        except Exception as error:
            self.close()  # an ordering key that failed takes nothing more from this client
            raise failed(self.field, error, "did not take all messages") from None

    def _first(self, waiting: deque[tuple[Any, int]]) -> int:
        """Wait for the oldest; its size."""
        future, size = waiting.popleft()
        future.result(self._seconds)
        return size

    @override
    def _new_client(self) -> Any:
        pubsub = imported("pubsub", "google.cloud.pubsub_v1")
        batches = pubsub.types.BatchSettings(max_bytes=4 << 20, max_latency=0.02, max_messages=1000)
        options = pubsub.types.PublisherOptions(
            enable_message_ordering=True, retry=retry(self._seconds)
        )
        return pubsub.PublisherClient(batches, options)

    @override
    def _end(self, client: Any) -> None:
        client.stop()


class PubsubSink(WriteOnlySink):
    """A topic.

    Args:
        topic: ``projects/P/topics/T``.
        run_id: id of the run whose releases are written.
        seconds: how long the service may be away.
    """

    kind, field, another, called = "pubsub", "sink.topic", "a new topic", "Pub/Sub's topic"

    def __init__(
        self, topic: str, run_id: str | None = None, seconds: float = SINK_SECONDS
    ) -> None:
        super().__init__(run_id)
        self.place, self._topic = topic, PubsubTopic(topic, seconds)

    @override
    def prepare(self, restoring: bool = False) -> None:
        super().prepare(restoring)
        self._topic.look()

    @override
    def _put_rows(self, run_id: str, releases: Sequence[ReleaseMessages]) -> None:
        self._topic.send(row for release in releases for row in _rows(run_id, release))

    @override
    def _put_control_messages(self, messages: Sequence[ControlMessage]) -> None:
        self._topic.send(
            Message(
                _order(message.run_id, message.release),
                message.value,
                {
                    "kind": message.kind,
                    "name": message.name,
                    **_attributes(message.run_id, message.release),
                    **message.labels,
                },
            )
            for message in messages
        )

    @override
    def close(self) -> None:
        self._topic.close()


def open_sink(job: Job, run_id: str | None) -> PubsubSink:
    """Return the sink of a job."""
    return PubsubSink(job.sink.topic or "", run_id)


def _rows(run_id: str, release: ReleaseMessages) -> list[Message]:
    order = _order(run_id, release.name)
    common = {"kind": "row", **_attributes(run_id, release.name), **release.labels}
    return [
        Message(order, value, {"release_id": key, **common})
        for key, value in zip(release.keys, release.values, strict=True)
    ]


def _order(run_id: str, release: Name | None) -> str:
    return f"{run_id}/run" if release is None else f"{run_id}/window-{release[0]:06d}"


def _attributes(run_id: str, release: Name | None) -> dict[str, str]:
    if release is None:
        return {"run_id": run_id}
    window, trigger = release
    return {"run_id": run_id, "window": str(window), "trigger": str(trigger)}
