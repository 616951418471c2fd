"""The sink of Pub/Sub on the official emulator: one value per name, whatever is repeated."""

import os
import pickle
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import pyarrow as pa
import pytest

from accounting.errors import PolicyError, RunError
from dp_transforms.batches import release_schema
from pipelines.jobs.job import Job
from pipelines.operating import state_admin
from pipelines.sinks import write_only
from pipelines.sinks.formats import rows_of_text
from pipelines.sinks.messages import Messages, digest_of, lines, messages_of
from pipelines.sinks.pubsub import PubsubSink
from pipelines.sinks.sink import sink_of
from pipelines.stream import begin
from state import open as stores
from tests import pubsub_emulator
from tests.published import RUN_ID, RUNS, Published
from tests.relay import Relay

#: The run id as its releases show it: it was given, not drawn.
RUN = f"INSECURE-{RUN_ID}"
#: ``send`` is called for the manifest, then for rows and seals of the releases of a bundle.
Topics = Callable[[], tuple[str, str]]
SEND = "pipelines.sinks.pubsub_topic:PubsubTopic.send"


class Service(NamedTuple):
    """A running emulator and where it is."""

    host: str
    running: pubsub_emulator.Emulator


@pytest.fixture(scope="module")
def emulator() -> Iterator[Service]:
    with pubsub_emulator.running() as started:
        yield Service(os.environ[pubsub_emulator.HOST], started)


@pytest.fixture
def topic_of(emulator: Service) -> Topics:
    """Gives a new topic and a subscription that keeps its order."""
    return lambda: emulator.running.subscription(enable_message_ordering=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, pa.Table]:
    published = Published(tmp_path_factory.mktemp("made"))
    return published, published.files()[1]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Published]:
    yield Published(tmp_path / "place")
    stores.close_all()


class Received(NamedTuple):
    """One delivered message."""

    kind: str
    name: str
    window: str
    trigger: str
    value: bytes


def sink_table(topic: str) -> str:
    return f'kind = "pubsub"\ntopic = "{topic}"'


def received(subscription: str) -> list[Received]:
    """Everything the subscription delivers, in its order."""
    from google.cloud.pubsub_v1 import SubscriberClient

    found, empty = [], 0
    with SubscriberClient() as client:
        while empty < 2:
            answer = client.pull(subscription=subscription, max_messages=1000, timeout=5)
            empty += not answer.received_messages
            for one in answer.received_messages:
                given = dict(one.message.attributes)
                name = given.get("release_id") or given["name"]
                found.append(
                    Received(
                        given["kind"], name, given.get("window", ""), given.get("trigger", ""),
                        one.message.data,
                    )
                )  # fmt: skip
            if answer.received_messages:
                ids = [one.ack_id for one in answer.received_messages]
                client.acknowledge(subscription=subscription, ack_ids=ids)
    return found


def as_documented(messages: list[Received], job: Job) -> pa.Table:
    """What a subscriber does: one message per name, only what is sealed, held against the seal."""
    values: dict[str, Received] = {}
    for message in messages:
        assert values.setdefault(message.name, message).value == message.value, "two values"
    rows = [one for one in values.values() if one.kind == "row"]
    by_release = defaultdict(list)
    for row in rows:
        by_release[row.window, row.trigger].append((row.name, row.value))
    kept = []
    for one in values.values():
        if one.kind == "seal":
            seal = msgspec.json.decode(one.value)
            mine = by_release[one.window, one.trigger]
            assert (len(mine), digest_of(mine)) == (seal["rows"], seal["digest"])
            kept += mine
    table = rows_of_text(lines([value for _, value in kept]), release_schema(job.plan))
    return table.sort_by([(n, "ascending") for n in ("window_start", "trigger", "page")])


