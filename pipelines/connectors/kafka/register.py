"""What partition 0 of a run's topic says: whose it is, and which releases are sealed.

It is read once and then followed, message by message in the order of their offsets, so that a
second run, or a fork of this one that publishes at the same time, is seen by both of them: of two
values under one name compaction would keep the last and hide the other.
"""

from typing import Any

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.kafka.topic import KafkaTopic
from dpstream.pipelines.connectors.messages import Seal, manifest_key, seal_key
from dpstream.pipelines.connectors.sink import Manifest, Name


class Register:
    """Manifests and seals of a topic, as far as they were read.

    Attributes:
        seals: (window, trigger) -> digest of every sealed release.
    """

    def __init__(self, topic: KafkaTopic) -> None:
        self.seals = dict[Name, str]()
        self._manifests = dict[tuple[str, bytes], Manifest | None]()  # in order of offsets
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
                self._manifests[key, value] = decoded(value, Manifest)
            elif key.startswith("seal-"):
                self._note(key, decoded(value, Seal))
            self._next = offset + 1

    def _note(self, key: str, seal: Seal | None) -> None:
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
        named = (found.run_id for found in self._manifests.values() if found is not None)
        return next(named, None)

    @property
    def manifests(self) -> list[Manifest | None]:
        """The owner's, one for each epoch, and those that cannot be read.

        Another run's, which came when the topic was taken already, says nothing: that run has
        published nothing here.
        """
        owner = self.owner
        return [m for m in self._manifests.values() if m is None or m.run_id == owner]


def manifest_name(manifest: Manifest) -> str:
    """A manifest's name in the topic: by run, so that compaction does not let the one of a run
    that came too late take the place of the owner's."""
    return f"{manifest_key(manifest.epoch)}-{manifest.run_id}"


def decoded(value: bytes, kind: type[Any]) -> Any:
    """A message's value, ``None`` if it is none of this kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def no_release() -> PolicyError:
    """The topic is used for something else as well."""
    return PolicyError(
        "sink.topic", "holds a message that is no release of this run", "use a new topic"
    )
