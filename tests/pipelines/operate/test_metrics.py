"""The Prometheus endpoint: it shows public quantities alone, and no record."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import telemetry
from dpstream.dp_transforms.telemetry import (
    LATENCY_SECONDS,
    OPERATOR_COUNTERS,
    PRIVATE_COUNTERS,
    PUBLIC_COUNTERS,
    Deliveries,
    operator_totals,
    stage_seconds,
)
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate import metrics
from dpstream.pipelines.operate.metrics import METRICS, Name, runner_name, serving
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.leaks import CANARIES, KEY, UNIT, VALUE, hits, make_job

SECOND = 1_000_000


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of this test alone."""
    deliveries = Deliveries()
    monkeypatch.setattr(telemetry, "deliveries", deliveries)
    monkeypatch.setattr(metrics, "deliveries", deliveries)
    monkeypatch.setattr("dpstream.pipelines.connectors.write.deliveries", deliveries)
    monkeypatch.setattr("dpstream.dp_transforms.beam.buffer.deliveries", deliveries)
    operator_totals.clear()
    yield
    stores.close_all()
    operator_totals.clear()


def scrape(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def families(text: str) -> dict[str, float]:
    """Sample name with its labels -> value."""
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exported(text: str) -> set[str]:
    """Names of ``METRICS`` that a scrape shows, and every other name as it is."""
    sample_names = {sample.partition(",")[0] for sample in families(text)}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in sample_names}


def served(job: Job) -> str:
    with serving(job, 0) as port:
        return scrape(port)


def test_a_run_is_seen(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    with serving(job, 0) as port:
        before = families(scrape(port))
        result = run_job(job)
        seen = families(scrape(port))
    assert before["dpstream_steps_committed_total"] == 0
    timeline = job.plan.timeline
    assert seen["dpstream_steps_committed_total"] == result.steps == 8
    assert seen["dpstream_steps_reemitted_total"] == 0
    assert seen["dpstream_releases_sealed_total"] == timeline.triggers
    assert seen["dpstream_releases_delivered_total"] == timeline.triggers
    assert (
        seen["dpstream_last_cut_timestamp_seconds"]
        == timeline.instant_of(timeline.last_trigger_time) / SECOND
    )
    assert seen["dpstream_trigger_interval_seconds"] == 6 * 3600
    assert seen[f"dpstream_plan_info,plan_hash={job.plan.hash}"] == 1
    # Trigger times of 2024 are no live ones.
    assert seen["dpstream_release_latency_seconds_count"] == 0


def test_the_port_shows_all_names_of_the_list_and_no_other(tmp_path: Path) -> None:
    text = served(make_job(tmp_path / "job"))
    absent = {"dpstream_last_cut_timestamp_seconds"}  # nothing is delivered yet
    assert exported(text) == {name.name for name in METRICS} - absent
    assert "operator" not in text


def test_every_counter_has_its_side() -> None:
    assert set(PRIVATE_COUNTERS).isdisjoint(PUBLIC_COUNTERS)
    assert set(OPERATOR_COUNTERS) == {*PRIVATE_COUNTERS, *PUBLIC_COUNTERS}
    assert all(name.startswith("operator_") for name in PRIVATE_COUNTERS)
    assert [name.counter for name in METRICS if name.counter] == [*PUBLIC_COUNTERS]


def test_nothing_private_on_the_port(tmp_path: Path) -> None:
    """The canary job, with tables that a faulty stage has filled with what it should not."""
    job = make_job(tmp_path / "job")
    with serving(job, 0) as port:
        run_job(job)
        operator_totals.update({UNIT: 3, f"operator_records of {KEY}": 4})
        stage_seconds[f"step {VALUE}"] += 1
        try:
            text = scrape(port)
        finally:
            del stage_seconds[f"step {VALUE}"]
    assert not hits(text)
    assert not any(canary in text for canary in CANARIES)
    counts = [operator_totals[name] for name in PRIVATE_COUNTERS if operator_totals[name] > 9]
    assert counts and not {float(n) for n in counts} & set(families(text).values())


def test_a_private_counter_on_the_port_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Name("dpstream_operator_records_in_total", "counter", "", "operator_records_in")
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, private))
    job = make_job(tmp_path / "job")
    run_job(job)
    text = served(job)
    assert "operator" in text
    assert float(operator_totals["operator_records_in"]) in families(text).values()


