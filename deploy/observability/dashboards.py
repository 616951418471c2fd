"""Grafana dashboards made from the list of metrics: one of public quantities, one operator-only.

    python deploy/observability/dashboards.py

A panel names metrics of its own side only (a test reads the expressions back), so the public one
can be shown to anybody.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.dp_transforms.telemetry import PRIVATE_COUNTERS
from dpstream.pipelines.operate.metrics import runner_name

#: Dashboard files, public and operator-only.
FILES = {True: "dashboard-public.json", False: "dashboard-operator.json"}
_TITLES = {True: "dpstream: public", False: "dpstream: operator only (private, do not share)"}


class Panel(NamedTuple):
    """One chart.

    Attributes:
        title, unit: as Grafana shows them.
        queries: PromQL expressions and their legends.
        words: what it means and when to worry.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    words: str = ""


def _rate(metric: str) -> str:
    return f"rate({metric}[5m])"


def _quantile(q: float, metric: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[15m])))"


_LATENCY = "dpstream_release_latency_seconds"
PUBLIC = (
    Panel(
        "Behind the public clock",
        "s",
        (
            (
                "time() - dpstream_last_cut_timestamp_seconds",
                "since the last published trigger time",
            ),
            ("dpstream_trigger_interval_seconds", "trigger interval"),
        ),
        "Of a live stream: about one trigger interval at most; more: releases are late.",
    ),
    Panel(
        "Release latency after the trigger time",
        "s",
        ((_quantile(0.5, _LATENCY), "median"), (_quantile(0.99, _LATENCY), "p99")),
    ),
    Panel(
        "Steps",
        "ops",
        (
            (_rate("dpstream_steps_committed_total"), "committed"),
            (_rate("dpstream_steps_reemitted_total"), "emitted again"),
        ),
        "Emitted again: work was repeated after a fault; the bytes are the same.",
    ),
    Panel(
        "Releases",
        "ops",
        (
            (_rate("dpstream_releases_sealed_total"), "sealed"),
            (_rate("dpstream_releases_delivered_total"), "in the sink"),
        ),
    ),
    Panel("Plan", "none", (("dpstream_plan_info", "{{plan_hash}}"),)),
)


def _operator_panels() -> tuple[Panel, ...]:
    """Panels of the private counters, which Flink's workers export."""
    dead = [name for name in PRIVATE_COUNTERS if name.startswith("operator_dead")]
    titles = {
        "Records and pairs": [name for name in PRIVATE_COUNTERS if name not in dead],
        "Dead letters by reason": dead,
    }
    return tuple(
        Panel(
            title,
            "ops",
            tuple(
                (f"sum({_rate(runner_name(name))})", name[9:].replace("_", " ")) for name in names
            ),
        )
        for title, names in titles.items()
    )


def dashboard(public: bool) -> dict[str, Any]:
    """The JSON of a dashboard, to be imported into Grafana."""
    panels = PUBLIC if public else _operator_panels()
    return {
        "uid": "dpstream-public" if public else "dpstream-operator",
        "title": _TITLES[public],
        "tags": ["dpstream", "public" if public else "private"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + n), "datasource": source, "expr": query, "legendFormat": legend}
        for n, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.words,
        "datasource": source,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def text(public: bool) -> str:
    """A dashboard's file."""
    return json.dumps(dashboard(public), indent=2) + "\n"


def main() -> None:
    """Write both files beside this one."""
    for public, name in FILES.items():
        Path(__file__).with_name(name).write_text(text(public), encoding="utf-8")


if __name__ == "__main__":
    main()
