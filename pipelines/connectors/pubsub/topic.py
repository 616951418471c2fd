"""One Pub/Sub topic through its client: publishing with acknowledgements.

The client keeps connections, batches, retries and their back-off.  What it holds at once is bounded
here: its own flow control would wait without an end while the service is away.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.google_client import LOOK_SECONDS, failed, imported, retry

#: What the client is given before the oldest is acknowledged.
HELD_MESSAGES, HELD_BYTES = 20_000, 64 << 20


class Message(NamedTuple):
    """One message; ``order`` is its ordering key ('': none)."""

    order: str
    value: bytes
    attributes: Mapping[str, str]


class PubsubTopic:
    """A topic.

    Args:
        topic: ``projects/P/topics/T``.
        seconds: how long the service may be away, which is time in which nothing gets through.
        field: that names the topic, for errors.
    """

    def __init__(
        self, topic: str, seconds: float = SINK_SECONDS, field: str = "sink.topic"
    ) -> None:
        self.topic, self._seconds, self._field = topic, seconds, field
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def look(self) -> None:
        """Refuse a topic that is not there.

        Raises:
            UsageError: the client is not installed.
            RunError: no such topic, or the service cannot be reached.
        """
        client = self._open()
        from google.api_core import exceptions

        try:
            client.get_topic(topic=self.topic, timeout=LOOK_SECONDS)
        except exceptions.NotFound:
            raise RunError(
                self._field, "is not there", "make it: gcloud pubsub topics create TOPIC"
            ) from None
        except Exception as error:
            raise failed(self._field, error, "cannot be reached") from None

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
            raise failed(self._field, error, "did not take all messages") from None

    def _first(self, waiting: deque[tuple[Any, int]]) -> int:
        """Wait for the oldest; its size."""
        future, size = waiting.popleft()
        future.result(self._seconds)
        return size

    def close(self) -> None:
        """Let go of the client."""
        client, self._client = self._client, None
        if client is not None:
            client.stop()

    def _open(self) -> Any:
        if self._client is None:
            kind = "sink.kind" if self._field == "sink.topic" else self._field
            pubsub = imported("pubsub", "google.cloud.pubsub_v1", kind)
            batches = pubsub.types.BatchSettings(
                max_bytes=4 << 20, max_latency=0.02, max_messages=1000
            )
            options = pubsub.types.PublisherOptions(
                enable_message_ordering=True, retry=retry(self._seconds)
            )
            try:
                self._client = pubsub.PublisherClient(batches, options)
            except Exception as error:  # no credentials
                raise failed(self._field, error, "cannot be reached") from None
        return self._client
