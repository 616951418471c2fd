"""``dpstream session``: tables in which each record has its own budget."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    Chosen,
    ExtraGroup,
    examples,
    print_json,
    print_warnings,
    section,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.pipelines.cli.session_ask import allot, ask, plan, select
from dpstream.pipelines.cli.session_parts import ANALYST, NAMED_TABLE, TABLE, opened
from dpstream.pipelines.cli.session_view import budget, picture, stand, transcript

if TYPE_CHECKING:
    from dpstream.pipelines.session.config import Config
    from dpstream.pipelines.session.records.load import Loaded

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.group(
    short_help="Ask a table whose records have budgets of their own.",
    cls=ExtraGroup,
    extra="sql",
    epilog=examples(
        "dpstream session init rides",
        "dpstream session budget rides --where 'hour >= 22'",
        "dpstream session ask rides count --where 'epsilon >= 0.5' --epsilon 0.1",
    ),
)
def session() -> None:
    """Explore a table in which each record has its own budget.

    TABLE is a table of the project file with dimensions, one of which is the initial budget; its
    data set has no unit.  Without TABLE it is the only such table.  A question is answered only if
    every point that it covers has enough budget left, whether or not there is a record, so that a
    refusal reveals nothing about records.
    """
    # The BLAS of numpy starts threads that spin when it is loaded; no session multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@session.command(epilog=examples("dpstream session init", "dpstream session init rides --env prod"))
@TABLE
@OPERATOR
@AS_JSON
def init(table: Chosen, as_json: bool) -> None:
    """Read the records of TABLE, and make the account of its data set if it has none.

    The account is made at data_set.NAME.account.path (default: NAME.account.db); an existing
    account of these records is used.  Its id is written into the project file.
    """
    from dpstream.pipelines.drafting.target import keep_out_of_git
    from dpstream.pipelines.session.account import with_account
    from dpstream.pipelines.session.records import load

    project = table.load()
    config, new = with_account(project, table.name)
    secret = config.secret.file or ""
    keep_out_of_git(project.folder, secret, f"{config.account.path}*", config.folder)
    if new and not as_json:
        data_set, id_ = config.account.data_set, config.account.id
        click.echo(f"The account {id_} of {data_set} is now in {project.path.name}.", err=True)
    loaded = load.init(config)
    print_warnings(config.table.warnings)
    _loaded(loaded, as_json, config.table.warnings)


@session.command(
    epilog=examples(
        "dpstream session migrate rides rides_wide",
        "dpstream session init rides_wide",
    )
)
@section("old", required=True)
@click.argument("new")
@AS_JSON
def migrate(old: Chosen, new: str, as_json: bool) -> None:
    """Use the wider dimensions of table NEW in the account of table OLD, of the same data set.

    NEW has every dimension of OLD, perhaps with a wider range, finer steps, more codes or a higher
    most, and perhaps more dimensions; its coordinates are in another folder.  What points have
    spent is embedded in the wider space, and OLD is refused from then on.  No record is read:
    afterwards `dpstream session init NEW` makes the table.
    """
    from dpstream.pipelines.session import account

    config, embedded = account.migrate(old.load(), old.name or "", new)
    following = shlex.join(["dpstream", "session", "init", new]) + old.flags
    if as_json:
        print_json({"account": config.account.id, "embedded": embedded, "next": following})
        return
    done = "before" if embedded is None else f"now, with {embedded:,} charge{'s' * (embedded != 1)}"
    click.echo(f"Account    {config.account.id}")
    click.echo(f"Migrated   {done}")
    click.echo(f"Next       {following}")


@session.command(epilog=examples("dpstream session add rides rides-2.parquet"))
@NAMED_TABLE
@_FILES
@OPERATOR
@AS_JSON
def add(table: Chosen, files: tuple[Path, ...], as_json: bool) -> None:
    """Add the records of FILES; what points have spent stays."""
    from dpstream.pipelines.session.records import load

    _loaded(load.add(_config(table), files), as_json)


@session.command(epilog=examples("dpstream session replace rides corrected.parquet"))
@NAMED_TABLE
@_FILES
@OPERATOR
@AS_JSON
def replace(table: Chosen, files: tuple[Path, ...], as_json: bool) -> None:
    """Replace the records that have the same ids as the records of FILES."""
    from dpstream.pipelines.session.records import load

    _loaded(load.replace(_config(table), files), as_json)


@session.command(epilog=examples("dpstream session delete rides gone.csv"))
@NAMED_TABLE
@_FILES
@OPERATOR
@AS_JSON
def delete(table: Chosen, files: tuple[Path, ...], as_json: bool) -> None:
    """Delete the records whose ids FILES list; what their points have spent stays."""
    from dpstream.pipelines.session.records import load

    _loaded(load.delete(_config(table), files), as_json)


def _config(table: Chosen) -> "Config":
    from dpstream.pipelines.session.config import config_in

    return config_in(table.load(), table.name)


def _loaded(loaded: "Loaded", as_json: bool, warnings: Sequence[str] = ()) -> None:
    """Print the result of a change; the number of records only for the operator."""
    public = {"version": loaded.version, "tidied": loaded.tidied, "warnings": list(warnings)}
    if as_json:
        private = {name: value for name, value in loaded._asdict().items() if name not in public}
        private["dead_letter"] = loaded.dead_letter and str(loaded.dead_letter)
        print_json(with_private(public, private))
        return
    click.echo(f"Version {loaded.version} of the table is in place.")
    echo_private(
        f"{loaded.records:,} records, {loaded.usable:,} usable; "
        f"{loaded.taken:,} taken by this change."
    )
    for reason, count in sorted(loaded.refused.items()):
        echo_private(f"{count:,} refused: {reason}")
    if loaded.dead_letter is not None:
        echo_private(f"unusable records (position and reason) are listed in {loaded.dead_letter}.")


@session.command(
    epilog=examples("dpstream session close rides --arrival day --before 2024-01-05T00:00:00Z")
)
@TABLE
@click.option(
    "--arrival", required=True, metavar="NAME", help="The dimension that holds the time of arrival."
)
@click.option(
    "--before",
    required=True,
    metavar="VALUE",
    help="Close arrivals before this value, which lies on the dimension's grid.",
)
@ANALYST
@AS_JSON
def close(table: Chosen, arrival: str, before: str, analyst: str, as_json: bool) -> None:
    """Close all arrivals before a value for ever: questions about them are no longer answered.

    What they spent becomes one region, and their records may be deleted.
    """
    from dpstream.pipelines.session.figures import value_of
    from dpstream.pipelines.session.sliding import close_before

    with opened(table, analyst) as open_session:
        open_table = open_session.open_table
        closed = close_before(open_table, arrival, value_of(open_table.space, arrival, before))
    if as_json:
        print_json({"closed": closed})
        return
    click.echo("Closed." if closed else "It was closed already.")


def _add(*commands: Any) -> None:
    for command in commands:
        session.add_command(command)


_add(ask, plan, allot, select, stand, budget, transcript, picture)
