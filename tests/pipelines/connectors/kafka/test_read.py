"""A topic's register: whose it is, and what is sealed in it (a real broker is in test_topic)."""

from collections.abc import Iterator

import msgspec
import pytest
from typing_extensions import override

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.kafka.read import PublishedTopic, decoded, manifest_name
from dpstream.pipelines.connectors.kafka.topic import KafkaTopic
from dpstream.pipelines.connectors.sink import RunManifest, SealMessage, seal_key

Message = tuple[int, str, bytes]


class Log(KafkaTopic):
    """Partition 0 of a topic, as a list."""

    def __init__(self) -> None:
        super().__init__("", "t", {})
        self.messages: list[Message] = []
        self.begins: list[int] = []

    def put(self, key: str, value: object) -> None:
        data = value if isinstance(value, bytes) else msgspec.json.encode(value)
        self.messages.append((2 * len(self.messages), key, data))  # offsets have holes

    @override
    def follow(self, partition: int, begin: int, seconds: float) -> Iterator[Message]:
        assert partition == 0
        self.begins.append(begin)
        yield from (message for message in self.messages if message[0] >= begin)


def manifest(run: str, epoch: int = 0) -> RunManifest:
    return RunManifest(1, run, epoch, "hash", "kafka")


def test_the_first_run_owns_the_topic() -> None:
    log, mine = Log(), [manifest("r1"), manifest("r1", 1)]
    register = PublishedTopic(log)
    assert register.owner is None and register.manifests == []
    for one in (mine[0], manifest("late"), mine[1]):
        log.put(manifest_name(one), one)
    log.put("run-broken", b"no manifest")
    register.follow(1.0)
    assert register.owner == "r1" and register.manifests == [*mine, None]
    assert manifest_name(mine[1]) == "run-epoch-1-r1"


def test_seals_are_followed_from_where_it_stood() -> None:
    log = Log()
    register = PublishedTopic(log)
    log.put(seal_key((0, 1)), SealMessage("seal", 0, 1, 2, "d"))
    register.follow(1.0)
    log.put(seal_key((0, 1)), SealMessage("seal", 0, 1, 2, "d"))  # again, the same
    log.put(seal_key((0, 2)), SealMessage("seal", 0, 2, 0, "e"))
    register.follow(1.0)
    assert register.seals == {(0, 1): "d", (0, 2): "e"} and log.begins == [0, 1]


@pytest.mark.parametrize(
    ("key", "value"),
    [((0, 1), SealMessage("seal", 0, 1, 2, "other")), ((0, 2), SealMessage("seal", 0, 1, 2, "d")),
     ((0, 3), b"SECRET")],
)  # fmt: skip
def test_seals_that_cannot_be(key: tuple[int, int], value: object) -> None:
    log = Log()
    log.put(seal_key((0, 1)), SealMessage("seal", 0, 1, 2, "d"))
    log.put(seal_key(key), value)
    with pytest.raises(PolicyError) as error:
        PublishedTopic(log).follow(1.0)
    assert error.value.field == "sink.topic" and "SECRET" not in str(error.value)


def test_what_is_not_of_the_kind_is_nothing() -> None:
    assert decoded(b"\xff", SealMessage) is None and decoded(b"{}", SealMessage) is None
