"""``dpstream session``: tables whose records have budgets of their own."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    ACCOUNT,
    AS_JSON,
    ExtraGroup,
    examples,
    person_of,
    print_json,
    print_warnings,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.pipelines.cli.session_ask import allot, ask, plan, select
from dpstream.pipelines.cli.session_parts import ANALYST, TABLE, opened
from dpstream.pipelines.cli.session_view import budget, picture, stand, transcript

if TYPE_CHECKING:
    from dpstream.pipelines.session.load import Loaded

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.group(
    cls=ExtraGroup,
    extra="sql",
    epilog=examples(
        "dpstream session init rides.toml",
        "dpstream session budget rides.toml --where 'hour >= 22'",
        "dpstream session ask rides.toml count --where 'epsilon >= 0.5' --epsilon 0.1",
    ),
)
def session() -> None:
    """Explore a table whose records have budgets of their own.

    TABLE is a TOML file: the dimensions of the records, one of which is the initial budget.  A
    question is answered only if every point that it asks has enough budget left, whether or not a
    record is there, so that a refusal tells nothing about records.
    """
    # The BLAS of numpy starts threads that spin when it is loaded; no session multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@session.command(
    epilog=examples(
        "dpstream session init rides.toml",
        "dpstream session init rides.toml --account shop/rides-ledger.db",
    )
)
@TABLE
@ACCOUNT
@OPERATOR
@AS_JSON
def init(table: Path, account: str | None, new_account: bool, as_json: bool) -> None:
    """Make the table of the records that TABLE names, in an account.

    Where accounts are there, in TABLE's folder or in its parents up to the repository's root, one
    of them is chosen, or a new one is made at TABLE's account.path.  The account's id is written
    into TABLE, which names the account from then on.
    """
    from dpstream.pipelines.drafting.place import keep_out_of_git
    from dpstream.pipelines.session import load
    from dpstream.pipelines.session.account import with_account

    config, new = with_account(table, person_of(as_json), account, new_account)
    key = (config.key.key or "").removeprefix("file:")
    keep_out_of_git(table.absolute().parent, key, f"{config.account.path}*", config.folder)
    if new and not as_json:
        click.echo(f"{table.name} names the account {config.account.id} from now on.", err=True)
    loaded = load.init(config)
    print_warnings(config.table.warnings)
    _loaded(loaded, as_json, config.table.warnings)


@session.command(
    epilog=examples(
        "dpstream session migrate rides.toml rides-wide.toml",
        "dpstream session init rides-wide.toml",
    )
)
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@AS_JSON
def migrate(old: Path, new: Path, as_json: bool) -> None:
    """Go on in the account of table file OLD with the wider dimensions of table file NEW.

    NEW has every dimension of OLD, perhaps with a wider range, finer steps, more codes or a higher
    most, and perhaps more dimensions; its folder is another one.  What points have spent is
    embedded in the wider space, and OLD is refused from then on.  No record is read: `dpstream
    session init NEW` makes the table then.
    """
    from dpstream.pipelines.session import account

    config, embedded = account.migrate(old, new)
    following = shlex.join(["dpstream", "session", "init", str(new)])
    if as_json:
        print_json({"account": config.account.id, "embedded": embedded, "next": following})
        return
    done = "before" if embedded is None else f"now, with {embedded:,} charge{'s' * (embedded != 1)}"
    click.echo(f"Account    {config.account.id}")
    click.echo(f"Migrated   {done}")
    click.echo(f"Next       {following}")


@session.command(epilog=examples("dpstream session add rides.toml rides-2.parquet"))
@TABLE
@_FILES
@OPERATOR
@AS_JSON
def add(table: Path, files: tuple[Path, ...], as_json: bool) -> None:
    """Add the records of FILES; what points have spent stays."""
    from dpstream.pipelines.session import load
    from dpstream.pipelines.session.config import load_config

    _loaded(load.add(load_config(table), files), as_json)


@session.command(epilog=examples("dpstream session replace rides.toml corrected.parquet"))
@TABLE
@_FILES
@OPERATOR
@AS_JSON
def replace(table: Path, files: tuple[Path, ...], as_json: bool) -> None:
    """Put the records of FILES in the place of those with the same ids."""
    from dpstream.pipelines.session import load
    from dpstream.pipelines.session.config import load_config

    _loaded(load.replace(load_config(table), files), as_json)


@session.command(epilog=examples("dpstream session delete rides.toml gone.csv"))
@TABLE
@_FILES
@OPERATOR
@AS_JSON
def delete(table: Path, files: tuple[Path, ...], as_json: bool) -> None:
    """Delete the records whose ids FILES list; what their points have spent stays."""
    from dpstream.pipelines.session import load
    from dpstream.pipelines.session.config import load_config

    _loaded(load.delete(load_config(table), files), as_json)


def _loaded(loaded: "Loaded", as_json: bool, warnings: Sequence[str] = ()) -> None:
    """How many records there are is for their owner; whoever asks questions must not see it."""
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
    epilog=examples("dpstream session close rides.toml --arrival day --before 2024-01-05T00:00:00Z")
)
@TABLE
@click.option("--arrival", required=True, metavar="NAME", help="The dimension of arrival.")
@click.option("--before", required=True, metavar="VALUE", help="On the dimension's grid.")
@ANALYST
@AS_JSON
def close(table: Path, arrival: str, before: str, analyst: str, as_json: bool) -> None:
    """Close all arrivals before a value, for ever: no question is answered there any more.

    What they spent is one region then, and their records may be deleted.
    """
    from dpstream.pipelines.session.figures import value_of
    from dpstream.pipelines.session.standing import close_before

    with opened(table, analyst) as open_session:
        open_table = open_session.desk
        closed = close_before(open_table, arrival, value_of(open_table.space, arrival, before))
    if as_json:
        print_json({"closed": closed})
        return
    click.echo("Closed." if closed else "It was closed already.")


def _add(*commands: Any) -> None:
    for command in commands:
        session.add_command(command)


_add(ask, plan, allot, select, stand, budget, transcript, picture)
