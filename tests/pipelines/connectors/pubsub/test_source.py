"""Pub/Sub as a source: messages in order of their stamps, acknowledged once they are kept."""

import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pyarrow as pa
import pytest
from google.api_core import exceptions

from dpstream.accounting.errors import DpstreamError, RunError, UsageError, required
from dpstream.pipelines.connectors.pubsub import source as source_pubsub
from dpstream.pipelines.connectors.pubsub.source import (
    ACK_MESSAGES,
    HORIZON_SECONDS,
    PULLERS,
    QUIET_SECONDS,
    Ages,
    PubSubInput,
    Puller,
    ReadPubSub,
    acknowledge,
    answer_of,
    described,
    oldest_micros,
    publish_micros,
)
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state.connecting import PASSING
from tests import guarded
from tests.drive import Drive, letters_of
from tests.golden.refusals import Refused
from tests.pipelines.conftest import TEMPLATE
from tests.pubsub_emulator import Emulator, running

CANARY = "CANARY7741"
MakePubSubJob = Callable[..., Job]


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with running() as emulator:
        yield emulator


@pytest.fixture
def make_pubsub_job(tmp_path: Path) -> MakePubSubJob:
    """``make(subscription)`` writes and loads a job on a subscription."""

    def make(subscription: str, batch_rows: int = 1000, **change: str) -> Job:
        text = TEMPLATE.format(kind="json", pattern="", sink="parquet")
        assert 'path = ""' in text
        text = text.replace('path = ""', f'subscription = "{subscription}"\nsettle = "500ms"')
        for old, new in change.items():
            text = text.replace(old, new)
        (tmp_path / "dpstream.toml").write_text(text)
        return msgspec.structs.replace(load_job(tmp_path), batch_rows=batch_rows)

    return make


@pytest.fixture(autouse=True)
def _no_pulls_of_before() -> Iterator[None]:
    yield
    PULLERS.close()


def row(i: int) -> dict[str, Any]:
    return {"user": f"{CANARY}{i}", "key": f"k{i % 3}", "time": "2024-01-01T00:00:00Z", "value": i}


class Finalizer:
    """The runner's: what is registered is called when it has stored the bundle."""

    def __init__(self) -> None:
        self.calls: list[functools.partial[None]] = []

    def register(self, call: functools.partial[None]) -> None:
        self.calls.append(call)

    def stored(self) -> None:
        for call in self.calls:
            call()
        self.calls.clear()


class Reader(Drive):
    """One reader, driven by hand."""

    def __init__(self, job: Job, source: ReadPubSub | None = None) -> None:
        super().__init__((source or ReadPubSub(job))._dofn, "_publish_time", element=0)
        self.finalizer = Finalizer()
        self.batches: list[pa.RecordBatch] = []
        self.dead: list[pa.RecordBatch] = []
        self.watermark: int | None = None

    def until(self, done: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "did not happen in time"
            self.step()

    def step(self) -> None:
        bundle = self.bundle(finalizer=self.finalizer)
        self.batches += bundle.records
        self.dead += bundle.dead
        self.watermark = bundle.watermark

    def rows(self) -> list[dict[str, Any]]:
        return [one for batch in self.batches for one in batch.to_pylist()]


def test_messages_are_rows(emulator: Emulator, make_pubsub_job: MakePubSubJob) -> None:
    topic, subscription = emulator.subscription()
    job = make_pubsub_job(subscription)
    before = time.time()
    ids = emulator.publish(topic, [row(i) for i in range(250)])
    reader = Reader(job)
    reader.until(lambda: len(reader.rows()) == 250)
    rows = {one["_message_id"]: one for one in reader.rows()}
    assert set(rows) == set(ids) and len(rows) == 250
    assert [rows[name]["value"] for name in ids] == [str(i) for i in range(250)]
    assert all(before - 1 < one["_publish_time"].timestamp() < before + 30 for one in rows.values())
    assert reader.batches[0].schema.names == list(job.columns)
    assert job.plan.record_id and job.plan.record_id.column == "_message_id"


def test_poisoned_messages(emulator: Emulator, make_pubsub_job: MakePubSubJob) -> None:
    topic, subscription = emulator.subscription()
    reader = Reader(make_pubsub_job(subscription))
    texts = [f"no JSON {CANARY}".encode(), b'{"user": [1]}', b'{"user": "x", "key": 1}',
             b'{"a": "' + b"x" * (1 << 20) + b'"}', b"\xff", b""]  # fmt: skip
    ids = emulator.publish(topic, texts)
    reader.until(lambda: len(letters_of(reader.dead)) == 5)
    reasons = ["malformed", "malformed", None, "message_too_long", "malformed", "empty"]
    expected = {(1, int(name), why) for name, why in zip(ids, reasons, strict=True) if why}
    assert letters_of(reader.dead) == expected
    assert [one["_message_id"] for one in reader.rows()] == [ids[2]]


def give_up_pulls() -> None:
    """Like the death of a worker; the emulator may take a while to notice, at most a pull."""
    PULLERS.close()
    time.sleep(source_pubsub.PULL_SECONDS + 0.2)


@pytest.fixture
def short_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_pubsub, "PULL_SECONDS", 1.5)


