"""Whole jobs of every source and sink on an engine, from the feed to what is published."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors import write as sinks
from dpstream.pipelines.connectors.folder.store import Markers, close_files
from dpstream.pipelines.connectors.kafka.reader import Kafka
from dpstream.pipelines.connectors.kafka.sink import read_kafka_releases
from dpstream.pipelines.connectors.pubsub import source as pubsub_client
from dpstream.pipelines.connectors.pubsub import source as source_pubsub
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import pubsub_emulator
from tests.kafka_broker import Broker
from tests.pipelines.connectors.pubsub.test_sink import as_documented, received, sink_table
from tests.pipelines.kafka_jobs import fresh, made, one_value_per_name, table, topic_of
from tests.published import Published
from tests.pubsub_emulator import running
from tests.runners.flink import LOCAL, local
from tests.runners.prism import binary, run_while, wait_for
from tests.written import read_dead_letters

__all__ = ["fresh", "local", "made"]

WINDOW = 4
JOB = """
version = 1

[data_set.shop]
unit = {{ name = "user" }}
insecure_test_secret = "{secret}"

[table.visits]
servers = "{servers}"
topic = "{topic}"
settle = "200ms"
unit_column = "user"
time_column = "time"

[job.live]
table = "visits"
key = ["key"]
aggregate.records = {{ kind = "count" }}
start = "{start}"
window = "4s"
release_every = "1s"
allowed_lateness = "2s"
budget = {{ epsilon = 1000.0, delta = 0.1, covers = "lifetime" }}
mechanism.allow_large_delta = true
contributions = 1
public_keys = "keys.csv"
shards = 2
sink = {{ kind = "parquet", path = "releases" }}
"""


def text_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


class Sender:
    """Sends records of unlike users and counts them by window and key."""

    def __init__(self, kafka: Broker, topic: str) -> None:
        self._kafka, self._topic, self.number = kafka, topic, 0
        self.sent: Counter[tuple[datetime, str]] = Counter()
        self.last = 0.0

    def send(self, seconds: float) -> None:
        """A few records and a broken message every 10 ms or so."""
        end = time.time() + seconds
        # Whole ms, as the broker's: no event may lie behind its append.
        while (now := int(time.time() * 1000) / 1000) < end:
            values: list[Any] = [b"{"]
            for key in ("a", "b", "a"):
                values.append({"user": f"u{self.number}", "key": key, "time": text_of(now)})
                self.sent[datetime.fromtimestamp(now // WINDOW * WINDOW, UTC), key] += 1
                self.number += 1
            self._kafka.produce(self._topic, values, self.number % 2)
            self.last = now


def released(folder: Path) -> dict[tuple[datetime, str], float]:
    """The last published count of every window and key."""
    last: dict[tuple[datetime, str], tuple[int, float]] = {}
    for path in folder.rglob("*.parquet"):
        if "dead" in str(path):
            continue
        for row in pq.read_table(path).to_pylist():
            at = row["window_start"], row["key"]
            last[at] = max(last.get(at, (0, 0.0)), (row["trigger"], row["records"]))
    return {at: count for at, (trigger, count) in last.items()}


def closed(folder: Path, last: float) -> bool:
    """Whether the last release of the window of an instant (seconds) is there."""
    window = datetime.fromtimestamp(last // WINDOW * WINDOW, UTC)
    paths = list(folder.rglob(f"*-{WINDOW + 2:06d}.parquet"))
    rows = (row for path in paths for row in pq.read_table(path).to_pylist())
    return any(row["window_start"] == window for row in rows)


def lost(job: Job, sent: Counter[tuple[datetime, str]]) -> int:
    """Records that were sent and neither counted nor late: a machine that has no time for seconds
    appends some after the lateness that is allowed."""
    released_counts = released(Path(job.sink.path))
    missing = {at: count - round(released_counts.get(at, 0)) for at, count in sent.items()}
    assert min(missing.values()) >= 0, "counted twice"
    letters = read_dead_letters(dead_letter_folder(job)).column("reason").to_pylist()
    return sum(missing.values()) - letters.count("late")


def from_the_end(self: Kafka, partition: int, millis: int) -> int:
    """Sabotaged `Kafka.at`: a restart that takes only what comes."""
    return self.end(partition)


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_record_is_counted_over_a_restart(
    kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool
) -> None:
    if sabotaged:
        monkeypatch.setattr(Kafka, "at", from_the_end)
    topic, start = kafka.topic(2), time.time() // WINDOW * WINDOW
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    path = tmp_path / "dpstream.toml"
    path.write_text(
        JOB.format(servers=kafka.servers, topic=topic, start=text_of(start), secret="0f" * 32)
    )
    sender = Sender(kafka, topic)
    first = run_while(load_job(path), lambda: sender.send(6))
    sender.send(2)  # while nobody reads

    def until_published() -> None:
        sender.send(3)
        wait_for(lambda: closed(tmp_path / "releases", sender.last))

    second = run_while(load_job(path), until_published)
    assert second.resumed
    assert first.run_id == second.run_id
    assert sender.number > 50
    assert (lost(load_job(path), sender.sent) == 0) != sabotaged


Made = tuple[Published, pa.Table]
on_both = pytest.mark.parametrize(
    "runner", ["PrismRunner", pytest.param("FlinkRunner", marks=pytest.mark.slow)]
)


@pytest.fixture
def flags(runner: str, request: pytest.FixtureRequest) -> list[str]:
    """What the engine needs."""
    if runner == "FlinkRunner":
        request.getfixturevalue("local")
        return LOCAL
    return [f"--prism_location={binary()}", "--prism_log_level=warn"]


@pytest.fixture
def topic() -> Iterator[tuple[str, str]]:
    """A Pub/Sub topic and a subscription that keeps its order."""
    with pubsub_emulator.running() as started:
        yield started.subscription(enable_message_ordering=True)


def run_twice(job: Job, runner: str, flags: list[str]) -> None:
    """The second run goes on where nothing is left to do."""
    for _ in range(2):
        run_job(job, runner, flags)
        stores.close_all()


@on_both
def test_kafka(kafka: Broker, fresh: Published, made: Made, runner: str, flags: list[str]) -> None:
    job = fresh.job(table(kafka, topic_of(kafka)))
    run_twice(job, runner, flags)
    one_value_per_name(job)
    assert read_kafka_releases(job).equals(made[1]) and made[1].num_rows > 10


@on_both
def test_pubsub(
    topic: tuple[str, str], fresh: Published, made: Made, runner: str, flags: list[str]
) -> None:
    job = fresh.job(sink_table(topic[0]))
    run_twice(job, runner, flags)
    assert as_documented(received(topic[1]), job).equals(made[1])


KAFKA = 'servers = "{servers}"\ntopic = "{topic}"'


class Feeder:
    """Sends records of unlike users, a few with a broken one, and counts them."""

    def __init__(self, put: Callable[[list[bytes]], None]) -> None:
        self._put, self.number, self.last = put, 0, 0.0
        self.sent: Counter[tuple[datetime, str]] = Counter()

    def send(self, seconds: float) -> None:
        end = time.time() + seconds
        while (now := time.time()) < end:
            texts = [b"{"]
            for key in ("a", "b", "a"):
                row = {"user": f"u{self.number}", "key": key, "time": text_of(now)}
                texts.append(json.dumps(row).encode())
                self.sent[datetime.fromtimestamp(now // WINDOW * WINDOW, UTC), key] += 1
                self.number += 1
            self._put(texts)
            self.last = now
            time.sleep(0.05)


def write_job(folder: Path, source: str, start: float, more: str = "") -> Job:
    """A job whose windows begin at ``start`` (seconds since the epoch), and its public keys."""
    (folder / "keys.csv").write_text("key\na\nb\n")
    assert KAFKA in JOB and '"{start}"' in JOB
    text = JOB.replace(KAFKA, source).replace("{{", "{").replace("}}", "}")
    text = text.replace('"{start}"', f'"{text_of(start)}"{more}').replace("{secret}", "0f" * 32)
    (folder / "dpstream.toml").write_text(text)
    return load_job(folder / "dpstream.toml")


def over_a_restart(folder: Path, source: str, sender: Feeder, between: Callable[[], None]) -> bool:
    """Whether every record was counted by two runs, one after the other."""
    first = run_while(
        write_job(folder, source, time.time() // WINDOW * WINDOW), lambda: sender.send(5)
    )
    between()
    sender.send(2)  # while nobody reads

    def until_published() -> None:
        sender.send(3)
        wait_for(lambda: closed(folder / "releases", sender.last))

    job = load_job(folder / "dpstream.toml")
    second = run_while(job, until_published)
    assert second.resumed and first.run_id == second.run_id and sender.number > 100
    return lost(job, sender.sent) == 0


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
    """The sabotaged restart begins at the clock."""
    if sabotaged:
        init = Markers.__init__

        def at_the_clock(self: Markers, folder: Any, begin: int = 0, behind: int = 0) -> None:
            init(self, folder, begin and time.time_ns() // 1000, behind)

        monkeypatch.setattr(Markers, "__init__", at_the_clock)
    folder = tmp_path / "in"
    folder.mkdir()

    def put(texts: list[bytes]) -> None:
        name = f"{time.time_ns()}.jsonl"
        (folder / name).write_bytes(b"\n".join(texts))
        close_files(folder, [name])

    sender = Feeder(put)
    sent = sender.send

    def send(seconds: float) -> None:
        sent(seconds)
        # Time goes on for the folder only by markers.
        for _ in range(40 if seconds == 3 else 0):
            time.sleep(0.2)
            close_files(folder)

    monkeypatch.setattr(sender, "send", send)
    source = 'folder = "in"\nformat = "jsonl"'
    assert over_a_restart(tmp_path, source, sender, lambda: None) != sabotaged


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pubsub_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
    """The sabotaged restart does not seek."""
    monkeypatch.setattr(pubsub_client, "LEAST_ACK_DEADLINE", 10)
    monkeypatch.setattr(pubsub_client, "PULL_SECONDS", 3.0)
    if sabotaged:
        monkeypatch.setattr(pubsub_client, "seek", lambda *_: None)
    with running() as emulator:
        topic, subscription = emulator.subscription(ack_deadline_seconds=10)

        def put(texts: list[bytes]) -> None:
            emulator.publish(topic, texts)

        sender = Feeder(put)
        source = f'subscription = "{subscription}"'
        exact = over_a_restart(tmp_path, source, sender, source_pubsub.PULLERS.close)
    assert exact != sabotaged


def test_the_end_waits_for_dead_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is done is cancelled: what was refused must be written by then."""
    write = sinks.write_dead_letters

    def slowly(folder: Path, batches: Iterable[pa.RecordBatch]) -> Path | None:
        held = list(batches)
        time.sleep(5 if held else 0)
        return write(folder, held)

    monkeypatch.setattr(sinks, "write_dead_letters", slowly)
    source, start = 'folder = "in"\nformat = "jsonl"', time.time() // 1 - 60
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"{\n{\n")
    close_files(folder, ["a.jsonl"])
    job = write_job(tmp_path, source, start, f'\nend = "{text_of(start + WINDOW)}"')
    result = run_job(job, "PrismRunner", [f"--prism_location={binary()}"])
    assert not result.stopped and result.steps == 6 * 2
    assert read_dead_letters(dead_letter_folder(job)).num_rows == 2
