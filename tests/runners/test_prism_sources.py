"""Sources on Prism: every row once, in time, behind the watermark of its source."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.coders import BooleanCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.connectors.files.stream import StreamFiles
from dpstream.pipelines.connectors.folder.source import Files
from dpstream.pipelines.connectors.folder.store import close_files, place
from dpstream.pipelines.connectors.pubsub import source as pubsub_client
from dpstream.pipelines.connectors.pubsub.source import PULLERS
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.jobs.job import Job
from tests.drive import letters_of, rows_of
from tests.folders import MakeFolderJob, data, make_folder_job, positions
from tests.folders import write as write_folder
from tests.kafka_broker import Broker
from tests.paced import Paced, paced
from tests.pipelines.conftest import make_job
from tests.pipelines.connectors.files.test_stream import (
    SECOND,
    START,
    bounded,
    messy,
    table,
    write,
)
from tests.pipelines.connectors.pubsub.test_source import MakePubSubJob, make_pubsub_job, row
from tests.pipelines.kafka_jobs import kafka_job, record, users_of
from tests.pubsub_emulator import Emulator
from tests.pubsub_emulator import running as emulated
from tests.runners.prism import Seen, running, wait_for

__all__ = ["make_folder_job", "make_job", "make_pubsub_job"]

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_rows_of_the_bounded_source(tmp_path: Path, make_job: MakeJob, kind: str) -> None:
    job = make_job(kind, batch_rows=100)
    messy(tmp_path / "in", kind)
    with running(StreamFiles(job)) as (seen, result):
        result.wait_until_finish()
        outputs = rows_of(seen.batches()), letters_of(seen.batches("dead"))
    assert outputs == bounded(job)


def test_a_minute_in_two_seconds(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet")
    write(tmp_path / "in" / "a.parquet", "parquet", table([i * SECOND // 10 for i in range(600)]))
    with paced(30.0), running(Paced(job)) as (seen, result):
        wait_for(lambda: seen.rows() > 0)
        result.wait_until_finish()
        stamped = [(at, row) for at, batch in seen.records for row in batch["time"].to_pylist()]
    assert len(stamped) == 600
    first = min(at - (row.timestamp() - START / 1e6) / 30 for at, row in stamped)
    late = [at - first - (row.timestamp() - START / 1e6) / 30 for at, row in stamped]
    assert max(late) < 1.0, "rows come when they are due"
    assert stamped[-1][0] - stamped[0][0] == pytest.approx(2.0, abs=0.7)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_growing_folder(tmp_path: Path, make_folder_job: MakeFolderJob, kind: str) -> None:
    job, folder = make_folder_job(kind, batch_rows=30), tmp_path / "in"
    write_folder(folder / f"0.{kind}", data(90))
    close_files(folder, [f"0.{kind}"])
    with running(input_of(job).read()) as (seen, _):
        wait_for(lambda: seen.rows() == 90)
        (folder / f"bad.{kind}").write_bytes(b"\xff\xfe\n")
        latencies = []
        for i in range(1, 4):
            write_folder(folder / f"{i}.{kind}", data(90, i))
            names = [f"{i}.{kind}", *([f"bad.{kind}"] if i == 2 else [])]
            begin = time.monotonic()
            close_files(folder, names)

            def come(rows: int = 90 * (i + 1)) -> bool:
                return seen.rows() == rows

            wait_for(come)
            latencies.append(time.monotonic() - begin)
        wait_for(lambda: len(seen.batches("dead")) == 1)
        rows, letters = rows_of(seen.batches()), letters_of(seen.batches("dead"))
    assert set(rows) == set().union(*(positions(f"{i}.{kind}", 90) for i in range(4)))
    spot, reason = place(f"bad.{kind}"), "unreadable_file" if kind == "parquet" else "malformed"
    assert letters == {(spot.partition, spot.base, reason)}
    assert min(latencies) < 15, "soon, on a busy machine too"


def test_the_watermark_waits_for_slow_readers(
    tmp_path: Path, make_folder_job: MakeFolderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker is done when its files are read, not when it is."""
    job, folder, parts = make_folder_job("jsonl"), tmp_path / "in", Files.parts

    def slow(self: Files, piece: Any) -> Any:
        time.sleep(0.7)
        yield from parts(self, piece)

    monkeypatch.setattr(Files, "parts", slow)
    bell = time.time_ns() // 1000 + 500_000
    with running(input_of(job).read(), bell) as (seen, _):
        for i in range(3):
            write_folder(folder / f"{i}.jsonl", data(50, i))
        time.sleep(0.2)
        close_files(folder, [f"{i}.jsonl" for i in range(3)])
        time.sleep(0.4)
        close_files(folder)
        assert seen.rung is None
        wait_for(lambda: seen.rung is not None)
        assert seen.rung == 150


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with emulated() as server:
        yield server