def test_acknowledged_when_stored_and_not_before(
    emulator: Emulator, make_pubsub_job: MakePubSubJob, short_pulls: None
) -> None:
    topic, subscription = emulator.subscription()
    job = make_pubsub_job(subscription)
    ids = emulator.publish(topic, [row(i) for i in range(20)])
    lost = Reader(job)
    lost.until(lambda: len(lost.rows()) == 20)
    # The worker dies: what it held comes again at its deadline, here at once.
    give_up_pulls()
    held = [call.args[1] for call in lost.finalizer.calls]
    emulator.subscriber.modify_ack_deadline(
        subscription=subscription, ack_ids=[one for group in held for one in group],
        ack_deadline_seconds=0,
    )  # fmt: skip
    again = Reader(job)
    again.until(lambda: len(again.rows()) == 20)
    assert {one["_message_id"] for one in again.rows()} == set(ids)
    taken = [one for call in again.finalizer.calls for one in call.args[1]]
    again.finalizer.stored()
    give_up_pulls()
    emulator.subscriber.modify_ack_deadline(
        subscription=subscription, ack_ids=taken, ack_deadline_seconds=0
    )
    after = Reader(job)
    after.until(lambda: after.watermark is not None)
    assert after.rows() == []


def test_a_restart_reads_again_what_its_store_lacks(
    emulator: Emulator, make_pubsub_job: MakePubSubJob, short_pulls: None
) -> None:
    topic, subscription = emulator.subscription()
    job = make_pubsub_job(subscription)
    old = emulator.publish(topic, [row(i) for i in range(30)])
    time.sleep(0.2)
    begin = time.time_ns() // 1000
    time.sleep(0.2)
    new = emulator.publish(topic, [row(i) for i in range(30, 60)])
    first = Reader(job)
    first.until(lambda: len(first.rows()) == 60)
    first.finalizer.stored()
    give_up_pulls()
    source = input_of(job).read(begin)
    assert source._dofn._again and source._dofn._ack_deadline == 60
    source._dofn._ack_deadline = 3
    second = Reader(job, source)
    taken_over = time.monotonic()
    second.until(lambda: len(second.rows()) >= 30)
    second.until(lambda: second.watermark is not None)
    assert time.monotonic() - taken_over >= 2.9, "what the first one held may come that late"
    assert {one["_message_id"] for one in second.rows()} == set(new)
    assert not set(old) & set(new)


def test_the_watermark_goes_on_when_nothing_comes(
    emulator: Emulator, make_pubsub_job: MakePubSubJob
) -> None:
    topic, subscription = emulator.subscription()
    reader = Reader(make_pubsub_job(subscription))
    begin = time.monotonic()
    reader.until(lambda: reader.watermark is not None)
    assert time.monotonic() - begin >= QUIET_SECONDS * 0.9, "nothing is known before"
    watermarks = []
    for _ in range(20):
        reader.step()
        watermarks.append(required(reader.watermark, "a step gives a watermark"))
    assert watermarks == sorted(watermarks) and watermarks[-1] > watermarks[0]
    assert time.time() * 1e6 - watermarks[-1] == pytest.approx(500_000, abs=400_000), "less settle"
    emulator.publish(topic, [row(1)])
    begin = time.monotonic()
    reader.until(lambda: len(reader.rows()) == 1)
    assert time.monotonic() - begin < 1.0


def test_ages() -> None:
    """What is still to come, by a clock of the test's."""
    ages = Ages(100.0)
    ages.came(100.1, 3_600_000_000)
    assert ages.age(100.2) is None, "an hour of backlog: nothing is known"
    ages.came(105.0, 1_800_000_000)
    assert ages.age(105.0) is None
    for second in range(106, 112):
        ages.came(float(second), 50_000)
    assert ages.age(111.0) == 1_800_000_000
    for second in range(112, 118):
        ages.came(float(second), 60_000)
    assert ages.age(117.0) == 60_000, "the backlog is worked off"
    ages.failed(117.5)
    assert ages.age(117.6) is None, "an outage: nothing is known"
    assert ages.age(117.5 + QUIET_SECONDS) == 0
    ages.came(120.0, 70_000)
    assert ages.age(120.1) == 70_000
    ages.gap(122.0)
    assert ages.age(122.5) == 70_000, "nobody listened: silence says nothing"
    assert ages.age(120.0 + HORIZON_SECONDS) == 0
    held = Ages(10.0, hold=60.0)
    assert held.age(69.9) is None and held.age(70.0) == 0


