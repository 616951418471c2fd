"""Latencies on Prism: after the watermark, and of a live stream after the trigger time."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.dp_transforms.telemetry import Deliveries
from dpstream.pipelines.connectors.folder.watch import close_files, rfc3339
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate.metrics import serving
from dpstream.pipelines.runners.table import PRISM_WHOLE_BUNDLES
from dpstream.pipelines.stream.run import run_job
from tests.audit.leaks import hits, make_job
from tests.folders import CANARY, job_text, write
from tests.pipelines.operate.test_metrics import families, scrape
from tests.runners.prism import binary

SINCE = "dpstream_release_latency_seconds"
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def deliveries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deliveries]:
    """Latencies of this test alone."""
    fresh = Deliveries()
    owners = ("dp_transforms.telemetry", "dp_transforms.beam.buffer", "pipelines.operate.metrics",
              "pipelines.connectors.write", "pipelines.runners.waiting")  # fmt: skip
    for owner in owners:
        monkeypatch.setattr(f"dpstream.{owner}.deliveries", fresh)
    yield fresh


def run_on_prism(job: Job, stop: threading.Event | None = None) -> str:
    """What the endpoint says after a run."""
    flags = [
        f"--prism_location={binary()}",
        "--prism_log_level=warn",
        "--streaming",
        PRISM_WHOLE_BUNDLES,
    ]
    with serving(job, 0) as port:
        run_job(job, "PrismRunner", flags, stop=stop)
        return scrape(port)


def test_every_release_has_a_latency(tmp_path: Path, deliveries: Deliveries) -> None:
    job = make_job(tmp_path / "job")
    text, triggers = run_on_prism(job), job.plan.timeline.triggers
    assert families(text)["dpstream_releases_delivered_total"] == triggers
    assert sum(deliveries.since_passed.counts) == triggers
    assert 0 < deliveries.since_passed.total < 10 * triggers
    assert not hits(text)
    assert sum(deliveries.since_trigger_time.counts) == 0, "a replay is not live"


def live_job(folder: Path, start: int, seconds: int) -> Job:
    """A job on a folder that grows, a trigger time every second from an instant on."""
    text = job_text("jsonl")
    for old, new in (
        ("2024-01-01T00:00:00Z", rfc3339(start)),
        ("2024-01-02T00:00:00Z", rfc3339(start + seconds * SECOND)),
        ('window = "1d"', f'window = "{seconds}s"'),
        ('release_every = "6h"', 'release_every = "1s"\nmax_skew = "1h"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "dpstream.toml").write_text(text)
    (folder / "in").mkdir()
    return load_job(folder / "dpstream.toml")


def test_a_live_stream(tmp_path: Path, deliveries: Deliveries) -> None:
    """Files are closed as time passes; each release is late by no more than a few looks."""
    begin = (time.time_ns() // 1_000_000_000 + 4) * SECOND
    job, ended = live_job(tmp_path, begin, 5), threading.Event()

    def produce() -> None:
        number = 0
        while not ended.wait(0.25):
            now = rfc3339(begin + 2 * SECOND)
            rows = [{"user": CANARY, "key": "k", "time": now, "value": 1} for _ in range(10)]
            write(tmp_path / "in" / f"{number}.jsonl", rows)
            close_files(tmp_path / "in", [f"{number}.jsonl"])
            number += 1

    stop, producer = threading.Event(), threading.Thread(target=produce)
    limit = threading.Timer(60, stop.set)
    producer.start()
    limit.start()
    try:
        text = run_on_prism(job, stop)
    finally:
        ended.set()
        limit.cancel()
        producer.join()
    seen, passed = families(text), deliveries.since_passed
    assert not stop.is_set(), "it did not end by itself"
    assert seen[f"{SINCE}_count"] == sum(passed.counts) == 5
    assert "watermark" not in text, "the time of a step follows its records"
    assert 0 < passed.total < seen[f"{SINCE}_sum"] < 5 * 10
    assert seen[f"{SINCE}_sum"] == int(seen[f"{SINCE}_sum"])
    assert seen["dpstream_last_cut_timestamp_seconds"] == begin / SECOND + 5
    assert CANARY not in text
