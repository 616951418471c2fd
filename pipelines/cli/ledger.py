"""``dpstream ledger``: what the runs on a data set have spent."""

import tomllib
from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, examples, load_job, print_json
from dpstream.state.private_log import keep_beside


@click.group()
def ledger() -> None:
    """Look into a data set's ledger; all of it is public."""


@ledger.command(
    epilog=examples(
        "dpstream ledger init job.toml",
        "dpstream ledger init spanner://my-project/my-instance/my-ledger",
    )
)
@click.argument("path", metavar="JOB_OR_LEDGER")
@AS_JSON
def init(path: str, as_json: bool) -> None:
    """Make a ledger's database and tables where they are missing.

    Nothing is charged.  A ledger in a file needs no init: its first charge makes it.
    """
    from dpstream.state.ledger.open import create_ledger, file_of

    if file_of(path) is not None:
        path = _ledger_of(Path(path))
    fresh = create_ledger(path)
    if as_json:
        print_json({"new": fresh})
    else:
        click.echo(f"The ledger {'is made' if fresh else 'was there already'}.")


def _ledger_of(path: Path) -> str:
    """The ledger that a job or a SQL catalog names, which need not be complete otherwise.

    Raises:
        UsageError: the file cannot be read, or names none.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.state.ledger.open import place_below

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("ledger", {}).get("path")
    except (OSError, ValueError, AttributeError):
        raise UsageError(
            "ledger", "cannot be read", "name a job file, a catalog or a ledger's URL"
        ) from None
    if not isinstance(found, str) or not found:
        raise UsageError("ledger", "is not named by this file", "add [ledger], or name its URL")
    return place_below(path.absolute().parent, found)


@ledger.command(
    epilog=examples(
        "dpstream ledger show job.toml",
        "dpstream ledger show ledger.db --data-set flights --epsilon 6 --delta 1e-9",
        "dpstream ledger show spanner://my-project/my-instance/my-ledger",
    )
)
@click.argument("path", metavar="JOB_OR_LEDGER")
@click.option("--data-set", help="Only this one (default: the job's, or all).")
@click.option("--epsilon", type=float, help="A limit, to see what is left (default: the job's).")
@click.option("--delta", type=float, help="The limit's delta.")
@AS_JSON
def show(
    path: str, data_set: str | None, epsilon: float | None, delta: float | None, as_json: bool
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
        job = load_job(Path(path))
        if job.ledger is None:
            raise UsageError("ledger", "is not named by this job", "add [ledger], or name the file")
        data_set, limit = data_set or job.ledger.data_set, limit or job.ledger.limit
        path = job.ledger.path
    keep_beside(path)
    found = ledger_view.view(path, data_set, limit)
    if as_json:
        print_json(found)
    else:
        click.echo(ledger_view.text(found), nl=False)