def test_start_checks(emulator: Emulator, make_pubsub_job: MakePubSubJob, refused: Refused) -> None:
    topic, good = emulator.subscription()
    source = input_of(make_pubsub_job(good))
    assert isinstance(source, PubSubInput) and not source.bounded
    assert source.identity() == [b"pubsub", good.encode(), topic.encode()]
    settings: list[dict[str, Any]] = [
        {"retain_acked_messages": False},
        {"ack_deadline_seconds": 10},
        {"push_config": {"push_endpoint": "http://127.0.0.1:1/x"}},
    ]
    for change in settings:
        _, bad = emulator.subscription(**change)
        refused(input_of(make_pubsub_job(bad)).read)
    refused(
        lambda: input_of(make_pubsub_job("projects/test-project/subscriptions/none")).identity()
    )
    refused(lambda: input_of(make_pubsub_job("none")).identity())
    job = make_pubsub_job(good, **{"settle =": 'stamp = "received"\nsettle ='})
    refused(input_of, job)


def test_an_outage(monkeypatch: pytest.MonkeyPatch, make_pubsub_job: MakePubSubJob) -> None:
    """The service goes away: no watermark is made up, and the job fails only much later."""
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    with running() as own:
        assert own.process is not None
        _, subscription = own.subscription()
        reader = Reader(make_pubsub_job(subscription))
        reader.until(lambda: reader.watermark is not None)
        guarded.kill(own.process)
        monkeypatch.setattr(source_pubsub, "PAUSE_SECONDS", 0.02)
        time.sleep(0.1)
        reader.step()
        stands = reader.watermark
        for _ in range(15):
            reader.step()
        assert reader.watermark == stands and reader.rows() == []
        monkeypatch.setattr(source_pubsub, "LOST_SECONDS", 0.01)
        with pytest.raises(RunError, match="cannot be pulled") as caught:
            for _ in range(100):
                reader.step()
        assert "127.0.0.1" not in "".join(traceback.format_exception(caught.value))
        with pytest.raises(RunError, match=r"table\.subscription: .* answer"):
            monkeypatch.setattr(source_pubsub, "START_SECONDS", 0.5)
            input_of(make_pubsub_job(subscription)).identity()


def test_what_a_runner_goes_back_behind_is_waited_for(
    emulator: Emulator, make_pubsub_job: MakePubSubJob
) -> None:
    """A bundle failed, or a checkpoint is gone back to: the puller lives on, its messages come
    again."""
    topic, subscription = emulator.subscription()
    reader = Reader(make_pubsub_job(subscription))
    reader.dofn._ack_deadline = 2
    reader.until(lambda: reader.watermark is not None)
    before = reader.progress
    emulator.publish(topic, [row(i) for i in range(5)])
    reader.until(lambda: len(reader.rows()) == 5)
    reader.step()
    stands, moved = reader.watermark or 0, time.monotonic()
    reader.until(lambda: (reader.watermark or 0) > stands)
    assert time.monotonic() - moved < 1.5, "a runner that goes on waits for nothing"
    reader.progress = before
    stands, back = reader.watermark or 0, time.monotonic()
    reader.until(lambda: (reader.watermark or 0) > stands)
    assert time.monotonic() - back >= 1.9


def test_a_subscription_that_is_deleted_ends_the_job(
    emulator: Emulator, make_pubsub_job: MakePubSubJob
) -> None:
    _, subscription = emulator.subscription()
    puller = Puller(subscription)
    emulator.subscriber.delete_subscription(subscription=subscription)
    with pytest.raises(RunError, match="NOT_FOUND"):
        for _ in range(100):
            puller.take(10, 0.1, 0.1)
    puller.close()
    assert grpc.StatusCode.NOT_FOUND.name not in PASSING


def test_a_reader_that_paused_takes_no_silence_for_proof(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_pubsub, "PULL_SECONDS", 3.0)
    _, subscription = emulator.subscription()
    puller = Puller(subscription)
    puller.take(10, 0.05, 0.05)
    time.sleep(2.7)  # a second before its deadline a pull is answered with nothing
    assert puller.take(10, 0.1, 0.1) == ([], None)
    puller.close()


