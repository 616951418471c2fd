"""The sink of Pub/Sub: a message per row, a seal per release, in order within a window.

Nothing can be listed or read back from a topic, so a store that was lost, is older or a fork, or
belongs to another run, is not noticed here: the data set's ledger must do it, and a restored store
is refused.  Delivery is at least once, and a worker that is killed before the seal writes the rows
again: **subscribers keep one message per name** (attribute ``release_id`` of a row, ``name`` of a
seal or manifest), and all of one name are the same bytes.

Messages (value as in `pipelines.sinks.messages`) carry the attributes ``kind`` (``row``, ``seal``,
``run``), ``window`` and ``trigger``, and the window as ordering key: a subscription that keeps the
order delivers a seal after its rows.  The service takes about 1 MB/s of one ordering key.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from typing_extensions import override

from accounting.errors import RunError, UsageError
from accounting.limits import SINK_SECONDS
from pipelines.sinks.messages import Messages, manifest_key, messages_of, seal_key, text_of
from pipelines.sinks.sink import Manifest, Name, WriteOnlySink

#: Looking at the topic when a run begins: nothing is lost by giving up early.
_LOOK_SECONDS = 30.0
#: What the client holds at once; more waits.
_HELD_MESSAGES, _HELD_BYTES = 20_000, 64 << 20


class _Message(NamedTuple):
    """One message; ``order`` is its ordering key."""

    order: str
    value: bytes
    attributes: dict[str, str]


class PubsubSink(WriteOnlySink):
    """A topic.

    Args:
        topic: ``projects/P/topics/T``.
        seconds: how long the service may be away.
    """

    kind, field, another = "pubsub", "sink.topic", "a new topic"

    def __init__(self, topic: str, seconds: float = SINK_SECONDS) -> None:
        self._topic, self._seconds = topic, seconds
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    @override
    def place(self) -> str:
        return self._topic

    @property
    @override
    def words(self) -> str:
        return f"Pub/Sub's topic {self._topic}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        super().prepare(restoring)
        from google.api_core import exceptions

        try:
            self._open().get_topic(topic=self._topic, timeout=_LOOK_SECONDS)
        except exceptions.NotFound:
            raise RunError(
                self.field, "is not there", "make it: gcloud pubsub topics create TOPIC"
            ) from None
        except Exception as error:
            raise _failed(error, "cannot be reached") from None

    @override
    def put_manifest(self, manifest: Manifest) -> None:
        name = manifest_key(manifest.epoch)
        self._send([_Message("run", text_of(manifest), {"kind": "run", "name": name})])

    @override
    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
        if only_compare:
            self.prepare(restoring=True)  # refuses
        releases = [messages_of(batch) for batch in batches]
        self._send([row for release in releases for row in _rows(release)])
        # Only now, that every row is acknowledged.
        self._send([_seal(release) for release in releases])
        return [release.name for release in releases]

    @override
    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.stop()

    def _open(self) -> Any:
        """The client: its batches, its retries with back-off, and a bound on what it holds."""
        if self._client is None:
            try:
                from google.cloud.pubsub_v1 import PublisherClient, types
            except ImportError:
                raise UsageError(
                    "sink.kind", "needs Pub/Sub's client", "pip install 'dpstream[pubsub]'"
                ) from None
            held = types.PublishFlowControl(
                message_limit=_HELD_MESSAGES,
                byte_limit=_HELD_BYTES,
                limit_exceeded_behavior=types.LimitExceededBehavior.BLOCK,
            )
            try:
                self._client = PublisherClient(
                    types.BatchSettings(max_bytes=4 << 20, max_latency=0.02, max_messages=1000),
                    types.PublisherOptions(
                        enable_message_ordering=True, flow_control=held, retry=_retry()
                    ),
                )
            except Exception as error:  # no credentials
                raise _failed(error, "cannot be reached") from None
        return self._client

    def _send(self, messages: Sequence[_Message]) -> None:
        """Publish and wait until all are acknowledged.

        With an ordering key the client would try for ever, so the deadline is kept here.

        Raises:
            RunError: refused, or not acknowledged in time; some may be published.
        """
        client, end = self._open(), time.monotonic() + self._seconds
        failed: Exception | None = None
        try:
            waiting = [
                client.publish(self._topic, m.value, ordering_key=m.order, **m.attributes)
                for m in messages
            ]
            for future in waiting:
                future.result(max(0.0, end - time.monotonic()))
        except Exception as error:
            failed = error
        if failed is not None:
            self.close()  # an ordering key that failed takes nothing more from this client
            raise _failed(failed, "did not take a release") from None


def _rows(release: Messages) -> list[_Message]:
    order, name = _order(release)
    return [
        _Message(order, value, {"kind": "row", "release_id": key, **name})
        for key, value in zip(release.keys, release.values, strict=True)
    ]


def _seal(release: Messages) -> _Message:
    order, name = _order(release)
    attributes = {"kind": "seal", "name": seal_key(release.name), **name}
    return _Message(order, text_of(release.seal), attributes)


def _order(release: Messages) -> tuple[str, dict[str, str]]:
    window, trigger = release.name
    return f"window-{window:06d}", {"window": str(window), "trigger": str(trigger)}


def _retry() -> Any:
    """What may pass is tried again, at most ten seconds apart."""
    from google.api_core import exceptions
    from google.api_core.retry import Retry, if_exception_type

    passing = if_exception_type(
        exceptions.Aborted,
        exceptions.Cancelled,
        exceptions.DeadlineExceeded,
        exceptions.InternalServerError,
        exceptions.ResourceExhausted,
        exceptions.ServiceUnavailable,
        exceptions.Unknown,
    )
    return Retry(predicate=passing, initial=0.1, maximum=10.0, multiplier=1.5)


def _failed(error: Exception, what: str) -> RunError:
    """The class of a client's error only: its text can quote what was sent."""
    return RunError(
        "sink.topic",
        f"{what}: {type(error).__name__}",
        "check the topic and the account's rights, then run again: the store has every release",
    )
