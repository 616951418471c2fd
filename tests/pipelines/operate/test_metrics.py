"""Prometheus endpoints: what is public, what is the operator's, and that neither shows a record."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpstream.accounting.errors import RunError, UsageError
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
from dpstream.pipelines.operate.metrics import METRICS, Ports, runner_name, serving
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


def served(job: Job) -> tuple[str, str]:
    """Both endpoints."""
    with serving(job, Ports(0, 0)) as (public, operator):
        return scrape(public), scrape(operator)


def test_a_run_is_seen_on_both_ports(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    with serving(job, Ports(0, 0)) as (public, operator):
        before = families(scrape(public))
        result = run_job(job)
        open_text, closed_text = scrape(public), scrape(operator)
    assert before["dpstream_steps_committed_total"] == 0
    seen, private = families(open_text), families(closed_text)
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
    assert (
        private["dpstream_operator_records_in_total"]
        == result.operator_only["operator_records_in"]
        > 0
    )
    assert private["dpstream_operator_stage_seconds_total,stage=step"] > 0


def test_each_port_shows_its_own_names_and_all_of_them(tmp_path: Path) -> None:
    public, operator = served(make_job(tmp_path / "job"))
    names = {name.name: name.public for name in METRICS}
    absent = {"dpstream_last_cut_timestamp_seconds"}  # nothing is delivered yet
    assert exported(public) == {n for n, is_public in names.items() if is_public} - absent
    assert exported(operator) == {n for n, is_public in names.items() if not is_public}
    assert "operator" not in public
    assert all("operator_" in name for name in exported(operator))


def test_every_counter_has_its_side() -> None:
    assert set(PRIVATE_COUNTERS).isdisjoint(PUBLIC_COUNTERS)
    assert set(OPERATOR_COUNTERS) == {*PRIVATE_COUNTERS, *PUBLIC_COUNTERS}
    assert all(name.startswith("operator_") for name in PRIVATE_COUNTERS)
    sides = {name.counter: name.public for name in METRICS if name.counter}
    assert sides == {name: name in PUBLIC_COUNTERS for name in OPERATOR_COUNTERS}


def test_nothing_private_on_the_public_port(tmp_path: Path) -> None:
    """The canary job, with tables that a faulty stage has filled with what it should not."""
    job = make_job(tmp_path / "job")
    with serving(job, Ports(0, 0)) as (public, operator):
        run_job(job)
        operator_totals.update({UNIT: 3, f"operator_records of {KEY}": 4})
        stage_seconds[f"step {VALUE}"] += 1
        try:
            text, private = scrape(public), scrape(operator)
        finally:
            del stage_seconds[f"step {VALUE}"]
    assert not hits(text) and not hits(private)
    assert not any(canary in text + private for canary in CANARIES)
    counts = [operator_totals[name] for name in PRIVATE_COUNTERS if operator_totals[name] > 9]
    assert counts and not {float(n) for n in counts} & set(families(text).values())


def test_a_private_counter_on_the_public_side_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaky = tuple(
        name._replace(public=True) if name.counter == "operator_records_in" else name
        for name in METRICS
    )
    monkeypatch.setattr(metrics, "METRICS", leaky)
    job = make_job(tmp_path / "job")
    run_job(job)
    public, _ = served(job)
    assert "operator" in public
    assert float(operator_totals["operator_records_in"]) in families(public).values()


def test_the_ports_answer_this_machine_only_and_end_with_the_run(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    assert Ports().host == Ports().operator_host == "127.0.0.1"
    with serving(job, Ports(0)) as (public, operator):
        assert operator is None
        with (
            pytest.raises(RunError, match="--operator-metrics-port"),
            serving(job, Ports(None, public)),
        ):
            pass
    with pytest.raises(OSError):
        scrape(public)
    with pytest.raises(UsageError, match="port of its own"), serving(job, Ports(9464, 9464)):
        pass
    with serving(job, Ports()) as nothing:
        assert nothing == (None, None)


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
    text, _ = served(make_job(tmp_path / "job"))
    seen = families(text)
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
