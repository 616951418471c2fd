"""``dpstream session``: tables in which each record has its own budget.

Here are the commands that make and fill a table, standing queries, budgets, the transcript and
pictures; those that ask are in `session_ask`.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.accounting.figures import decimal_text
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    Chosen,
    ExtraGroup,
    examples,
    print_figures,
    print_json,
    print_warnings,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.pipelines.cli.session_ask import (
    ANALYST,
    BUDGET,
    BY,
    FIGURES,
    NAMED_TABLE,
    TABLE,
    WHERE,
    allot,
    ask,
    budget_of,
    cells,
    echo_answer,
    opened,
    select,
    subspace,
)
from dpstream.pipelines.render.layout import count, labelled, page

if TYPE_CHECKING:
    from dpstream.pipelines.session.overview import Line
    from dpstream.pipelines.session.records.load import Loaded


@click.command(
    epilog=examples(
        "dpstream session stand rides count --arrival day --width 2 --until"
        " 2024-01-09T00:00:00Z --tick monday --epsilon 0.1",
    )
)
@NAMED_TABLE
@FIGURES
@WHERE
@BY
@BUDGET
@click.option(
    "--arrival", required=True, metavar="NAME", help="The dimension that holds the time of arrival."
)
@click.option(
    "--width", required=True, type=int, help="Width of a window, in steps of the dimension."
)
@click.option("--until", required=True, metavar="VALUE", help="End of the arrivals so far.")
@click.option(
    "--tick", required=True, metavar="NAME", help="Name of this tick; each tick is answered once."
)
@ANALYST
@AS_JSON
def stand(
    table: Chosen,
    figures: tuple[str, ...],
    where: str,
    set_name: str | None,
    by: tuple[str, ...],
    epsilon: str | None,
    rho: str | None,
    arrival: str,
    width: int,
    until: str,
    tick: str,
    analyst: str,
    as_json: bool,
) -> None:
    """Ask one tick of a standing query: the earliest window of arrivals with enough budget.

    Run it again with the next tick: the window stays as long as it has budget, and then slides to
    newer arrivals.
    """
    from dpstream.pipelines.session.ask import SlidingQuestion, arrival_of, cells_wide
    from dpstream.pipelines.session.ask import tick as asked
    from dpstream.pipelines.session.sentences import figure_of, value_of

    amount, kind = budget_of(epsilon, rho)
    with opened(table, analyst, charging=True) as session:
        open_table = session.open_table
        points = subspace(session, table, where, set_name)
        aggregates = tuple(map(figure_of, figures or ("count",)))
        question = points.request(aggregates, amount, cells(session, by), kind)  # type: ignore[arg-type]
        dimension = open_table.space.dimensions[arrival_of(open_table.space, arrival)]
        end = dimension.edge(value_of(open_table.space, arrival, until))
        wide = cells_wide(open_table.space, arrival, width)
        query = SlidingQuestion(question.question, question.selection, arrival, wide)
        echo_answer(session, asked(open_table, query, end, tick), as_json)


@click.command(
    epilog=examples(
        "dpstream session budget rides",
        "dpstream session budget rides --where 'hour >= 22' --json",
        "dpstream session budget rides --transcript",
    )
)
@TABLE
@WHERE
@click.option(
    "--transcript",
    is_flag=True,
    help="List all questions, charges, allotments, draws on them and closings instead, in order.",
)
@ANALYST
@AS_JSON
def budget(
    table: Chosen,
    where: str,
    set_name: str | None,
    transcript: bool,
    analyst: str,
    as_json: bool,
) -> None:
    """Show the most and least that some points have spent, and where most was spent."""
    from dpstream.pipelines.render.account import points_text
    from dpstream.pipelines.session import overview

    with opened(table, analyst, looking=True) as session:
        if transcript:
            lines = overview.transcript(session.open_table)
            entries = {"entries": [line.as_dict() for line in lines]}
            print_figures(as_json, entries, _transcript_text(lines))
            return
        chosen = subspace(session, table, where, set_name).selection
        figures = overview.overview(session.open_table, chosen)
    print_figures(as_json, figures, points_text(figures))


def _transcript_text(lines: "list[Line]") -> str:
    texts = list[str]()
    for line in lines:
        paid = f" {line.kind} {decimal_text(line.amount / 1_000_000)}" if line.kind else ""
        question = f": {line.question}" if line.question else ""
        head = f"{line.at}  {line.run_id[:12]}  {line.analyst}  {line.entry}{paid}{question}"
        texts += [head, *(f"    where {where}" for where in line.where)]
    return page(texts or ["Nothing was asked yet."])


@click.command(
    epilog=examples(
        "dpstream session picture rides --out budgets.html",
        "dpstream session picture rides --out budgets.html --by day,hour --by x,y",
        "dpstream session picture rides --out map.png --by x,y --epsilon 1",
        "dpstream session picture rides --out time.png --over-time",
    )
)
@TABLE
@click.option("--out", required=True, type=click.Path(path_type=Path), help="FILE.html or .png.")
@click.option(
    "--by",
    multiple=True,
    metavar="NAME,NAME",
    help="Dimensions of a map, which shows the least over all other dimensions.",
)
@click.option(
    "--epsilon",
    "initial",
    metavar="AMOUNT",
    help="Initial budget of the points in the maps.  [default: the most]",
)
@click.option(
    "--kind",
    type=click.Choice(["epsilon", "rho"]),
    help="Kind of budget in a .png.  [default: the table's first]",
)
@click.option("--over-time", is_flag=True, help="Draw a .png of what was spent over time.")
@WHERE
@ANALYST
@AS_JSON
def picture(
    table: Chosen,
    out: Path,
    by: tuple[str, ...],
    initial: str | None,
    kind: str | None,
    over_time: bool,
    where: str,
    set_name: str | None,
    analyst: str,
    as_json: bool,
) -> None:
    """Draw the budget that is left: one page (.html) with maps, spending over time and the
    transcript, or one picture (.png).  It is drawn from the account and the names of allotments,
    without records or answers.
    """
    from dpstream.accounting.regions.amounts import initial_of
    from dpstream.pipelines.render.page import ending_of
    from dpstream.pipelines.session import page

    ending = ending_of(out, ("html", "png"))
    with opened(table, analyst, looking=True) as session:
        frame = page.frame_of(subspace(session, table, where, set_name).boxes())
        micro = None if initial is None else initial_of(initial, "--epsilon")
        chosen = page.Chosen(page.pairs_of(by), micro, frame, kind, over_time)
        data = (
            page.render(session.open_table, chosen)
            if ending == "html"
            else page.png(session.open_table, chosen)
        )
    page.write(out, data)
    print_figures(as_json, {"out": out.name}, f"Wrote {out}")


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


@session.command(
    epilog=examples(
        "dpstream session init",
        "dpstream session init rides --env prod",
        "dpstream session init rides_wide --migrate rides",
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
    first = next((f"--{budget.kind}", amount(budget.step)) for budget in budgets)
    command = ["dpstream", "session", "ask", config.name, "count", *first, "--dry-run"]
    following = shlex.join(command)
    _loaded(loaded, as_json, following + table.flags, config.table.warnings)


@session.command(
    epilog=examples(
        "dpstream session change rides rides-2.parquet",
        "dpstream session change rides corrected.parquet --replace",
        "dpstream session change rides gone.csv --delete",
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
    following = shlex.join(["dpstream", "session", "budget", table.name or ""]) + table.flags
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
    from dpstream.pipelines.session.ask import close_before
    from dpstream.pipelines.session.sentences import value_of

    with opened(table, analyst) as open_session:
        open_table = open_session.open_table
        closed = close_before(open_table, arrival, value_of(open_table.space, arrival, before))
    print_figures(as_json, {"closed": closed}, "Closed." if closed else "It was closed already.")


for command in (ask, allot, select, stand, budget, picture):
    session.add_command(command)
