"""What the commands of ``dpstream session`` share: options, errors in words, an open session."""

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
    "--analyst", default="analyst", show_default=True, help="Who asks; whose quota is charged."
)
WHERE = options(
    click.option("--where", default="", help="Predicate over dimensions and consumption."),
    click.option("--in", "inside", metavar="NAME", help="A subspace that was named by `select`."),
)
BUDGET = options(
    click.option("--epsilon", metavar="AMOUNT", help="Pay so much epsilon."),
    click.option("--rho", metavar="AMOUNT", help="Or so much rho (zCDP)."),
)
RUNNER = options(
    click.option(
        "--runner", help="Beam runner whose workers read and draw; default: this process."
    ),
    click.option("--parallelism", type=click.IntRange(1, 4096), default=1, help="Of its workers."),
    click.option("--beam-flag", multiple=True, help="Of the runner, as --beam-flag=--NAME=VALUE."),
)
#: Boxes of a refusal that are named.
_BOXES = 8


def budget_of(epsilon: str | None, rho: str | None) -> tuple[str, str]:
    """(amount, kind) of what is paid.

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
    """The session of a table; of a refusal it says which boxes lack budget.

    Args:
        looking: the command asks nothing: no file is made or written.
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
    """Which points lack budget, and what they have left at least."""
    from dpstream.pipelines.session import sentences

    rows = zip(decision.lacking[:_BOXES], decision.left[:_BOXES].tolist(), strict=True)
    lines = [
        f"{sentences.amount(left)} left where {sentences.box(space, box)}" for box, left in rows
    ]
    more = len(decision.lacking) - _BOXES
    return [*lines, f"... and {more:,} more boxes"] if more > 0 else lines


def as_builtins(space: "Space", decision: "Decision") -> dict[str, Any]:
    """A decision for machines."""
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
    """The points that a command names."""
    points = session.table if inside is None else session.where(_named(session, table, inside))
    return points.where(where) if where else points


def _named(session: "Session", table: Chosen, name: str) -> str:
    """The predicate of a name."""
    from dpstream.pipelines.session import names

    return names.predicate(session.open_table.config, name, table.flags)


def asker(
    session: "Session", table: Chosen, where: str, inside: str | None, run_id: str | None
) -> "Asker":
    """The points that are asked, or the allotment that is drawn on."""
    if run_id is None:
        return subspace(session, table, where, inside)
    from dpstream.pipelines.session import names

    points = session.allotment(names.allotment(session.open_table.config, run_id))
    if inside is not None:
        points = points.where(_named(session, table, inside))
    return points.where(where) if where else points


def cells(session: "Session", by: tuple[str, ...]) -> "Mapping[str, Any]":
    """The ranges of ``--by``."""
    from dpstream.pipelines.session.figures import ranges_of

    return ranges_of(session.open_table.space, by)
