"""A Kafka topic read on Prism: every message once, at its place, and a watermark that goes on."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.coders import BooleanCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.connectors.registry import input_of
from tests.drive import letters_of
from tests.kafka_broker import Broker
from tests.pipelines.kafka_jobs import kafka_job, record, users_of
from tests.runners.prism import Seen, running, wait_for

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
