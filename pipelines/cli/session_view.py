"""``dpstream session``: standing queries, budgets, the transcript and pictures."""

from pathlib import Path
from typing import Any

import click

from dpstream.pipelines.cli.parts import AS_JSON, Chosen, examples, print_json
from dpstream.pipelines.cli.session_ask import BY, FIGURES, _echo_answer
from dpstream.pipelines.cli.session_parts import (
    ANALYST,
    BUDGET,
    NAMED_TABLE,
    TABLE,
    WHERE,
    budget_of,
    cells,
    opened,
    subspace,
)


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
    inside: str | None,
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
    with opened(table, analyst) as session:
        open_table = session.open_table
        points = subspace(session, table, where, inside)
        aggregates = tuple(map(figure_of, figures or ("count",)))
        question = points.request(aggregates, amount, cells(session, by), kind)  # type: ignore[arg-type]
        dimension = open_table.space.dimensions[arrival_of(open_table.space, arrival)]
        end = dimension.edge(value_of(open_table.space, arrival, until))
        wide = cells_wide(open_table.space, arrival, width)
        query = SlidingQuestion(question.question, question.selection, arrival, wide)
        _echo_answer(session, asked(open_table, query, end, tick), as_json)


@click.command(
    epilog=examples(
        "dpstream session budget rides",
        "dpstream session budget rides --where 'hour >= 22' --json",
    )
)
@TABLE
@WHERE
@ANALYST
@AS_JSON
def budget(table: Chosen, where: str, inside: str | None, analyst: str, as_json: bool) -> None:
    """Show the most and least that some points have spent, and where most was spent."""
    from dpstream.pipelines.session.overview import overview

    with opened(table, analyst, looking=True) as session:
        chosen = subspace(session, table, where, inside).selection
        figures = overview(session.open_table, chosen)
    if as_json:
        print_json(figures)
        return
    click.echo(
        f"Table       {figures['table']}, data set {figures['data_set']}, unit {figures['unit']}"
    )
    click.echo(f"Entries     {figures['entries']:,}")
    for kind, part in figures["budgets"].items():
        click.echo("\n".join(_kind(kind, part)))
    for kind, own in figures["quotas"].items():
        click.echo(
            f"Quota       {own['analyst']}: {kind} {_amount(own['quota'])} of a point, "
            f"charged to one at most {_amount(own['most_charged'])}"
        )


def _kind(kind: str, part: dict[str, Any]) -> list[str]:
    rows = [
        f"            {'closed' if row['spent'] is None else _amount(row['spent']):>10}"
        f"  where {row['where']}"
        for row in part["rows"]
    ]
    return [
        f"{kind:<11} spent by a point at most {_amount(part['most_spent'])}, at least "
        f"{_amount(part['least_spent'])}, of initial budgets up to {_amount(part['most_initial'])}"
        f"; in {part['regions']:,} region{'s' * (part['regions'] != 1)}",
        *rows,
    ]


def _amount(number: float) -> str:
    from dpstream.pipelines.session import sentences

    return sentences.amount(round(number * 1_000_000))


@click.command(
    epilog=examples("dpstream session transcript rides", "dpstream session transcript rides --json")
)
@TABLE
@ANALYST
@AS_JSON
def transcript(table: Chosen, analyst: str, as_json: bool) -> None:
    """List the questions, charges, allotments, uses of allotments and closings, in order."""
    from dpstream.pipelines.session.overview import transcript as lines_of

    with opened(table, analyst, looking=True) as session:
        lines = lines_of(session.open_table)
    if as_json:
        print_json({"entries": [line.as_dict() for line in lines]})
        return
    for line in lines:
        paid = f" {line.kind} {_amount(line.amount / 1_000_000)}" if line.kind else ""
        question = f": {line.question}" if line.question else ""
        click.echo(f"{line.at}  {line.run_id[:12]}  {line.analyst}  {line.what}{paid}{question}")
        for where in line.where:
            click.echo(f"    where {where}")
    if not lines:
        click.echo("Nothing was asked yet.")


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
    inside: str | None,
    analyst: str,
    as_json: bool,
) -> None:
    """Draw the budget that is left: one page (.html) with maps, spending over time and the
    transcript, or one picture (.png).  It is drawn from the account alone, without records or
    answers.
    """
    from dpstream.pipelines.session import page

    ending = page.kind_of(out)
    with opened(table, analyst, looking=True) as session:
        frame = page.frame_of(subspace(session, table, where, inside).boxes())
        chosen = page.Chosen(page.pairs_of(by), page.initial_of(initial), frame, kind, over_time)
        data = (
            page.render(session.open_table, chosen)
            if ending == "html"
            else page.png(session.open_table, chosen)
        )
    page.write(out, data)
    if as_json:
        print_json({"out": out.name})
        return
    click.echo(f"Wrote {out.name}")