def test_the_brake_holds_a_reader(emulator: Emulator, make_pubsub_job: MakePubSubJob) -> None:
    topic, subscription = emulator.subscription()
    reader = Reader(make_pubsub_job(subscription))
    backpressure = Held()
    reader.dofn._backpressure = backpressure
    emulator.publish(topic, [row(i) for i in range(5)])
    for _ in range(5):
        reader.step()
    assert reader.rows() == [] and reader.watermark is None
    backpressure.on = False
    reader.until(lambda: len(reader.rows()) == 5)


class Held:
    on = True

    def holds(self, watermark: int, rows: int | None = None) -> bool:
        return self.on


def test_a_missing_client_is_a_usage_error(
    make_pubsub_job: MakePubSubJob, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    job = make_pubsub_job("projects/p/subscriptions/s")
    monkeypatch.setitem(sys.modules, "google.cloud.pubsub_v1", None)
    monkeypatch.delitem(sys.modules, "dpstream.pipelines.connectors.pubsub.source")
    refused(input_of, job)


def test_offsets_of_ids() -> None:
    number = source_pubsub.number
    assert number("1234567890123456") == 1234567890123456
    for text in ("", "x", "9" * 19, "-1", "١"):
        assert 0 <= number(text) < 1 << 63
    assert number("x") == 2697552496229297191  # on every worker, in every process
    assert number("x") != number("y")
    assert source_pubsub.READERS >= 2


@pytest.mark.parametrize("name", ["s", "projects/p/topics/t", "projects/p/subscriptions/s/x"])
def test_a_subscription_has_its_full_name(name: str, refused: Refused) -> None:
    refused(described, name)


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [(exceptions.NotFound("SECRET"), UsageError, "does not exist"),
     (exceptions.PermissionDenied("SECRET"), RunError, "may not be read"),
     (exceptions.ServiceUnavailable("SECRET"), RunError, "ServiceUnavailable")],
)  # fmt: skip
def test_errors_by_their_class(raised: Exception, kind: type[DpstreamError], words: str) -> None:
    def ask() -> None:
        raise raised

    with pytest.raises(kind) as error:
        answer_of(ask)
    assert words in str(error.value) and "SECRET" not in str(error.value)
    assert error.value.__context__ is None and error.value.__cause__ is None
    assert answer_of(lambda: 3) == 3


def test_acknowledgements_go_in_parts_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Service:
        def acknowledge(self, subscription: str, ack_ids: list[str], **_: object) -> None:
            sizes.append(len(ack_ids))
            if len(sizes) == 1:
                raise exceptions.ServiceUnavailable("away")

    monkeypatch.setattr(source_pubsub, "client", Service)
    acknowledge("projects/p/subscriptions/s", ["x"] * (ACK_MESSAGES + 1))
    assert sizes == [ACK_MESSAGES, 1]


def test_a_pull_that_waited_says_that_nothing_waits() -> None:
    ages = Ages(0.0)
    assert ages.age(QUIET_SECONDS / 2) is None
    assert ages.age(QUIET_SECONDS) == 0
    ages.came(2.0, 500)
    assert ages.age(2.1) == 500


def test_the_oldest_of_the_horizon_counts() -> None:
    ages, now = Ages(0.0), 0.0
    for now, age in ((0.5, 900), (1.0, 300), (1.4, 500)):
        ages.came(now, age)
    while now < HORIZON_SECONDS:
        now += 0.5
        ages.came(now, 100)
        assert ages.age(now) is None or now > HORIZON_SECONDS
    assert ages.age(now + 0.1) == 900 or now + 0.1 - 0.5 > HORIZON_SECONDS
    ages.came(HORIZON_SECONDS + 5.0, 100)
    assert ages.age(HORIZON_SECONDS + 5.0) == 100


def test_a_fault_and_a_hold_make_it_unknown_again() -> None:
    ages = Ages(0.0, hold=5.0)
    assert ages.age(4.9) is None and ages.age(5.0) == 0
    ages.hold(8.0)
    ages.hold(6.0)
    assert ages.age(7.9) is None
    ages.failed(9.0)
    assert ages.age(9.5) is None and ages.age(9.0 + QUIET_SECONDS) == 0
    ages.gap(20.0)
    assert ages.age(20.0 + QUIET_SECONDS / 2) == 0


def test_when_messages_were_published() -> None:
    at = SimpleNamespace(publish_time=SimpleNamespace(seconds=3, nanos=999_999_999))
    assert publish_micros(at) == 3_999_999
    future = SimpleNamespace(publish_time=SimpleNamespace(seconds=1 << 40, nanos=0))
    assert oldest_micros([SimpleNamespace(message=future)]) == 0
