"""Latencies of a streaming run: from the watermark that passes a cut to the release in the sink."""

from pathlib import Path

from pytest import MonkeyPatch

from dp_transforms import telemetry
from dp_transforms.telemetry import Deliveries
from pipelines import metrics
from pipelines.metrics import Ports, serving
from pipelines.stream import run_job
from tests.audit.leaks import hits, make_job
from tests.pipelines.test_metrics import families, scrape
from tests.runners.prism import binary


def test_every_release_has_a_latency(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    deliveries = Deliveries()
    for owner in ("dp_transforms.telemetry", "dp_transforms.hold", "pipelines.delivered"):
        monkeypatch.setattr(f"{owner}.deliveries", deliveries)
    monkeypatch.setattr(metrics, "deliveries", deliveries)
    job = make_job(tmp_path / "job")
    flags = [f"--prism_location={binary()}", "--prism_log_level=warn", "--streaming"]
    with serving(job, Ports(0)) as (public, _):
        run_job(job, "PrismRunner", flags)
        text = scrape(public)
    seen, triggers = families(text), job.plan.timeline.triggers
    assert seen["dpstream_releases_delivered_total"] == triggers
    name = "dpstream_release_after_watermark_seconds"
    assert seen[f"{name}_count"] == triggers
    assert 0 < seen[f"{name}_sum"] < 10 * triggers
    assert not hits(text)
    assert sum(telemetry.deliveries.since_cut.counts) == 0
