"""What the commands of ``dpstream session`` share: options, errors as text, an open session."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import Chosen, options, print_json, print_warnings, section

if TYPE_CHECKING:
    from dpstream.accounting.regions.decision import Decision
    from dpstream.accounting.regions.space import Space
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.session.session import Asker, Session, Subspace

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
    click.option("--in", "inside", metavar="NAME", help="A set of points that `select` named."),
)
BUDGET = options(
    click.option("--epsilon", metavar="AMOUNT", help="Charge this much epsilon."),
    click.option("--rho", metavar="AMOUNT", help="Charge this much rho (zCDP) instead."),
)
RUNNER = options(
    click.option(
        "--runner",
        help="Beam runner whose workers read records and draw noise.  [default: this process]",
    ),
    click.option(
        "--parallelism",
        type=click.IntRange(1, 4096),
        default=1,
        help="Number of the runner's workers.",
    ),
    click.option(
        "--beam-flag",
        multiple=True,
        help="A flag of the runner, as --beam-flag=--NAME=VALUE; repeatable.",
    ),
)
#: Boxes of a refusal that are named.
_BOXES = 8


def budget_of(epsilon: str | None, rho: str | None) -> tuple[str, str]:
    """Return (amount, kind) of the budget to charge.

    Raises:
        UsageError: none or both are given.
    """
    from dpstream.accounting.errors import UsageError

    if (epsilon is None) == (rho is None):
        rule = "is required" if epsilon is None else "is given, and --rho too"
        raise UsageError("--epsilon", rule, "pay with one of --epsilon and --rho")
    return (epsilon, "epsilon") if epsilon is not None else (rho or "", "rho")


@contextlib.contextmanager
def opened(
    table: Chosen, analyst: str, runner: "Runner | None" = None, looking: bool = False
) -> "Iterator[Session]":
    """Open the session of a table; print which boxes lack budget if a question is refused.

    Args:
        looking: whether the command asks nothing: no file is made or written.
    """
    from dpstream.accounting.strength import WeakGuaranteeWarning
    from dpstream.pipelines.session.config import config_in
    from dpstream.pipelines.session.session import Session
    from dpstream.state.ledger.orders import SessionRefusedError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakGuaranteeWarning)  # told below, as commands tell it
        config = config_in(table.load(), table.name)
        session_of_table = Session(config, analyst=analyst, runner=runner, looking=looking)
    with session_of_table as session:
        print_warnings(session.open_table.table.warnings)
        try:
            yield session
        except SessionRefusedError as error:
            if click.get_current_context().params.get("as_json"):
                print_json(as_builtins(session.open_table.space, error.decision))
            else:
                for line in lacking(session.open_table.space, error.decision):
                    click.echo(f"  {line}", err=True)
            raise


def lacking(space: "Space", decision: "Decision") -> list[str]:
    """Render which points lack budget, and the least that each box has left."""
    from dpstream.pipelines.session import sentences

    rows = zip(decision.lacking[:_BOXES], decision.left[:_BOXES].tolist(), strict=True)
    lines = [
        f"{sentences.amount(left)} left where {sentences.box(space, box)}" for box, left in rows
    ]
    more = len(decision.lacking) - _BOXES
    return [*lines, f"... and {more:,} more boxes"] if more > 0 else lines


def as_builtins(space: "Space", decision: "Decision") -> dict[str, Any]:
    """Return a decision as values for JSON."""
    from dpstream.pipelines.session import sentences

    return {
        "accepted": decision.accepted,
        "charged": sentences.boxes(space, decision.charged),
        "lacking": [
            {"where": sentences.box(space, box), "left": left / 1_000_000}
            for box, left in zip(
                decision.lacking[:_BOXES], decision.left[:_BOXES].tolist(), strict=True
            )
        ],
        "lacking_boxes": len(decision.lacking),
        "largest": decision.largest / 1_000_000,
    }


def subspace(session: "Session", table: Chosen, where: str, inside: str | None) -> "Subspace":
    """Return the points that a command names."""
    points = session.table if inside is None else session.where(_named(session, table, inside))
    return points.where(where) if where else points


def _named(session: "Session", table: Chosen, name: str) -> str:
    """Return the predicate that a name stands for."""
    from dpstream.pipelines.session import names

    return names.predicate(session.open_table.config, name, table.flags)


def asker(
    session: "Session", table: Chosen, where: str, inside: str | None, run_id: str | None
) -> "Asker":
    """Return the points to ask about, or the allotment to spend from."""
    if run_id is None:
        return subspace(session, table, where, inside)
    from dpstream.pipelines.session import names

    points = session.allotment(names.allotment(session.open_table.config, run_id))
    if inside is not None:
        points = points.where(_named(session, table, inside))
    return points.where(where) if where else points


def cells(session: "Session", by: tuple[str, ...]) -> "Mapping[str, Any]":
    """Return the ranges of ``--by``."""
    from dpstream.pipelines.session.sentences import ranges_of

    return ranges_of(session.open_table.space, by)
