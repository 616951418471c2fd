"""The sink of Pub/Sub on the official emulator: one value per name, whatever is repeated."""

import os
import pickle
import secrets
import subprocess
import sys
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

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.batches import release_schema
from dpstream.pipelines.connectors import sink as release_messages
from dpstream.pipelines.connectors.pubsub import sink as pubsub_sink
from dpstream.pipelines.connectors.pubsub.sink import (
    HELD_MESSAGES,
    Message,
    PubsubSink,
    PubsubTopic,
)
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import ReleaseMessages, digest_of, messages_of
from dpstream.pipelines.formats.encodings import rows_of_text
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate import state_admin
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests import pubsub_emulator
from tests.fixed_runs import RUN_ID
from tests.golden.refusals import Refused
from tests.listening import Relay
from tests.published import RUNS, Published
from tests.sent import SINKS, sent

#: The run id as its releases show it: it was given, not drawn.
RUN = f"INSECURE-{RUN_ID}"
#: ``send`` is called for the manifest, then for rows and seals of the releases of a bundle.
Topics = Callable[[], tuple[str, str]]
SEND = "dpstream.pipelines.connectors.pubsub.sink:PubsubTopic.send"


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
    run_id: str
    epsilon: str
    contributions: str


def sink_table(topic: str) -> str:
    return f'kind = "pubsub"\ntopic = "{topic}"'


def received(subscription: str) -> list[Received]:
    """Everything the subscription delivers, in its order."""
    from google.cloud.pubsub_v1 import SubscriberClient

    messages, empty = [], 0
    with SubscriberClient() as client:
        while empty < 2:
            answer = client.pull(subscription=subscription, max_messages=1000, timeout=5)
            empty += not answer.received_messages
            for one in answer.received_messages:
                given = dict(one.message.attributes)
                name = given.get("release_id") or given["name"]
                messages.append(
                    Received(
                        given["kind"], name, given.get("window", ""), given.get("trigger", ""),
                        one.message.data, given["run_id"], given.get("epsilon", ""),
                        given.get("contributions", ""),
                    )
                )  # fmt: skip
            if answer.received_messages:
                ids = [one.ack_id for one in answer.received_messages]
                client.acknowledge(subscription=subscription, ack_ids=ids)
    return messages


def as_documented(messages: list[Received], job: Job) -> pa.Table:
    """What a subscriber does: one message per name, only what is sealed, held against the seal."""
    values: dict[str, Received] = {}
    for message in messages:
        assert values.setdefault(message.name, message).value == message.value, "two values"
    rows = [one for one in values.values() if one.kind == "row"]
    by_release = defaultdict(list)
    for row in rows:
        by_release[row.window, row.trigger].append((row.name, row.value))
    pairs = []
    for one in values.values():
        if one.kind == "seal":
            seal = msgspec.json.decode(one.value)
            mine = by_release[one.window, one.trigger]
            assert (len(mine), digest_of(mine)) == (seal["rows"], seal["digest"])
            pairs += mine
    table = rows_of_text(
        b"".join(value + b"\n" for value in [value for _, value in pairs]), release_schema(job.plan)
    )
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
    # Each says what it promises, the manifest in full.
    assert {(m.epsilon, m.contributions) for m in messages} == {("20.0", "9")}
    [run] = [m for m in messages if m.kind == "run"]
    guarantee = Path(made[0].place.folder / "files" / "guarantee.json").read_bytes()
    assert msgspec.json.decode(run.value)["facts"] == msgspec.json.decode(guarantee)
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


def test_one_with_new_names_at_each_attempt_is_caught(topic_of: Topics, fresh: Published) -> None:
    real = messages_of

    def random_names(batch: pa.RecordBatch) -> ReleaseMessages:
        messages = real(batch)
        return messages._replace(keys=[secrets.token_hex(16) for _ in messages.keys])

    topic, subscription = topic_of()
    sink = sink_table(topic)
    fresh.killed(sink, SEND, 3)
    with mock.patch.object(release_messages, "messages_of", random_names):
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


def test_the_ledger_notices_what_the_topic_cannot(
    topic_of: Topics, fresh: Published, refused: Refused
) -> None:
    """A lost store is a new run with fresh noise, which the ledger charges or refuses."""
    sink = sink_table(topic_of()[0])
    fresh.run(sink, ledger=True)
    fresh.place.copy("state", "copy")
    fresh.run(sink, ledger=True)
    refused(lambda: begin(fresh.job(sink, "copy", ledger=True)))
    stores.close_all()
    lost = fresh.job(sink, "lost", ledger=True)
    begin(msgspec.structs.replace(lost, test_run_id="33" * 16))
    assert len(fresh.place.entries()) == 2


def test_a_topic_must_be_there(emulator: Service, fresh: Published, refused: Refused) -> None:
    refused(lambda: begin(fresh.job(sink_table("projects/test-project/topics/none"))))
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
    writer._topic._seconds = 60.0  # the same sink goes on; a busy machine takes its time
    writer.write(given[4:])
    monkeypatch.setenv(pubsub_emulator.HOST, emulator.host)
    assert as_documented(received(subscription), job).equals(made[1])
    writer.close()
    relay.down()


