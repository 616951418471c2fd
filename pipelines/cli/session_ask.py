"""``dpstream session``: the commands that ask, plan, allot and select.

What all commands of ``dpstream session`` share is here too: options, errors as text, an open
session.
"""

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import decimal_text, human
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    AS_OF,
    FRESH,
    RUNNER,
    Chosen,
    examples,
    options,
    print_account,
    print_charge,
    print_figures,
    print_json,
    print_warnings,
    runner_of,
    section,
)

if TYPE_CHECKING:
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.session.ask import SessionRequest
    from dpstream.pipelines.session.receipt import Answer
    from dpstream.pipelines.session.session import Asker, Session, Subspace
    from dpstream.state.ledger.contract import Answer as Committed


#: The session table of a command; without a name the only one of the project file.
TABLE = section("table")
#: The same where further arguments follow, or may.
NAMED_TABLE = section("table", required=True)
ANALYST = click.option(
    "--analyst",
    default="analyst",
    show_default=True,
    help="Name of the analyst who asks, whose quota is charged.",
)
WHERE = options(
    click.option("--where", default="", help="Predicate over dimensions and spent budget."),
    click.option("--in", "set_name", metavar="NAME", help="A set of points that `select` named."),
)
BUDGET = options(
    click.option("--epsilon", metavar="AMOUNT", help="Charge this much epsilon."),
    click.option("--rho", metavar="AMOUNT", help="Charge this much rho (zCDP) instead."),
)


def budget_of(epsilon: str | None, rho: str | None) -> tuple[str, str]:
    """Return (amount, kind) of the budget to charge.

    Raises:
        UsageError: none or both are given.
    """
    if (epsilon is None) == (rho is None):
        rule = "is required" if epsilon is None else "is given, and --rho too"
        raise UsageError("--epsilon", rule, "pay with one of --epsilon and --rho")
    return (epsilon, "epsilon") if epsilon is not None else (rho or "", "rho")


@contextlib.contextmanager
def opened(
    table: Chosen,
    analyst: str,
    runner: "Runner | None" = None,
    looking: bool = False,
    charging: bool = False,
) -> "Iterator[Session]":
    """Open the session of a table; print which boxes lack budget if a question is refused.

    Args:
        looking: whether the command asks nothing: no file is made or written.
        charging: whether the command may charge: the account is printed first.
    """
    from dpstream.accounting.strength import WeakGuaranteeWarning
    from dpstream.pipelines.render.question_plan import lacking_lines
    from dpstream.pipelines.session.config import config_in
    from dpstream.pipelines.session.plan import decision_as_builtins
    from dpstream.pipelines.session.session import Session
    from dpstream.state.ledger.orders import SessionRefusedError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakGuaranteeWarning)  # told below, as commands tell it
        project = table.load()
        config = config_in(project, table.name)
        session_of_table = Session(config, analyst=analyst, runner=runner, looking=looking)
    if charging:
        print_account(config.account, project.path, table.environment)
    with session_of_table as session:
        if looking:  # a command that charges warns where it has charged
            _warn(session)
        try:
            yield session
        except SessionRefusedError as error:
            figures = decision_as_builtins(session.open_table.space, error.decision)
            if click.get_current_context().params.get("as_json"):
                names = "lacking", "lacking_boxes", "largest"
                error.figures = {name: figures[name] for name in names}
            else:
                for line in lacking_lines(figures):
                    click.echo(f"  {line}", err=True)
            raise


def _warn(session: "Session", charged: bool = True) -> None:
    """Print the table's warnings; they stand with what is planned or charged, not with what was."""
    print_warnings(session.open_table.table.warnings if charged else ())


def subspace(session: "Session", table: Chosen, where: str, set_name: str | None) -> "Subspace":
    """Return the points that a command names."""
    points = session.table if set_name is None else session.where(_named(session, table, set_name))
    return points.where(where) if where else points


def _named(session: "Session", table: Chosen, name: str) -> str:
    """Return the predicate that a name stands for."""
    from dpstream.pipelines.session import names

    return names.predicate(session.open_table.config, name, table.flags)


