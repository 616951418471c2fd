"""``dpstream run``: run a job, or go on with one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    Bar,
    examples,
    load_job,
    options,
    print_json,
    stop_signals,
)

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job

_PORT = click.IntRange(0, 65535)
#: Their names are those of `pipelines.operate.metrics.Ports`.
METRICS = options(
    click.option(
        "--metrics-port",
        "public",
        type=_PORT,
        help="Serve public quantities to Prometheus (say 9464).",
    ),
    click.option(
        "--metrics-host", "host", default="127.0.0.1", show_default=True, help="Its address."
    ),
    click.option(
        "--operator-metrics-port",
        "operator",
        type=_PORT,
        help="Serve exact, private counts, for the operator only, on a port of their own.",
    ),
    click.option(
        "--operator-metrics-host",
        "operator_host",
        default="127.0.0.1",
        show_default=True,
        help="Its address.",
    ),
)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=examples(
        "dpstream run job.toml",
        "dpstream run job.toml --runner=PrismRunner",
        "dpstream run recorded.toml --runner=PrismRunner --speed=1440",
        "dpstream run job.toml --runner=FlinkRunner --job_name=flights",
    ),
)
@JOB
@click.option("--runner", default="DirectRunner", show_default=True, help="Beam runner.")
@click.option("--speed", help="Of files on a streaming runner: seconds of stream a second, or max.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@METRICS
@AS_JSON
@click.pass_context
def run(
    ctx: click.Context,
    /,
    job: Path,
    runner: str,
    speed: str | None,
    quiet: bool,
    as_json: bool,
    **metrics: Any,
) -> None:
    """Run a job, or go on with one; other flags pass through to Beam.

    A job whose source has no end runs until it is interrupted, and goes on when it is run again.
    On a cluster, to interrupt it (SIGINT, SIGTERM) stops it there too.
    """
    run_checked(load_job(job), runner, ctx.args, speed, quiet, as_json, **metrics)


def run_checked(
    checked: "Job",
    runner: str,
    beam_args: Sequence[str] = (),
    speed: str | None = None,
    quiet: bool = False,
    as_json: bool = False,
    **metrics: Any,
) -> None:
    """`run` of a job that is loaded, and what it says when it has ended."""
    from dpstream.pipelines.connectors.registry import sink_of
    from dpstream.pipelines.connectors.replay.source import parse_speed
    from dpstream.pipelines.connectors.write import dead_letter_folder
    from dpstream.pipelines.operate.ledger_view import ledger_warnings
    from dpstream.pipelines.operate.metrics import Ports, serving
    from dpstream.pipelines.runners.table import lives_on
    from dpstream.pipelines.stream import run_job

    for warning in ledger_warnings(checked):
        click.echo(f"Warning: {warning}", err=True)
    pace = None if speed is None else parse_speed(speed)
    with (
        serving(checked, Ports(**metrics)),
        Bar(hidden=quiet or as_json) as bar,
        stop_signals(checked.source.unbounded or lives_on(runner)) as stop,
    ):
        result = run_job(checked, runner, beam_args, progress=bar.update, speed=pace, stop=stop)
    if as_json:
        print_json({**result._asdict(), "insecure": checked.insecure})
        return
    how = "stopped; run it again to go on" if result.stopped else "all triggers done"
    click.echo(f"Run {result.run_id}{' (resumed)' if result.resumed else ''}: {how}.")
    _print_operator(result.operator_only, dead_letter_folder(checked))
    click.echo(f"Releases in {sink_of(checked).words}")
    if checked.insecure:
        click.echo("INSECURE: a fixed test key or run id was used; do not publish.")


def _print_operator(counts: dict[str, int], dead_letters: Path) -> None:
    """Exact counts, for the operator: on stderr, apart from what may be shown."""
    shown = ", ".join(
        f"{name.removeprefix('operator_').replace('_', ' ')} {amount:,}"
        for name, amount in sorted(counts.items())
        if name.startswith("operator_")
    )
    click.echo(
        f"Operator only, exact and private, do not publish: {shown or 'nothing new'}.", err=True
    )
    if counts.get("operator_dead_letters"):
        click.echo(f"Operator only: dead letters (position and reason) in {dead_letters}", err=True)