def test_two_runs_on_one_topic(
    topic_of: Topics, tmp_path: Path, made: tuple[Published, pa.Table]
) -> None:
    """The second run changes nothing of the first one's: readers take the messages of a run."""
    topic, subscription = topic_of()
    other = "33" * 16
    first = Published(tmp_path / "first").run(sink_table(topic))
    with mock.patch("tests.published.RUN_ID", other):
        second = Published(tmp_path / "second")
        job = second.run(sink_table(topic))
        files = second.files()[1]
    messages = received(subscription)
    for run_id, of_run, expected in ((RUN, first, made[1]), (f"INSECURE-{other}", job, files)):
        mine = [m for m in messages if m.run_id == run_id]
        assert as_documented(mine, of_run).equals(expected)
        assert sum(m.kind == "seal" for m in mine) == RUNS
        assert all(m.name.startswith(f"{run_id}/") for m in mine if m.kind != "row")
    assert len({m.name for m in messages}) == len(messages), "a name of both"


def test_a_release_without_rows_says_its_run(
    topic_of: Topics, made: tuple[Published, pa.Table]
) -> None:
    topic, subscription = topic_of()
    writer = PubsubSink(topic, RUN)
    writer.write([batches_of(made)[1][0].slice(0, 0)])
    [seal] = received(subscription)
    assert (seal.kind, seal.run_id, seal.name) == ("seal", RUN, f"{RUN}/seal-000000-000001")
    assert msgspec.json.decode(seal.value)["rows"] == 0
    writer.close()
    with pytest.raises(RunError, match="whose releases"):
        PubsubSink(topic).write([])


def test_a_sink_that_was_used_pickles(topic_of: Topics, made: tuple[Published, pa.Table]) -> None:
    topic, subscription = topic_of()
    job, given = batches_of(made)
    writer = PubsubSink(topic, RUN)
    writer.write(given[:4])
    again = pickle.loads(pickle.dumps(writer))  # noqa: S301
    again.write(given[4:])
    assert as_documented(received(subscription), job).equals(made[1])
    writer.close()
    again.close()


def test_more_than_the_client_holds_while_the_service_is_away(
    emulator: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, _ = emulator.running.subscription()
    relay = Relay(emulator.host)
    monkeypatch.setenv(pubsub_emulator.HOST, relay.host)
    far = PubsubTopic(topic, 2.0)
    far.look()
    relay.down()
    many = [Message("window-0", b"x", {"kind": "row"})] * (HELD_MESSAGES + 5_000)
    raised = list[RunError]()

    def send() -> None:
        try:
            far.send(many)
        except RunError as error:
            raised.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits without an end"
    assert "TimeoutError" in str(raised[0])
    monkeypatch.setenv(pubsub_emulator.HOST, emulator.host)
    near = PubsubTopic(topic)
    near.send(many)
    near.close()


class Slow:
    """A client whose service takes a message in a fifth of a second; nothing overlaps."""

    def __init__(self) -> None:
        self.taken = self.most = 0
        self._free, self._left = time.monotonic(), 0

    def publish(self, topic: str, value: bytes, **attributes: str) -> "Slow":
        """A future of its own kind."""
        self._left += 1
        self.most = max(self.most, self._left)
        return self

    def result(self, timeout: float) -> None:
        """Wait for the oldest."""
        if timeout < 0.2:
            raise TimeoutError
        time.sleep(0.2)
        self.taken, self._left = self.taken + 1, self._left - 1

    def stop(self) -> None:
        """Nothing is open."""


def test_a_deadline_counts_time_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub_sink, "HELD_BYTES", 300)
    slow = PubsubTopic("projects/p/topics/t", 0.5)
    client = slow._client = Slow()
    slow.send([Message("w", b"x" * 100, {})] * 5)
    assert client.taken == 5 and client.most == 3


@pytest.mark.parametrize("missing", ["google.cloud.pubsub_v1", "google.api_core.exceptions"])
def test_a_client_that_is_not_installed(missing: str) -> None:
    with (
        mock.patch.dict(sys.modules, {missing: None}),
        pytest.raises(UsageError, match=r"sink\.kind: .*`pubsub`.*\[pubsub"),
    ):
        PubsubSink("projects/p/topics/t").prepare()


@pytest.mark.parametrize("kind", SINKS)
def test_what_is_sent_is_a_function_of_the_releases(kind: str, tmp_path: Path) -> None:
    """P6: another order of the input and other hash seeds send the same bytes."""
    Published(tmp_path / "0")
    digests = {sent(tmp_path / "0", kind, 0)}
    for seed in ("1", "2"):
        Published(tmp_path / seed)
        paths = ":".join(filter(None, sys.path))
        ended = subprocess.run(
            [sys.executable, "-m", "tests.sent", str(tmp_path / seed), kind, seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.add(ended.stdout.split()[-1])
    assert len(digests) == 1
