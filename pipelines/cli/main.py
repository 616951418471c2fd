"""The command ``dpstream``: a thin door to the library.

Exit codes: 0 done, 2 usage, 3 refused by policy or budget, 4 failed, 5 an audit refutes the
plan.  A coded error is one line on stderr (JSON with ``--json``); of any other only the command
and the class are shown, because its message may hold data.
"""

import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import click

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.pipelines.cli.audit import audit
from dpstream.pipelines.cli.choose import choose
from dpstream.pipelines.cli.folder import folder
from dpstream.pipelines.cli.key import key
from dpstream.pipelines.cli.ledger import ledger
from dpstream.pipelines.cli.metrics import METRICS, ports
from dpstream.pipelines.cli.parts import AS_JSON, Bar, examples, print_json, stop_signals
from dpstream.pipelines.cli.replay import replay
from dpstream.pipelines.cli.scale import SCALE
from dpstream.pipelines.cli.scale import show as show_scale
from dpstream.pipelines.cli.state import state
from dpstream.pipelines.experiments.commands import experiment, reddit

JOB = click.argument("job", type=click.Path(path_type=Path))


class _Coded(click.Group):
    """A group whose commands end with the exit code of their error, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn errors into one line and an exit code."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except DpstreamError as error:
            coded = error
        except KeyboardInterrupt:
            coded = RunError("run", "was interrupted", "run it again on the same state to go on")
        except Exception as error:
            stage = f"dpstream {ctx.invoked_subcommand}"
            coded = RunError(stage, f"failed with {type(error).__name__}", "run `dpstream doctor`")
        text = json.dumps(coded.as_dict()) if as_json else f"{coded.kind}: {coded}"
        click.echo(text, err=True)
        ctx.exit(coded.exit_code)


@click.group(
    cls=_Coded,
    epilog=examples(
        "dpstream key new noise.key", "dpstream plan job.toml", "dpstream run job.toml"
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="dpstream")
def cli() -> None:
    """Differentially private streams: counts and sums per key, again and again as time passes,
    without revealing any user."""
    _silence()


@cli.command(
    epilog=examples(
        "dpstream plan job.toml",
        "dpstream plan job.toml --json",
        "dpstream plan job.toml --scale --keys 1000000 --records-per-day 100000000",
    )
)
@JOB
@click.option(
    "--changed-keys",
    type=click.IntRange(1),
    help="Keys that get data at one trigger, for the number of shards on Spanner.",
)
@SCALE
@AS_JSON
def plan(job: Path, changed_keys: int | None, scale: bool, as_json: bool, **load: Any) -> None:
    """Print what a job promises, what it costs and what would serve it better; reads no data.

    Of a run that was begun on the job's store file the figures are those committed then.
    """
    import msgspec

    from dpstream.accounting.budget import allocate
    from dpstream.accounting.guarantee import describe, text
    from dpstream.accounting.tuning import alternatives
    from dpstream.pipelines.jobs.committed import committed
    from dpstream.pipelines.jobs.job import load_job
    from dpstream.pipelines.scale import shards
    from dpstream.pipelines.tuning.check import chosen_of

    loaded = load_job(job)
    if scale:
        show_scale(loaded, load, as_json)
        return
    checked, chosen = loaded.plan, chosen_of(loaded)
    state_figures = shards.describe(loaded, changed_keys)
    begun = committed(loaded)
    planned, budget = begun[1:] if begun else (checked, allocate(checked))
    others = alternatives.compare(checked)
    if as_json:
        figures = describe(planned, budget, chosen) | {"plan_hash": checked.hash}
        figures["run_id"] = begun.run_id if begun else None
        more = {"state": state_figures} if state_figures else {}
        print_json(figures | more | {"alternatives": msgspec.to_builtins(others)})
    else:
        whole = text(planned, budget, chosen)
        if begun:
            whole += f"Figures     of run {begun.run_id}, committed when it began\n"
        whole += shards.text(state_figures)
        click.echo(whole + alternatives.text(others), nl=False)


@cli.command(
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
    from dpstream.pipelines.jobs.job import load_job

    checked = load_job(job)
    from dpstream.pipelines.connectors.replay.source import parse_speed
    from dpstream.pipelines.connectors.sink import sink_of
    from dpstream.pipelines.connectors.write import dead_letter_folder
    from dpstream.pipelines.operate.ledger_view import ledger_warnings
    from dpstream.pipelines.operate.metrics import serving
    from dpstream.pipelines.runners.table import lives_on
    from dpstream.pipelines.stream import run_job

    for warning in ledger_warnings(checked):
        click.echo(f"Warning: {warning}", err=True)
    pace = None if speed is None else parse_speed(speed)
    with (
        serving(checked, ports(metrics)),
        Bar(hidden=quiet or as_json) as bar,
        stop_signals(checked.source.unbounded or lives_on(runner)) as stop,
    ):
        result = run_job(checked, runner, ctx.args, progress=bar.update, speed=pace, stop=stop)
    if as_json:
        print_json({**result._asdict(), "insecure": checked.insecure})
        return
    how = "stopped; run it again to go on" if result.stopped else "all triggers done"
    click.echo(f"Run {result.run_id}{' (resumed)' if result.resumed else ''}: {how}.")
    _print_operator(result.operator_only, dead_letter_folder(checked))
    click.echo(f"Releases in {sink_of(checked).words}")
    if checked.insecure:
        click.echo("INSECURE: a fixed test key or run id was used; do not publish.")


@cli.command(
    epilog=examples(
        "dpstream report job.toml",
        "dpstream report job.toml --out week.html",
        "dpstream report job.toml --truth 'public/*.parquet'",
    )
)
@JOB
@click.option(
    "--out",
    default="report.html",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The page.",
)
@click.option(
    "--truth",
    type=click.Path(path_type=Path),
    help="Raw records of the job's schema (file or glob): adds true errors. Public data only.",
)
@AS_JSON
def report(job: Path, out: Path, truth: Path | None, as_json: bool) -> None:
    """Write one HTML page about a run, finished or not, from its plan and its releases."""
    from dpstream.pipelines.jobs.job import load_job
    from dpstream.pipelines.report.report import TRUTH_LABEL, as_dict, build, write
    from dpstream.pipelines.report.view import render

    found = build(load_job(job), truth)
    write(found, render(found), out)
    if as_json:
        print_json({"page": str(out), **as_dict(found)})
        return
    whole = "" if found.expected is None else f" of {found.expected:,}"
    click.echo(f"Report in {out}: {len(found.found.releases):,}{whole} releases.")
    for stamp in found.stamps:
        click.echo(f"{stamp}: do not publish.")
    if truth is not None:
        click.echo(f"True errors are {TRUTH_LABEL}.")


@cli.command(epilog=examples("dpstream demo", "dpstream demo --folder flights"))
@click.option(
    "--folder",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where data, job file, key and releases go.",
)
def demo(folder: Path) -> None:
    """Run a year of real flights through a stream and hold it against the truth."""
    from rich.console import Console

    from dpstream.accounting.budget import allocate
    from dpstream.accounting.guarantee import text
    from dpstream.pipelines.demo import prepare, show
    from dpstream.pipelines.jobs.committed import committed
    from dpstream.pipelines.stream import run_job

    job = prepare(folder)
    begun = committed(job)
    promised = text(*begun[1:]) if begun else text(job.plan, allocate(job.plan))
    click.echo(promised)
    with Bar(hidden=False) as bar:
        run_job(job, progress=bar.update)
    show(job, promised, Console(file=sys.stdout))


@cli.group()
def generate() -> None:
    """Make synthetic data."""


@generate.command(
    epilog=examples(
        "dpstream generate zipf small.parquet --users 10000",
        "dpstream generate zipf table1.parquet --users 10000000 --seed 1",
    )
)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--users", default=10_000, show_default=True, help="Users; 5.9 records each.")
@click.option("--keys", default=1_000_000, show_default=True, help="Keys there are to draw.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same records.")
@click.option("--start", default="2024-01-01T00:00:00Z", show_default=True, help="First instant.")
@click.option("--row-group-rows", default=1_000_000, show_default=True)
@click.option("--user-type", type=click.Choice(["int", "string"]), default="int")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@AS_JSON
def zipf(out: Path, start: str, overwrite: bool, as_json: bool, **sizes: Any) -> None:
    """Write the paper's Zipf-Mandelbrot records of one day to a Parquet file."""
    from dpstream.pipelines.jobs.text import instant_micros
    from dpstream.pipelines.synth import Synth
    from dpstream.pipelines.synth import generate as write

    rows = write(Synth(start=instant_micros("--start", start), **sizes), out, overwrite)
    if as_json:
        print_json({"records": rows, **sizes})
    else:
        click.echo(f"{rows:,} records of {sizes['users']:,} users in {out.name}")