def test_the_port_answers_this_machine_only_and_ends_with_the_run(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    with serving(job, 0) as port:
        addresses = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
        assert f"0100007F:{port:04X}" in addresses and f"00000000:{port:04X}" not in addresses
        with pytest.raises(RunError, match="--metrics-port"), serving(job, port):
            pass
    with pytest.raises(OSError):
        scrape(port)
    with serving(job, None) as nothing:
        assert nothing is None


def test_latencies_of_live_trigger_times_only(tmp_path: Path) -> None:
    deliveries = telemetry.deliveries
    deliveries.delivered(5 * SECOND, 9 * SECOND)  # nothing is known to be live
    deliveries.live_from(10 * SECOND)
    deliveries.live_from(2 * SECOND)  # a second worker thread changes nothing
    deliveries.delivered(9 * SECOND, 12 * SECOND)  # before this process began
    deliveries.delivered(13 * SECOND, 12 * SECOND)  # a replay ahead of the clock
    assert sum(deliveries.since_trigger_time.counts) == 0
    deliveries.delivered(20 * SECOND, 20 * SECOND + 400_000)
    deliveries.delivered(30 * SECOND, 32 * SECOND)
    deliveries.delivered(40 * SECOND, 40 * SECOND + 7_200 * SECOND)
    deliveries.delivered(15 * SECOND, 15 * SECOND)
    seen = families(served(make_job(tmp_path / "job")))
    name = "dpstream_release_latency_seconds"
    assert seen[f"{name}_count"] == 4
    assert seen[f"{name}_sum"] == 1 + 2 + 7_200, "each rounded up"
    assert seen[f"{name}_bucket,le=0.1"] == 1
    assert seen[f"{name}_bucket,le=0.5"] == 2
    assert seen[f"{name}_bucket,le=2.0"] == seen[f"{name}_bucket,le=3600.0"] == 3
    assert seen[f"{name}_bucket,le=+Inf"] == 4
    # The last trigger time never goes back.
    assert seen["dpstream_last_cut_timestamp_seconds"] == 40


def test_latency_after_the_watermark() -> None:
    deliveries = telemetry.deliveries
    deliveries.passed([100])
    time.sleep(0.02)
    deliveries.passed([100])  # another shard's timer: the first one counts
    deliveries.delivered(100, 0)
    deliveries.delivered(200, 0)  # passed in another process
    assert sum(deliveries.since_passed.counts) == 1
    assert 0.02 <= deliveries.since_passed.total < 5
    deliveries.passed(range(5_000))
    assert len(deliveries._passed) <= telemetry._TRIGGER_TIMES_KEPT
    assert len(deliveries.since_passed.counts) == len(LATENCY_SECONDS) + 1


def test_runner_names() -> None:
    assert (
        runner_name("steps_committed")
        == "flink_taskmanager_job_task_operator_dpstream_steps_committed"
    )


PROGRAM = """
import sys, threading, time, urllib.request
from dpstream.pipelines.cli import main as cli
from dpstream.pipelines.stream import run as stream
real, port = stream.run_job, int(sys.argv[2])
def run(*args, **options):
    result = real(*args, **options)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    print([line for line in text.splitlines() if "committed_total" in line][-1])
    return result
stream.run_job = run
cli.cli(["run", "--project", sys.argv[1], "--quiet", "--metrics-port", str(port)])
"""


def test_the_command_serves_while_it_runs(tmp_path: Path) -> None:
    from tests.emulator import free_port

    job = make_job(tmp_path / "job")
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(job.path), str(free_port())],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert "dpstream_steps_committed_total 8.0" in completed.stdout