def asker(
    session: "Session", table: Chosen, where: str, set_name: str | None, run_id: str | None
) -> "Asker":
    """Return the points to ask about, or the allotment to spend from."""
    if run_id is None:
        return subspace(session, table, where, set_name)

    points = session.allotment(run_id)
    if set_name is not None:
        points = points.where(_named(session, table, set_name))
    return points.where(where) if where else points


def cells(session: "Session", by: tuple[str, ...]) -> "Mapping[str, Any]":
    """Return the ranges of ``--by``."""
    from dpstream.pipelines.session.sentences import ranges_of

    return ranges_of(session.open_table.space, by)


FIGURES = click.argument("figures", nargs=-1)
BY = click.option(
    "--by",
    multiple=True,
    metavar="NAME[=RANGES]",
    help="Answer with a row for each value of NAME, for each of 16 equal ranges (NAME=16),"
    " or between edges (NAME=0,10,20).",
)


@click.command(
    epilog=examples(
        "dpstream session ask rides count --where 'epsilon >= 0.5' --epsilon 0.1",
        "dpstream session ask rides 'average(fare)' count --by hour --epsilon 0.5 --drop",
        "dpstream session ask rides count --by x=16 --by y=16 --rho 0.01 --drop",
        "dpstream session ask rides 'median(fare)' --from half --epsilon 0.25",
        "dpstream session ask rides count --where 'hour >= 20' --union   # free",
        "dpstream session ask rides count --by x=16 --epsilon 0.1 --runner FlinkRunner",
        "dpstream session ask rides count --by x=16 --by y=16 --epsilon 0.1 --dry-run",
    )
)
@NAMED_TABLE
@FIGURES
@WHERE
@BY
@BUDGET
@FRESH
@AS_OF
@click.option("--drop", is_flag=True, help="Leave out points with too little budget.")
@click.option(
    "--cover",
    multiple=True,
    metavar="NAME",
    help="Charge the whole range of this dimension, so that regions of spent budget merge.",
)
@click.option(
    "--from", "allotment", metavar="NAME", help="Spend from an allotment (its name or run id)."
)
@click.option("--union", is_flag=True, help="Answer from answers of disjoint parts, at no charge.")
@click.option(
    "--ticket",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Charge here, and write a private file from which a service answers elsewhere.",
)
@RUNNER
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show errors, charge and which points lack budget; charges nothing.",
)
@ANALYST
@AS_JSON
def ask(
    table: Chosen,
    figures: tuple[str, ...],
    where: str,
    set_name: str | None,
    by: tuple[str, ...],
    union: bool,
    allotment: str | None,
    ticket: Path | None,
    runner: str | None,
    parallelism: int,
    beam_flag: tuple[str, ...],
    dry_run: bool,
    analyst: str,
    as_json: bool,
    **how: Any,
) -> None:
    """Answer FIGURES (default: count) of some points of TABLE.

    A figure is count, sum(COLUMN), average(COLUMN), median(COLUMN) or quantiles(COLUMN, 0.25, ..).
    A question is charged in the account before a record is read, and its answer is committed
    before it is shown.  The same question gets the same bytes, at no further charge.  With
    --dry-run no record is read, --union tells whether there are such answers, and the exit code is
    that of the question.
    """
    where_to = runner_of(runner, parallelism, beam_flag)
    for option, given in (("--by", by), ("--from", allotment), ("--ticket", ticket)):
        if union and given:
            rule = "cannot be combined with --union, which adds up whole answers"
            raise UsageError(option, rule, "leave one of the two out")
    if dry_run:
        gc.disable()  # what a plan loads and reads is in use until it ends
        click.get_current_context().call_on_close(gc.enable)
    with opened(
        table, analyst, where_to, looking=dry_run, charging=not (union or dry_run)
    ) as session:
        if union and not dry_run:
            _union(session, table, figures, where, set_name, as_json)
            return
        points = asker(session, table, where, set_name, allotment)
        question = _request(session, points, figures, by, how)
        if dry_run:
            _plan(session, question, union, as_json)
        from dpstream.pipelines.session.ask import ask as answer_of

        if ticket is not None:
            _hand_out(session, question, ticket, as_json)
            return
        answer_of(session.open_table, question, lambda it: echo_answer(session, it, as_json))