def test_the_subscription_gets_what_the_files_hold(
    topic_of: Topics, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    topic, subscription = topic_of()
    job = fresh.run(sink_table(topic))
    messages = received(subscription)
    assert as_documented(messages, job).equals(made[1]) and made[1].num_rows > 10
    assert [m.name for m in messages if m.kind == "run"] == [f"{RUN}/run"]
    assert sum(m.kind == "seal" for m in messages) == RUNS
    # In a window, each seal comes after the rows of its release.
    for window in ("0", "1"):
        mine = [m for m in messages if m.window == window]
        for trigger in ("1", "2", "3", "4"):
            kinds = [m.kind for m in mine if m.trigger == trigger]
            assert kinds == ["row"] * (len(kinds) - 1) + ["seal"]


@pytest.mark.parametrize("nth", [2, 3])
def test_killed_before_rows_and_before_the_seal(
    topic_of: Topics, fresh: Published, made: tuple[Published, pa.Table], nth: int
) -> None:
    topic, subscription = topic_of()
    sink = sink_table(topic)
    fresh.killed(sink, SEND, nth)
    before = received(subscription)
    assert {m.kind for m in before} == ({"run"} if nth == 2 else {"run", "row"})
    job = fresh.run(sink)
    messages = before + received(subscription)
    names = [m.name for m in messages if m.kind == "row"]
    assert len(names) == (nth - 1) * len(set(names))
    assert as_documented(messages, job).equals(made[1])


def test_a_twin_with_new_names_at_each_attempt_is_caught(
    topic_of: Topics, fresh: Published
) -> None:
    real = messages_of

    def random_names(batch: pa.RecordBatch) -> Messages:
        messages = real(batch)
        return messages._replace(keys=[secrets.token_hex(16) for _ in messages.keys])

    topic, subscription = topic_of()
    sink = sink_table(topic)
    fresh.killed(sink, SEND, 3)
    with mock.patch.object(write_only, "messages_of", random_names):
        job = fresh.run(sink)
    with pytest.raises(AssertionError):
        as_documented(received(subscription), job)


def test_what_cannot_be_compared_is_refused(topic_of: Topics, fresh: Published) -> None:
    topic, subscription = topic_of()
    sink = sink_table(topic)
    job = fresh.run(sink)
    backup = fresh.place.folder / "b"
    state_admin.backup(job, backup)
    state_admin.restore(job, backup, replace=True)
    received(subscription)
    with pytest.raises(PolicyError, match=r"'pubsub' cannot be read back.*--abandon"):
        fresh.run(sink)
    assert received(subscription) == []
    stores.close_all()
    with pytest.raises(PolicyError, match="nothing shows that it holds a release"):
        state_admin.expire(job, "2024-01-02T00:00:00Z")
    state_admin.abandon(job, backup, "2024-01-02T12:00:00Z", replace=True)
    fresh.run(sink)


def test_the_ledger_notices_what_the_topic_cannot(topic_of: Topics, fresh: Published) -> None:
    """A lost store is a new run with fresh noise, which the ledger charges or refuses."""
    sink = sink_table(topic_of()[0])
    fresh.run(sink, ledger=True)
    fresh.place.copy("state", "copy")
    fresh.run(sink, ledger=True)
    with pytest.raises(PolicyError, match="older or forked copy"):
        begin(fresh.job(sink, "copy", ledger=True))
    stores.close_all()
    lost = fresh.job(sink, "lost", ledger=True)
    privacy = msgspec.structs.replace(lost.privacy, insecure_test_run_id="33" * 16)
    begin(msgspec.structs.replace(lost, privacy=privacy))
    assert len(fresh.place.entries()) == 2


def test_a_topic_must_be_there(emulator: Service, fresh: Published) -> None:
    with pytest.raises(RunError, match=r"sink\.topic: is not there"):
        begin(fresh.job(sink_table("projects/test-project/topics/none")))
    sink = sink_of(fresh.job(sink_table("projects/test-project/topics/none")))
    assert pickle.loads(pickle.dumps(sink)).place == sink.place  # noqa: S301


def batches_of(made: tuple[Published, pa.Table]) -> tuple[Job, list[pa.RecordBatch]]:
    return made[0].job('kind = "parquet"\npath = "files"', "of-files"), made[0].batches("of-files")


def gone_for(
    seconds: float, emulator: Service, made: tuple[Published, pa.Table], patch: pytest.MonkeyPatch
) -> None:
    """Releases that are written while the service is away arrive once it is back."""
    topic, subscription = emulator.running.subscription(enable_message_ordering=True)
    job, given = batches_of(made)
    relay = Relay(emulator.host)
    patch.setenv(pubsub_emulator.HOST, relay.host)
    writer = PubsubSink(topic, RUN)
    writer.write(given[:4])
    relay.down()
    threading.Timer(seconds, relay.up).start()
    began = time.monotonic()
    writer.write(given[4:])
    assert time.monotonic() - began > seconds
    patch.setenv(pubsub_emulator.HOST, emulator.host)
    assert as_documented(received(subscription), job).equals(made[1])
    writer.close()
    relay.down()


def test_a_service_that_is_away_for_a_while(
    emulator: Service, made: tuple[Published, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_for(3, emulator, made, monkeypatch)


@pytest.mark.slow
def test_a_service_that_is_away_for_a_minute(
    emulator: Service, made: tuple[Published, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_for(60, emulator, made, monkeypatch)


def test_a_service_that_stays_away_is_a_coded_error(
    emulator: Service, made: tuple[Published, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, subscription = emulator.running.subscription(enable_message_ordering=True)
    job, given = batches_of(made)
    relay = Relay(emulator.host)
    monkeypatch.setenv(pubsub_emulator.HOST, relay.host)
    writer = PubsubSink(topic, RUN, 2.0)
    writer.write(given[:4])
    relay.down()
    began = time.monotonic()
    with pytest.raises(RunError, match="did not take all messages: TimeoutError"):
        writer.write(given[4:])
    assert time.monotonic() - began < 30
    relay.up()
    writer.write(given[4:])
    monkeypatch.setenv(pubsub_emulator.HOST, emulator.host)
    assert as_documented(received(subscription), job).equals(made[1])
    writer.close()
    relay.down()