def test_messages_while_they_are_published(
    emulator: Emulator, make_pubsub_job: MakePubSubJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, subscription = emulator.subscription()
    acknowledged: set[str] = set()
    tell = pubsub_client.acknowledge

    def note(name: str, ack_ids: list[str]) -> None:
        acknowledged.update(ack_ids)
        tell(name, ack_ids)

    monkeypatch.setattr(pubsub_client, "acknowledge", note)
    ids: list[str] = []

    def publish() -> None:
        for i in range(20):
            ids.extend(emulator.publish(topic, [row(100 * i + n) for n in range(100)]))
        emulator.publish(topic, [b"poison"])

    thread = threading.Thread(target=publish)
    bell = time.time_ns() // 1000 + 4_000_000
    with running(input_of(make_pubsub_job(subscription)).read(), bell) as (seen, _):
        thread.start()
        thread.join()
        wait_for(lambda: seen.rows() >= 2000 and len(seen.batches("dead")) > 0)
        wait_for(lambda: seen.rung is not None)
        wait_for(lambda: len(acknowledged) == 2001)
        message_ids = [one for batch in seen.batches() for one in batch["_message_id"].to_pylist()]
        letters = letters_of(seen.batches("dead"))
    PULLERS.close()
    assert sorted(message_ids) == sorted(ids)
    assert [reason for _, _, reason in letters] == ["malformed"]
    assert seen.rung == 2000


STEP = 200_000
#: (instant of the timer, wall clock when it fired), both in micros.
_FIRED: list[tuple[int, int]] = []
_LOCK = threading.Lock()


class Ticks(beam.DoFn):
    """A watermark timer at every `STEP` from the first batch on."""

    ARMED = ReadModifyWriteStateSpec("armed", BooleanCoder())
    TIMER = TimerSpec("tick", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(TIMER),  # noqa: B008
    ) -> None:
        if not armed.read():
            armed.write(True)
            timer.set(Timestamp(micros=(time.time_ns() // 1_000 // STEP + 1) * STEP))

    @on_timer(TIMER)
    def tick(
        self,
        at: Any = beam.DoFn.TimestampParam,
        timer: Any = beam.DoFn.TimerParam(TIMER),  # noqa: B008
    ) -> Iterator[Any]:
        with _LOCK:
            _FIRED.append((at.micros, time.time_ns() // 1_000))
        timer.set(Timestamp(micros=at.micros + STEP))
        yield from ()


class Ticking(beam.PTransform):
    """A source and a stage that waits for its watermark."""

    def __init__(self, source: beam.PTransform) -> None:
        super().__init__()
        self._source = source

    def expand(self, begin: Any) -> Any:
        read = begin | self._source
        keyed = read.records | beam.Map(lambda batch: (0, batch)).with_output_types(
            tuple[int, pa.RecordBatch]
        )
        _ = keyed | beam.ParDo(Ticks())
        return read


def given(seen: Seen) -> int:
    return seen.rows() + sum(batch.num_rows for batch in seen.batches("dead"))


def test_every_message_once(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    sent: list[Any] = [record(i) for i in range(5_000)]
    sent[17], sent[4_000] = b"{broken", None
    kafka.produce(topic, sent, 0)
    kafka.produce(topic, [record(i) for i in range(7)], 1)
    source = input_of(kafka_job(tmp_path, kafka.servers, topic, settle="200ms"))
    with running(source.read().as_one()) as (seen, _):
        wait_for(lambda: given(seen) == 5_007)
        kafka.produce(topic, [record(7)], 1)
        kafka.grow(topic, 3)
        kafka.produce(topic, [record(0)], 2)
        wait_for(lambda: given(seen) == 5_009)
        time.sleep(0.5)  # nothing comes twice
    expected = {(0, i): f"u{i}" for i in range(5_000) if i not in (17, 4_000)}
    expected |= {(1, i): f"u{i}" for i in range(8)} | {(2, 0): "u0"}
    assert users_of(seen.batches()) == expected
    assert letters_of(seen.batches("dead")) == {(0, 17, "malformed"), (0, 4_000, "empty")}


def test_the_watermark_goes_on_without_messages(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(3)
    kafka.produce(topic, [record(0)])
    source = input_of(kafka_job(tmp_path, kafka.servers, topic, settle="100ms"))
    with _LOCK:
        _FIRED.clear()
    with running(Ticking(source.read().as_one())):
        wait_for(lambda: len(_FIRED) >= 15)
    with _LOCK:
        fired = list(_FIRED)
    assert all(wall >= at + 100_000 for at, wall in fired), "not before the settled clock"
    waits = sorted(wall - at for at, wall in fired)
    assert waits[len(waits) // 2] < 10_000_000, "and soon after it, on a busy machine too"


def test_the_slowest_partition_holds_the_watermark(kafka: Broker, tmp_path: Path) -> None:
    """A restart finds a backlog.  Prism keeps one watermark for all elements of a source, that
    of the one it heard of last: spread, the rows of a slow partition come late (often)."""
    topic = kafka.topic(6)
    for partition in range(1, 6):
        kafka.produce(topic, [record(i) for i in range(400 * partition)], partition)
    source = input_of(kafka_job(tmp_path, kafka.servers, topic, batch_rows=50))
    bell = time.time_ns() // 1_000 + 200_000  # no message says that much
    with running(source.read().as_one(), bell) as (seen, _):
        wait_for(lambda: seen.rung is not None)
        assert seen.rung == 6_000


def outage(kafka: Broker, tmp_path: Path, seconds: float) -> None:
    """The broker is gone for a while: the pipeline lives, and all is delivered once."""
    topic = kafka.topic(2)
    kafka.produce(topic, [record(i) for i in range(100)], 0)
    source = input_of(kafka_job(tmp_path, kafka.servers, topic))
    with running(source.read().as_one()) as (seen, result):
        wait_for(lambda: given(seen) == 100)
        kafka.stop()
        try:
            time.sleep(seconds)
        finally:
            kafka.start()
        kafka.produce(topic, [record(i) for i in range(100, 200)], 0)
        kafka.produce(topic, [record(i) for i in range(200, 300)], 1)
        wait_for(lambda: given(seen) == 300)
        time.sleep(0.5)
        assert result.state == "RUNNING"
    expected = {(0, i): f"u{i}" for i in range(200)}
    assert users_of(seen.batches()) == expected | {(1, i): f"u{200 + i}" for i in range(100)}


def test_a_broker_that_is_down_for_seconds(kafka: Broker, tmp_path: Path) -> None:
    outage(kafka, tmp_path, 5)


@pytest.mark.slow
def test_a_broker_that_is_down_for_a_minute(kafka: Broker, tmp_path: Path) -> None:
    outage(kafka, tmp_path, 60)