def _plan(session: "Session", question: "SessionRequest", union: bool, as_json: bool) -> NoReturn:
    """Print a question's errors, its charge and the points that lack budget.

    No record is read.  The exit code is that of the question without ``--dry-run``.
    """
    from dpstream.pipelines.render.question_plan import session_text
    from dpstream.pipelines.session import plan as planning

    planned = planning.plan(session.open_table, question, union)
    figures = planning.as_builtins(session.open_table.space, planned)
    print_figures(as_json, figures, session_text(figures))
    click.get_current_context().exit(planned.acceptance.exit_code)


def _hand_out(session: "Session", question: "SessionRequest", out: Path, as_json: bool) -> None:
    from dpstream.pipelines.session.ticket import hand_out

    def show(paid: "Committed") -> None:
        _warn(session, paid.charged)
        figures = {"run_id": paid.run_id, "charged": paid.charged, "ticket": out.name}
        print_figures(as_json, figures, f"Wrote {out}: private; run {paid.run_id}")

    hand_out(session.open_table, question, out, show)


def _request(
    session: "Session",
    points: "Asker",
    figures: tuple[str, ...],
    by: tuple[str, ...],
    how: dict[str, Any],
) -> "SessionRequest":
    """Return the question of a command."""
    from dpstream.pipelines.session.sentences import figure_of

    amount, kind = budget_of(how.pop("epsilon"), how.pop("rho"))
    how["cover"] = tuple(how["cover"])
    given = {name: value for name, value in how.items() if value}
    aggregates = tuple(map(figure_of, figures or ("count",)))
    return points.request(aggregates, amount, cells(session, by), kind, **given)  # type: ignore[arg-type]


def echo_answer(session: "Session", answer: "Answer", as_json: bool) -> None:
    """Print an answer with its intervals and what it was charged."""
    from dpstream.pipelines.render.account import charge_lines
    from dpstream.pipelines.session import sentences
    from dpstream.pipelines.session.receipt import answer_rows, answer_text

    head = answer.header
    question = head.question
    notes = sentences.rounding_of(session.open_table.space, question)
    _warn(session, answer.charged)
    if as_json:
        print_json(
            {
                "run_id": head.run_id,
                "answered": head.answered,
                "charged": answer.charged,
                "kind": question.kind,
                "amount": question.amount / 1_000_000,
                "allotment": head.allotment,
                "receipt": answer.digest,
                "insecure": answer.insecure,
                "rows": answer_rows(answer),
                "warnings": session.open_table.table.warnings,
                "notes": notes,
            }
        )
        return
    click.echo(answer_text(answer), nl=False)
    for note in notes:
        click.echo(note)
    paid = f"{question.kind} {sentences.amount(question.amount)}"
    which = "that had as much left (the others are left out)" if head.drop else "asked"
    lines = charge_lines(
        f"{paid} to every point {which}", answer.charged, head.run_id, head.answered
    )
    if head.allotment:
        remaining = decimal_text(session.allotment(head.allotment).left)
        drew = "Drew" if answer.charged else "Before, this drew"
        lines = [f"{drew} {paid} on the allotment, which has {remaining} left; run {head.run_id}"]
    elif answer.charged:
        waste = _waste(session, head.run_id)
        if waste > 1.0001:
            lines.append(f"Points charged, for each point asked: {human(waste)}")
    print_charge(lines, answer.insecure)


def _waste(session: "Session", run_id: str) -> float:
    """Return the number of points charged per point read; snapping and ``--cover`` raise it."""
    from dpstream.accounting.regions.boxes import volumes

    [charge] = [charge for name, charge in session.open_table.account.history() if name == run_id]
    return float(volumes(charge.boxes).sum() / volumes(charge.read).sum())


