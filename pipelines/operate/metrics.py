"""Prometheus endpoints of this process: public quantities on one port, the operator's on another.

Names and help texts are one list, ``METRICS``, from which the exporter, the dashboards and the
tests are made.  A metric is public when it is a function of the plan, of faults and of the public
clock; counts of records and seconds of a stage depend on the data and are the operator's.  Only
names on the list are ever exported, whatever else telemetry has.

A worker in another process has no endpoint here: there the same counters are exported as Beam
metrics of the runner (``runner_name``).
"""

import contextlib
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

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.dp_transforms.telemetry import (
    LATENCY_SECONDS,
    PRIVATE_COUNTERS,
    PUBLIC_COUNTERS,
    STAGES,
    Latency,
    deliveries,
    operator_totals,
    stage_seconds,
)
from dpstream.pipelines.jobs.job import Job

MetricKind = Literal["counter", "gauge", "histogram"]
LOCAL = "127.0.0.1"
#: Beam's namespace of our counters.
NAMESPACE = "dpstream"


class Name(NamedTuple):
    """One exported metric.

    Attributes:
        name: as Prometheus shows it, counters with ``_total``.
        kind, help_text: type and help text.
        public: whether it is public.
        counter: the counter of telemetry, and Beam's, that it exports; else empty.
    """

    name: str
    kind: MetricKind
    help_text: str
    public: bool
    counter: str = ""


_WORDS = {
    "steps_committed": "Steps (window, shard, trigger) that were computed and committed.",
    "steps_reemitted": "Steps that were found committed and emitted again.",
    "releases_sealed": "Releases (window, trigger) gathered from all shards.",
    "releases_delivered": "Releases (window, trigger) that are in the sink.",
}


def _counters(names: Iterable[str], public: bool) -> Iterator[Name]:
    for name in names:
        words = _WORDS.get(name) or f"Exact and private: {name[9:].replace('_', ' ')}."
        yield Name(f"dpstream_{name}_total", "counter", words, public, name)


#: Everything that is exported.
METRICS: tuple[Name, ...] = (
    *_counters(PUBLIC_COUNTERS, True),
    Name("dpstream_plan_info", "gauge", "1; the label plan_hash says which plan runs.", True),
    Name("dpstream_trigger_interval_seconds", "gauge", "Seconds between trigger times.", True),
    Name(
        "dpstream_last_cut_timestamp_seconds",
        "gauge",
        "Last trigger time of which a release is in the sink.",
        True,
    ),
    Name(
        "dpstream_release_latency_seconds",
        "histogram",
        "From a trigger time to its release in the sink, live ones only; whole seconds added.",
        True,
    ),
    *_counters(PRIVATE_COUNTERS, False),
    Name(
        "dpstream_operator_release_after_watermark_seconds",
        "histogram",
        "Private: how long the step of a trigger time took, which follows its records.",
        False,
    ),
    Name(
        "dpstream_operator_stage_seconds_total",
        "counter",
        "Private: wall time spent in a stage.",
        False,
    ),
)


def runner_name(counter: str) -> str:
    """Return the name under which Flink's Prometheus reporter shows one of our Beam counters."""
    return f"flink_taskmanager_job_task_operator_{NAMESPACE}_{counter}"


class _Table(Collector):
    """Telemetry's tables as Prometheus families, read at each request."""

    def __init__(self, job: Job, public: bool) -> None:
        self._job, self._public = job, public

    @override
    def collect(self) -> Iterator[Metric]:
        for name in METRICS:
            if name.public == self._public:
                yield self._family(name)

    def _family(self, name: Name) -> Metric:
        if name.kind == "histogram":
            after = name.name.endswith("_after_watermark_seconds")
            return _histogram(
                name, deliveries.since_passed if after else deliveries.since_trigger_time
            )
        plan, last = self._job.plan, deliveries.last_instant
        # Metrics that are no counters of telemetry: name of the label ("": none), values by label.
        others: dict[str, tuple[str, dict[str, float]]] = {
            "dpstream_plan_info": ("plan_hash", {plan.hash: 1}),
            "dpstream_trigger_interval_seconds": (
                "",
                {"": plan.timeline.trigger_every / MICROS_PER_SECOND},
            ),
            "dpstream_last_cut_timestamp_seconds": (
                "",
                {} if last is None else {"": last / MICROS_PER_SECOND},
            ),
            "dpstream_operator_stage_seconds_total": (
                "stage",
                {stage: stage_seconds.get(stage, 0.0) for stage in STAGES},
            ),
        }
        label, values = others.get(name.name, ("", {"": operator_totals.get(name.counter, 0)}))
        kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
        family = kind(name.name, name.help_text, labels=[label] if label else [])
        for label_value, value in values.items():
            family.add_metric([label_value] if label else [], value)
        return family


def _histogram(name: Name, latency: Latency) -> HistogramMetricFamily:
    bounds = [*map(str, LATENCY_SECONDS), "+Inf"]
    counted = list(accumulate(latency.counts))
    family = HistogramMetricFamily(name.name, name.help_text)
    family.add_metric([], list(zip(bounds, counted, strict=True)), latency.total)
    return family


def registry(job: Job, public: bool) -> CollectorRegistry:
    """Return the public metrics of this process, or those of the operator alone."""
    collector = CollectorRegistry()
    collector.register(_Table(job, public))
    return collector


class Ports(NamedTuple):
    """The ports on which this process serves metrics; ``None``: none.

    Attributes:
        public, operator: two different ports; 0 takes a free one.
        host: address of the public port; the operator's can be reached from this machine alone
            unless ``operator_host`` sets another address.
    """

    public: int | None = None
    operator: int | None = None
    host: str = LOCAL
    operator_host: str = LOCAL


@contextlib.contextmanager
def serving(job: Job, ports: Ports) -> Iterator[tuple[int | None, int | None]]:
    """Serve metrics while the block runs; yield the ports that are used.

    Raises:
        UsageError: one port for both.
        RunError: a port cannot be used.
    """
    if ports.public and ports.public == ports.operator:
        raise UsageError(
            "--operator-metrics-port", "is the public port", "give private counts a port of its own"
        )
    with contextlib.ExitStack() as stack:
        yield (
            _serve(stack, job, ports.public, ports.host, True),
            _serve(stack, job, ports.operator, ports.operator_host, False),
        )


def _serve(
    stack: contextlib.ExitStack, job: Job, port: int | None, host: str, public: bool
) -> int | None:
    if port is None:
        return None
    try:
        server, thread = start_http_server(port, host, registry(job, public))
    except OSError:
        field = "--metrics-port" if public else "--operator-metrics-port"
        raise RunError(field, "cannot be listened on", "choose another port or host") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    stack.callback(stop)
    return int(server.server_port)
