"""``dpstream table``: the owner's commands for tables in which each record has its own budget.

They make and fill a table, and close arrivals; `dpstream sql` asks it.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    Chosen,
    ExtraGroup,
    examples,
    print_figures,
    print_json,
    print_warnings,
    section,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.pipelines.render.layout import count, labelled, page

if TYPE_CHECKING:
    from dpstream.pipelines.session.records.load import Loaded

#: The table of a command; without a name the only one of the project file.
TABLE = section("table")
#: The same where further arguments follow, or may.
NAMED_TABLE = section("table", required=True)


@click.group(
    "table",
    short_help="Fill a table whose records have budgets of their own.",
    cls=ExtraGroup,
    extra="sql",
    epilog=examples(
        "dpstream table init rides",
        "dpstream table change rides rides-2.parquet",
    ),
)
def tables() -> None:
    """Make and fill a table in which each record has its own budget.

    TABLE is a table of the project file with dimensions, one of which is the initial budget; its
    data set has no unit.  Without TABLE it is the only such table.  `dpstream sql` asks it.
    """
    # The BLAS of numpy starts threads that spin when it is loaded; no command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@tables.command(
    epilog=examples(
        "dpstream table init",
        "dpstream table init rides --env prod",
        "dpstream table init rides_wide --migrate rides",
    )
)
@TABLE
@click.option(
    "--migrate",
    "old",
    metavar="OLD",
    help="Continue in the account of table OLD, of the same data set, with wider dimensions.",
)
@OPERATOR
@AS_JSON
def init(table: Chosen, old: str | None, as_json: bool) -> None:
    """Read the records of TABLE, and make the account of its data set if it has none.

    The account is made at data_set.NAME.account.path (default: NAME.account.db); an existing
    account of these records is used.  Its id is written into the project file.

    With --migrate, TABLE has every dimension of OLD, perhaps with a wider range, finer steps, more
    codes or a higher most, and perhaps more dimensions; its coordinates are in another folder.
    What points have spent is embedded in the wider space, and OLD is refused from then on.
    """
    from dpstream.accounting.regions.space import Budget
    from dpstream.pipelines.drafting.target import keep_out_of_git
    from dpstream.pipelines.session.account import migrate, with_account
    from dpstream.pipelines.session.records import load
    from dpstream.pipelines.session.sentences import amount

    project = table.load()
    if old is not None:
        embedded = migrate(project, old, table.name)
        if not as_json:
            when = "before" if embedded is None else f"now, with {count(embedded, 'charge')}"
            click.echo(f"{old} was migrated {when}.", err=True)
    config, new = with_account(project, table.name)
    secret = config.secret.file or ""
    keep_out_of_git(project.folder, secret, f"{config.account.path}*", config.folder)
    if new and not as_json:
        data_set, id_ = config.account.data_set, config.account.id
        click.echo(f"The account {id_} of {data_set} is now in {project.path.name}.", err=True)
    loaded = load.init(config)
    print_warnings(config.table.warnings)
    # The grid of initial budgets: a first question of everything is answered at one step.
    budgets = (d for d in config.table.space.dimensions if isinstance(d, Budget))
    first = next(f"{budget.kind} = {amount(budget.step)}" for budget in budgets)
    statement = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({first}) COUNT(*) FROM {config.name}"
    following = shlex.join(["dpstream", "sql", "--explain", statement])
    _loaded(loaded, as_json, following + table.flags, config.table.warnings)


@tables.command(
    epilog=examples(
        "dpstream table change rides rides-2.parquet",
        "dpstream table change rides corrected.parquet --replace",
        "dpstream table change rides gone.csv --delete",
    )
)
@NAMED_TABLE
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--replace", "how", flag_value="replace", help="Replace the records with their ids.")
@click.option("--delete", "how", flag_value="delete", help="Delete the records with their ids.")
@OPERATOR
@AS_JSON
def change(table: Chosen, files: tuple[Path, ...], how: str | None, as_json: bool) -> None:
    """Add the records of FILES, or replace or delete the records of TABLE that have their ids.

    What points have spent stays.
    """
    from dpstream.pipelines.session.config import config_in
    from dpstream.pipelines.session.records import load

    changes = {None: load.add, "replace": load.replace, "delete": load.delete}
    loaded = changes[how](config_in(table.load(), table.name), files)
    following = shlex.join(["dpstream", "sql", "SELECT * FROM dpstream.budget"]) + table.flags
    _loaded(loaded, as_json, following)


def _loaded(loaded: "Loaded", as_json: bool, following: str, warnings: Sequence[str] = ()) -> None:
    """Print the result of a change; the number of records only for the operator.

    Args:
        following: the next command.
    """
    public = {"version": loaded.version, "tidied": loaded.tidied, "warnings": list(warnings)}
    public["next"] = following
    if as_json:
        private = {name: value for name, value in loaded._asdict().items() if name not in public}
        private["dead_letter"] = loaded.dead_letter and str(loaded.dead_letter)
        print_json(with_private(public, private))
        return
    click.echo(f"Version {loaded.version} of the table is in place.")
    echo_private(
        f"{count(loaded.records, 'record')}, {loaded.usable:,} usable; "
        f"{loaded.taken:,} taken by this change."
    )
    for reason, refused in sorted(loaded.refused.items()):
        echo_private(f"{refused:,} refused: {reason}")
    if loaded.dead_letter is not None:
        echo_private(f"unusable records (position and reason) are listed in {loaded.dead_letter}.")
    click.echo(page(labelled("Next", following)), nl=False)


@tables.command(
    epilog=examples("dpstream table close rides --arrival day --before 2024-01-05T00:00:00Z")
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
@click.option("--analyst", default="owner", show_default=True, help="Name of who closes it.")
@AS_JSON
def close(table: Chosen, arrival: str, before: str, analyst: str, as_json: bool) -> None:
    """Close all arrivals before a value for ever: questions about them are no longer answered.

    What they spent becomes one region, and their records may be deleted.
    """
    from dpstream.pipelines.session.ask import close_before
    from dpstream.pipelines.session.config import config_in
    from dpstream.pipelines.session.open_table import OpenTable

    config = config_in(table.load(), table.name)
    with OpenTable(config, analyst) as open_table:
        closed = close_before(open_table, arrival, before)
    print_figures(as_json, {"closed": closed}, "Closed." if closed else "It was closed already.")
