"""A whole job on Prism that reads a Kafka topic: stopped, gone on, every record counted."""

import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors.kafka.reader import Kafka
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from tests.kafka_broker import Broker
from tests.runners.prism import run_while, wait_for
from tests.written import read_dead_letters

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