def _union(
    session: "Session",
    table: Chosen,
    figures: tuple[str, ...],
    where: str,
    set_name: str | None,
    as_json: bool,
) -> None:
    from dpstream.pipelines.session.sentences import figure_of

    for figure in map(figure_of, figures or ("count",)):
        union = subspace(session, table, where, set_name).union(figure)
        figures_of = {"figure": figure.name, **union._asdict()}
        print_figures(as_json, figures_of, f"{figure.name}: {union.text}; free")


@click.command(
    epilog=examples(
        "dpstream session allot rides half --in night --epsilon 0.5",
        "dpstream session ask rides 'median(fare)' --from half --epsilon 0.25",
    )
)
@NAMED_TABLE
@click.argument("name")
@WHERE
@BUDGET
@click.option(
    "--cover",
    multiple=True,
    metavar="NAME",
    help="Charge the whole range of this dimension, as for `ask`.",
)
@ANALYST
@AS_JSON
def allot(
    table: Chosen,
    name: str,
    where: str,
    set_name: str | None,
    epsilon: str | None,
    rho: str | None,
    cover: tuple[str, ...],
    analyst: str,
    as_json: bool,
) -> None:
    """Charge a budget now, for later questions (`ask --from NAME`).

    It fails if ANY point has less left.  The same command again returns the same allotment;
    another allotment needs another NAME.
    """
    from dpstream.pipelines.session import names

    names.check(name)
    amount, kind = budget_of(epsilon, rho)
    with opened(table, analyst, charging=True) as session:
        points = subspace(session, table, where, set_name)
        made = points.as_pinq(amount, kind, cover, name)  # type: ignore[arg-type]
        names.write(session.open_table.config, name, run_id=made.run_id)
        _warn(session, made.charged)
        if as_json:
            fields = {"name": name, "run_id": made.run_id, "kind": kind, "charged": made.charged}
            print_json({**fields, "amount": made.amount / 1_000_000})
            return
        click.echo(f"{name}: {made.run_id}")
        if not made.charged:
            click.echo(
                f"Charged before; {decimal_text(made.left)} left: draw on it by --from", err=True
            )
            return
        click.echo(f"Charged {kind} {amount} to every point asked; draw on it by --from", err=True)


@click.command(
    epilog=examples(
        "dpstream session select rides night --where 'hour >= 22 OR hour < 6'",
        "dpstream session select rides rich --in night --with-epsilon 0.6",
    )
)
@NAMED_TABLE
@click.argument("name")
@WHERE
@click.option(
    "--with-epsilon", metavar="AMOUNT", help="Only points that have this much epsilon left now."
)
@click.option("--with-rho", metavar="AMOUNT", help="Only points that have this much rho left now.")
@ANALYST
@AS_JSON
def select(
    table: Chosen,
    name: str,
    where: str,
    set_name: str | None,
    with_epsilon: str | None,
    with_rho: str | None,
    analyst: str,
    as_json: bool,
) -> None:
    """Give some points a NAME, and show the most that any of them has spent.

    Names are stored in a public file beside the project file.  The points of --with-epsilon and
    --with-rho stay the same when their budget is spent.
    """
    from dpstream.pipelines.render.layout import page
    from dpstream.pipelines.session import names, sentences
    from dpstream.pipelines.session.overview import kinds

    names.check(name)
    with opened(table, analyst, looking=True) as session:
        points = subspace(session, table, where, set_name)
        wanted: dict[Any, str | None] = {"epsilon": with_epsilon, "rho": with_rho}
        for kind, amount in wanted.items():
            if amount is not None:
                points = points.with_budget(amount, kind)
        text = points.selection.text
        if points.selection.fixed is not None:
            boxes = [sentences.box(session.open_table.space, box) for box in points.boxes()]
            text = " OR ".join(f"({box})" for box in boxes)
        spent = {kind: points.max_consumed(kind) for kind in kinds(session.open_table.space)}
        names.write(session.open_table.config, name, text)
        lines = [
            f"{name}: {text or sentences.EVERYTHING}",
            *(f"Spent by a point, at most: {k} {decimal_text(most)}" for k, most in spent.items()),
        ]
        print_figures(as_json, {"name": name, "where": text, "max_consumed": spent}, page(lines))
