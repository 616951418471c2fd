"""``dpstream ledger``: what the runs on a data set have spent."""

from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, examples, load_job, print_json


@click.group()
def ledger() -> None:
    """Look into a data set's ledger; all of it is public."""


@ledger.command(
    epilog=examples(
        "dpstream ledger show job.toml",
        "dpstream ledger show ledger.db --data-set flights --epsilon 6 --delta 1e-9",
    )
)
@click.argument("path", metavar="JOB_OR_LEDGER", type=click.Path(path_type=Path))
@click.option("--data-set", help="Only this one (default: the job's, or all).")
@click.option("--epsilon", type=float, help="A limit, to see what is left (default: the job's).")
@click.option("--delta", type=float, help="The limit's delta.")
@AS_JSON
def show(
    path: Path, data_set: str | None, epsilon: float | None, delta: float | None, as_json: bool
) -> None:
    """List the entries of a ledger, what they spend together and what is left of the limit."""
    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.jobs.tables import Limit
    from dpstream.pipelines.operate import ledger_view

    limit = None
    if epsilon is not None or delta is not None:
        if epsilon is None or delta is None or not (epsilon > 0 and 0 < delta < 1):
            raise UsageError("--epsilon", "a limit is epsilon > 0 and 0 < delta < 1", "give both")
        limit = Limit(epsilon=epsilon, delta=delta)
    if not ledger_view.is_ledger(path):
        job = load_job(path)
        if job.ledger is None:
            raise UsageError("ledger", "is not named by this job", "add [ledger], or name the file")
        data_set, limit = data_set or job.ledger.data_set, limit or job.ledger.limit
        path = Path(job.ledger.path)
    found = ledger_view.view(path, data_set, limit)
    if as_json:
        print_json(found)
    else:
        click.echo(ledger_view.text(found), nl=False)
