"""The Prometheus endpoint of this process: public quantities alone.

Names and help texts are one list, ``METRICS``, from which the exporter, the public dashboard and
the tests are made.  A metric is public when it is a function of the plan, of faults and of the
public clock.  Counts of records and seconds of a stage depend on the data and have no endpoint:
`dpstream run --operator` prints the counts at the end.  Only names on the list are ever exported,
whatever else telemetry has.

A worker in another process has no endpoint here: there its counters, private ones too, are
exported as Beam metrics of the runner (``runner_name``).
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.dp_transforms.telemetry import (
    LATENCY_SECONDS,
    PUBLIC_COUNTERS,
    deliveries,
    operator_totals,
)
from dpstream.pipelines.jobs.job import Job

MetricKind = Literal["counter", "gauge", "histogram"]
#: Beam's namespace of our counters.
NAMESPACE = "dpstream"


class Name(NamedTuple):
    """One exported metric.

    Attributes:
        name: as Prometheus shows it, counters with ``_total``.
        kind, help_text: type and help text.
        counter: the counter of telemetry, and Beam's, that it exports; else empty.
    """

    name: str
    kind: MetricKind
    help_text: str
    counter: str = ""


_COUNTERS = {
    "steps_committed": "Steps (window, shard, trigger) that were computed and committed.",
    "steps_reemitted": "Steps that were found committed and emitted again.",
    "releases_sealed": "Releases (window, trigger) gathered from all shards.",
    "releases_delivered": "Releases (window, trigger) that are in the sink.",
}
#: Everything that is exported.
METRICS: tuple[Name, ...] = (
    *(Name(f"dpstream_{name}_total", "counter", _COUNTERS[name], name) for name in PUBLIC_COUNTERS),
    Name("dpstream_plan_info", "gauge", "1; the label plan_hash says which plan runs."),
    Name("dpstream_trigger_interval_seconds", "gauge", "Seconds between trigger times."),
    Name(
        "dpstream_last_cut_timestamp_seconds",
        "gauge",
        "Last trigger time of which a release is in the sink.",
    ),
    Name(
        "dpstream_release_latency_seconds",
        "histogram",
        "From a trigger time to its release in the sink, live ones only; whole seconds added.",
    ),
)


#: What `dpstream due --metrics` writes, in this order; all are gauges with the label dpstream_job.
DUE_METRICS: tuple[Name, ...] = (
    Name("dpstream_due_checked_timestamp_seconds", "gauge", "When `dpstream due` last ran."),
    Name("dpstream_due_timestamp_seconds", "gauge", "Last trigger time that has passed."),
    Name(
        "dpstream_due_out_timestamp_seconds",
        "gauge",
        "Last trigger time through which all releases are out.",
    ),
    Name("dpstream_due_next_timestamp_seconds", "gauge", "Next trigger time."),
    Name("dpstream_due_overdue_releases", "gauge", "Releases that should be out and are not."),
    Name("dpstream_due_missing_names", "gauge", "Expected names that overdue releases lack."),
    Name(
        "dpstream_due_incomplete_windows",
        "gauge",
        "Windows that were released without expected files.",
    ),
)


def textfile(job: str, figures: Iterable[tuple[Name, float | None]]) -> str:
    """Return gauges of a job in Prometheus' text format; those that are ``None`` are left out."""
    lines = list[str]()
    for name, value in figures:
        if value is not None:
            lines += [f"# HELP {name.name} {name.help_text}", f"# TYPE {name.name} gauge"]
            lines.append(f"{name.name}{{dpstream_job={json.dumps(job)}}} {value}")
    return "\n".join([*lines, ""])


def runner_name(counter: str) -> str:
    """Return the name under which Flink's Prometheus reporter shows one of our Beam counters."""
    return f"flink_taskmanager_job_task_operator_{NAMESPACE}_{counter}"


class _Table(Collector):
    """Telemetry's tables as Prometheus families, read at each request."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @override
    def collect(self) -> Iterator[Metric]:
        plan, last = self._job.plan, deliveries.last_instant
        # Gauges: name of the label ("": none), values by label.
        gauges: dict[str, tuple[str, dict[str, float]]] = {
            "dpstream_plan_info": ("plan_hash", {plan.hash: 1}),
            "dpstream_trigger_interval_seconds": (
                "",
                {"": plan.timeline.trigger_every / MICROS_PER_SECOND},
            ),
            "dpstream_last_cut_timestamp_seconds": (
                "",
                {} if last is None else {"": last / MICROS_PER_SECOND},
            ),
        }
        for name in METRICS:
            if name.kind == "histogram":
                yield _latency(name)
                continue
            label, values = gauges.get(name.name, ("", {"": operator_totals.get(name.counter, 0)}))
            kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
            family = kind(name.name, name.help_text, labels=[label] if label else [])
            for label_value, value in values.items():
                family.add_metric([label_value] if label else [], value)
            yield family


def _latency(name: Name) -> HistogramMetricFamily:
    latency = deliveries.since_trigger_time
    bounds = [*map(str, LATENCY_SECONDS), "+Inf"]
    family = HistogramMetricFamily(name.name, name.help_text)
    counts = accumulate(latency.counts)
    family.add_metric([], list(zip(bounds, counts, strict=True)), latency.total)
    return family


@contextlib.contextmanager
def serving(job: Job, port: int | None, host: str = "127.0.0.1") -> Iterator[int | None]:
    """Serve the metrics of this process while the block runs; yield the port that is used.

    Args:
        port: 0 takes a free one; ``None``: nothing is served.

    Raises:
        RunError: the port cannot be used.
    """
    if port is None:
        yield None
        return
    collector = CollectorRegistry()
    collector.register(_Table(job))
    try:
        server, thread = start_http_server(port, host, collector)
    except OSError:
        fix = "choose another port or host"
        raise RunError("--metrics-port", "cannot be listened on", fix) from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
