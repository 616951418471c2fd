"""Options of ``dpstream run`` for Prometheus."""

from typing import Any

import click

from dpstream.pipelines.cli.parts import options

_PORT = click.IntRange(0, 65535)
METRICS = options(
    click.option(
        "--metrics-port", type=_PORT, help="Serve public quantities to Prometheus (say 9464)."
    ),
    click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Its address."),
    click.option(
        "--operator-metrics-port",
        type=_PORT,
        help="Serve exact, private counts, for the operator only, on a port of their own.",
    ),
    click.option(
        "--operator-metrics-host", default="127.0.0.1", show_default=True, help="Its address."
    ),
)


def ports(given: dict[str, Any]) -> Any:
    """`pipelines.operate.metrics.Ports` of the options above."""
    from dpstream.pipelines.operate.metrics import Ports

    return Ports(
        given["metrics_port"],
        given["operator_metrics_port"],
        given["metrics_host"],
        given["operator_metrics_host"],
    )
