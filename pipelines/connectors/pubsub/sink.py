"""The sink of Pub/Sub: a message per row, a seal per release, in order within a window.

Nothing can be listed or read back from a topic (see `pipelines.connectors.write_only`).  Delivery
is at least once, and a worker that is killed before the seal writes the rows again: **subscribers
keep one message per name** (attribute ``release_id`` of a row, ``name`` of a seal or manifest), and
all of one name are the same bytes.

Messages (value as in `pipelines.connectors.messages`) carry the attributes ``kind`` (``row``,
``seal``, ``run``), ``run_id``, ``window`` and ``trigger``, and run and window as ordering key: a
subscription that keeps the order delivers a seal after its rows.  The service takes about 1 MB/s of
one ordering key.
"""

from collections.abc import Sequence

from typing_extensions import override

from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.pubsub.topic import Message, PubsubTopic
from dpstream.pipelines.connectors.sink import Name
from dpstream.pipelines.connectors.write_only import ControlMessage, OutgoingRelease, WriteOnlySink


class PubsubSink(WriteOnlySink):
    """A topic.

    Args:
        topic: ``projects/P/topics/T``.
        run_id: whose releases come, as they show it.
        seconds: how long the service may be away.
    """

    kind, field, another = "pubsub", "sink.topic", "a new topic"

    def __init__(
        self, topic: str, run_id: str | None = None, seconds: float = SINK_SECONDS
    ) -> None:
        super().__init__(run_id)
        self._topic = PubsubTopic(topic, seconds, self.field)

    @property
    @override
    def place(self) -> str:
        return self._topic.topic

    @property
    @override
    def words(self) -> str:
        return f"Pub/Sub's topic {self._topic.topic}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        super().prepare(restoring)
        self._topic.look()

    @override
    def _put_rows(self, releases: Sequence[OutgoingRelease]) -> None:
        self._topic.send(row for release in releases for row in _rows(release))

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
                },
            )
            for message in messages
        )

    @override
    def close(self) -> None:
        self._topic.close()


def _rows(release: OutgoingRelease) -> list[Message]:
    messages = release.messages
    order = _order(release.run_id, messages.name)
    common = {"kind": "row", **_attributes(release.run_id, messages.name)}
    return [
        Message(order, value, {"release_id": key, **common})
        for key, value in zip(messages.keys, messages.values, strict=True)
    ]


def _order(run_id: str, release: Name | None) -> str:
    return f"{run_id}/run" if release is None else f"{run_id}/window-{release[0]:06d}"


def _attributes(run_id: str, release: Name | None) -> dict[str, str]:
    if release is None:
        return {"run_id": run_id}
    window, trigger = release
    return {"run_id": run_id, "window": str(window), "trigger": str(trigger)}