generate.add_command(reddit)
cli.add_command(experiment)


@cli.command(epilog=examples("dpstream doctor", "dpstream doctor --json"))
@AS_JSON
def doctor(as_json: bool) -> None:
    """Say what this machine can run."""
    from dpstream.pipelines.operate.doctor import examine

    report = examine()
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if not report["ready"]:
        raise SystemExit(RunError.exit_code)


cli.add_command(audit)
cli.add_command(choose)
cli.add_command(folder)
cli.add_command(key)
cli.add_command(ledger)
cli.add_command(replay)
cli.add_command(state)


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


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "state", title=f"Python {report['python']}")
    for name, version in {**report["packages"], **report["optional"]}.items():
        table.add_row(name, version or "missing")
    for name, found in {**report["runners"], **report["emulators"]}.items():
        table.add_row(name, (found if isinstance(found, str) else "found") if found else "missing")
    disk = report["disk"]
    table.add_row("fsync", f"{disk['milliseconds']} ms" if disk["fsync"] else "refused")
    Console(file=sys.stdout).print(table)
    for line in report["verdict"]:
        click.echo(line)


def _silence() -> None:
    """Keep Beam's logs and warnings off the terminal: they quote tracebacks."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _tell(failed: threading.ExceptHookArgs) -> None:
    """A thread that fails is named with the class of its error, whose text may hold data."""
    if failed.exc_type is not SystemExit:
        name = "" if failed.thread is None else failed.thread.name
        click.echo(f"A thread failed with {failed.exc_type.__name__} ({name}).", err=True)


def main() -> None:
    """Entry point of the console script."""
    threading.excepthook = _tell
    cli(prog_name="dpstream")


if __name__ == "__main__":
    main()
