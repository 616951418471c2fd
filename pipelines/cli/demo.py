"""``dpstream demo``: runs a year of real flights, from the plan to a picture."""

import sys
from pathlib import Path

import click

from dpstream.pipelines.cli.parts import Bar, examples


@click.command(
    short_help="Run a year of real flights through a stream.",
    epilog=examples("dpstream demo", "dpstream demo --folder flights"),
)
@click.option(
    "--folder",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for data, project file, secret and releases.",
)
def demo(folder: Path) -> None:
    """Run a year of real flights through a stream and compare the releases with the truth."""
    from rich.console import Console

    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import text
    from dpstream.pipelines.demo import prepare, show
    from dpstream.pipelines.jobs.committed import committed
    from dpstream.pipelines.stream.run import run_job

    job = prepare(folder)
    begun = committed(job)
    plan, budget = begun[1:] if begun else (job.plan, allocate(job.plan))
    with Bar(hidden=False) as bar:
        run_job(job, progress=bar.update)
    show(job, plan, budget, Console(file=sys.stdout))
    click.echo(f"\nWhat is promised:\n{text(plan, budget)}")
